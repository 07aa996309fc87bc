"""`python -m cuflash`: its report, its exit status, and its words for a broken CuPy."""

import json
import os
import re
import subprocess
import sys
import time
import types

import numpy as np
import pytest

import cuflash
from cuflash import __main__ as report
from cuflash.compare import user_report
from cuflash.compare.contenders import Field
from cuflash.compare.experiments import Work
from cuflash.numpy_engine import walks as host


@pytest.fixture
def small(monkeypatch):
    """A problem of no size on the CPU alone, with the time of each call taken once."""
    monkeypatch.setattr(report, "CPU_SHAPE", (1, 2, 33, 16))
    monkeypatch.setattr(report, "REPEATS", {"CPU": 1, "GPU": 1})
    monkeypatch.setitem(sys.modules, "cupy", None)


def test_report_without_cupy(small, capsys):
    assert report.main() == 0
    text = capsys.readouterr().out
    assert f"cuflash {cuflash.__version__}, Python 3." in text
    assert f"NumPy {np.__version__}" in text
    assert (
        'none in use: CuPy is not installed (pip install ".[cuda13x]" in a checkout, pip install '
        '"cuflash[cuda13x]" from an index; cuda12x for a driver of CUDA 12)\n'
    ) in text
    assert "engine   numpy: usable" in text
    assert "engine   mma: not usable: it needs a GPU" in text
    assert text.endswith(
        "all 8 checks passed: every result is within its bound of the float64 reference\n"
    )


def test_table_has_a_row_for_every_kernel_type_and_mask(small, capsys):
    report.main()
    lines = capsys.readouterr().out.splitlines()
    (start,) = (i for i, line in enumerate(lines) if line.startswith("kernel "))
    rows = lines[start + 1 : start + 9]
    found = set()
    for line in rows:
        name, engine, dtype, shape, *causal, ms, rate, ratio = line.split()
        found.add((name, engine, dtype, *causal))
        assert shape == "1x2x33x16"
        assert float(ms) > 0
        assert float(rate) >= 0
        assert 0 < float(ratio) < 1
    assert found == {
        (f"{algo}_forward", "numpy", dtype, *causal)
        for algo in ("fa1", "fa2")
        for dtype in ("float16", "float32")
        for causal in ((), ("causal",))
    }
    # Aligned: types and shapes begin, and errors end, in one column each.
    assert len({re.search("float", line).start() for line in rows}) == 1
    assert len({re.search("1x2", line).start() for line in rows}) == 1
    assert len({len(line) for line in rows}) == 1


def test_a_report_to_send_without_a_gpu(small, capsys, tmp_path):
    file = tmp_path / "report.json"
    assert report.main(file) == 0
    printed = capsys.readouterr().out
    assert printed.endswith(
        f"{file} has this, but no times, which are a GPU's: docs/gpus.md says where to send it\n"
    )
    assert "none in use: CuPy is not installed" in printed
    found = json.loads(file.read_text())
    assert (found["cuflash"], found["device"]) == (cuflash.__version__, {})
    assert found["machine"]["numpy"] == np.__version__
    assert found["engines"]["numpy"] == "usable"
    assert found["engines"]["simt"] == "not usable: it needs a GPU"
    assert len(found["checks"]) == 8
    for check in found["checks"]:
        assert check["passed"] is True
        assert float(check["error / bound"]) <= 1
        assert check["shape"].split()[0] == "1x2x33x16"
    assert found["times"] == []


def test_times_of_a_report(monkeypatch):
    """On the CPU here: each problem says its plan, and of each contender figures or a reason."""
    monkeypatch.setattr(user_report, "MILLISECONDS", 1.0)
    works = Work(1, 2, 33, 16, "float32"), Work(1, 2, 33, 16, "float32", True, True)
    found = user_report.times(Field(), works)
    assert [x["problem"] for x in found] == [str(work) for work in works]
    for problem, work in zip(found, works):
        assert problem["plan"].startswith("fa2 numpy")
        assert list(problem["contenders"]) == ["fa2 numpy"]
        figures = problem["contenders"]["fa2 numpy"]
        assert figures["calls"] >= 5
        low, high = figures["quartiles"]
        assert 0 < low <= figures["microseconds"] + 0.01
        assert figures["microseconds"] <= high + 0.01
        assert figures["tflops"] == work.flops / figures["microseconds"] / 1e6
        assert figures["difference"] == 0
    json.dumps(found)


def test_a_report_says_why_a_contender_has_no_times(monkeypatch):
    monkeypatch.setattr(user_report, "CONTENDERS", ("unfused",))
    (found,) = user_report.times(Field(), [Work(1, 2, 33, 16, "float32", backward=True)])
    assert found["contenders"] == {"unfused": "has no gradients"}


