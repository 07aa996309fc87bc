"""`python -m cuflash info` and `explain`: what they print, with and without CuPy and a device."""

import contextlib
import re
import sys
import types

import ml_dtypes
import numpy as np
import pytest
from compile_kernels import missing_nvrtc, require_nvrtc

import cuflash
from cuflash import __main__ as command_line
from cuflash.commands import explain, info


def run(monkeypatch, capsys, line):
    """The exit status of a command line, and what it prints."""
    monkeypatch.setattr(sys, "argv", ["cuflash", *line.split()])
    try:
        status = command_line.command()
    except SystemExit as exited:
        status = exited.code
    return status, *capsys.readouterr()


# ------------------------------------------------------------------------------------------ info
def lines_of(printed):
    """Names and values of a report, whose columns are aligned."""
    rows = [re.fullmatch(r"(\S+(?: \S+)*)( {2,})(.+)", line) for line in printed.splitlines()]
    assert len({row.start(3) for row in rows}) == 1
    return {row[1]: row[3] for row in rows}


@pytest.fixture
def bare(monkeypatch):
    """No variable is set that matters."""
    for name in list(info.os.environ):
        if name.startswith(info.PREFIXES) or name in (*info.VARIABLES, *info.RANKS):
            monkeypatch.delenv(name)


def test_info_without_cupy(bare, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.setattr(info, "PACKAGES", ("ml_dtypes", "no-such-package"))
    status, out, err = run(monkeypatch, capsys, "info")
    assert (status, err) == (0, "")
    found = lines_of(out)
    assert list(found) == ["cuflash", "Python", "system", "NumPy", "ml_dtypes", "no-such-package",
                           "GPU", "environment"]  # fmt: skip
    assert found["cuflash"].startswith(f"{cuflash.__version__}, ")
    assert found["Python"].startswith("3.")
    assert found["NumPy"] == np.__version__
    assert found["ml_dtypes"] == ml_dtypes.__version__
    assert found["no-such-package"] == "not installed"
    assert found["GPU"].startswith("none in use: CuPy is not installed (pip install ")
    assert found["environment"] == "no variable that matters is set"


def test_info_with_the_cupy_that_is_here(bare, monkeypatch, capsys, tmp_path):
    if missing_nvrtc():
        pytest.skip(missing_nvrtc())
    for name, size in (("a.cubin", 3 << 20), ("b.cubin", 1 << 20)):
        (tmp_path / name).write_bytes(bytes(size))
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("CUFLASH_NVTX", "1")
    monkeypatch.setenv("HOME_OF_SECRETS", "not shown")
    status, out, err = run(monkeypatch, capsys, "info")
    assert (status, err) == (0, "")
    found = lines_of(out)
    assert re.match(r"\d+\.\d+\.\d+\S*, built for CUDA 1\d\.\d+$", found["CuPy"])
    assert re.match(r"1\d\.\d+$", found["NVRTC"])
    assert found["kernel cache"] == f"{tmp_path}, 2 files, 4.0 MiB"
    assert found["CUFLASH_NVTX"] == "1"
    assert "not shown" not in out
    assert "environment" not in found


def stand_in(**changed):
    """What the report asks of a CuPy with two devices."""
    properties = {"name": b"NVIDIA H200", "major": 9, "minor": 0, "multiProcessorCount": 132}
    runtime = {
        "getDeviceCount": lambda: 2,
        "getDeviceProperties": lambda number: properties,
        "memGetInfo": lambda: (3 << 30, 140 << 30),
        "driverGetVersion": lambda: 13000,
        **changed,
    }
    cuda = types.SimpleNamespace(
        runtime=types.SimpleNamespace(**runtime),
        driver=types.SimpleNamespace(get_build_version=lambda: 12090),
        nvrtc=types.SimpleNamespace(getVersion=lambda: 1 // 0),
        Device=lambda number: contextlib.nullcontext(),
    )
    return types.SimpleNamespace(__version__="14.0", cuda=cuda)


def test_info_of_devices(bare, monkeypatch, capsys, tmp_path):
    monkeypatch.setitem(sys.modules, "cupy", stand_in())
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path / "none"))
    asked = []

    def smi(command, **options):
        asked.append(command[0])
        return types.SimpleNamespace(stdout="580.1\n580.1\n")

    monkeypatch.setattr(info.subprocess, "run", smi)
    found = lines_of(run(monkeypatch, capsys, "info")[1])
    line = "NVIDIA H200, compute capability 9.0, 132 multiprocessors, 140.0 GiB, 3.0 GiB free"
    assert found["GPU 0"] == found["GPU 1"] == line
    assert found["CuPy"] == "14.0, built for CUDA 12.9"
    assert found["NVRTC"].startswith("none (")
    assert found["driver"] == "580.1, for CUDA 13.0"
    assert asked == ["nvidia-smi"]
    assert found["kernel cache"] == f"{tmp_path / 'none'}, 0 files, 0.0 MiB"

    def missing(command, **options):
        raise FileNotFoundError

    monkeypatch.setattr(info.subprocess, "run", missing)
    found = lines_of(run(monkeypatch, capsys, "info")[1])
    assert found["driver"] == "for CUDA 13.0"
    monkeypatch.setitem(sys.modules, "cupy", stand_in(driverGetVersion=lambda: 0))
    assert lines_of(run(monkeypatch, capsys, "info")[1])["driver"] == "none"


