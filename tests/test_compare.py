"""`python -m cuflash compare`: its table, pictures and report, and its words for mistakes."""

import csv
import itertools
import re
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest

import cuflash
from cuflash import __main__ as report
from cuflash.compare import charts
from cuflash.compare import contenders as compare
from cuflash.numpy_engine import walks as host

pytest.importorskip("matplotlib", reason="needs matplotlib: pip install '.[plot]'")
pytest.importorskip("tqdm", reason="needs tqdm: pip install '.[plot]'")
SMALL = ["--on", "cpu", "--shapes", "1,2,33,8", "1,2,64,8", "--ms", "1"]


def run(folder, *arguments):
    assert compare.main([*arguments, "--out", str(folder)]) == 0
    with open(folder / "results.csv", newline="") as file:
        return list(csv.DictReader(file)), (folder / "report.md").read_text()


def test_a_row_for_every_problem_and_contender(tmp_path, capsys):
    rows, text = run(tmp_path / "new", *SMALL, "--causal", "both")
    found = {(row["length"], row["causal"], row["contender"]) for row in rows}
    assert len(rows) == len(found) == 2 * 2 * 3
    assert {name for _, _, name in found} == {"fa2 numpy", "fa1 numpy", "unfused"}
    for row in rows:
        assert row["reason"] == ""
        assert float(row["microseconds"]) > 0
        low, high = map(float, row["quartiles"].split())
        assert low <= float(row["microseconds"]) + 0.01
        assert high >= float(row["microseconds"]) - 0.01
        assert float(row["difference"]) < 1e-5
        assert int(row["calls"]) >= 5
        pairs = int(row["length"]) ** 2
        if row["causal"] == "1":
            pairs = int(row["length"]) * (int(row["length"]) + 1) // 2
        rate = 4 * 8 * pairs * 2 / float(row["microseconds"]) / 1e6
        assert float(row["tflops"]) == pytest.approx(rate)
    assert {float(r["ratio"]) for r in rows if r["contender"] == "fa2 numpy"} == {1.0}
    assert "| float32 (1, 2, 33, 8) causal |" in text
    assert re.search(r"numpy \d+\.\d+\.\d+, device .+ cores", text)
    assert f"python -m cuflash compare {' '.join(SMALL)} --causal both" in text
    for name in ("shapes.png", "shapes-memory.png"):
        assert f"]({name})" in text
        assert (tmp_path / "new" / name).read_bytes()[:4] == b"\x89PNG"
    assert "report.md, results.csv, 2 picture(s)" in capsys.readouterr().out


def test_unfused_takes_memory_of_the_scores(tmp_path):
    arguments = ["--on", "cpu", "--shapes", "1,2,512,8", "1,2,1024,8", "--ms", "1"]
    rows, _ = run(tmp_path, *arguments)
    extra = {(int(r["length"]), r["contender"]): int(r["extra_bytes"]) for r in rows}
    for length in (512, 1024):
        assert extra[length, "unfused"] >= 2 * length**2 * 4
    assert extra[1024, "fa2 numpy"] < extra[1024, "unfused"] / 2


def test_gradients_and_why_a_contender_is_missing(tmp_path):
    rows, text = run(tmp_path, *SMALL, "--backward")
    by_name = {row["contender"]: row for row in rows}
    assert by_name["unfused"]["reason"] == "has no gradients"
    assert by_name["unfused"]["microseconds"] == ""
    assert float(by_name["fa1 numpy"]["difference"]) < 1e-5
    assert "- unfused: has no gradients (2 problems)" in text


def test_a_wrong_result_is_no_contender(tmp_path, monkeypatch):
    def wrong(plan, *arrays, **options):
        right(plan, *arrays, **options)
        if plan.algo == "fa1":
            arrays[3][...] *= 1.01

    right = host.forward
    monkeypatch.setattr(host, "forward", wrong)
    rows, text = run(tmp_path, *SMALL)
    bad = [row for row in rows if row["contender"] == "fa1 numpy"]
    assert all(row["reason"] == "ArithmeticError: differs by 0.01" for row in bad)
    assert all(row["microseconds"] == "" for row in bad)
    assert "- fa1 numpy: ArithmeticError: differs by 0.01 (2 problems)" in text


def test_nan_is_wrong():
    assert not compare._difference([np.array([np.nan, 1.0])], [np.ones(2)]) <= 1


def test_scores_too_large_are_not_tried(tmp_path, monkeypatch):
    monkeypatch.setitem(compare.SCORES_LIMIT, "CPU", 2 * 64 * 64 * 4 - 1)
    rows, _ = run(tmp_path, *SMALL)
    reasons = {r["length"]: r["reason"] for r in rows if r["contender"] == "unfused"}
    assert reasons == {"33": "", "64": "MemoryError: its scores take 0 GiB"}


