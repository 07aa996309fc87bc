r"""How far a correct result may be from the reference, elementwise, derived once.

Notation: u is the unit roundoff of the result's type, u_acc that of the sums (2^-24; 2^-53 for
float64), n the number of keys a row sees, s the score, P the softmax weights, "@" the product.

**Scores.** A product of D terms, in any order of summation, is off by about sqrt(D) u_acc |q||k|
(products of absolute values; the worst case D u_acc would need all roundings to conspire), and
`scale` and its rounding add at most 2 u_acc of that. So, with the largest |q||k| over the keys
the row sees,

    sigma = (sqrt(D) + 2) u_acc scale max(|q||k|).

**Softcap.** c tanh(s / c) has a slope of at most 1 and passes sigma on undiminished. Its own
evaluation: dividing (u_acc, and u_acc for c as stored) moves the argument x by 2 u_acc |x|, which
moves tanh by at most 2 u_acc |x| (1 - tanh(x)^2) <= 2 u_acc |tanh x|; tanh itself is good to
2 ulp, which is 4 u_acc relative (CUDA documents at most 2 for tanhf, 1 for tanh); the product by
the stored c adds 2 u_acc. In all 8 u_acc |c tanh(s / c)|, to be added to sigma, where
|c tanh(s / c)| <= min(c, max |s|) and max |s| <= scale max(|q||k|).

**Weights.** The weight exp(s_j - m) / l changes relatively by the error of s_j, and by the
weighted mean of all such errors through l: 2 sigma. The difference s_j - m is rounded as well:
u_acc |s_j - m| <= 2 u_acc max|s|, which is in sigma's 2 u_acc per score. Exponential, running
rescaling and division contribute a few u_acc, taken as 8, and the sums over n keys sqrt(n) u_acc.
Half types round P to the result's type before the product with V: u.

**Output.** Summed over the keys, and with the final rounding u |O|:

    |O - O_ref| <= 2 [u (P@|V| + |O|) + (2 sigma + u_acc (8 + sqrt n)) P@|V| + under + tiny].

`under`: float16 weights below 2^-14 are subnormal with an absolute error of 2^-25 each, so
2^-25 times the sum of |V| over the visible keys. `tiny`: half the smallest subnormal of float16,
2^-25; float32 and bfloat16 kernels may flush subnormals (CuPy compiles with -ftz=true), 2^-126.
The factor 2 is for what the square roots leave out; a correct engine stays below half the bound.

**lse.** lse = m + log(l) moves by at most the largest error of a score (sigma) and by the
relative error of l, and is rounded at its own magnitude:

    |lse - ref| <= 2 (sigma + u_acc (8 + sqrt n)) max(1, |lse|).

A single dropped or extra key moves lse by about 1/n: far above this bound in every type, where
in half precision O cannot tell.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from cuflash import reference

UNIT_ROUNDOFF = {"float16": 2**-11, "bfloat16": 2**-8, "float32": 2**-24, "float64": 2**-53}
UNDERFLOW = {"float16": 2**-25, "bfloat16": 0.0, "float32": 0.0, "float64": 0.0}
TINY = {"float16": 2**-25, "bfloat16": 2**-126, "float32": 2**-126, "float64": 0.0}


class Bound(NamedTuple):
    """The reference's results and how far from them a correct one may be."""

    out: np.ndarray
    lse: np.ndarray
    out_bound: np.ndarray
    lse_bound: np.ndarray


