"""`merge` as it is defined."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import ArrayLike, NDArray

    Floats = NDArray[np.floating[Any]]


def merge(
    outs: Sequence[ArrayLike] | NDArray[Any],
    lses: Sequence[ArrayLike] | NDArray[Any],
    *,
    dtype: type[np.floating[Any]] = np.float64,
) -> tuple[Floats, Floats]:
    """Results over disjoint sets of keys as one, as :func:`cuflash.merge` defines it.

    Parameters
    ----------
    outs : array_like, shape (S, ..., N, E), or a sequence of S
    lses : array_like, shape (S, ..., N), or a sequence of S
    dtype : scalar type, default numpy.float64
        Of the arithmetic and the results; `numpy.longdouble` checks float64 results.

    Returns
    -------
    out : ndarray, shape (..., N, E)
    lse : ndarray, shape (..., N)

    Examples
    --------
    >>> merge([[[1.0]], [[4.0]]], [[0.0], [np.log(2)]])[0]
    array([[3.]])
    """
    parts, logs = (np.stack([np.asarray(x).astype(dtype) for x in given]) for given in (outs, lses))
    with np.errstate(all="ignore"):
        top = logs.max(axis=0)
        weights = np.exp(logs - np.where(np.isneginf(top), 0, top))
        total = weights.sum(axis=0)
        products = (weights / total)[..., None] * parts
        out = np.where(np.isneginf(logs)[..., None], 0, products).sum(axis=0)
        return out, top + np.log(total)
