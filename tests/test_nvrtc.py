"""What the kernels cost when NVRTC compiles them for real architectures: no device is needed.

`python tests/test_nvrtc.py` compiles every row for sm_90a and prints BUDGETS anew; with an
architecture ("sm_80") as argument, for that one.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
import sys
from typing import NamedTuple

import pytest
from compile_kernels import Compiled, compile_source, messages, newest_library, require_nvrtc

from cuflash.operands.dtypes import ITEM_BYTES
from cuflash.planning.plan import TILES, Plan, Tile, make_plan
from cuflash.planning.problem import Device, Problem

REGISTERS = 65536  # of a multiprocessor
ARCHES = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_100", "sm_120")

# Bytes of (stack, spills) that a kernel may use at the head dim its row is for, as measured with
# NVRTC 13.0. What is not listed must use none. On sm_90a, which the table is tuned on, mma kernels,
# and simt kernels up to head dim 128 but for float64, cannot be listed, except what does the work
# of backward: it keeps two tiles of sums in registers and may spill a little.
BUDGETS: dict[str, tuple[int, int]] = {
    "fa2 backward mma 128x128, 4 warps, 2 stages, D 32, bfloat16, sm_90a": (40, 128),
    "fa1 backward mma 128x128, 4 warps, 2 stages, D 32, bfloat16, sm_90a": (64, 196),
    "fa1 backward mma 64x128, 4 warps, 2 stages, D 64, bfloat16, sm_90a": (16, 48),
    "fa1 backward mma 64x64, 8 warps, D 256, bfloat16, sm_90a": (8, 28),
    "fa2 backward mma 128x128, 4 warps, 2 stages, D 32, bfloat16, sm_90a, mask": (80, 392),
    "fa2 backward mma 64x64, 8 warps, 2 stages, D 256, bfloat16, sm_90a, mask": (8, 8),
    "fa1 backward mma 128x128, 4 warps, 2 stages, D 32, bfloat16, sm_90a, mask": (56, 160),
    "fa1 backward mma 64x128, 4 warps, 2 stages, D 64, bfloat16, sm_90a, mask": (32, 80),
    "fa1 backward mma 64x64, 8 warps, 2 stages, D 256, bfloat16, sm_90a, mask": (8, 16),
    "fa1 simt 8x8, 2 warps, 2 stages, D 512, float64, sm_90a": (80, 320),
    "fa2 backward simt 64x128, 4 warps, 2 stages, D 32, float32, sm_90a": (8, 24),
    "fa2 backward simt 64x128, 4 warps, D 32, float32, sm_90a": (64, 334),
    "fa2 backward simt 32x128, 4 warps, D 64, float32, sm_90a": (72, 270),
    "fa2 backward simt 32x32, 4 warps, D 128, float64, sm_90a": (32, 82),
    "fa2 backward simt 16x16, 4 warps, D 256, float64, sm_90a": (32, 82),
    "fa2 backward simt 16x8, 4 warps, D 512, float64, sm_90a": (272, 1338),
    "fa1 backward simt 64x128, 4 warps, 2 stages, D 32, float32, sm_90a": (72, 334),
    "fa1 backward simt 64x128, 4 warps, D 32, float32, sm_90a": (8, 12),
    "fa1 backward simt 32x128, 4 warps, D 64, float32, sm_90a": (112, 442),
    "fa1 backward simt 32x128, 8 warps, 2 stages, D 128, float32, sm_90a": (16, 28),
    "fa1 backward simt 32x32, 4 warps, D 128, float64, sm_90a": (32, 102),
    "fa1 backward simt 16x16, 4 warps, D 256, float64, sm_90a": (40, 106),
    "fa1 backward simt 16x8, 4 warps, D 512, float64, sm_90a": (272, 1330),
    "fa1 backward simt 32x128, 4 warps, D 64, float32, sm_80": (24, 70),
    "fa1 backward mma 64x128, 4 warps, 2 stages, D 64, bfloat16, sm_80": (16, 48),
    "fa2 backward simt 32x128, 4 warps, D 64, float32, sm_80": (80, 246),
    "fa1 backward mma 64x128, 4 warps, 2 stages, D 64, bfloat16, sm_86": (16, 48),
    "fa1 backward mma 64x128, 4 warps, 2 stages, D 64, bfloat16, sm_89": (16, 48),
    "fa1 backward simt 32x128, 4 warps, D 64, float32, sm_100": (40, 164),
    "fa1 mma 256x512, 8 warps, 2 stages, D 64, bfloat16, sm_100": (16, 88),
    "fa1 backward mma 64x128, 4 warps, 2 stages, D 64, bfloat16, sm_100": (24, 96),
    "fa2 simt 128x64, 4 warps, D 64, float32, sm_100": (40, 100),
    "fa2 backward simt 32x128, 4 warps, D 64, float32, sm_100": (48, 216),
    "fa2 backward mma 64x128, 4 warps, 2 stages, D 64, bfloat16, sm_100": (24, 56),
    "fa2 backward mma 128x128, 4 warps, 2 stages, D 32, float16, sm_90a": (40, 128),
    "fa2 backward simt 64x128, 4 warps, 2 stages, D 32, float16, sm_90a": (8, 24),
    "fa2 backward simt 64x128, 4 warps, 2 stages, D 32, bfloat16, sm_90a": (8, 24),
    "fa2 backward simt 64x128, 4 warps, D 32, float16, sm_90a": (104, 534),
    "fa2 backward simt 64x128, 4 warps, D 32, bfloat16, sm_90a": (104, 534),
    "fa1 backward mma 128x128, 4 warps, 2 stages, D 32, float16, sm_90a": (64, 196),
    "fa1 backward mma 64x128, 4 warps, 2 stages, D 64, float16, sm_90a": (16, 48),
    "fa1 backward mma 64x64, 8 warps, D 256, float16, sm_90a": (8, 28),
    "fa1 backward simt 64x128, 4 warps, 2 stages, D 32, float16, sm_90a": (72, 334),
    "fa1 backward simt 64x128, 4 warps, 2 stages, D 32, bfloat16, sm_90a": (72, 334),
    "fa1 backward simt 64x128, 4 warps, D 32, float16, sm_90a": (8, 12),
    "fa1 backward simt 64x128, 4 warps, D 32, bfloat16, sm_90a": (8, 12),
    "fa1 backward simt 32x128, 4 warps, D 64, float16, sm_90a": (112, 442),
    "fa1 backward simt 32x128, 4 warps, D 64, bfloat16, sm_90a": (112, 442),
    "fa1 backward simt 32x128, 8 warps, 2 stages, D 128, float16, sm_90a": (8, 16),
    "fa1 backward simt 32x128, 8 warps, 2 stages, D 128, bfloat16, sm_90a": (8, 16),
    "fa2 simt 128x64, 4 warps, D 64, float16, sm_100": (56, 124),
    "fa2 simt 128x64, 4 warps, D 64, bfloat16, sm_100": (56, 124),
    "fa1 mma 256x512, 8 warps, 2 stages, D 64, float16, sm_100": (16, 88),
    "fa1 simt 8x8, 2 warps, 2 stages, D 512, float64, sm_100": (80, 292),
    "fa2 backward mma 128x128, 4 warps, 2 stages, D 32, float16, sm_100": (32, 160),
    "fa2 backward mma 128x128, 4 warps, 2 stages, D 32, bfloat16, sm_100": (32, 160),
    "fa2 backward mma 64x128, 4 warps, 2 stages, D 64, float16, sm_100": (24, 56),
    "fa2 backward simt 64x128, 4 warps, 2 stages, D 32, float16, sm_100": (8, 16),
    "fa2 backward simt 64x128, 4 warps, 2 stages, D 32, bfloat16, sm_100": (8, 16),
    "fa2 backward simt 64x128, 4 warps, D 32, float16, sm_100": (80, 396),
    "fa2 backward simt 64x128, 4 warps, D 32, bfloat16, sm_100": (80, 396),
    "fa2 backward simt 64x128, 4 warps, D 32, float32, sm_100": (24, 48),
    "fa2 backward simt 32x128, 4 warps, D 64, float16, sm_100": (24, 52),
    "fa2 backward simt 32x128, 4 warps, D 64, bfloat16, sm_100": (24, 52),
    "fa2 backward simt 32x128, 8 warps, 2 stages, D 128, float16, sm_100": (8, 28),
    "fa2 backward simt 32x128, 8 warps, 2 stages, D 128, bfloat16, sm_100": (8, 28),
    "fa2 backward simt 32x128, 8 warps, 2 stages, D 128, float32, sm_100": (24, 48),
    "fa2 backward simt 16x8, 4 warps, D 512, float64, sm_100": (280, 1348),
    "fa2 backward simt 16x8, 4 warps, D 512, float64, sm_100, sum_dq": (88, 176),
    "fa1 backward mma 64x128, 4 warps, 2 stages, D 64, float16, sm_100": (24, 96),
    "fa1 backward mma 64x64, 8 warps, D 256, float16, sm_100": (48, 144),
    "fa1 backward mma 64x64, 8 warps, D 256, bfloat16, sm_100": (48, 144),
    "fa1 backward simt 64x128, 4 warps, 2 stages, D 32, float16, sm_100": (72, 332),
    "fa1 backward simt 64x128, 4 warps, 2 stages, D 32, bfloat16, sm_100": (72, 332),
    "fa1 backward simt 64x128, 4 warps, 2 stages, D 32, float32, sm_100": (8, 16),
    "fa1 backward simt 64x128, 4 warps, D 32, float16, sm_100": (64, 320),
    "fa1 backward simt 64x128, 4 warps, D 32, bfloat16, sm_100": (64, 320),
    "fa1 backward simt 64x128, 4 warps, D 32, float32, sm_100": (64, 320),
    "fa1 backward simt 32x128, 4 warps, D 64, float16, sm_100": (40, 140),
    "fa1 backward simt 32x128, 4 warps, D 64, bfloat16, sm_100": (40, 140),
    "fa1 backward simt 32x128, 8 warps, 2 stages, D 128, float32, sm_100": (56, 156),
    "fa1 backward simt 32x32, 4 warps, D 128, float64, sm_100": (40, 148),
    "fa1 backward simt 16x8, 4 warps, D 512, float64, sm_100": (272, 1320),
    "fa1 backward simt 16x8, 4 warps, D 512, float64, sm_100, sum_dq": (88, 176),
    "fa2 mma 128x48, 4 warps, 2 stages, D 128, float16, sm_120": (40, 92),
    "fa2 mma 128x48, 4 warps, 2 stages, D 128, bfloat16, sm_120": (40, 92),
    "fa2 backward mma 128x128, 4 warps, 2 stages, D 32, float16, sm_120": (24, 56),
    "fa2 backward mma 128x128, 4 warps, 2 stages, D 32, bfloat16, sm_120": (24, 56),
    "fa2 backward simt 64x128, 4 warps, D 32, float16, sm_120": (88, 396),
    "fa2 backward simt 64x128, 4 warps, D 32, bfloat16, sm_120": (88, 396),
    "fa2 backward simt 64x128, 4 warps, D 32, float32, sm_120": (72, 412),
    "fa1 backward simt 64x128, 4 warps, D 32, float16, sm_120": (64, 320),
    "fa1 backward simt 64x128, 4 warps, D 32, bfloat16, sm_120": (64, 320),
    "fa1 backward simt 64x128, 4 warps, D 32, float32, sm_120": (80, 380),
    "fa2 mma 128x48, 4 warps, 2 stages, D 128, float16, sm_80": (24, 48),
    "fa2 mma 128x48, 4 warps, 2 stages, D 128, bfloat16, sm_80": (24, 48),
    "fa2 simt 8x8, 2 warps, D 512, float64, sm_80": (96, 546),
    "fa1 simt 8x8, 2 warps, 2 stages, D 512, float64, sm_80": (72, 248),
    "fa2 backward mma 128x128, 4 warps, 2 stages, D 32, float16, sm_80": (16, 32),
    "fa2 backward mma 128x128, 4 warps, 2 stages, D 32, bfloat16, sm_80": (16, 32),
    "fa2 backward mma 64x64, 8 warps, D 256, float16, sm_80": (72, 278),
    "fa2 backward mma 64x64, 8 warps, D 256, bfloat16, sm_80": (72, 278),
    "fa2 backward simt 64x128, 4 warps, 2 stages, D 32, float16, sm_80": (88, 338),
    "fa2 backward simt 64x128, 4 warps, 2 stages, D 32, bfloat16, sm_80": (88, 338),
    "fa2 backward simt 64x128, 4 warps, D 32, float16, sm_80": (8, 16),
    "fa2 backward simt 64x128, 4 warps, D 32, bfloat16, sm_80": (8, 16),
    "fa2 backward simt 64x128, 4 warps, D 32, float32, sm_80": (8, 16),
    "fa2 backward simt 32x128, 4 warps, D 64, float16, sm_80": (80, 246),
    "fa2 backward simt 32x128, 4 warps, D 64, bfloat16, sm_80": (80, 246),
    "fa2 backward simt 32x32, 4 warps, D 128, float64, sm_80": (24, 60),
    "fa2 backward simt 16x16, 4 warps, D 256, float64, sm_80": (32, 82),
    "fa1 backward mma 128x128, 4 warps, 2 stages, D 32, float16, sm_80": (80, 184),
    "fa1 backward mma 128x128, 4 warps, 2 stages, D 32, bfloat16, sm_80": (80, 184),
    "fa1 backward mma 64x128, 4 warps, 2 stages, D 64, float16, sm_80": (16, 48),
    "fa1 backward simt 64x128, 4 warps, 2 stages, D 32, float16, sm_80": (96, 398),
    "fa1 backward simt 64x128, 4 warps, 2 stages, D 32, bfloat16, sm_80": (96, 398),
    "fa1 backward simt 64x128, 4 warps, 2 stages, D 32, float32, sm_80": (96, 398),
    "fa1 backward simt 64x128, 4 warps, D 32, float16, sm_80": (72, 334),
    "fa1 backward simt 64x128, 4 warps, D 32, bfloat16, sm_80": (72, 334),
    "fa1 backward simt 64x128, 4 warps, D 32, float32, sm_80": (88, 430),
    "fa1 backward simt 32x128, 4 warps, D 64, float16, sm_80": (24, 70),
    "fa1 backward simt 32x128, 4 warps, D 64, bfloat16, sm_80": (24, 70),
    "fa1 backward simt 32x32, 4 warps, D 128, float64, sm_80": (40, 106),
    "fa1 backward simt 16x16, 4 warps, D 256, float64, sm_80": (40, 118),
    "fa2 mma 128x48, 4 warps, 2 stages, D 128, float16, sm_86": (24, 48),
    "fa2 mma 128x48, 4 warps, 2 stages, D 128, bfloat16, sm_86": (24, 48),
    "fa2 simt 8x8, 2 warps, D 512, float64, sm_86": (96, 546),
    "fa2 backward mma 128x128, 4 warps, 2 stages, D 32, float16, sm_86": (16, 32),
    "fa2 backward mma 128x128, 4 warps, 2 stages, D 32, bfloat16, sm_86": (16, 32),
    "fa2 backward simt 64x128, 4 warps, D 32, float16, sm_86": (104, 538),
    "fa2 backward simt 64x128, 4 warps, D 32, bfloat16, sm_86": (104, 538),
    "fa2 backward simt 64x128, 4 warps, D 32, float32, sm_86": (64, 338),
    "fa1 backward mma 128x128, 4 warps, 2 stages, D 32, float16, sm_86": (48, 164),
    "fa1 backward mma 128x128, 4 warps, 2 stages, D 32, bfloat16, sm_86": (48, 164),
    "fa1 backward mma 64x128, 4 warps, 2 stages, D 64, float16, sm_86": (16, 48),
    "fa1 backward simt 64x128, 4 warps, D 32, float16, sm_86": (48, 278),
    "fa1 backward simt 64x128, 4 warps, D 32, bfloat16, sm_86": (48, 278),
    "fa1 backward simt 64x128, 4 warps, D 32, float32, sm_86": (32, 158),
    "fa2 mma 128x48, 4 warps, 2 stages, D 128, float16, sm_89": (24, 48),
    "fa2 mma 128x48, 4 warps, 2 stages, D 128, bfloat16, sm_89": (24, 48),
    "fa2 simt 8x8, 2 warps, D 512, float64, sm_89": (96, 546),
    "fa2 backward mma 128x128, 4 warps, 2 stages, D 32, float16, sm_89": (16, 32),
    "fa2 backward mma 128x128, 4 warps, 2 stages, D 32, bfloat16, sm_89": (16, 32),
    "fa2 backward simt 64x128, 4 warps, D 32, float16, sm_89": (104, 538),
    "fa2 backward simt 64x128, 4 warps, D 32, bfloat16, sm_89": (104, 538),
    "fa2 backward simt 64x128, 4 warps, D 32, float32, sm_89": (64, 338),
    "fa1 backward mma 128x128, 4 warps, 2 stages, D 32, float16, sm_89": (48, 164),
    "fa1 backward mma 128x128, 4 warps, 2 stages, D 32, bfloat16, sm_89": (48, 164),
    "fa1 backward mma 64x128, 4 warps, 2 stages, D 64, float16, sm_89": (16, 48),
    "fa1 backward simt 64x128, 4 warps, D 32, float16, sm_89": (48, 278),
    "fa1 backward simt 64x128, 4 warps, D 32, bfloat16, sm_89": (48, 278),
    "fa1 backward simt 64x128, 4 warps, D 32, float32, sm_89": (32, 158),
}


class Kernel(NamedTuple):
    """One kernel of a row of the table, for one type and architecture at the row's head dim.

    `name` is that of the kernel, empty for the one that does the work.
    """

    row: Tile
    dtype: str
    arch: str
    head_dim: int
    name: str = ""
    mask: str = ""

    def __str__(self):
        text = f"{self.row}, D {self.head_dim}, {self.dtype}, {self.arch}"
        text += ", mask" if self.mask else ""
        return f"{text}, {self.name}" if self.name else text

    @property
    def problem(self) -> Problem:
        return problem(self.dtype, self.head_dim, self.row.backward, self.mask)

    @property
    def plan(self) -> Plan:
        return Plan(self.problem, device(self.arch), self.row)

    def reject(self) -> str:
        return self.row.reject(self.problem, device(self.arch))

    def all_of_plan(self) -> list[Kernel]:
        """This one, and those that the plan launches before and after it."""
        plan = self.plan
        others = [x.name for x in plan.kernels if x.name != plan.kernel]
        return [self, *(self._replace(name=name) for name in others)]

    @property
    def must_not_spill(self) -> bool:
        if self.row.backward and not self.name:
            return False
        small = self.head_dim <= 128 and self.dtype != "float64"
        return self.arch == "sm_90a" and (self.row.engine in ("mma", "wgmma") or small)


def problem(dtype, head_dim, backward=False, mask=""):
    """Backward, of keys and values that all heads share, so that all kernels run."""
    return Problem(
        dtype, (32, 32), 4096, 4096, head_dim, head_dim, heads=32, backward=backward,
        summed=(1, 1024, 1024), mask=mask,
    )  # fmt: skip


def device(arch):
    return Device(int(re.sub(r"\D", "", arch)))


def kernels(arch, dtypes) -> list[Kernel]:
    """Every row that serves on `arch`, in those of `dtypes` that it serves."""
    made = [
        Kernel(row, dtype, arch, row.max_dim)
        for row in TILES
        for dtype in dtypes
        if row.threads and dtype in row.dtypes
    ]
    return [each for kernel in made if not kernel.reject() for each in kernel.all_of_plan()]


def every_row() -> list[Kernel]:
    """All rows for sm_90a: mma and wgmma in bf16, without and with a mask; simt in two types."""
    mma = [x for x in kernels("sm_90a", ["bfloat16"]) if x.row.engine in ("mma", "wgmma")]
    simt = [x for x in kernels("sm_90a", ["float32", "float64"]) if x.row.engine == "simt"]
    return mma + masked(mma) + simt


def masked(made: list[Kernel]) -> list[Kernel]:
    """The main kernels of `made` with a mask, and once what makes its lists."""
    main = [x._replace(mask="elements") for x in made if not x.name]
    main = [x for x in main if not x.reject()]
    return main + [main[0]._replace(name=name) for name in ("mask_tiles", "mask_lists")]


def one_row_each() -> list[Kernel]:
    """For the other architectures the row that a common problem gets, per algorithm and engine."""
    made = []
    directions = itertools.product(ARCHES, ("fa1", "fa2"), ("simt", "mma"), (False, True))
    for arch, algo, engine, backward in directions:
        dtype = "bfloat16" if engine == "mma" else "float32"
        try:
            plan = make_plan(problem(dtype, 64, backward), device(arch), algo, engine)
        except NotImplementedError:
            continue
        made.append(Kernel(plan.tile, dtype, arch, 64))
    return made


def compiled(kernel: Kernel, compiler=None) -> Compiled:
    return compile_source(kernel.plan.source(kernel.name or None), kernel.arch, compiler)


def check(kernel: Kernel) -> None:
    require_nvrtc()
    cost = compiled(kernel)
    assert cost.messages == (), f"{kernel}: {cost}"
    stack, spills = BUDGETS.get(str(kernel), (0, 0))
    assert cost.stack <= stack, f"{kernel}: {cost}"
    assert cost.spills <= spills, f"{kernel}: {cost}"
    assert cost.registers <= 255
    # Registers are given out in units of 8 per thread.
    of_block = -(-cost.registers // 8) * 8 * kernel.row.threads
    blocks = 1 if kernel.name else kernel.row.min_blocks
    assert of_block * blocks <= REGISTERS, f"{kernel}: {cost}"


@pytest.mark.parametrize("kernel", every_row(), ids=str)
def test_cost_of_every_row(kernel):
    check(kernel)


@pytest.mark.parametrize("kernel", one_row_each(), ids=str)
def test_cost_on_other_architectures(kernel):
    check(kernel)


def test_every_architecture_has_its_kernels():
    for backward in (False, True):
        rows = [x for x in one_row_each() if x.row.backward == backward]
        found = {(x.arch, x.row.algo, x.row.engine) for x in rows}
        expected = set(itertools.product(ARCHES, ("fa1", "fa2"), ("simt", "mma")))
        missing = {("sm_75", algo, "mma") for algo in ("fa1", "fa2")}  # bfloat16: sm_80
        assert expected - found == missing


def test_budgets_are_of_rows_that_exist_and_may_spill():
    matrix = [kernel for arch in (*ARCHES, "sm_90a") for kernel in kernels(arch, ITEM_BYTES)]
    matrix += masked(kernels("sm_90a", ["bfloat16"]))
    names = {str(kernel): kernel for kernel in matrix}
    assert len(names) == len(matrix)  # a name tells a row
    assert set(BUDGETS) <= set(names)
    assert not [name for name in BUDGETS if names[name].must_not_spill]


def test_what_the_compiler_says_is_read():
    log = """\
