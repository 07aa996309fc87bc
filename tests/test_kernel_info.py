"""kernel_info(): what kernels take, from NVRTC and from a driver, and occupancy as CUDA counts."""

import subprocess
import sys
import types

import emulator
import numpy as np
import pytest
from cases import H200
from compile_kernels import compile_source, require_nvrtc

import cuflash
import cuflash.gpu
from cuflash.gpu import offline
from cuflash.planning.occupancy import LIMITS, resident_blocks

Q = np.zeros((1, 2, 300, 16), np.float16)
TURING = cuflash.Device(75)


@pytest.fixture(scope="module")
def counted(tmp_path_factory):
    """How many blocks are resident by cuda_occupancy.h, for lines of numbers."""
    headers = offline.header_folder()
    if emulator.available() or headers is None or not (headers / "cuda_occupancy.h").exists():
        pytest.skip("it takes g++ and the CUDA headers")
    program = tmp_path_factory.mktemp("occupancy") / "occupancy"
    source = __file__.replace("test_kernel_info.py", "occupancy.cpp")
    subprocess.run(["g++", source, "-I", headers, "-o", program], check=True, timeout=60)

    def count(lines):
        text = "\n".join(" ".join(map(str, line)) for line in lines)
        done = subprocess.run([program], input=text, capture_output=True, text=True, check=True)
        return list(map(int, done.stdout.split()))

    return count