def test_where_the_cache_is_without_a_variable(bare, monkeypatch, tmp_path):
    monkeypatch.setattr(info.Path, "home", lambda: tmp_path)
    assert info.cache_folder() == tmp_path / ".cupy" / "kernel_cache"


# --------------------------------------------------------------------------------------- explain
PROBLEM = "--shape 2,4,300,64 --keys 2,2,500,64 --dtype bfloat16 --enable-gqa"
GROUPED = [np.zeros((2, h, n, 64), ml_dtypes.bfloat16) for h, n in ((4, 300), (2, 500), (2, 500))]


@pytest.mark.parametrize(
    ("line", "options"),
    [
        ("--on H200", {"device": cuflash.Device(90, "H200", 132)}),
        ("--on h200 --causal top_left --window 9,", {"device": cuflash.Device(90, "H200", 132),
                                                     "causal": "top_left", "window": (9, None)}),
        ("--on sm_86", {"device": cuflash.Device(86)}),
        ("--on 8.6 --multiprocessors 7", {"device": cuflash.Device(86, "", 7)}),
        ("--on T4 --engine simt", {"device": cuflash.Device(75, "T4", 40), "engine": "simt"}),
        ("--on cpu --algo fa1", {"algo": "fa1"}),
        ("--on A100 --kv-lengths int64", {"device": cuflash.Device(80, "A100", 108),
                                          "kv_lengths": np.zeros(2, np.int64)}),
    ],
)  # fmt: skip
def test_explain_prints_what_plan_says(monkeypatch, capsys, line, options):
    command = f"explain {PROBLEM} --plan-only {line}"
    status, out, err = run(monkeypatch, capsys, command)
    assert (status, err) == (0, "")
    assert out == f"{cuflash.plan(*GROUPED, enable_gqa=True, **options)}\n"


ARRAYS = {
    "--bias 4,300,500 --sinks 4:float64 --alibi-slopes 2,4":
        {"bias": np.zeros((4, 300, 500), np.float32), "sinks": np.zeros(4),
         "alibi_slopes": np.zeros((2, 4), np.float32)},
    "--mask 300,500 --dropout-p 0.25": {"mask": np.ones((300, 500), bool), "dropout_p": 0.25},
    "--mask blocks:64": {"mask": cuflash.BlockMask.causal((300, 500), block_size=64)},
    "--score-mod score*a+t[k] --capture a=2 --capture t=500:int32":
        {"score_mod": cuflash.ScoreMod("score*a+t[k]", a=2, t=np.zeros(500, np.int32))},
}  # fmt: skip


