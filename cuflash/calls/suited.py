"""Copies of operands as tensor cores take them: rows of whole chunks, on multiples of 16 bytes.

Rows of other lengths or places are loaded element by element otherwise.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..operands.dtypes import CHUNK_BYTES
from ..operands.spec import Spec

if TYPE_CHECKING:
    from ..masks.predicate import Predicate
    from ..planning.problem import Device
    from .arguments import Options
    from .call import Call

# Of which head dims are multiples on tensor cores; of float64 two fill 16 bytes.
COLUMNS, COLUMNS_OF_FLOAT64 = 8, 2
# Seconds on an H200 (2026-11-26). What a floating-point operation of a call's products takes less
# with copies: of rows in wrong places or with added columns; of others, which TMA does not read.
SAVED_PER_FLOP = 6e-15
SAVED_BY_TMA = 1.5e-15
SAVED_PER_SCORE = 2.5e-12  # where a bias is copied
# What copies take: operations with added columns, bytes, and what launches them.
TAKEN_PER_FLOP = 3e-15
PER_BYTE = 1e-12
LAUNCHES = 3e-5


def is_suited(spec: Spec, device: Device) -> bool:
    """Whether tensor cores, and the units that copy tiles for Hopper's, take rows as they are."""
    turned = any(step < 0 for size, step in zip(spec.shape, spec.strides) if size > 1)
    if turned and device.is_hopper:
        return False
    return spec.shape[-1] % chunk_of(spec.dtype.name) == 0 and spec.rows_are_aligned()


def suited(spec: Spec) -> Spec:
    """The spec of a copy that they do. Columns up to whole chunks are 0."""
    columns = whole(spec.shape[-1], chunk_of(spec.dtype.name))
    return spec.with_columns(columns)._replace(strides=_strides(spec, columns))


def with_whole_chunks(spec: Spec) -> Spec:
    """The spec of a copy of the same shape, whose rows begin on multiples of 16 bytes."""
    return spec._replace(
        strides=_strides(spec, whole(spec.shape[-1], CHUNK_BYTES // spec.dtype.itemsize))
    )


def _strides(spec: Spec, columns: int) -> tuple[int, ...]:
    """In C order, with rows of so many columns; what repeats along an axis is there once."""
    axes = list(zip(spec.shape[:-1], spec.strides))
    repeats = [step == 0 and size > 1 for size, step in axes]
    once = (1 if repeated else size for (size, _), repeated in zip(axes, repeats))
    strides = Spec.contiguous((*once, columns), spec.dtype).strides
    return tuple(0 if repeated else x for x, repeated in zip(strides, (*repeats, False)))


def is_read_in_chunks(bias: Spec, device: Device) -> bool:
    """Whether kernels would read a bias in chunks where it has whole ones: Hopper's do, if it is of
    a half type and has rows of its own for queries.
    """
    rows = len(bias.shape) > 1 and min(bias.shape[-2:]) > 1
    return device.is_hopper and rows and bias.dtype.itemsize == 2


def has_whole_chunks(bias: Spec) -> bool:
    """Whether all of its rows begin on multiples of 16 bytes, if the first one does."""
    return bias.rows_are_aligned() and bias.strides[-1] == bias.dtype.itemsize


def fill(target: Any, source: Any) -> None:
    """Copy an array to another. Columns that only the target has become 0.

    What repeats along an axis of the target is copied once.
    """
    once = tuple(slice(1) if step == 0 else slice(None) for step in target.strides)
    target, source = target[once], source[once]
    if target.shape != source.shape:
        columns = min(target.shape[-1], source.shape[-1])
        target[..., columns:] = 0
        target, source = target[..., :columns], source[..., :columns]
    target[...] = source


def best_call(
    kind: type[Call], given: dict[str, Spec], options: Options, device: Device, mask_kind: str,
    unaligned: frozenset[str], predicate: Predicate | None = None, mask_evenness: float = 1.0,
) -> Call:  # fmt: skip
    """A call of this kind, with copies of operands where it then takes less time."""
    asked = given, options, device, mask_kind, unaligned, predicate, mask_evenness
    call = kind(*asked)
    copies = _worth_copying(call, options)
    return kind(*asked, copies) if copies else call


def _worth_copying(call: Call, options: Options) -> frozenset[str]:
    """The operands of which copies let a call take less time, by an estimate.

    None where the caller chose the engine, or asked for bits that no other problem changes.
    """
    plan, names = call.plan, {x.operand for x in call.unsuited}
    chosen = options.engine is not None or options.split_keys is not None
    if not names or chosen or plan.problem.joins or plan.problem.page_size:
        return frozenset()
    problem = plan.problem.typical
    columns = problem.head_dim + problem.value_dim
    chunk = chunk_of(problem.dtype)
    added = whole(problem.head_dim, chunk) + whole(problem.value_dim, chunk) - columns
    wrong = added > 0 or not plan.problem.aligned
    for_rows = SAVED_PER_FLOP if wrong else SAVED_BY_TMA
    for_rows -= added / columns * TAKEN_PER_FLOP
    worth = set()
    for group, saved in (
        (names - {"bias"}, plan.flops * for_rows),
        (names & {"bias"}, plan.flops / (2 * columns) * SAVED_PER_SCORE),
    ):
        sizes = [x.spec.spanned_bytes for x in call.unsuited if x.operand in group]
        if sizes and saved > sum(sizes) * PER_BYTE + LAUNCHES:
            worth |= group
    return frozenset(worth)


def chunk_of(dtype: str) -> int:
    """Of how many columns the rows of this type are multiples."""
    return COLUMNS_OF_FLOAT64 if dtype == "float64" else COLUMNS


def whole(columns: int, chunk: int) -> int:
    """So many columns, or as many more as make whole chunks."""
    return -(-columns // chunk) * chunk
