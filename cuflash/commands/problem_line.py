"""A problem on the command line: shapes, types and the options of :func:`cuflash.attention`."""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np

from ..compare.machine import DTYPES
from ..masks.band import ALIGNMENTS
from ..planning.plan import ALGOS, ENGINES

Shape = tuple[int, ...]


def add_problem(parser: argparse.ArgumentParser) -> None:
    """Add the options that describe a problem."""
    add = parser.add_argument
    add("--shape", type=_shape, metavar="B,H,N,D", required=True, help="of q")
    add("--keys", type=_shape, metavar="B,H,M,D", help="shape of k, by default that of q")
    add("--values", type=_shape, metavar="B,H,M,DV", help="shape of v, by default that of k")
    add("--dtype", nargs="+", choices=DTYPES, required=True)
    add("--backward", action="store_true", help="gradients, too")
    add("--any-order", dest="deterministic", action="store_false",
        help="gradients that need not be the same bits each time")  # fmt: skip
    add("--unaligned", dest="aligned", action="store_false",
        help="of arrays that do not start on multiples of 16 bytes")  # fmt: skip
    add("--algo", choices=ALGOS)
    add("--engine", choices=ENGINES)
    add("--causal", nargs="?", const=True, default=False, choices=ALIGNMENTS)
    add("--window", type=_window, metavar="LEFT,RIGHT", help="nothing for an open side: 256,")
    add("--softcap", type=float)
    add("--scale", type=float)
    add("--enable-gqa", action="store_true", help="q has a multiple of the heads of k and v")
    add("--split-keys", type=int, metavar="KEYS")
    add("--q-offset", type=int)
    add("--q-lengths", choices=("int32", "int64"), help="type of an array of lengths")
    add("--kv-lengths", choices=("int32", "int64"), help="type of an array of lengths")
    add("--sequences", type=int, metavar="B",
        help="packed ones, of int32 offsets: shapes are then T,H,D")  # fmt: skip
    add("--max-seqlen-q", type=int, metavar="N", help="the most queries of one")
    add("--max-seqlen-k", type=int, metavar="M", help="the most keys of one")


def take_problem(options: dict[str, Any]) -> tuple[Shape, Shape, Shape]:
    """The shapes of q, k and v, taken out of parsed `options`.

    Arrays stand for names in what is left: of lengths and offsets only shape and type count.
    """
    q: Shape = options.pop("shape")
    k: Shape = options.pop("keys") or q
    v: Shape = options.pop("values") or k
    sequences = options.pop("sequences")
    if sequences is not None:
        options["cu_seqlens_q"] = np.zeros(sequences + 1, np.int32)
    for name in ("q_lengths", "kv_lengths"):
        if options[name]:
            batch = np.broadcast_shapes(q[:-3], k[:-3], v[:-3])
            options[name] = np.zeros(batch if sequences is None else sequences, options[name])
    return q, k, v


def _shape(text: str) -> Shape:
    """Sizes from the command line."""
    try:
        return tuple(map(int, text.split(",")))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no shape, such as 4,16,4096,128") from None


def _window(text: str) -> tuple[int | None, ...]:
    """Both sides of a window from the command line; one number stands for both."""
    try:
        sides = tuple(int(side) if side else None for side in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no window, such as 256,0") from None
    return sides * 2 if len(sides) == 1 else sides
