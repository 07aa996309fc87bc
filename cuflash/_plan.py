"""`plan`: what a call would run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .calls.arguments import (
    Arguments,
    Options,
    backward_arrays,
    forward_arrays,
    split_dropout,
    split_scores,
    unpacked,
)
from .calls.arrays import as_mask, as_window, split_offset
from .calls.call import BackwardCall, ForwardCall
from .calls.packed import packed_queries
from .calls.run import find_call
from .keywords import explains_keywords
from .operands.checks import checked_truth
from .planning.plan import Plan
from .planning.problem import Device
from .scores.wanted import as_names

if TYPE_CHECKING:
    from .masks.block_mask import BlockMask
    from .scores.score_mod import ScoreMod
    from .typing import (
        Algo,
        AnyArray,
        Causal,
        Engine,
        Integer,
        Integers,
        Names,
        Real,
        ScoreFunction,
        Window,
    )  # fmt: skip

    AnyPair = tuple[AnyArray | None, AnyArray | None]
    AnyTriple = tuple[AnyArray | None, AnyArray | None, AnyArray | None]


@explains_keywords
def plan(
    q: AnyArray,
    k: AnyArray,
    v: AnyArray,
    *,
    algo: Algo | None = None,
    engine: Engine | None = None,
    causal: Causal = False,
    window: Window | None = None,
    mask: BlockMask | AnyArray | None = None,
    bias: AnyArray | Real | None = None,
    score_mod: ScoreMod | ScoreFunction | None = None,
    softcap: Real | None = None,
    alibi_slopes: AnyArray | Real | None = None,
    sinks: AnyArray | Real | None = None,
    q_lengths: Integers | None = None,
    kv_lengths: Integers | None = None,
    q_offset: Integers | None = None,
    scale: Real | None = None,
    enable_gqa: bool = False,
    dropout_p: Real = 0.0,
    seed: Integer | AnyArray | None = None,
    split_keys: int | None = None,
    page_table: AnyArray | None = None,
    cu_seqlens_q: Integers | None = None,
    cu_seqlens_k: Integers | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    out: AnyArray | AnyPair | AnyTriple | None = None,
    device: Device | None = None,
    backward: bool = False,
    deterministic: bool = True,
    wrt: Names = (),
) -> Plan:
    """What :func:`attention` or :func:`attention_backward` would run for these arguments.

    Parameters
    ----------
    q, k, v, algo, engine, causal, window, mask, bias, score_mod, softcap, alibi_slopes, sinks
        As in :func:`attention`.
    q_lengths, kv_lengths, q_offset, scale, enable_gqa, split_keys, page_table, dropout_p, seed
        As in :func:`attention`; `dropout_p` goes without `seed` here.
    cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
        As in :func:`attention_varlen`, for which the plan then is.
    out : array or tuple of array, optional
        As in :func:`attention`; with `backward`, as `grads_out` of :func:`attention_backward`.
    device : Device, optional
        Plan for this GPU instead of the arrays' own place. No GPU is needed for that.
    backward : bool
        Plan the gradients, with dout, out and lse contiguous and aligned to 16 bytes.
    deterministic, wrt
        As in :func:`attention_backward`.

    Returns
    -------
    Plan
        Printable: kernel, tiles, shared memory, grid, workspace, FLOPs, bytes moved; of a forward
        pass the estimated time and that of others, of gradients the order of sums; and why other
        rows of the table were rejected. `.source()` is the CUDA C that would be compiled.

    Examples
    --------
    >>> import numpy as np, cuflash
    >>> q = np.zeros((1, 8, 512, 64), np.float16)
    >>> h200 = cuflash.Device(90, "NVIDIA H200", multiprocessors=132)
    >>> p = cuflash.plan(q, q, q, causal=True, device=h200)
    >>> p.kernel, p.engine, p.grid == 8 * -(-512 // p.block_q)
    ('hopper_forward', 'wgmma', True)

    One query of each head, over many keys: blocks share the keys of a head.

    >>> k = np.zeros((1, 8, 65536, 64), np.float16)
    >>> p = cuflash.plan(q[:, :, :1], k, k, device=h200)
    >>> p.grid > 100, p.tile.span > 0, p.kernels[-1].name
    (True, True, 'merge_parts')

    Gradients, of which a block computes one tile of keys after the other:

    >>> q = np.zeros((8, 16, 512, 64), np.float16)
    >>> p = cuflash.plan(q, q, q, causal=True, device=h200, backward=True)
    >>> p.kernel, p.algo, p.grid
    ('hopper_backward', 'fa3', 132)
    """
    if not (device is None or isinstance(device, Device)):
        raise TypeError(f"device={device!r}: give a cuflash.Device, or None for the arrays' own")
    offset, offsets = split_offset(q_offset)
    if cu_seqlens_q is not None:
        queries: Any = packed_queries(
            q, k, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, page_table
        )
        q = queries
    elif not (cu_seqlens_k is None and max_seqlen_q is None and max_seqlen_k is None):
        raise ValueError("cu_seqlens_k, max_seqlen_q and max_seqlen_k go with cu_seqlens_q")
    q, starts, longest = unpacked(q)
    text, scored = split_scores(q, score_mod, bias, sinks, alibi_slopes)
    share, number, seeds = split_dropout(q, dropout_p, seed, needs_seed=False)
    scored |= starts | seeds
    options = Options(
        algo, engine, causal, as_window(window), offset, softcap, scale, enable_gqa, deterministic,
        split_keys, text, share, longest, as_names(wrt),
    )  # fmt: skip
    integers, visible = (q_lengths, kv_lengths, offsets), as_mask(mask)
    if checked_truth("backward", backward):
        if page_table is not None:
            raise ValueError("page_table goes with backward=False: pages have no gradients")
        arrays = backward_arrays({"q": q, "k": k, "v": v}, out, *integers, options.wrt) | scored
        arguments = Arguments(BackwardCall.operands, arrays, visible, seed=number)
        return find_call(BackwardCall, arguments, options, device).plan
    if options.wrt:
        raise ValueError("wrt goes with backward=True: a forward call has no gradients")
    arrays = forward_arrays(q, k, v, out, isinstance(out, tuple), *integers, page_table)
    arguments = Arguments(ForwardCall.operands, arrays | scored, visible, seed=number)
    return find_call(ForwardCall, arguments, options, device).plan
