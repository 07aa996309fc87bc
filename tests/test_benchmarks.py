"""The suite of asv_bench: well formed, skipped where there is no GPU, swept, and published.

`asv_bench/benchmarks` is imported under its own name, as asv does.
"""

import importlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from cuflash import meters

BENCH = Path(__file__).resolve().parents[1] / "asv_bench"
MODULES = sorted(path.stem for path in (BENCH / "benchmarks").glob("[a-z]*.py"))
NEEDS_GPU = {"backward", "block_sparse", "compile", "forward", "memory", "tiles"}


@pytest.fixture
def suite(monkeypatch):
    """Imports a module of the suite on a machine without a GPU."""
    monkeypatch.syspath_prepend(BENCH)
    gpu = importlib.import_module("benchmarks.gpu")
    monkeypatch.setattr(gpu, "find_cupy", lambda: None)
    monkeypatch.setattr(gpu, "find_torch", lambda: None)
    return lambda name: importlib.import_module(f"benchmarks.{name}")


def classes(module):
    """The benchmarks of a module."""
    own = (x for x in vars(module).values() if getattr(x, "__module__", "") == module.__name__)
    return [x for x in own if any(name.startswith(("track_", "time_")) for name in dir(x))]


def test_the_suite_has_a_module_for_every_question():
    assert {"accuracy", "host", "overhead", *NEEDS_GPU} < set(MODULES)


@pytest.mark.parametrize("name", MODULES)
def test_benchmarks_have_versions_names_and_units(suite, name):
    for kind in classes(suite(name)):
        assert isinstance(kind.version, str), kind
        assert len(kind.params) == len(kind.param_names), kind
        for method in (m for m in dir(kind) if m.startswith("track_")):
            assert getattr(kind, method).unit, (kind, method)


@pytest.mark.parametrize("name", sorted(NEEDS_GPU))
def test_without_a_gpu_setup_skips(suite, name):
    for kind in classes(suite(name)):
        with pytest.raises(NotImplementedError, match="needs .*GPU"):
            kind().setup(*(values[0] for values in kind.params))


def test_importing_the_suite_asks_for_no_device():
    code = "import sys; from benchmarks import " + ", ".join(MODULES)
    code += "; print([x for x in ('cupy', 'torch') if x in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=BENCH, capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": str(BENCH.parent)},
    )  # fmt: skip
    assert done.stdout == "[]\n", done.stderr


def test_host_benchmarks_prepare_once(suite):
    bench = suite("host").Host()
    bench.setup(512, True, "fa2")
    prepared = bench.arrays
    bench.setup(512, True, "fa2")
    assert bench.arrays is prepared
    bench.setup(512, True, "unfused")
    assert bench.arrays is not prepared
    bench.time_forward(512, True, "unfused")
    assert bench.track_extra_bytes(512, True, "unfused") > 8 * 512 * 512 * 4
    ratio = suite("host").HostRatio()
    found = ratio.track_ratio(512, False, "fa1")
    assert found["number"] == 1
    assert all(x > 0 for x in found["samples"])


def test_accuracy_is_the_error_of_the_result(suite):
    bench = suite("accuracy").Accuracy()
    bench.setup("fp32", "fa2", "numpy")
    right = bench.track_relative_error("fp32", "fa2", "numpy")
    assert 0 < right < 1e-6
    bench.found = bench.found + 0.01 * np.abs(bench.found).max()
    assert bench.track_relative_error("fp32", "fa2", "numpy") > 0.009
    with pytest.raises(NotImplementedError, match="needs a GPU"):
        bench.setup("fp32", "fa2", "simt")


def test_the_meters_are_those_of_this_checkout(suite):
    gpu = suite("gpu")
    assert Path(gpu.meters.__file__) == Path(meters.__file__)
    assert gpu.meters is not meters  # another version of cuflash may be what is measured


# What follows needs asv.


def require(what: str, variable: str):
    """Skip, or fail where the machine is said to have it."""
    (pytest.fail if os.environ.get(variable) == "1" else pytest.skip)(what)