def test_contenders_in_the_order_asked_for(tmp_path):
    rows, text = run(tmp_path, *SMALL, "--contenders", "unfused", "fa")
    assert [row["contender"] for row in rows[:3]] == ["unfused", "fa2 numpy", "fa1 numpy"]
    assert "| problem (B, H, N, D), GFLOP/s | unfused | fa2 numpy | fa1 numpy |" in text


@pytest.mark.parametrize("experiments", [compare.cpu_experiments, compare.gpu_experiments])
def test_quick_is_a_smaller_choice_of_the_same(experiments):
    quick, whole = experiments(True), experiments(False)
    assert list(quick) == list(whole)
    for name, experiment in quick.items():
        assert 0 < sum(w.flops for w in experiment.works) < sum(w.flops for w in whole[name].works)


def test_the_experiments_of_the_field_and_of_the_first_report():
    every = compare.gpu_experiments(False)
    field = every["field"].works
    assert {w.width for w in field} == {64, 128, 256}
    assert all(w.batch * w.length == 16384 and w.heads * w.width == 2048 for w in field)
    assert {(w.length, w.causal) for w in field} == {
        (n, causal) for n in (1024, 4096, 16384) for causal in (False, True)
    }
    assert {w.shape[:2] for w in every["early"].works} == {(8, 8)}
    assert compare.Work(4, 48, 4096, 32, "float16", False, True) in every["halves"].works
    assert max(w.length for w in every["memory"].works) == 65536


@pytest.fixture
def names(monkeypatch):
    """All contenders where there is a GPU, and torch."""
    monkeypatch.setattr(compare.meters, "GpuMeter", lambda cupy, torch: None)
    return compare.Field(cupy="CuPy", torch="torch").names


def test_contenders_of_the_field_begin_with_the_engine_of_choice(names):
    every = compare.gpu_experiments(False)
    flash = compare.chosen_names(names, every["field"].contenders)
    assert flash[:2] == ["fa3 wgmma", "fa2 wgmma"]
    assert flash[-4:] == ["fa2 mma", "fa1 mma", "torch FA2", "torch cuDNN"]
    gradients = compare.chosen_names(names, every["backward"].contenders)
    assert gradients[-4:] == ["fa2 mma", "fa1 mma", "torch FA2", "torch cuDNN"]
    with_gradients = {f"{row.algo} {row.engine}" for row in compare.TILES if row.backward}
    assert set(gradients[:-2]) == {x for x in with_gradients if x.endswith(("mma", "wgmma"))}
    memory = compare.chosen_names(names, every["memory"].contenders)
    assert memory == ["unfused", "fa1 mma", "fa2 mma", "fa3 wgmma", "torch FA2"]


def test_contenders_have_colours_of_their_own(names):
    colours = [charts.COLOURS[name] for name in names]
    assert len(set(colours)) == len(names) > 10


def figures(works, names, rate=lambda name, work: 1.0, extra=lambda name, work: 0):
    """Rows of a table with these figures of each work and contender."""
    rows = []
    for work, name in itertools.product(works, names):
        row = dict.fromkeys(compare.COLUMNS, "") | {"contender": name, **work._asdict()}
        row.update(ratio=1.0, tflops=rate(name, work), extra_bytes=extra(name, work))
        rows.append(row)
    return rows


def of_one_head(name, work):
    """Bytes that grow with the length, and not alike in two panels."""
    scores = work.length**2 * work.width
    return {"unfused": scores, "fa1 mma": 264 * work.length * work.width}.get(name, 0)


def panels(figure):
    """The axes of a figure that is laid out."""
    figure.draw_without_rendering()
    return figure.axes


def test_pictures_of_memory_show_every_point():
    works = [compare.Work(1, 8, n, d, "float16") for d in (8, 512) for n in (1024, 4096, 32768)]
    names = ["unfused", "fa1 mma", "fa2 mma", "fa3 wgmma"]
    experiment = compare.Experiment("x", tuple(works))
    picture = charts.picture_of_memory(experiment, figures(works, names, extra=of_one_head))
    for axis in panels(picture):
        assert [line.get_label() for line in axis.lines] == names
        for line in axis.lines:
            inside = axis.transAxes.inverted().transform(
                axis.transData.transform(line.get_xydata())
            )
            assert (inside > 0.01).all(), line
            assert (inside < 0.99).all(), line


