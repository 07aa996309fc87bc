"""The wheel: what it holds, and that it works where only the wheel is."""

import configparser
import email
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import cuflash

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
    for name in ("setup.cfg", "setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE"):
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


def metadata_of(wheel):
    archive = zipfile.ZipFile(wheel)
    (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
    return email.message_from_string(archive.read(name).decode("utf-8"))


def test_metadata(wheel):
    metadata = metadata_of(wheel)
    assert metadata["Name"] == "cuflash"
    assert metadata["Version"] == cuflash.__version__
    assert metadata["Author"] == "cuflash developers"
    assert "BSD-3-Clause" in (metadata["License"] or metadata["License-Expression"])
    assert metadata["Requires-Python"] == ">=3.10"
    assert "flash attention" in metadata["Keywords"].split(",")
    assert set(metadata.get_all("Provides-Extra")) >= {
        "cuda12x", "cuda13x", "test", "bench", "plot", "release",
    }  # fmt: skip
    needed = [item for item in metadata.get_all("Requires-Dist") if "extra ==" not in item]
    assert sorted(item.split(">")[0] for item in needed) == ["ml_dtypes", "numpy", "scipy"]


def test_the_python_versions_are_those_that_are_tested(wheel):
    named = [x.split(" :: ")[-1] for x in metadata_of(wheel).get_all("Classifier")]
    workflow = (ROOT / ".github" / "workflows" / "checks.yml").read_text("utf-8")
    (tested,) = re.findall(r"^ +python: \[(.*)\]$", workflow, re.MULTILINE)
    assert [x for x in named if re.fullmatch(r"3\.\d+", x)] == re.findall(r"3\.\d+", tested)


def test_the_oldest_that_it_takes_are_tested(wheel):
    workflow = (ROOT / ".github" / "workflows" / "checks.yml").read_text("utf-8")
    needed = [x for x in metadata_of(wheel).get_all("Requires-Dist") if "extra ==" not in x]
    for name, version in (item.split(">=") for item in needed):
        assert f'"{name}=={version}.' in workflow


def test_the_page_of_an_index(wheel):
    """Nothing in it is relative to the repository; code is as in the README."""
    page, readme = metadata_of(wheel).get_payload(), (ROOT / "README.md").read_text("utf-8")
    assert page.strip() != readme.strip()
    assert [x for x in re.findall(r"\]\(([^)]+)\)", page) if "://" not in x] == []
    code = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)
    assert code.findall(page) == code.findall(readme) != []


@pytest.fixture(scope="module")
def setup_script():
    """`setup.py`, which sets nothing up when it is imported."""
    spec = importlib.util.spec_from_file_location("cuflash_setup", ROOT / "setup.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("https://a.b/c", "![a picture](https://a.b/c/raw/v1/docs/a.png) "
                          "[b](https://a.b/c/blob/v1/docs/b.md#c)"),
        ("", "a picture (`docs/a.png`) b (`docs/b.md#c`)"),
    ],
)  # fmt: skip
def test_links_for_an_index(setup_script, source, expected):
    kept = "[d](https://e.f) [g](#h) [i](mailto:j)\n```python\nx[0](y)\n```\n"
    text = f"![a picture](docs/a.png) [b](docs/b.md#c) {kept}"
    assert setup_script.for_an_index(text, source, "v1") == f"{expected} {kept}"


def test_the_address_of_the_repository(setup_script, monkeypatch, tmp_path):
    monkeypatch.setattr(setup_script, "HERE", tmp_path)
    assert setup_script.source_url() == ""
    config = configparser.ConfigParser()
    config["metadata"] = {"project_urls": "\nDocumentation = https://x.y\nSource = https://a.b/c/"}
    with open(tmp_path / "setup.cfg", "w", encoding="utf-8") as file:
        config.write(file)
    assert setup_script.source_url() == "https://a.b/c"


def test_an_index_would_take_it(wheel):
    if importlib.util.find_spec("twine") is None:
        required = os.environ.get("CUFLASH_REQUIRE_RELEASE") == "1"
        (pytest.fail if required else pytest.skip)("twine is not installed: the extra release")
    assert "PASSED" in run(
        [sys.executable, "-m", "twine", "--no-color", "check", "--strict", wheel]
    )


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