@pytest.mark.parametrize("line", ARRAYS)
def test_explain_of_arrays(monkeypatch, capsys, line):
    """What the plan of such arrays says, of whatever values."""
    command = f"explain {PROBLEM} --plan-only --on H200 {line}"
    status, out, err = run(monkeypatch, capsys, command)
    assert (status, err) == (0, "")
    h200 = cuflash.Device(90, "H200", 132)
    assert out == f"{cuflash.plan(*GROUPED, enable_gqa=True, device=h200, **ARRAYS[line])}\n"


def test_explain_of_gradients_of_arrays(monkeypatch, capsys):
    line = "explain --shape 2,4,300,64 --dtype float16 --backward --on H200 --plan-only"
    status, out, err = run(monkeypatch, capsys, f"{line} --bias 4,300,300:float16 --wrt bias")
    assert (status, err) == (0, "")
    q, bias = np.zeros((2, 4, 300, 64), np.float16), np.zeros((4, 300, 300), np.float16)
    how = {"bias": bias, "device": cuflash.Device(90, "H200", 132)}
    plans = cuflash.plan(q, q, q, **how), cuflash.plan(q, q, q, backward=True, wrt=("bias",), **how)
    assert out == "{}\n\n{}\n".format(*plans)


def test_explain_of_gradients_and_several_types(monkeypatch, capsys):
    line = "explain --shape 1,2,300,64 --dtype float16 float32 --backward --any-order --on H200"
    status, out, _ = run(monkeypatch, capsys, f"{line} --plan-only")
    h200 = cuflash.Device(90, "H200", 132)
    plans = [
        cuflash.plan(q, q, q, device=h200, **kind)
        for q in (np.zeros((1, 2, 300, 64), dtype) for dtype in ("float16", "float32"))
        for kind in ({}, {"backward": True, "deterministic": False})
    ]
    assert status == 0
    assert out == "\n".join(f"{plan}\n" for plan in plans)


def test_explain_of_what_would_not_fit_into_memory(monkeypatch, capsys):
    """No array is made; those that are not aligned are copied."""
    line = "explain --shape 2000,3000000,32,64 --sequences 9 --dtype float16 --on H200 --plan-only"
    status, _, err = run(monkeypatch, capsys, line)
    assert status == 2
    assert "packed sequences need axes (tokens, heads, head dim)" in err
    line = "explain --shape 40,300,1000000,64 --dtype float16 --on H200 --plan-only"
    aligned, wild = (run(monkeypatch, capsys, line + x)[1] for x in ("", " --unaligned"))
    assert "heads 40x300, queries 1000000, keys 1000000, head dim 64" in aligned
    assert "kernel     hopper_forward, algo fa3" in aligned
    assert "copies     q, k, v: " in wild


def test_explain_says_what_kernels_take(monkeypatch, capsys):
    require_nvrtc()
    compiled, found = explain.kernel_info, []
    monkeypatch.setattr(explain, "kernel_info", lambda x: found.append(compiled(x)) or found[-1])
    line = "explain --shape 1,2,300,16 --dtype float16 --on T4"
    status, out, err = run(monkeypatch, capsys, line)
    assert (status, err) == (0, "")
    q = np.zeros((1, 2, 300, 16), np.float16)
    plan = cuflash.plan(q, q, q, device=cuflash.Device(75, "T4", 40))
    assert [x.name for x in found[0]] == [x.name for x in plan.kernels]
    rows = out.splitlines()[-len(plan.kernels) - 2 :]
    assert rows[0].split() == list(explain.COLUMNS)
    assert len({len(row) for row in rows[:-1]}) == 1
    for row, x in zip(rows[1:-1], found[0], strict=True):
        shared = x.static_shared_bytes + x.dynamic_shared_bytes
        numbers = x.grid, x.threads, x.registers, x.spill_bytes, x.local_bytes, shared, x.blocks
        assert row.split() == [x.name, *map(str, numbers), f"{x.occupancy:.0%}"]
    assert rows[-1].startswith("by NVRTC 1")


