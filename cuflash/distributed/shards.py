"""Which tokens of the whole sequence each rank has.

    contiguous, 4 ranks    0000 1111 2222 3333      zigzag    00 11 22 33 33 22 11 00

Under a causal mask later queries see more keys. With "zigzag" every rank has one early and one late
span, and as much work as any other.
"""

from __future__ import annotations

import functools
import itertools
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar, overload

import numpy as np

from ..calls.arrays import as_array
from ..operands.checks import checked_integer, is_one_of
from .communicator import check_communicator

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ..typing import AnyArray, Array, CupyArray
    from .communicator import Communicator

    Scalar = TypeVar("Scalar", bound=np.generic)
    Cupy = TypeVar("Cupy", bound=CupyArray)

Layout: TypeAlias = Literal["contiguous", "zigzag"]
Spans: TypeAlias = "tuple[range, ...]"

SPANS = {"contiguous": 1, "zigzag": 2}  # of a rank


def checked_layout(layout: object) -> str:
    """`layout` itself, if it is one."""
    if not is_one_of(layout, SPANS):
        raise ValueError(f"layout={layout!r}: give 'contiguous' or 'zigzag'")
    return str(layout)


def check_length(length: int, size: int, layout: str, multiple: int = 1, reason: str = "") -> None:
    """Raise a ValueError where a sequence cannot be shared out, that names the next that can."""
    step = SPANS[layout] * size * multiple
    if length % step:
        spans = f"{SPANS[layout] * size} spans of the same length"
        if multiple > 1:
            spans = f"{SPANS[layout] * size} spans of a multiple of {multiple} tokens{reason}"
        raise ValueError(
            f"{length} tokens on {size} ranks, layout={layout!r}: they must be {spans}; the next "
            f"length that is so is {-(-length // step) * step}"
        )


def spans(rank: int, size: int, layout: str, length: int) -> Spans:
    """The tokens of a rank in the order in which it has them."""
    count = SPANS[layout] * size
    numbers = (rank,) if count == size else (rank, count - 1 - rank)
    span = length // count
    return tuple(range(i * span, (i + 1) * span) for i in numbers)


def slice_of(span: range, axis: int) -> tuple[Any, ...]:
    """The index of a span of an axis, which counts from the end."""
    return (..., slice(span.start, span.stop), *(slice(None),) * (-axis - 1))


def local_spans(spans: Spans) -> Spans:
    """Where the tokens of each span lie in the rank's own arrays."""
    starts = np.cumsum([0, *map(len, spans)]).tolist()
    return tuple(range(a, b) for a, b in itertools.pairwise(starts))


def positions(length: int, comm: Communicator, layout: Layout = "contiguous") -> NDArray[np.int64]:
    """Where this rank's tokens are in the whole sequence.

    Parameters
    ----------
    length : int
        Tokens of the whole sequence.
    comm : Communicator
    layout : {"contiguous", "zigzag"}

    Returns
    -------
    ndarray of int64, shape (length / size,)

    Raises
    ------
    ValueError
        For a length that cannot be shared out.

    Examples
    --------
    >>> from cuflash.distributed import LocalComm
    >>> first, second = LocalComm.make(2)
    >>> positions(8, first, "zigzag"), positions(8, second, "zigzag")
    (array([0, 1, 6, 7]), array([2, 3, 4, 5]))
    """
    check_communicator(comm)
    wanted = "give how many tokens the whole sequence has, 0 or more"
    length = checked_integer("length", length, wanted)
    if length < 0:
        raise ValueError(f"length={length}: {wanted}")
    check_length(length, comm.size, checked_layout(layout))
    return np.concatenate(
        [np.arange(x.start, x.stop) for x in spans(comm.rank, comm.size, layout, length)]
    )


@overload
def shard(
    x: Cupy, comm: Communicator, axis: int = -2, layout: Layout = "contiguous"
) -> Cupy: ...  # fmt: skip
@overload
def shard(
    x: NDArray[Scalar], comm: Communicator, axis: int = -2, layout: Layout = "contiguous"
) -> NDArray[Scalar]: ...  # fmt: skip
@overload
def shard(
    x: AnyArray, comm: Communicator, axis: int = -2, layout: Layout = "contiguous"
) -> Array: ...  # fmt: skip
def shard(x: AnyArray, comm: Communicator, axis: int = -2, layout: Layout = "contiguous") -> Array:
    """The part of this rank of an array that holds the whole sequence.

    Parameters
    ----------
    x : array
        Of NumPy or CuPy, or one that speaks DLPack.
    comm : Communicator
    axis : int
        That of the tokens.
    layout : {"contiguous", "zigzag"}
        Rank r has the r-th of `size` spans, or spans r and `2 size - 1 - r` of `2 size`.

    Returns
    -------
    array
        A copy in C order.

    Raises
    ------
    ValueError
        For a length that cannot be shared out; the next one that can is named.

    Examples
    --------
    >>> import numpy as np
    >>> from cuflash.distributed import LocalComm
    >>> comms = LocalComm.make(2)
    >>> [shard(np.arange(8), comm, axis=0, layout="zigzag").tolist() for comm in comms]
    [[0, 1, 6, 7], [2, 3, 4, 5]]
    """
    check_communicator(comm)
    array: Any = as_array("x", x)
    axis = checked_axis(axis, array.ndim)
    check_length(array.shape[axis], comm.size, checked_layout(layout))
    return part_of(array, comm.rank, comm.size, axis, layout)  # type: ignore[no-any-return]


