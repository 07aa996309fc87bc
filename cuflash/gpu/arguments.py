"""A plan's argument, packed: all of the kernels' struct but its pointers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..dropout import Dropout
from ..masks.band import MAX_SHIFT
from ..operands.layout import LENGTHS, MAX_LENGTH, Layout, MaskLayout
from ..planning.params import OPERANDS, params_dtype
from ..planning.plan import Plan
from ..planning.planes import again_tiles
from ..planning.problem import PLANED, Problem, own_strides
from ..planning.visible import mask_field_of
from ..scores.emit import field_of
from ..scores.score import Score

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ..scores.captured import Captured
    from ..scores.wanted import Target

# A band's open side: as far as a shift and a position can be from another position. The sum of all
# three is still an int.
OPEN_WIDTH = MAX_SHIFT + MAX_LENGTH - 1


def reciprocal(divisor: int) -> int:
    """By which kernels divide numbers below 2^31: a factor and, above its 32 bits, a shift.

    With s = ceil(log2(divisor)) and m = ceil(2^(31 + s) / divisor), which has 32 bits,
    floor(n / divisor) = floor(n m / 2^(31 + s)) for all of them [1]_.

    References
    ----------
    .. [1] T. Granlund, P. Montgomery, "Division by Invariant Integers using Multiplication", 1994,
       theorem 4.2.
    """
    divisor = max(1, divisor)
    shift = (divisor - 1).bit_length()
    return -(-(1 << 31 + shift) // divisor) | shift << 32


# By the number of terms: up to which |y| tanh(y) is y times a polynomial in y^2 that is off by less
# than 1.8 2^-24 of itself; and its terms.
NEAR = {
    4: (0.4, (0.9999999019010429, -0.3333136245997937, 0.13270976773934, -0.047553604158490206)),
    3: (0.2, (0.9999998947912531, -0.3332859089878615, 0.1301540755200948)),
}
# Where its factors, and what they are multiplied by, are normal float32.
_NEAR_SCALES = 2.0**-17, 2.0**15
_NORMAL = 2.0**-126, 2.0**127


def near_tanh(scale: float, terms: int = 4, times: float = 1.0) -> tuple[float, list[float]]:
    """By which kernels compute `times` tanh(scale x) near 0: the largest |x| that is near, negative
    if none is, and factors of x, x^3, x^5 and so on.
    """
    (low, high), (least, most) = _NEAR_SCALES, _NORMAL
    limit, coefficients = NEAR[terms]
    if low <= scale <= high:
        factors = [times * x * scale ** (2 * n + 1) for n, x in enumerate(coefficients)]
        if all(least <= abs(x) <= most for x in factors):
            return limit / scale, factors
    return -1.0, [0.0] * terms


def pack(
    plan: Plan,
    layout: Layout,
    scale: float,
    score: Score,
    captured: Sequence[Captured] = (),
    dropout_p: float = 0.0,
    targets: Sequence[Target] = (),
    mask_held: Sequence[Any] = (),
) -> NDArray[Any]:
    """The argument with everything but its pointers, as an array of one structure."""
    problem, dtype = plan.problem, params_dtype(plan.problem)
    params = np.zeros(1, dtype)
    for name in OPERANDS[problem.backward]:
        params[f"{name}_row_stride"] = layout.rows[name]
        params[f"{name}_axis_stride"][0, : len(layout.axes)] = layout.axis_strides[name]
    for name in LENGTHS:
        params[f"{name}_stride"][0, : len(layout.axes)] = layout.axis_strides[name]
    params["axis_size"][0, : len(layout.axes)] = layout.axes
    params["axes"] = len(layout.axes)
    params["axis_reciprocal"][0, : len(layout.axes)] = [reciprocal(x) for x in layout.axes]
    params["heads"], params["entries"] = problem.heads, problem.head_count // max(1, problem.heads)
    params["head_count"] = problem.head_count
    params["query_length"] = problem.query_length
    params["key_length"] = problem.key_length
    band = problem.band
    params["band_left"] = OPEN_WIDTH if band.left is None else min(band.left, OPEN_WIDTH)
    params["band_right"] = OPEN_WIDTH if band.right is None else min(band.right, OPEN_WIDTH)
    params["bottom_right"] = band.alignment == "bottom_right"
    params["shift"] = band.shift(problem.query_length, problem.key_length)
    params["query_tiles"], params["key_tiles"] = plan.query_tiles, plan.key_tiles
    params["query_lead"] = plan.query_lead
    params["span"], params["parts"] = plan.tile.span, plan.tile.parts(problem)
    params["tiles_reciprocal"] = reciprocal(plan.query_tiles)
    params["span_reciprocal"] = reciprocal(plan.tile.span)
    if problem.mask:
        params["mask_axis_stride"][0, : len(layout.axes)] = layout.axis_strides["mask"]
        params["mask_rows"], params["mask_columns"] = plan.tile.scored_tiles(problem)
    if problem.has_planes:
        for name in PLANED[problem.backward]:
            in_heads, params[f"{name}_planes_heads"] = own_strides(layout, name)
            params[f"{name}_planes_stride"][0, : len(layout.axes)] = in_heads
        params["again_tiles"] = again_tiles(problem)
    if layout.pages is not None:
        names = "pages", "k_page_stride", "v_page_stride", "page_table_stride"
        for name, value in zip(names, layout.pages):
            params[name] = value
    if layout.packing is not None:
        params["sequences"] = layout.packing.sequences
        params["longest_query"], params["longest_key"] = layout.packing.longest
        for name in (*LENGTHS, "mask"):
            params[f"{name}_entry_stride"] = layout.entry_strides.get(name, 0)
    if problem.mask == "elements":
        assert layout.mask is not None
        _pack_elements(params, problem, layout.mask)
    if problem.mask == "blocks" and problem.backward:
        params["chains"] = plan.chains
    params["section"] = plan.section
    params["scale"] = scale
    for name, value in score.numbers.items():
        params[f"capture_{name}"] = value
    for array in captured:
        if array.sizes:
            params[f"{field_of(array.capture)}_size"] = array.sizes
            params[f"{field_of(array.capture)}_stride"] = array.strides
    for capture, value in zip(problem.mask_form.captures, mask_held):
        if not capture.is_array:
            params[mask_field_of(capture)] = value
        elif capture.axes:
            params[f"{mask_field_of(capture)}_size"] = value.shape
    if problem.dropout:
        threshold, params["dropout_keeps_below"] = Dropout(dropout_p, 0).bound
        params["dropout_threshold"] = threshold * 0x10001  # of two weights
        params["kept_share"], params["kept_share_log2"] = 1 - dropout_p, math.log2(1 - dropout_p)
    for wanted, target in zip(problem.wrt, targets):
        strides = layout.axis_strides.get(target.operand, 0)
        params[f"{wanted.field}_axis_stride"][0, : len(layout.axes)] = strides
        params[f"{wanted.field}_step"] = target.steps
        if wanted.keeps_sequences:
            params[f"{wanted.field}_entry_stride"] = layout.entry_strides[target.operand]
    if score.form.unit:
        params["score_scale"] = in_units = scale / score.numbers[score.form.unit]
        if problem.has_near_scores:
            params["near_limit"], params["near_factors"] = near_tanh(in_units)
            exponents = score.numbers[score.form.unit] / math.log(2)
            for name, terms in (("near", 4), ("nearest", 3)):
                limit, factors = near_tanh(in_units, terms, exponents)
                params[f"{name}_exponents_limit"], params[f"{name}_exponents"] = limit, factors
    return params


def _pack_elements(params: NDArray[Any], problem: Problem, mask: MaskLayout) -> None:
    """Where the elements of a bool array lie; backward reads its transpose."""
    turned = -1 if problem.backward else 1
    params["mask_height"], params["mask_width"] = problem.extents[::turned]
    params["mask_row_stride"], params["mask_column_stride"] = mask.strides[::turned]
    params["list_axes"] = len(mask.axes)
    params["list_axis_size"][0, : len(mask.axes)] = mask.axes
    params["list_axis_stride"][0, : len(mask.axes)] = mask.axis_strides