def test_occupancy_is_as_the_toolkit_counts(counted):
    """Of random kernels on every architecture, and of those at the limits."""
    rng, cases = np.random.default_rng(0), []
    for arch, limits in LIMITS.items():
        device = cuflash.Device(arch)
        for _ in range(300):
            threads = 32 * int(rng.integers(1, 33))
            registers = int(rng.integers(16, 256))
            shared = int(rng.choice([0, rng.integers(0, 20000), rng.integers(0, 50000),
                                     rng.integers(0, device.shared_bytes + 1)]))  # fmt: skip
            cases.append((device, limits, threads, registers, shared, int(rng.integers(1, 17))))
        for shared in (device.shared_bytes, device.shared_bytes // 2, 49152):
            cases.append((device, limits, 128, 128, shared, 1))
    lines = [(x.arch, y.threads, x.shared_bytes, *rest) for x, y, *rest in cases]
    expected = counted(lines)
    mine = [resident_blocks(device, *rest) for device, _, *rest in cases]
    assert mine == expected
    assert len(set(mine)) > 10


FIRST = """
import numpy, cuflash
q = numpy.zeros((1, 2, 300, 32), numpy.float16)
plan = cuflash.plan(q, q, q, device=cuflash.Device(90), engine="simt", backward=True)
print(*(kernel.name for kernel in cuflash.kernel_info(plan)))
"""


def test_several_kernels_are_what_a_process_compiles_first():
    """Side by side, as libraries are loaded."""
    require_nvrtc()
    done = subprocess.run([sys.executable, "-c", FIRST], capture_output=True, text=True)
    assert done.stdout.split() == ["backward_rows", "fa2_backward", "sum_dq"], done.stderr


def test_without_a_device_nvrtc_tells():
    require_nvrtc()
    plan = cuflash.plan(Q, Q, Q, device=TURING, backward=True)
    found = cuflash.kernel_info(plan)
    assert [x.name for x in found] == [x.name for x in plan.kernels]
    for x, kernel in zip(found, plan.kernels, strict=True):
        cost = compile_source(plan.source(kernel.name), "sm_75")
        assert (x.registers, x.local_bytes, x.spill_bytes) == cost[:3]
        assert (x.grid, x.threads) == (kernel.grid, kernel.threads)
        assert x.dynamic_shared_bytes == kernel.shared_bytes
        assert x.told_by.startswith("NVRTC 1")
        assert 0 < x.blocks * x.threads <= 1024
        assert x.occupancy == x.blocks * x.threads / 1024


SPILLING = """
extern "C" __global__ void spill(float* x) {
    __shared__ float tile[256];
    float held[32];
    int place = threadIdx.x % 32;
    for (int i = 0; i < 32; ++i) held[(i * place) % 32] = x[i];
    tile[threadIdx.x] = held[place];
    __syncthreads();
    x[threadIdx.x] = tile[255 - threadIdx.x] + held[(place * 7) % 32];
}"""


def test_what_a_compiler_says_is_read():
    """Static shared memory, an array that takes local memory, and barriers."""
    require_nvrtc()
    cost = offline.compile_source(SPILLING, "sm_90")
    assert (cost.shared, cost.stack, cost.spills, cost.barriers) == (1024, 128, 0, 1)
    assert "Used" in cost.log
    with pytest.raises(RuntimeError, match="does not compile it for sm_90\n(?s:.*)expected a"):
        offline.compile_source("void broken(", "sm_90")
    with pytest.raises(RuntimeError, match="does not compile it for sm_1\n.*gpu-architecture"):
        offline.compile_source(SPILLING, "sm_1")


def test_on_a_device_the_driver_tells(monkeypatch):
    """For the kernels of a plan in their order; of a device of that architecture."""
    plan = cuflash.plan(Q, Q, Q, device=H200, backward=True)
    compiled = []

    def of_driver(asked, kernel, device_id):
        assert compiled == [(plan, 3)]
        assert asked is plan
        return {"registers": len(kernel.name), "local_bytes": 0, "spill_bytes": None,
                "static_shared_bytes": 16, "blocks": 2, "most_threads": 2048,
                "told_by": "driver"}  # fmt: skip

    told = types.SimpleNamespace(current_device=lambda plan: 3, of_driver=of_driver)
    launch = types.SimpleNamespace(compile_all=lambda *given: compiled.append(given))
    monkeypatch.setattr(cuflash.gpu, "resources", told, raising=False)
    monkeypatch.setitem(sys.modules, "cuflash.gpu.resources", told)
    monkeypatch.setattr(cuflash._kernel_info, "launch_module", lambda: launch)
    found = cuflash.kernel_info(plan)
    assert [(x.name, x.registers) for x in found] == [(x.name, len(x.name)) for x in plan.kernels]
    assert all(x.occupancy == 2 * x.threads / 2048 for x in found)
    assert {(x.told_by, x.spill_bytes) for x in found} == {("driver", None)}


def test_mistakes_in_words(monkeypatch):
    with pytest.raises(TypeError, match="plan=3: give what cuflash.plan"):
        cuflash.kernel_info(3)
    with pytest.raises(ValueError, match="the plan is for the CPU, where no kernel runs"):
        cuflash.kernel_info(cuflash.plan(Q, Q, Q))
    plan = cuflash.plan(Q, Q, Q, device=TURING)
    monkeypatch.setattr(offline, "header_folder", lambda: None)
    if not offline.importlib.util.find_spec("cupy"):
        pytest.skip("the rest takes CuPy")
    with pytest.raises(RuntimeError, match=r"headers are missing: pip install .*cuda13x"):
        cuflash.kernel_info(plan)
    unknown = cuflash.plan(Q, Q, Q, device=cuflash.Device(130))
    with pytest.raises(ValueError, match="sm_130, whose limits are not known here"):
        cuflash.kernel_info(unknown)


def test_without_cupy(monkeypatch):
    plan = cuflash.plan(Q, Q, Q, device=TURING)
    for name in [x for x in sys.modules if x.startswith("cuflash.gpu.") and "offline" not in x]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delattr(cuflash.gpu, "resources", raising=False)
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(ModuleNotFoundError, match=r"CuPy, which is not installed: pip install"):
        cuflash.kernel_info(plan)


def test_headers_of_a_toolkit(monkeypatch, tmp_path):
    """Where no wheel has them, of the toolkit that the environment names."""
    monkeypatch.setattr(offline.importlib.util, "find_spec", lambda name: None)
    for name in ("CUDA_PATH", "CUDA_HOME"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "include").mkdir()
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert offline.header_folder() != tmp_path / "include"
    (tmp_path / "include" / "cuda_fp16.h").touch()
    assert offline.header_folder() == tmp_path / "include"


@pytest.mark.gpu
@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("engine", ["simt", "mma", None])
def test_the_driver_agrees_with_the_compiler(monkeypatch, tmp_path, engine, backward):
    """Registers, local memory and occupancy of the kernels that this device runs."""
    cupy = pytest.importorskip("cupy")
    from cuflash.gpu import launch, resources

    # What another process has left in CuPy's cache may be another release of NVRTC's.
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path))
    launch._load.cache_clear()
    launch.compiled.cache_clear()
    q = cupy.zeros((1, 8, 512, 64), np.float16)
    plan = cuflash.plan(q, q, q, engine=engine, backward=backward)
    driver = cuflash.kernel_info(plan)
    monkeypatch.setattr(resources, "current_device", lambda plan: None)
    compiler = cuflash.kernel_info(plan)
    for x, y in zip(driver, compiler, strict=True):
        assert (x.told_by, x.spill_bytes) == ("driver", None)
        assert (x.name, x.registers, x.blocks, x.occupancy) == (
            y.name,
            y.registers,
            y.blocks,
            y.occupancy,
        )
        assert x.static_shared_bytes == y.static_shared_bytes
        assert x.local_bytes == y.local_bytes
        assert x.blocks >= 1
