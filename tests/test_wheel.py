"""The wheel: what it holds, and that it works where only the wheel is."""

import email
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check"]


def run(command, **options):
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, **options)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel of a copy of the sources, so that no build folder is left among them."""
    source = tmp_path_factory.mktemp("source")
    for name in ("setup.cfg", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(
        ROOT / "cuflash", source / "cuflash", ignore=shutil.ignore_patterns("__pycache__")
    )
    folder = tmp_path_factory.mktemp("wheel")
    offline = ["--no-deps", "--no-build-isolation", "--no-index"]
    run([*PIP, "wheel", *offline, "--wheel-dir", folder, source])
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """A folder that holds the installed wheel and nothing else."""
    target = tmp_path_factory.mktemp("installed")
    run([*PIP, "install", "--no-deps", "--no-index", "--target", target, wheel])
    return target


def run_installed(installed, code):
    """Run Python code that finds `cuflash` in the installed wheel; returns what it prints."""
    head = f"import sys; sys.path.insert(0, {str(installed)!r}); import cuflash, numpy as np\n"
    return run([sys.executable, "-W", "error", "-c", head + code], cwd=installed)


def test_wheel_holds_the_package_and_nothing_else(wheel):
    expected = {
        path.relative_to(ROOT).as_posix()
        for pattern in ("**/*.py", "**/*.cu", "**/*.cuh", "py.typed")
        for path in (ROOT / "cuflash").glob(pattern)
    }
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert "cuflash/py.typed" in expected
    assert "cuflash/kernels/fa2_forward.cu" in expected
    assert names == expected


def test_metadata(wheel):
    archive = zipfile.ZipFile(wheel)
    (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
    metadata = email.message_from_bytes(archive.read(name))
    assert metadata["Name"] == "cuflash"
    assert metadata["Requires-Python"] == ">=3.10"
    assert set(metadata.get_all("Provides-Extra")) >= {
        "cuda12x", "cuda13x", "test", "bench", "plot",
    }  # fmt: skip
    needed = [item for item in metadata.get_all("Requires-Dist") if "extra ==" not in item]
    assert sorted(item.split(">")[0] for item in needed) == ["ml_dtypes", "numpy", "scipy"]


def test_import_needs_no_cupy(installed):
    printed = run_installed(installed, "print(cuflash.__file__, 'cupy' in sys.modules)")
    assert printed.split() == [str(installed / "cuflash" / "__init__.py"), "False"]


def test_attention_runs_without_cupy(installed):
    code = """
sys.modules["cupy"] = None
x = np.random.default_rng(0).standard_normal((2, 5, 8), np.float32)
out = cuflash.attention(x, x, x)
print(np.abs(out - cuflash.reference.attention(x, x, x)).max() < 1e-5)
"""
    assert run_installed(installed, code).split() == ["True"]


@pytest.mark.parametrize("algo", ["fa1", "fa2"])
@pytest.mark.parametrize("engine", ["simt", "mma"])
def test_source_comes_from_the_wheel(installed, algo, engine):
    code = f"""
x = np.zeros((4, 256, 64), np.float16)
plan = cuflash.plan(x, x, x, algo={algo!r}, engine={engine!r}, device=cuflash.Device(90))
print(plan.source())
"""
    source = run_installed(installed, code)
    assert f" {algo}_forward(const __grid_constant__ Params p)" in source
    assert f'"cuflash/kernels/{algo}_forward.cu"' in source
