"""Bytes that attention moves, by the papers' formulas and by the GPU's counters.

    python asv_bench/io_counters.py [--json FILE]

Needs Nsight Compute (`ncu`) and a GPU whose counters may be read. Runs itself under ncu, which
flushes the caches before each kernel, and prints a table in Markdown: what `plan(...).traffic`
counts, what passes between the multiprocessors and the L2 cache, and what reaches device memory.
The formulas know one fast memory (of a multiprocessor) and one slow; the L2 cache lies between, so
its traffic is what they are about, and device memory sees less.
"""

from __future__ import annotations

import argparse
import csv
import functools
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import gpu

import cuflash

COUNTERS = {
    "from_l2": "lts__t_sectors_srcunit_tex_op_read.sum",
    "to_l2": "lts__t_sectors_srcunit_tex_op_write.sum",
    "crossbar_read": "l1tex__m_xbar2l1tex_read_bytes.sum",
    "crossbar_written": "l1tex__m_l1tex2xbar_write_bytes.sum",
    "read": "dram__bytes_read.sum",
    "written": "dram__bytes_write.sum",
}
UNITS = {"sector": 32, "byte": 1, "Kbyte": 1e3, "Mbyte": 1e6, "Gbyte": 1e9}
MARK = 'extern "C" __global__ void next_case() {}'
UNFUSED, SOFTMAX = "unfused, CuPy", "unfused, torch"


class Case(NamedTuple):
    """One call: half precision (B, H, N, D)."""

    shape: tuple[int, int, int, int]
    causal: bool
    algo: str

    @property
    def label(self) -> str:
        """The problem in words."""
        return f"fp16 ({', '.join(map(str, self.shape))})" + " causal" * self.causal

    def call(self):
        """A function without arguments."""
        problem = gpu.Problem(self.shape, "fp16", self.causal)
        if self.algo == UNFUSED:
            return problem.cupy_unfused()
        if self.algo == SOFTMAX:
            torch, scale = gpu.need_torch(), self.shape[-1] ** -0.5
            q, k, v = problem.q.torch, problem.k.torch, problem.v.torch
            return lambda: torch.softmax((q * scale) @ k.transpose(-2, -1), -1) @ v
        return problem.ours(self.algo, "mma")

    def formula(self) -> int:
        """Bytes as the papers count them."""
        x = gpu.draw(self.shape, "fp16").cupy
        algo = self.algo if self.algo in ("fa1", "fa2") else "fa2"
        plan = cuflash.plan(x, x, x, algo=algo, engine="mma", causal=self.causal)
        return plan.traffic if algo == self.algo else plan.unfused_traffic


CASES = tuple(
    Case(shape, causal, algo)
    for shape in ((1, 16, 4096, 64), (1, 16, 4096, 128), (1, 4, 16384, 64))
    for causal in (False, True)
    for algo in ("fa1", "fa2", *(() if causal else (UNFUSED, SOFTMAX)))
)


def run_cases() -> None:
    """What ncu watches: every case once, after a warm-up, each behind a mark."""
    gpu.find_torch()
    cupy = gpu.need_gpu()
    mark = functools.partial(cupy.RawKernel(MARK, "next_case"), (1,), (1,), ())
    for case in CASES:
        try:
            call = case.call()
            call()
        except NotImplementedError:  # no torch
            call = int
        cupy.cuda.Device().synchronize()
        cupy.cuda.runtime.profilerStart()
        mark()
        call()
        cupy.cuda.Device().synchronize()
        cupy.cuda.runtime.profilerStop()
        del call
        gpu.release()


def count_bytes() -> list[dict[str, float]]:
    """What the counters say of each case, summed over its kernels."""
    if shutil.which("ncu") is None:
        raise SystemExit("ncu is not installed: it comes with the CUDA toolkit")
    command = ["ncu", "--csv", "--page", "raw", "--clock-control", "none"]
    command += ["--profile-from-start", "off", "--metrics", ",".join(COUNTERS.values())]
    command += [sys.executable, __file__, "--watched"]
    done = subprocess.run(command, capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith('"')]
    if done.returncode or len(lines) < 3:
        raise SystemExit(f"ncu failed:\n{done.stdout[-3000:]}{done.stderr[-2000:]}")
    rows = list(csv.DictReader(lines))
    units, found = rows[0], []
    for row in rows[1:]:
        if row["Kernel Name"].startswith("next_case"):
            found.append(dict.fromkeys(COUNTERS, 0.0) | {"kernels": 0})
            continue
        found[-1]["kernels"] += 1
        for name, counter in COUNTERS.items():
            found[-1][name] += float(row[counter].replace(",", "")) * UNITS[units[counter]]
    return found


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", metavar="FILE", help="also write the figures there")
    parser.add_argument("--watched", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.watched:
        run_cases()
        return
    gpu.need_gpu()
    rows = []
    for case, counted in zip(CASES, count_bytes(), strict=True):
        if counted["kernels"]:
            row = {"problem": case.label, "algorithm": case.algo, "formula": case.formula()}
            rows.append(row | counted)
    if options.json:
        result = {"machine": gpu.facts(), "rows": rows}
        Path(options.json).write_text(json.dumps(result, indent=1))
    print(", ".join(f"{key} {value}" for key, value in gpu.facts().items()))
    header = ("problem (B, H, N, D)", "algorithm", "formula", "read from L2", "written to L2",
              "L2 / formula", "device memory")  # fmt: skip
    print(f"\nGB:\n\n| {' | '.join(header)} |\n{'|---' * len(header)}|")
    for row in rows:
        cached, far = row["from_l2"] + row["to_l2"], row["read"] + row["written"]
        sizes = [f"{x / 1e9:.3f}" for x in (row["formula"], row["from_l2"], row["to_l2"], far)]
        cells = [row["problem"], row["algorithm"], *sizes[:3], f"{cached / row['formula']:.2f}"]
        print(f"| {' | '.join([*cells, sizes[3]])} |")


if __name__ == "__main__":
    main()
