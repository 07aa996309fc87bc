"""The kernels' one argument: a struct that Python packs and CUDA C reads."""

from __future__ import annotations

import functools

import numpy as np

from .operands import MAX_AXES, Layout
from .plan import Plan

OPEN_WIDTH = (1 << 30) - 2  # a band's open side: beyond every position, and sums stay an int

_OPERANDS = ("q", "k", "v", "out", "lse")

# Fields of the kernel's one argument, as (names, NumPy type, C type). "Accumulator" as the NumPy
# type stands for the plan's; pointers are 8 bytes.
_FIELDS = (
    (("q", "k", "v"), "u8", "const Element*"),
    (("out",), "u8", "Element*"),
    (("lse",), "u8", "Accumulator*"),
    (("q_lengths", "kv_lengths"), "u8", "const Length*"),
    (("state",), "u8", "Accumulator*"),
    (tuple(f"{x}_row_stride" for x in _OPERANDS), "i8", "long long"),
    (tuple(f"{x}_axis_stride" for x in _OPERANDS), "i8 axes", "long long"),
    (("q_lengths_stride", "kv_lengths_stride"), "i8 axes", "long long"),
    (("axis_size",), "i4 axes", "int"),
    (("axes", "heads", "head_count", "query_length", "key_length"), "i4", "int"),
    (("band_left", "band_right", "bottom_right", "query_tiles", "section"), "i4", "int"),
    (("scale",), "Accumulator", "Accumulator"),
)  # fmt: skip
POINTERS = ("q", "k", "v", "out", "lse", "q_lengths", "kv_lengths", "state")


def fields(plan: Plan):
    """(name, NumPy type, count, C type) of every field; captured scalars come last."""
    for names, kind, c_type in _FIELDS:
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
    """The argument with everything but its pointers, as an array of one structure.

    A scale of 0 becomes the smallest that keeps `-infinity * scale` infinite: the kernels tell
    hidden keys by it.
    """
    problem, dtype = plan.problem, params_dtype(plan)
    params = np.zeros(1, dtype)
    for name in _OPERANDS:
        params[f"{name}_row_stride"] = layout.rows[name]
        params[f"{name}_axis_stride"][0, : len(layout.axes)] = layout.axis_strides[name]
    for name in ("q_lengths", "kv_lengths"):
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
    params["query_tiles"] = -(-problem.query_length // plan.block_q)
    params["section"] = plan.section
    params["scale"] = max(scale, 16 * float(np.finfo(problem.accumulator).tiny))
    for name, value in zip(problem.captures, captured):
        params[name] = value
    return params
