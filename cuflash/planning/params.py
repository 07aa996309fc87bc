"""The kernels' one argument: a struct that Python packs and CUDA C reads."""

from __future__ import annotations

import functools

import numpy as np

from ..masks.band import MAX_SHIFT
from ..operands.layout import MAX_AXES, MAX_LENGTH, Layout
from .plan import Plan

# A band's open side: as far as a shift and a position can be from another position. The sum of all
# three is still an int.
OPEN_WIDTH = MAX_SHIFT + MAX_LENGTH - 1

# Operands that have rows along the leading axes, by direction, and their C types.
_OPERANDS = {
    False: {"q": "const Element*", "k": "const Element*", "v": "const Element*",
            "out": "Element*", "lse": "Accumulator*"},
    True: {"dout": "const Element*", "q": "const Element*", "k": "const Element*",
           "v": "const Element*", "out": "const Element*", "lse": "const Accumulator*",
           "dlse": "const Accumulator*", "dq": "Element*", "dk": "Element*", "dv": "Element*"},
}  # fmt: skip
_LENGTHS = ("q_lengths", "kv_lengths", "q_offset")  # integers over the batch axes
# A mask's lists of tiles: given, or made in the workspace of a given array.
_LISTS = {"mask_ranges": "int2*", "mask_entries": "int4*", "mask_order": "int*",
          "mask_bits": "unsigned int*"}  # fmt: skip
_MASK = {"": {}, "blocks": _LISTS, "elements": {"mask": "const unsigned char*"}}
_MASK_WORKSPACE = {"": {}, "blocks": {}, "elements": {**_LISTS, "mask_states": "unsigned char*"}}
_WORKSPACE = {
    False: {"state": "Accumulator*"},
    True: {"row_stats": "Accumulator*", "dq_sum": "Accumulator*", "dk_sum": "Accumulator*",
           "dv_sum": "Accumulator*", "turns": "unsigned int*"},
}  # fmt: skip

# Fields behind the pointers, as (names, NumPy type, C type). "Accumulator" as the NumPy type
# stands for the plan's.
_SCALARS = (
    (("axis_size",), "i4 axes", "int"),
    (("axes", "heads", "head_count", "query_length", "key_length"), "i4", "int"),
    (("band_left", "band_right", "bottom_right", "shift"), "i4", "int"),
    (("query_tiles", "key_tiles", "section"), "i4", "int"),
    (("mask_axis_stride",), "i4 axes", "int"),  # in lists
    (("mask_rows", "mask_columns"), "i4", "int"),  # tiles of one list
    (("scale",), "Accumulator", "Accumulator"),
)
_ELEMENT_SCALARS = (
    (("mask_height", "mask_width", "list_axes"), "i4", "int"),
    (("list_axis_size",), "i4 axes", "int"),
    (("list_axis_stride",), "i8 axes", "long long"),
    (("mask_row_stride", "mask_column_stride"), "i8", "long long"),
)


def pointers(plan: Plan) -> tuple[str, ...]:
    """Names of the struct's leading fields, all pointers: operands, lengths, mask, workspace."""
    operands, mask, workspace = _pointer_types(plan)
    return (*operands, *_LENGTHS, *mask, *workspace)


def workspace_pointers(plan: Plan) -> tuple[str, ...]:
    """Those of them that point into the workspace."""
    return tuple(_pointer_types(plan)[2])


def _pointer_types(plan: Plan) -> tuple[dict[str, str], dict[str, str], dict[str, str]]:
    """C types of the operands, the mask and the parts of the workspace."""
    problem = plan.problem
    workspace = {**_MASK_WORKSPACE[problem.mask], **_WORKSPACE[problem.backward]}
    return _OPERANDS[problem.backward], _MASK[problem.mask], workspace


def _fields(plan: Plan):
    """(names, NumPy type, C type) of the fields before the captured scalars."""
    operands, mask, workspace = _pointer_types(plan)
    for name, c_type in operands.items():
        yield (name,), "u8", c_type
    yield _LENGTHS, "u8", "const Length*"
    for name, c_type in (mask | workspace).items():
        yield (name,), "u8", c_type
    yield tuple(f"{x}_row_stride" for x in operands), "i8", "long long"
    yield tuple(f"{x}_axis_stride" for x in operands), "i8 axes", "long long"
    yield tuple(f"{x}_stride" for x in _LENGTHS), "i8 axes", "long long"
    yield from _SCALARS
    if plan.problem.mask == "elements":
        yield from _ELEMENT_SCALARS


def fields(plan: Plan):
    """(name, NumPy type, count, C type) of every field; captured scalars come last."""
    for names, kind, c_type in _fields(plan):
        numpy_type, _, repeated = kind.partition(" ")
        if numpy_type == "Accumulator":
            numpy_type = plan.problem.accumulator
        for name in names:
            yield name, numpy_type, MAX_AXES if repeated else 1, c_type
    for name in plan.problem.captures:
        yield name, plan.problem.accumulator, 1, "Accumulator"


@functools.lru_cache(maxsize=256)
def params_dtype(plan: Plan) -> np.dtype:
    """NumPy's view of the kernel's Params struct."""
    columns = [(n, t, (count,)) if count > 1 else (n, t) for n, t, count, _ in fields(plan)]
    return np.dtype(columns, align=True)


def pack(plan: Plan, layout: Layout, scale: float, captured: tuple[float, ...]) -> np.ndarray:
    """The argument with everything but its pointers, as an array of one structure."""
    problem, dtype = plan.problem, params_dtype(plan)
    params = np.zeros(1, dtype)
    for name in _OPERANDS[problem.backward]:
        params[f"{name}_row_stride"] = layout.rows[name]
        params[f"{name}_axis_stride"][0, : len(layout.axes)] = layout.axis_strides[name]
    for name in _LENGTHS:
        params[f"{name}_stride"][0, : len(layout.axes)] = layout.axis_strides[name]
    params["axis_size"][0, : len(layout.axes)] = layout.axes
    params["axes"] = len(layout.axes)
    params["heads"] = problem.heads
    params["head_count"] = problem.head_count
    params["query_length"] = problem.query_length
    params["key_length"] = problem.key_length
    band = problem.band
    params["band_left"] = OPEN_WIDTH if band.left is None else min(band.left, OPEN_WIDTH)
    params["band_right"] = OPEN_WIDTH if band.right is None else min(band.right, OPEN_WIDTH)
    params["bottom_right"] = band.alignment == "bottom_right"
    params["shift"] = band.shift(problem.query_length, problem.key_length)
    params["query_tiles"], params["key_tiles"] = plan.query_tiles, plan.key_tiles
    if problem.mask:
        params["mask_axis_stride"][0, : len(layout.axes)] = layout.axis_strides["mask"]
        params["mask_rows"], params["mask_columns"] = plan.tile.scored_tiles(problem)
    if problem.mask == "elements":
        _pack_elements(params, problem, layout.mask)
    params["section"] = plan.section
    params["scale"] = scale
    for name, value in zip(problem.captures, captured):
        params[name] = value
    return params


def _pack_elements(params, problem, mask) -> None:
    """Where the elements of a bool array lie; backward reads its transpose."""
    turned = -1 if problem.backward else 1
    sizes = (problem.query_length, problem.key_length)[::turned]
    params["mask_height"], params["mask_width"] = sizes
    params["mask_row_stride"], params["mask_column_stride"] = mask.strides[::turned]
    params["list_axes"] = len(mask.axes)
    params["list_axis_size"][0, : len(mask.axes)] = mask.axes
    params["list_axis_stride"][0, : len(mask.axes)] = mask.axis_strides
