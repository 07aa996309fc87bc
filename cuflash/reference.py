"""The definition of attention that every engine is tested against: dense, in float64."""

from __future__ import annotations

import math
from typing import NamedTuple

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


UNIT_ROUNDOFF = {"float16": 2**-11, "bfloat16": 2**-8, "float32": 2**-24, "float64": 2**-53}
_UNDERFLOW = {"float16": 2**-25, "bfloat16": 0.0, "float32": 0.0, "float64": 0.0}
_TINY = {"float16": 2**-25, "bfloat16": 2**-126, "float32": 2**-126, "float64": 0.0}


class Bound(NamedTuple):
    """The reference's results and how far from them a correct one may be, elementwise."""

    out: np.ndarray
    lse: np.ndarray
    out_bound: np.ndarray
    lse_bound: np.ndarray

    def ratios(self, out, lse=None) -> tuple[np.ndarray, np.ndarray | None]:
        """Error over bound of each element; infinite where NaN or infinity is out of place."""
        return (
            _ratio(out, self.out, self.out_bound),
            None if lse is None else _ratio(lse, self.lse, self.lse_bound),
        )


def forward_bound(
    q, k, v, dtype, *, softcap=None, scale=None, enable_gqa=False, **options
) -> Bound:
    r"""The reference of a forward pass, and how far from it a correct result may be.

    Parameters
    ----------
    q, k, v : array_like
        As in :func:`attention`, with the values that the pass was given.
    dtype : data type
        The precision that is promised: that of the result. For float64 the reference is computed
        in `numpy.longdouble`.
    softcap, scale, enable_gqa, **options
        As in :func:`attention`.

    Returns
    -------
    Bound

    Notes
    -----
    Notation: u is the unit roundoff of the result's type, u_acc that of the sums (2^-24; 2^-53
    for float64), n the number of keys a row sees, s the score, P the softmax weights, "@" the
    product.

    **Scores.** A product of D terms, in any order of summation, is off by about sqrt(D) u_acc
    |q||k| (products of absolute values; the worst case D u_acc would need all roundings to
    conspire), and `scale` and its rounding add at most 2 u_acc of that. So, with the largest
    |q||k| over the keys the row sees,

        sigma = (sqrt(D) + 2) u_acc scale max(|q||k|).

    **Softcap.** c tanh(s / c) has a slope of at most 1 and passes sigma on undiminished. Its own
    evaluation: dividing (u_acc, and u_acc for c as stored) moves the argument x by 2 u_acc |x|,
    which moves tanh by at most 2 u_acc |x| (1 - tanh(x)^2) <= 2 u_acc |tanh x|; tanh itself is
    good to 2 ulp, which is 4 u_acc relative (CUDA documents at most 2 for tanhf, 1 for tanh); the
    product by the stored c adds 2 u_acc. In all 8 u_acc |c tanh(s / c)|, to be added to sigma,
    where |c tanh(s / c)| <= min(c, max |s|) and max |s| <= scale max(|q||k|).

    **Weights.** The weight exp(s_j - m) / l changes relatively by the error of s_j, and by the
    weighted mean of all such errors through l: 2 sigma. The difference s_j - m is rounded as
    well: u_acc |s_j - m| <= 2 u_acc max|s|, which is in sigma's 2 u_acc per score. Exponential,
    running rescaling and division contribute a few u_acc, taken as 8, and the sums over n keys
    sqrt(n) u_acc. Half types round P to the result's type before the product with V: u.

    **Output.** Summed over the keys, and with the final rounding u |O|:

        |O - O_ref| <= 2 [u (P@|V| + |O|) + (2 sigma + u_acc (8 + sqrt n)) P@|V| + under + tiny].

    `under`: float16 weights below 2^-14 are subnormal with an absolute error of 2^-25 each, so
    2^-25 times the sum of |V| over the visible keys. `tiny`: half the smallest subnormal of
    float16, 2^-25; float32 and bfloat16 kernels may flush subnormals (CuPy compiles with
    -ftz=true), 2^-126. The factor 2 is for what the square roots leave out; a correct engine
    stays below half the bound.

    **lse.** lse = m + log(l) moves by at most the largest error of a score (sigma) and by the
    relative error of l, and is rounded at its own magnitude:

        |lse - ref| <= 2 (sigma + u_acc (8 + sqrt n)) max(1, |lse|).

    A single dropped or extra key moves lse by about 1/n: far above this bound in every type,
    where in half precision O cannot tell.
    """
    dtype = np.dtype(dtype).name
    exact = np.longdouble if dtype == "float64" else np.float64
    q, k, v = (np.asarray(x).astype(exact) for x in (q, k, v))
    if enable_gqa:
        k, v = (np.repeat(x, q.shape[-3] // x.shape[-3], axis=-3) for x in (k, v))
    head_dim = q.shape[-1]
    given = dict(options, softcap=softcap, scale=scale, dtype=exact)
    out, lse = attention(q, k, v, return_lse=True, **given)

    leading = out.shape[:-2]
    visible = visible_keys((*leading, q.shape[-2], k.shape[-2]), **options)
    count = visible.sum(axis=-1, keepdims=True)
    u, u_acc = UNIT_ROUNDOFF[dtype], UNIT_ROUNDOFF["float64" if dtype == "float64" else "float32"]
    with np.errstate(all="ignore"):
        weighted = attention(q, k, np.abs(v), **given)
        products = np.where(visible, np.abs(q) @ np.abs(k).swapaxes(-1, -2), 0)
        scale = abs(scale) if scale is not None else 1 / math.sqrt(head_dim)
        largest = scale * products.max(axis=-1, keepdims=True, initial=0)
        sigma = (math.sqrt(head_dim) + 2) * u_acc * largest
        if softcap is not None:
            sigma = sigma + 8 * u_acc * np.minimum(largest, softcap)
        sums = u_acc * (8 + np.sqrt(count))
        error = u * (weighted + np.abs(out)) + (2 * sigma + sums) * weighted + _TINY[dtype]
        if _UNDERFLOW[dtype]:
            error += _UNDERFLOW[dtype] * count * _mean_magnitude(q, k, v, options)
        lse_error = ((sigma + sums) * np.maximum(1, np.abs(lse))[..., None])[..., 0]
    return Bound(out, lse, 2 * error, 2 * lse_error)


def _mean_magnitude(q, k, v, options):
    # Queries of zeros see all their keys alike: the reference averages |V| over them.
    return attention(np.zeros_like(q), np.nan_to_num(k), np.abs(v), **options)


def _ratio(got, expected, limit):
    got = got.astype(expected.dtype)
    with np.errstate(all="ignore"):
        # A NaN is met by a NaN, an infinity by the same one; anything else there is wrong.
        special = ~(np.isfinite(got) & np.isfinite(expected))
        same = (got == expected) | (np.isnan(got) & np.isnan(expected))
        error = np.abs(got - expected)
        ratio = np.where(error == 0, 0, error / limit)
    return np.where(special, np.where(same, 0, np.inf), ratio)
