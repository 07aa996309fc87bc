"""sm_70, which NVRTC 13 has left out: an NVRTC 12 that is installed beside it compiles for it."""

import itertools
import os

import pytest
from compile_kernels import compile_source, newest_library, require_nvrtc

from cuflash.planning.plan import make_plan
from cuflash.planning.problem import Device, Problem


@pytest.mark.parametrize(
    ("algo", "dtype", "backward"),
    [*itertools.product(("fa1", "fa2"), ("float16", "float32"), (False, True))],
)
def test_volta_runs_simt(algo, dtype, backward):
    require_nvrtc()
    library = newest_library()
    if library is None or library.getVersion() >= (13, 0):
        required = os.environ.get("CUFLASH_REQUIRE_NVRTC") == "1"
        reason = "no NVRTC 12 is installed: pip install nvidia-cuda-nvrtc-cu12"
        (pytest.fail if required else pytest.skip)(reason)
    problem = Problem(dtype, (8, 16), 1024, 1024, 64, 64, heads=16, backward=backward)
    plan = make_plan(problem, Device(70), algo)
    assert plan.engine == "simt"
    cost = compile_source(plan.source(), "sm_70", library)
    assert (cost.stack, cost.spills) == (0, 0)
    assert cost.registers <= 255
