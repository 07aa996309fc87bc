"""The definition of attention that every engine is tested against: dense, in float64."""

from __future__ import annotations

import numpy as np

from .masks import Band


def attention(
    q,
    k,
    v,
    *,
    causal=False,
    window=None,
    softcap=None,
    q_lengths=None,
    kv_lengths=None,
    scale=None,
    enable_gqa=False,
    return_lse=False,
    dtype=np.float64,
):
    """Attention of `q` over `k` and `v`, as :func:`cuflash.attention` defines it.

    Parameters
    ----------
    q, k, v : array_like, shapes (..., N, D), (..., M, D) and (..., M, E)
        Leading axes broadcast as in :func:`numpy.matmul`.
    causal, window, softcap, q_lengths, kv_lengths, scale, enable_gqa, return_lse
        As in :func:`cuflash.attention`.
    dtype : scalar type, default numpy.float64
        Of the arithmetic and the results; `numpy.longdouble` checks float64 results.

    Returns
    -------
    out : ndarray, shape (..., N, E)
    lse : ndarray, shape (..., N)
        Natural logarithm of the sum of exp(score); only with `return_lse`.

    Notes
    -----
    With `s = softcap(scale * q.k)` and j over the keys visible to query i,
    ``lse[i] = log(sum_j exp(s[i, j]))`` and ``out[i] = sum_j exp(s[i, j] - lse[i]) v[j]``.
    A score of -inf has weight zero, as a hidden key has; a row without any weight gives 0 and
    -inf. What hidden keys and values hold has no influence, NaN included.

    Examples
    --------
    >>> attention([[1.0], [0.0]], [[0.0], [0.0]], [[2.0], [4.0]], causal=True)
    array([[2.],
           [3.]])
    """
    q, k, v = (np.asarray(x).astype(dtype) for x in (q, k, v))
    if enable_gqa:
        k, v = (np.repeat(x, q.shape[-3] // x.shape[-3], axis=-3) for x in (k, v))
    leading = np.broadcast_shapes(q.shape[:-2], k.shape[:-2], v.shape[:-2])
    visible = visible_keys(
        (*leading, q.shape[-2], k.shape[-2]),
        causal=causal,
        window=window,
        q_lengths=q_lengths,
        kv_lengths=kv_lengths,
    )
    # NaN and infinity follow IEEE arithmetic, without the warnings.
    with np.errstate(all="ignore"):
        scale = 1 / np.sqrt(dtype(q.shape[-1])) if scale is None else dtype(scale)
        scores = scale * (q @ k.swapaxes(-1, -2))
        if softcap is not None:
            scores = dtype(softcap) * np.tanh(scores / dtype(softcap))
        scores = np.where(visible, scores, -np.inf)
        top = scores.max(axis=-1, keepdims=True, initial=-np.inf)
        weights = np.exp(scores - np.where(np.isneginf(top), 0, top))
        sums = weights.sum(axis=-1, keepdims=True)
        out = _visible_sum(weights / np.where(sums == 0, 1, sums), v, visible)
        lse = (top + np.log(sums))[..., 0]
    return (out, lse) if return_lse else out


def visible_keys(shape, *, causal=False, window=None, q_lengths=None, kv_lengths=None):
    """Which keys each query may attend to, as a bool array of `shape` (..., N, M).

    Lengths broadcast to the batch axes, which are all leading axes but the last one.

    Examples
    --------
    >>> visible_keys((2, 3), causal=True).astype(int)
    array([[1, 1, 0],
           [1, 1, 1]])
    """
    band = Band.from_options(causal, window)

    def valid(lengths, longest):
        lengths = longest if lengths is None else np.clip(np.asarray(lengths), 0, longest)
        lengths = np.asarray(lengths, np.int64)
        # Behind the batch axes: heads, unless there is one matrix only, queries and keys.
        return lengths[(..., *[None] * min(len(shape), 3))]

    queries, keys = valid(q_lengths, shape[-2]), valid(kv_lengths, shape[-1])
    shift = keys - queries if band.alignment == "bottom_right" else 0
    i, j = np.arange(shape[-2])[:, None], np.arange(shape[-1])
    visible = (i < queries) & (j < keys)
    # No position is further from the diagonal than this, so a wider side hides nothing.
    widest = shape[-2] + shape[-1]
    if band.left is not None:
        visible = visible & (j >= i + shift - min(band.left, widest))
    if band.right is not None:
        visible = visible & (j <= i + shift + min(band.right, widest))
    return np.broadcast_to(visible, shape)


def _visible_sum(weights, v, visible):
    """`weights @ v` over the visible keys only: 0 * NaN is NaN, so products are selected."""
    finite = np.isfinite(v).all(axis=-1, keepdims=True)
    total = weights @ np.where(finite, v, 0)
    others = np.where(finite, 0, v)
    for key in np.flatnonzero(~finite.all(axis=(*range(v.ndim - 2), -1))):
        product = weights[..., key, None] * others[..., None, key, :]
        total += np.where(visible[..., key, None], product, 0)
    return total
