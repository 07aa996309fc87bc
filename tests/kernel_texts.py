"""A line for the text of every kernel: of all rows, types, architectures and kinds of problem.

A change that claims to leave the kernels as they are prints the same lines before and after:

    python tests/kernel_texts.py > after; git stash; python tests/kernel_texts.py > before

With a folder as argument each text is also written there, for diff to compare. A change of text
that claims to leave the machine code as it is shows that for the kernels that it touches:

    python tests/kernel_texts.py --code --only "sm_90, hopper_backward" > after; ...
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path

from compile_kernels import machine_code

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


def digest_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def digest_of_text(kernel: tuple[str, str]) -> str:
    return digest_of(kernel[1].encode())


def digest_of_code(kernel: tuple[str, str]) -> str:
    """Of the machine code that NVRTC makes of it."""
    name, text = kernel
    arch = re.search(r"sm_\d+", name)[0]
    return digest_of(machine_code(text, "sm_90a" if arch == "sm_90" else arch))


def main() -> None:
    """Print the lines."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", nargs="?", type=Path, help="where each text is written, too")
    parser.add_argument("--code", action="store_true", help="of the machine code, by NVRTC")
    parser.add_argument("--only", default="", metavar="REGEX", help="those whose lines match")
    options = parser.parse_args()
    chosen = [(name, text) for name, text in texts() if re.search(options.only, name)]
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        digests = pool.map(digest_of_code if options.code else digest_of_text, chosen)
        for (name, text), digest in zip(chosen, digests, strict=True):
            print(digest, name, flush=True)
            if options.folder:
                options.folder.mkdir(parents=True, exist_ok=True)
                file = re.sub(r"[^\w.]+", "_", name) + ".cu"
                (options.folder / file).write_text(text)


if __name__ == "__main__":
    main()
