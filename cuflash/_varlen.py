"""`attention_varlen` and its gradients: sequences of different lengths, one behind another."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

from ._attention import attention, attention_backward, attention_vjp
from .calls.arguments import split_scores
from .calls.arrays import as_window
from .calls.packed import packed_queries
from .keywords import takes_options_of
from .operands.checks import checked_truth
from .planning.plan import choice_for_gradients
from .scores.trace import as_score_mod
from .scores.wanted import as_names

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from typing_extensions import Unpack

    from .typing import (
        AnyArray,
        Array,
        BackwardOptions,
        CupyArray,
        ForwardOptions,
        Integers,
        Vjp,
        VjpOptions,
    )

    Scalar = TypeVar("Scalar", bound=np.generic)
    ScalarQ = TypeVar("ScalarQ", bound=np.generic)
    ScalarK = TypeVar("ScalarK", bound=np.generic)
    ScalarV = TypeVar("ScalarV", bound=np.generic)
    Cupy = TypeVar("Cupy", bound=CupyArray)
    Row = NDArray[np.floating[Any]]  # lse of arrays of NumPy
    Triple = tuple[NDArray[Scalar], NDArray[Scalar], NDArray[Scalar]]

# Their types know nothing of packed sequences, and keywords have been looked at.
_attention: Any = inspect.unwrap(attention)
_backward: Any = inspect.unwrap(attention_backward)
_FORWARD, _BACKWARD = (frozenset(inspect.signature(x).parameters) for x in (_attention, _backward))


# As those of attention: arrays of CuPy, of NumPy, and of any library.
@overload
def attention_varlen(
    q: Cupy, k: Cupy, v: Cupy, cu_seqlens_q: Integers,
    cu_seqlens_k: Integers | None = None, *, max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    return_lse: Literal[False] = False, out: Any = None, workspace: CupyArray | None = None,
    **options: Unpack[ForwardOptions],
) -> Cupy: ...  # fmt: skip
@overload
def attention_varlen(
    q: Cupy, k: Cupy, v: Cupy, cu_seqlens_q: Integers,
    cu_seqlens_k: Integers | None = None, *, max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    return_lse: Literal[True], out: Any = None, workspace: CupyArray | None = None,
    **options: Unpack[ForwardOptions],
) -> tuple[Cupy, Cupy]: ...  # fmt: skip
@overload
def attention_varlen(
    q: NDArray[Scalar], k: NDArray[Scalar], v: NDArray[Scalar], cu_seqlens_q: Integers,
    cu_seqlens_k: Integers | None = None, *, max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    return_lse: Literal[False] = False, out: Any = None, workspace: CupyArray | None = None,
    **options: Unpack[ForwardOptions],
) -> NDArray[Scalar]: ...  # fmt: skip
@overload
def attention_varlen(
    q: NDArray[Scalar], k: NDArray[Scalar], v: NDArray[Scalar], cu_seqlens_q: Integers,
    cu_seqlens_k: Integers | None = None, *, max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    return_lse: Literal[True], out: Any = None, workspace: CupyArray | None = None,
    **options: Unpack[ForwardOptions],
) -> tuple[NDArray[Scalar], Row]: ...  # fmt: skip
@overload
def attention_varlen(
    q: AnyArray, k: AnyArray, v: AnyArray, cu_seqlens_q: Integers,
    cu_seqlens_k: Integers | None = None, *, max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    return_lse: Literal[False] = False, out: Any = None, workspace: CupyArray | None = None,
    **options: Unpack[ForwardOptions],
) -> Array: ...  # fmt: skip
@overload
def attention_varlen(
    q: AnyArray, k: AnyArray, v: AnyArray, cu_seqlens_q: Integers,
    cu_seqlens_k: Integers | None = None, *, max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    return_lse: Literal[True], out: Any = None, workspace: CupyArray | None = None,
    **options: Unpack[ForwardOptions],
) -> tuple[Array, Array]: ...  # fmt: skip
@overload
def attention_varlen(
    q: AnyArray, k: AnyArray, v: AnyArray, cu_seqlens_q: Integers,
    cu_seqlens_k: Integers | None = None, *, max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    return_lse: bool, out: Any = None, workspace: CupyArray | None = None,
    **options: Unpack[ForwardOptions],
) -> Array | tuple[Array, Array]: ...  # fmt: skip
@takes_options_of(attention)
def attention_varlen(
    q: AnyArray,
    k: AnyArray,
    v: AnyArray,
    cu_seqlens_q: Integers,
    cu_seqlens_k: Integers | None = None,
    *,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    return_lse: bool = False,
    out: Any = None,
    workspace: CupyArray | None = None,
    **options: Unpack[ForwardOptions],
) -> Any:
    """:func:`attention` of sequences that lie one behind another, each of which attends to itself.

    Parameters
    ----------
    q : array, shape (Tq, H, D)
        Queries of all sequences: the tokens of one, then those of the next. Arrays and strides as
        in :func:`attention`; views of a (T, 3, H, D) array are fine.
    k : array, shape (Tk, H, D)
        Keys of all sequences.
    v : array, shape (Tk, H, Dv)
        Values of all sequences.
    cu_seqlens_q : array of int, shape (B + 1,)
        Sequence b has queries from `cu_seqlens_q[b]` to, and without, `cu_seqlens_q[b + 1]`. On the
        device or on the host; one of the host is copied to the device in each call. Sequences may
        be empty.
    cu_seqlens_k : array of int, shape (B + 1,), optional
        The same for keys and values. By default that of the queries.
    max_seqlen_q, max_seqlen_k : int, optional
        The most queries and keys of a sequence. `mask` and `bias` broadcast to (B, H, max_seqlen_q,
        max_seqlen_k); beside these they only say how much work to plan for. By default Tq and Tk;
        max_seqlen_k, too, is that of the queries where `cu_seqlens_k` is.
    return_lse : bool
        Also return the natural logarithm of each row's sum of exponentials.
    out : array or (array, array), optional
        Where to write the result; with `return_lse` a pair.
    workspace : array, optional
        As in :func:`attention`, at least `plan(..., cu_seqlens_q=...).workspace_bytes`.
    **options
        As of :func:`attention`. Positions are counted in each sequence, for `causal`, `window`,
        `mask`, `bias`, `score_mod` and ALiBi. `q_lengths`, `kv_lengths` and `q_offset` have a
        number for each sequence, and lengths count in it. The shift of `causal` is a sequence's
        number of valid keys minus that of its valid queries. With `page_table`, of shape (B,
        pages), k and v are pools of pages, and sequence b has `kv_lengths[b]` keys.

    Returns
    -------
    out : array, shape (Tq, H, Dv)
        Tokens of no sequence are 0.
    lse : array, shape (H, Tq)
        Only with `return_lse`. -inf for tokens of no sequence.

    Raises
    ------
    ValueError, TypeError, NotImplementedError
        As :func:`attention`. A ValueError, too, for offsets on the host that do not ascend or lie
        outside the tokens.

    Notes
    -----
    Nothing is read back from the device. Offsets there that do not ascend, or lie outside the
    tokens, or make a sequence longer than it may be, give wrong results, but nothing outside the
    arrays is read or written. The result of sequences of one length is that of the batch, bit for
    bit, where the kernels' tiles are the same.

    Examples
    --------
    Three sequences of 2, 0 and 3 tokens:

    >>> import numpy as np, cuflash
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = rng.standard_normal((3, 5, 8, 64), dtype=np.float32)
    >>> out = cuflash.attention_varlen(q, k, v, [0, 2, 2, 5], causal=True)
    >>> out.shape
    (5, 8, 64)

    The last one by itself, with heads ahead of tokens as :func:`attention` wants them:

    >>> last = (x[2:].swapaxes(0, 1) for x in (q, k, v))
    >>> np.allclose(out[2:].swapaxes(0, 1), cuflash.attention(*last, causal=True), atol=1e-6)
    True
    """
    queries = packed_queries(
        q, k, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, options.get("page_table")
    )
    return _attention(queries, k, v, return_lse=return_lse, out=out, workspace=workspace, **options)


@overload
def attention_varlen_backward(
    dout: AnyArray, q: Cupy, k: Cupy, v: Cupy, out: AnyArray,
    lse: AnyArray, cu_seqlens_q: Integers,
    cu_seqlens_k: Integers | None = None, *, max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    dlse: AnyArray | None = None, grads_out: Any = None, workspace: CupyArray | None = None,
    **options: Unpack[BackwardOptions],
) -> tuple[Cupy, Cupy, Cupy]: ...  # fmt: skip
@overload
def attention_varlen_backward(
    dout: AnyArray, q: NDArray[ScalarQ], k: NDArray[ScalarK], v: NDArray[ScalarV], out: AnyArray,
    lse: AnyArray, cu_seqlens_q: Integers,
    cu_seqlens_k: Integers | None = None, *, max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    dlse: AnyArray | None = None, grads_out: Any = None, workspace: CupyArray | None = None,
    **options: Unpack[BackwardOptions],
) -> tuple[NDArray[ScalarQ], NDArray[ScalarK], NDArray[ScalarV]]: ...  # fmt: skip
@overload
def attention_varlen_backward(
    dout: AnyArray, q: AnyArray, k: AnyArray, v: AnyArray, out: AnyArray,
    lse: AnyArray, cu_seqlens_q: Integers,
    cu_seqlens_k: Integers | None = None, *, max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    dlse: AnyArray | None = None, grads_out: Any = None, workspace: CupyArray | None = None,
    **options: Unpack[BackwardOptions],
) -> tuple[Array, Array, Array]: ...  # fmt: skip
@takes_options_of(attention_backward)
def attention_varlen_backward(
    dout: AnyArray,
    q: AnyArray,
    k: AnyArray,
    v: AnyArray,
    out: AnyArray,
    lse: AnyArray,
    cu_seqlens_q: Integers,
    cu_seqlens_k: Integers | None = None,
    *,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    dlse: AnyArray | None = None,
    grads_out: Any = None,
    workspace: CupyArray | None = None,
    **options: Unpack[BackwardOptions],
) -> Any:
    """Gradients of :func:`attention_varlen` with respect to q, k and v, given that of its result.

    Give the same options as to the forward call. :func:`attention_varlen_vjp` does both calls.

    Parameters
    ----------
    dout : array, shape (Tq, H, Dv)
        Gradient of a loss with respect to `out`, of its type or of a float type that converts to it
        without loss.
    q, k, v : array, shapes (Tq, H, D), (Tk, H, D) and (Tk, H, Dv)
        As given to :func:`attention_varlen`.
    out : array, shape (Tq, H, Dv)
        What :func:`attention_varlen` returned.
    lse : array, shape (H, Tq)
        What :func:`attention_varlen` returned with `return_lse`.
    cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
        As given to :func:`attention_varlen`.
    dlse : array, shape (H, Tq), optional
        Gradient with respect to `lse`. By default the loss does not depend on `lse`.
    grads_out : (array, array, array, ...), optional
        Where to write dq, dk, dv and those of `wrt`; None for one that is to be new.
    workspace : array, optional
        As in :func:`attention_backward`, at least `plan(..., cu_seqlens_q=...,
        backward=True).workspace_bytes`.
    **options
        As of :func:`attention_backward`, with positions counted in each sequence. Gradients of
        `wrt` take time and memory by `max_seqlen_q` and `max_seqlen_k`: give these with it.

    Returns
    -------
    dq, dk, dv : array
        Each of the shape and type of its operand; 0 for tokens of no sequence. Behind them come the
        gradients of `wrt`, in its order.

    Raises
    ------
    ValueError, TypeError, NotImplementedError
        As :func:`attention_varlen` and :func:`attention_backward`.

    Examples
    --------
    >>> import numpy as np, cuflash
    >>> rng = np.random.default_rng(0)
    >>> q, k, v, dout = rng.standard_normal((4, 5, 8, 64))
    >>> starts = np.array([0, 2, 5])
    >>> out, lse = cuflash.attention_varlen(q, k, v, starts, return_lse=True)
    >>> dq, dk, dv = cuflash.attention_varlen_backward(dout, q, k, v, out, lse, starts)

    The weights of a query sum to 1, and so dv sums to what dout does, in each sequence:

    >>> np.allclose(dv[:2].sum(0), dout[:2].sum(0))
    True
    """
    queries = packed_queries(q, k, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    return _backward(
        dout, queries, k, v, out, lse, dlse=dlse, grads_out=grads_out, workspace=workspace,
        **options,
    )  # fmt: skip


@overload
def attention_varlen_vjp(
    q: Cupy, k: Cupy, v: Cupy, cu_seqlens_q: Integers,
    cu_seqlens_k: Integers | None = None, *, max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    return_lse: Literal[False] = False, **options: Unpack[VjpOptions],
) -> tuple[Cupy, Vjp[tuple[Cupy, Cupy, Cupy]]]: ...  # fmt: skip
@overload
def attention_varlen_vjp(
    q: Cupy, k: Cupy, v: Cupy, cu_seqlens_q: Integers,
    cu_seqlens_k: Integers | None = None, *, max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    return_lse: Literal[True], **options: Unpack[VjpOptions],
) -> tuple[tuple[Cupy, Cupy], Vjp[tuple[Cupy, Cupy, Cupy]]]: ...  # fmt: skip
@overload
def attention_varlen_vjp(
    q: NDArray[Scalar], k: NDArray[Scalar], v: NDArray[Scalar], cu_seqlens_q: Integers,
    cu_seqlens_k: Integers | None = None, *, max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    return_lse: Literal[False] = False, **options: Unpack[VjpOptions],
) -> tuple[NDArray[Scalar], Vjp[Triple[Scalar]]]: ...  # fmt: skip
@overload
def attention_varlen_vjp(
    q: NDArray[Scalar], k: NDArray[Scalar], v: NDArray[Scalar], cu_seqlens_q: Integers,
    cu_seqlens_k: Integers | None = None, *, max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    return_lse: Literal[True], **options: Unpack[VjpOptions],
) -> tuple[tuple[NDArray[Scalar], Row], Vjp[Triple[Scalar]]]: ...  # fmt: skip
@overload
def attention_varlen_vjp(
    q: AnyArray, k: AnyArray, v: AnyArray, cu_seqlens_q: Integers,
    cu_seqlens_k: Integers | None = None, *, max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    return_lse: Literal[False] = False, **options: Unpack[VjpOptions],
) -> tuple[Array, Vjp[tuple[Array, Array, Array]]]: ...  # fmt: skip
@overload
def attention_varlen_vjp(
    q: AnyArray, k: AnyArray, v: AnyArray, cu_seqlens_q: Integers,
    cu_seqlens_k: Integers | None = None, *, max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    return_lse: Literal[True], **options: Unpack[VjpOptions],
) -> tuple[tuple[Array, Array], Vjp[tuple[Array, Array, Array]]]: ...  # fmt: skip
@takes_options_of(attention_vjp)
def attention_varlen_vjp(
    q: AnyArray,
    k: AnyArray,
    v: AnyArray,
    cu_seqlens_q: Integers,
    cu_seqlens_k: Integers | None = None,
    *,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    return_lse: bool = False,
    **options: Unpack[VjpOptions],
) -> Any:
    """:func:`attention_varlen`, and the function from its result's gradient to those of q, k and v.

    Parameters
    ----------
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
        As in :func:`attention_varlen`.
    return_lse : bool
        Also return the natural logarithm of each row's sum of exponentials.
    **options
        As of :func:`attention_vjp`, with positions counted in each sequence.

    Returns
    -------
    out : array, shape (Tq, H, Dv)
        As of :func:`attention_varlen`; with `return_lse` the pair (out, lse).
    vjp : function
        `vjp(dout, dlse=None)` returns (dq, dk, dv) and the gradients of `wrt`, as
        :func:`attention_varlen_backward` does. It holds the operands, offsets, mask, out and lse
        themselves: do not change them before it is called. It may be called any number of times.

    Raises
    ------
    ValueError, TypeError, NotImplementedError
        As :func:`attention_varlen`; `vjp` as :func:`attention_varlen_backward`.

    Examples
    --------
    >>> import numpy as np, cuflash
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = rng.standard_normal((3, 5, 8, 64), dtype=np.float32)
    >>> out, vjp = cuflash.attention_varlen_vjp(q, k, v, [0, 2, 5], causal=True)
    >>> dq, dk, dv = vjp(np.ones_like(out))
    >>> dq.shape, np.allclose(dv.sum(), out.size)
    ((5, 8, 64), True)
    """
    starts: dict[str, Any] = {
        "cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k,
        "max_seqlen_q": max_seqlen_q, "max_seqlen_k": max_seqlen_k,
    }  # fmt: skip
    wants_lse = checked_truth("return_lse", return_lse)
    asked: Any = {**options}
    if "score_mod" in asked:  # its captures are those of this call, for vjp as well
        asked["score_mod"] = as_score_mod(asked["score_mod"])
    asked["window"] = as_window(asked.get("window"))  # a list may change
    asked["deterministic"] = checked_truth("deterministic", asked.get("deterministic", True))
    asked["wrt"] = names = as_names(asked.get("wrt", ()))
    if names:
        mod, bias, sinks, slopes = map(asked.get, ("score_mod", "bias", "sinks", "alibi_slopes"))
        split_scores(q, mod, bias, sinks, slopes, names)
    forward = {name: x for name, x in asked.items() if name in _FORWARD}
    out, lse = attention_varlen(q, k, v, **starts, return_lse=True, **forward)
    own = choice_for_gradients(asked.get("algo"), asked.get("engine"))
    asked.update(zip(("algo", "engine"), own))
    backward = {name: x for name, x in asked.items() if name in _BACKWARD}

    def vjp(dout: AnyArray, dlse: AnyArray | None = None) -> Any:
        return attention_varlen_backward(dout, q, k, v, out, lse, **starts, dlse=dlse, **backward)

    return ((out, lse) if wants_lse else out), vjp
