"""`merge`: results of attention over parts of the keys, as one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar, overload

from .calls.merge import run_merge

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from .typing import AnyArray, Array, CupyArray

    Scalar = TypeVar("Scalar", bound=np.generic)
    Cupy = TypeVar("Cupy", bound=CupyArray)
    Out = TypeVar("Out", bound=AnyArray)
    Lse = TypeVar("Lse", bound=AnyArray)
    Row = NDArray[np.floating[Any]]  # lse of arrays of NumPy


# Of CuPy, of NumPy, and of any library, as of attention().
@overload
def merge(
    outs: Cupy | Sequence[Cupy], lses: Cupy | Sequence[Cupy], *,
    out: tuple[CupyArray | None, CupyArray | None] | None = None,
) -> tuple[Cupy, Cupy]: ...  # fmt: skip
@overload
def merge(
    outs: NDArray[Scalar] | Sequence[NDArray[Scalar]],
    lses: NDArray[Any] | Sequence[NDArray[Any]], *,
    out: tuple[NDArray[Any] | None, NDArray[Any] | None] | None = None,
) -> tuple[NDArray[Scalar], Row]: ...  # fmt: skip
@overload
def merge(
    outs: AnyArray | Sequence[AnyArray], lses: AnyArray | Sequence[AnyArray], *, out: None = None,
) -> tuple[Array, Array]: ...  # fmt: skip
@overload
def merge(
    outs: AnyArray | Sequence[AnyArray], lses: AnyArray | Sequence[AnyArray], *,
    out: tuple[Out, Lse],
) -> tuple[Out, Lse]: ...  # fmt: skip
def merge(
    outs: AnyArray | Sequence[AnyArray],
    lses: AnyArray | Sequence[AnyArray],
    *,
    out: tuple[AnyArray | None, AnyArray | None] | None = None,
) -> tuple[AnyArray, AnyArray]:
    """Results of :func:`attention` over disjoint sets of keys, as that over all of them.

    Parameters
    ----------
    outs : array, shape (S, ..., N, Dv), or sequence of S arrays, shape (..., N, Dv)
        What each of S calls with the same queries returned: float16, bfloat16, float32 or float64.
        NumPy arrays run on the CPU, CuPy arrays on their device and on its current stream; what
        else speaks DLPack is taken without a copy. Any strides. On a GPU a sequence may have 32
        arrays; one array may hold any number of parts.
    lses : array, shape (S, ..., N), or sequence of S arrays, shape (..., N)
        Their lse, as `return_lse=True` returns it: float32, or float64 for a result of float64.
    out : (array, array), optional
        Where to write out and lse; either may be None. Exactly the result's shape and type,
        sharing no element with an input: views that interleave are fine.

    Returns
    -------
    out : array, shape (..., N, Dv)
        Of the promoted type of `outs`. A row that saw no key in any part is 0.
    lse : array, shape (..., N)
        float32, or float64 for float64. -inf for a row that saw no key.

    Raises
    ------
    ValueError
        If there is no part, if shapes, devices or `out` do not fit, and for too many arrays.
    TypeError
        For types that are not supported.
    NotImplementedError
        If the axes of CuPy arrays are of strides too irregular for the kernel.

    Notes
    -----
    ``lse = log(sum_s exp(lse_s))`` and ``out = sum_s exp(lse_s - lse) out_s``, in the order of the
    parts and in float32, float64 for float64. So the result is deterministic, and parts can be
    merged in any groups: what comes of it differs by rounding. A part in which a row saw nothing,
    whose lse is -inf, adds nothing to it, whatever `outs` holds there. Where an lse is NaN or +inf,
    so that a score was, out and lse are NaN, as in :func:`attention`.

    :func:`attention_backward` of a part, given the merged out and lse, returns its gradients: dk
    and dv of its keys, and what it adds to dq.

    On a GPU it is one launch. It takes no memory but that of the results, unless arrays of a
    sequence differ in type, and can be captured in a CUDA graph with `out`, once a call of its
    kind has run.

    Examples
    --------
    Keys in two places, as two caches, chunks of one, or devices hold them:

    >>> import numpy as np, cuflash
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = rng.standard_normal((3, 2, 8, 100, 64), dtype=np.float32)
    >>> first = cuflash.attention(q, k[:, :, :70], v[:, :, :70], return_lse=True)
    >>> second = cuflash.attention(q, k[:, :, 70:], v[:, :, 70:], return_lse=True)
    >>> out, lse = cuflash.merge((first[0], second[0]), (first[1], second[1]))
    >>> np.allclose(out, cuflash.attention(q, k, v), atol=1e-6)
    True

    Each of them has its own gradients, of the loss `out.sum()`:

    >>> dout = np.ones_like(out)
    >>> dq, dk, dv = cuflash.attention_backward(dout, q, k[:, :, 70:], v[:, :, 70:], out, lse)
    >>> whole = cuflash.attention_vjp(q, k, v)[1](dout)
    >>> np.allclose(dk, whole[1][:, :, 70:], atol=1e-6)
    True
    """
    return run_merge(outs, lses, out)
