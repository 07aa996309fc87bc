"""A line for the text of every kernel: of all rows, types, architectures and kinds of problem.

A change that claims to leave the kernels as they are prints the same lines before and after:

    python tests/kernel_texts.py > after; git stash; python tests/kernel_texts.py > before

With a folder as argument each text is also written there, for diff to compare.
"""

from __future__ import annotations

import hashlib
import re
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

from cuflash.planning.plan import TILES, Plan
from cuflash.planning.problem import Device, Problem
from cuflash.planning.source import without_comments
from cuflash.scores.score import softcap

ARCHES = (75, 80, 86, 89, 90, 100, 120)
KINDS = {
    "plain": {},
    "unaligned": {"aligned": False},
    "lengths": {"q_lengths": "int32", "kv_lengths": "int32", "q_offset": "int32"},
    "score": {"score": softcap(30.0).form},
    "blocks": {"mask": "blocks"},
    "elements": {"mask": "elements", "mask_lists": 4},
    "any order": {"deterministic": False},
    "dropout": {"dropout": True},
    "odd dims": {"head_dim": -7, "value_dim": -3},
}


def compared(text: str) -> str:
    """What the compiler sees: no comments, `#line` or blank lines."""
    lines = (line.rstrip() for line in without_comments(text).splitlines())
    return "\n".join(x for x in lines if x and not x.startswith("#line")) + "\n"


def texts():
    """(what it is, text) of every kernel."""
    same: Counter[str] = Counter()
    for row in TILES:
        if not row.threads:
            continue
        same[str(row)] += 1
        title = f"{row} ({same[str(row)]}), D {row.max_dim}"
        for dtype in row.dtypes:
            for kind, more in KINDS.items():
                problem = Problem(
                    dtype, (8, 4), 1000, 900, row.max_dim, row.max_dim, heads=4,
                    backward=row.backward, summed=(1, 4, 4) if row.backward else (1, 1, 1),
                )  # fmt: skip
                if kind == "odd dims":
                    more = {name: row.max_dim + less for name, less in more.items()}
                problem = replace(problem, **more)
                for arch in ARCHES:
                    device = Device(arch, multiprocessors=1)
                    if row.reject(problem, device):
                        continue
                    plan = Plan(problem, device, row)
                    for kernel in plan.kernels:
                        name = f"{title}, {dtype}, {kind}, sm_{arch}"
                        yield f"{name}, {kernel.name}", compared(plan.source(kernel.name))


def main(folder: str = "") -> None:
    """Print the lines."""
    for name, text in texts():
        digest = hashlib.sha256(text.encode()).hexdigest()[:16]
        print(digest, name)
        if folder:
            place = Path(folder) / (re.sub(r"[^\w.]+", "_", name) + ".cu")
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(text)


if __name__ == "__main__":
    main(*sys.argv[1:])
