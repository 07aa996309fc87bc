"""What the kernels cost when NVRTC compiles them for real architectures: no device is needed.

`python tests/test_nvrtc.py` compiles every row for sm_90a, prints the costs and writes their lines
of budgets.csv anew; with an architecture ("sm_80") as argument, for that one.
"""

from __future__ import annotations

import csv
import dataclasses
import itertools
import re
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
from compile_kernels import (
    Compiled,
    compile_source,
    machine_code,
    messages,
    newest_library,
    require_nvrtc,
)
from scoring import form

from cuflash.operands.dtypes import ITEM_BYTES
from cuflash.planning.plan import TILES, Plan, Tile, make_plan
from cuflash.planning.problem import Device, Problem
from cuflash.scores.score import softcap

PLANES = "hopper_planes_forward"
GRADIENTS_ON_PLANES = "hopper_planes_backward_keys"
REGISTERS = 65536  # of a multiprocessor
ARCHES = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_100", "sm_120")

# Bytes of stack and spills that a kernel may use at the head dim its row is for, as measured with
# NVRTC 13.0. What is not listed must use none. wgmma kernels cannot be listed, but what works
# behind them on what planes do not hold can. On sm_90a, which the table is tuned on, mma kernels
# cannot either, nor can simt kernels up to head dim 128 but for float64. But what does the work of
# backward may spill a little there, since it keeps two tiles of sums in registers; and so may what
# has a mask, a softcap, packed sequences or parts of the keys on mma in float64, and float32.
BUDGETS_FILE = Path(__file__).with_name("budgets.csv")


def read_budgets() -> dict[str, tuple[int, int]]:
    """(stack, spills) by the kernel's name."""
    with BUDGETS_FILE.open(newline="") as file:
        return {x["kernel"]: (int(x["stack"]), int(x["spills"])) for x in csv.DictReader(file)}


def write_budgets(budgets: dict[str, tuple[int, int]]) -> None:
    """Write what is not zero, sorted by name."""
    with BUDGETS_FILE.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("kernel", "stack", "spills"))
        writer.writerows((name, *budgets[name]) for name in sorted(budgets) if any(budgets[name]))


BUDGETS = read_budgets()


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
    capped: bool = False
    page_size: int = 0
    dropout: bool = False
    sequences: int | None = None
    any_order: bool = False

    def __str__(self):
        text = f"{self.row}, D {self.head_dim}, {self.dtype}, {self.arch}"
        text += ", mask" if self.mask else ""
        text += ", softcap" if self.capped else ""
        text += f", pages of {self.page_size}" if self.page_size else ""
        text += ", dropout" if self.dropout else ""
        text += ", packed sequences" if self.sequences else ""
        text += ", any order" if self.any_order else ""
        return f"{text}, {self.name}" if self.name else text

    @property
    def problem(self) -> Problem:
        made = problem(self.dtype, self.head_dim, self.row.backward, self.mask)
        made = dataclasses.replace(made, dropout=self.dropout, deterministic=not self.any_order)
        if self.row.packed > 1:
            made = dataclasses.replace(made, group=self.row.packed)
        if self.page_size:
            made = dataclasses.replace(
                made, page_size=self.page_size, page_table="int64", kv_lengths="int64"
            )
        if self.sequences:
            made = dataclasses.replace(
                made, sequences=self.sequences, longest=(4096, 4096), offsets="int64"
            )
        if not self.capped:
            return made
        return dataclasses.replace(made, score=softcap(30.0).form)

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
        if self.name and getattr(self.row.of_kernel(self.name), "after_planes", False):
            return False  # there is seldom anything to do
        if self.row.engine == "wgmma":  # the widest tiles leave no room for scores far from 0
            widest = self.row.warps == 12 and self.row.block_k == 128
            return not (widest and self.capped and self.dtype == "bfloat16")
        if self.row.backward and not self.name:
            return False
        varied = self.mask or self.capped or self.sequences or self.row.packed > 1
        if self.dtype == "float64":  # of 128 columns sums alone take half of the registers
            return self.arch == "sm_90a" and self.row.engine == "mma" and not varied
        if self.dtype == "float32" and self.row.engine == "mma":  # planes are twice as many
            return False
        small = self.head_dim <= 128
        return self.arch == "sm_90a" and (self.row.engine == "mma" or small)


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
    """All rows for sm_90a: mma and wgmma in bf16, without and with a mask, softcap, dropout, packed
    heads or parts of the keys; mma in float64; simt in one of two types. fa2 and fa3 on wgmma are
    one source.
    """
    halves = [x for x in kernels("sm_90a", ["bfloat16"]) if x.row.engine != "simt"]
    mma = [x for x in halves if (x.row.algo, x.row.engine) != ("fa2", "wgmma")]
    simt = [x for x in kernels("sm_90a", ["float32", "float64"]) if x.row.engine == "simt"]
    rows = list(dict.fromkeys(x.row for x in simt))
    floats = [x for x in simt if "float64" not in x.row.dtypes]  # of which some rows are alone
    turns = [x for x in simt if x.dtype == ("float32", "float64")[rows.index(x.row) % 2]]
    turns = list(dict.fromkeys(floats + turns))
    # What masks and softcap add is alike from row to row: one of four rows has either.
    made = mma + masked(mma[::4]) + capped(mma[1::4]) + split(mma)[::4] + paged(mma)[::4]
    any_order = in_any_order(mma)
    made += any_order + capped(any_order)[::4] + masked(any_order)[:-2:3] + packed(any_order)[1::4]
    made += dropping(any_order)[2::4]
    made += dropping([x for x in mma if x.row.engine == "mma"])[::5]  # wgmma's: test_dropout.py
    made += [*packed(mma)[::6], mma[0]._replace(sequences=4, name="sequence_starts")]
    planes = [x for x in kernels("sm_90a", ["float32"]) if x.row.kernel == PLANES]
    fa3 = [x for x in planes if x.row.algo == "fa3"]
    main = [x for x in fa3 if not x.name]
    made += fa3 + masked(main)[:-2] + capped(main[1:2]) + dropping(main[1:2]) + packed(main[1::3])
    parted = [x for x in main if x.row.has_variants]
    made += [x._replace(row=dataclasses.replace(x.row, span=1024)) for x in parted]
    made += gradients_on_planes()
    return made + turns + split(simt)[::3] + of_mma("float64") + of_mma("float32")