def forward_bound(
    q, k, v, dtype, *, softcap=None, scale=None, enable_gqa=False, **options
) -> Bound:
    """The reference of a forward pass in `dtype`, and the bounds on its errors."""
    dtype = np.dtype(dtype).name
    exact = np.longdouble if dtype == "float64" else np.float64
    q, k, v = (on_host(x).astype(exact) for x in (q, k, v))
    if enable_gqa:
        k, v = (np.repeat(x, q.shape[-3] // x.shape[-3], axis=-3) for x in (k, v))
    head_dim = q.shape[-1]
    given = dict(options, softcap=softcap, scale=scale, dtype=exact)
    out, lse = reference.attention(q, k, v, return_lse=True, **given)

    leading = out.shape[:-2]
    visible = reference.visible_keys((*leading, q.shape[-2], k.shape[-2]), **options)
    count = visible.sum(axis=-1, keepdims=True)
    u, u_acc = UNIT_ROUNDOFF[dtype], UNIT_ROUNDOFF["float64" if dtype == "float64" else "float32"]
    with np.errstate(all="ignore"):
        weighted = reference.attention(q, k, np.abs(v), **given)
        products = np.where(visible, np.abs(q) @ np.abs(k).swapaxes(-1, -2), 0)
        scale = abs(scale) if scale is not None else 1 / math.sqrt(head_dim)
        largest = scale * products.max(axis=-1, keepdims=True, initial=0)
        sigma = (math.sqrt(head_dim) + 2) * u_acc * largest
        if softcap is not None:
            sigma = sigma + 8 * u_acc * np.minimum(largest, softcap)
        sums = u_acc * (8 + np.sqrt(count))
        error = u * (weighted + np.abs(out)) + (2 * sigma + sums) * weighted + TINY[dtype]
        if UNDERFLOW[dtype]:
            error += UNDERFLOW[dtype] * count * _mean_magnitude(q, k, v, options)
        lse_error = ((sigma + sums) * np.maximum(1, np.abs(lse))[..., None])[..., 0]
    return Bound(out, lse, 2 * error, 2 * lse_error)


def _mean_magnitude(q, k, v, options):
    # Queries of zeros see all their keys alike: the reference averages |V| over them.
    return reference.attention(np.zeros_like(q), np.nan_to_num(k), np.abs(v), **options)


def forward_ratios(out, lse, bound: Bound) -> tuple[np.ndarray, np.ndarray | None]:
    """Error over bound for each element; infinite where NaN or infinity is out of place."""
    return (
        _ratio(on_host(out), bound.out, bound.out_bound),
        None if lse is None else _ratio(on_host(lse), bound.lse, bound.lse_bound),
    )


def assert_forward_close(out, lse, q, k, v, *, plan=None, dtype=None, **options) -> float:
    """Fail if an element of `out` or `lse` is out of bounds; return the worst error over bound.

    `lse` may be None. `dtype` is the precision that is promised, by default that of `out`;
    `plan` is printed when the test fails.
    """
    bound = forward_bound(q, k, v, out.dtype if dtype is None else dtype, **options)
    assert out.shape == bound.out.shape, f"out {out.shape}, expected {bound.out.shape}\n{plan}"
    if lse is not None:
        assert lse.shape == bound.lse.shape, f"lse {lse.shape}, not {bound.lse.shape}\n{plan}"
    ratios = dict(zip(("out", "lse"), forward_ratios(out, lse, bound), strict=True))
    # lse first: it tells more of a key too many or too few.
    for name in ("lse", "out"):
        if ratios[name] is None or not ratios[name].size or ratios[name].max() <= 1:
            continue
        got = on_host(out if name == "out" else lse)
        expected, limit = getattr(bound, name), getattr(bound, f"{name}_bound")
        raise AssertionError(_report(name, got, expected, limit, ratios[name], plan))
    return max((float(r.max()) for r in ratios.values() if r is not None and r.size), default=0.0)


def on_host(array) -> np.ndarray:
    """A NumPy array of what may be a CuPy array."""
    return array.get() if hasattr(array, "get") else np.asarray(array)


def _ratio(got, expected, limit):
    got = got.astype(expected.dtype)
    with np.errstate(all="ignore"):
        # A NaN is met by a NaN, an infinity by the same one; anything else there is wrong.
        special = ~(np.isfinite(got) & np.isfinite(expected))
        same = (got == expected) | (np.isnan(got) & np.isnan(expected))
        error = np.abs(got - expected)
        ratio = np.where(error == 0, 0, error / limit)
    return np.where(special, np.where(same, 0, np.inf), ratio)


def _report(name, got, expected, limit, ratio, plan) -> str:
    worst = tuple(int(i) for i in np.unravel_index(np.argmax(ratio), ratio.shape))
    special = int(np.isinf(ratio).sum())
    lines = [
        f"{name}: {int((ratio > 1).sum())} of {ratio.size} elements out of bounds, "
        f"{special} of them NaN or infinite in one place only",
        f"worst at {worst}: got {got[worst]}, expected {expected[worst]}",
        f"error {abs(float(got[worst]) - float(expected[worst])):.3e}, "
        f"bound {float(limit[worst]):.3e}, ratio {float(ratio[worst]):.2f}",
    ]
    return "\n".join([*lines, f"{plan}"] if plan is not None else lines)