def test_lines_on_top_of_each_other_can_both_be_seen():
    works = [compare.Work(1, 8, n, 64, "float16") for n in (1024, 2048)]
    names = ["unfused", "fa1 mma", "fa2 mma", "fa3 wgmma"]
    rows = figures(works, names, extra=of_one_head)
    (axis,) = panels(charts.picture_of_memory(compare.Experiment("x", tuple(works)), rows))
    widths = [line.get_linewidth() for line in axis.lines]
    assert widths == [1.5, 1.5, 3.5, 1.5]  # fa2 is below fa3: both take nothing
    assert axis.lines[2].get_markersize() > axis.lines[3].get_markersize()


@pytest.mark.parametrize("name", ["field", "early", "halves", "heads"])
def test_figures_on_bars_are_inside_and_do_not_overlap(names, name):
    experiment = compare.gpu_experiments(False)[name]
    chosen = compare.chosen_names(names, experiment.contenders)
    rows = figures(
        experiment.works, chosen, lambda name, work: 0.0123 * (1 + 37 ** (len(name) % 4))
    )
    picture = charts.picture_of_rates(experiment, rows)
    for axis in panels(picture):
        boxes = [text.get_window_extent() for text in axis.texts]
        assert len(boxes) == sum(len(bars) for bars in axis.containers) >= len(chosen)
        assert all(box.y1 < axis.bbox.y1 for box in boxes)
        assert not any(a.overlaps(b) for a, b in itertools.combinations(boxes, 2))
    (legend,) = picture.legends
    assert [text.get_text() for text in legend.get_texts()] == chosen
    assert legend.get_window_extent().y1 < min(axis.get_tightbbox().y0 for axis in picture.axes)


def test_shapes_of_one_length_have_places_of_their_own():
    works = [compare.Work(b, 8, n, 8, "float32") for b, n in ((1, 2048), (2, 2048), (2, 64))]
    picture = charts.picture_of_rates(compare.Experiment("x", tuple(works)), figures(works, ["a"]))
    (axis,) = panels(picture)
    assert axis.get_xlabel() == "B, H, N"
    assert [text.get_text() for text in axis.get_xticklabels()] == [
        "1, 8, 2k", "2, 8, 64", "2, 8, 2k"
    ]  # fmt: skip
    assert len({bar.get_x() for bar in axis.patches}) == 3


@pytest.mark.parametrize(
    ("rates", "unit", "cells"),
    [
        ((0.0698, 0.0123456), "GFLOP/s", ["69.8", "12.3"]),
        ((0.0001, 0.5), "GFLOP/s", ["0.100", "500"]),
        ((804.4, 1.0), "TFLOP/s", ["804", "1.00"]),
        ((1234.0, 0.0123), "TFLOP/s", ["1234", "0.0123"]),
    ],
)
def test_one_unit_for_a_table_and_its_picture(rates, unit, cells):
    work = compare.Work(1, 2, 64, 8, "float32")
    rows = figures([work], ["a", "b"], lambda name, work: dict(zip("ab", rates))[name])
    experiment = compare.Experiment("one", (work,))
    text = charts.report("", {}, {"": experiment}, rows, [])
    assert f"| problem (B, H, N, D), {unit} | a | b |" in text
    assert f"| float32 (1, 2, 64, 8) | {cells[0]} (1.00) | {cells[1]} (1.00) |" in text
    (axis,) = panels(charts.picture_of_rates(experiment, rows))
    assert axis.get_ylabel() == unit
    assert [text.get_text() for text in axis.texts] == cells


def test_why_there_are_no_gradients_in_words():
    x = np.zeros((1, 16, 8), np.float16)
    with pytest.raises(NotImplementedError) as caught:
        cuflash.plan(x, x, x, algo="fa1", engine="wgmma", device=cuflash.Device(90), backward=True)
    assert compare._in_words(caught.value) == "there is no kernel of that kind"


def test_forward_and_backward_flops():
    work = compare.Work(2, 3, 10, 4, "float32")
    assert work.flops == 4 * 6 * 100 * 4
    assert work._replace(backward=True).flops == 10 * 6 * 100 * 4
    assert work._replace(causal=True).flops == 4 * 6 * 55 * 4


def test_a_named_experiment_by_default_into_a_folder_of_its_own(tmp_path, monkeypatch, capsys):
    work = compare.Work(1, 1, 16, 8, "float32")
    every = {"a": compare.Experiment("one", (work,)), "b": compare.Experiment("two", (work,))}
    monkeypatch.setattr(compare, "cpu_experiments", lambda quick: every)
    monkeypatch.chdir(tmp_path)
    assert compare.main(["b", "--on", "cpu", "--quick"]) == 0
    (folder,) = tmp_path.iterdir()
    assert re.fullmatch(r"compare-\d{8}-\d{6}", folder.name)
    assert capsys.readouterr().out == f"{folder.name}/report.md, results.csv, 1 picture(s)\n"
    assert "## two" in (folder / "report.md").read_text()


