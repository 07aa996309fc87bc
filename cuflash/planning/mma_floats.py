"""The forward pass of float32 on the engine of tensor cores: tiles become planes of halves in
shared memory (docs/exact.md). A kernel of `simt` behind works on what these do not hold.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from importlib.resources import files

from . import simt
from .kernel_tile import KernelTile
from .launches import Buffer, Launch
from .mma import MmaTile
from .occupancy import blocks_in_shared_memory
from .planes import DEPENDS_ON_TILES, plane_constants, planes_time, tile_buffers, tile_launches
from .problem import Device, Problem

OF_GRAPHICS = 86, 89, 120, 121
EXCHANGE_BYTES = 272  # two floats of each lane, four of the warp


def too_crowded(blocks: int, shared_bytes: int, device: Device) -> str:
    """Why so many blocks with that much shared memory each have no room on a multiprocessor, or an
    empty string.
    """
    if blocks <= blocks_in_shared_memory(device, shared_bytes):
        return ""
    return f"{blocks} blocks with {shared_bytes} bytes of shared memory each have no room"


@dataclass(frozen=True, kw_only=True)
class FloatMmaTile(MmaTile):
    """A row whose tiles become planes of halves."""

    dtypes: tuple[str, ...] = ("float32",)

    @property
    def slab_rows(self) -> int:
        """Rows of a tile that take as long together as one of them: making planes of keys and
        values takes as long for all.
        """
        return self.block_q

    @property
    def behind(self) -> simt.SimtTile:
        """The row of the kernel that works on what this one leaves out, with the same tiles."""
        return simt.behind(self)

    @property
    def name_behind(self) -> str:
        """And the name of that kernel, which is this one's file for FMA units."""
        return f"{self.kernel}_behind"

    def exchange_bytes(self, problem: Problem) -> int:
        """What a warp keeps in shared memory instead of in registers."""
        return EXCHANGE_BYTES

    def reject(self, problem: Problem, device: Device) -> str:
        """Why this row cannot or should not serve, or an empty string."""
        if reason := super().reject(problem, device):
            return reason
        shared = self.behind.shared_bytes(problem)
        if shared > device.shared_bytes:
            return (
                f"the kernel behind needs {shared} bytes of shared memory, the device has "
                f"{device.shared_bytes}"
            )
        return ""

    def slowdown(self, device: Device) -> float:
        """Of chips for graphics tensor cores multiply halves twice as fast as FMA units floats, or
        four times: too little for three products. Those that rates are of do so 16 times as fast.
        """
        return 4.0 if device.arch in OF_GRAPHICS else 1.0

    def state_numbers(self, problem: Problem) -> int:
        """With dropout the largest weight that the row keeps as well."""
        return super().state_numbers(problem) + problem.dropout

    def workspace(self, problem: Problem) -> tuple[Buffer, ...]:
        """Which blocks leave their rows to the kernel behind."""
        return (*super().workspace(problem), Buffer("again", 4, self.blocks(problem)))

    def around(self, problem: Problem, main: Launch) -> tuple[Launch, ...]:
        """What is left out comes last."""
        threads, shared = self.behind.threads, self.behind.shared_bytes(problem)
        return main, Launch(self.name_behind, main.grid, threads, shared)

    def of_kernel(self, kernel: str) -> KernelTile:
        """The row that has the sizes of one of the kernels."""
        return self.behind if kernel == self.name_behind else super().of_kernel(kernel)

    def kernel_text(self, kernel: str) -> str | None:
        """CUDA C of the kernel behind, which is that of `simt` by another name."""
        if kernel != self.name_behind:
            return super().kernel_text(kernel)
        file = files(__package__.partition(".")[0]) / "kernels" / f"{self.kernel}.cu"
        return file.read_text().replace(f"{self.kernel}(", f"{kernel}(")