def gradients_on_planes() -> list[Kernel]:
    """Gradients of float32 on wgmma for wide heads, and what reads planes with a mask and the like.
    Of narrower ones: test_planes_gradients.py.
    """
    rows = [x for x in kernels("sm_90a", ["float32"]) if x.row.kernel == GRADIENTS_ON_PLANES]
    wide = [x for x in rows if x.row.algo == "fa3" and x.row.max_dim > 128]
    changed = varied(wide)
    return wide + changed + [x._replace(name=x.row.queries.kernel) for x in changed]


def of_mma(dtype: str) -> list[Kernel]:
    """What does the work of the rows of float64 or float32 on mma, and some of it with a mask and
    the like; behind float32, a kernel on FMA units.
    """
    every = [x for x in kernels("sm_90a", [dtype]) if x.row.engine == "mma"]
    made = [x for x in every if not x.name]
    return made + varied(made)[::8] + [x for x in every if "behind" in x.name]


def varied(made: list[Kernel]) -> list[Kernel]:
    """The main kernels of `made` with a mask, softcap, parts of the keys, dropout, or packed."""
    found = masked(made) + capped(made) + split(made) + dropping(made) + packed(made)
    return [x for x in found if not x.name]


def paged(made: list[Kernel]) -> list[Kernel]:
    """The fa3 kernels of `made` with pages; and some with parts of the keys as well."""
    rows = [x for x in made if not (x.name or x.row.backward) and x.row.algo == "fa3"]
    parts = [x._replace(page_size=48) for x in split(rows) if not x.name][::3]
    return [x._replace(page_size=16) for x in rows] + parts


def packed(made: list[Kernel]) -> list[Kernel]:
    """Those of `made` that read rows, for packed sequences, with parts of the keys or pages too."""
    main = [x for x in made if not x.name or "rows" in x.name]
    rows = main + [x for x in split(main) + paged(main) if not x.name]
    return [x for x in (y._replace(sequences=4) for y in rows) if not x.reject()]


def masked(made: list[Kernel]) -> list[Kernel]:
    """The main kernels of `made` with a mask, and once what makes its lists."""
    main = [x._replace(mask="elements") for x in made if not x.name]
    main = [x for x in main if not x.reject()]
    return main + [main[0]._replace(name=name) for name in ("mask_tiles", "mask_lists")]


def in_any_order(made: list[Kernel]) -> list[Kernel]:
    """The main kernels of fa2's gradients on mma and halves, of `made`, that add in any order."""
    main = [x for x in made if x.row.backward and not x.name and x.row.algo == "fa2"]
    return [x._replace(any_order=True) for x in main if x.row.engine == "mma" and is_half(x)]


def is_half(kernel: Kernel) -> bool:
    """Whether it is of the type of halves that is measured on its architecture."""
    return kernel.dtype == ("float16" if kernel.arch == "sm_75" else "bfloat16")


def split(made: list[Kernel]) -> list[Kernel]:
    """The forward kernels of `made` with packed heads and parts of the keys, and their merging."""
    rows = [x for x in made if x.row.has_variants and not x.name]
    made = [x._replace(row=dataclasses.replace(x.row, packed=4, span=1024)) for x in rows]
    return made + [x._replace(name="merge_parts") for x in made[::4]]


