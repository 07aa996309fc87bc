"""Comparison with the reference, within the bounds that `cuflash.reference` derives."""

from __future__ import annotations

import numpy as np

from cuflash import reference
from cuflash.reference import UNIT_ROUNDOFF  # noqa: F401  (part of what tests compare with)
from cuflash.reference.bounds import ratio_of


def forward_bound(q, k, v, dtype, **options) -> reference.Bound:
    """:func:`cuflash.reference.forward_bound` of arrays that may be CuPy's."""
    return reference.forward_bound(*map(on_host, (q, k, v)), dtype, **options)


def assert_forward_close(out, lse, q, k, v, *, plan=None, dtype=None, **options) -> float:
    """Fail if an element of `out` or `lse` is out of bounds; return the worst error over bound.

    `lse` may be None. `dtype` is the precision that is promised, by default that of `out`;
    `plan` is printed when the test fails.
    """
    bound = forward_bound(q, k, v, out.dtype if dtype is None else dtype, **options)
    assert out.shape == bound.out.shape, f"out {out.shape}, expected {bound.out.shape}\n{plan}"
    if lse is not None:
        assert lse.shape == bound.lse.shape, f"lse {lse.shape}, not {bound.lse.shape}\n{plan}"
    results = {"out": on_host(out), "lse": None if lse is None else on_host(lse)}
    ratios = dict(zip(results, bound.ratios(**results), strict=True))
    # lse first: it tells more of a key too many or too few.
    return _worst(bound, results, ratios, ("lse", "out"), plan)


def assert_backward_close(
    grads, dout, q, k, v, *, plan=None, dtype=None, dlse=None, **options
) -> float:
    """Fail if an element of `grads` is out of bounds; return the worst error over bound.

    `grads` are dq, dk and dv, each in the shape and the type of its operand. `dtype` is the
    precision that is promised, by default that of the output; `plan` is printed when the test
    fails.
    """
    operands = [on_host(x) for x in (q, k, v)]
    results = dict(zip(("dq", "dk", "dv"), map(on_host, grads), strict=True))
    for (name, got), operand in zip(results.items(), operands, strict=True):
        assert got.shape == operand.shape, f"{name} {got.shape}, not {operand.shape}\n{plan}"
        assert got.dtype == operand.dtype, f"{name} {got.dtype}, not {operand.dtype}\n{plan}"
    bound = reference.backward_bound(
        on_host(dout),
        *operands,
        np.result_type(*operands) if dtype is None else dtype,
        dlse=None if dlse is None else on_host(dlse),
        **options,
    )
    ratios = dict(zip(results, bound.ratios(**results), strict=True))
    # dv first: it depends on P alone, the others on P and more.
    return _worst(bound, results, ratios, ("dv", "dq", "dk"), plan)


def assert_arrays_close(grads, wrt, dout, q, k, v, *, plan=None, dtype=None, **options) -> float:
    """The same for the gradients of the arrays that `wrt` names."""
    host = [on_host(x) for x in (dout, q, k, v)]
    dtype = np.result_type(*host[1:]) if dtype is None else dtype
    worst = 0.0
    bounds = reference.array_bounds(*host, dtype, wrt=wrt, **options)
    for name, got, (expected, limit) in zip(wrt, map(on_host, grads), bounds, strict=True):
        assert got.shape == expected.shape, f"d{name} {got.shape}, not {expected.shape}\n{plan}"
        ratio = ratio_of(got, expected, limit)
        if not (ratio <= 1).all():
            raise AssertionError(_report(f"d{name}", got, expected, limit, ratio, plan))
        worst = max(worst, float(ratio.max(initial=0)))
    return worst


def on_host(array) -> np.ndarray:
    """A NumPy array of what may be a CuPy array."""
    return array.get() if hasattr(array, "get") else np.asarray(array)


def _worst(bound, results, ratios, names, plan) -> float:
    for name in names:
        # Written so that a ratio that is NaN fails.
        if ratios[name] is not None and not (ratios[name] <= 1).all():
            expected, limit = getattr(bound, name), getattr(bound, f"{name}_bound")
            raise AssertionError(_report(name, results[name], expected, limit, ratios[name], plan))
    return max((float(r.max()) for r in ratios.values() if r is not None and r.size), default=0.0)


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