score.cuh(7): warning #177-D: variable "MIN_BLOCKS" was declared but never referenced
cuflash/kernels/mma.cuh(9): warning #550-D: variable "x" was set but never used
ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized
ptxas info    : Used 12 registers, used 1 barriers"""
    warning, loss = messages(log)
    assert warning.endswith('"x" was set but never used')
    assert "C7510" in loss


def odd_plans() -> list[Plan]:
    """Plans with what else changes the code: odd head dims, unaligned rows, integers, a score."""
    more = {"aligned": False, "kv_lengths": "int64", "captures": ("slope",), "heads": 32}
    sizes = (32, 32), 4096, 4096, 72, 37
    more["summed"] = (1, 2, 2)
    problems = [
        Problem(dtype, *sizes, score="score * slope", backward=backward, **more)
        for backward in (False, True)
        for dtype in ITEM_BYTES
    ]
    problems.append(dataclasses.replace(problems[-1], deterministic=False))
    problems += [dataclasses.replace(x, q_offset="int64") for x in (problems[0], problems[4])]
    return [make_plan(p, Device(90), algo) for p in problems for algo in ("fa1", "fa2")]


@pytest.mark.parametrize("plan", odd_plans(), ids=lambda p: f"{p.kernel}-{p.problem.dtype}")
def test_odd_problems_compile(plan):
    require_nvrtc()
    for kernel in plan.kernels:
        assert compile_source(plan.source(kernel.name), "sm_90a").messages == ()


@pytest.mark.full
@pytest.mark.parametrize("arch", [*ARCHES, "sm_90a"])
@pytest.mark.parametrize("row", [row for row in TILES if row.threads], ids=str)
def test_whole_matrix_compiles(row, arch):
    """All rows, architectures and types."""
    for kernel in kernels(arch, row.dtypes):
        if kernel.row is row:
            check(kernel)


@pytest.mark.full
@pytest.mark.parametrize("kernel", every_row(), ids=str)
def test_newest_nvrtc_compiles(kernel):
    require_nvrtc()
    library = newest_library()
    if library is None:
        pytest.skip("no NVRTC but CuPy's is installed; CUFLASH_NVRTC can name one")
    assert compiled(kernel, library).messages == ()


def print_budgets(made: list[Kernel]) -> None:
    """A line per kernel; those that need a budget as lines of BUDGETS."""
    for kernel in made:
        cost = compiled(kernel)
        over = " MUST NOT SPILL" if kernel.must_not_spill and cost.stack + cost.spills else ""
        line = f'    "{kernel}": ({cost.stack}, {cost.spills}),' if cost.stack + cost.spills else ""
        print(
            line or f"    # {kernel}: nothing", f" # {cost.registers} registers{over}", flush=True
        )
        for message in cost.messages:
            print("    #", message)


if __name__ == "__main__":
    chosen = sys.argv[1:]
    print_budgets(
        kernels(chosen[0], ["bfloat16", "float32", "float64"])
        if chosen
        else [*every_row(), *one_row_each()]
    )
