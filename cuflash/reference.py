"""The definition of attention that every engine is tested against: dense, in float64."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, overload

import numpy as np

from .masks.band import MAX_SHIFT, Band, integers_of
from .masks.block_mask import BlockMask

if TYPE_CHECKING:
    from typing import TypedDict

    from numpy.typing import ArrayLike, DTypeLike, NDArray
    from typing_extensions import Unpack

    from .typing import Causal, Real, Window

    Floats = NDArray[np.floating[Any]]
    Bools = NDArray[np.bool_]
    Float = type[np.floating[Any]]

    class _Masking(TypedDict, total=False):
        causal: Causal
        window: Window | None
        mask: BlockMask | ArrayLike | None
        q_lengths: ArrayLike | None
        kv_lengths: ArrayLike | None
        q_offset: ArrayLike | None

    class _Scoring(_Masking, total=False):
        scale: Real | None
        enable_gqa: bool

    class _Options(_Scoring, total=False):
        softcap: Real | None
        page_table: ArrayLike | None
        dtype: Float


@overload
def attention(
    q: ArrayLike, k: ArrayLike, v: ArrayLike, *, return_lse: Literal[False] = False,
    **options: Unpack[_Options],
) -> Floats: ...  # fmt: skip
@overload
def attention(
    q: ArrayLike, k: ArrayLike, v: ArrayLike, *, return_lse: Literal[True],
    **options: Unpack[_Options],
) -> tuple[Floats, Floats]: ...  # fmt: skip
@overload
def attention(
    q: ArrayLike, k: ArrayLike, v: ArrayLike, *, return_lse: bool, **options: Unpack[_Options]
) -> Floats | tuple[Floats, Floats]: ...


def attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    *,
    causal: Causal = False,
    window: Window | None = None,
    mask: BlockMask | ArrayLike | None = None,
    softcap: Real | None = None,
    q_lengths: ArrayLike | None = None,
    kv_lengths: ArrayLike | None = None,
    q_offset: ArrayLike | None = None,
    scale: Real | None = None,
    enable_gqa: bool = False,
    page_table: ArrayLike | None = None,
    return_lse: bool = False,
    dtype: Float = np.float64,
) -> Floats | tuple[Floats, Floats]:
    """Attention of `q` over `k` and `v`, as :func:`cuflash.attention` defines it.

    Parameters
    ----------
    q, k, v : array_like, shapes (..., N, D), (..., M, D) and (..., M, E)
        Leading axes broadcast as in :func:`numpy.matmul`.
    causal, window, mask, softcap, q_lengths, kv_lengths, q_offset, scale, enable_gqa, return_lse
        As in :func:`cuflash.attention`.
    page_table
        As in :func:`cuflash.attention`. Keys on pages that are none are hidden, as on a GPU.
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
    dense = _Dense.of(
        *(q, k, v, dtype),
        softcap=softcap,
        scale=scale,
        enable_gqa=enable_gqa,
        causal=causal,
        window=window,
        mask=mask,
        q_lengths=q_lengths,
        kv_lengths=kv_lengths,
        q_offset=q_offset,
        page_table=page_table,
    )
    return (dense.out, dense.lse) if return_lse else dense.out


