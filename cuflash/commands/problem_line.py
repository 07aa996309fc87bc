"""A problem on the command line: shapes, types and the options of :func:`cuflash.attention`."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from ..compare.machine import DTYPES
from ..masks.band import ALIGNMENTS
from ..masks.block_mask import BlockMask
from ..operands.dtypes import CHUNK_BYTES
from ..operands.spec import Spec
from ..planning.plan import ALGOS, ENGINES
from ..scores.score_mod import ScoreMod

Shape = tuple[int, ...]

# Arrays of which shape and type count: the type where none is given, and what to say of them.
ARRAYS = {
    "bias": ("float32", "of an array that is added to scores: 16,4096,4096:bfloat16"),
    "alibi_slopes": ("float32", "such as 16"),
    "sinks": ("float32", "such as 16"),
    "page_table": ("int32", "as 4,64; --keys are then those of pools, and --kv-lengths are needed"),
}
ELEMENTS = DTYPES | {x: np.dtype(x) for x in ("bool", *(f"int{n}" for n in (8, 16, 32, 64)))}


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
    for name, (dtype, words) in ARRAYS.items():
        add(f"--{name.replace('_', '-')}", type=_array_of(dtype), metavar="SHAPE[:TYPE]",
            help=f"{words}; by default of {dtype}")  # fmt: skip
    add("--mask", type=_mask, metavar="SHAPE|blocks[:SIZE]",
        help="that of an array of bool, or a BlockMask of such blocks, 128 by default")  # fmt: skip
    add("--score-mod", metavar="EXPRESSION", help="such as 'score - slope * abs(q - k)'")
    add("--capture", type=_capture, action="append", default=[], metavar="NAME=NUMBER|SHAPE:TYPE",
        help="what the expression reads: slope=0.5, or table=16,16:float32")  # fmt: skip
    add("--dropout-p", type=float, default=0.0, metavar="P")
    add("--wrt", nargs="+", default=(), metavar="NAME",
        help="arrays whose gradients are asked for, too, such as bias")  # fmt: skip
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

    Arrays stand for names in what is left: only their shapes and types count.
    """
    for line, given in (("--wrt", options["wrt"]), ("--any-order", not options["deterministic"])):
        if given and not options["backward"]:
            raise ValueError(f"{line} goes with --backward")
    q: Shape = options.pop("shape")
    k: Shape = options.pop("keys") or q
    v: Shape = options.pop("values") or k
    sequences = options.pop("sequences")
    if sequences is not None:
        options["cu_seqlens_q"] = np.zeros(sequences + 1, np.int32)
    for name in ("q_lengths", "kv_lengths"):
        if options[name]:
            of_pages = options["page_table"] is not None
            batch = q[:-3] if of_pages else np.broadcast_shapes(q[:-3], k[:-3], v[:-3])
            options[name] = np.zeros(batch if sequences is None else sequences, options[name])
    if isinstance(options["mask"], int):
        lengths = _lengths(options, q, k, sequences is not None)
        options["mask"] = BlockMask.sliding_window(lengths, None, block_size=options["mask"])
    given, expression = options.pop("capture"), options["score_mod"]
    captures = dict(given)
    if len(captures) < len(given):
        raise ValueError("--capture: name each number or array once")
    if expression is not None:
        options["score_mod"] = ScoreMod(expression, **captures)
    elif captures:
        raise ValueError("--capture goes with --score-mod")
    return q, k, v


def placeholder(shape: Shape, dtype: np.dtype[Any], aligned: bool = True) -> np.ndarray[Any, Any]:
    """An array of this shape that has no memory: nobody may read it, and a plan does not."""
    if any(size < 0 for size in shape):
        raise ValueError(f"{shape} is no shape: sizes are 0 or more")
    memory = np.zeros(3 * CHUNK_BYTES, np.uint8)
    start = -memory.ctypes.data % CHUNK_BYTES + (0 if aligned else dtype.itemsize)
    item = memory[start : start + dtype.itemsize].view(dtype)
    spec = Spec.contiguous(shape, dtype)
    if not math.prod(shape):
        return np.zeros(shape, dtype)
    return np.lib.stride_tricks.as_strided(item, shape, spec.strides, writeable=False)


def _lengths(options: dict[str, Any], q: Shape, k: Shape, is_packed: bool) -> tuple[int, int]:
    """The most queries and keys that attend to each other."""
    most = options["max_seqlen_q"], options["max_seqlen_k"]
    queries, keys = (q[0], most[0] or k[0]) if is_packed else (q[-2:][0], k[-2:][0])
    if options["page_table"] is not None:
        keys = options["page_table"].shape[-1] * k[-2:][0]
    return most[0] or queries, most[1] or keys


def _mask(text: str) -> int | np.ndarray[Any, Any]:
    """An array of bool, or of a mask of blocks their size."""
    kind, _, size = text.partition(":")
    if kind != "blocks":
        return placeholder(_shape(text), ELEMENTS["bool"])
    if not (size or "128").isdecimal():
        raise argparse.ArgumentTypeError(f"{size!r} is no size of blocks, such as 128")
    return int(size or 128)


def _array_of(default: str) -> Callable[[str], np.ndarray[Any, Any]]:
    """What makes an array of a shape and a type on the command line."""

    def array(text: str) -> np.ndarray[Any, Any]:
        shape, _, dtype = text.partition(":")
        try:
            return placeholder(_shape(shape), ELEMENTS[dtype or default])
        except KeyError:
            known = ", ".join(ELEMENTS)
            raise argparse.ArgumentTypeError(f"{dtype!r} is no type: give one of {known}") from None

    return array


def _capture(text: str) -> tuple[str, Any]:
    """A name and what it stands for."""
    name, _, value = text.partition("=")
    if ":" in value:
        return name, _array_of("float32")(value)
    try:
        return name, int(value) if value.removeprefix("-").isdecimal() else float(value)
    except ValueError:
        wanted = "such as slope=0.5 or table=16,16:float32"
        raise argparse.ArgumentTypeError(f"{text!r} names no number or array, {wanted}") from None


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
