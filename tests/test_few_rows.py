"""Few queries of float32 and float64: rows of small blocks on FMA units, of which a multiprocessor
has many at a time.
"""

import dataclasses

import numpy as np
import pytest
from cases import CASES, H200
from emulator import available
from test_kernels import assert_close, assert_written_inside, out_of, run

from cuflash.planning.estimate import DRAM_RATE, estimate
from cuflash.planning.occupancy import blocks_in_shared_memory
from cuflash.planning.plan import make_plan
from cuflash.planning.problem import Device, Problem
from cuflash.planning.simt import FEW_ROWS

FAMILIES = (
    "blocks", "dims", "dropout", "elements", "extremes", "lengths", "masked", "offsets", "scores",
    "splits", "strides", "windows",
)  # fmt: skip
CASES_OF_FLOATS = [
    case
    for case in CASES
    if (case.algo, case.engine) == ("fa2", "simt")
    and case.dtype in ("float32", "float64")
    and case.family in FAMILIES
]
# Each row has a part of the cases.
SHARES = [
    pytest.param(row, case, id=f"{row}, D {row.max_dim}, {case}")
    for i, row in enumerate(FEW_ROWS)
    for case in CASES_OF_FLOATS[i :: len(FEW_ROWS)]
    if case.dtype in row.dtypes and max(case.q[-1], case.v[-1]) <= row.max_dim
]


def planned(dtype, dim, group=1, queries=1, device=H200, **more):
    """The plan of a step of decoding: 16 sequences of 8,192 keys, 8 key heads."""
    heads = 8 * group
    problem = Problem(dtype, (16, heads), queries, 8192, dim, dim, heads=heads, group=group, **more)
    return make_plan(problem, device)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("dim", [32, 64, 80, 128, 256])
@pytest.mark.parametrize(("group", "queries"), [(1, 1), (4, 1), (8, 1), (4, 2), (1, 8)])
def test_memory_bounds_few_queries(dtype, dim, group, queries):
    plan = planned(dtype, dim, group, queries)
    assert plan.tile.max_dim >= dim
    assert dataclasses.replace(plan.tile, packed=1, span=0) in FEW_ROWS
    assert plan.tile.packed == group
    assert plan.query_tiles == 1  # so that keys are read once
    keys = 2 * 16 * 8 * 8192 * dim * np.dtype(dtype).itemsize
    assert estimate(plan.tile, plan.problem, H200) < 20 + 1.5 * keys / DRAM_RATE


PAGES = {"page_size": 16, "page_table": "int32", "kv_lengths": "int32"}


@pytest.mark.parametrize("more", [PAGES, {"split_keys": 512}])
def test_so_do_caches_in_pages_and_given_spans(more):
    plan = planned("float32", 128, 4, **more)
    assert dataclasses.replace(plan.tile, packed=1, span=0) in FEW_ROWS


def test_prompts_are_not_theirs():
    for dtype in ("float32", "float64"):
        assert planned(dtype, 128, 4, queries=512).engine != "simt"
    assert planned("bfloat16", 128, 4, device=Device(80)).engine == "mma"


@pytest.mark.parametrize("arch", [75, 86, 90])
def test_no_more_blocks_are_counted_than_there_is_room_for(arch):
    device = Device(arch, multiprocessors=40)
    counts = set()
    for row in FEW_ROWS:
        for dtype in row.dtypes:
            problem = Problem(dtype, (4, 8), 1, 1024, row.max_dim, row.max_dim)
            if row.reject(problem, device):
                continue
            room = blocks_in_shared_memory(device, row.shared_bytes(problem))
            counted = row.blocks_at_a_time(problem, device)
            assert counted == min(room, row.min_blocks) >= 1
            counts.add(counted)
    assert len(counts) > 1


def test_fewer_items_than_there_is_room_for_do_not_wait_for_others():
    """A block alone on a multiprocessor takes less for a tile of keys than one among several."""
    row = next(x for x in FEW_ROWS if x.min_blocks > 4)

    def time(heads):
        problem = Problem("float32", (heads,), 1, 4096, row.max_dim, row.max_dim)
        return estimate(row, problem, dataclasses.replace(H200, multiprocessors=16))

    assert time(16) == pytest.approx(time(1), rel=0.05)
    assert time(16 * row.min_blocks) > 1.5 * time(16)


@pytest.mark.one_in(12)
@pytest.mark.parametrize(("row", "case"), SHARES)
@pytest.mark.skipif(available() is not None, reason=str(available()))
def test_every_row(row, case):
    options, out = case.options, out_of(case)
    packed = min(2, row.block_q) if options.get("enable_gqa") else 1
    tile = dataclasses.replace(row, packed=packed, span=options.get("split_keys", 0))
    result = run(case, out=out, row=tile)
    assert_close(case, result)
    if out is not None:
        assert_written_inside(result.out, "out")
