"""Types of what `cuflash`'s functions take and return, for checkers such as mypy and pyright.

Arrays of NumPy and CuPy stay what they are: a call on arrays of NumPy returns arrays of NumPy, with
the element type where all operands have the same. CuPy has no types of its own yet, so that a
checker knows its arrays as Any; :class:`CupyArray` is what they will have to be. Types say nothing
of shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import (
    TYPE_CHECKING,
    Any,
    Literal,
    Protocol,
    SupportsIndex,
    TypeAlias,
    TypedDict,
    TypeVar,
)

import numpy as np
from numpy.typing import DTypeLike, NDArray

if TYPE_CHECKING:
    from .masks.block_mask import BlockMask
    from .scores.score_mod import ScoreMod

Algo: TypeAlias = Literal["fa1", "fa2", "fa3"]
Engine: TypeAlias = Literal["numpy", "simt", "mma", "wgmma"]
Alignment: TypeAlias = Literal["bottom_right", "top_left"]
Causal: TypeAlias = bool | np.bool_ | Alignment
Integer: TypeAlias = int | np.integer[Any]
Real: TypeAlias = float | np.floating[Any] | np.integer[Any]
Window: TypeAlias = SupportsIndex | tuple[SupportsIndex | None, SupportsIndex | None]
BlockSize: TypeAlias = SupportsIndex | tuple[SupportsIndex, SupportsIndex]
Shape: TypeAlias = tuple[SupportsIndex, ...]
Shapes: TypeAlias = Shape | tuple[Shape, Shape, Shape]  # of q, k and v
Dtypes: TypeAlias = DTypeLike | Iterable[DTypeLike]


class SupportsDLPack(Protocol):
    """An array that other libraries can take without a copy, of whatever library."""

    def __dlpack__(self, *, stream: Any = ...) -> Any: ...

    def __dlpack_device__(self) -> tuple[int, int]: ...


class SupportsCudaArrayInterface(Protocol):
    """An array on a GPU that says where it lies, as those of Numba do."""

    @property
    def __cuda_array_interface__(self) -> Mapping[str, Any]: ...


class Array(Protocol):
    """What arrays of NumPy and CuPy have in common."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Length of each axis."""

    @property
    def strides(self) -> tuple[int, ...]:
        """Bytes from one element to the next, of each axis."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """Type of the elements."""

    @property
    def ndim(self) -> int:
        """Number of axes."""

    @property
    def size(self) -> int:
        """Number of elements."""

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""

    @property
    def device(self) -> Any:
        """Where the array is: the word "cpu", or a device of CuPy."""

    @property
    def data(self) -> Any:
        """The memory of the array: a memoryview, or a pointer of CuPy."""

    def __len__(self) -> int: ...

    def __getitem__(self, key: Any, /) -> Any: ...

    def __setitem__(self, key: Any, value: Any, /) -> None: ...


class CupyArray(Array, SupportsCudaArrayInterface, Protocol):
    """What is known of arrays of CuPy, whether or not it is installed."""

    def get(self) -> NDArray[Any]:
        """A copy on the host."""


AnyArray: TypeAlias = Array | SupportsDLPack | SupportsCudaArrayInterface
# Of (score, batch, head, q, k) or (score, batch, head, q, k, shift), as it is traced.
ScoreFunction: TypeAlias = Callable[..., Any]
Names: TypeAlias = list[str] | tuple[str, ...]
Integers: TypeAlias = Integer | list[int] | tuple[int, ...] | AnyArray

_Gradients_co = TypeVar("_Gradients_co", covariant=True)


class Vjp(Protocol[_Gradients_co]):
    """The function that :func:`cuflash.attention_vjp` returns, by the type of the gradients."""

    def __call__(self, dout: AnyArray, dlse: AnyArray | None = None) -> _Gradients_co:
        """Gradients of q, k and v, and those of `wrt`, given that of `out` and, if it matters,
        that of `lse`.
        """


class MaskOptions(TypedDict, total=False):
    """Options that a forward and a backward call have in common; none has to be given."""

    causal: Causal
    window: Window | None
    mask: BlockMask | AnyArray | None
    bias: AnyArray | Real | None
    score_mod: ScoreMod | ScoreFunction | None
    softcap: Real | None
    alibi_slopes: AnyArray | Real | None
    sinks: AnyArray | Real | None
    q_lengths: Integers | None
    kv_lengths: Integers | None
    q_offset: Integers | None
    scale: Real | None
    enable_gqa: bool
    dropout_p: Real
    seed: Integer | AnyArray | None


class ForwardOptions(MaskOptions, total=False):
    """Options of :func:`cuflash.attention` but those that its result depends on."""

    algo: Algo | None
    engine: Engine | None
    split_keys: int | None
    page_table: AnyArray | None


class BackwardOptions(MaskOptions, total=False):
    """Options of :func:`cuflash.attention_backward` but arrays and where to write."""

    algo: Algo | None
    engine: Engine | None
    deterministic: bool


class VjpOptions(BackwardOptions, total=False):
    """Options of :func:`cuflash.attention_vjp` but `return_lse`."""

    split_keys: int | None
