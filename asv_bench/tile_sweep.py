"""Which row of `cuflash.plan.TILES` should serve? Candidates timed in turn on one GPU.

    python asv_bench/tile_sweep.py --case half64 half128 [--json FILE]
    python asv_bench/tile_sweep.py --case bwd64 [--any-order]
    python asv_bench/tile_sweep.py --list

A case is a kind of call (algorithm, engine, type, head dim) with some shapes; its candidates are
the rows of the table that serve it and those of `CANDIDATES`. Each candidate is compiled,
checked against the reference contender (torch's kernel of the same kind where there is one; for
fa1, and without torch, what cuflash chooses today) and timed in turn with it. Gradients are
deterministic but with --any-order; torch's are in its default mode, in any order. Printed is
reference time / candidate time: larger is faster. A `*` marks what the plan chooses today.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import statistics
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple, replace
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import gpu as bench

torch = bench.find_torch()  # before CuPy, which then finds the CUDA libraries that torch has loaded

import cupy
import numpy as np
from every_row import taken, with_row

import cuflash
from cuflash.gpu import launch
from cuflash.operands.dtypes import DOUBLE, HALF, SINGLE
from cuflash.planning.mma import MmaTile
from cuflash.planning.plan import TILES, Plan
from cuflash.planning.simt import SimtTile
from cuflash.planning.tile import Tile
from cuflash.planning.wgmma import WgmmaTile


class Case(NamedTuple):
    """A kind of call; shapes are (B, H, N, D, causal)."""

    algo: str
    engine: str
    dtype: str
    layout: str
    backend: str  # of torch, empty for none
    shapes: tuple[tuple[int, int, int, int, bool], ...]
    backward: bool = False


def _tokens(width: int, *lengths: int):
    """The field's grid: B * N = 16k tokens, H * D = 2048; not causal, then causal."""
    return tuple((16384 // n, 2048 // width, n, width, c) for n in lengths for c in (False, True))


def _square(width: int, *lengths: int):
    return tuple((8, 8, n, width, False) for n in lengths)


def _both_masks(*shape: int):
    return tuple((*shape, causal) for causal in (False, True))


FLASH, EFFICIENT, CUDNN = "FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION"
_SMALL = ((1, 8, 128, 64, True), (1, 8, 512, 64, True))
CASES = {
    "half64": Case("fa2", "mma", "bf16", "bnhd", FLASH, _tokens(64, 4096, 16384)),
    "half128": Case("fa2", "mma", "bf16", "bnhd", FLASH, _tokens(128, 4096, 16384)),
    "half256": Case("fa2", "mma", "bf16", "bnhd", FLASH, _tokens(256, 4096, 16384)),
    "hopper32": Case("fa3", "wgmma", "fp16", "bhnd", CUDNN, _both_masks(4, 48, 4096, 32)),
    "hopper64": Case("fa3", "wgmma", "bf16", "bnhd", CUDNN, _tokens(64, 1024, 4096, 16384)),
    "hopper96": Case("fa3", "wgmma", "bf16", "bnhd", CUDNN, _both_masks(4, 16, 4096, 96)),
    "hopper128": Case("fa3", "wgmma", "bf16", "bnhd", CUDNN, _tokens(128, 1024, 4096, 16384)),
    "hopper192": Case("fa3", "wgmma", "bf16", "bnhd", CUDNN, _both_masks(4, 16, 4096, 192)),
    "hopper256": Case("fa3", "wgmma", "bf16", "bnhd", CUDNN, _tokens(256, 1024, 4096, 16384)),
    "small64": Case("fa2", "mma", "bf16", "bhnd", FLASH, _SMALL),
    "fp32_8": Case("fa2", "simt", "fp32", "bhnd", EFFICIENT, _square(8, 512, 1024, 4096)),
    "fp32_16": Case("fa2", "simt", "fp32", "bhnd", EFFICIENT, _square(16, 512, 1024, 4096)),
    "fp32_32": Case("fa2", "simt", "fp32", "bhnd", EFFICIENT,
        ((4, 16, 4096, 32, False), (8, 8, 512, 32, False))),
    "fp32_64": Case("fa2", "simt", "fp32", "bhnd", EFFICIENT,
        ((4, 16, 4096, 64, False), (8, 8, 512, 64, False))),
    "fp32_128": Case("fa2", "simt", "fp32", "bhnd", EFFICIENT,
        ((4, 16, 4096, 128, False), (4, 16, 4096, 128, True))),
    "fa1_64": Case("fa1", "mma", "bf16", "bnhd", "",
        ((4, 33, 4096, 64, False), (4, 33, 4096, 64, True))),
    "fa1_128": Case("fa1", "mma", "bf16", "bnhd", "",
        ((4, 33, 4096, 128, False), (4, 33, 4096, 128, True))),
    "fa1_hopper64": Case("fa1", "wgmma", "bf16", "bnhd", "", _both_masks(4, 33, 4096, 64)),
    "fa1_hopper128": Case("fa1", "wgmma", "bf16", "bnhd", "", _both_masks(4, 33, 4096, 128)),
    "fa1_hopper192": Case("fa1", "wgmma", "bf16", "bnhd", "", _both_masks(4, 33, 2048, 192)),
    "fa1_hopper256": Case("fa1", "wgmma", "bf16", "bnhd", "", _both_masks(4, 33, 2048, 256)),
    "fa1_256": Case("fa1", "mma", "bf16", "bnhd", "", ((4, 33, 2048, 256, False),)),
    "fa1_fp32_64": Case("fa1", "simt", "fp32", "bhnd", "", ((4, 33, 2048, 64, False),)),
    "fa1_fp32_128": Case("fa1", "simt", "fp32", "bhnd", "", ((4, 33, 2048, 128, False),)),
    "fp64_64": Case("fa2", "mma", "fp64", "bhnd", "",
        ((2, 8, 2048, 64, False), (4, 16, 4096, 64, False))),
    "fp64_128": Case("fa2", "mma", "fp64", "bhnd", "",
        ((2, 8, 2048, 128, False), (4, 8, 4096, 128, False))),
    "bwd_fp64_64": Case("fa2", "mma", "fp64", "bhnd", "",
        ((2, 8, 2048, 64, False), (4, 16, 4096, 64, False)), True),
    "bwd_fp64_128": Case("fa2", "mma", "fp64", "bhnd", "",
        ((2, 8, 2048, 128, False), (4, 8, 4096, 128, False)), True),
    "bwd32": Case("fa2", "mma", "fp16", "bhnd", FLASH, _both_masks(4, 48, 4096, 32), True),
    "bwd64": Case("fa2", "mma", "bf16", "bnhd", FLASH, _tokens(64, 1024, 4096, 16384), True),
    "bwd128": Case("fa2", "mma", "bf16", "bnhd", FLASH, _tokens(128, 1024, 4096, 16384), True),
    "bwd_fp32_32": Case("fa2", "simt", "fp32", "bhnd", EFFICIENT,
        _both_masks(4, 16, 4096, 32), True),
    "bwd_fp32_64": Case("fa2", "simt", "fp32", "bhnd", EFFICIENT,
        _both_masks(4, 16, 4096, 64), True),
    "bwd_fp32_128": Case("fa2", "simt", "fp32", "bhnd", EFFICIENT,
        _both_masks(4, 16, 4096, 128), True),
}  # fmt: skip


def _stages(algo, more):
    """Of fa1 two, unless it is said."""
    return {"stages": 2 if algo == "fa1" else 1, **more}


def _simt(algo, dtypes, max_dim, block_k, warps, row_lanes, lane_rows, **more):
    return SimtTile(
        algo=algo, dtypes=dtypes, max_dim=max_dim, block_k=block_k, warps=warps,
        row_lanes=row_lanes, lane_rows=lane_rows, **_stages(algo, more),
    )  # fmt: skip


def _mma(algo, max_dim, block_k, warps, slabs, **more):
    return MmaTile(
        algo=algo, max_dim=max_dim, block_k=block_k, warps=warps, slabs=slabs,
        **_stages(algo, more),
    )  # fmt: skip


def _wgmma(max_dim, block_k, warpgroups, **more):
    """As fa3 and as fa2."""
    sizes = {"max_dim": max_dim, "block_k": block_k, "warps": 4 * warpgroups, "fill": 1.0, **more}
    return WgmmaTile(algo="fa3", **sizes), WgmmaTile(algo="fa2", **sizes)


def _wgmma_fa1(max_dim, block_k, step_k, warpgroups, **more):
    sizes = {"max_dim": max_dim, "block_k": block_k, "step_k": step_k, "stages": 1, **more}
    return WgmmaTile(algo="fa1", warps=4 * warpgroups, **sizes)


def _backward(algo, engine, dtypes, max_dim, block_q, warps, rows, **more):
    """`rows`: slabs (mma), or row_lanes and lane_rows (simt)."""
    sizes = {"algo": algo, "max_dim": max_dim, "block_q": block_q, "warps": warps, **more}
    if engine == "mma":
        return MmaTile(dtypes=dtypes, slabs=rows, backward=True, **sizes)
    row_lanes, lane_rows = rows
    return SimtTile(dtypes=dtypes, row_lanes=row_lanes, lane_rows=lane_rows, backward=True, **sizes)


# Beyond the table's rows.
CANDIDATES: dict[str, list[Tile]] = {
    "half64": [
        _mma("fa2", 64, 64, 4, 2, stages=2, queries_in_registers=True),
        _mma("fa2", 64, 64, 4, 2, stages=3, queries_in_registers=True),
        _mma("fa2", 64, 128, 4, 2, stages=1),
        _mma("fa2", 64, 80, 4, 2, stages=2, queries_in_registers=True),
        _mma("fa2", 64, 96, 4, 2, stages=2),
    ],
    "half128": [
        _mma("fa2", 128, 48, 4, 2, stages=2, load_unroll=1),
        _mma("fa2", 128, 48, 4, 2, stages=2, load_unroll=2, min_blocks=2),
        _mma("fa2", 128, 64, 4, 2, stages=1, load_unroll=2),
    ],
    "half256": [
        _mma("fa2", 256, 64, 8, 1, stages=1),
        _mma("fa2", 256, 64, 8, 1, step_k=32, stages=2),
        _mma("fa2", 256, 48, 8, 1, stages=2),
    ],
    "hopper32": [
        *_wgmma(32, 128, 3, stages=4),
        *_wgmma(32, 144, 3, stages=4, ping_pong=True),
        *_wgmma(32, 64, 4, stages=4, ping_pong=True),
        *_wgmma(32, 80, 4, stages=4, ping_pong=True),
        *_wgmma(32, 80, 4, stages=4),
        *_wgmma(32, 192, 2, stages=4, ping_pong=True),
        *_wgmma(32, 224, 2, stages=4, ping_pong=True),
    ],
    "hopper64": [
        *_wgmma(64, 128, 3, stages=4),
        *_wgmma(64, 128, 3, stages=2, ping_pong=True),
        *_wgmma(64, 112, 3, stages=4, ping_pong=True),
        *_wgmma(64, 128, 2, stages=4, ping_pong=True),
    ],
    "hopper96": [*_wgmma(96, 96, 3, stages=3, ping_pong=True), *_wgmma(96, 144, 2, stages=3)],
    "hopper128": [
        *_wgmma(128, 80, 3, stages=4),
        *_wgmma(128, 80, 3, stages=3, ping_pong=True),
        *_wgmma(128, 128, 2, stages=3),
        *_wgmma(128, 128, 2, stages=2, ping_pong=True),
        *_wgmma(128, 160, 2, ping_pong=True),
        *_wgmma(128, 176, 2, ping_pong=True),
    ],
    "hopper192": [*_wgmma(192, 96, 2), *_wgmma(192, 112, 2, ping_pong=True)],
    "hopper256": [*_wgmma(256, 80, 2, ping_pong=True), *_wgmma(256, 64, 2)],
    "small64": [
        *(
            _mma("fa2", 64, 64, 4, 1, stages=stages, load_unroll=unroll, queries_in_registers=True)
            for stages in (1, 2, 3)
            for unroll in (1, 2, 8)
        ),
        _mma("fa2", 64, 64, 4, 1, stages=2, load_unroll=2),
        _mma("fa2", 64, 32, 4, 1, stages=3, load_unroll=2, queries_in_registers=True),
    ],
    "fp32_8": [
        _simt("fa2", SINGLE, 16, 32, 4, 2, 2),
        _simt("fa2", SINGLE, 16, 64, 4, 4, 4),
        _simt("fa2", SINGLE, 16, 64, 4, 4, 2),
        _simt("fa2", SINGLE, 16, 64, 4, 2, 2, step_k=32, stages=2),
    ],
    "fp32_16": [
        _simt("fa2", SINGLE, 16, 64, 4, 4, 8),
        _simt("fa2", SINGLE, 16, 64, 4, 4, 4),
        _simt("fa2", SINGLE, 16, 32, 4, 4, 8),
    ],
    "fp32_32": [
        _simt("fa2", SINGLE, 32, 32, 4, 4, 4),
        _simt("fa2", SINGLE, 32, 32, 4, 8, 8),
        _simt("fa2", SINGLE, 32, 32, 4, 4, 8),
    ],
    "fp32_64": [
        _simt("fa2", SINGLE, 64, 32, 4, 8, 8),
        _simt("fa2", SINGLE, 64, 64, 4, 8, 8, step_k=32, stages=2),
        _simt("fa2", SINGLE, 64, 64, 8, 8, 8),
    ],
    "fp32_128": [
        _simt("fa2", SINGLE, 128, 64, 8, 16, 8),
        _simt("fa2", SINGLE, 128, 64, 4, 8, 8),
        _simt("fa2", SINGLE, 128, 32, 8, 8, 8),
    ],
    "fp64_64": [
        _mma("fa2", 64, 32, 8, 1, dtypes=DOUBLE, stages=2),
        _mma("fa2", 64, 64, 8, 1, dtypes=DOUBLE, stages=2, step_k=32, queries_in_registers=True),
        _mma("fa2", 64, 32, 8, 2, dtypes=DOUBLE, stages=2, step_k=16),
    ],
    "fp64_128": [_mma("fa2", 128, 16, 8, 1, dtypes=DOUBLE, stages=2)],
    "bwd_fp64_64": [
        _backward("fa2", "mma", DOUBLE, 64, 32, 8, 1, stages=1),
        _backward("fa2", "mma", DOUBLE, 64, 64, 8, 1, split=2, step_q=32, stages=1),
    ],
    "bwd_fp64_128": [_backward("fa2", "mma", DOUBLE, 128, 16, 8, 1, split=2, step_q=8, stages=2)],
    "fa1_64": [],
    "fa1_128": [
        _mma("fa1", 128, 256, 8, 1, step_k=64, queries_in_registers=True),
        _mma("fa1", 128, 192, 8, 2, step_k=32),
    ],
    "fa1_hopper64": [
        _wgmma_fa1(64, 768, 128, 3),
        _wgmma_fa1(64, 640, 128, 3, stages=2, ping_pong=True),
        _wgmma_fa1(64, 512, 128, 3, stages=2, ping_pong=True),
    ],
    "fa1_hopper128": [
        _wgmma_fa1(128, 384, 128, 2),
        _wgmma_fa1(128, 384, 96, 2, ping_pong=True),
        _wgmma_fa1(128, 320, 160, 2, stages=2, ping_pong=True),
    ],
    "fa1_hopper192": [_wgmma_fa1(192, 224, 112, 2, ping_pong=True)],
    "fa1_hopper256": [_wgmma_fa1(256, 160, 80, 2, ping_pong=True)],
    "fa1_256": [_mma("fa1", 256, 128, 4, 1, step_k=64)],
    "fa1_fp32_64": [],
    "fa1_fp32_128": [_simt("fa1", SINGLE, 128, 64, 8, 16, 4, step_k=64)],
    "bwd32": [
        _backward("fa2", "mma", HALF, 32, 64, 4, 2, stages=2, min_blocks=2),
        _backward("fa2", "mma", HALF, 32, 64, 4, 2, step_q=32, stages=2, min_blocks=3),
        _backward("fa2", "mma", HALF, 32, 64, 8, 1, stages=2, min_blocks=2),
        _backward("fa2", "mma", HALF, 32, 64, 8, 2, step_q=32, stages=2),
        _backward("fa2", "mma", HALF, 32, 128, 4, 2, step_q=32, stages=2, min_blocks=2),
    ],
    "bwd64": [
        _backward("fa2", "mma", HALF, 64, 64, 4, 2, step_q=32, stages=2),
        _backward("fa2", "mma", HALF, 64, 64, 4, 2, step_q=32, stages=1, min_blocks=2),
        _backward("fa2", "mma", HALF, 64, 64, 4, 2, step_q=16, stages=2, min_blocks=2),
        _backward("fa2", "mma", HALF, 64, 64, 4, 2, stages=2),
        _backward("fa2", "mma", HALF, 64, 64, 4, 1, stages=2, min_blocks=2),
        _backward("fa2", "mma", HALF, 64, 64, 8, 1, stages=2),
        _backward("fa2", "mma", HALF, 64, 64, 8, 1, step_q=32, stages=2, min_blocks=2),
        _backward("fa2", "mma", HALF, 64, 128, 8, 1, step_q=32, stages=2),
        _backward("fa2", "mma", HALF, 64, 64, 8, 2, step_q=32, stages=2),
    ],
    "bwd128": [
        _backward("fa2", "mma", HALF, 128, 64, 8, 1, step_q=32, stages=1),
        _backward("fa2", "mma", HALF, 128, 64, 8, 1, step_q=16, stages=2),
        _backward("fa2", "mma", HALF, 128, 64, 8, 1, stages=2),
        _backward("fa2", "mma", HALF, 128, 32, 8, 1, stages=2),
        _backward("fa2", "mma", HALF, 128, 64, 4, 1, step_q=32, stages=1, min_blocks=2),
        _backward("fa2", "mma", HALF, 128, 32, 4, 1, stages=2, min_blocks=2),
    ],
    "bwd_fp32_32": [
        _backward("fa2", "simt", SINGLE, 32, 32, 4, (8, 8), stages=2),
        _backward("fa2", "simt", SINGLE, 32, 64, 4, (8, 8), stages=1, min_blocks=2),
        _backward("fa2", "simt", SINGLE, 32, 32, 4, (4, 4), stages=2),
        _backward("fa2", "simt", SINGLE, 32, 32, 4, (8, 4), stages=2, min_blocks=3),
    ],
    "bwd_fp32_64": [
        _backward("fa2", "simt", SINGLE, 64, 32, 4, (8, 8), stages=1, min_blocks=2),
        _backward("fa2", "simt", SINGLE, 64, 32, 4, (8, 4), stages=2, min_blocks=2),
        _backward("fa2", "simt", SINGLE, 64, 64, 4, (8, 8), stages=1),
        _backward("fa2", "simt", SINGLE, 64, 32, 4, (16, 8), stages=2, min_blocks=2),
        _backward("fa2", "simt", SINGLE, 64, 64, 8, (16, 8), stages=2),
    ],
    "bwd_fp32_128": [
        _backward("fa2", "simt", SINGLE, 128, 32, 8, (16, 8), stages=1),
        _backward("fa2", "simt", SINGLE, 128, 64, 8, (16, 8), stages=1),
        _backward("fa2", "simt", SINGLE, 128, 32, 4, (16, 8), stages=1),
        _backward("fa2", "simt", SINGLE, 128, 32, 4, (16, 8), stages=2),
        _backward("fa2", "simt", SINGLE, 128, 32, 4, (8, 4), stages=1),
    ],
}


def _same(a: Tile, b: Tile) -> bool:
    """Whether two rows make the same kernel."""
    plain = [replace(t, fill=0.0, max_dim=0, dtypes=()) for t in (a, b)]
    return astuple(plain[0]) == astuple(plain[1])


def candidates(name: str) -> list[Tile]:
    """The table's rows for a case and its own, each kernel once."""
    case, found = CASES[name], []
    kind = (case.algo, case.engine, case.backward)
    dtype = bench.DTYPES[case.dtype].name
    rows = [t for t in TILES if (t.algo, t.engine, t.backward) == kind and dtype in t.dtypes]
    for row in (*rows, *CANDIDATES.get(name, ())):
        if (
            row.algo == case.algo
            and row.max_dim >= case.shapes[0][3]
            and not any(_same(row, t) for t in found)
        ):
            found.append(row)
    return found


def describe(tile: Tile) -> str:
    """A row in words that tell candidates apart."""
    parts = [f"{tile.block_q}x{tile.block_k}", f"w{tile.warps}"]
    step, block = tile.step_k, tile.block_k
    if tile.backward:
        step, block = tile.step_q, tile.block_q
    if step != block:
        parts.append(f"step{step}")
    if tile.engine == "mma":
        parts.append(f"slabs{tile.slabs}")
        if tile.split > 1:
            parts.append(f"split{tile.split}")
        if not tile.backward:
            parts.append("Qreg" if tile.queries_in_registers else "Qsmem")
    elif tile.engine == "wgmma":
        parts.append("pingpong" if tile.ping_pong else "free")
    else:
        parts.append(f"lanes{tile.row_lanes} rows{tile.lane_rows}")
    ends = f"st{tile.stages}", f"mb{tile.min_blocks}", f"unroll{tile.load_unroll}"
    return " ".join([*parts, *ends])


class Shape:
    """One shape's operands, and calls of any tile on them."""

    def __init__(self, case: Case, shape, deterministic: bool):
        *sizes, self.causal = shape
        self.device_id = cupy.cuda.Device().id
        self.case, self.sizes = case, sizes
        self.q, self.k, self.v, self.out = (self._draw() for _ in "qkvo")
        inputs = self.q.cupy, self.k.cupy, self.v.cupy
        if case.backward:
            self.dout, *gradients = (self._draw() for _ in range(4))
            self.results = tuple(gradients)
            kind = np.float64 if case.dtype == "fp64" else np.float32
            out = self.out.cupy, cupy.empty(sizes[:3], kind)
            cuflash.attention(*inputs, causal=self.causal, return_lse=True, out=out)
            read = self.dout.cupy, *inputs, *out
            written = {"grads_out": tuple(x.cupy for x in gradients)}
            function = functools.partial(cuflash.attention_backward, deterministic=deterministic)
        else:
            self.results, read, written = (self.out,), inputs, {"out": self.out.cupy}
            function = cuflash.attention
        options = {"algo": case.algo, "engine": case.engine, "causal": self.causal}
        self.function = functools.partial(function, *read, **options, **written)
        self.chosen = taken(self.function)[0].plan

    def _draw(self):
        return bench.draw(self.sizes, self.case.dtype, self.case.layout)

    @property
    def label(self) -> str:
        """Such as `(4,32,4096,64) causal`."""
        return f"({','.join(map(str, self.sizes))})" + (" causal" if self.causal else "")

    def plan(self, tile: Tile) -> Plan:
        """The plan with that tile, whatever the table would choose."""
        return replace(self.chosen, tile=tile)

    def error(self, expected) -> float:
        """What the results differ by from those expected."""
        measure = bench.relative_difference if self.case.backward else bench.difference
        return float(np.max([measure(x.cupy, y) for x, y in zip(self.results, expected)]))

    def reference(self):
        """The contender that all are held against, its name, and torch's context for it."""
        backend, name = self.case.backend, f"torch {self.case.backend}"
        if backend and torch is not None:
            if self.case.backward:
                operands = self.q, self.k, self.v, self.dout
                call = bench.torch_gradients(*operands, self.causal, backend)
            else:
                kernel = torch.nn.functional.scaled_dot_product_attention
                tensors = self.q.torch, self.k.torch, self.v.torch
                call = functools.partial(kernel, *tensors, is_causal=self.causal)
            return call, name, bench.only(backend)
        return self.function, "cuflash today", contextlib.nullcontext()


def compile_all(shape: Shape, tiles: list[Tile]) -> dict[int, str]:
    """Compile in parallel; why each of those that cannot run cannot, by index."""

    def attempt(tile):
        plan = shape.plan(tile)
        reason = replace(tile, fill=0.0).reject(plan.problem, plan.device)
        if reason:
            return reason
        try:
            for kernel in plan.kernels:
                launch.compiled(plan, shape.device_id, kernel)
        except Exception as error:
            return bench.in_words(error)
        return ""

    bind = cupy.cuda.Device(shape.device_id).use
    with ThreadPoolExecutor(os.cpu_count(), initializer=bind) as pool:
        reasons = list(pool.map(attempt, tiles))
    return {i: reason for i, reason in enumerate(reasons) if reason}


def resources(shape: Shape, tile: Tile) -> tuple[str, str]:
    """Registers per thread and bytes of local memory (stack and spills)."""
    try:
        function, driver = launch.compiled(shape.plan(tile), shape.device_id), cupy.cuda.driver
        return tuple(
            str(driver.funcGetAttribute(getattr(driver, f"CU_FUNC_ATTRIBUTE_{name}"), function.ptr))
            for name in ("NUM_REGS", "LOCAL_SIZE_BYTES")
        )
    except Exception:
        return "?", "?"


class Sweep:
    """A case's candidates and what was found out about each."""

    def __init__(self, name: str, deterministic: bool):
        self.name, self.case, self.tiles = name, CASES[name], candidates(name)
        self.deterministic = deterministic  # of gradients
        self.skipped: dict[int, str] = {}  # why it failed, by candidate
        self.rejected: dict[int, str] = {}  # why it cannot run, on some shape
        self.resources: dict[int, tuple[str, str]] = {}
        self.chosen: set[tuple[int, str]] = set()  # by the plan: candidate and shape
        self.against = ""
        self.times: dict[
            str, dict[int, list[float]]
        ] = {}  # by shape; candidate -1 is the reference
        self.flops: dict[str, int] = {}

    def run(self, sizes, timer, milliseconds: float) -> None:
        """Compile, check and time the candidates on one shape."""
        shape = Shape(self.case, sizes, self.deterministic)
        self.flops[shape.label] = shape.chosen.flops
        rejected = compile_all(shape, self.tiles)  # such as rows for causal masks alone
        self.rejected |= rejected
        reference, self.against, context = shape.reference()
        with context:
            expected = bench.all_values(reference())
            runners = {-1: reference}
            for i, tile in enumerate(self.tiles):
                if _same(tile, shape.chosen.tile):
                    self.chosen.add((i, shape.label))
                if i in rejected or i in self.skipped:
                    continue
                try:
                    runners[i] = self._checked_runner(shape, tile, expected)
                    self.resources[i] = resources(shape, tile)
                except Exception as error:
                    self.skipped[i] = f"{shape.label}: {bench.in_words(error)}"
            columns = timer.measure(list(runners.values()), milliseconds)
        self.times[shape.label] = dict(zip(runners, columns))

    def _checked_runner(self, shape: Shape, tile: Tile, expected):
        for operand in shape.results:
            bench.spoil(operand)
        run = with_row(tile, shape.function)
        run()
        cupy.cuda.Device().synchronize()
        error = shape.error(expected)
        tolerances = bench.GRADIENT_TOLERANCE if self.case.backward else bench.TOLERANCE
        if not error < tolerances[self.case.dtype]:
            raise ArithmeticError(f"wrong by {error:.2g}")
        return run

    def results(self) -> list[dict]:
        """A dictionary per candidate."""
        rows = []
        for i, tile in enumerate(self.tiles):
            registers, local = self.resources.get(i, ("?", "?"))
            row = {"case": self.name, "tile": describe(tile), "row": repr(tile), "shapes": {}}
            row.update(registers=registers, local=local)
            if self.case.backward:
                row["deterministic"] = self.deterministic
            for label, times in self.times.items():
                if i in times:
                    median = statistics.median(times[i])
                    row["shapes"][label] = {
                        "us": median,
                        "tflops": self.flops[label] / median / 1e6,
                        "ratio": bench.paired_ratio(times[-1], times[i]),
                        "reference": self.against,
                        "reference_us": statistics.median(times[-1]),
                        "chosen": (i, label) in self.chosen,
                    }
            why = self.skipped if row["shapes"] else self.rejected | self.skipped
            row["skipped"] = why.get(i, "")
            rows.append(row)
        return rows

    def report(self) -> None:
        """Print the ranking, best first, and why the others were skipped."""
        table, skipped = [], []
        for row in self.results():
            if row["skipped"]:
                skipped.append(f"  skipped {row['tile']}: {row['skipped']}")
            if row["skipped"] or not row["shapes"]:
                continue
            found = [row["shapes"].get(label) for label in self.times]
            mean = statistics.geometric_mean(x["ratio"] for x in found if x)
            cells = [_cell(x) if x else "n/a" for x in found]
            table.append([row["tile"], row["registers"], row["local"], mean, *cells])
        table.sort(key=lambda cells: -cells[3])
        reference = [f"{statistics.median(times[-1]):.1f}us" for times in self.times.values()]
        table.append([self.against, "", "", 1.0, *reference])
        header = ["tile", "regs", "local", "mean", *self.times]
        name = self.name if self.deterministic else f"{self.name} in any order"
        bench.print_table(f"{name}: {self.against} time / candidate time", table, header)
        for line in skipped:
            print(line, flush=True)


def _cell(x) -> str:
    mark = "*" if x["chosen"] else " "
    return f"{x['ratio']:.3f}{mark} {x['tflops']:4.0f}T {x['us']:8.1f}us"


def main(arguments=None) -> None:
    """Sweep the cases asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--case", nargs="+", choices=CASES, default=list(CASES), metavar="CASE")
    parser.add_argument("--ms", type=float, default=40, help="GPU time per candidate and shape")
    parser.add_argument("--json", metavar="FILE", help="also write the results there")
    parser.add_argument("--any-order", action="store_true", help="gradients not deterministic")
    parser.add_argument("--list", action="store_true", help="print the candidates and stop")
    options = parser.parse_args(arguments)
    if options.list:
        for name in options.case:
            print(name, *map(describe, candidates(name)), sep="\n  ")
        return
    facts, results = bench.facts(), []
    print(", ".join(f"{key} {value}" for key, value in facts.items()))
    timer = bench.meter()
    for name in options.case:
        sweep = Sweep(name, not options.any_order)
        for sizes in sweep.case.shapes:
            try:
                sweep.run(sizes, timer, options.ms)
            except Exception as error:
                print(f"\n{name} {sizes} failed: {bench.in_words(error)}", flush=True)
            bench.release()
        sweep.report()
        results += sweep.results()
        if options.json:
            with open(options.json, "w") as file:
                json.dump({"machine": facts, "results": results}, file, indent=1)


if __name__ == "__main__":
    main()
