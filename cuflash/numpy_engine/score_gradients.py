"""Gradients of the arrays that one head's scores depend on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ..scores.evaluate import evaluate
from ..scores.wanted import scatter

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ..scores.expression import Node
    from ..scores.score import Score
    from ..scores.wanted import Target
    from .tiles import Bools, Floats

    Place = tuple[int, int, NDArray[Any], NDArray[Any], int]  # as tiles.Head.positions has it
    # By the names of arrays: what is wanted, and the gradient, with the problem's leading axes.
    Wanted = Mapping[str, tuple[Target, NDArray[Any]]]


@dataclass(frozen=True)
class ScoreGradients:
    """What one head adds to the gradients that are wanted.

    Parameters
    ----------
    score : Score
    captured : mapping of str to ndarray
    gradients : list of (Target, ndarray)
        Of placed ones the part that is the head's, with an axis of length 1 where it is summed.
    """

    score: Score
    captured: Mapping[str, NDArray[Any]]
    gradients: list[tuple[Target, NDArray[Any]]]

    @classmethod
    def of(
        cls, wanted: Wanted, score: Score, captured: Mapping[str, NDArray[Any]],
        index: tuple[int, ...],
    ) -> ScoreGradients:  # fmt: skip
        """Those of the head at that place in the leading axes."""
        parts = [(x, g if x.kind == "scattered" else g[index]) for x, g in wanted.values()]
        return cls(score, captured, parts)

    @property
    def of_pairs(self) -> list[tuple[Target, NDArray[Any]]]:
        """Those that pairs of a query and a key add to."""
        return [(x, gradient) for x, gradient in self.gradients if x.kind != "sink"]

    @property
    def sinks(self) -> list[NDArray[Any]]:
        """That of the sink, if it is wanted."""
        return [gradient for x, gradient in self.gradients if x.kind == "sink"]

    def slopes(self, products: Floats, positions: Place) -> list[tuple[Node, Floats]]:
        """The derivatives of the changed scores of a tile by each element that is read."""
        return [
            (read, self.score.linearize(products, *positions, self.captured, read)[1])
            for target, _ in self.of_pairs
            for read in target.reads
        ]

    def add_pairs(
        self, dscores: Floats, slopes: list[tuple[Node, Floats]], hidden: Bools | None,
        queries: slice, keys: slice, positions: Place,
    ) -> None:  # fmt: skip
        """Add a tile's share, of its derivatives by the changed scores."""
        rest = iter(slopes)
        for target, gradient in self.of_pairs:
            for _ in target.reads:
                read, slope = next(rest)
                terms = dscores * slope
                if hidden is not None:
                    np.copyto(terms, 0, where=hidden)
                if target.kind == "scattered":
                    scatter(gradient, self._indices(read, positions, terms.dtype), terms)
                    continue
                rows = queries if target.steps[0] else slice(None)
                columns = keys if target.steps[1] else slice(None)
                summed = tuple(axis for axis in (0, 1) if not target.steps[axis])
                gradient[rows, columns] += terms.sum(axis=summed, keepdims=True)

    def _indices(self, read: Node, positions: Place, dtype: np.dtype[Any]) -> list[Any]:
        names = dict(zip(("batch", "head", "q", "k", "shift"), positions))
        names |= {**self.score.numbers, **self.captured}
        return [evaluate(x, names, dtype)[0] for x in read.inputs]

    def add_sinks(self, sink: Any, lse: Floats, delta: Floats) -> None:
        """Add the share of the head's rows to the gradient of its sink."""
        for gradient in self.sinks:
            weighs = ~np.isneginf(lse) & ~np.isneginf(sink)
            terms = np.where(weighs, np.exp(sink - lse) * delta, 0)
            gradient -= terms.sum()
