"""What a call may be asked for beside attention alone, and what that may cost beside a plain call.

Options are made of a problem's sizes, as arrays of CuPy or, where there is none, of NumPy.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from benchmarks import gpu as bench

SOFTCAP = 30.0


class Feature(NamedTuple):
    """Options of a call, and the times of a plain call that it may take, by head dim."""

    made: Any  # of batch entries, heads, queries and keys
    forward: dict[int, float] | None = None
    backward: dict[int, float] | None = None
    wrt: tuple[str, ...] = ()  # of the gradients alone

    def options(self, shape, queries: int | None = None) -> dict[str, Any]:
        """Those of a problem of shape (B, H, N, D), by default with as many queries as keys."""
        batch, heads, length, _ = shape
        return self.made((batch, heads, queries or length, length))


def _times(wide: float, narrow: float | None = None) -> dict[int, float]:
    return {128: wide, 64: narrow or wide}


def _xp():
    return bench.find_cupy() or np


def slopes(heads: int):
    """ALiBi's, 2^(-8 (h + 1) / H)."""
    return _xp().asarray(0.5 ** (8 * np.arange(1, heads + 1) / heads), np.float32)


def _shown(sizes):
    """One bool per pair, for each batch entry; one in ten hidden at random."""
    batch, _, queries, keys = sizes
    return _xp().random.random((batch, 1, queries, keys)) < 0.9


def _bias(sizes, dtype="bfloat16"):
    _, *pairs = sizes
    return bench.meters.draw(_xp(), pairs, dtype, 7)


def _key_bias(sizes, dtype):
    batch, *_, keys = sizes
    return bench.meters.draw(_xp(), (batch, 1, 1, keys), dtype, 7)


def distance(sizes):
    """A function of scores that does as ALiBi's slopes do."""
    slope = slopes(sizes[1])
    return lambda score, batch, head, q, k: score + slope[head] * (k - q)


def curve(score, batch, head, q, k):
    """A function of scores that adds no line along the keys."""
    return score - 0.01 * (q - k) * (q - k)


FEATURES = {
    "alibi": Feature(lambda x: {"alibi_slopes": slopes(x[1])}, _times(1.1), _times(1.15)),
    "score_mod": Feature(lambda x: {"score_mod": distance(x)}, _times(1.1), _times(1.15)),
    "bias": Feature(lambda x: {"bias": _bias(x)}, _times(1.5), _times(1.6)),
    "bias, dbias": Feature(lambda x: {"bias": _bias(x)}, None, _times(2.2), ("bias",)),
    "bias in float32": Feature(lambda x: {"bias": _bias(x, "float32")}),
    "key bias": Feature(lambda x: {"bias": _key_bias(x, "bfloat16")}),
    "key bias in float32": Feature(lambda x: {"bias": _key_bias(x, "float32")}),
    "bool mask": Feature(lambda x: {"mask": _shown(x)}, _times(1.3), _times(1.4)),
    "dropout": Feature(
        lambda x: {"dropout_p": 0.1, "seed": 1}, _times(1.35, 1.8), _times(1.35, 1.6)
    ),
    "sinks": Feature(lambda x: {"sinks": slopes(x[1])}, _times(1.01), _times(1.02)),
    "softcap": Feature(lambda x: {"softcap": SOFTCAP}),
    "small softcap": Feature(lambda x: {"softcap": 2.0}),  # scores are not near 0
    "curve": Feature(lambda x: {"score_mod": curve}),
}
