"""What the kernels cost when NVRTC compiles them for real architectures: no device is needed.

`python tests/test_nvrtc.py` compiles every row for sm_90a and prints BUDGETS anew; with an
architecture ("sm_80") as argument, for that one.
"""

from __future__ import annotations

import itertools
import re
import sys
from typing import NamedTuple

import pytest
from compile_kernels import Compiled, compile_source, messages, newest_library, require_nvrtc

from cuflash.plan import ITEM_BYTES, TILES, Device, Plan, Problem, Tile, make_plan

REGISTERS = 65536  # of a multiprocessor
ARCHES = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_100", "sm_120")

# Bytes of (stack, spills) that a kernel may use at the head dim its row is for, as measured with
# NVRTC 13.0. What is not listed must use none. On sm_90a, which the table is tuned on, mma kernels,
# and simt kernels up to head dim 128 but for float64, cannot be listed.
BUDGETS: dict[str, tuple[int, int]] = {
    "fa1 simt 8x8, 2 warps, 2 stages, D 512, float64, sm_90a": (48, 276),
    "fa2 simt 8x8, 2 warps, D 512, float64, sm_80": (88, 434),
    "fa1 simt 8x8, 2 warps, 2 stages, D 512, float64, sm_80": (24, 120),
    "fa2 simt 8x8, 2 warps, D 512, float64, sm_86": (88, 434),
    "fa2 simt 8x8, 2 warps, D 512, float64, sm_89": (88, 434),
    "fa2 mma 128x64, 4 warps, 2 stages, D 64, float16, sm_100": (8, 8),
    "fa2 mma 128x64, 4 warps, 2 stages, D 64, bfloat16, sm_100": (8, 8),
    "fa2 mma 128x48, 4 warps, 2 stages, D 128, float16, sm_100": (16, 32),
    "fa2 mma 128x48, 4 warps, 2 stages, D 128, bfloat16, sm_100": (16, 32),
    "fa2 simt 128x64, 4 warps, D 64, float16, sm_100": (56, 148),
    "fa2 simt 128x64, 4 warps, D 64, bfloat16, sm_100": (56, 148),
    "fa2 simt 128x64, 4 warps, D 64, float32, sm_100": (40, 124),
    "fa2 simt 8x8, 2 warps, D 512, float64, sm_100": (64, 144),
    "fa1 mma 256x512, 8 warps, 2 stages, D 64, float16, sm_100": (8, 8),
    "fa1 mma 256x512, 8 warps, 2 stages, D 64, bfloat16, sm_100": (8, 8),
    "fa1 simt 8x8, 2 warps, 2 stages, D 512, float64, sm_100": (24, 116),
    "fa2 mma 128x64, 4 warps, 2 stages, D 64, float16, sm_120": (8, 8),
    "fa2 mma 128x64, 4 warps, 2 stages, D 64, bfloat16, sm_120": (8, 8),
}


class Kernel(NamedTuple):
    """A row of the table, compiled for one type and architecture at the row's head dim."""

    row: Tile
    dtype: str
    arch: str
    head_dim: int

    def __str__(self):
        return f"{self.row}, D {self.head_dim}, {self.dtype}, {self.arch}"

    @property
    def plan(self) -> Plan:
        return Plan(problem(self.dtype, self.head_dim), device(self.arch), self.row)

    def reject(self) -> str:
        return self.row.reject(problem(self.dtype, self.head_dim), device(self.arch))

    @property
    def must_not_spill(self) -> bool:
        small = self.head_dim <= 128 and self.dtype != "float64"
        return self.arch == "sm_90a" and (self.row.engine == "mma" or small)


def problem(dtype, head_dim):
    return Problem(dtype, (32, 32), 4096, 4096, head_dim, head_dim, heads=32)


def device(arch):
    return Device(int(re.sub(r"\D", "", arch)))


def kernels(arch, dtypes) -> list[Kernel]:
    """Every row that serves on `arch`, in those of `dtypes` that it serves."""
    made = [
        Kernel(row, dtype, arch, row.max_dim)
        for row in TILES
        for dtype in dtypes
        if row.engine != "numpy" and dtype in row.dtypes
    ]
    return [kernel for kernel in made if not kernel.reject()]


def every_row() -> list[Kernel]:
    """All rows for sm_90a: mma in bfloat16, simt in float32 and float64."""
    mma = [x for x in kernels("sm_90a", ["bfloat16"]) if x.row.engine == "mma"]
    simt = [x for x in kernels("sm_90a", ["float32", "float64"]) if x.row.engine == "simt"]
    return mma + simt


def one_row_each() -> list[Kernel]:
    """For the other architectures the row that a common problem gets, per algorithm and engine."""
    made = []
    for arch, algo, engine in itertools.product(ARCHES, ("fa1", "fa2"), ("simt", "mma")):
        dtype = "bfloat16" if engine == "mma" else "float32"
        try:
            plan = make_plan(problem(dtype, 64), device(arch), algo, engine)
        except NotImplementedError:
            continue
        made.append(Kernel(plan.tile, dtype, arch, 64))
    return made


def compiled(kernel: Kernel, compiler=None) -> Compiled:
    return compile_source(kernel.plan.source(), kernel.arch, compiler)


def check(kernel: Kernel) -> None:
    require_nvrtc()
    cost = compiled(kernel)
    assert cost.messages == (), f"{kernel}: {cost}"
    stack, spills = BUDGETS.get(str(kernel), (0, 0))
    assert cost.stack <= stack, f"{kernel}: {cost}"
    assert cost.spills <= spills, f"{kernel}: {cost}"
    assert cost.registers <= 255
    # Registers are given out in units of 8 per thread.
    of_block = -(-cost.registers // 8) * 8 * 32 * kernel.row.warps
    assert of_block * kernel.row.min_blocks <= REGISTERS, f"{kernel}: {cost}"


@pytest.mark.parametrize("kernel", every_row(), ids=str)
def test_cost_of_every_row(kernel):
    check(kernel)


@pytest.mark.parametrize("kernel", one_row_each(), ids=str)
def test_cost_on_other_architectures(kernel):
    check(kernel)


def test_every_architecture_has_its_kernels():
    found = {(x.arch, x.row.algo, x.row.engine) for x in one_row_each()}
    expected = set(itertools.product(ARCHES, ("fa1", "fa2"), ("simt", "mma")))
    assert expected - found == {("sm_75", algo, "mma") for algo in ("fa1", "fa2")}  # bf16: sm_80


def test_budgets_are_of_rows_that_exist_and_may_spill():
    matrix = [kernel for arch in (*ARCHES, "sm_90a") for kernel in kernels(arch, ITEM_BYTES)]
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
    """Plans with what else changes the code: odd head dims, unaligned rows, lengths, a score."""
    more = {"aligned": False, "kv_lengths": "int64", "captures": ("slope",), "heads": 32}
    sizes = (32, 32), 4096, 4096, 72, 37
    return [
        make_plan(Problem(dtype, *sizes, score="score * slope", **more), Device(90), algo)
        for dtype in ITEM_BYTES
        for algo in ("fa1", "fa2")
    ]


@pytest.mark.parametrize("plan", odd_plans(), ids=lambda p: f"{p.algo}-{p.problem.dtype}")
def test_odd_problems_compile(plan):
    require_nvrtc()
    assert compile_source(plan.source(), "sm_90a").messages == ()


@pytest.mark.full
@pytest.mark.parametrize("arch", [*ARCHES, "sm_90a"])
@pytest.mark.parametrize("row", [row for row in TILES if row.engine != "numpy"], ids=str)
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