def attention_backward(
    dout: ArrayLike,
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    *,
    dlse: ArrayLike | None = None,
    causal: Causal = False,
    window: Window | None = None,
    mask: BlockMask | ArrayLike | None = None,
    softcap: Real | None = None,
    q_lengths: ArrayLike | None = None,
    kv_lengths: ArrayLike | None = None,
    q_offset: ArrayLike | None = None,
    scale: Real | None = None,
    enable_gqa: bool = False,
    dtype: Float = np.float64,
) -> tuple[Floats, Floats, Floats]:
    """Gradients of :func:`attention`, as :func:`cuflash.attention_backward` defines them.

    Parameters
    ----------
    dout : array_like, shape (..., N, E)
        Gradient of some number with respect to the output.
    q, k, v : array_like, shapes (..., N, D), (..., M, D) and (..., M, E)
        As given to :func:`attention`.
    dlse : array_like, shape (..., N), optional
        Gradient of the same number with respect to `lse`, by default 0.
    causal, window, mask, softcap, q_lengths, kv_lengths, q_offset, scale, enable_gqa
        As given to :func:`attention`.
    dtype : scalar type, default numpy.float64
        Of the arithmetic and the results; `numpy.longdouble` checks float64 results.

    Returns
    -------
    dq, dk, dv : ndarray
        In the shapes of `q`, `k` and `v`, summed over the heads that share them.

    Notes
    -----
    With ``s = softcap(x)``, ``x = scale * q.k``, softmax weights P and products by element, "*",
    ::

        dV    = P^T dout
        dP    = dout V^T
        delta = sum(dout * out, axis=-1) - dlse
        dS    = P * (dP - delta) * ds/dx
        dQ    = scale dS K
        dK    = scale dS^T Q

    P and dS are 0 where a query does not see a key, and in rows without any weight (lse is
    -inf). What such queries and keys hold has no influence, nor have their `dout` and `dlse`.
    A key adds nothing to dQ where its dS is 0, be it infinite: so one whose score is -inf, which
    has weight zero.

    Examples
    --------
    >>> dq, dk, dv = attention_backward([[1.0]], [[1.0]], [[0.0], [0.0]], [[2.0], [4.0]])
    >>> dk
    array([[-0.5],
           [ 0.5]])
    """
    shapes = [np.shape(x) for x in (q, k, v)]
    dense = _Dense.of(
        *(q, k, v, dtype),
        softcap=softcap,
        scale=scale,
        enable_gqa=enable_gqa,
        causal=causal,
        window=window,
        mask=mask,
        q_lengths=q_lengths,
        kv_lengths=kv_lengths,
        q_offset=q_offset,
    )
    grad = np.asarray(dout).astype(dtype)
    with np.errstate(all="ignore"):
        dS = _score_gradient(dense, grad, _row_sums(dense, grad, dlse))
        dv = _visible_sum(dense.weights.mT, grad, dense.visible.mT)
        dq = dense.scale * _visible_sum(dS, dense.k, dS != 0)
        dk = dense.scale * _visible_sum(dS.mT, dense.q, dense.visible.mT)
        q_shape, k_shape, v_shape = shapes
        return _own_sum(dq, q_shape), _own_sum(dk, k_shape), _own_sum(dv, v_shape)


