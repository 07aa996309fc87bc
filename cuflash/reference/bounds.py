"""How far from the reference a correct result may be."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from .dense import Dense, own_sum, row_sums, score_gradient, value_gradient, visible_sum

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, DTypeLike, NDArray
    from typing_extensions import Unpack

    from .dense import Bools, Float, Floats, Scoring


UNIT_ROUNDOFF = {"float16": 2**-11, "bfloat16": 2**-8, "float32": 2**-24, "float64": 2**-53}
UNDERFLOW = {"float16": 2**-25, "bfloat16": 0.0, "float32": 0.0, "float64": 0.0}
TINY = {"float16": 2**-25, "bfloat16": 2**-126, "float32": 2**-126, "float64": 0.0}


class Bound(NamedTuple):
    """The reference's results and how far from them a correct one may be, elementwise.

    Attributes
    ----------
    out, lse : ndarray
        The reference's results: float64, or `numpy.longdouble` for results in float64.
    out_bound, lse_bound : ndarray
        How far from these a correct result may be.
    """

    out: NDArray[np.floating[Any]]
    lse: NDArray[np.floating[Any]]
    out_bound: NDArray[np.floating[Any]]
    lse_bound: NDArray[np.floating[Any]]

    def ratios(
        self, out: NDArray[Any], lse: NDArray[Any] | None = None
    ) -> tuple[Floats, Floats | None]:
        """Error over bound of each element; infinite where NaN or infinity is out of place.

        Raises
        ------
        ValueError
            For a result of another shape.
        """
        return (
            _checked_ratio("out", out, self.out, self.out_bound),
            None if lse is None else _checked_ratio("lse", lse, self.lse, self.lse_bound),
        )


def forward_bound(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    dtype: DTypeLike,
    *,
    page_table: ArrayLike | None = None,
    **options: Unpack[Scoring],
) -> Bound:
    r"""The reference of a forward pass, and how far from it a correct result may be.

    Parameters
    ----------
    q, k, v : array_like
        As in :func:`attention`, with the values that the pass was given.
    dtype : data type
        The precision that is promised: that of the result. For float64 the reference is computed
        in `numpy.longdouble`.
    page_table, **options
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
    |q||k| over the keys the row sees::

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

    **Output.** Summed over the keys, and with the final rounding u |O|::

        |O - O_ref| <= 2 [u (P@|V| + |O|) + (2 sigma + u_acc (8 + sqrt n)) P@|V| + under + tiny].

    `under`: float16 weights below 2^-14 are subnormal with an absolute error of 2^-25 each, so
    2^-25 times the sum of |V| over the visible keys. `tiny`: half the smallest subnormal of
    float16, 2^-25; float32 and bfloat16 kernels may flush subnormals (CuPy compiles with
    -ftz=true), 2^-126. The factor 2 is for what the square roots leave out; a correct engine
    stays below half the bound.

    **Dropout.** Weights that are kept are divided by 1 - p, others are 0: these are the P of the
    output, and those that underflow are off by 2^-25 / (1 - p). 1 - p is rounded, and so is its
    product with l: 2 u_acc, in the 8. lse knows nothing of it.

    **lse.** lse = m + log(l) moves by at most the largest error of a score (sigma) and by the
    relative error of l, and is rounded at its own magnitude::

        |lse - ref| <= 2 (sigma + u_acc (8 + sqrt n)) max(1, |lse|).

    A single dropped or extra key moves lse by about 1/n: far above this bound in every type,
    where in half precision O cannot tell.
    """
    name = name_of(dtype)
    u, u_acc, exact = precision(name)
    dense = Dense.of(q, k, v, exact, page_table=page_table, **options)
    with np.errstate(all="ignore"):
        sigma = score_errors(dense, u_acc).behind
        sums = sum_errors(dense, u_acc)
        weighted = visible_sum(dense.weights * dense.kept, np.abs(dense.v), dense.visible)
        seen = visible_sum(dense.visible * dense.kept, np.abs(dense.v), dense.visible)
        error = u * (weighted + np.abs(dense.out)) + (2 * sigma + sums) * weighted
        error += UNDERFLOW[name] * seen + TINY[name]
        lse_error = ((sigma + sums) * np.maximum(1, np.abs(dense.lse))[..., None])[..., 0]
    return Bound(dense.out, dense.lse, 2 * error, 2 * lse_error)


class BackwardBound(NamedTuple):
    """The reference's gradients and how far from them correct ones may be, elementwise.

    Attributes
    ----------
    dq, dk, dv : ndarray
        The reference's gradients: float64, or `numpy.longdouble` for results in float64.
    dq_bound, dk_bound, dv_bound : ndarray
        How far from these correct gradients may be.
    """

    dq: NDArray[np.floating[Any]]
    dk: NDArray[np.floating[Any]]
    dv: NDArray[np.floating[Any]]
    dq_bound: NDArray[np.floating[Any]]
    dk_bound: NDArray[np.floating[Any]]
    dv_bound: NDArray[np.floating[Any]]

    def ratios(
        self, dq: NDArray[Any], dk: NDArray[Any], dv: NDArray[Any]
    ) -> tuple[Floats, Floats, Floats]:
        """Error over bound of each element; infinite where NaN or infinity is out of place.

        Raises
        ------
        ValueError
            For a result of another shape.
        """
        return (
            _checked_ratio("dq", dq, self.dq, self.dq_bound),
            _checked_ratio("dk", dk, self.dk, self.dk_bound),
            _checked_ratio("dv", dv, self.dv, self.dv_bound),
        )


def backward_bound(
    dout: ArrayLike,
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    dtype: DTypeLike,
    *,
    dlse: ArrayLike | None = None,
    **options: Unpack[Scoring],
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
    dlse, **options
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
    in sigma's 2 u_acc per score. Relative to P in all::

        rho = 2 sigma + u_acc (8 + sqrt n + 6 max(1, |lse|)).

    **dP.** A product of E terms: (sqrt(E) + 2) u_acc |dout|@|V|^T.

    **delta.** The output's error has three parts. Those of its weights, u and 2 sigma as in the
    forward, are errors of a mean over the keys, which `dout` turns into errors of the mean of dP:
    (u + 2 sigma) P@|dP|, and, from the underflow of float16 weights, 2^-25 times the sum of |dP|
    over the visible keys. The sums' u_acc (8 + sqrt n) P@|V| and the final rounding u |O| + tiny
    are errors of each channel, to be multiplied by |dout|. Then the product with `dout` is a sum
    of E terms, (sqrt(E) + 2) u_acc |dout| |O|, and subtracting `dlse` rounds once more,
    u_acc |dlse|. In all, with channels summed::

        delta_error = (u + 2 sigma) P@|dP| + under + u_acc |dlse| + |dout| . [
            u_acc (8 + sqrt n) P@|V| + u |O| + tiny + (sqrt(E) + 2) u_acc |O| ].

    **Softcap's slope.** An error sigma_x of the argument (sigma without softcap's own part)
    moves t by f sigma_x / c, and f by 2 |t| times that. t itself is off by 8 u_acc |t|, and
    squaring, subtracting and multiplying c and 1 / c into it round three to four numbers of at
    most 1, and what kernels have for half types is good to 8 u_acc::

        slope_error = 2 f sigma_x / c + 20 u_acc.

    **dS.** dP and delta cancel, so their errors are absolute, and rho is relative to what
    remains. Two products and the difference round: 4 u_acc. P may be flushed where it is subnormal
    in the type of sums: `flush`, 2^-126 and in float64 0. Half types round dS to the result's type
    before the products with K and Q: u, and `under` for the elements that are subnormal::

        dS_error = P f (dP_error + delta_error) + |dP - delta| (P slope_error + flush f)
                   + |dS| (rho + 4 u_acc + u) + under.

    **Dropout.** D is 0 or 1 / (1 - p), and dP is D times the product, as is its error. P D is what
    meets V and dout, in the output's error as well. Kernels take P / (1 - p) from an exponent that
    holds log(1 - p), and (1 - p) delta; NumPy multiplies dP and dV. So rho grows by
    2 u_acc (max(1, |lse|) + |log(1 - p)|), and dP and delta are off by 2 u_acc of themselves.

    **Gradients.** Summed over n visible pairs, in all heads that share the row of the gradient,
    products of absolute values give::

        dQ_error = scale [dS_error @ |K| + u_acc (8 + sqrt n) |dS| @ |K|],
        dK_error = scale [dS_error^T @ |Q| + u_acc (8 + sqrt n) |dS|^T @ |Q|],
        dV_error = [P (rho + u) + under]^T @ |dout| + u_acc (8 + sqrt n) P^T @ |dout|,

    and the bound is ``2 [error + u |gradient| + tiny]``, where u and tiny are those of the
    gradient's type. The factor 2 is for what the square roots leave out; a correct engine stays
    below half the bound. `under` here is half the smallest subnormal of float16, 2^-25, and
    2^-126 for bfloat16 and float32, where kernels may flush. Nothing allows for overflow: float16
    inputs whose dS or gradients go beyond 65504 have no correct result in this precision.
    """
    name = name_of(dtype)
    _, u_acc, exact = precision(name)
    operands = [np.asarray(x) for x in (q, k, v)]
    dense = Dense.of(q, k, v, exact, **options)
    grad = np.asarray(dout).astype(exact)
    with np.errstate(all="ignore"):
        dS, dS_error, P_error = _pair_errors(dense, grad, dlse, name)
        visible = dense.visible
        products: list[tuple[Any, Floats, Floats, Floats, Bools, Bools]]
        products = [  # the last two: which pairs are visible, and which of these add anything
            (dense.scale, dS, dS_error, dense.k, visible, dS != 0),
            (dense.scale, dS.mT, dS_error.mT, dense.q, visible.mT, visible.mT),
            (1, dense.kept_weights.mT, P_error.mT, grad, visible.mT, visible.mT),
        ]
        gradients, bounds = [], []
        for operand, product in zip(operands, products, strict=True):
            factor, pairs, error, rows, visible, adding = product
            gradient, magnitude, error = (
                own_sum(factor * visible_sum(*product, adding), operand.shape)
                for product in ((pairs, rows), (abs(pairs), abs(rows)), (error, abs(rows)))
            )
            count = visible.sum(axis=-1, keepdims=True)
            sums = u_acc * (8 + np.sqrt(own_sum(count, (*operand.shape[:-1], 1))))
            own = operand.dtype.name if operand.dtype.name in UNIT_ROUNDOFF else name
            u, tiny = (max(table[own], table[name]) for table in (UNIT_ROUNDOFF, TINY))
            gradients.append(gradient)
            bounds.append(
                2 * (np.abs(error) + sums * np.abs(magnitude) + u * np.abs(gradient) + tiny)
            )
    return BackwardBound(*gradients, *bounds)


