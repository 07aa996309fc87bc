"""`attention` and its gradients: what users call."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

from ._plan import plan
from .calls.arguments import (
    Arguments,
    Joined,
    Options,
    as_options,
    backward_arrays,
    forward_arrays,
    split_dropout,
    split_scores,
    unpacked,
)
from .calls.arrays import as_mask, as_window, split_offset
from .calls.call import BackwardCall, ForwardCall
from .calls.run import launch_module, run_call
from .keywords import explains_keywords
from .operands.checks import checked_truth
from .planning.plan import choice_for_gradients
from .scores.trace import as_score_mod
from .scores.wanted import as_names

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from typing_extensions import Unpack

    from .masks.block_mask import BlockMask
    from .scores.score_mod import ScoreMod
    from .typing import (
        Algo,
        AnyArray,
        Array,
        BackwardOptions,
        Causal,
        CupyArray,
        Engine,
        ForwardOptions,
        Integer,
        Integers,
        MaskOptions,
        Names,
        Real,
        ScoreFunction,
        Vjp,
        VjpOptions,
        Window,
    )  # fmt: skip

    Scalar = TypeVar("Scalar", bound=np.generic)
    ScalarQ = TypeVar("ScalarQ", bound=np.generic)
    ScalarK = TypeVar("ScalarK", bound=np.generic)
    ScalarV = TypeVar("ScalarV", bound=np.generic)
    Cupy = TypeVar("Cupy", bound=CupyArray)
    Out = TypeVar("Out", bound=AnyArray)
    Lse = TypeVar("Lse", bound=AnyArray)
    Row = NDArray[np.floating[Any]]  # lse of arrays of NumPy
    Pair = tuple[NDArray[Any] | None, NDArray[Any] | None]
    AnyPair = tuple[AnyArray | None, AnyArray | None]
    CupyPair = tuple[CupyArray | None, CupyArray | None]
    Triple = tuple[NDArray[Any] | None, NDArray[Any] | None, NDArray[Any] | None]
    CupyTriple = tuple[CupyArray | None, CupyArray | None, CupyArray | None]
    AnyTriple = tuple[AnyArray | None, AnyArray | None, AnyArray | None]


# Operands of CuPy, of NumPy, and of any library: then the result is of CuPy or NumPy, or `out`.
# CuPy is first for pyright's sake: where its arrays are Any the result is Any, too.
@overload
def attention(
    q: Cupy, k: Cupy, v: Cupy, *,
    return_lse: Literal[False] = False, out: Cupy | None = None, workspace: Cupy | None = None,
    **options: Unpack[ForwardOptions],
) -> Cupy: ...  # fmt: skip
@overload
def attention(
    q: Cupy, k: Cupy, v: Cupy, *,
    return_lse: Literal[True], out: CupyPair | None = None, workspace: Cupy | None = None,
    **options: Unpack[ForwardOptions],
) -> tuple[Cupy, Cupy]: ...  # fmt: skip
@overload
def attention(
    q: NDArray[Scalar], k: NDArray[Scalar], v: NDArray[Scalar], *,
    return_lse: Literal[False] = False, out: NDArray[Scalar] | None = None, workspace: None = None,
    **options: Unpack[ForwardOptions],
) -> NDArray[Scalar]: ...  # fmt: skip
@overload
def attention(
    q: NDArray[Scalar], k: NDArray[Scalar], v: NDArray[Scalar], *,
    return_lse: Literal[True], out: Pair | None = None, workspace: None = None,
    **options: Unpack[ForwardOptions],
) -> tuple[NDArray[Scalar], Row]: ...  # fmt: skip
@overload
def attention(
    q: AnyArray, k: AnyArray, v: AnyArray, *,
    return_lse: Literal[False] = False, out: None = None, workspace: CupyArray | None = None,
    **options: Unpack[ForwardOptions],
) -> Array: ...  # fmt: skip
@overload
def attention(
    q: AnyArray, k: AnyArray, v: AnyArray, *,
    return_lse: Literal[True], out: None = None, workspace: CupyArray | None = None,
    **options: Unpack[ForwardOptions],
) -> tuple[Array, Array]: ...  # fmt: skip
@overload
def attention(
    q: AnyArray, k: AnyArray, v: AnyArray, *,
    return_lse: Literal[False] = False, out: Out, workspace: CupyArray | None = None,
    **options: Unpack[ForwardOptions],
) -> Out: ...  # fmt: skip
@overload
def attention(
    q: AnyArray, k: AnyArray, v: AnyArray, *,
    return_lse: Literal[True], out: tuple[Out, Lse], workspace: CupyArray | None = None,
    **options: Unpack[ForwardOptions],
) -> tuple[Out, Lse]: ...  # fmt: skip
@overload
def attention(
    q: NDArray[Scalar], k: NDArray[Scalar], v: NDArray[Scalar], *,
    return_lse: bool, out: None = None, workspace: None = None,
    **options: Unpack[ForwardOptions],
) -> NDArray[Scalar] | tuple[NDArray[Scalar], Row]: ...  # fmt: skip
@overload
def attention(
    q: AnyArray, k: AnyArray, v: AnyArray, *,
    return_lse: bool, out: None = None, workspace: CupyArray | None = None,
    **options: Unpack[ForwardOptions],
) -> Array | tuple[Array, Array]: ...  # fmt: skip
@explains_keywords
def attention(
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
    return_lse: bool = False,
    out: AnyArray | AnyPair | None = None,
    workspace: CupyArray | None = None,
) -> AnyArray | tuple[AnyArray | None, ...]:
    """Exact attention, `softmax(scale * q @ k.T) @ v`, without the matrix of scores in memory.

    Parameters
    ----------
    q : array, shape (..., H, N, D)
        Queries: float16, bfloat16, float32 or float64. NumPy arrays run on the CPU, CuPy arrays
        on their device and on its current stream; what else speaks DLPack is taken without a
        copy. Any strides; a last axis that is not contiguous is copied and, in calls that take
        long, what tensor cores read slowly: rows off multiples of 16 bytes or in reverse order,
        head dims that are no multiples of 8. The plan says what, and the workspace has room.
    k : array, shape (..., H, M, D)
        Keys.
    v : array, shape (..., H, M, Dv)
        Values. The leading axes of q, k and v broadcast as in `numpy.matmul`, without copies.
    algo : {"fa1", "fa2", "fa3"}, optional
        FlashAttention-1 (key tiles outside, one thread block per head), FlashAttention-2 (one
        thread block per head and query tile) or, on Hopper, FlashAttention-3 (thread blocks that
        work on one query tile after the other). By default what is estimated to be the fastest:
        FlashAttention-3 or FlashAttention-2.
    engine : {"numpy", "simt", "mma", "wgmma"}, optional
        Tiled NumPy, plain FMA kernels, tensor-core kernels, or those of Hopper (half types and
        float32, head dims that are multiples of 8 up to 256, rows on multiples of 16 bytes). By
        default the fastest that serves.
    causal : bool or {"bottom_right", "top_left"}
        Query i sees key j iff `j <= i + shift`. True is the same as "bottom_right", where shift
        is the valid key length minus the valid query length, or `q_offset`; with "top_left" it
        is 0.
    window : int or (int or None, int or None), optional
        Query i sees keys from `i + shift - left` to `i + shift + right`, inclusive, with the same
        shift as of `causal`. None leaves a side open; one number stands for both sides.
    mask : BlockMask or array of bool, broadcastable to (..., H, N, M), optional
        True where a query may attend to a key. Tiles that show nothing are skipped: a
        :class:`BlockMask` knows them beforehand, those of an array are found in each call. What
        `causal`, `window` or lengths hide stays hidden.
    bias : array of float, broadcastable to (..., H, N, M), optional
        Added to the scores. -inf hides a key as `mask` does.
    score_mod : ScoreMod or function, optional
        Any other change of the scores: an expression, see :class:`ScoreMod`, or a function of
        (score, batch, head, q, k), with shift as sixth argument if it takes six, which is traced
        into such an expression. Arrays and numbers by names of its closure and its module, and of
        Python functions that it finds there, are captured and read at each call. `numpy.where` and
        the like are understood; `if` is not.
    softcap : float, optional
        Scores s become `softcap * tanh(s / softcap)`. From 2^-100 to 2^100; for float64 operands
        from 2^-1000 to 2^1000.
    alibi_slopes : array of float, shape (H,) or broadcastable to (..., H), optional
        Adds `-slope * abs(j - i - shift)` to the score of query i and key j, with the shift of
        `causal` (ALiBi [3]_).
    sinks : array of float, shape (H,) or broadcastable to (..., H), optional
        The score of one more key that all queries of a head see, and that has no value: a share of
        the weight goes nowhere. lse counts it, also in rows that see no key.
    q_lengths, kv_lengths : int or array of int, optional
        Valid queries and keys of each batch entry: shape of the leading axes but the heads, or
        broadcastable to it. Rows beyond are 0, keys beyond are hidden. Clamped to [0, N], [0, M].
        Beside CuPy arrays, numbers and NumPy arrays are copied to the device in each call.
    q_offset : int or array of int, optional
        The shift itself, for `causal` and for `window`: the position of query 0 among the keys,
        which may be negative or beyond them; 0 aligns at the top left. A number for all batch
        entries, or an array shaped as lengths are. Numbers go up to 2^29 either way, arrays are
        clamped to that. A number needs no array on the device, and another one no other kernel.
    scale : float, optional
        By default `1 / sqrt(D)`. 0, or from 2^-126 to 2^127; for float64 operands from 2^-1022 to
        2^1023.
    enable_gqa : bool
        Let q have a multiple of the heads of k and v: query head h uses key head
        `h // (Hq // Hk)`.
    dropout_p : float
        The share of softmax weights that are dropped, from 0 to 1, 1 excluded, to the nearest
        multiple of 2^-15; others are divided by `1 - dropout_p`. Which ones depends on the seed and
        on each weight's batch entry, head, query and key alone:
        :func:`cuflash.reference.dropout_keep` tells. lse counts all of them.
    seed : int or array of one uint64, optional
        From 0 to 2^64 - 1, another one for each step; with `dropout_p` above 0. An array of the
        operands' device is read when the kernels run, so that a captured graph can be given another
        seed.
    split_keys : int, optional
        Where the multiprocessors would not all have work otherwise, as with one query and many
        keys, several blocks work on the keys of one query, and their results are merged. By default
        the plan decides. 0: never. A multiple of 16: in spans of so many keys, counted from key 0.
        Kernels are then chosen without regard to the batch and the number of keys, so that a
        sequence's result has the same bits in any batch and any cache. Not in fa1; NumPy arrays
        are not split.
    page_table : array of int, shape (B, pages), optional
        Caches in pages: k has shape (P, H, page_size, D), v (P, H, page_size, Dv), page_size a
        multiple of 16, and key j of batch entry b is row `j % page_size` of page
        `page_table[b, j // page_size]`. M is `pages * page_size`; `kv_lengths` says how many keys
        there are, and entries that these do not need may hold anything. :func:`append_kv` writes
        such caches. No gradients.
    return_lse : bool
        Also return the natural logarithm of each row's sum of exponentials.
    out : array or (array, array), optional
        Where to write the result; with `return_lse` a pair. Exactly the result's shape and type,
        sharing no element with an input: views that interleave are fine.
    workspace : array, optional
        Device memory for the kernel's use, at least `plan(...).workspace_bytes`; taken from
        CuPy's pool by default. Not with NumPy arrays.

    Returns
    -------
    out : array, shape (..., H, N, Dv)
        Of the operands' promoted type. A row that sees no key is 0.
    lse : array, shape (..., H, N)
        Only with `return_lse`: float32, or float64 for float64. -inf for a row that sees no key.

    Raises
    ------
    ValueError
        If shapes, lengths, devices, `out` or an option's value do not fit, for `dropout_p` without
        `seed`, and, of NumPy arrays,
        for a key that is needed on a page that is none.
    TypeError
        For types that are not supported.
    NotImplementedError
        If no kernel serves; the message gives each one's reason.

    Notes
    -----
    With `x = scale * q.k`, scores are `score_mod(softcap * tanh(x / softcap)) + alibi + bias`. Keys
    are hidden behind all of these.

    Halves and float32 accumulate in float32, float64 in float64. The result is deterministic.
    Values in hidden keys, NaN and infinity included, do not reach it. A score of -infinity has
    weight 0, and a row of nothing else is 0, whatever values it sees; where a bias or `score_mod`
    makes it so, the key is hidden. `docs/numerics.md` has the
    order of operations and what becomes of numbers that are too large or too small.

    A call can be captured in a CUDA graph once one of its kind has run, with `out` and, where the
    plan shows one, `workspace` given. The graph then reads the operands and, of a
    :class:`BlockMask`, lists that live as long as the mask: keep both.

    References
    ----------
    .. [1] T. Dao et al., "FlashAttention: Fast and Memory-Efficient Exact Attention with
       IO-Awareness", 2022, arXiv:2205.14135.
    .. [2] T. Dao, "FlashAttention-2: Faster Attention with Better Parallelism and Work
       Partitioning", 2023, arXiv:2307.08691.
    .. [3] O. Press, N. A. Smith, M. Lewis, "Train Short, Test Long: Attention with Linear Biases
       Enables Input Length Extrapolation", 2022, arXiv:2108.12409.

    Examples
    --------
    >>> import numpy as np, cuflash
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = rng.standard_normal((3, 2, 8, 100, 64), dtype=np.float32)
    >>> out, lse = cuflash.attention(q, k, v, causal=True, return_lse=True)
    >>> out.shape, lse.shape
    ((2, 8, 100, 64), (2, 8, 100))

    The first query of a causal mask sees the first key alone:

    >>> np.allclose(out[:, :, 0], v[:, :, 0])
    True

    A step of decoding: one query, a cache of which 40 and 70 keys are valid:

    >>> cuflash.attention(q[:, :, :1], k, v, kv_lengths=np.array([40, 70])).shape
    (2, 8, 1, 64)

    The same cache in pages of 16 keys, here of a pool in which they lie one behind another:

    >>> padding = [(0, 0), (0, 0), (0, 12), (0, 0)]
    >>> pages = (np.pad(x, padding).reshape(2, 8, 7, 16, 64).swapaxes(1, 2) for x in (k, v))
    >>> k_pool, v_pool = (x.reshape(14, 8, 16, 64) for x in pages)
    >>> table, lengths = np.arange(14).reshape(2, 7), np.array([40, 70])
    >>> out = cuflash.attention(q[:, :, :1], k_pool, v_pool, page_table=table, kv_lengths=lengths)
    >>> np.allclose(out, cuflash.attention(q[:, :, :1], k, v, kv_lengths=lengths), atol=1e-6)
    True

    Queries chunk by chunk, as a long prompt is worked on:

    >>> whole = cuflash.attention(q, k, v, causal=True)
    >>> chunk = cuflash.attention(q[:, :, 40:60], k, v, causal=True, q_offset=40)
    >>> np.allclose(chunk, whole[:, :, 40:60], atol=1e-6)
    True

    Three documents in one sequence, each of which attends to itself:

    >>> documents = cuflash.BlockMask.documents(np.repeat([0, 1, 2], [48, 20, 32]), block_size=16)
    >>> out = cuflash.attention(q, k, v, mask=documents)
    >>> own = cuflash.attention(q[:, :, :48], k[:, :, :48], v[:, :, :48])
    >>> np.allclose(out[:, :, :48], own, atol=1e-6)
    True

    In training, a tenth of the weights dropped:

    >>> out = cuflash.attention(q, k, v, dropout_p=0.1, seed=7)
    >>> kept = cuflash.reference.dropout_keep(7, (2, 8, 100, 100), 0.1)
    >>> weights = np.exp(q @ k.mT / 8)
    >>> weights *= kept / 0.9 / weights.sum(axis=-1, keepdims=True)
    >>> np.allclose(out, weights @ v, atol=1e-6)
    True

    Scores of one's own, here those that a query and a key of different parity lose by:

    >>> out = cuflash.attention(
    ...     q, k, v, score_mod=lambda score, batch, head, q, k: score - (q % 2 != k % 2)
    ... )
    >>> odd = np.arange(100) % 2
    >>> bias = -(odd[:, None] != odd).astype(np.float32)
    >>> np.allclose(out, cuflash.attention(q, k, v, bias=bias), atol=1e-6)
    True
    """
    offset = offsets = None
    if q_offset is not None:
        offset, offsets = split_offset(q_offset)
    if window is not None:
        window = as_window(window)
    if mask is not None:
        mask = as_mask(mask)
    if return_lse is not False and return_lse is not True:
        return_lse = checked_truth("return_lse", return_lse)
    q, starts, longest = unpacked(q)
    arrays = forward_arrays(q, k, v, out, return_lse, q_lengths, kv_lengths, offsets, page_table)
    text, scored = split_scores(q, score_mod, bias, sinks, alibi_slopes)
    share, number, seeds = split_dropout(q, dropout_p, seed)
    if starts:
        arrays |= starts
    if scored or seeds:
        arrays |= scored | seeds
    asked = (
        algo, engine, causal, window, offset, softcap, scale, enable_gqa, True, split_keys, text,
        share, longest, (), type(out) is Joined,
    )  # fmt: skip
    arguments = Arguments(ForwardCall.operands, arrays, mask, workspace, number)
    results = run_call(ForwardCall, arguments, as_options(asked), 1 + return_lse)
    if not return_lse:
        return results[0] if out is None else out
    if not isinstance(out, tuple):
        return tuple(results)
    return tuple(x if mine is None else mine for x, mine in zip(results, out))


@overload
def attention_backward(
    dout: AnyArray, q: Cupy, k: Cupy, v: Cupy, out: AnyArray,
    lse: AnyArray, *, dlse: AnyArray | None = None, grads_out: CupyTriple | None = None,
    workspace: Cupy | None = None, **options: Unpack[BackwardOptions],
) -> tuple[Cupy, Cupy, Cupy]: ...  # fmt: skip
@overload
def attention_backward(
    dout: AnyArray, q: NDArray[ScalarQ], k: NDArray[ScalarK], v: NDArray[ScalarV], out: AnyArray,
    lse: AnyArray, *, dlse: AnyArray | None = None, grads_out: Triple | None = None,
    workspace: None = None, **options: Unpack[BackwardOptions],
) -> tuple[NDArray[ScalarQ], NDArray[ScalarK], NDArray[ScalarV]]: ...  # fmt: skip
@overload
def attention_backward(
    dout: AnyArray, q: AnyArray, k: AnyArray, v: AnyArray, out: AnyArray,
    lse: AnyArray, *, dlse: AnyArray | None = None, grads_out: None = None,
    workspace: CupyArray | None = None, **options: Unpack[BackwardOptions],
) -> tuple[Array, Array, Array]: ...  # fmt: skip
@overload
def attention_backward(
    dout: AnyArray, q: AnyArray, k: AnyArray, v: AnyArray, out: AnyArray,
    lse: AnyArray, *, dlse: AnyArray | None = None, grads_out: AnyTriple,
    workspace: CupyArray | None = None, **options: Unpack[BackwardOptions],
) -> tuple[AnyArray, AnyArray, AnyArray]: ...  # fmt: skip
@overload
def attention_backward(
    dout: AnyArray, q: AnyArray, k: AnyArray, v: AnyArray, out: AnyArray,
    lse: AnyArray, *, dlse: AnyArray | None = None, wrt: Names,
    grads_out: tuple[AnyArray | None, ...] | None = None, workspace: CupyArray | None = None,
    **options: Unpack[BackwardOptions],
) -> tuple[Array, ...]: ...  # fmt: skip
@explains_keywords
def attention_backward(
    dout: AnyArray,
    q: AnyArray,
    k: AnyArray,
    v: AnyArray,
    out: AnyArray,
    lse: AnyArray,
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
    dlse: AnyArray | None = None,
    deterministic: bool = True,
    wrt: Names = (),
    grads_out: tuple[AnyArray | None, ...] | None = None,
    workspace: CupyArray | None = None,
) -> tuple[AnyArray, ...]:
    r"""Gradients of :func:`attention` with respect to q, k and v, given that of its result.

    Give the same options as to the forward call. :func:`attention_vjp` does both calls.

    Parameters
    ----------
    dout : array, shape (..., H, N, Dv)
        Gradient of a loss with respect to `out`, in the shape of `out`: of its type or of a
        float type that converts to it without loss.
    q, k, v : array, shapes (..., H, N, D), (..., H, M, D) and (..., H, M, Dv)
        As given to :func:`attention`.
    out : array, shape (..., H, N, Dv)
        What :func:`attention` returned.
    lse : array, shape (..., H, N)
        What :func:`attention` returned with `return_lse`: float32, or float64 for float64.
    algo : {"fa1", "fa2", "fa3"}, optional
        FlashAttention-1 (one thread block per head), FlashAttention-2 (one per head and key tile)
        or FlashAttention-3 (blocks that persist). By default that of the first row that serves of
        a table in the order of measured speed. It need not be that of the forward call.
    engine : {"numpy", "simt", "mma", "wgmma"}, optional
        As in :func:`attention`; fa1 has no gradients on wgmma.
    causal, window, mask, bias, score_mod, softcap, alibi_slopes, sinks
        As in :func:`attention`.
    q_lengths, kv_lengths, q_offset, scale, enable_gqa, dropout_p, seed
        As given to :func:`attention`.
    dlse : array, shape (..., H, N), optional
        Gradient with respect to `lse`, of a float type that converts to that of `lse` without
        loss. By default the loss does not depend on `lse`.
    deterministic : bool
        The same bits each time. False allows sums over blocks in any order where that is faster.
    wrt : tuple of str
        Whose gradients are wanted beside those of q, k and v: "bias", "sinks", "alibi_slopes" and
        names of arrays of float that `score_mod` captures. On GPUs one of the latter that is read
        in several places, or at indices other than `batch`, `head`, `q` and `k` themselves, with
        as many elements as there are of these, needs `deterministic=False`.
    grads_out : tuple of array, optional
        Where to write dq, dk, dv and those of `wrt`; None for one that is to be new. Exactly the
        gradients' shapes and types, sharing no element with an input or each other: they may be
        views of one buffer.
    workspace : array, optional
        Device memory for the kernels' use, at least `plan(..., backward=True).workspace_bytes`;
        taken from CuPy's pool by default. Not with NumPy arrays.

    Returns
    -------
    dq, dk, dv : array
        Each of the shape and type of its operand. Where an operand is broadcast, or heads are
        grouped, its gradient is the sum over all that it served. Queries that see no key have
        gradient 0, and so have keys and values that no query sees.
    *others : array
        Those of `wrt`, in its order and likewise.

    Raises
    ------
    ValueError
        If shapes, lengths, devices, `grads_out` or an option's value do not fit.
    TypeError
        For types that are not supported or do not fit.
    NotImplementedError
        If no kernel serves; the message gives each one's reason.

    Notes
    -----
    The matrix of scores is not kept by the forward pass: each tile of it is computed again. With
    `x = scale q.k`, scores `s = softcap(x)` and `*` elementwise,

    .. math::

        P &= \exp(s - lse), & \delta &= \operatorname{rowsum}(dout * out) - dlse, \\
        dV &= (P * D)^T dout, & dP &= D * (dout\, V^T), \\
        dS &= P * (dP - \delta), & dX &= dS * softcap'(x), \\
        dQ &= scale\, dX\, K, & dK &= scale\, dX^T Q.

    D is what dropout multiplies P by: 0, or `1 / (1 - dropout_p)` where a weight is kept.
    dS is the gradient of a bias and, times the derivative of s, what other arrays get of it: sums
    over what they are broadcast over. A sink is a key without value: its gradient is the sum of
    :math:`-\exp(sink - lse)\, \delta` over its rows.

    P is 0 where a key is hidden, and in rows whose lse is -inf. What hidden keys and values hold,
    and rows of q, dout and out that see nothing, NaN and infinity included, do not reach a
    gradient. Such a row does see a sink, whose gradient takes the row's dout and out. `out` and
    `lse` are used as given. Halves and float32 accumulate in float32, float64 in float64.

    References
    ----------
    .. [1] T. Dao et al., "FlashAttention: Fast and Memory-Efficient Exact Attention with
       IO-Awareness", 2022, arXiv:2205.14135. Algorithm 4.
    .. [2] T. Dao, "FlashAttention-2: Faster Attention with Better Parallelism and Work
       Partitioning", 2023, arXiv:2307.08691. Algorithm 2.

    Examples
    --------
    >>> import numpy as np, cuflash
    >>> rng = np.random.default_rng(0)
    >>> q, k, v, dout = rng.standard_normal((4, 2, 8, 100, 64))
    >>> out, lse = cuflash.attention(q, k, v, causal=True, return_lse=True)
    >>> dq, dk, dv = cuflash.attention_backward(dout, q, k, v, out, lse, causal=True)
    >>> dq.shape, dk.shape, dv.shape
    ((2, 8, 100, 64), (2, 8, 100, 64), (2, 8, 100, 64))

    A small step along v changes the loss `sum(dout * out)` by as much as its gradient says:

    >>> step = 1e-3 * rng.standard_normal(v.shape)
    >>> change = np.sum(dout * (cuflash.attention(q, k, v + step, causal=True) - out))
    >>> np.allclose(change, np.sum(dv * step))
    True

    Grouped heads: the gradient of a key head sums over the query heads that share it:

    >>> k, v = k[:, :2], v[:, :2]
    >>> out, lse = cuflash.attention(q, k, v, enable_gqa=True, return_lse=True)
    >>> dq, dk, dv = cuflash.attention_backward(dout, q, k, v, out, lse, enable_gqa=True)
    >>> dq.shape, dk.shape
    ((2, 8, 100, 64), (2, 2, 100, 64))

    A bias that the batch shares has the sum of its gradients:

    >>> options = {"bias": rng.standard_normal((8, 100, 100)), "enable_gqa": True}
    >>> out, lse = cuflash.attention(q, k, v, return_lse=True, **options)
    >>> *_, dbias = cuflash.attention_backward(dout, q, k, v, out, lse, wrt=("bias",), **options)
    >>> dbias.shape
    (8, 100, 100)
    >>> np.allclose(dbias.sum(axis=-1), 0)  # what all keys gain changes no weight
    True
    """
    q, starts, longest = unpacked(q)
    inputs = {"dout": dout, "q": q, "k": k, "v": v, "out": out, "lse": lse}
    if dlse is not None:
        inputs["dlse"] = dlse
    offset, offsets = split_offset(q_offset)
    names = as_names(wrt)
    arrays = backward_arrays(inputs, grads_out, q_lengths, kv_lengths, offsets, names)
    text, scored = split_scores(q, score_mod, bias, sinks, alibi_slopes)
    share, number, seeds = split_dropout(q, dropout_p, seed)
    if starts:
        arrays |= starts
    if scored or seeds:
        arrays |= scored | seeds
    asked = (
        algo, engine, causal, as_window(window), offset, softcap, scale, enable_gqa, deterministic,
        None, text, share, longest, names, False,
    )  # fmt: skip
    arguments = Arguments(BackwardCall.operands, arrays, as_mask(mask), workspace, number, names)
    results = run_call(BackwardCall, arguments, as_options(asked), 3 + len(names))
    if grads_out is None:
        return tuple(results)
    return tuple(x if mine is None else mine for x, mine in zip(results, grads_out))


@overload
def attention_vjp(
    q: Cupy, k: Cupy, v: Cupy, *,
    return_lse: Literal[False] = False, **options: Unpack[VjpOptions],
) -> tuple[Cupy, Vjp[tuple[Cupy, Cupy, Cupy]]]: ...  # fmt: skip
@overload
def attention_vjp(
    q: Cupy, k: Cupy, v: Cupy, *,
    return_lse: Literal[True], **options: Unpack[VjpOptions],
) -> tuple[tuple[Cupy, Cupy], Vjp[tuple[Cupy, Cupy, Cupy]]]: ...  # fmt: skip
@overload
def attention_vjp(
    q: NDArray[ScalarQ], k: NDArray[ScalarK], v: NDArray[ScalarV], *,
    return_lse: Literal[False] = False, **options: Unpack[VjpOptions],
) -> tuple[
    NDArray[ScalarQ | ScalarK | ScalarV],
    Vjp[tuple[NDArray[ScalarQ], NDArray[ScalarK], NDArray[ScalarV]]],
]: ...  # fmt: skip
@overload
def attention_vjp(
    q: NDArray[ScalarQ], k: NDArray[ScalarK], v: NDArray[ScalarV], *,
    return_lse: Literal[True], **options: Unpack[VjpOptions],
) -> tuple[
    tuple[NDArray[ScalarQ | ScalarK | ScalarV], Row],
    Vjp[tuple[NDArray[ScalarQ], NDArray[ScalarK], NDArray[ScalarV]]],
]: ...  # fmt: skip
@overload
def attention_vjp(
    q: AnyArray, k: AnyArray, v: AnyArray, *,
    return_lse: Literal[False] = False, **options: Unpack[VjpOptions],
) -> tuple[Array, Vjp[tuple[Array, Array, Array]]]: ...  # fmt: skip
@overload
def attention_vjp(
    q: AnyArray, k: AnyArray, v: AnyArray, *,
    return_lse: Literal[True], **options: Unpack[VjpOptions],
) -> tuple[tuple[Array, Array], Vjp[tuple[Array, Array, Array]]]: ...  # fmt: skip
@overload
def attention_vjp(
    q: AnyArray, k: AnyArray, v: AnyArray, *,
    return_lse: bool, **options: Unpack[VjpOptions],
) -> tuple[Array | tuple[Array, Array], Vjp[tuple[Array, Array, Array]]]: ...  # fmt: skip
@overload
def attention_vjp(
    q: AnyArray, k: AnyArray, v: AnyArray, *,
    return_lse: bool = False, wrt: Names, **options: Unpack[VjpOptions],
) -> tuple[Array | tuple[Array, Array], Vjp[tuple[Array, ...]]]: ...  # fmt: skip
@explains_keywords
def attention_vjp(
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
    deterministic: bool = True,
    wrt: Names = (),
    return_lse: bool = False,
) -> tuple[Array | tuple[Array, Array], Vjp[tuple[Array, ...]]]:
    """:func:`attention`, and the function from its result's gradient to those of q, k and v.

    Parameters
    ----------
    q, k, v : array
        As in :func:`attention`.
    algo, engine : str, optional
        As in :func:`attention`, for the gradients as well. Those of fa1 on wgmma, which has none
        of its own, are those of the default kernel.
    causal, window, mask, bias, score_mod, softcap, alibi_slopes, sinks
        As in :func:`attention`.
    q_lengths, kv_lengths, q_offset, scale, enable_gqa, dropout_p, seed
        As in :func:`attention`.
    split_keys : int, optional
        As in :func:`attention`; gradients have nothing of it.
    deterministic, wrt
        As in :func:`attention_backward`.
    return_lse : bool
        Also return the natural logarithm of each row's sum of exponentials.

    Returns
    -------
    out : array, shape (..., H, N, Dv)
        As of :func:`attention`; with `return_lse` the pair (out, lse).
    vjp : function
        `vjp(dout, dlse=None)` returns (dq, dk, dv) and the gradients of `wrt`, as
        :func:`attention_backward` does. It holds the operands, mask, out and lse themselves, and
        the arrays that `score_mod` captures: do not change what they hold before it is called.
        Captured names may stand for something else by then. It may be called any number of times.

    Raises
    ------
    ValueError, TypeError, NotImplementedError
        As :func:`attention`; `vjp` as :func:`attention_backward`.

    Notes
    -----
    The name is short for vector-Jacobian product. See :func:`attention_backward` for the maths.

    References
    ----------
    .. [1] T. Dao et al., "FlashAttention: Fast and Memory-Efficient Exact Attention with
       IO-Awareness", 2022, arXiv:2205.14135.
    .. [2] T. Dao, "FlashAttention-2: Faster Attention with Better Parallelism and Work
       Partitioning", 2023, arXiv:2307.08691.

    Examples
    --------
    >>> import numpy as np, cuflash
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = rng.standard_normal((3, 2, 8, 100, 64), dtype=np.float32)
    >>> out, vjp = cuflash.attention_vjp(q, k, v, causal=True)
    >>> dq, dk, dv = vjp(np.ones_like(out))

    The weights of each query sum to 1, and so the gradient of the sum of all outputs with
    respect to the values sums to their number:

    >>> np.allclose(dv.sum(), out.size)
    True
    """
    wants_lse = checked_truth("return_lse", return_lse)
    score_mod = as_score_mod(score_mod)  # its captures are those of this call, for vjp as well
    window = as_window(window)  # a list may change
    deterministic = checked_truth("deterministic", deterministic)
    options: MaskOptions = {
        "causal": causal, "window": window, "mask": mask, "bias": bias, "score_mod": score_mod,
        "softcap": softcap, "alibi_slopes": alibi_slopes, "sinks": sinks, "q_lengths": q_lengths,
        "kv_lengths": kv_lengths, "q_offset": q_offset, "scale": scale, "enable_gqa": enable_gqa,
        "dropout_p": dropout_p, "seed": seed,
    }  # fmt: skip
    names = as_names(wrt)
    backward_algo, backward_engine = choice_for_gradients(algo, engine)

    def begin() -> None:
        """Compile the gradients' kernels beside those of the forward; vjp tells of errors."""
        with contextlib.suppress(ValueError, NotImplementedError):
            gradients = plan(
                q, k, v, backward=True, deterministic=deterministic, algo=backward_algo,
                engine=backward_engine, wrt=names, **options,
            )  # fmt: skip
            launch_module().begin_to_compile(gradients, arguments.device_id)

    offset, offsets = split_offset(q_offset)
    arrays = forward_arrays(q, k, v, None, True, q_lengths, kv_lengths, offsets)
    text, scored = split_scores(q, score_mod, bias, sinks, alibi_slopes, names)
    share, number, seeds = split_dropout(q, dropout_p, seed)
    arrays |= scored | seeds
    asked = Options(
        algo, engine, causal, window, offset, softcap, scale, enable_gqa,
        split_keys=split_keys, score_mod=text, dropout_p=share,
    )  # fmt: skip
    arguments = Arguments(ForwardCall.operands, arrays, as_mask(mask), seed=number)
    out, lse = run_call(ForwardCall, arguments, asked, 2, before_first=begin)

    def vjp(dout: AnyArray, dlse: AnyArray | None = None) -> tuple[Array, ...]:
        return attention_backward(
            dout, q, k, v, out, lse, dlse=dlse, deterministic=deterministic,
            algo=backward_algo, engine=backward_engine, wrt=names, **options,
        )  # fmt: skip

    return ((out, lse) if wants_lse else out), vjp
