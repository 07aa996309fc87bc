"""Tensor maps: how the copy engine of Hopper's kernels finds its way in operands."""

from __future__ import annotations

from typing import NamedTuple

from ..operands.dtypes import CHUNK_BYTES, ITEM_BYTES
from ..operands.layout import Layout, PageLayout
from ..planning.plan import Plan
from ..planning.problem import MAP_AXES, own_strides

MAP_BYTES = 128
ORDER_BYTES = 64  # of the pointer to the order of work, which forward kernels have, as aligned


class TensorMap(NamedTuple):
    """A tensor in memory without its address, and the box that one copy moves.

    Dimensions from the innermost on: columns, rows, then leading axes; of packed heads the last of
    these comes before the rows. A pool has rows of a page, then heads and pages. An axis along
    which the operand broadcasts has length 1. Strides count bytes and leave out the columns'. A row
    of the box spans `swizzle` bytes. What the L2 cache misses comes from memory in sectors of
    `sector` bytes.
    """

    dims: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: int
    sector: int


def tensor_maps(plan: Plan, layout: Layout, kernel: str | None = None) -> dict[str, TensorMap]:
    """The maps of one of a plan's kernels, by default of the one that does the work.

    Of operands in planes they are of these, where they lie in the workspace.
    """
    p, maps = plan.problem, {}
    extents = {
        "q": (p.query_length, p.head_dim),
        "k": (p.key_length, p.head_dim),
        "v": (p.key_length, p.value_dim),
        "dout": (p.query_length, p.value_dim),
    }
    for name, rows, width, packed, planes in plan.map_boxes(kernel or plan.kernel):
        length, columns = extents[name]
        item = ITEM_BYTES[p.dtype] // planes
        panel = 64 if width % 64 == 0 else 32
        axes = list(zip(layout.axes, layout.axis_strides[name]))
        if layout.pages is not None and name != "q":
            length, axes = p.page_size, _pool_axes(axes, name, layout.pages)
        step = layout.rows[name]
        if planes > 1:  # side by side in a row, one row behind the other
            step = columns = planes * width
            in_heads, _ = own_strides(layout, name)
            axes = [(size, x * length * step) for size, x in zip(layout.axes, in_heads)]
            name = f"{name}_planes"
        axes = [(length, step), *axes]
        dims = [size if step else 1 for size, step in axes]
        steps = [step * item for _, step in axes]
        box = [rows] + [1] * MAP_AXES
        if packed > 1:  # heads come before queries
            steps, dims = [steps[-1], *steps[:-1]], [dims[-1], *dims[:-1]]
            heads = min(packed, rows)
            box[:2] = [heads, rows // heads]
        missing = MAP_AXES + 1 - len(steps)
        maps[name] = TensorMap(
            dims=(columns, *dims, *(1,) * missing),
            strides=tuple(step or CHUNK_BYTES for step in steps) + (CHUNK_BYTES,) * missing,
            box=(panel, *box),
            swizzle=panel * item,
            sector=256 if p.backward else 128,  # measured: docs/few-queries.md
        )
    return maps


def _pool_axes(axes: list[tuple[int, int]], name: str, pages: PageLayout) -> list[tuple[int, int]]:
    """Length and stride of the heads' axis, the only one along which a pool's rows in a batch entry
    move, and of that of pages.
    """
    heads = next(((size, step) for size, step in axes if step), (1, 0))
    step = pages.k_stride if name == "k" else pages.v_stride
    return [heads, (pages.pool_size, step if pages.pool_size > 1 else 0)]


def tables_bytes(plan: Plan, maps: int) -> int:
    """Size of a kernel's argument that holds so many maps."""
    return maps * MAP_BYTES + (0 if plan.problem.backward else ORDER_BYTES)