def _pair_errors(
    dense: Dense, dout: Floats, dlse: ArrayLike | None, dtype: str
) -> tuple[Floats, Floats, Floats]:
    """dS, and the errors of dS and P, as :func:`backward_bound` derives them."""
    u, u_acc, _ = precision(dtype)
    under = TINY[dtype]
    delta, dP, dP_error, delta_error, rho = factor_errors(dense, dout, dlse, dtype)
    dS = score_gradient(dense, dout, delta)
    slope_error = score_errors(dense, u_acc).slope
    slope, flush = np.abs(dense.slope), 0.0 if dtype == "float64" else TINY["float32"]
    dS_error = dense.weights * slope * (dP_error + delta_error)
    dS_error = dS_error + np.abs(dP - delta) * (dense.weights * slope_error + flush * slope)
    dS_error = dS_error + np.abs(dS) * (rho + 4 * u_acc + u) + under
    P_error = dense.kept * (dense.weights * (rho + u + _scaling(dense, u_acc)) + under)
    counts = dense.visible & (dense.kept != 0)
    return dS, np.where(dense.visible, dS_error, 0), np.where(counts, P_error, 0)


def factor_errors(
    dense: Dense, dout: Floats, dlse: ArrayLike | None, dtype: str
) -> tuple[Floats, Floats, Floats, Floats, Floats]:
    """delta, dP, the errors of dP and of delta, and rho, as :func:`backward_bound` derives them."""
    u, u_acc, _ = precision(dtype)
    under = tiny = TINY[dtype]
    dot = (math.sqrt(dout.shape[-1]) + 2) * u_acc
    scaling = _scaling(dense, u_acc)
    delta = row_sums(dense, dout, dlse)
    dP = np.where(dense.visible, value_gradient(dense, dout), 0)
    errors = score_errors(dense, u_acc)
    sigma, sums = errors.behind, sum_errors(dense, u_acc)
    largest = np.maximum(1, np.abs(dense.lse))[..., None]
    rho = 2 * sigma + sums + 6 * u_acc * largest
    rho = rho + scaling * (largest + np.log(dense.kept.max(initial=1)))

    dP_error = dense.kept * (dot * (np.abs(dout) @ np.abs(dense.v).mT)) + scaling * np.abs(dP)
    mean_dP_error = (((u + 2 * sigma) * dense.weights + under) * np.abs(dP)).sum(-1, keepdims=True)
    weighted = visible_sum(dense.weights * dense.kept, np.abs(dense.v), dense.visible)
    channels = sums * weighted + (u + dot) * np.abs(dense.out) + tiny
    delta_error = mean_dP_error + (np.abs(dout) * channels).sum(axis=-1, keepdims=True)
    delta_error = delta_error + scaling * np.abs(delta)
    if dlse is not None:
        delta_error = delta_error + u_acc * np.abs(np.asarray(dlse).astype(dout.dtype))[..., None]
    return delta, dP, dP_error, delta_error, rho


