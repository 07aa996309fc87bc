"""Gradients of the arrays that scores depend on, and how far from them a correct one may be."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from ..scores.evaluate import evaluate
from ..scores.score_mod import ADDED
from ..scores.wanted import as_names, scatter
from .bounds import TINY, UNIT_ROUNDOFF, factor_errors, name_of, precision, score_errors
from .dense import Dense, row_sums, value_gradient

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, DTypeLike, NDArray
    from typing_extensions import Unpack

    from ..scores.expression import Node
    from ..typing import Names
    from .dense import Floats, Scoring


def array_gradients(
    dense: Dense, dout: Floats, dlse: ArrayLike | None, wrt: tuple[str, ...]
) -> list[Floats]:
    """The gradients of the arrays of these names."""
    delta = row_sums(dense, dout, dlse)
    dP = np.where(dense.visible, value_gradient(dense, dout), 0)
    found = []
    for name in wrt:
        total = _zeros(dense, name)
        if name == "sinks":
            weights = _sink_weights(dense)
            _add(dense, total, name, None, np.where(weights == 0, 0, -weights * delta))
        for read in _reads(dense, name):
            terms = dense.weights * (dP - delta) * _slope(dense, read)
            _add(dense, total, name, read, np.where(dense.visible, terms, 0))
        found.append(total)
    return found


def array_bounds(
    dout: ArrayLike, q: ArrayLike, k: ArrayLike, v: ArrayLike, dtype: DTypeLike, *, wrt: Names,
    dlse: ArrayLike | None = None, **options: Unpack[Scoring],
) -> list[tuple[Floats, Floats]]:  # fmt: skip
    r"""The gradients of the arrays that `wrt` names, and how far from them correct ones may be.

    Parameters
    ----------
    dout, q, k, v, dtype, dlse, **options
        As in :func:`backward_bound`.
    wrt
        As in :func:`cuflash.attention_backward`.

    Notes
    -----
    Notation is that of :func:`backward_bound`. c is the derivative of s by the element, and c_error
    its error, by running error analysis (`cuflash.scores.errors`). ``dS = P (dP - delta)`` is
    kept in the type of sums; where P or dS is subnormal it may be flushed:
    ``under = 2^-126 (1 + |dP - delta|)``. Each of the n terms is off by::

        |c| [P (dP_error + delta_error) + |dS| (rho + 4 u_acc) + under] + 2 u_acc |c dS|
        + |dS| c_error,

    and their sum by u_acc (8 + sqrt n) sum |c dS| more. Of a sink the terms are those of rows,
    w delta with ``w = exp(sink - lse)``: w is off by a share of sigma + u_acc (8 + sqrt n), which
    lse is, and 6 u_acc max(1, |lse|, |sink|) for rounding both; rho is more. The bound is
    ``2 [error + u |gradient| + tiny]``, u and tiny those of the gradient's type.
    """
    name = name_of(dtype)
    _, u_acc, exact = precision(name)
    dense = Dense.of(q, k, v, exact, **options)
    grad = np.asarray(dout).astype(exact)
    with np.errstate(all="ignore"):
        delta, dP, dP_error, delta_error, rho = factor_errors(dense, grad, dlse, name)
        dS = np.where(dense.visible, dense.weights * (dP - delta), 0)
        dS_error = dense.weights * (dP_error + delta_error) + np.abs(dS) * (rho + 4 * u_acc)
        under = TINY["float32"] * (1 + np.abs(dP - delta))
        dS_error = np.where(dense.visible, dS_error + under, 0)
        gradients = array_gradients(dense, grad, dlse, as_names(wrt))
        bounds: list[tuple[Floats, Floats]] = []
        for own, gradient in zip(as_names(wrt), gradients):
            errors, sizes, count = (_zeros(dense, own) for _ in range(3))
            if own == "sinks":
                sinks, weights = dense.changes.sinks(exact), _sink_weights(dense)
                share = rho + 6 * u_acc * np.where(np.isfinite(sinks), np.abs(sinks), 0)
                error = weights * (delta_error + share * np.abs(delta))
                _add(dense, errors, own, None, np.where(weights > 0, error, 0))
                _add(dense, sizes, own, None, np.where(weights == 0, 0, weights * np.abs(delta)))
                _add(dense, count, own, None, np.where(weights > 0, exact(1), exact(0)))
            for read in _reads(dense, own):
                slope, slope_error = _slope_errors(dense, read, u_acc)
                terms = np.where(dense.visible, np.abs(slope * dS), 0)
                error = np.abs(slope) * dS_error + np.abs(dS) * slope_error + 2 * u_acc * terms
                _add(dense, errors, own, read, np.where(dense.visible, error, 0))
                _add(dense, sizes, own, read, terms)
                _add(dense, count, own, read, dense.visible.astype(exact))
            of_type = _arrays(dense)[own].dtype.name
            u, tiny = max(UNIT_ROUNDOFF[of_type], u_acc), max(TINY[of_type], TINY[name])
            errors += u_acc * (8 + np.sqrt(count)) * sizes
            bounds.append((gradient, 2 * (errors + u * np.abs(gradient) + tiny)))
    return bounds


def _arrays(dense: Dense) -> dict[str, NDArray[Any]]:
    """The arrays that scores depend on, by their names in `wrt`."""
    return dense.changes.given


def _zeros(dense: Dense, name: str) -> Floats:
    return np.zeros(_arrays(dense)[name].shape, dense.q.dtype)


def _sink_weights(dense: Dense) -> Floats:
    """exp(sink - lse), a column; 0 without a sink."""
    sinks = dense.changes.sinks(dense.q.dtype.type)
    weighs = ~np.isneginf(sinks) & ~np.isneginf(dense.lse[..., None])
    return np.where(weighs, np.exp(sinks - dense.lse[..., None]), 0)


def _reads(dense: Dense, name: str) -> Iterator[Node]:
    for node in dense.changes.score.form.nodes:
        yield from node.reads(name)


def _slope(dense: Dense, read: Node) -> Floats:
    changes, products = dense.changes, dense.scale * (dense.q @ dense.k.mT)
    return changes.score.linearize(products, **changes.names, arrays=changes.arrays, variable=read)[
        1
    ]


def _slope_errors(dense: Dense, read: Node, u_acc: float) -> tuple[Floats, Floats]:
    sigma = score_errors(dense, u_acc).before
    products = dense.scale * (dense.q @ dense.k.mT)
    found = dense.changes.errors(products, sigma, u_acc, read)
    shape = dense.visible.shape  # values may have leading axes that q and k have not
    return np.broadcast_to(found.slope, shape), np.broadcast_to(found.slope_error, shape)


def _add(dense: Dense, total: Floats, name: str, read: Node | None, terms: Floats) -> None:
    """Add what pairs, or rows of a sink, have for the elements that they read."""
    if name not in ADDED:
        assert read is not None
        changes = dense.changes
        names = {**changes.names, **changes.score.numbers, **changes.arrays}
        indices = [evaluate(x, names, terms.dtype)[0] for x in read.inputs]
        scatter(total, indices, terms)
        return
    if name != "bias":
        terms = terms.sum(axis=(-2, -1))
    own = (1,) * (terms.ndim - total.ndim) + total.shape
    summed = tuple(axis for axis, size in enumerate(own) if size == 1)
    total += terms.sum(axis=summed, keepdims=True).reshape(total.shape)
