"""The groups of against_peers.py about what changes scores, and what it costs.

`costs` holds each feature against the same causal call without it, forward and backward. `flex`
holds functions of FlexAttention's documentation against FlexAttention itself.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np
from benchmarks import gpu as bench
from benchmarks.gpu import Backward, Problem
from features import FEATURES, SOFTCAP, distance, slopes
from peer_rows import Session

import cuflash

SHAPES = ((4, 16, 4096, 128),), ((4, 32, 4096, 64),)
PREFIX, DOCUMENTS = 1024, 12
PLAIN = "plain"


def costs(s: Session) -> None:
    """Each feature against the same causal call without it."""
    for (shape,) in s.asked(SHAPES):
        for kind in (Problem, Backward):
            plain = kind(shape, "bf16", True, "bnhd")
            for name, feature in FEATURES.items():
                if kind is Backward or not feature.wrt:
                    _cost(s, plain, kind, name, feature)
                bench.release()
            del plain


def _cost(s: Session, plain, kind, name, feature) -> None:
    problem = kind(plain.shape, plain.dtype, True, plain.layout, **feature.options(plain.shape))
    problem.others = (PLAIN,)
    limits = feature.forward if kind is Problem else feature.backward
    most = limits and limits[plain.shape[3]]
    mine, more = f"{name}, {problem.chosen()}", {}
    if feature.wrt:
        into = [x.cupy for x in problem.results]
        into += [bench.need_gpu().empty_like(problem.options[x]) for x in feature.wrt]
        more = {"wrt": feature.wrt, "grads_out": tuple(into)}
    contenders = {mine: problem.ours(None, **more), PLAIN: plain.ours(None)}
    s.compare_pairs("costs", problem, contenders, [(mine, PLAIN, most and 1 / most)])


class Function(NamedTuple):
    """A function of a score or of visibility, in cuflash's words and in FlexAttention's."""

    options: Any  # cuflash's, of the shape
    score: Any = None  # score_mod in torch, of the shape
    shown: Any = None  # mask_mod in torch, of the shape


def _causal(shape):
    return lambda b, h, q, k: q >= k


def _distance_in_torch(shape):
    slope = bench.Operand(slopes(shape[1])).torch
    return lambda score, b, h, q, k: score + slope[h] * (k - q)


def _cap_in_torch(shape):
    tanh = bench.need_torch().tanh
    return lambda score, b, h, q, k: SOFTCAP * tanh(score / SOFTCAP)


def _document_of(length: int):
    """The number of each token's document, of random lengths, on the device."""
    ends = np.sort(np.random.default_rng(0).choice(length, DOCUMENTS - 1, replace=False))
    return bench.need_gpu().asarray(np.searchsorted(ends, np.arange(length), "right"), np.int32)


def _mask_of(function, length: int) -> dict:
    return {"mask": cuflash.BlockMask.from_function(function, (length, length))}


def _documents(shape):
    documents = _document_of(shape[2]).get()
    return _mask_of(lambda b, h, q, k: (documents[q] == documents[k]) & (q >= k), shape[2])


def _documents_in_torch(shape):
    documents = bench.Operand(_document_of(shape[2])).torch
    return lambda b, h, q, k: (documents[q] == documents[k]) & (q >= k)


def _sees_prefix(b, h, q, k):
    return (q >= k) | (k < PREFIX)


FUNCTIONS = {
    "relative": Function(
        lambda x: {"score_mod": lambda score, batch, head, q, k: score + (q - k)},
        lambda x: lambda score, b, h, q, k: score + (q - k),
    ),
    "alibi": Function(
        lambda x: {"causal": True, "score_mod": distance(x)}, _distance_in_torch, _causal
    ),
    "softcap": Function(lambda x: {"causal": True, "softcap": SOFTCAP}, _cap_in_torch, _causal),
    "documents": Function(_documents, shown=_documents_in_torch),
    "prefix": Function(lambda x: _mask_of(_sees_prefix, x[2]), shown=lambda x: _sees_prefix),
}


def flex(s: Session) -> None:
    """Functions of FlexAttention's documentation, against it."""
    for (shape,) in s.asked(SHAPES):
        for name, function in FUNCTIONS.items():
            for kind in (Problem, Backward):
                _against_flex(s, kind, shape, name, function)
                bench.release()


def _against_flex(s: Session, kind, shape, name, function) -> None:
    options = function.options(shape)
    problem = kind(shape, "bf16", options.pop("causal", False), "bnhd", **options)
    words = [f(shape) if f else None for f in (function.score, function.shown)]
    compiled = functools.cache(lambda: bench.flex_function(*words, shape[2]))
    if kind is Backward:
        theirs = bench.gradients(lambda *x: compiled()(*x), *problem.operands)
    else:
        tensors = [x.torch for x in problem.operands]
        theirs = lambda: compiled()(*tensors)  # noqa: E731
    mine = f"{name}, {problem.chosen()}"
    contenders = {mine: problem.ours(None), "FlexAttention": theirs}
    s.compare_pairs("flex", problem, contenders, [(mine, "FlexAttention", 1.2)])