def _scaling(dense: Dense, u_acc: float) -> float:
    """What dropout's factor adds to relative errors."""
    return 2 * u_acc * float((dense.kept != 1).any())


def name_of(dtype: DTypeLike) -> str:
    """The name of a type that results may have, or a TypeError."""
    name = np.dtype(dtype).name
    if name not in UNIT_ROUNDOFF:
        raise TypeError(f"dtype is {name}: results are of {', '.join(UNIT_ROUNDOFF)}")
    return name


def precision(dtype: str) -> tuple[float, float, Float]:
    """Unit roundoffs of `dtype` and of sums in it, and the type of its reference."""
    if dtype == "float64":
        return UNIT_ROUNDOFF[dtype], UNIT_ROUNDOFF[dtype], np.longdouble
    return UNIT_ROUNDOFF[dtype], UNIT_ROUNDOFF["float32"], np.float64


class ScoreErrors(NamedTuple):
    """The sigmas of :func:`forward_bound`, columns, and the error of each slope."""

    before: Floats
    behind: Floats
    slope: Floats | float


def score_errors(dense: Dense, u_acc: float) -> ScoreErrors:
    """What rounding does to the scores, where sums have the unit roundoff `u_acc`."""
    products = np.abs(dense.q) @ np.abs(dense.k).mT
    # A score of -inf is exact, and after any other special one the row's results are special.
    products = np.where(dense.visible & np.isfinite(products), products, 0)
    largest = abs(dense.scale) * products.max(axis=-1, keepdims=True, initial=0)
    sigma = (math.sqrt(dense.q.shape[-1]) + 2) * u_acc * largest
    changes = dense.changes
    if not changes.score:
        return ScoreErrors(sigma, sigma, 0)
    if changes.softcap is not None:
        behind = sigma + 8 * u_acc * np.minimum(largest, changes.softcap)
        slope = 2 * dense.slope * sigma / changes.softcap + 20 * u_acc
        return ScoreErrors(sigma, behind, slope)
    found = changes.errors(dense.scale * (dense.q @ dense.k.mT), sigma, u_acc)
    seen = dense.visible & np.isfinite(found.value)
    errors = np.where(seen, found.error + u_acc * np.abs(found.value), 0)
    behind = errors.max(axis=-1, keepdims=True, initial=0)
    return ScoreErrors(sigma, behind, np.where(seen, found.slope_error, 0))


