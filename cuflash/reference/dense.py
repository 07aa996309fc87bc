"""A forward pass with its matrices: scores, weights and what is visible, of any precision."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..dropout import SEED_WANTED
from ..masks.band import MAX_SHIFT, Band, integers_of
from ..masks.block_mask import BlockMask
from ..operands.checks import array_of, checked_truth
from ..operands.spec import Spec
from ..scores.captured import captured_views, make_score, named_arrays
from ..scores.errors import Estimate, estimate
from ..scores.score import Score
from ..scores.trace import as_score_mod
from .dropout import dropout_keep

if TYPE_CHECKING:
    from typing import TypedDict

    from numpy.typing import ArrayLike, NDArray
    from typing_extensions import Unpack

    from ..scores.expression import Node
    from ..scores.score_mod import ScoreMod
    from ..typing import Causal, Real, ScoreFunction, Window

    Floats = NDArray[np.floating[Any]]
    Bools = NDArray[np.bool_]
    Float = type[np.floating[Any]]

    class Masking(TypedDict, total=False):
        """Options that say which keys a query sees."""

        causal: Causal
        window: Window | None
        mask: BlockMask | ArrayLike | None
        q_lengths: ArrayLike | None
        kv_lengths: ArrayLike | None
        q_offset: ArrayLike | None

    class Scoring(Masking, total=False):
        """And those that say what their scores are."""

        bias: ArrayLike | None
        score_mod: ScoreMod | ScoreFunction | None
        softcap: Real | None
        alibi_slopes: ArrayLike | None
        sinks: ArrayLike | None
        scale: Real | None
        enable_gqa: bool
        dropout_p: Real
        seed: int | None

    class Options(Scoring, total=False):
        """And those of a forward pass alone."""

        page_table: ArrayLike | None
        dtype: Float


def visible_keys(
    shape: tuple[int, ...],
    *,
    causal: Causal = False,
    window: Window | None = None,
    mask: BlockMask | ArrayLike | None = None,
    q_lengths: ArrayLike | None = None,
    kv_lengths: ArrayLike | None = None,
    q_offset: ArrayLike | None = None,
) -> Bools:
    """Which keys each query may attend to, as a bool array of `shape` (..., N, M).

    Lengths and offsets broadcast to the batch axes, which are all leading axes but the last one.

    Examples
    --------
    >>> visible_keys((2, 3), causal=True).astype(int)
    array([[1, 1, 0],
           [1, 1, 1]])
    """
    options: Masking = {"causal": causal, "window": window, "q_lengths": q_lengths}
    options |= {"kv_lengths": kv_lengths, "q_offset": q_offset}
    band, queries, keys, shift = _band_of(shape, options)
    i, j = np.arange(shape[-2])[:, None], np.arange(shape[-1])
    visible = (i < queries) & (j < keys)
    # No position is further from the diagonal than this, so a wider side hides nothing.
    widest = shape[-2] + shape[-1] + MAX_SHIFT
    if band.left is not None:
        visible = visible & (j >= i + shift - min(band.left, widest))
    if band.right is not None:
        visible = visible & (j <= i + shift + min(band.right, widest))
    if mask is not None:
        visible = visible & _elements(mask)
    return np.broadcast_to(visible, shape)


def _elements(mask: BlockMask | ArrayLike) -> Bools:
    """Those of a mask, as an array of bool."""
    elements = mask.to_dense() if isinstance(mask, BlockMask) else array_of("mask", mask)
    if elements.dtype != np.bool_:
        raise TypeError(f"mask has dtype {elements.dtype}: give bool, True for what is visible")
    return elements


def _band_of(
    shape: tuple[int, ...], mask: Masking
) -> tuple[Band, NDArray[np.int64], NDArray[np.int64], NDArray[np.int64] | int]:
    """The band of :func:`visible_keys`, valid queries and keys, and the shift."""
    q_offset = mask.get("q_offset")
    band = Band.from_options(mask.get("causal", False), mask.get("window"), q_offset)

    def of_batch(name: str, given: ArrayLike | None, low: int, high: int) -> NDArray[np.int64]:
        numbers = integers_of(name, high if given is None else given)
        if numbers.dtype.kind not in "iu":
            raise TypeError(f"{name} has dtype {numbers.dtype}: give integers")
        clamped = np.clip(numbers.astype(np.int64), low, high)
        # Behind the batch axes: heads, unless there is one matrix only, queries and keys.
        return clamped[(..., *[None] * min(len(shape), 3))]

    queries = of_batch("q_lengths", mask.get("q_lengths"), 0, shape[-2])
    keys = of_batch("kv_lengths", mask.get("kv_lengths"), 0, shape[-1])
    if q_offset is not None:
        return band, queries, keys, of_batch("q_offset", q_offset, -MAX_SHIFT, MAX_SHIFT)
    return band, queries, keys, keys - queries if band.alignment == "bottom_right" else 0


def visible_sum(weights: Floats, v: Floats, visible: Bools) -> Floats:
    """`weights @ v` over the visible keys only: 0 * NaN is NaN, so products are selected."""
    finite = np.isfinite(v).all(axis=-1, keepdims=True)
    total = weights @ np.where(finite, v, 0)
    others = np.where(finite, 0, v)
    for key in np.flatnonzero(~finite.all(axis=(*range(v.ndim - 2), -1))):
        product = weights[..., key, None] * others[..., None, key, :]
        total += np.where(visible[..., key, None], product, 0)
    return total


class Changes(NamedTuple):
    """What changes the scores of a pass, and where these are."""

    score: Score
    names: dict[str, Any]  # positions of all scores
    arrays: dict[str, NDArray[Any]]
    given: dict[str, NDArray[Any]]  # the same by their names, in their own shapes
    softcap: Real | None  # if nothing else does
    rows: Bools  # which queries exist

    @classmethod
    def of(
        cls, shape: tuple[int, ...], score_mod: ScoreMod | ScoreFunction | None,
        softcap: Real | None, added: dict[str, ArrayLike | None], mask: Masking,
    ) -> Changes:  # fmt: skip
        """Those that options make, for scores of `shape`."""
        mod = as_score_mod(score_mod)
        arrays = {name: np.asarray(x) for name, x in named_arrays(mod, added).items()}
        specs = {name: Spec(x.shape, x.strides, x.dtype) for name, x in arrays.items()}
        text = None if mod is None else mod.text
        score, captured = make_score(text, softcap, specs, shape[:-1], shape[-1], 1.0, "float64")
        _, queries, _, shift = _band_of(shape, mask)
        *batch, heads = shape[:-2] or (1,)
        number = np.arange(math.prod(batch)).reshape(batch)
        names: dict[str, Any] = {"batch": 0, "head": 0}
        if len(shape) > 2:
            names = {
                "batch": number[..., None, None, None],
                "head": np.arange(heads)[:, None, None],
            }
        q, k = np.arange(shape[-2])[:, None], np.arange(shape[-1])
        return cls(
            score,
            {**names, "q": q, "k": k, "shift": shift},
            captured_views(captured, arrays),
            {x.capture.name: arrays[x.operand] for x in captured},
            softcap if score.form.unit else None,
            np.broadcast_to(q < queries, (*shape[:-1], 1)),
        )

    def sinks(self, dtype: Float) -> Floats:
        """The sinks of all rows, -inf for none."""
        if not self.score.form.sink:
            return np.full((1, 1), -np.inf, dtype)
        place = self.names["batch"], self.names["head"]
        found = self.score.sinks(*place, self.arrays, np.dtype(dtype))
        return np.where(self.rows, found, -np.inf)

    def errors(
        self, products: Floats, error: Floats, u: float, variable: Node | None = None
    ) -> Estimate:
        """The changed scores of `scale * q.k`, which is off by `error`, with derivatives by it or
        by what a read of an array finds.
        """
        names = {**self.names, **self.score.numbers, **self.arrays}
        found = Estimate(products, error, np.ones_like(products), np.zeros_like(products))
        for node in self.score.form.nodes:
            if variable is not None and node.depends_on(variable):
                known = found._replace(slope=0.0, slope_error=0.0)
                found = estimate(node, names, known, u, variable)
                continue
            inner = estimate(node, names, found._replace(slope=1.0, slope_error=0.0), u)
            found = Estimate(
                inner.value, inner.error, inner.slope * found.slope,
                inner.slope_error * np.abs(found.slope)
                + np.abs(inner.slope) * found.slope_error,
            )  # fmt: skip
        return found


class Dense(NamedTuple):
    """A forward pass with its matrices, for operands of equally many heads."""

    q: Floats
    k: Floats
    v: Floats
    scale: np.floating[Any]
    visible: Bools  # False as well in rows without any weight
    changes: Changes  # of the scores
    slope: Floats  # of these
    weights: Floats  # 0 where not visible
    kept: Floats  # what dropout multiplies them by
    out: Floats
    lse: Floats

    @classmethod
    def of(
        cls,
        queries: ArrayLike,
        keys: ArrayLike,
        values: ArrayLike,
        dtype: Float,
        *,
        scale: Real | None = None,
        enable_gqa: bool = False,
        page_table: ArrayLike | None = None,
        dropout_p: Real = 0.0,
        seed: int | None = None,
        bias: ArrayLike | None = None,
        score_mod: ScoreMod | ScoreFunction | None = None,
        softcap: Real | None = None,
        alibi_slopes: ArrayLike | None = None,
        sinks: ArrayLike | None = None,
        **mask: Unpack[Masking],
    ) -> Dense:
        """The pass of these operands and options, in `dtype`."""
        q, k, v = (np.asarray(x).astype(dtype) for x in (queries, keys, values))
        exists: Bools | np.bool_ = np.True_
        if page_table is not None:
            (k, exists), (v, _) = (_gathered(x, page_table) for x in (k, v))
        if checked_truth("enable_gqa", enable_gqa):
            k, v = (_repeated(x, *q.shape[-3:-2]) for x in (k, v))
        leading = np.broadcast_shapes(q.shape[:-2], k.shape[:-2], v.shape[:-2])
        shape = (*leading, q.shape[-2], k.shape[-2])
        visible = visible_keys(shape, **mask) & exists
        added = {"bias": bias, "sinks": sinks, "alibi_slopes": alibi_slopes}
        changes = Changes.of(shape, score_mod, softcap, added, mask)
        # NaN and infinity follow IEEE arithmetic, without the warnings.
        with np.errstate(all="ignore"):
            factor = 1 / np.sqrt(dtype(q.shape[-1])) if scale is None else dtype(scale)
            scores: Floats = factor * (q @ k.mT)
            scores, slope = changes.score.linearize(scores, **changes.names, arrays=changes.arrays)
            if changes.score.form.hides:
                visible = visible & ~np.isneginf(scores)
            scores = np.where(visible, scores, -np.inf)
            sink = changes.sinks(dtype)
            top = np.maximum(scores.max(axis=-1, keepdims=True, initial=-np.inf), sink)
            origin = np.where(np.isneginf(top), 0, top)
            weights = np.exp(scores - origin)
            own = weights.sum(axis=-1, keepdims=True)
            visible = visible & (own != 0)
            sums = own + np.exp(np.where(sink == origin, 0, sink - origin))
            weights = np.where(visible, weights / sums, 0)
            kept = _dropout(shape, dropout_p, seed, dtype)
            out, lse = visible_sum(weights * kept, v, visible), (top + np.log(sums))[..., 0]
        return cls(q, k, v, factor, visible, changes, slope, weights, kept, out, lse)

    @property
    def kept_weights(self) -> Floats:
        """What dV sums by: nothing where dropout keeps nothing, also of a row with NaN."""
        return np.where(self.kept == 0, 0, self.weights * self.kept)


def _dropout(shape: tuple[int, ...], dropout_p: Real, seed: int | None, dtype: Float) -> Floats:
    """What dropout multiplies softmax weights of `shape` by."""
    if not dropout_p:
        return np.ones((1, 1), dtype)
    if seed is None:
        raise ValueError(f"dropout_p={dropout_p!r} goes with seed: {SEED_WANTED}")
    kept = dropout_keep(seed, shape, dropout_p)
    return np.where(kept, 1 / (1 - dtype(dropout_p)), dtype(0))


def _gathered(pool: Floats, page_table: ArrayLike) -> tuple[Floats, Bools]:
    """The keys of all batch entries, page after page, and which of them are on a page at all."""
    table = np.asarray(page_table)
    exists = (table >= 0) & (table < len(pool))
    pages = np.zeros((*table.shape, *pool.shape[1:]), pool.dtype)
    pages[exists] = pool[table[exists]]
    batch, _, heads, page_size, columns = pages.shape
    rows = pages.swapaxes(1, 2).reshape(batch, heads, -1, columns)
    return rows, np.repeat(exists, page_size, axis=1)[:, None, None]


def _repeated(x: Floats, heads: int = 1) -> Floats:
    """Repeat the heads of `x` until there are `heads`, unless they broadcast anyway."""
    if x.ndim < 3 or heads <= x.shape[-3]:
        return x
    return np.repeat(x, heads // (x.shape[-3] or 1), axis=-3)


def row_sums(dense: Dense, dout: Floats, dlse: ArrayLike | None) -> Floats:
    """The deltas of :func:`attention_backward`, a column."""
    delta: Floats = (dout * dense.out).sum(axis=-1, keepdims=True)
    return delta if dlse is None else delta - np.asarray(dlse).astype(dout.dtype)[..., None]


def value_gradient(dense: Dense, dout: Floats) -> Floats:
    """The dP of :func:`attention_backward`."""
    return np.where(dense.kept == 0, 0, dout @ dense.v.mT * dense.kept)


def score_gradient(dense: Dense, dout: Floats, delta: Floats) -> Floats:
    """The dS of :func:`attention_backward`."""
    gradient = dense.weights * (value_gradient(dense, dout) - delta) * dense.slope
    return np.where(dense.visible, gradient, 0)


def own_sum(gradient: NDArray[Any], shape: tuple[int, ...]) -> NDArray[Any]:
    """Sum over the heads that share a row of an operand of `shape`, broadcast or grouped."""
    leading = gradient.shape[:-2]
    kept = (*[1] * (len(leading) + 2 - len(shape)), *shape[:-2])
    split = [
        n for total, own in zip(leading, kept, strict=True) for n in (own, total // (own or 1))
    ]
    sharing = tuple(range(1, len(split), 2))
    own_sum: NDArray[Any] = gradient.reshape(*split, *gradient.shape[-2:]).sum(axis=sharing)
    return own_sum.reshape(shape)
