"""The source distribution: what it holds, and that its tests run where only it is."""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import venv
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
NO_SOURCES = shutil.ignore_patterns(
    ".git", ".venv", "venv", ".*cache", ".hypothesis", "__pycache__", "*.egg-info",
    "build", "dist", "env", "html", "compare-*",
)  # fmt: skip
BUILD = "import sys, setuptools.build_meta as backend; backend.build_sdist(sys.argv[1])"
# Of files that need others than Python's: the table of docs/io.md, the emulator's C++, examples.
QUICK = [
    *("tests/test_traffic.py", "tests/test_tile_lists.py", "tests/test_work_order.py"),
    "tests/test_emulator.py::test_params_struct_and_kernel_names",
    *(
        "tests/test_example.py::test_heads_are_views",
        "tests/test_benchmarks.py::test_published_pages",
    ),
]


def run(command, folder):
    """What a process prints that finds neither this checkout nor what pytest runs with here."""
    ours = ("PYTHONPATH", "PYTEST", "COV", "CUFLASH_REQUIRE_BROWSER")
    env = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    done = subprocess.run(
        [sys.executable, *command], cwd=folder, env=env, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory):
    """The folder that the source distribution of a copy of the sources unpacks to."""
    folder = tmp_path_factory.mktemp("sdist")
    shutil.copytree(ROOT, folder / "source", ignore=NO_SOURCES)
    run(["-c", BUILD, folder], folder / "source")
    (path,) = folder.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        safely = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}  # 3.11.4 on
        archive.extractall(folder, **safely)
    shutil.rmtree(folder / "source")
    return folder / path.name.removesuffix(".tar.gz")


def test_sdist_holds_every_file_of_the_repository(unpacked):
    if not (ROOT / ".git").exists() or shutil.which("git") is None:
        pytest.skip("compares with what git tracks: this is no git checkout")
    command = ["git", "-C", str(ROOT), "ls-files", "-z"]
    listed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    tracked = {name for name in listed.split("\0") if name and (ROOT / name).exists()}
    held = {path.relative_to(unpacked).as_posix() for path in unpacked.rglob("*") if path.is_file()}
    assert tracked - held == set(), "MANIFEST.in leaves these out"
    assert not [name for name in held if "__pycache__" in name or "asv_bench/html" in name]


def test_its_tests_are_collected_without_an_error(unpacked):
    printed = run(["-m", "pytest", "-n", "0", "--collect-only", "-q"], unpacked)
    assert re.search(r"\d tests collected", printed.splitlines()[-1])
    assert "tests/test_kernels.py::" in printed


def test_quick_ones_pass(unpacked):
    printed = run(["-m", "pytest", "-n", "0", "-q", *QUICK], unpacked)
    assert " passed" in printed.splitlines()[-1]


def test_its_wheel_works_where_nothing_else_is(unpacked, tmp_path):
    """In an environment with what the package needs and no more, README's code runs."""
    if sys.platform == "win32":
        pytest.skip("links to folders take rights")
    pip = ["-m", "pip", "--disable-pip-version-check"]
    offline = ["--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", tmp_path]
    run([*pip, "wheel", *offline, unpacked], tmp_path)
    (wheel,) = tmp_path.glob("*.whl")
    venv.create(tmp_path / "clean")
    python = tmp_path / "clean" / "bin" / "python"
    (packages,) = (tmp_path / "clean" / "lib").glob("python*/site-packages")
    for name in ("numpy", "scipy", "ml_dtypes"):
        for path in Path(metadata.distribution(name).locate_file("")).glob(f"{name}*"):
            (packages / path.name).symlink_to(path)
    # That all it requires is there: otherwise pip would look for it.
    run([*pip, "--python", python, "install", "--no-index", wheel], tmp_path)
    readme = (unpacked / "README.md").read_text("utf-8")
    (tmp_path / "block.py").write_text(readme.split("```python\n")[1].split("```")[0], "utf-8")
    program = "import runpy; print(runpy.run_path('block.py')['y'].shape)"
    command = [python, "-I", "-W", "error"]
    done = subprocess.run(
        [*command, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert (done.stdout, done.stderr) == ("(2, 256, 512)\n", "")
    done = subprocess.run(
        [*command, "-m", "cuflash", "info"], capture_output=True, text=True, timeout=120
    )
    assert done.stderr == ""
    assert str(packages) in done.stdout
    assert "CuPy is not installed" in done.stdout