def git(folder, *arguments):
    names = ["-c", "user.name=a", "-c", "user.email=a@example.com"]
    command = ["git", *names, "-C", str(folder), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


TOY = """
import cuflash


class Toy:
    version = "1"

    def track_seconds(self):
        return {"samples": [cuflash.COST * x for x in (0.99, 1.0, 1.01, 1.0, 0.99)], "number": 1}

    track_seconds.unit = "seconds"
"""


@pytest.fixture
def toy(tmp_path, monkeypatch):
    """A repository with the configuration and sweep.py of this one, and three commits."""
    if not importlib.util.find_spec("asv"):
        require("asv is not installed: pip install '.[bench]'", "CUFLASH_REQUIRE_BENCH")
    monkeypatch.setenv("HOME", str(tmp_path))  # where asv keeps the machine's name
    root = tmp_path / "toy"
    (root / "asv_bench" / "benchmarks").mkdir(parents=True)
    (root / "cuflash").mkdir()
    for name in ("asv.conf.json", "sweep.py"):
        shutil.copy(BENCH / name, root / "asv_bench")
    (root / "asv_bench" / "benchmarks" / "__init__.py").write_text("")
    (root / "asv_bench" / "benchmarks" / "toy.py").write_text(TOY)
    git(tmp_path, "init", "-q", "-b", "main", str(root))
    for cost in (1.0, 1.1, 0.9):
        (root / "cuflash" / "__init__.py").write_text(f"COST = {cost}\n")
        git(root, "add", "-A")
        git(root, "commit", "-q", "-m", f"cost {cost}")
    machine = [sys.executable, "-m", "asv", "machine", "--yes"]
    subprocess.run(machine, cwd=root / "asv_bench", check=True, capture_output=True)
    return root


def sweep(toy, *arguments):
    command = [sys.executable, "sweep.py", *arguments]
    folder = toy / "asv_bench"
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=200)
    return done.returncode, done.stdout + done.stderr


def results(toy, commit):
    """What asv keeps of the toy benchmark for a commit, by column."""
    (path,) = (toy / "asv_bench" / "results").glob(f"*/{git(toy, 'rev-parse', commit)[:8]}-*")
    text = json.loads(path.read_text())
    return dict(zip(text["result_columns"], text["results"]["toy.Toy.track_seconds"]))


def test_samples_of_a_tracked_figure_get_statistics(toy):
    """asv does not document that `track_` may return samples: every GPU figure relies on it."""
    status, text = sweep(toy, "main~1", "--", "--record-samples")
    assert status == 0, text
    found = results(toy, "main~1")
    assert found["result"] == [pytest.approx(1.1)]
    assert found["samples"] == [pytest.approx([1.089, 1.1, 1.111, 1.1, 1.089])]
    assert found["stats_q_25"][0] < found["stats_q_75"][0]
    assert found["stats_ci_99_a"][0] < 1.1 < found["stats_ci_99_b"][0]


def test_a_range_is_swept_from_its_oldest_commit(toy):
    status, text = sweep(toy, "main~2..main")
    assert status == 0, text
    assert text.index("cost 1.1") < text.index("cost 0.9")
    assert "cost 1.0" not in text
    assert results(toy, "main")["result"] == [pytest.approx(0.9)]


def test_turns_flag_what_is_a_tenth_slower_and_nothing_else(toy):
    status, text = sweep(toy, "main~2", "main~1", "--interleave", "1", "--", "--bench", "Toy")
    assert status == 1, text
    assert re.search(r"^\| \+ .* 1\.1 \| toy\.Toy\.track_seconds", text, re.MULTILINE), text
    names = [line.split(" ", 1)[1] for line in text.splitlines() if " cost 1." in line]
    assert names[:4] == ["cost 1.0", "cost 1.1", "cost 1.1", "cost 1.0"]
    assert len(results(toy, "main~2")["samples"][0]) == 10  # of both its turns
    status, text = sweep(toy, "main~2", "main", "--interleave", "1", "--factor", "1.2")
    assert status == 0, text
    assert "no significant difference" in text


