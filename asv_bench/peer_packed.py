"""The group of against_peers.py about packed sequences.

Against FlashAttention-3 and -4 for sequences of different lengths, and against a batch of as many
sequences of their mean length, by the rate of arithmetic.
"""

from __future__ import annotations

import functools

import numpy as np
from benchmarks import gpu as bench
from benchmarks.gpu import Backward, Problem
from peer_rows import Session

import cuflash

SEQUENCES, SHORTEST, LONGEST = 64, 64, 4096
SHAPES = ((SEQUENCES, 16, LONGEST, 128),), ((SEQUENCES, 32, LONGEST, 64),)
EQUAL = "equal lengths"


class Packed:
    """Self-attention of sequences one behind another, and calls on them."""

    dtype, others = "bf16", (EQUAL,)

    def __init__(self, shape, backward: bool):
        count, heads, longest, width = self.shape = shape
        lengths = np.random.default_rng(0).integers(SHORTEST, longest, count, endpoint=True)
        self.mean, self.longest = round(lengths.mean()), int(lengths.max())
        self.offsets = bench.need_gpu().asarray(np.concatenate([[0], lengths.cumsum()]), np.int32)
        tokens = int(lengths.sum())
        draw = functools.partial(bench.draw, (1, heads, tokens, width), self.dtype, "bnhd")
        self.q, self.k, self.v, self.out, self.dout, *gradients = (draw() for _ in range(8))
        self.backward, self.results = backward, tuple(gradients) if backward else (self.out,)
        pairs = sum(int(n) * (int(n) + 1) // 2 for n in lengths) * heads
        self.flops = 2 * width * pairs * (5 if backward else 2)
        self.tolerance = (bench.GRADIENT_TOLERANCE if backward else bench.TOLERANCE)[self.dtype]
        self.label = f"{'backward ' * backward}{self.dtype} {count} sequences of {SHORTEST} to "
        self.label += f"{longest}, {heads} heads of {width}, causal"

    def error(self, theirs, mine) -> float:
        """What results differ by, to be held against `tolerance`."""
        measure = bench.relative_difference if self.backward else bench.difference
        theirs = [x[0].swapaxes(0, 1) for x in theirs]  # (T, H, D), as cuflash's are
        return float(np.max([*map(measure, theirs, mine)]))

    def ours(self):
        """A call of cuflash."""
        q, k, v, out, dout, *into = (
            x.cupy[0].swapaxes(0, 1)
            for x in (self.q, self.k, self.v, self.out, self.dout, *self.results)
        )
        options = {"causal": True, "max_seqlen_q": self.longest, "max_seqlen_k": self.longest}
        if not self.backward:
            call = functools.partial(cuflash.attention_varlen, out=out)
            return functools.partial(call, q, k, v, self.offsets, **options)
        found = cuflash.attention_varlen(q, k, v, self.offsets, return_lse=True, **options)
        call = functools.partial(cuflash.attention_varlen_backward, grads_out=tuple(into))
        return functools.partial(call, dout, q, k, v, *found, self.offsets, **options)

    def theirs(self, name):
        """A call of one of `bench.FLASH`."""

        def forward(*tensors):
            function = bench.flash_packed(name)
            offsets = bench.Operand(self.offsets).torch
            sizes = offsets, offsets, self.longest, self.longest
            return function(*tensors, *sizes, causal=True)

        if self.backward:
            return bench.gradients(forward, self.q, self.k, self.v, self.dout)
        tensors = [x.torch for x in (self.q, self.k, self.v)]
        return lambda: forward(*tensors)


def packed(s: Session) -> None:
    """64 sequences of 64 to 4,096 tokens, packed."""
    for (shape,) in s.asked(SHAPES):
        for backward in (False, True):
            problem = Packed(shape, backward)
            mine = "packed"
            contenders = {mine: problem.ours()}
            peers = ("FA4",) if backward else ("FA3", "FA4")
            contenders |= {name: problem.theirs(name) for name in peers}
            s.compare_pairs("packed", problem, contenders, [(mine, x, 1.0) for x in peers])
            rate = s.rows[-1].get("tflops")
            kind = Backward if backward else Problem
            sizes = shape[0], shape[1], problem.mean, shape[3]
            del contenders
            bench.release()
            equal = kind(sizes, "bf16", True, "bnhd")
            _against_equal(s, problem, equal, mine, rate)
            del problem, equal
            bench.release()


def _against_equal(s: Session, problem, equal, name, rate) -> None:
    """The rate of arithmetic of a batch of equal lengths, as a multiple of this one's."""
    (times,) = s.timer.measure([equal.ours(None)], s.milliseconds)
    flops = equal.flops / float(np.median(times)) / 1e6
    target = None if problem.backward else 1 / 0.95
    note = f"{flops:.0f} TFLOP/s with {EQUAL}"
    s.add("packed", problem.label, f"{name}, {EQUAL}", rate and flops / rate, target, "x", note)