def test_what_cuda_says_of_a_device_as_far_as_it_does():
    attributes = {"MultiProcessorCount": 40, "L2CacheSize": 4 << 20, "IsMultiGpuBoard": 0}
    device = types.SimpleNamespace(
        compute_capability="75", attributes=attributes, mem_info=(1 << 30, 16 << 30)
    )
    cupy = types.SimpleNamespace(cuda=types.SimpleNamespace(Device=lambda: device))
    assert user_report.device_facts(cupy) == {
        "compute_capability": "75",
        "MultiProcessorCount": 40,
        "L2CacheSize": 4 << 20,
        "memory_bytes": 16 << 30,
    }


@pytest.mark.gpu
def test_a_report_of_a_gpu(tmp_path):
    import cupy

    works = Work(2, 3, 256, 64, "float16"), Work(2, 3, 256, 64, "float32", True, True)
    user_report.write(tmp_path / "report.json", cupy, {"simt": ""}, [], works)
    found = json.loads((tmp_path / "report.json").read_text())
    assert found["device"]["MultiProcessorCount"] > 0
    assert found["device"]["memory_bytes"] > 1 << 30
    assert found["machine"]["cupy"] == cupy.__version__
    assert len(found["times"]) == 2
    for problem in found["times"]:
        assert problem["contenders"]["fa2 simt"]["microseconds"] > 0
        assert problem["contenders"]["fa2 simt"]["difference"] < 1e-2
        assert problem["plan"].startswith(("fa2", "fa3"))


def test_twelve_problems_are_reported():
    assert len({str(work) for work in user_report.PROBLEMS}) == 12
    assert {work.dtype for work in user_report.PROBLEMS} == {"float16", "bfloat16", "float32"}
    most = max(4 * work.width * work.batch * work.heads * work.length * 2 * 4
               for work in user_report.PROBLEMS)  # fmt: skip
    assert most < 2 << 30  # bytes of operands and results


def test_a_failed_check_shows_and_sets_the_exit_status(small, capsys, monkeypatch):
    def wrong(plan, q, k, v, out, *more, **options):
        right(plan, q, k, v, out, *more, **options)
        if plan.algo == "fa1" and plan.problem.dtype == "float32":
            out *= 1.001

    right = host.forward
    monkeypatch.setattr(host, "forward", wrong)
    assert report.main() == 1
    text = capsys.readouterr().out
    assert "2 of 8 checks FAILED" in text
    failed = [line for line in text.splitlines() if line.endswith(" FAILED") and "_forward" in line]
    assert [line.split()[:3] for line in failed] == [["fa1_forward", "numpy", "float32"]] * 2


def test_nan_fails_the_check(small, monkeypatch):
    def wrong(plan, q, k, v, out, *more, **options):
        out[...] = np.nan

    monkeypatch.setattr(host, "forward", wrong)
    assert report.main() == 1


def broken_cupy(**runtime):
    """What the report asks a CuPy without a working device: its version and a count."""
    cuda = types.SimpleNamespace(runtime=types.SimpleNamespace(**runtime))
    return types.SimpleNamespace(__version__="14.0", cuda=cuda)


def no_device():
    raise RuntimeError("cudaErrorNoDevice: no CUDA-capable device is detected\nand more")


def zero_devices():
    return 0


@pytest.mark.parametrize(
    ("count", "words"),
    [
        (no_device, "finds no device (cudaErrorNoDevice: no CUDA-capable device is detected)"),
        (zero_devices, "counts no device"),
    ],
)
def test_no_device_in_words(small, capsys, monkeypatch, count, words):
    monkeypatch.setitem(sys.modules, "cupy", broken_cupy(getDeviceCount=count))
    assert report.main() == 0
    assert f"none in use: CuPy 14.0 is here, but {words}\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("import a_module_that_cupy_lacks", "No module named 'a_module_that_cupy_lacks'"),
        ("raise ImportError('libcuda.so.1: cannot open\\nhelp')", "libcuda.so.1: cannot open"),
        ("raise OSError", "OSError"),
    ],
)
def test_a_cupy_that_does_not_import_in_words(small, capsys, monkeypatch, tmp_path, code, words):
    (tmp_path / "cupy.py").write_text(code)
    monkeypatch.delitem(sys.modules, "cupy")
    monkeypatch.syspath_prepend(tmp_path)
    assert report.main() == 0
    assert f"none in use: CuPy cannot be imported ({words})\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("error", "words", "is_broken"),
    [
        (RuntimeError("the CUDA headers are missing: pip\nx"), "fails: the CUDA headers", True),
        (NotImplementedError("none:\n  fa2 mma: needs sm_80"), "not usable: fa2 mma: needs", False),
        (None, "", False),
    ],
)
def test_engines_of_a_device(monkeypatch, error, words, is_broken):
    def try_it(*arrays, engine):
        if engine == "mma" and error is not None:
            raise error

    module = types.SimpleNamespace(
        zeros=np.zeros,
        cuda=types.SimpleNamespace(runtime=types.SimpleNamespace(deviceSynchronize=lambda: None)),
    )
    monkeypatch.setattr(report, "plan", lambda *arrays, engine: None)
    monkeypatch.setattr(report, "attention", try_it)
    reasons, broken = report.usable_engines(module)
    assert reasons["numpy"] == reasons["simt"] == ""
    assert reasons["mma"].startswith(words)
    assert broken == ("mma" if is_broken else "")


