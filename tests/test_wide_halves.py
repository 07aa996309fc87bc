"""Head dims of 257 to 512 in halves: forward kernels on tensor cores whose warps share rows."""

import dataclasses
import itertools

import pytest
from cases import CASES, check_all
from emulator import available
from test_kernels import assert_close, assert_written_inside, is_twin, out_of, run

from cuflash.planning.plan import TILES, make_plan
from cuflash.planning.problem import Device, Problem

EDGE = 256  # columns: narrower heads have rows of their own
ROWS = [x for x in TILES if x.kernel == "fa2_shared_forward" and x.max_dim > EDGE]
WIDE = [x for x in CASES if x.family == "wide" and x.engine == "mma" and not is_twin(x)]
# Each row has a part of the cases, and all of them where tests are `full`.
SHARES = [
    pytest.param(row, part, marks=[] if i == part else pytest.mark.full, id=f"{row}, part {part}")
    for i, row in enumerate(ROWS)
    for part in range(len(ROWS))
]


def planned(device, dtype, *dims, n=1024, m=1024, **more):
    return make_plan(Problem(dtype, (4, 8), n, m, *dims, heads=8, **more), device)


@pytest.mark.parametrize("arch", [80, 86, 89, 90, 100, 120])
def test_halves_have_tensor_cores_by_default(arch):
    """Prompts, and a token of text that is written."""
    device = Device(arch, multiprocessors=132)
    dims = (257, 257), (320, 320), (512, 512), (512, 64), (64, 512), (384, 264)
    for pair, n, dtype in itertools.product(dims, (1024, 1), ("float16", "bfloat16")):
        for more in (
            {},
            {"aligned": False},
            {"mask": "elements"},
            {"group": 4},
            {"split_keys": 256},
        ):
            plan = planned(device, dtype, *pair, n=n, m=8192, **more)
            assert (plan.engine, plan.algo) == ("mma", "fa2"), (pair, n, dtype, more)
            assert plan.tile in ROWS or plan.tile.has_variants
    for dtype, pair in itertools.product(("float32", "float64"), dims):
        assert planned(device, dtype, *pair).engine == "simt"


@pytest.mark.parametrize("arch", [80, 86, 90, 120])
def test_each_shared_memory_has_a_row_for_every_width(arch):
    device = Device(arch)
    for dim in range(EDGE + 1, 513):
        assert planned(device, "float16", dim, dim).tile in ROWS


def test_narrower_heads_keep_their_rows():
    device = Device(90)
    problem = Problem("float16", (4, 8), 64, 64, EDGE, EDGE)
    for row in ROWS:
        assert row.reject(problem, device) == "serves head dims from 257 on"
        assert not row.reject(dataclasses.replace(problem, value_dim=EDGE + 1), device)


@pytest.mark.skipif(available() is not None, reason=str(available()))
@pytest.mark.parametrize(("row", "part"), SHARES)
def test_every_row(row, part):
    def check(case):
        options, out = case.options, out_of(case)
        packed = 2 if options.get("enable_gqa") else 1
        tile = dataclasses.replace(row, packed=packed, span=options.get("split_keys", 0))
        result = run(case, out=out, row=tile)
        assert_close(case, result)
        if out is not None:
            assert_written_inside(result.out, "out")

    served = [x for x in WIDE if max(x.q[-1], x.v[-1]) <= row.max_dim]
    check_all(served[part :: len(ROWS)], check)


@pytest.mark.skipif(available() is not None, reason=str(available()))
@pytest.mark.parametrize("row", ROWS, ids=str)
def test_dropout_on_every_row(row):
    """A warp has 8, 16 or 32 keys of the 32 whose bits are made together."""
    case = next(x for x in WIDE if x.name == "wide dropout")
    assert_close(case, run(case, row=row))