def append_kv(
    k_cache: NDArray[Any],
    v_cache: NDArray[Any],
    k: NDArray[Any],
    v: NDArray[Any],
    start: ArrayLike,
    *,
    lengths: ArrayLike | None = None,
    page_table: ArrayLike | None = None,
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Caches with the tokens of `k` and `v` in them, as :func:`cuflash.append_kv` defines them.

    Parameters
    ----------
    k_cache, v_cache, k, v, start, lengths, page_table
        As in :func:`cuflash.append_kv`. Tokens whose position or page does not exist are left out,
        as on a GPU.

    Returns
    -------
    k_cache, v_cache : ndarray
        Copies of those given.

    Examples
    --------
    >>> cache, token = np.zeros((1, 1, 4, 1)), np.ones((1, 1, 1, 1))
    >>> append_kv(cache, cache, token, 2 * token, 2)[1].ravel()
    array([0., 0., 2., 0.])
    """
    batch, _, tokens, _ = k.shape
    caches = k_cache.copy(), v_cache.copy()
    entries, positions, page_size = len(k_cache), k_cache.shape[-2], k_cache.shape[-2]
    if page_table is not None:
        positions *= np.shape(page_table)[1]
    starts = np.broadcast_to(start, batch)
    counts = np.broadcast_to(tokens if lengths is None else lengths, batch)
    for b in range(batch):
        for token in range(min(tokens, int(counts[b]))):
            position, entry = int(starts[b]) + token, b
            if not 0 <= position < positions:
                continue
            if page_table is not None:
                entry = int(np.asarray(page_table)[b, position // page_size])
                position %= page_size
            if 0 <= entry < entries:
                for cache, new in zip(caches, (k, v)):
                    cache[entry, :, position] = new[b, :, token]
    return caches


class _Dense(NamedTuple):
    """A forward pass with its matrices, for operands of equally many heads."""

    q: Floats
    k: Floats
    v: Floats
    scale: np.floating[Any]
    visible: Bools  # False as well in rows without any weight
    slope: Floats | np.floating[Any]  # of softcap, at the scores
    weights: Floats  # 0 where not visible
    out: Floats
    lse: Floats

    @classmethod
    def of(
        cls,
        queries: ArrayLike,
        keys: ArrayLike,
        values: ArrayLike,
        dtype: Float,
        *,
        softcap: Real | None = None,
        scale: Real | None = None,
        enable_gqa: bool = False,
        page_table: ArrayLike | None = None,
        **mask: Unpack[_Masking],
    ) -> _Dense:
        q, k, v = (np.asarray(x).astype(dtype) for x in (queries, keys, values))
        exists: Bools | np.bool_ = np.True_
        if page_table is not None:
            (k, exists), (v, _) = (_gathered(x, page_table) for x in (k, v))
        if enable_gqa:
            k, v = (_repeated(x, *q.shape[-3:-2]) for x in (k, v))
        leading = np.broadcast_shapes(q.shape[:-2], k.shape[:-2], v.shape[:-2])
        visible = visible_keys((*leading, q.shape[-2], k.shape[-2]), **mask) & exists
        # NaN and infinity follow IEEE arithmetic, without the warnings.
        with np.errstate(all="ignore"):
            factor = 1 / np.sqrt(dtype(q.shape[-1])) if scale is None else dtype(scale)
            scores: Floats = factor * (q @ k.mT)
            slope: Floats | np.floating[Any] = dtype(1)
            if softcap is not None:
                tanh = np.tanh(scores / dtype(softcap))
                scores, slope = dtype(softcap) * tanh, 1 - tanh**2
            scores = np.where(visible, scores, -np.inf)
            top = scores.max(axis=-1, keepdims=True, initial=-np.inf)
            weights = np.exp(scores - np.where(np.isneginf(top), 0, top))
            sums = weights.sum(axis=-1, keepdims=True)
            visible = visible & (sums != 0)
            weights = np.where(visible, weights / sums, 0)
            out, lse = _visible_sum(weights, v, visible), (top + np.log(sums))[..., 0]
        return cls(q, k, v, factor, visible, slope, weights, out, lse)


def _gathered(pool: Floats, page_table: ArrayLike) -> tuple[Floats, Bools]:
    """The keys of all batch entries, page after page, and which of them are on a page at all."""
    table = np.asarray(page_table)
    exists = (table >= 0) & (table < len(pool))
    pages = np.zeros((*table.shape, *pool.shape[1:]), pool.dtype)
    pages[exists] = pool[table[exists]]
    batch, _, heads, page_size, columns = pages.shape
    rows = pages.swapaxes(1, 2).reshape(batch, heads, -1, columns)
    return rows, np.repeat(exists, page_size, axis=1)[:, None, None]


def _repeated(x: Floats, heads: int = 1) -> Floats:
    """Repeat the heads of `x` until there are `heads`, unless they broadcast anyway."""
    if x.ndim < 3 or heads <= x.shape[-3]:
        return x
    return np.repeat(x, heads // (x.shape[-3] or 1), axis=-3)


def _row_sums(dense: _Dense, dout: Floats, dlse: ArrayLike | None) -> Floats:
    """The deltas of :func:`attention_backward`, a column."""
    delta: Floats = (dout * dense.out).sum(axis=-1, keepdims=True)
    return delta if dlse is None else delta - np.asarray(dlse).astype(dout.dtype)[..., None]


def _score_gradient(dense: _Dense, dout: Floats, delta: Floats) -> Floats:
    gradient = dense.weights * (dout @ dense.v.mT - delta) * dense.slope
    return np.where(dense.visible, gradient, 0)


def _own_sum(gradient: NDArray[Any], shape: tuple[int, ...]) -> NDArray[Any]:
    """Sum over the heads that share a row of an operand of `shape`, broadcast or grouped."""
    leading = gradient.shape[:-2]
    kept = (*[1] * (len(leading) + 2 - len(shape)), *shape[:-2])
    split = [
        n for total, own in zip(leading, kept, strict=True) for n in (own, total // (own or 1))
    ]
    sharing = tuple(range(1, len(split), 2))
    own_sum: NDArray[Any] = gradient.reshape(*split, *gradient.shape[-2:]).sum(axis=sharing)
    return own_sum.reshape(shape)


def visible_keys(
    shape: tuple[int, ...],
    *,
    causal: Causal = False,
    window: Window | None = None,
    mask: BlockMask | ArrayLike | None = None,
    q_lengths: ArrayLike | None = None,
    kv_lengths: ArrayLike | None = None,
    q_offset: ArrayLike | None = None,
) -> Bools:
    """Which keys each query may attend to, as a bool array of `shape` (..., N, M).

    Lengths and offsets broadcast to the batch axes, which are all leading axes but the last one.

    Examples
    --------
    >>> visible_keys((2, 3), causal=True).astype(int)
    array([[1, 1, 0],
           [1, 1, 1]])
    """
    band = Band.from_options(causal, window, q_offset)

    def of_batch(name: str, given: ArrayLike | None, low: int, high: int) -> NDArray[np.int64]:
        numbers = integers_of(high if given is None else given)
        if numbers.dtype.kind not in "iu":
            raise TypeError(f"{name} has dtype {numbers.dtype}: give integers")
        clamped = np.clip(numbers.astype(np.int64), low, high)
        # Behind the batch axes: heads, unless there is one matrix only, queries and keys.
        return clamped[(..., *[None] * min(len(shape), 3))]

    queries = of_batch("q_lengths", q_lengths, 0, shape[-2])
    keys = of_batch("kv_lengths", kv_lengths, 0, shape[-1])
    if q_offset is None:
        shift = keys - queries if band.alignment == "bottom_right" else 0
    else:
        shift = of_batch("q_offset", q_offset, -MAX_SHIFT, MAX_SHIFT)
    i, j = np.arange(shape[-2])[:, None], np.arange(shape[-1])
    visible = (i < queries) & (j < keys)
    # No position is further from the diagonal than this, so a wider side hides nothing.
    widest = shape[-2] + shape[-1] + MAX_SHIFT
    if band.left is not None:
        visible = visible & (j >= i + shift - min(band.left, widest))
    if band.right is not None:
        visible = visible & (j <= i + shift + min(band.right, widest))
    if mask is not None:
        visible = visible & (mask.to_dense() if isinstance(mask, BlockMask) else np.asarray(mask))
    return np.broadcast_to(visible, shape)


def _visible_sum(weights: Floats, v: Floats, visible: Bools) -> Floats:
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

    out: NDArray[np.floating[Any]]
    lse: NDArray[np.floating[Any]]
    out_bound: NDArray[np.floating[Any]]
    lse_bound: NDArray[np.floating[Any]]

    def ratios(
        self, out: NDArray[Any], lse: NDArray[Any] | None = None
    ) -> tuple[Floats, Floats | None]:
        """Error over bound of each element; infinite where NaN or infinity is out of place."""
        return (
            _ratio(out, self.out, self.out_bound),
            None if lse is None else _ratio(lse, self.lse, self.lse_bound),
        )


def forward_bound(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    dtype: DTypeLike,
    *,
    softcap: Real | None = None,
    page_table: ArrayLike | None = None,
    **options: Unpack[_Scoring],
) -> Bound:
    r"""The reference of a forward pass, and how far from it a correct result may be.

    Parameters
    ----------
    q, k, v : array_like
        As in :func:`attention`, with the values that the pass was given.
    dtype : data type
        The precision that is promised: that of the result. For float64 the reference is computed
        in `numpy.longdouble`.
    softcap, page_table, **options
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
    where |c tanh(s / c)| <= min(c, max |s|) and max |s| <= scale max(|q||k|). Kernels multiply by
    scale / c, rounded once, in the place of scale, so that sigma has that already. Their tanh of
    half types is good to 6 u_acc (docs/numerics.md), and the product adds 2 u_acc: 8 as well.

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
    name = np.dtype(dtype).name
    u, u_acc, exact = _precision(name)
    dense = _Dense.of(q, k, v, exact, softcap=softcap, page_table=page_table, **options)
    with np.errstate(all="ignore"):
        _, sigma = _score_errors(dense, softcap, u_acc)
        sums = u_acc * (8 + np.sqrt(dense.visible.sum(axis=-1, keepdims=True)))
        weighted = _visible_sum(dense.weights, np.abs(dense.v), dense.visible)
        seen = _visible_sum(dense.visible.astype(exact), np.abs(dense.v), dense.visible)
        error = u * (weighted + np.abs(dense.out)) + (2 * sigma + sums) * weighted
        error += _UNDERFLOW[name] * seen + _TINY[name]
        lse_error = ((sigma + sums) * np.maximum(1, np.abs(dense.lse))[..., None])[..., 0]
    return Bound(dense.out, dense.lse, 2 * error, 2 * lse_error)


class BackwardBound(NamedTuple):
    """The reference's gradients and how far from them correct ones may be, elementwise."""

    dq: NDArray[np.floating[Any]]
    dk: NDArray[np.floating[Any]]
    dv: NDArray[np.floating[Any]]
    dq_bound: NDArray[np.floating[Any]]
    dk_bound: NDArray[np.floating[Any]]
    dv_bound: NDArray[np.floating[Any]]

    def ratios(
        self, dq: NDArray[Any], dk: NDArray[Any], dv: NDArray[Any]
    ) -> tuple[Floats, Floats, Floats]:
        """Error over bound of each element; infinite where NaN or infinity is out of place."""
        return (
            _ratio(dq, self.dq, self.dq_bound),
            _ratio(dk, self.dk, self.dk_bound),
            _ratio(dv, self.dv, self.dv_bound),
        )


def backward_bound(
    dout: ArrayLike,
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    dtype: DTypeLike,
    *,
    dlse: ArrayLike | None = None,
    softcap: Real | None = None,
    **options: Unpack[_Scoring],
) -> BackwardBound:
    r"""The reference of a backward pass, and how far from it a correct result may be.

    Parameters
    ----------
    dout, q, k, v : array_like
        As in :func:`attention_backward`, with the values that the pass was given.
    dtype : data type
        The precision that is promised: that of the output. A gradient is in its operand's own
        type, which may be a lower one. For float64 the reference is computed in
        `numpy.longdouble`.
    dlse, softcap, **options
        As in :func:`attention_backward`.

    Returns
    -------
    BackwardBound

    Notes
    -----
    Notation and sigma are those of :func:`forward_bound`; E is the head dim of V, c the softcap,
    t the tanh in it, f = 1 - t^2 its slope. As there, rounding errors of sums grow with the root
    of their length, everything else adds up in absolute values, and the products of two errors
    are left out. The forward's `out` and `lse` are taken as they come from a correct forward in
    the same precision, so its errors are part of this bound.

    **Weights.** P = exp(s - lse). The score is off by sigma. lse, before it is rounded, by
    another sigma and by u_acc (8 + sqrt n) through the sum l. Taking the logarithm, adding the
    maximum, changing between base 2 and e (once to store lse, once to read it), subtracting, each
    round a number of the size of lse: 6 u_acc max(1, |lse|). What the difference rounds of s is
    in sigma's 2 u_acc per score. Relative to P in all

        rho = 2 sigma + u_acc (8 + sqrt n + 6 max(1, |lse|)).

    **dP.** A product of E terms: (sqrt(E) + 2) u_acc |dout|@|V|^T.

    **delta.** The output's error has three parts. Those of its weights, u and 2 sigma as in the
    forward, are errors of a mean over the keys, which `dout` turns into errors of the mean of dP:
    (u + 2 sigma) P@|dP|, and, from the underflow of float16 weights, 2^-25 times the sum of |dP|
    over the visible keys. The sums' u_acc (8 + sqrt n) P@|V| and the final rounding u |O| + tiny
    are errors of each channel, to be multiplied by |dout|. Then the product with `dout` is a sum
    of E terms, (sqrt(E) + 2) u_acc |dout| |O|, and subtracting `dlse` rounds once more,
    u_acc |dlse|. In all, with channels summed,

        delta_error = (u + 2 sigma) P@|dP| + under + u_acc |dlse| + |dout| . [
            u_acc (8 + sqrt n) P@|V| + u |O| + tiny + (sqrt(E) + 2) u_acc |O| ].

    **Softcap's slope.** An error sigma_x of the argument (sigma without softcap's own part)
    moves t by f sigma_x / c, and f by 2 |t| times that. t itself is off by 8 u_acc |t|, and
    squaring, subtracting and multiplying c and 1 / c into it round three to four numbers of at
    most 1, and what kernels have for half types is good to 8 u_acc:

        slope_error = 2 f sigma_x / c + 20 u_acc.

    **dS.** dP and delta cancel, so their errors are absolute, and rho is relative to what
    remains. Two products and the difference round: 4 u_acc. Half types round dS to the result's
    type before the products with K and Q: u, and `under` for the elements that are subnormal.

        dS_error = P f (dP_error + delta_error) + P |dP - delta| slope_error
                   + |dS| (rho + 4 u_acc + u) + under.

    **Gradients.** Summed over n visible pairs, in all heads that share the row of the gradient,
    products of absolute values give

        dQ_error = scale [dS_error @ |K| + u_acc (8 + sqrt n) |dS| @ |K|],
        dK_error = scale [dS_error^T @ |Q| + u_acc (8 + sqrt n) |dS|^T @ |Q|],
        dV_error = [P (rho + u) + under]^T @ |dout| + u_acc (8 + sqrt n) P^T @ |dout|,

    and the bound is ``2 [error + u |gradient| + tiny]``, where u and tiny are those of the
    gradient's type. The factor 2 is for what the square roots leave out; a correct engine stays
    below half the bound. `under` here is half the smallest subnormal of float16, 2^-25, and
    2^-126 for bfloat16 and float32, where kernels may flush. Nothing allows for overflow: float16
    inputs whose dS or gradients go beyond 65504 have no correct result in this precision.
    """
    name = np.dtype(dtype).name
    _, u_acc, exact = _precision(name)
    operands = [np.asarray(x) for x in (q, k, v)]
    dense = _Dense.of(q, k, v, exact, softcap=softcap, **options)
    grad = np.asarray(dout).astype(exact)
    with np.errstate(all="ignore"):
        dS, dS_error, P_error = _pair_errors(dense, grad, dlse, softcap, name)
        visible = dense.visible
        products: list[tuple[Any, Floats, Floats, Floats, Bools, Bools]]
        products = [  # the last two: which pairs are visible, and which of these add anything
            (dense.scale, dS, dS_error, dense.k, visible, dS != 0),
            (dense.scale, dS.mT, dS_error.mT, dense.q, visible.mT, visible.mT),
            (1, dense.weights.mT, P_error.mT, grad, visible.mT, visible.mT),
        ]
        gradients, bounds = [], []
        for operand, product in zip(operands, products, strict=True):
            factor, pairs, error, rows, visible, adding = product
            gradient, magnitude, error = (
                _own_sum(factor * _visible_sum(*product, adding), operand.shape)
                for product in ((pairs, rows), (abs(pairs), abs(rows)), (error, abs(rows)))
            )
            count = visible.sum(axis=-1, keepdims=True)
            sums = u_acc * (8 + np.sqrt(_own_sum(count, (*operand.shape[:-1], 1))))
            own = operand.dtype.name if operand.dtype.name in UNIT_ROUNDOFF else name
            u, tiny = (max(table[own], table[name]) for table in (UNIT_ROUNDOFF, _TINY))
            gradients.append(gradient)
            bounds.append(
                2 * (np.abs(error) + sums * np.abs(magnitude) + u * np.abs(gradient) + tiny)
            )
    return BackwardBound(*gradients, *bounds)


def _pair_errors(
    dense: _Dense, dout: Floats, dlse: ArrayLike | None, softcap: Real | None, dtype: str
) -> tuple[Floats, Floats, Floats]:
    """dS, and the errors of dS and P, as :func:`backward_bound` derives them."""
    u, u_acc, _ = _precision(dtype)
    under = tiny = _TINY[dtype]
    dot = (math.sqrt(dout.shape[-1]) + 2) * u_acc
    delta = _row_sums(dense, dout, dlse)
    dS = _score_gradient(dense, dout, delta)
    dP = np.where(dense.visible, dout @ dense.v.mT, 0)
    sigma_x, sigma = _score_errors(dense, softcap, u_acc)
    sums = u_acc * (8 + np.sqrt(dense.visible.sum(axis=-1, keepdims=True)))
    rho = 2 * sigma + sums + 6 * u_acc * np.maximum(1, np.abs(dense.lse))[..., None]

    dP_error = dot * (np.abs(dout) @ np.abs(dense.v).mT)
    mean_dP_error = (((u + 2 * sigma) * dense.weights + under) * np.abs(dP)).sum(-1, keepdims=True)
    weighted = _visible_sum(dense.weights, np.abs(dense.v), dense.visible)
    channels = sums * weighted + (u + dot) * np.abs(dense.out) + tiny
    delta_error = mean_dP_error + (np.abs(dout) * channels).sum(axis=-1, keepdims=True)
    if dlse is not None:
        delta_error = delta_error + u_acc * np.abs(np.asarray(dlse).astype(dout.dtype))[..., None]

    slope_error = 0 if softcap is None else 2 * dense.slope * sigma_x / softcap + 20 * u_acc
    dS_error = dense.weights * dense.slope * (dP_error + delta_error)
    dS_error = dS_error + dense.weights * np.abs(dP - delta) * slope_error
    dS_error = dS_error + np.abs(dS) * (rho + 4 * u_acc + u) + under
    P_error = dense.weights * (rho + u) + under
    return dS, np.where(dense.visible, dS_error, 0), np.where(dense.visible, P_error, 0)


def _precision(dtype: str) -> tuple[float, float, Float]:
    """Unit roundoffs of `dtype` and of sums in it, and the type of its reference."""
    if dtype == "float64":
        return UNIT_ROUNDOFF[dtype], UNIT_ROUNDOFF[dtype], np.longdouble
    return UNIT_ROUNDOFF[dtype], UNIT_ROUNDOFF["float32"], np.float64


def _score_errors(dense: _Dense, softcap: Real | None, u_acc: float) -> tuple[Floats, Floats]:
    """The sigmas of :func:`forward_bound`, columns: before softcap and behind it."""
    products = np.abs(dense.q) @ np.abs(dense.k).mT
    # A score of -inf is exact, and after any other special one the row's results are special.
    products = np.where(dense.visible & np.isfinite(products), products, 0)
    largest = abs(dense.scale) * products.max(axis=-1, keepdims=True, initial=0)
    sigma = (math.sqrt(dense.q.shape[-1]) + 2) * u_acc * largest
    if softcap is None:
        return sigma, sigma
    return sigma, sigma + 8 * u_acc * np.minimum(largest, softcap)


def _ratio(got: NDArray[Any], expected: Floats, limit: Floats) -> Floats:
    got = got.astype(expected.dtype)
    with np.errstate(all="ignore"):
        # A NaN is met by a NaN, an infinity by the same one; anything else there is wrong.
        special = ~(np.isfinite(got) & np.isfinite(expected))
        same = (got == expected) | (np.isnan(got) & np.isnan(expected))
        error = np.abs(got - expected)
        ratio = np.where(error == 0, 0, error / limit)
    return np.where(special, np.where(same, 0, np.inf), ratio)
