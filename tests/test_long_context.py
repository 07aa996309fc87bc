"""The example of a sequence that one rank has no room for: here its ranks are threads."""

import subprocess
import sys
from pathlib import Path

import long_context
import pytest

from cuflash.compare.machine import find_cupy


def test_the_example_is_right(capsys):
    assert long_context.main(["--tokens", "1024", "--dim", "16", "--budget", "0.001"]) == 0
    said = capsys.readouterr().out
    assert "1024 tokens on 2 ranks: rows of out, lse and gradients are within" in said
    assert "on 2 ranks, zigzag: 1024 x 1024 tokens, 2 heads on 2, attention, causal" in said


def test_ranks_are_processes_where_a_launcher_starts_them():
    if find_cupy()[0] is not None:
        pytest.skip("with a GPU tests/test_nccl.py has processes")
    example = Path(long_context.__file__)
    command = [sys.executable, "-m", "cuflash", "launch", "-n", "2", str(example)]
    asked = ["--tokens", "1024", "--dim", "16", "--budget", "0.001"]
    done = subprocess.run(
        command + asked, capture_output=True, text=True, timeout=250, cwd=example.parents[1]
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("1024 tokens on 2 ranks: rows of out, lse and gradients are") == 1


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--budget 0.002", "take 0.00105 GB, 0.000524 on each of 2 ranks: give more ranks than"),
        ("--budget 0.0005", "one, and a --budget between, or none"),
        ("--ranks 1", "take 0.00105 GB, 0.00105 on each of 1 ranks"),
    ],
)
def test_a_budget_that_makes_no_sense(capsys, line, words):
    """One line of words."""
    with pytest.raises(SystemExit) as exited:
        long_context.main(["--tokens", "1024", "--dim", "16", *line.split()])
    assert exited.value.code == 2
    assert words in capsys.readouterr().err


def test_without_a_budget_any_size_will_do(capsys):
    sizes = "--tokens 1024 --ranks 4 --heads 1 --dim 8"
    assert long_context.main(sizes.split()) == 0
    assert "1024 tokens on 4 ranks" in capsys.readouterr().out


def test_what_is_drawn_does_not_depend_on_who_draws():
    whole = long_context.draw("q", range(1024), 2, 8, "f4")
    part = long_context.draw("q", range(300, 900), 2, 8, "f4")
    assert (part == whole[:, 300:900]).all()


def test_wrong_rows_are_noticed(monkeypatch):
    drawn = long_context.own_part

    def shifted(name, *form):
        return drawn(name, *form) * (1.01 if name == "v" else 1)

    monkeypatch.setattr(long_context, "own_part", shifted)
    assert long_context.main(["--tokens", "1024", "--dim", "16", "--budget", "0.001"]) == 1
