"""Rows of Hopper's forward pass that serve short sequences and options, those of which a
multiprocessor has several blocks among them: whatever else they serve, on tensors too small for the
plan to choose them.
"""

import cases
import packed_cases
import pytest
from cases import FEW
from emulator import available
from preferred import assert_preferred, preferred
from test_planes import cupy as cupy

from cuflash.planning.wgmma import ROWS

emulated_only = pytest.mark.skipif(available() is not None, reason=str(available()))
SEVERAL = [row for row in ROWS if row.min_blocks > 1]
SHORT = [
    row for row in ROWS
    if (row.max_dim, row.block_q, row.block_k) in ((64, 192, 64), (128, 128, 64)) and row.rate
]  # fmt: skip
CASES = [x for x in cases.CASES if (x.algo, x.engine) == ("fa3", "wgmma")]
PACKED_CASES = [
    x for x in packed_cases.CASES
    if (x.algo, x.engine) == ("fa3", "wgmma") and x.dtype != "float32"
]  # fmt: skip
GROUPS = dict(cases.groups(cases=CASES))


@pytest.fixture(params=[SEVERAL, SHORT], ids=["several", "short"])
def small_blocks(request):
    with preferred(request.param):
        yield request.param


@emulated_only
@pytest.mark.parametrize("case", CASES[::16], ids=str)
def test_emulator_cases(small_blocks, case):
    from test_kernels import check_forward, run

    with cases.calls_of(case):
        check_forward(case)
        assert_preferred(run(case, mode="fast").plan, small_blocks)


@emulated_only
@pytest.mark.parametrize("case", PACKED_CASES[::3], ids=str)
def test_emulator_packed_cases(small_blocks, case):
    import emulated

    arrays, options = case.arguments()
    result = emulated.attention_varlen(*arrays, device=FEW, **options)
    packed_cases.assert_sequences_close(case, result.out, result.lse, result.plan)
    assert_preferred(result.plan, small_blocks)


@pytest.mark.gpu
@pytest.mark.parametrize("group", GROUPS)
def test_gpu_cases(cupy, small_blocks, group):
    from test_gpu import check

    cases.check_all(GROUPS[group], lambda case: check(cupy, case))


@pytest.mark.gpu
@pytest.mark.parametrize("case", PACKED_CASES, ids=str)
def test_gpu_packed_cases(cupy, small_blocks, case):
    from test_gpu import check_packed

    check_packed(cupy, case)
