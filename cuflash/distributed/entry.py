"""`attention` and its gradients on several ranks: what users call."""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal, TypedDict, TypeVar, overload

from . import all_to_all, gather, ring
from .task import Call, proposed

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from typing_extensions import Unpack

    from ..masks.block_mask import BlockMask
    from ..typing import Algo, AnyArray, Array, Causal, CupyArray, Engine, Integer, Real, Window
    from .communicator import Communicator
    from .shards import Layout
    from .task import Method

    ScalarQ = TypeVar("ScalarQ", bound=np.generic)
    ScalarK = TypeVar("ScalarK", bound=np.generic)
    ScalarV = TypeVar("ScalarV", bound=np.generic)
    Cupy = TypeVar("Cupy", bound=CupyArray)
    Row = NDArray[np.floating[Any]]  # lse of arrays of NumPy

    class RanksOptions(TypedDict, total=False):
        """Options of both functions; none has to be given."""

        layout: Layout
        method: Method | None
        algo: Algo | None
        engine: Engine | None
        causal: Causal
        window: Window | None
        mask: BlockMask | None
        softcap: Real | None
        scale: Real | None
        enable_gqa: bool
        dropout_p: Real
        seed: Integer | AnyArray | None


_METHODS: dict[str, ModuleType] = {"ring": ring, "ulysses": all_to_all, "gather": gather}


