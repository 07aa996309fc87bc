"""Fields of the kernels' one argument, a struct that Python packs and CUDA C reads."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from typing import Any, TypeAlias

import numpy as np

from ..operands.layout import LENGTHS, MAX_AXES
from ..scores.emit import ELEMENTS, NUMBERS, field_of
from .problem import PLANED, Problem
from .visible import MASK_ELEMENTS, mask_field_of

# Name, NumPy type, count and C type of a struct's field.
Field: TypeAlias = tuple[str, str, int, str]

# Operands that have rows along the leading axes, by direction, and their C types.
OPERANDS = {
    False: {"q": "const Element*", "k": "const Element*", "v": "const Element*",
            "out": "Element*", "lse": "Accumulator*"},
    True: {"dout": "const Element*", "q": "const Element*", "k": "const Element*",
           "v": "const Element*", "out": "const Element*", "lse": "const Accumulator*",
           "dlse": "const Accumulator*", "dq": "Element*", "dk": "Element*", "dv": "Element*"},
}  # fmt: skip
# A mask's lists of tiles: given, or made in the workspace of a given array.
_LISTS = {"mask_ranges": "int2*", "mask_entries": "int4*", "mask_order": "int*",
          "mask_bits": "unsigned int*"}  # fmt: skip
_MASK = {"": {}, "blocks": _LISTS, "elements": {"mask": "const unsigned char*"}}
# Backward: the lists of a mask for tiles of queries, made of those for tiles of keys.
_QUERY_LISTS = {"mask_query_ranges": "int2*", "mask_query_entries": "int4*"}
_PAGES = {"page_table": "const PageNumber*"}
# Where packed sequences begin: as given, and as sequence_starts has checked it.
_OFFSETS = {"cu_seqlens_q": "const Offset*", "cu_seqlens_k": "const Offset*"}
_STARTS = {"query_starts": "int*", "key_starts": "int*", "next_item": "unsigned int*"}
_PLACES = {"key_places": "int2*"}  # tiles of keys ahead of each region's
_MASK_WORKSPACE = {"": {}, "blocks": {}, "elements": {**_LISTS, "mask_states": "unsigned char*"}}
_WORKSPACE = {
    False: {"state": "Accumulator*", "part_out": "Accumulator*", "part_sums": "Accumulator*"},
    True: {"row_stats": "Accumulator*", "dq_sum": "Accumulator*", "dk_sum": "Accumulator*",
           "dv_sum": "Accumulator*", "turns": "unsigned int*", "tickets": "unsigned int*",
           "located": "void*", "nonfinite_keys": "unsigned int*"},
}  # fmt: skip

# Planes of float32 operands, the ranges of their numbers, which heads planes hold, which rows are
# worked on again, and what the planes of a chunk are multiplied by.
_PLANES = {"plane_ranges": "void*", "held_heads": "void*", "again": "unsigned int*"}
_UNITS = {False: {"plane_units": "float*"}, True: {}}

# Which tiles of values are clean.
_MARKS = {"clean_values": "unsigned int*"}

_ARRAY_SUMS = {"array_sums": "Accumulator*"}

# Fields behind the pointers, as (names, NumPy type, C type). "Accumulator" as the NumPy type
# stands for the problem's.
_SCALARS = (
    (("axis_size",), "i4 axes", "int"),
    (("axes", "heads", "entries", "head_count", "query_length", "key_length"), "i4", "int"),
    (("band_left", "band_right", "bottom_right", "shift"), "i4", "int"),
    (("query_tiles", "query_lead", "key_tiles", "section", "span", "parts"), "i4", "int"),
    (("axis_reciprocal",), "u8 axes", "unsigned long long"),  # by which kernels divide
    (("tiles_reciprocal", "span_reciprocal"), "u8", "unsigned long long"),
    (("mask_axis_stride",), "i4 axes", "int"),  # in lists
    (("mask_rows", "mask_columns"), "i4", "int"),  # tiles of one list
    (("scale",), "Accumulator", "Accumulator"),
)
# A seed on the device, or null and the number itself; where the operands begin in a larger call.
_SEEDS = {"seed": "const unsigned long long*"} | dict.fromkeys(
    ("seed_number", "first_query_number", "first_key_number", "first_head"), "unsigned long long"
)
_DROPOUT_SCALARS = (
    (("dropout_threshold", "dropout_keeps_below"), "u4", "unsigned int"),
    (("kept_share", "kept_share_log2"), "Accumulator", "Accumulator"),
)
_PACKED_SCALARS = (
    (("sequences", "longest_query", "longest_key", "mask_entry_stride"), "i4", "int"),
    (tuple(f"{x}_entry_stride" for x in LENGTHS), "i8", "long long"),
)
_PAGE_SCALARS = (
    (("pages", "k_page_stride", "v_page_stride"), "i8", "long long"),
    (("page_table_stride",), "i8 2", "long long"),
)
_ELEMENT_SCALARS = (
    (("mask_height", "mask_width", "list_axes"), "i4", "int"),
    (("list_axis_size",), "i4 axes", "int"),
    (("list_axis_stride",), "i8 axes", "long long"),
    (("mask_row_stride", "mask_column_stride"), "i8", "long long"),
)


def pointers(problem: Problem) -> tuple[str, ...]:
    """Names of the struct's leading fields, all pointers but what goes with a seed: operands,
    lengths, gradients of arrays that scores depend on, pages, captured arrays, seed, mask with what
    its function reads, and workspace.
    """
    operands, others, workspace = _pointer_types(problem)
    return (*operands, *LENGTHS, *others, *workspace)


def workspace_pointers(problem: Problem) -> tuple[str, ...]:
    """Those of them that point into the workspace."""
    return tuple(_pointer_types(problem)[2])


def _pointer_types(problem: Problem) -> tuple[dict[str, str], dict[str, str], dict[str, str]]:
    """C types of the operands, of what else is read, and of the parts of the workspace."""
    workspace = {**_MASK_WORKSPACE[problem.mask], **_WORKSPACE[problem.backward]}
    if problem.backward and problem.mask:
        workspace |= _QUERY_LISTS
    if problem.cuts_all and not problem.backward:
        workspace |= _MARKS
    if problem.has_planes:
        workspace |= {f"{x}_planes": "void*" for x in PLANED[problem.backward]} | _PLANES
        workspace |= _UNITS[problem.backward]
    if problem.is_packed:
        workspace |= _STARTS | (_PLACES if problem.backward else {})
    if problem.wrt:
        workspace |= _ARRAY_SUMS
    others = {x.field: f"{ELEMENTS[x.element]}*" for x in problem.wrt}
    others |= _PAGES if problem.page_size else {}
    if problem.is_packed:
        others |= {x: kind for x, kind in _OFFSETS.items() if x in problem.starts}
    others |= {field_of(x): f"const {ELEMENTS[x.element]}*" for x in problem.score.arrays}
    others |= _SEEDS if problem.dropout else {}
    others |= _MASK[problem.mask]
    others |= {
        mask_field_of(x): f"const {MASK_ELEMENTS[x.element]}*"
        for x in problem.mask_form.captures
        if x.is_array
    }
    return OPERANDS[problem.backward], others, workspace


def _fields(problem: Problem) -> Iterator[tuple[tuple[str, ...], str, str]]:
    """(names, NumPy type, C type) of the fields before those of captures."""
    operands, others, workspace = _pointer_types(problem)
    for name, c_type in operands.items():
        yield (name,), "u8", c_type
    yield LENGTHS, "u8", "const Length*"
    for name, c_type in (others | workspace).items():
        yield (name,), "u8", c_type
    yield tuple(f"{x}_row_stride" for x in operands), "i8", "long long"
    yield tuple(f"{x}_axis_stride" for x in operands), "i8 axes", "long long"
    yield tuple(f"{x}_stride" for x in LENGTHS), "i8 axes", "long long"
    yield from _SCALARS
    for x in problem.wrt:
        yield (f"{x.field}_axis_stride",), "i8 axes", "long long"
        yield (f"{x.field}_step",), "i8 2", "long long"
        if x.keeps_sequences:
            yield (f"{x.field}_entry_stride",), "i8", "long long"
    if problem.has_planes:
        names = PLANED[problem.backward]
        yield tuple(f"{x}_planes_stride" for x in names), "i8 axes", "long long"  # in heads
        yield (*(f"{x}_planes_heads" for x in names), "again_tiles"), "i4", "int"
    if problem.page_size:
        yield from _PAGE_SCALARS
    if problem.dropout:
        yield from _DROPOUT_SCALARS
    if problem.is_packed:
        yield from _PACKED_SCALARS
    if problem.mask == "elements":
        yield from _ELEMENT_SCALARS
    if problem.mask == "blocks" and problem.backward:
        yield ("chains",), "i4", "int"  # of a head, where the order of sums is planned
    if problem.score.unit:
        yield ("score_scale",), "Accumulator", "Accumulator"  # by which q.k is in the score's unit
    if problem.has_near_scores:
        yield ("near_limit",), "f4", "float"
        yield ("near_factors",), "f4 4", "float"
        yield ("near_exponents_limit", "nearest_exponents_limit"), "f4", "float"
        yield ("near_exponents",), "f4 4", "float"
        yield ("nearest_exponents",), "f4 3", "float"


def fields(problem: Problem) -> Iterator[Field]:
    """Every field; captured numbers, and the extents of captured arrays, come last."""
    for names, kind, c_type in _fields(problem):
        numpy_type, _, repeated = kind.partition(" ")
        if numpy_type == "Accumulator":
            numpy_type = problem.accumulator
        for name in names:
            yield name, numpy_type, MAX_AXES if repeated == "axes" else int(repeated or 1), c_type
    for capture in problem.score.captures:
        name = field_of(capture)
        if not capture.is_array:
            kind = problem.accumulator if capture.kind == "real" else "i4"
            yield name, kind, 1, NUMBERS[capture.kind]
        elif capture.axes:
            yield f"{name}_size", "i4", capture.axes, "int"
            yield f"{name}_stride", "i8", capture.axes, "long long"
    for capture in problem.mask_form.captures:
        name = mask_field_of(capture)
        if not capture.is_array:
            yield name, "i4", 1, "int"
        elif capture.axes:
            yield f"{name}_size", "i4", capture.axes, "int"


@functools.lru_cache(maxsize=256)
def params_dtype(problem: Problem) -> np.dtype[Any]:
    """NumPy's view of the kernel's Params struct."""
    return struct_dtype(fields(problem))


def struct_dtype(struct: Iterable[Field]) -> np.dtype[Any]:
    """NumPy's view of a struct of C."""
    columns: list[Any] = [
        (name, kind, (count,)) if count > 1 else (name, kind) for name, kind, count, _ in struct
    ]
    return np.dtype(columns, align=True)
