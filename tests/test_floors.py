"""asv_bench/floors.py, and what docs/gpus.md has from it."""

import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def floors(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "asv_bench")
    return importlib.import_module("floors")


def printed(floors, capsys, *arguments):
    floors.main(list(arguments))
    return capsys.readouterr().out.splitlines()


def test_the_table_of_the_documents_is_as_the_plans_are_now(floors, capsys):
    lines = [x for x in printed(floors, capsys, "--head-dims", "128") if x.startswith("| ")]
    assert len(lines) == 1 + 2 * len(floors.GPUS)
    text = (ROOT / "docs" / "gpus.md").read_text()
    assert not [line for line in lines if f"{line}\n" not in text]


def test_a_floor_is_the_longest_of_three_times(floors, capsys):
    """Of a T4: 4 B H N N D operations at 65 TFLOP/s, and an exponential for each pair."""
    for head_dim in (8, 128):
        lines = printed(floors, capsys, "--head-dims", str(head_dim), "--tokens", "2048")
        (line,) = [x for x in lines if x.startswith("| T4 | forward")]
        cells = [x.strip() for x in line.strip("|").split("|")]
        pairs = 8 * (2048 // head_dim) * 2048**2
        products, exponentials, moved, rate = map(int, cells[-4:])
        assert products == round(4 * pairs * head_dim / 65e6)
        assert exponentials == round(pairs / (16 * 40 * 1.59e3))
        assert moved == round(4 * 16384 * 2048 * 2 / 320e3)
        longest = max(products, exponentials, moved)
        assert rate == pytest.approx(4 * pairs * head_dim / longest / 1e6, abs=1)
        assert (longest == products) == (head_dim == 128)
