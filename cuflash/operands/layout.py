"""Shapes and strides of one call: checked, broadcast by stride 0, and folded for the kernels.

Nothing here touches an array: an operand is a :class:`Spec`. So the outcome for one set of specs
and options can be kept and used again, and is tested without a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from .dtypes import result_dtype
from .spec import Spec

MAX_AXES = 6
LENGTHS = ("q_lengths", "kv_lengths", "q_offset")  # integers over the batch axes
MAX_LENGTH = 1 << 29  # positions and the sums of two of them stay within an int


class MaskLayout(NamedTuple):
    """Where the elements of a mask lie; strides count bytes.

    `axes` are its own leading axes without those that it broadcasts over, folded; the position in
    them is the number of a list.
    """

    lists: int
    axes: tuple[int, ...]
    axis_strides: tuple[int, ...]
    strides: tuple[int, int]  # of rows and columns


class PageLayout(NamedTuple):
    """Where pages of k and of v begin, and where their numbers stand; strides count elements."""

    pool_size: int
    k_stride: int
    v_stride: int
    table_strides: tuple[int, ...]  # of batch entries and of pages


class Packing(NamedTuple):
    """Sequences that lie one behind another in the rows of q, k and v."""

    sequences: int
    longest: tuple[int, int]  # the most queries and keys that one may have

    @classmethod
    def of(
        cls, sequences: int, tokens: tuple[int, int], longest: tuple[int | None, int | None]
    ) -> Packing:
        """As many as there are tokens where nothing says how long a sequence may be."""
        queries, keys = (n if most is None else most for n, most in zip(tokens, longest))
        return cls(sequences, (queries, keys))


class Layout(NamedTuple):
    """Where the rows of every operand lie.

    `leading` are the broadcast leading axes, grouped heads split in two; `strides` maps an
    operand's name to its element strides along them. `axes` are the same folded into few.
    `summed` says how many heads share one row of q, k and v; 1 where axes have no heads. Strides
    of a mask count its lists. Packed sequences are the batch, for which no operand has an axis;
    `entry_strides` are those of lengths, of the mask and of what else is `placed` from one sequence
    to the next.
    """

    out_shape: tuple[int, ...]
    lse_shape: tuple[int, ...]
    leading: tuple[int, ...]
    strides: dict[str, tuple[int, ...]]
    rows: dict[str, int]
    axes: tuple[int, ...]
    axis_strides: dict[str, tuple[int, ...]]
    summed: tuple[int, int, int]
    mask: MaskLayout | None = None
    pages: PageLayout | None = None
    packing: Packing | None = None
    entry_strides: Mapping[str, int] = {}

    @property
    def score_shape(self) -> tuple[int, ...]:
        """The shape (..., H, N, M) of scores, without M."""
        if self.packing is None:
            return self.lse_shape
        return (self.packing.sequences, *self.lse_shape[:-1], self.packing.longest[0])


def check_shapes(q: Spec, k: Spec, v: Spec) -> None:
    """Raise a ValueError where the last two axes of q, k and v do not fit together."""
    for name, spec in zip("qkv", (q, k, v)):
        if len(spec.shape) < 2:
            raise ValueError(
                f"{name} has shape {spec.shape}: it needs axes (..., length, head dim)"
            )
    if q.shape[-1] != k.shape[-1]:
        raise ValueError(
            f"q and k have head dims {q.shape[-1]} and {k.shape[-1]} (shapes {q.shape}, "
            f"{k.shape}): they must be equal"
        )
    if k.shape[-2] != v.shape[-2]:
        raise ValueError(
            f"k and v have lengths {k.shape[-2]} and {v.shape[-2]} (shapes {k.shape}, "
            f"{v.shape}): they must be equal{_hint_of_axes(q, k, v)}"
        )
    if min(q.shape[-1], v.shape[-1]) < 1:
        raise ValueError(f"head dims must be at least 1: q has {q.shape}, v has {v.shape}")
    if max(q.shape[-2], k.shape[-2]) > MAX_LENGTH:
        raise ValueError(f"lengths up to {MAX_LENGTH} are supported: {q.shape}, {k.shape}")


def unpaged(pool: Spec, page_table: Spec, is_packed: bool = False) -> Spec:
    """The keys of all batch entries as if an entry's pages lay one behind another.

    Strides are those within a page, and 0 from one batch entry to the next; packed sequences have
    no axis.
    """
    batch, pages = page_table.shape
    _, heads, page_size, columns = pool.shape
    shape, strides = (heads, pages * page_size, columns), pool.strides[1:]
    if is_packed:
        return Spec(shape, strides, pool.dtype)
    return Spec((batch, *shape), (0, *strides), pool.dtype)


def _heads_fit(q: tuple[int, ...], k: tuple[int, ...], v: tuple[int, ...]) -> bool:
    """Whether operands of these shapes fit, with grouped heads where they need that."""
    heads = max(k[-3], v[-3])
    if k[-2] != v[-2] or {k[-3], v[-3]} - {1, heads} or not heads or q[-3] % heads:
        return False
    try:
        np.broadcast_shapes(q[:-3], k[:-3], v[:-3])
    except ValueError:
        return False
    return q[-3] > 0


def _hint_of_axes(q: Spec, k: Spec, v: Spec) -> str:
    """How to pass operands that seem to have axes (..., length, heads, head dim), or nothing.

    They do if heads outnumber positions and they fit the other way round. One query may stand for
    any number.
    """
    given = {name: spec.shape for name, spec in zip("qkv", (q, k, v))}
    if min(map(len, given.values())) < 3:
        return ""
    turned = {name: (*x[:-3], x[-2], x[-3], x[-1]) for name, x in given.items()}
    seeming = [name for name, x in given.items() if x[-3] > x[-2]]
    for names in (seeming, ["q", "k", "v"] if seeming[-2:] == ["k", "v"] else []):
        if names and _heads_fit(*(turned[x] if x in names else given[x] for x in "qkv")):
            return (
                "; if axes are (..., length, heads, head dim), pass x.swapaxes(-2, -3) for "
                f"{', '.join(names)}"
            )
    return ""


def _group(q: Spec, k: Spec, v: Spec, enable_gqa: bool, given: str) -> int:
    """How many query heads share a key head; 1 where heads broadcast as in NumPy."""
    heads = [spec.shape[-3] if len(spec.shape) > 2 else 1 for spec in (q, k, v)]
    key_heads = max(heads[1:])
    if heads[0] == key_heads or 1 in (heads[0], key_heads) or 0 in heads:
        return 1
    if min(heads[1:]) not in (1, key_heads):
        raise ValueError(
            f"k and v have {heads[1]} and {heads[2]} heads: they must be equal ({given})"
            f"{_hint_of_axes(q, k, v)}"
        )
    if heads[0] % key_heads:
        raise ValueError(
            f"q has {heads[0]} heads and k, v have {key_heads} ({given}): give as many, one, or "
            f"with enable_gqa=True a number that divides those of q{_hint_of_axes(q, k, v)}"
        )
    if not enable_gqa:
        raise ValueError(
            f"q has {heads[0]} heads and k, v have {key_heads} ({given}): "
            f"pass enable_gqa=True for grouped heads{_hint_of_axes(q, k, v)}"
        )
    return heads[0] // key_heads


def _spread(spec: Spec, leading: tuple[int, ...], trailing: int) -> tuple[int, ...]:
    """Element strides along `leading` of an array with `trailing` axes behind them."""
    own = spec.element_strides()[: len(spec.shape) - trailing]
    return (0,) * (len(leading) - len(own)) + own


def padded_axes(spec: Spec, axes: int) -> tuple[int, ...]:
    """Element strides along so many axes, to the last of which an array broadcasts."""
    return (0,) * (axes - len(spec.shape)) + spec.element_strides()


def broadcasts(shape: tuple[int, ...], to: tuple[int, ...]) -> bool:
    """Whether an array of `shape` broadcasts to the shape `to`."""
    try:
        return np.broadcast_shapes(to, shape) == to
    except ValueError:
        return False


def batch_steps(name: str, spec: Spec, batch: tuple[int, ...], given: str) -> tuple[int, ...]:
    """Element strides of lengths or offsets along the batch axes."""
    if not broadcasts(spec.shape, batch):
        raise ValueError(
            f"{name} has shape {spec.shape} ({given}): it must broadcast to {batch}, the leading "
            "axes but the heads"
        )
    return _spread(spec, batch, 0)


def fold_axes(
    leading: Sequence[int], strides: dict[str, tuple[int, ...]]
) -> tuple[tuple[int, ...], dict[str, tuple[int, ...]]]:
    """Merge adjacent axes that every operand walks as one; drop those of size 1."""
    axes: list[tuple[int, list[int]]] = []
    columns = list(zip(*strides.values())) if leading else []
    for size, steps in zip(leading, columns):
        if size == 1:
            continue
        if axes and all(outer == inner * size for outer, inner in zip(axes[-1][1], steps)):
            axes[-1] = (axes[-1][0] * size, list(steps))
        else:
            axes.append((size, list(steps)))
    if len(axes) > MAX_AXES:
        raise NotImplementedError(
            f"leading axes {leading} fold into {len(axes)} of irregular stride; at most "
            f"{MAX_AXES} are supported: copy an operand to make it contiguous"
        )
    folded = {name: tuple(steps[i] for _, steps in axes) for i, name in enumerate(strides)}
    return tuple(size for size, _ in axes), folded


def _leading_axes(q: Spec, k: Spec, v: Spec, enable_gqa: bool) -> tuple[tuple[int, ...], int]:
    """What the leading axes broadcast to, and how many query heads share a key head."""
    given = f"q {q.shape}, k {k.shape}, v {v.shape}"
    group = _group(q, k, v, enable_gqa, given)
    shapes = [spec.shape[:-2] for spec in (q, k, v)]
    if group > 1:  # the heads of q count; those of k and v are a fraction of them
        shapes[1:] = [(*shape[:-1], 1) for shape in shapes[1:]]
    try:
        return np.broadcast_shapes(*shapes), group
    except ValueError:
        hint = _hint_of_axes(q, k, v)
        raise ValueError(f"leading axes do not broadcast: {given}{hint}") from None


def _grouped(name: str, steps: tuple[int, ...], group: int) -> tuple[int, ...]:
    """Strides along the leading axes with the heads split in (key heads, group)."""
    if group == 1:
        return steps
    if name in ("k", "v", "dk", "dv"):
        return (*steps, 0)  # a key head for the whole group
    return (*steps[:-1], steps[-1] * group, steps[-1])


def _hint_of_mask(given: tuple[int, ...], shape: tuple[int, ...]) -> str:
    """How to pass a mask that lacks axes between those of `shape`, (..., H, N, M), or nothing."""
    *batch, _, queries, keys = shape if len(shape) > 2 else (0, *shape)
    colons = ", ".join(":" * len(batch))
    if batch and given == (*batch, keys):
        return (
            f"; if it says which keys of a batch entry are valid, pass mask[{colons}, None, None] "
            "or kv_lengths="
        )
    if batch and given == (*batch, queries, keys):
        return f"; for the same in all heads its shape is {(*batch, 1, queries, keys)}"
    return ""


def _mask_layout(mask: Spec, shape: tuple[int, ...]) -> tuple[MaskLayout, tuple[int, ...]]:
    """The layout of a mask that broadcasts to `shape`, and its steps along the leading axes."""
    if not broadcasts(mask.shape, shape):
        hint = _hint_of_mask(mask.shape, shape)
        raise ValueError(f"mask has shape {mask.shape}: it must broadcast to {shape}{hint}")
    strides = _spread(mask, shape, 0)
    own = [size if step else 1 for size, step in zip(shape, strides[:-2])]
    steps = Spec.contiguous(own, np.bool_).element_strides()
    axes, folded = fold_axes(own, {"mask": strides[:-2]})
    return MaskLayout(math.prod(own), axes, folded["mask"], (strides[-2], strides[-1])), steps


def make_layout(
    q: Spec, k: Spec, v: Spec, out: Spec | None = None, lse: Spec | None = None, *,
    gradients: Mapping[str, Spec] | None = None, q_lengths: Spec | None = None,
    kv_lengths: Spec | None = None, q_offset: Spec | None = None, mask: Spec | None = None,
    page_table: Spec | None = None, enable_gqa: bool = False, packing: Packing | None = None,
    placed: Mapping[str, tuple[int, ...]] = MappingProxyType({}),
) -> Layout:  # fmt: skip
    """Broadcast the operands' leading axes.

    Parameters
    ----------
    q, k, v : Spec
    out, lse : Spec, optional
        Contiguous by default.
    gradients : dict of str to Spec, optional
        Of a backward pass: any of dout, dlse, dq, dk and dv; contiguous where not in it. The
        last three have the shapes of q, k and v, whose broadcast axes they sum over: there their
        strides are 0.
    q_lengths, kv_lengths, q_offset : Spec, optional
        Over the batch axes: all leading axes but the heads.
    mask : Spec, optional
        Of bool, broadcastable to (..., H, N, M).
    page_table : Spec, optional
        Then k and v are pools of pages.
    enable_gqa : bool
    packing : Packing, optional
        Then the operands' axes are (H, tokens, head dim), and the sequences are the batch.
    placed : mapping of str to tuple of int
        Element strides along the leading axes of what else lies there, by its name; with `packing`
        along the sequences first.

    Returns
    -------
    Layout

    Raises
    ------
    ValueError
        Where axes do not fit; the message names the caller's shapes.
    """
    pages = None
    if page_table is not None:
        k_stride, v_stride = (x.element_strides()[0] for x in (k, v))
        pages = PageLayout(k.shape[0], k_stride, v_stride, page_table.element_strides())
        k, v = (unpaged(x, page_table, packing is not None) for x in (k, v))
    check_shapes(q, k, v)
    whole, group = _leading_axes(q, k, v, enable_gqa)
    batch, heads = whole[:-1], whole[-1:]
    longest = q.shape[-2], k.shape[-2]
    entry_strides: dict[str, int] = {}
    if packing is not None:
        batch, longest = (packing.sequences,), packing.longest
    out_shape = (*whole, q.shape[-2], v.shape[-1])
    lse_shape = out_shape[:-1]
    matrix = Spec.contiguous(out_shape, result_dtype(q.dtype, k.dtype, v.dtype))
    row = Spec.contiguous(lse_shape, np.float32)
    specs = {"q": q, "k": k, "v": v, "out": out or matrix, "lse": lse or row}
    if gradients is not None:
        own = {f"d{name}": Spec.contiguous(specs[name].shape, matrix.dtype) for name in "qkv"}
        specs.update({"dout": matrix, "dlse": row, **own, **gradients})

    strides, rows = {}, {}
    for name, spec in specs.items():
        trailing = 1 if name in ("lse", "dlse") else 2
        strides[name] = _grouped(name, _spread(spec, whole, trailing), group)
        rows[name] = spec.element_strides()[-trailing]
    given = f"q {q.shape}, k {k.shape}, v {v.shape}"
    of_batch = {"q_lengths": q_lengths, "kv_lengths": kv_lengths, "q_offset": q_offset}
    for name, integers in of_batch.items():
        steps = (0,) * len(batch)
        if integers is not None:
            steps = batch_steps(name, integers, batch, given)
        if packing is not None:
            entry_strides[name], steps = steps[0], steps[1:]
        strides[name] = steps + (0,) * (len(heads) + (group > 1))
    for name, steps in placed.items():
        if packing is not None:
            entry_strides[name], steps = steps[0], steps[1:]
        strides[name] = _grouped(name, steps, group)
    mask_layout = None
    if mask is not None:
        mask_layout, steps = _mask_layout(mask, (*batch, *heads, *longest))
        if packing is not None:
            entry_strides["mask"], steps = steps[0], steps[1:]
        strides["mask"] = _grouped("mask", steps, group)
    if group > 1:
        heads = (heads[0] // group, group)
    leading = (*whole[:-1], *heads)
    axes, axis_strides = fold_axes(leading, strides)
    count = math.prod(leading)
    q_sum, k_sum, v_sum = (count // math.prod(x.shape[:-2]) if count else 1 for x in (q, k, v))
    summed = q_sum, k_sum, v_sum
    return Layout(
        *(out_shape, lse_shape, leading, strides, rows, axes, axis_strides, summed, mask_layout),
        *(pages, packing, entry_strides),
    )
