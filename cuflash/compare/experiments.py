"""What is compared: problems, in experiments over the length or over the number of heads."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import NamedTuple

from ..planning.plan import ALGOS, ENGINES, TILES


class Work(NamedTuple):
    """Self-attention of (batch, heads, length, width), or its gradients."""

    batch: int
    heads: int
    length: int
    width: int
    dtype: str
    causal: bool = False
    backward: bool = False

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(B, H, N, D)."""
        return self[:4]

    @property
    def flops(self) -> int:
        """Of the products over visible pairs; backward has five products to two forward."""
        pairs = self.length * (self.length + 1) // 2 if self.causal else self.length**2
        return (10 if self.backward else 4) * self.width * pairs * self.batch * self.heads

    def __str__(self) -> str:
        text = f"{self.dtype} ({', '.join(map(str, self.shape))})"
        return text + " causal" * self.causal + " backward" * self.backward


class Experiment(NamedTuple):
    """Works to compare on, over the length or over the number of heads of the whole batch."""

    title: str
    works: tuple[Work, ...]
    contenders: tuple[str, ...] = ()  # beginnings of names; all if empty
    over: str = "length"
    timed: bool = True

    @property
    def over_length(self) -> bool:
        """Whether the length grows while the heads stay, so that memory has a curve."""
        kinds = {(work.batch, work.heads) for work in self.works}
        return len(kinds) == 1 < len({work.length for work in self.works})


MASKS = (False, True)


def _field(
    widths: Iterable[int], lengths: Iterable[int], backward: bool = False
) -> tuple[Work, ...]:
    """The field's grid: 16k tokens of 2048 features."""
    return tuple(
        Work(16384 // n, 2048 // d, n, d, "bfloat16", causal, backward)
        for d, causal, n in itertools.product(widths, MASKS, lengths)
    )


def on_tensor_cores(backward: bool) -> tuple[str, ...]:
    """Algorithms on the engines that are faster than FMA units, by the tables' rows."""
    kinds = {(row.algo, row.engine) for row in TILES if row.backward == backward}
    engines = ENGINES[: ENGINES.index("simt") : -1]
    return tuple(f"{a} {e}" for e in engines for a in ALGOS[::-1] if (a, e) in kinds)


def gpu_experiments(quick: bool) -> dict[str, Experiment]:
    """What is compared on a GPU."""
    lengths = (4096,) if quick else (1024, 4096, 16384)
    peers = "torch FA2", "torch cuDNN"
    forward, gradients = ((*on_tensor_cores(backward), *peers) for backward in MASKS)
    early = tuple(
        Work(8, 8, n, d, "float32")
        for d in (8, 16, 32, 64)
        for n in ((1024,) if quick else (512, 1024, 2048, 4096))
    )
    halves = tuple(
        Work(4, 48, n, 32, "float16", False, backward)
        for backward in MASKS
        for n in ((4096,) if quick else (1024, 2048, 4096))
    )
    heads = (1, 8, 132) if quick else (1, 2, 4, 8, 16, 33, 66, 132, 264)
    long = (1024, 4096, 16384) if quick else (1024, 2048, 4096, 8192, 16384, 32768, 65536)
    return {
        "field": Experiment(
            "16k tokens of 2048 features", _field((64, 128, 256), lengths), forward
        ),
        "backward": Experiment(
            "gradients, 16k tokens of 2048 features",
            _field((64, 128, 256), lengths, True),
            gradients,
        ),
        "early": Experiment("8 x 8 heads in single precision", early),
        "halves": Experiment("4 x 48 heads of width 32", halves),
        "heads": Experiment(
            "fa1 against fa2 over the number of heads",
            tuple(Work(1, h, 4096, 64, "bfloat16") for h in heads),
            ("fa2 mma", "fa1 mma"),
            over="heads",
        ),
        "memory": Experiment(
            "memory beyond operands and result",
            tuple(Work(1, 8, n, 64, "float16") for n in long),
            ("unfused", "fa1 mma", "fa2 mma", "fa3", "torch FA2"),
            timed=False,
        ),
    }


def cpu_experiments(quick: bool) -> dict[str, Experiment]:
    """What is compared on the CPU."""
    lengths = (256, 512, 1024) if quick else (256, 512, 1024, 2048)
    works = {
        backward: tuple(
            Work(1, 8, n, 64, "float32", causal, backward)
            for causal in MASKS
            for n in lengths[: len(lengths) - backward]
        )
        for backward in MASKS
    }
    return {
        "forward": Experiment("8 heads of width 64", works[False]),
        "backward": Experiment("gradients, 8 heads of width 64", works[True]),
    }
