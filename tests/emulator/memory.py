"""Emulated device memory: guarded copies of NumPy arrays, and software tensor maps."""

import struct

import numpy as np

from . import build


def _owner(array):
    """The array at the end of the chain of bases, whose buffer holds ``array``."""
    owner = array
    while (array := getattr(array, "base", None)) is not None:
        if isinstance(array, np.ndarray):
            owner = array
    return owner


def _bounds(array):
    """First and past-the-last byte address that ``array`` covers."""
    low = high = array.__array_interface__["data"][0]
    if array.size == 0:
        return low, low
    for length, stride in zip(array.shape, array.strides, strict=True):
        reach = (length - 1) * stride
        low, high = (low + reach, high) if reach < 0 else (low, high + reach)
    return low, high + array.itemsize


class Memory:
    """Buffers of emulated device memory, each ending at a page that cannot be accessed.

    Buffers live until the object is closed or collected, over any number of launches.
    """

    def __init__(self):
        self._runtime = build.runtime()
        self._placed = {}  # id of the owner -> (owner, host address, emulated address, bytes)

    def place(self, array, initialised=True):
        """Copy the buffer behind ``array`` in, once; return the address of array's first element.

        Parameters
        ----------
        array : numpy.ndarray
            Any array or view. Views of one owner share one emulated buffer.
        initialised : bool
            False: the contents do not count. Bytes are 0xff (NaN), and check mode reports reads
            of what the kernel has not written.
        """
        owner = _owner(array)
        if id(owner) not in self._placed:
            low, high = _bounds(owner)
            address = self._runtime.emu_allocate(
                high - low, int(initialised), int(not owner.flags.writeable)
            )
            if not address:
                raise MemoryError(f"no room for {high - low} bytes of emulated memory")
            if initialised:
                build.copy(address, low, high - low)
            self._placed[id(owner)] = owner, low, address, high - low
        _, low, address, size = self._placed[id(owner)]
        first, last = _bounds(array)
        if first < low or last > low + size:
            raise ValueError(f"view of shape {array.shape} reaches outside the array that owns it")
        return address + array.__array_interface__["data"][0] - low

    def fetch(self):
        """Copy the contents back into the arrays (read-only arrays are left alone)."""
        for owner, low, address, size in self._placed.values():
            if owner.flags.writeable:
                build.copy(low, address, size)

    def close(self):
        """Give the buffers back; addresses become invalid."""
        for _, _, address, _ in self._placed.values():
            self._runtime.emu_release(address)
        self._placed = {}

    def __del__(self):
        if getattr(self, "_placed", None):
            self.close()


_SWIZZLE_MODES = {0: 0, 128: 1, 64: 2, 32: 3}
_TENSOR_MAP_MAGIC = 0x7AB1E  # also in copies.cpp


class TensorMap:
    """What ``cuTensorMapEncodeTiled`` makes, for launches on the emulator.

    Parameters
    ----------
    array : numpy.ndarray
        Its first element is the tensor's origin; its dtype gives the element size.
    dims : sequence of int
        Lengths in elements, innermost dimension first, at most five.
    strides : sequence of int
        Bytes between elements of dims[1:], each a multiple of 16.
    box : sequence of int
        Elements of one copied box, per dimension.
    swizzle : int
        Span in bytes: 0 (none), 32, 64 or 128.
    """

    def __init__(self, array, dims, strides, box, swizzle=128):
        dims, strides, box = list(dims), list(strides), list(box)
        rank = len(dims)
        if not 1 <= rank <= 5 or len(strides) != rank - 1 or len(box) != rank:
            raise ValueError(f"{rank} dims, {len(strides)} strides and {len(box)} box lengths")
        if any(stride % 16 for stride in strides):
            raise ValueError(f"strides must be multiples of 16 bytes, got {strides}")
        if any(not 1 <= length <= 256 for length in box):
            raise ValueError(f"box lengths must lie between 1 and 256, got {box}")
        if any(not 1 <= length < 2**32 for length in dims):
            raise ValueError(f"dims must lie between 1 and 2**32 - 1, got {dims}")
        width = box[0] * array.itemsize
        if width % 16 or (swizzle and width > swizzle):
            raise ValueError(f"box is {width} bytes wide: not a multiple of 16 up to the swizzle")
        if swizzle not in _SWIZZLE_MODES:
            raise ValueError(f"swizzle must be 0, 32, 64 or 128, got {swizzle}")
        self.array, self.dims, self.strides, self.box = array, dims, strides, box
        self.swizzle = swizzle

    def pack(self, memory):
        """The 128 bytes that the kernel gets by value."""
        address = memory.place(self.array)
        if address % 16:
            raise ValueError("the tensor's address is not a multiple of 16 bytes")
        rank = len(self.dims)
        fields = struct.pack(
            "<QI4B5I4x4Q5H",
            address,
            _TENSOR_MAP_MAGIC,
            rank,
            self.array.itemsize,
            _SWIZZLE_MODES[self.swizzle],
            int(self.array.dtype == np.float32),
            *self.dims + [1] * (5 - rank),
            *self.strides + [0] * (5 - rank),
            *self.box + [1] * (5 - rank),
        )
        return fields.ljust(128, b"\0")