def capped(made: list[Kernel]) -> list[Kernel]:
    """The kernels of `made` that compute scores, with softcap."""
    scoring = [x for x in made if x.name in ("", "hopper_backward_queries")]
    return [y for x in scoring if not (y := x._replace(capped=True)).reject()]


def dropping(made: list[Kernel]) -> list[Kernel]:
    """The main kernels of `made` with dropout."""
    main = [x._replace(dropout=True) for x in made if not x.name]
    return [x for x in main if not x.reject()]


def one_row_each() -> list[Kernel]:
    """For the other architectures the row that a common problem gets, per algorithm and engine."""
    made = []
    directions = itertools.product(ARCHES, ("fa1", "fa2"), ("simt", "mma"), (False, True))
    for arch, algo, engine, backward in directions:
        halves = "float16" if arch == "sm_75" else "bfloat16"
        dtype = halves if engine == "mma" else "float32"
        try:
            plan = make_plan(problem(dtype, 64, backward), device(arch), algo, engine)
        except NotImplementedError:
            continue
        made.append(Kernel(plan.tile, dtype, arch, 64))
    return made


def gradients_elsewhere() -> list[Kernel]:
    """For the other architectures what does the work of fa2's gradients on mma, in the row that
    each head dim gets, in order and in any order.
    """
    rows = []
    for arch, dim in itertools.product(ARCHES, (32, 64, 128, 256, 512)):
        halves = "float16" if arch == "sm_75" else "bfloat16"
        try:
            plan = make_plan(problem(halves, dim, True), device(arch), "fa2", "mma")
        except NotImplementedError:
            continue
        rows.append(Kernel(plan.tile, halves, arch, plan.tile.max_dim))
    rows = list(dict.fromkeys(rows))
    return rows + in_any_order(rows)


