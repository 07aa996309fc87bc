"""What becomes of a random problem once it is drawn: other arrays, axes, places and types.

Changes have draws of their own, so that a seed's problem without them stays the same.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TypeVar

import numpy as np
from cases import H200, BackwardCase, Case
from packed_cases import PackedCase
from random_draws import MAX_DIM, Draw

import cuflash
from cuflash import BlockMask, ScoreMod
from cuflash.operands.dtypes import HALF

AnyCase = TypeVar("AnyCase", Case, PackedCase)

MAPPABLE = "dense", "bnhd", "padded"  # layouts that wgmma reads
ANYHOW = *MAPPABLE, "odd", "offset", "reversed", "sparse", "columns"
WRITTEN = "out", "dq", "dk", "dv"
EXPRESSIONS = (
    "score * t[head] + where(q % 5 == k % 7, -inf, 1)",
    "where(shift < k - q, score, tanh(score) + u[batch, head])",
    "score + near[k - q + 20]", "score * rows[q] + abs(score)",
)  # fmt: skip
# Of arrays that have all leading axes, and of lengths, which have no heads.
AXES = {
    "q_lengths": 1, "kv_lengths": 1, "q_offset": 1, "sinks": 2, "alibi_slopes": 2, "bias": 4,
    "mask": 4,
}  # fmt: skip
MOST_WORK = 1 << 25  # products of wide heads, which take long in the emulator
MOST_HEADS = 12  # with more axes


def is_backward(case: Case | PackedCase) -> bool:
    return isinstance(case, BackwardCase) or getattr(case, "backward", False)


def is_served(case: Case | PackedCase) -> bool:
    """Whether its kernel exists: some sum over no other heads, or add nothing up in order."""
    asked = {"backward": is_backward(case), "device": H200}
    if isinstance(case, PackedCase):
        (*arrays, q_starts, k_starts), options = case.arguments()
        asked |= {"cu_seqlens_q": q_starts, "cu_seqlens_k": k_starts}
    else:
        arrays, options = case.operands(), case.call()
        if isinstance(case, BackwardCase):
            asked["out"] = case.grads_out()
    try:
        cuflash.plan(*arrays, **asked, **options)
    except NotImplementedError:
        return False
    return True


def changed(case: AnyCase, draw: Draw) -> AnyCase:
    """The case with those of all changes that are drawn and served."""
    kind = OF_PACKED if isinstance(case, PackedCase) else OF_BATCHES
    for change in kind:
        other = change(case, draw)
        if other is not case and is_served(other):
            case = other
    return case


def with_arrays_anyhow(case: Case, draw: Draw) -> Case:
    """With operands that the batch shares, arrays that lie in any way, and other scores."""
    batch, heads = case.leading
    changes: dict = {}
    if draw.chance(0.2):
        for name in draw.pick("q", "k", "v", "qk", "qv", "kv"):
            changes[name] = (1, *getattr(case, name)[1:])
    if draw.chance(0.15) and not case.poison:
        kinds = MAPPABLE if case.engine == "wgmma" else ANYHOW
        arrays = ("dout", "dq", "dk", "dv") if isinstance(case, BackwardCase) else ("out",)
        changes["layouts"] = {
            name: draw.pick(*kinds, *(() if name in WRITTEN else ("repeated",)))
            for name in ("q", "k", "v", *arrays)
        }
    if "score_mod" in case.options and draw.chance(0.8):
        arrays = {
            "t": draw.normal(heads), "u": draw.normal(batch, heads), "near": draw.normal(41),
            "rows": draw.normal(case.q[-2]),
        }  # fmt: skip
        text = draw.pick(*EXPRESSIONS)
        used = {name: x for name, x in arrays.items() if f"{name}[" in text}
        changes["options"] = case.options | {"score_mod": ScoreMod(text, **used)}
        if isinstance(case, BackwardCase) and draw.chance(0.5):
            changes["wrt"] = (*case.wrt, *used)
    return replace(case, **changes)


def wide_heads(case: Case | PackedCase, draw: Draw) -> tuple[int, int] | None:
    """Head dims beyond 256, for some forward cases of halves on mma."""
    if (case.algo, case.engine) != ("fa2", "mma") or case.dtype not in HALF or draw.chance(0.5):
        return None
    widths = [draw.pick(320, 512, draw.integer(257, 512)) for _ in range(2)]
    dim, value_dim = widths[0], draw.pick(*widths, draw.integer(1, 256))
    return draw.pick((dim, value_dim), (value_dim, dim))


def with_wide_heads(case: AnyCase, draw: Draw) -> AnyCase:
    """Forward cases of which some have heads beyond 256."""
    dims = wide_heads(case, draw)
    return case if not dims or is_backward(case) else _of_dims(case, dims)


def _of_dims(case: AnyCase, dims: tuple[int, int]) -> AnyCase:
    if isinstance(case, PackedCase):
        return replace(case, dims=dims)
    return replace(case, **{x: (*getattr(case, x)[:-1], dims[x == "v"]) for x in "qkv"})


def _dims(case: Case | PackedCase) -> tuple[int, int]:
    return case.dims if isinstance(case, PackedCase) else (case.q[-1], case.v[-1])


def _leading(case: Case | PackedCase) -> tuple[int, int]:
    """Batch entries or sequences, and heads."""
    if isinstance(case, PackedCase):
        return len(case.queries), case.heads[0]
    return case.leading


def _longest(case: Case | PackedCase) -> tuple[int, int]:
    """Queries and keys, the most that a sequence has."""
    if isinstance(case, PackedCase):
        return max(1, *case.queries), max(1, *case.keys)
    return case.q[-2], case.k[-2]


def _with(case: AnyCase, draw: Draw, **options) -> AnyCase:
    """With other options, whose gradients may be wanted as well."""
    more: dict = {"options": case.options | options}
    if isinstance(case, PackedCase):
        of_sequences = [x for x in options if np.ndim(options[x]) == AXES.get(x)]
        more["by_sequence"] = *(x for x in case.by_sequence if x not in options), *of_sequences
    wanted = [x for x in ("bias", "sinks", "alibi_slopes") if x in options and draw.chance(0.5)]
    if wanted and is_backward(case):
        wrt = case.options.get("wrt", ()) if isinstance(case, PackedCase) else case.wrt
        wrt = (*wrt, *(x for x in wanted if x not in wrt))
        if isinstance(case, PackedCase):
            more["options"]["wrt"] = wrt
        else:
            more["wrt"] = wrt
    return replace(case, **more)


def _in_planes(case: AnyCase, draw: Draw) -> AnyCase:
    """Gradients of float32 on mma, whose numbers are two halves, of heads that these serve."""
    dim, other = (draw.pick(64, 32, 4 * draw.integer(1, 16)) for _ in range(2))
    asked = is_backward(case) and (case.algo, case.engine) == ("fa2", "mma") and case.dtype in HALF
    if not draw.chance(0.3) or not asked:
        return case
    case = replace(_of_dims(case, (dim, draw.pick(dim, other))), dtype="float32")
    return case if isinstance(case, PackedCase) else replace(case, layouts={})


def _with_wide_gradients(case: AnyCase, draw: Draw) -> AnyCase:
    """Heads beyond 256 of gradients in halves on mma."""
    dim = draw.pick(264, 320, 512, draw.integer(257, 512))
    dims = draw.pick((dim, dim), (dim, draw.integer(1, 512)), (draw.integer(1, 512), dim))
    asked = is_backward(case) and case.engine == "mma" and case.dtype in HALF
    if not draw.chance(0.3) or not asked:
        return case
    work = math.prod((*_leading(case), *_longest(case), sum(dims)))
    return case if work > MOST_WORK else _of_dims(case, dims)


def _with_sinks(case: AnyCase, draw: Draw) -> AnyCase:
    """A sink for each head of each batch entry or sequence, or one for all of its heads."""
    count, heads = _leading(case)
    sinks = 2 * draw.normal(*draw.pick((count, heads), (count, heads), (count, 1), (1, heads)))
    return _with(case, draw, sinks=sinks) if draw.chance(0.12) else case


def _with_one_row(case: AnyCase, draw: Draw) -> AnyCase:
    """A bias, or a mask, that has one row for all queries."""
    count, heads = _leading(case)
    queries, keys = _longest(case)
    bias = draw.normal(
        *draw.pick((count, 1), (1, heads), (count, heads), (1, 1)), 1, keys,
        dtype=draw.pick(case.dtype, case.dtype, "float32"),
    )  # fmt: skip
    bias[draw.rng.random(bias.shape) < draw.pick(0, 0.1)] = -np.inf
    mask = draw.rng.random((count, draw.pick(1, 1, heads), 1, keys)) < 0.7
    is_bias, more = draw.chance(0.6), {}
    paged = "page_table" in case.options
    if not draw.chance(0.15) or paged or ("bias" if is_bias else "mask") in case.options:
        return case
    if isinstance(case, PackedCase):
        more = {"max_seqlen_q": queries, "max_seqlen_k": keys}
    elif is_bias and case.poison == "visible":
        case = replace(case, poison="")
    return _with(case, draw, **more, **({"bias": bias} if is_bias else {"mask": mask}))


def _with_offsets(case: PackedCase, draw: Draw) -> PackedCase:
    """Positions of queries among keys."""
    queries, keys = _longest(case)
    places = draw.rng.integers(-queries, keys + 5, len(case.queries))
    offset = draw.pick(int(places[0]), places, places.astype(np.int32))
    if not draw.chance(0.15) or case.options.get("causal") == "top_left":
        return case
    return _with(case, draw, q_offset=offset)


def _with_dropout(case: PackedCase, draw: Draw) -> PackedCase:
    options = {"dropout_p": draw.pick(0.1, 0.5), "seed": draw.integer(0, 1 << 40)}
    return _with(case, draw, **options) if draw.chance(0.25) else case


def _with_split_padded_rows(case: Case, draw: Draw) -> Case:
    """Split keys of odd head dims, whose rows begin on multiples of 16 bytes."""
    dims = 2 * draw.integer(0, 63) + 1, draw.pick(64, 2 * draw.integer(0, 63) + 1)
    asked = not is_backward(case) and (case.algo, case.engine) == ("fa2", "mma")
    if not draw.chance(0.3) or not asked:
        return case
    options = case.options | {"split_keys": draw.pick(16, 48, 64, 128)}
    layouts = dict.fromkeys(("q", "k", "v", *draw.pick(("out",), ())), "padded")
    return replace(_of_dims(case, dims), options=options, layouts=layouts)


def _with_axes(case: Case, draw: Draw) -> Case:
    """Operands with fewer leading axes, or one more."""
    if not draw.chance(0.15):
        return case
    if case.leading[0] == 1 and draw.chance(0.7):
        fewer = _with_fewer_axes(case)
        return _with_fewer_axes(fewer) if fewer.leading == (1,) and draw.chance(0.5) else fewer
    return _with_more_axes(case, draw)


def _with_fewer_axes(case: Case) -> Case:
    """Without the first leading axis, which is 1."""
    count, options = len(case.leading), dict(case.options)
    for name, of_all in AXES.items():
        axes, x = of_all - (2 - count), options.get(name)
        if isinstance(x, BlockMask):
            if x.to_dense().ndim == axes:
                return case
        elif np.ndim(x) and np.ndim(x) == axes:
            options[name] = x.reshape(x.shape[1:])
    shapes = {name: getattr(case, name)[1:] for name in "qkv"}
    return replace(case, options=options, **shapes)


def _with_more_axes(case: Case, draw: Draw) -> Case:
    """With an axis of the batch that some operands share, and some options."""
    batch, heads = case.leading
    size, options = draw.pick(1, 2, 2, 3), dict(case.options)
    if size * batch * heads > MOST_HEADS:
        return case
    shapes = {}
    for name in "qkv":
        shape = getattr(case, name)
        shared = (1, *shape[1:]) if draw.chance(0.3) else shape
        # What is hidden of an array is known where it has all axes.
        shapes[name] = draw.pick(
            (size, *shape), (size, *shared), (1, *shape), (1, *shape) if case.poison else shape
        )
    if np.broadcast_shapes(*(x[:-3] for x in shapes.values())) != (size, batch):
        shapes["q"] = (size, batch, *case.q[1:])
    for name, axes in AXES.items():
        x = options.get(name)
        if isinstance(x, np.ndarray) and x.ndim == axes and draw.chance(0.6):
            other = x // 2 if x.dtype.kind in "iu" else x[..., ::-1]
            options[name] = np.stack([x, other, x][: draw.pick(1, size)])
    return replace(case, options=options, **shapes)


def _with_orders(case: Case, draw: Draw) -> Case:
    """Axes in any order in memory; what wgmma reads keeps the columns of a row together."""
    axes = {name: len(getattr(case, name)) for name in "qkv"}
    axes |= dict.fromkeys(("out", "dout"), len(case.leading) + 2)
    axes |= {f"d{name}": axes[name] for name in "qkv"}
    names = ("dout", "dq", "dk", "dv") if is_backward(case) else ("out",)
    layouts = {}
    for name in ("q", "k", "v", *draw.pick(names, ())):
        letters = list("abhnd"[-axes[name] :])
        rows = letters[:-1] if case.engine == "wgmma" or draw.chance(0.7) else letters
        order = [str(x) for x in draw.rng.permutation(rows)]
        layouts[name] = "".join([*order, *letters[len(rows) :]])
    return replace(case, layouts=layouts) if draw.chance(0.15) else case


def _with_copies(case: AnyCase, draw: Draw) -> AnyCase:
    """Head dims that tensor cores do not take, or rows that lie off, where nobody chose an engine:
    copies stand for the operands.
    """
    most = MAX_DIM.get(case.engine, {}).get(case.dtype, 128)
    dim, other = draw.integer(1, most), draw.integer(1, most)
    dims = draw.pick((dim, dim), (dim, 64), (64, dim), (dim, other), _dims(case))
    lies = {name: draw.pick("odd", "offset", "reversed", "columns", "dense") for name in "qkv"}
    asked = case.engine != "simt" and not {"split_keys", "page_table"} & case.options.keys()
    if not draw.chance(0.12) or not asked or max(_dims(case)) > 256:
        return case
    case = replace(_of_dims(case, dims), copies=True)
    return case if isinstance(case, PackedCase) else replace(case, layouts=case.layouts | lies)


OF_BATCHES = (
    _in_planes, _with_wide_gradients, _with_sinks, _with_one_row, _with_split_padded_rows,
    _with_axes, _with_orders, _with_copies,
)  # fmt: skip
OF_PACKED = (
    _in_planes, _with_wide_gradients, _with_sinks, _with_one_row, _with_offsets, _with_dropout,
    _with_copies,
)  # fmt: skip