@overload
def unshard(
    x: Cupy, comm: Communicator, axis: int = -2, layout: Layout = "contiguous"
) -> Cupy: ...  # fmt: skip
@overload
def unshard(
    x: NDArray[Scalar], comm: Communicator, axis: int = -2, layout: Layout = "contiguous"
) -> NDArray[Scalar]: ...  # fmt: skip
@overload
def unshard(
    x: AnyArray, comm: Communicator, axis: int = -2, layout: Layout = "contiguous"
) -> Array: ...  # fmt: skip
def unshard(
    x: AnyArray, comm: Communicator, axis: int = -2, layout: Layout = "contiguous"
) -> Array:
    """The whole array, of which each rank has a part: on every rank.

    Parameters
    ----------
    x : array
        This rank's part, as :func:`shard` returns it.
    comm : Communicator
        All ranks call.
    axis, layout
        As of :func:`shard`.

    Returns
    -------
    array
        New, in C order.

    Raises
    ------
    ValueError
        On every rank, for shapes, types or layouts that differ or cannot be.
    RankError
        On every rank, where one fails or does not arrive.
    """
    check_communicator(comm)
    error: Exception | None = None
    facts = {}
    try:
        array: Any = as_array("x", x)
        axis = checked_axis(axis, array.ndim)
        check_length(array.shape[axis] * comm.size, comm.size, checked_layout(layout))
        facts = {
            "call": "unshard", "shape": str(array.shape), "dtype": str(array.dtype),
            "axis": str(axis), "layout": layout,
        }  # fmt: skip
    except Exception as found:
        error = found
    comm.agree(facts, error)
    with comm.working():
        return gathered(array, comm, axis, layout)  # type: ignore[no-any-return]


def gathered(array: Any, comm: Communicator, axis: int, layout: str) -> Any:
    """What :func:`unshard` returns, of arguments that are known to fit on all ranks."""
    mine = contiguous(array)
    parts = [mine if r == comm.rank else empty_like(mine, mine.shape) for r in range(comm.size)]
    others = [r for r in range(comm.size) if r != comm.rank]
    comm.start([(r, mine) for r in others], [(r, parts[r]) for r in others]).wait()
    return joined(parts, axis, layout)


def joined(parts: list[Any], axis: int, layout: str) -> Any:
    """The whole sequence of the parts of all ranks."""
    size, shape = len(parts), list(parts[0].shape)
    shape[axis] *= size
    whole = empty_like(parts[0], tuple(shape))
    for rank, part in enumerate(parts):
        own = spans(rank, size, layout, shape[axis])
        for local, span in zip(local_spans(own), own):
            whole[slice_of(span, axis)] = part[slice_of(local, axis)]
    return whole


def part_of(whole: Any, rank: int, size: int, axis: int, layout: str) -> Any:
    """A rank's part of an array of the whole sequence, contiguous."""
    own = spans(rank, size, layout, whole.shape[axis])
    shape = list(whole.shape)
    shape[axis] = sum(map(len, own))
    made = empty_like(whole, tuple(shape))
    for local, span in zip(local_spans(own), own):
        made[slice_of(local, axis)] = whole[slice_of(span, axis)]
    return made


def checked_axis(axis: int, axes: int) -> int:
    """`axis` counted from the end."""
    axis = checked_integer("axis", axis, "give that of the tokens, an integer")
    if not -axes <= axis < axes:
        raise ValueError(f"axis={axis}: the array has {axes} axes")
    return axis if axis < 0 else axis - axes


@functools.cache
def lines_module() -> ModuleType:
    """`cuflash.gpu.lines`, which imports CuPy: a CPU does without."""
    from ..gpu import lines

    return lines


def module_of(x: Any) -> Any:
    """NumPy or CuPy, whichever made the array."""
    if isinstance(x, np.ndarray):
        return np
    import cupy

    return cupy


def empty_like(x: Any, shape: tuple[int, ...], dtype: Any = None) -> Any:
    """An uninitialised array where `x` is."""
    return module_of(x).empty(shape, x.dtype if dtype is None else dtype)


def contiguous(x: Any) -> Any:
    """The array itself, or a copy in C order."""
    if isinstance(x, np.ndarray):
        return np.ascontiguousarray(x)
    return lines_module().contiguous(x)


def add_to(total: Any, part: Any) -> None:
    """`total += part`."""
    if isinstance(total, np.ndarray):
        np.add(total, part, out=total)
    else:
        lines_module().add_to(total, part)