def test_list(capsys):
    assert compare.main(["--on", "cpu", "--list"]) == 0
    text = capsys.readouterr().out
    assert "forward   8 heads of width 64, 8 problems\n" in text
    assert text.endswith("contenders: fa2 numpy, fa1 numpy, unfused\n")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nothing"], "no experiment 'nothing' on the CPU: --list names them"),
        (["--contenders", "torch"], "no contender 'torch' here: fa2 numpy, fa1 numpy, unfused"),
        (["--shapes", "1,2,3"], "'1,2,3' is not B,H,N,D"),
        (["--shapes", "1,2,0,4"], "sizes are positive"),
        (["--dtypes", "int8"], "invalid choice: 'int8'"),
        (["--dtypes", "float16"], "--dtypes, --causal and --backward go with --shapes"),
        (["--causal", "yes", "forward"], "--dtypes, --causal and --backward go with --shapes"),
        (["--backward", "forward"], "--dtypes, --causal and --backward go with --shapes"),
        (["forward", "--shapes", "1,2,3,4"], "--shapes stands for the experiments: leave out forw"),
        (["--ms", "-5"], "'-5' is no time: give milliseconds, more than 0"),
        (["--ms", "nan"], "'nan' is no time: give milliseconds, more than 0"),
        (["--ms", "x"], "'x' is no time"),
        (["--out", f"{__file__}/in"], "test_compare.py/in: "),
    ],
)
def test_mistakes_in_words(capsys, arguments, words):
    with pytest.raises(SystemExit, match="2"):
        compare.main(["--on", "cpu", *arguments])
    assert words in capsys.readouterr().err


def test_a_gpu_that_is_not_there(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(SystemExit, match="2"):
        compare.main(["--on", "gpu"])
    assert "--on gpu: none in use: CuPy is not installed" in capsys.readouterr().err


def test_without_matplotlib(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(SystemExit, match="2"):
        compare.main(SMALL)
    assert (
        'matplotlib is not installed: pip install ".[plot]" in a checkout, pip install '
        '"cuflash[plot]" from an index\n'
    ) in capsys.readouterr().err


@pytest.mark.gpu
def test_on_a_gpu(tmp_path):
    arguments = ["--on", "gpu", "--shapes", "2,3,64,32", "2,3,256,32", "--ms", "1"]
    rows, text = run(tmp_path, *arguments, "--dtypes", "float16", "float32", "--causal", "both")
    found = {(row["dtype"], row["contender"]) for row in rows if row["microseconds"]}
    arch = sys.modules["cupy"].cuda.Device().compute_capability
    for algo in ("fa1", "fa2"):
        assert {("float16", f"{algo} mma"), ("float16", f"{algo} simt")} <= found
        assert ("float32", f"{algo} simt") in found
        assert (("float32", f"{algo} mma") in found) == (int(arch) >= 80)
    served = {("float16", f"{algo} wgmma") for algo in ("fa2", "fa3")} <= found
    assert served == (arch == "90")
    assert served or f"- fa3 wgmma: needs sm_90, the device is sm_{arch} (4 problems)" in text
    assert all(int(r["extra_bytes"]) == 0 for r in rows if r["contender"] == "fa2 simt")
    assert "driver" in text


def test_as_a_command(monkeypatch):
    command = [sys.executable, "-W", "error", "-m", "cuflash", "compare", "--on", "cpu", "--list"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert "contenders: fa2 numpy" in done.stdout
    monkeypatch.setattr(sys, "argv", ["cuflash", "compare", "--on", "cpu", "--list"])
    assert report.command() == 0


class TensorOfTorch:
    """As much of torch.Tensor as is asked for."""

    def __init__(self, array):
        self.array = array

    def __getitem__(self, index):
        return TensorOfTorch(self.array[index])

    def double(self):
        return TensorOfTorch(self.array.astype(np.float64))

    def cpu(self):
        return self

    def numpy(self):
        return self.array


def test_results_of_torch_keep_their_precision():
    """float64 is held against ours to 1e-9."""
    field = compare.Field(torch=SimpleNamespace(Tensor=TensorOfTorch))
    x = np.random.default_rng(0).standard_normal((1, 2, 3, 4))
    np.testing.assert_array_equal(field.values((TensorOfTorch(x), x)), [x[0, 0]] * 2)