@dataclass(frozen=True, kw_only=True)
class MadePlanesTile(FloatMmaTile):
    """A row for which planes of keys and values are made before, once for all blocks."""

    varied: bool = False  # few queries are worked on for as long as planes take

    def __str__(self) -> str:
        return f"{super().__str__()}, planes made before"

    @property
    def reads_pages(self) -> bool:
        """Whether keys may lie in pages."""
        return False

    def reject(self, problem: Problem, device: Device) -> str:
        """Why this row cannot or should not serve, or an empty string."""
        if not problem.aligned:
            return "makes planes of rows whose elements can be read 4 at a time"
        if problem.split_keys:
            return DEPENDS_ON_TILES
        if reason := super().reject(problem, device):
            return reason
        return too_crowded(self.min_blocks, self.shared_bytes(problem), device)

    def extra_time(self, problem: Problem) -> float:
        """Microseconds of the kernel that makes planes."""
        return planes_time(problem, self.widths(problem))

    def workspace(self, problem: Problem) -> tuple[Buffer, ...]:
        """Planes, what is known of them, and marks, of which a block of AGAIN_ROWS queries or more
        has one.
        """
        own = super(FloatMmaTile, self).workspace(problem)
        return (*own, *tile_buffers(problem, self.widths(problem), self.block_k))

    def around(self, problem: Problem, main: Launch) -> tuple[Launch, ...]:
        """Planes come first."""
        first = tile_launches(problem, self.widths(problem), self.block_k)
        return (*first, *super().around(problem, main))

    def constants(self, problem: Problem) -> dict[str, int | bool]:
        """Sizes that the kernels read."""
        own = plane_constants(problem, self.widths(problem), self.block_k)
        return super().constants(problem) | own | {"PLANES_ARE_MADE": True}


_fa2 = partial(FloatMmaTile, algo="fa2")
_made = partial(MadePlanesTile, algo="fa2")
_fa1 = partial(FloatMmaTile, algo="fa1")

# Measured on an H200 (2026-11-27), but for the start of those in place: with that few scores stay
# on FMA units, which are up to 2 us faster there.
# fmt: off
ROWS = (
    _made(max_dim=64,  block_k=64, warps=4, slabs=2, stages=1, min_blocks=2,
          rate=128, item_time=6.9, start_time=22.8),
    _made(max_dim=80,  block_k=64, warps=4, slabs=2, stages=1, min_blocks=2, load_unroll=1,
          rate=124, item_time=8.1, start_time=21.8),
    _made(max_dim=128, block_k=32, warps=4, slabs=2, stages=1, min_blocks=2, load_unroll=8,
          rate=124, item_time=9.9, start_time=25.2),
    _made(max_dim=128, block_k=32, warps=8, slabs=1, stages=2, load_unroll=8,
          rate=101, item_time=7.2, start_time=18.6),
    _made(max_dim=256, block_k=32, warps=8, slabs=1, stages=1, load_unroll=8,
          rate=108, item_time=12.4, start_time=23.7),
    _fa2(max_dim=64,  block_k=64, warps=8, slabs=2, stages=2,
         rate=95, item_time=7.2, start_time=17.0),
    _fa2(max_dim=64,  block_k=64, warps=8, slabs=1, stages=2,
         rate=78, item_time=4.3, start_time=17.0),
    _fa2(max_dim=64,  block_k=32, warps=4, slabs=1, stages=2, min_blocks=2,
         rate=63, item_time=3.3, start_time=17.0),
    _fa2(max_dim=128, block_k=32, warps=8, slabs=2, stages=2,
         rate=103, item_time=10.3, start_time=17.0),
    _fa2(max_dim=128, block_k=32, warps=8, slabs=1, stages=2,
         rate=79, item_time=6.5, start_time=17.0),
    _fa2(max_dim=128, block_k=32, warps=4, slabs=1, stages=1,
         rate=70, item_time=3.1, start_time=17.0),
    _fa2(max_dim=256, block_k=32, warps=8, slabs=1, stages=1,
         rate=79, item_time=11.0, start_time=17.0),
    _fa2(max_dim=256, block_k=32, warps=4, slabs=1, stages=1,
         rate=43, item_time=7.0, start_time=17.0),
    _fa1(max_dim=64,  block_k=128, warps=8, slabs=1, stages=2, step_k=32),
    _fa1(max_dim=128, block_k=64,  warps=8, slabs=1, stages=2, step_k=32),
    _fa1(max_dim=128, block_k=64,  warps=4, slabs=1, stages=2, step_k=32),
)
# fmt: on