@overload
def attention(
    q: Cupy, k: Cupy, v: Cupy, *, comm: Communicator,
    return_lse: Literal[False] = False, **options: Unpack[RanksOptions],
) -> Cupy: ...  # fmt: skip
@overload
def attention(
    q: Cupy, k: Cupy, v: Cupy, *, comm: Communicator,
    return_lse: Literal[True], **options: Unpack[RanksOptions],
) -> tuple[Cupy, Cupy]: ...  # fmt: skip
@overload
def attention(
    q: NDArray[ScalarQ], k: NDArray[ScalarK], v: NDArray[ScalarV], *, comm: Communicator,
    return_lse: Literal[False] = False, **options: Unpack[RanksOptions],
) -> NDArray[ScalarQ | ScalarK | ScalarV]: ...  # fmt: skip
@overload
def attention(
    q: NDArray[ScalarQ], k: NDArray[ScalarK], v: NDArray[ScalarV], *, comm: Communicator,
    return_lse: Literal[True], **options: Unpack[RanksOptions],
) -> tuple[NDArray[ScalarQ | ScalarK | ScalarV], Row]: ...  # fmt: skip
@overload
def attention(
    q: AnyArray, k: AnyArray, v: AnyArray, *, comm: Communicator,
    return_lse: Literal[False] = False, **options: Unpack[RanksOptions],
) -> Array: ...  # fmt: skip
@overload
def attention(
    q: AnyArray, k: AnyArray, v: AnyArray, *, comm: Communicator,
    return_lse: Literal[True], **options: Unpack[RanksOptions],
) -> tuple[Array, Array]: ...  # fmt: skip
@overload
def attention(
    q: AnyArray, k: AnyArray, v: AnyArray, *, comm: Communicator,
    return_lse: bool, **options: Unpack[RanksOptions],
) -> Array | tuple[Array, Array]: ...  # fmt: skip
def attention(
    q: AnyArray,
    k: AnyArray,
    v: AnyArray,
    *,
    comm: Communicator,
    layout: Layout = "contiguous",
    method: Method | None = None,
    algo: Algo | None = None,
    engine: Engine | None = None,
    causal: Causal = False,
    window: Window | None = None,
    mask: BlockMask | None = None,
    softcap: Real | None = None,
    scale: Real | None = None,
    enable_gqa: bool = False,
    dropout_p: Real = 0.0,
    seed: Integer | AnyArray | None = None,
    return_lse: bool = False,
) -> Array | tuple[Array, Array]:
    """:func:`cuflash.attention` of a sequence of which each rank has a part.

    Parameters
    ----------
    q : array, shape (..., H, N / size, D)
        This rank's queries, as :func:`shard` gives them. NumPy arrays run on the CPU, CuPy arrays
        on the current device, which is theirs, and on its current stream.
    k, v : array, shapes (..., H, M / size, D) and (..., H, M / size, Dv)
        This rank's keys and values.
    comm : Communicator
        All of its ranks make the same call.
    layout : {"contiguous", "zigzag"}
        As of :func:`shard`. With causal masks "zigzag" gives all ranks as much work.
    method : {"ring", "ulysses", "gather"}, optional
        "ring": keys and values travel while blocks are worked on. "ulysses": heads are exchanged
        for sequence; the ranks must divide the heads of keys. "gather": each rank gets all keys and
        values at once. By default the one that :func:`plan` estimates to be the fastest.
    algo, engine, softcap, scale, enable_gqa
        As of :func:`cuflash.attention`.
    causal : bool or {"bottom_right", "top_left"}
    window : int or (int or None, int or None), optional
        As of :func:`cuflash.attention`, with positions in the whole sequence.
    mask : BlockMask, optional
        Of the whole sequence: each pair of shards takes its part. Parts are the faster the more of
        its blocks begin where spans do.
    dropout_p, seed
        As of :func:`cuflash.attention`. The same weights are dropped as on one device. Spans must
        be multiples of 32 queries and 128 keys.
    return_lse : bool
        Also return the natural logarithm of each row's sum of exponentials.

    Returns
    -------
    out : array, shape (..., H, N / size, Dv)
        The rows of the result that this rank has the queries of.
    lse : array, shape (..., H, N / size)
        Only with `return_lse`.

    Raises
    ------
    ValueError, TypeError, NotImplementedError
        On every rank, with the same text: for arguments that do not fit, or differ between ranks.
    RankError
        On every rank, where one fails, leaves or does not arrive within the communicator's time
        limit.

    Notes
    -----
    The result is within the bounds of one device's, and the same bits each time. Parts are computed
    in the result's type and summed in the type of sums.

    References
    ----------
    .. [1] H. Liu, M. Zaharia, P. Abbeel, "Ring Attention with Blockwise Transformers for
       Near-Infinite Context", 2023, arXiv:2310.01889.
    .. [2] S. A. Jacobs et al., "DeepSpeed Ulysses: System Optimizations for Enabling Training of
       Extreme Long Sequence Transformer Models", 2023, arXiv:2309.14509.

    Examples
    --------
    >>> import numpy as np, cuflash
    >>> from cuflash import distributed
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = rng.standard_normal((3, 4, 64, 16))
    >>> def rank(comm):
    ...     mine = [distributed.shard(x, comm) for x in (q, k, v)]
    ...     return distributed.attention(*mine, comm=comm, window=(9, 0), method="ring")
    >>> parts = distributed.LocalComm.run(4, rank)
    >>> whole = np.concatenate(parts, axis=-2)
    >>> np.allclose(whole, cuflash.attention(q, k, v, window=(9, 0)))
    True
    """
    options = {
        "algo": algo, "engine": engine, "softcap": softcap, "scale": scale,
        "enable_gqa": enable_gqa,
    }  # fmt: skip
    task = proposed(
        Call(
            "attention", comm, {"q": q, "k": k, "v": v}, layout, method, causal, window, mask,
            dropout_p, seed, options, {"return_lse": return_lse},
        )
    )  # fmt: skip
    with comm.working():
        out, lse = _METHODS[task.method].forward(comm, task, *task.arrays.values())
    return (out, lse) if return_lse else out


