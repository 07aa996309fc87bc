"""README.md is short, its links and names exist, and its figures are those of docs/."""

import re
from pathlib import Path
from statistics import geometric_mean

import pytest

import cuflash

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text("utf-8")
PAGES = ["README.md", "CHANGELOG.md", "CONTRIBUTING.md", "RELEASING.md", "SECURITY.md"]
# A row of docs/performance.md: tokens, head dim, and the ratios to three peers.
ROW = re.compile(
    r"^\| (?P<backward>backward )?bf16 \(\d+, \d+, (?P<tokens>\d+), (?P<dim>\d+)\)(?: causal)? "
    r"\| fa3 wgmma,[^|]*\| (?P<peers>cuDNN; FlashAttention-[23]; -4) "
    r"\| (?P<ratios>[\d.; ]+) \|(?: [\d.]+ \|)?$",
    re.MULTILINE,
)


def test_it_is_short_and_has_a_picture():
    assert len(README.splitlines()) <= 150
    assert len(re.findall(r"!\[", README)) == 1


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_to_files(page):
    text = (ROOT / page).read_text("utf-8")
    targets = [x for x in re.findall(r"\]\(([^)]+)\)", text) if ":" not in x]
    missing = [x for x in targets if not (ROOT / x.partition("#")[0]).exists()]
    assert missing == []
    assert targets or page not in ("README.md", "CHANGELOG.md")


def test_its_names_exist():
    """Those of the table; tests/test_code_blocks.py runs the code, and knows the commands."""
    rows = re.findall(r"^\| .* \| (.*) \|$", README.split("## Speed")[0], re.MULTILINE)
    names = re.findall(r"`(\w+)`", " ".join(rows))
    assert len(names) > 10
    assert [x for x in names if not hasattr(cuflash, x)] == []


def measured(page, *, backward, tokens):
    """Ratios of fa3 by peer, over the rows of these numbers of tokens."""
    ratios = {}
    for row in ROW.finditer(page):
        chosen = int(row["tokens"]) in tokens and int(row["dim"]) in (64, 128, 256)
        if chosen and bool(row["backward"]) == backward:
            peers = row["peers"].replace(" -", " FlashAttention-").split("; ")
            for peer, ratio in zip(peers, row["ratios"].split("; "), strict=True):
                ratios.setdefault(peer, []).append(float(ratio))
    return ratios


def test_its_figures_are_those_of_the_measured_rows():
    page = (ROOT / "docs" / "performance.md").read_text("utf-8")
    lines = README.split("## Speed")[1].split("## ")[0].splitlines()
    header, _, *rows = [[x.strip() for x in y.split("|")[1:-1]] for y in lines if y[:1] == "|"]
    forward = measured(page, backward=False, tokens=(4096, 16384))
    backward = measured(page, backward=True, tokens=(4096, 16384))
    assert [len(x) for x in forward.values()] == [12] * 3
    assert [len(x) for x in backward.values()] == [12] * 3
    for (name, *cells), ratios in zip(rows, (forward, backward), strict=True):
        assert name == ("forward" if ratios is forward else "backward")
        for peer, cell in zip(header[1:], cells, strict=True):
            if cell == "–":
                assert peer not in ratios
            else:  # the rows' ratios are rounded to a hundredth, as the mean is
                assert geometric_mean(ratios[peer]) == pytest.approx(float(cell), abs=0.01)
    assert [x for ratios in forward.values() for x in ratios if x < 1] == []
    assert "was behind none of its peers in any line" in " ".join(README.split())