def wide_heads_elsewhere() -> list[Kernel]:
    """For the other architectures the forward kernels that wide heads in halves get on mma, at the
    widest heads of a row.
    """
    found: dict[tuple[str, Tile], int] = {}
    arches = (x for x in ARCHES if x != "sm_75")
    for arch, dim in itertools.product(arches, range(272, 513, 16)):
        plan = make_plan(problem("bfloat16", dim), device(arch), "fa2", "mma")
        found[arch, plan.tile] = dim
    return [Kernel(row, "bfloat16", arch, dim) for (arch, row), dim in found.items()]


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
    threads = {x.name: x.threads for x in kernel.plan.kernels}[kernel.name or kernel.plan.kernel]
    of_block = -(-cost.registers // 8) * 8 * threads
    blocks = 1 if kernel.name else kernel.row.min_blocks
    assert of_block * blocks <= REGISTERS, f"{kernel}: {cost}"


# Those around a main kernel are small and alike from row to row: a third of them is enough.
@pytest.mark.one_in(12)
@pytest.mark.parametrize(
    "kernel", [x for i, x in enumerate(every_row()) if not x.name or i % 3 == 0], ids=str
)
def test_cost_of_every_row(kernel):
    check(kernel)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("kernel", one_row_each(), ids=str)
def test_cost_on_other_architectures(kernel):
    check(kernel)


def packed_gradients() -> list[Kernel]:
    """What does the work of Hopper's gradients of packed sequences: there a producer, which has 24
    registers, looks for sequences as well.
    """
    rows = [x for x in kernels("sm_90a", ["bfloat16"]) if x.row.engine == "wgmma"]
    main = [x for x in packed(rows) if x.row.backward and not x.name]
    any_order = [x._replace(any_order=True) for x in main if x.row.algo == "fa3"]
    return main + any_order + masked(any_order)[:-2]


@pytest.mark.one_in(7)
@pytest.mark.parametrize("kernel", packed_gradients(), ids=str)
def test_packed_gradients_on_hopper_spill_nothing(kernel):
    check(kernel)


# Instructions, as NVRTC 13.0 makes them, and a little more.
@pytest.mark.parametrize(("dim", "most"), [(64, 4200), (128, 4000), (256, 3800)])
def test_the_kernel_that_a_first_call_waits_for_is_short(dim, most):
    """NVRTC takes as long as code is: what is rare must be little of it."""
    require_nvrtc()
    plan = make_plan(
        dataclasses.replace(problem("bfloat16", dim, True), summed=(1, 1, 1)), device("sm_90a")
    )
    assert len(machine_code(plan.source(plan.kernel), "sm_90a")) / 16 <= most


def test_lanes_with_one_row_draw_dropout():
    """Elsewhere two rows share what is drawn."""
    rows = [x for x in kernels("sm_90a", ["float32"]) if x.row.engine == "simt"]
    forward = [x for x in rows if x.row.lane_rows == 1 and not x.row.backward]
    assert forward
    for kernel in dropping(forward):
        check(kernel)


@pytest.mark.one_in(10)
@pytest.mark.parametrize("kernel", gradients_elsewhere(), ids=str)
def test_cost_of_gradients_on_other_architectures(kernel):
    check(kernel)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("kernel", wide_heads_elsewhere(), ids=str)
def test_cost_of_wide_heads_on_other_architectures(kernel):
    check(kernel)


def test_every_architecture_has_its_kernels():
    for backward in (False, True):
        rows = [x for x in one_row_each() if x.row.backward == backward]
        found = {(x.arch, x.row.algo, x.row.engine) for x in rows}
        assert found == set(itertools.product(ARCHES, ("fa1", "fa2"), ("simt", "mma")))


def whole_matrix() -> dict[str, Kernel]:
    """All kernels that may have a budget, by name."""
    made = [kernel for arch in (*ARCHES, "sm_90a") for kernel in kernels(arch, ITEM_BYTES)]
    made += in_any_order(made)
    halves = kernels("sm_90a", ["bfloat16"])
    halves = [x for x in halves if x.row.engine != "simt"]
    made += masked(halves) + capped(halves) + split(halves) + paged(halves) + dropping(halves)
    made += packed(halves)
    any_order = in_any_order(halves)
    made += masked(any_order)[:-2] + capped(any_order) + dropping(any_order) + packed(any_order)
    others = kernels("sm_90a", ["float32", "float64"])
    made += split([x for x in others if x.row.engine == "simt" or x.row.kernel == PLANES])
    others = [x for x in others if x.row.engine == "mma"]
    made += varied([x for x in others if not x.name])
    names = {str(kernel): kernel for kernel in made}
    assert len(names) == len(made)  # a name tells a row
    return names


def test_budgets_are_of_rows_that_exist_and_may_spill():
    names = whole_matrix()
    assert set(BUDGETS) <= set(names)
    assert not [name for name in BUDGETS if names[name].must_not_spill]


def test_budgets_are_written_as_they_are_read(tmp_path, monkeypatch):
    text = BUDGETS_FILE.read_bytes()
    monkeypatch.setattr(sys.modules[__name__], "BUDGETS_FILE", tmp_path / "budgets.csv")
    write_budgets({**dict(reversed(BUDGETS.items())), "a kernel that spills nothing": (0, 0)})
    assert BUDGETS_FILE.read_bytes() == text
    assert read_budgets() == BUDGETS


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
    more = {"aligned": False, "kv_lengths": "int64", "heads": 32}
    sizes = (32, 32), 4096, 4096, 72, 37
    more["summed"] = (1, 2, 2)
    more["score"] = form("score * slope", captures=("slope",))
    problems = [
        Problem(dtype, *sizes, backward=backward, **more)
        for backward in (False, True)
        for dtype in ITEM_BYTES
    ]
    problems.append(dataclasses.replace(problems[-1], deterministic=False))
    problems += [dataclasses.replace(x, q_offset="int64") for x in (problems[0], problems[4])]
    return [make_plan(p, Device(90), algo) for p in problems for algo in ("fa1", "fa2")]


@pytest.mark.one_in(6)
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
    made = [x for x in kernels(arch, row.dtypes) if x.row is row]
    for kernel in made + in_any_order(made):
        check(kernel)


@pytest.mark.full
@pytest.mark.parametrize("kernel", every_row(), ids=str)
def test_newest_nvrtc_compiles(kernel):
    require_nvrtc()
    library = newest_library()
    if library is None:
        pytest.skip("no NVRTC but CuPy's is installed; CUFLASH_NVRTC can name one")
    assert compiled(kernel, library).messages == ()


def measure_budgets(made: list[Kernel]) -> None:
    """Print a line per kernel, and write the budgets of these; those of others stay."""
    budgets = {name: BUDGETS[name] for name in BUDGETS.keys() & whole_matrix().keys()}
    for kernel in made:
        cost = compiled(kernel)
        over = " MUST NOT SPILL" if kernel.must_not_spill and cost.stack + cost.spills else ""
        size = f"{cost.registers} registers, {cost.stack} bytes of stack, {cost.spills} of spills"
        print(f"{kernel}: {size}{over}", *cost.messages, sep="\n    ", flush=True)
        budgets[str(kernel)] = cost.stack, cost.spills
    write_budgets(budgets)


if __name__ == "__main__":
    chosen = sys.argv[1:]
    measure_budgets(
        kernels(chosen[0], ["bfloat16", "float32", "float64"])
        if chosen
        else [*every_row(), *one_row_each(), *gradients_elsewhere()]
    )