def test_an_engine_that_should_run_but_fails_sets_the_exit_status(small, capsys, monkeypatch):
    found = {"numpy": "", "simt": "", "mma": "fails: the CUDA headers are missing"}
    monkeypatch.setattr(report, "usable_engines", lambda cupy: (found, "mma"))
    assert report.main() == 1
    text = capsys.readouterr().out
    assert "engine   mma: fails: the CUDA headers are missing\n" in text
    assert "\nmma did not run on this GPU: the reason is above\n" in text


def test_as_a_process_within_twenty_seconds_of_processor_time(tmp_path):
    begin = time.perf_counter()
    command = [sys.executable, "-W", "error", "-m", "cuflash"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120,
                          env=environment(), check=False)  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    assert "checks passed: every result is within its bound" in done.stdout
    assert time.perf_counter() - begin < 60  # 20 on two cores; here other tests run alongside


def as_command(monkeypatch, *arguments):
    """The exit status of a command line, whose check returns 7."""
    monkeypatch.setattr(sys, "argv", ["cuflash", *arguments])
    monkeypatch.setattr(report, "main", lambda: 7)
    try:
        return report.command()
    except SystemExit as exited:
        return exited.code


@pytest.mark.parametrize("arguments", [(), ("check",)])
def test_the_check_with_and_without_its_name(monkeypatch, capsys, arguments):
    assert as_command(monkeypatch, *arguments) == 7
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ([], "expected one argument"),
        (["."], ". is a folder: name a file, such as report.json"),
        (["no/x"], "no/x is in no, which is no folder: name a file, such as report.json"),
    ],
)
def test_a_report_needs_the_name_of_a_file(monkeypatch, capsys, given, words):
    assert as_command(monkeypatch, "check", "--report", *given) == 2
    assert f"check: error: argument --report: {words}" in capsys.readouterr().err


def test_the_check_takes_the_name_of_a_report(monkeypatch, tmp_path):
    asked = []
    monkeypatch.setattr(sys, "argv", ["cuflash", "check", "--report", str(tmp_path / "x")])
    monkeypatch.setattr(report, "main", lambda file: asked.append(file) or 7)
    assert report.command() == 7
    assert asked == [tmp_path / "x"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ["--help"],
            [
                "usage: python -m cuflash [-h] [--version] COMMAND",
                "check",
                "compare",
                "launch",
                "precompile",
            ],
        ),
        (["-h"], ["usage: python -m cuflash [-h]"]),
        (["--version"], [f"cuflash {cuflash.__version__}\n"]),
        (["check", "--help"], ["usage: python -m cuflash check", "Returns 1 if a check fails"]),
        (["compare", "--help"], ["usage: python -m cuflash compare", "--quick"]),
        (["launch", "--help"], ["usage: python -m cuflash launch [-h] -n SIZE", "MASTER_PORT"]),
        (["precompile", "--help"], ["usage: python -m cuflash precompile", "--shape B,H,N,D"]),
    ],
)
def test_help_and_version(monkeypatch, capsys, arguments, words):
    assert as_command(monkeypatch, *arguments) == 0
    printed = capsys.readouterr()
    assert all(text in printed.out for text in words)
    assert printed.err == ""


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["contrast"], "invalid choice: 'contrast' (choose from "),
        (["--quick"], "unrecognized arguments: --quick"),
        (["check", "compare"], "unrecognized arguments: compare"),
        (["check", "--quick"], "unrecognized arguments: --quick"),
    ],
)
def test_mistakes_in_words(monkeypatch, capsys, arguments, words):
    assert as_command(monkeypatch, *arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("usage: python -m cuflash [-h] [--version] COMMAND")
    assert words in printed.err


def environment():
    """The process finds this package, and no device whatever the machine has."""
    root = os.path.dirname(os.path.dirname(cuflash.__file__))
    return {**os.environ, "PYTHONPATH": root, "CUDA_VISIBLE_DEVICES": ""}
