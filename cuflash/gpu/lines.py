"""Copies and sums of arrays by lines: a line is what the last two axes have, in one piece.

CuPy's own look at all axes and types for each launch, and a rank's host has several in each call.
Needs CuPy and a GPU.
"""

from __future__ import annotations

import functools
import struct
from typing import Any, NamedTuple

import cupy
import numpy as np

WORD = 16  # bytes, which a thread moves
_THREADS = 256
_MOST_LINES = 65535  # of a grid's second axis

# By type: the header, two numbers, and what adds them with one rounding.
_PAIRS = {"float16": ("cuda_fp16.h", "__half2"), "bfloat16": ("cuda_bf16.h", "__nv_bfloat162")}

_ARGUMENTS = struct.Struct("5Q")
# A block takes the words from blockIdx.x * blockDim.x on of line blockIdx.y.
_HEAD = """
struct Lines {
    unsigned long long target, source;            // addresses
    unsigned long long target_step, source_step;  // words from one line to the next
    unsigned long long words;                     // of a line
};
extern "C" __global__ void NAME(const Lines lines) {
    const unsigned long long word = blockIdx.x * (unsigned long long)blockDim.x + threadIdx.x;
    if (word >= lines.words) return;
    uint4* const target = (uint4*)lines.target + blockIdx.y * lines.target_step + word;
    const uint4 source = ((const uint4*)lines.source)[blockIdx.y * lines.source_step + word];
"""
_COPY = _HEAD.replace("NAME", "copy_lines") + "    *target = source;\n}\n"
_ADD = (
    "#include <HEADER>\n"
    + _HEAD.replace("NAME", "add_lines")
    + """
    uint4 sum = *target;
    PAIR* const sums = reinterpret_cast<PAIR*>(&sum);
    const PAIR* const more = reinterpret_cast<const PAIR*>(&source);
    for (int i = 0; i < 4; ++i) sums[i] = __hadd2(sums[i], more[i]);
    *target = sum;
}
"""
)


class Lines(NamedTuple):
    """Where an array's lines lie; sizes are words."""

    address: int
    number: int
    words: int
    step: int


def lines_of(x: Any) -> Lines | None:
    """Those of an array; None where lines are in pieces, no whole words, or not equally spaced."""
    if x.ndim < 2:
        return None
    *leading, rows, columns = x.shape
    *strides, step_of_rows, step_of_columns = x.strides
    if step_of_columns != x.itemsize or step_of_rows != columns * x.itemsize:
        return None
    number, step, size = 1, 0, rows * columns * x.itemsize
    for n, stride in zip(reversed(leading), reversed(strides)):
        if n != 1:
            if number == 1:
                step = stride
            elif stride != number * step:
                return None
            number *= n
    if (x.data.ptr | size | step) % WORD or not 0 < number <= _MOST_LINES or step < 0:
        return None
    return Lines(x.data.ptr, number, size // WORD, step // WORD)


def contiguous(x: cupy.ndarray) -> cupy.ndarray:
    """The array itself, or a copy in C order."""
    if x.flags.c_contiguous:
        return x
    source = lines_of(x)
    if source is None or not source.words:
        return cupy.ascontiguousarray(x)
    copy = cupy.ndarray(x.shape, x.dtype)
    _run(_copy(), Lines(copy.data.ptr, source.number, source.words, source.words), source)
    return copy


def add_to(total: cupy.ndarray, part: cupy.ndarray) -> None:
    """`total += part` on the current stream; numbers of half a float are rounded once."""
    kernel = _add(total.dtype)
    if kernel is not None and total.dtype == part.dtype and total.shape == part.shape:
        target, source = lines_of(total), lines_of(part)
        if target is not None and source is not None and target.words:
            _run(kernel, target, source)
            return
    cupy.add(total, part, out=total)


def _run(kernel: Any, target: Lines, source: Lines) -> None:
    packed = _ARGUMENTS.pack(target.address, source.address, target.step, source.step, source.words)
    argument = np.frombuffer(packed, f"V{_ARGUMENTS.size}")
    kernel((-(-source.words // _THREADS), source.number), (_THREADS,), (argument,))


@functools.cache
def _copy() -> Any:
    return cupy.RawKernel(_COPY, "copy_lines")


@functools.cache
def _add(dtype: np.dtype[Any]) -> Any:
    """The kernel for a type; None where CuPy's is taken."""
    return cupy.RawKernel(sum_source(dtype), "add_lines") if dtype.name in _PAIRS else None


def sum_source(dtype: np.dtype[Any]) -> str:
    """What is compiled to add numbers of half a float."""
    header, pair = _PAIRS[dtype.name]
    return _ADD.replace("HEADER", header).replace("PAIR", pair)