@overload
def attention_backward(
    dout: AnyArray, q: Cupy, k: Cupy, v: Cupy, out: AnyArray,
    lse: AnyArray, *, comm: Communicator, dlse: AnyArray | None = None,
    deterministic: bool = True, **options: Unpack[RanksOptions],
) -> tuple[Cupy, Cupy, Cupy]: ...  # fmt: skip
@overload
def attention_backward(
    dout: AnyArray, q: NDArray[ScalarQ], k: NDArray[ScalarK], v: NDArray[ScalarV], out: AnyArray,
    lse: AnyArray, *, comm: Communicator, dlse: AnyArray | None = None,
    deterministic: bool = True, **options: Unpack[RanksOptions],
) -> tuple[NDArray[ScalarQ], NDArray[ScalarK], NDArray[ScalarV]]: ...  # fmt: skip
@overload
def attention_backward(
    dout: AnyArray, q: AnyArray, k: AnyArray, v: AnyArray, out: AnyArray,
    lse: AnyArray, *, comm: Communicator, dlse: AnyArray | None = None,
    deterministic: bool = True, **options: Unpack[RanksOptions],
) -> tuple[Array, Array, Array]: ...  # fmt: skip
def attention_backward(
    dout: AnyArray,
    q: AnyArray,
    k: AnyArray,
    v: AnyArray,
    out: AnyArray,
    lse: AnyArray,
    *,
    comm: Communicator,
    layout: Layout = "contiguous",
    method: Method | None = None,
    algo: Algo | None = None,
    engine: Engine | None = None,
    causal: Causal = False,
    window: Window | None = None,
    mask: BlockMask | None = None,
    softcap: Real | None = None,
    scale: Real | None = None,
    enable_gqa: bool = False,
    dropout_p: Real = 0.0,
    seed: Integer | AnyArray | None = None,
    dlse: AnyArray | None = None,
    deterministic: bool = True,
) -> tuple[Array, Array, Array]:
    """:func:`cuflash.attention_backward` of a sequence of which each rank has a part.

    Parameters
    ----------
    dout, q, k, v, out, lse : array
        This rank's parts: `out` and `lse` as :func:`attention` has returned them.
    comm, layout, algo, engine, causal, window, mask, softcap, scale, enable_gqa, dropout_p, seed
        As given to :func:`attention`.
    method : {"ring", "ulysses", "gather"}, optional
        It need not be that of the forward call.
    dlse : array, shape (..., H, N / size), optional
        Gradient with respect to `lse`; on all ranks or on none.
    deterministic : bool
        As of :func:`cuflash.attention_backward`.

    Returns
    -------
    dq, dk, dv : array
        Of the shapes and types of this rank's q, k and v.

    Raises
    ------
    ValueError, TypeError, NotImplementedError, RankError
        As :func:`attention`.

    Notes
    -----
    Gradients of a pair of shards are computed in the operands' types and summed in the type of
    sums, in a fixed order.

    Examples
    --------
    >>> import numpy as np, cuflash
    >>> from cuflash import distributed
    >>> rng = np.random.default_rng(0)
    >>> q, k, v, dout = rng.standard_normal((4, 4, 64, 16))
    >>> def rank(comm):
    ...     *mine, own_dout = (distributed.shard(x, comm) for x in (q, k, v, dout))
    ...     options = {"comm": comm, "causal": True}
    ...     out, lse = distributed.attention(*mine, return_lse=True, **options)
    ...     return distributed.attention_backward(own_dout, *mine, out, lse, **options)
    >>> parts = distributed.LocalComm.run(2, rank)
    >>> _, vjp = cuflash.attention_vjp(q, k, v, causal=True)
    >>> all(np.allclose(np.concatenate(x, axis=-2), y) for x, y in zip(zip(*parts), vjp(dout)))
    True
    """
    arrays = {"q": q, "k": k, "v": v, "dout": dout, "out": out, "lse": lse, "dlse": dlse}
    options = {
        "algo": algo, "engine": engine, "softcap": softcap, "scale": scale,
        "enable_gqa": enable_gqa,
    }  # fmt: skip
    task = proposed(
        Call(
            "attention_backward", comm, arrays, layout, method, causal, window, mask, dropout_p,
            seed, options, {"deterministic": deterministic},
        )
    )  # fmt: skip
    with comm.working():
        run = _METHODS[task.method].backward
        return run(comm, task, task.arrays, bool(deterministic))  # type: ignore[no-any-return]