def test_explain_where_kernels_cannot_be_compiled(monkeypatch, capsys):
    """Without a compiler the plan is all; a kernel that does not compile is an error."""
    line = "explain --shape 1,2,300,16 --dtype float16 --on T4"

    def fails(error):
        def kernel_info(plan):
            raise error

        monkeypatch.setattr(explain, "kernel_info", kernel_info)
        return run(monkeypatch, capsys, line)

    status, out, err = fails(ModuleNotFoundError("CuPy is missing\nand more", name="cupy"))
    assert (status, err) == (0, "")
    assert out.endswith("\nkernels    not compiled: CuPy is missing\n")
    status, out, err = fails(RuntimeError("line 3: no such thing"))
    assert status == 1
    assert err == "fa2_forward: line 3: no such thing\n"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("", "none in use: CuPy is not installed"),
        ("--multiprocessors 3", "--multiprocessors goes with --on"),
        ("--on H200 --multiprocessors 0", "multiprocessors=0: give how many there are, 1 or more"),
        ("--on cpu --multiprocessors 3", "--multiprocessors goes with a GPU"),
        ("--on H200 --any-order", "--any-order goes with --backward"),
        ("--on H300", "--on H300: give one of V100, T4, A100"),
        ("--on sm_50", "arch=50: give compute capability times ten"),
        ("--on H200 --window 3,4,5", "window"),
        ("--on H200 --keys 2,4,300,32", "head dim"),
        ("--on H200 --keys=-2,4,300,64", "(-2, 4, 300, 64) is no shape"),
        ("--on H200 --engine numpy", "no kernel serves"),
        ("--on H200 --bias 4,300,300 --wrt bias", "--wrt goes with --backward"),
        ("--on H200 --score-mod score+", "score"),
        ("--on H200 --bias 4,300,x", "'4,300,x' is no shape"),
        ("--on H200 --score-mod score*a --capture a=1 --capture a=2", "each number or array once"),
    ],
)
def test_mistakes_in_words(monkeypatch, capsys, line, words):
    monkeypatch.setitem(sys.modules, "cupy", None)
    command = f"explain --shape 2,4,300,64 --dtype float16 {line}"
    status, out, err = run(monkeypatch, capsys, command)
    assert (status, out) == (2, "")
    assert "usage: python -m cuflash explain" in err
    assert words in err


def test_shapes_without_elements(monkeypatch, capsys):
    line = "explain --shape 2,0,300,64 --dtype float16 --on H200 --plan-only"
    status, out, _ = run(monkeypatch, capsys, line)
    assert status == 0
    assert "heads 2x0" in out


def test_explain_plans_for_the_device_that_is_here(monkeypatch, capsys):
    here = cuflash.Device(90, "NVIDIA H200", multiprocessors=132)
    module = types.SimpleNamespace(device_number=lambda device: 0, device_facts=lambda number: here)
    monkeypatch.setattr(explain, "find_cupy", lambda how: (types.SimpleNamespace(), ""))
    monkeypatch.setattr(explain, "launch_module", lambda: module)
    status, out, _ = run(monkeypatch, capsys, f"explain {PROBLEM} --plan-only")
    assert status == 0
    assert out == f"{cuflash.plan(*GROUPED, enable_gqa=True, device=here)}\n"


@pytest.mark.gpu
def test_both_on_a_device(monkeypatch, capsys):
    found = lines_of(run(monkeypatch, capsys, "info")[1])
    assert "multiprocessors" in found["GPU 0"]
    assert re.search(r"for CUDA 1\d\.\d", found["driver"])
    status, out, err = run(monkeypatch, capsys, f"explain {PROBLEM} --backward")
    assert (status, err) == (0, "")
    assert out.count("\nby driver; ") == 2