def test_a_failed_benchmark_sets_the_exit_status(toy):
    (toy / "asv_bench" / "benchmarks" / "toy.py").write_text(TOY.replace("COST", "PRICE"))
    status, _ = sweep(toy, "main")
    assert status == 2


def test_outside_tags_become_vendored_ones(monkeypatch):
    monkeypatch.syspath_prepend(BENCH)
    publish = importlib.import_module("publish")
    page = (
        '<script src="https://code.jquery.com/jquery-3.3.1.min.js" integrity="x"></script>\n'
        '<link rel="stylesheet" href="https://a.b/dist/css/bootstrap.min.css" crossorigin="c">\n'
        '<script src="asv.js"></script>'
    )
    assert publish.localise(page) == (
        '<script src="vendor/jquery-3.3.1.min.js"></script>\n'
        '<link rel="stylesheet" href="vendor/bootstrap.min.css">\n'
        '<script src="asv.js"></script>'
    )
    with pytest.raises(SystemExit, match="load other.js"):
        publish.localise('<script src="https://a.b/other.js">')


def test_the_results_kept_are_of_commits_and_benchmarks_of_this_repository():
    known = json.loads((BENCH / "results" / "benchmarks.json").read_text())
    paths = list((BENCH / "results" / "nvidia-h200").glob("*-*.json"))
    assert len(paths) >= 6
    for path in paths:
        text = json.loads(path.read_text())
        assert path.name.startswith(text["commit_hash"][:8])
        assert set(text["results"]) <= set(known)
        assert path.stat().st_size < 100_000


@pytest.fixture
def look():
    """Publishes, serves, and gives what headless Chromium shows of a page."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    for missing, what in (
        (not importlib.util.find_spec("asv"), "asv is not installed"),
        (browser is None, "chromium is not installed"),
        (shutil.which("npm") is None, "npm is not installed"),
        (git(BENCH, "rev-parse", "--is-shallow-repository") == "true", "the clone is shallow"),
    ):
        if missing:
            require(what, "CUFLASH_REQUIRE_BROWSER")
    with subprocess.Popen(
        [sys.executable, "-u", "publish.py", "--serve", "0"], cwd=BENCH,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    ) as server:  # fmt: skip
        printed = []
        for line in server.stdout:
            printed.append(line)
            if line.startswith("http://"):
                break
        else:
            pytest.fail("".join(printed))

        def show(page, *options):
            command = [browser, "--headless", "--no-sandbox", "--disable-gpu",
                       "--window-size=1300,1000", "--virtual-time-budget=20000", *options,
                       f"{line.strip()}/index.html{page}"]  # fmt: skip
            done = subprocess.run(command, capture_output=True, text=True, timeout=120)
            assert done.returncode == 0, done.stderr[-2000:]
            return done.stdout

        yield show
        server.terminate()


def test_published_pages(look, tmp_path):
    """The grid lists every benchmark; a graph draws lines from the first commit to the last.

    One test: it writes into the checkout, and tests run side by side.
    """
    image = pytest.importorskip("matplotlib.image", reason="reads the screenshot")
    page = look("", "--dump-dom")
    known = json.loads((BENCH / "results" / "benchmarks.json").read_text())
    for name in set(known) - {"version"}:
        assert name.split(".", 1)[1] in page, name
    picture = tmp_path / "page.png"
    look("#forward.Forward.track_seconds", f"--screenshot={picture}")
    pixels = image.imread(picture)[120:860, 290:1250, :3]
    red, green, blue = np.moveaxis(pixels, -1, 0)
    coloured = {  # thin lines, whose pixels are mixed with the white around them
        "red": red > np.maximum(green, blue) + 0.1,
        "green": green > np.maximum(red, blue) + 0.05,
        "blue": blue > np.maximum(red, green) + 0.05,
    }
    for name, found in coloured.items():
        assert found.any(axis=0).mean() > 0.9, name