def sum_errors(dense: Dense, u_acc: float) -> Floats:
    """Relative errors of the weights' sums, a column. A sink is a key more, and its exponent,
    lse - sink, is rounded.
    """
    errors: Floats = u_acc * (8 + np.sqrt(dense.visible.sum(axis=-1, keepdims=True)))
    if not dense.changes.score.form.sink:
        return errors
    sink = dense.changes.sinks(dense.q.dtype.type)
    lse = dense.lse[..., None]
    rounded = np.where(np.isfinite(sink) & np.isfinite(lse), np.abs(sink) + 2 * np.abs(lse), 0)
    return errors + u_acc * rounded


def ratio_of(got: NDArray[Any], expected: Floats, limit: Floats) -> Floats:
    """Error over bound of each element; infinite where NaN or infinity is out of place."""
    got = got.astype(expected.dtype)
    with np.errstate(all="ignore"):
        # A NaN is met by a NaN, an infinity by the same one; anything else there is wrong.
        special = ~(np.isfinite(got) & np.isfinite(expected))
        same = (got == expected) | (np.isnan(got) & np.isnan(expected))
        error = np.abs(got - expected)
        ratio = np.where(error == 0, 0, error / limit)
    return np.where(special, np.where(same, 0, np.inf), ratio)


def _checked_ratio(name: str, got: NDArray[Any], expected: Floats, limit: Floats) -> Floats:
    """The :func:`ratio_of` a result, or a ValueError: it is not broadcast."""
    if got.shape != expected.shape:
        raise ValueError(f"{name} has shape {got.shape}: it must be {expected.shape}")
    return ratio_of(got, expected, limit)
