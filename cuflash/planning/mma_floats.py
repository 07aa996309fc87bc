"""The forward pass of float32 on the engine of tensor cores: tiles become planes of halves in
shared memory (docs/exact.md). A kernel of `simt` behind works on what these do not hold.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from importlib.resources import files

from . import simt
from .launches import Buffer, Launch
from .mma import MmaTile
from .problem import Device, Problem
from .tile import KernelTile

OF_GRAPHICS = 86, 89, 120, 121
EXCHANGE_BYTES = 272  # two floats of each lane, two of the warp, and what they end behind


@dataclass(frozen=True, kw_only=True)
class FloatMmaTile(MmaTile):
    """A row whose tiles become planes of halves."""

    dtypes: tuple[str, ...] = ("float32",)

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


_fa2 = partial(FloatMmaTile, algo="fa2")
_fa1 = partial(FloatMmaTile, algo="fa1")

# Rates are those of 4096 tokens on an H200; of rows for small shared memories they are guesses.
# fmt: off
ROWS = (
    _fa2(max_dim=64,  block_k=64, warps=8, slabs=2, stages=2,
         rate=90, item_time=4.0, start_time=17.0),
    _fa2(max_dim=64,  block_k=64, warps=8, slabs=1, stages=2,
         rate=70, item_time=4.0, start_time=17.0),
    _fa2(max_dim=64,  block_k=32, warps=4, slabs=1, stages=2, min_blocks=2,
         rate=55, item_time=4.0, start_time=17.0),
    _fa2(max_dim=128, block_k=32, warps=8, slabs=2, stages=2,
         rate=97, item_time=5.0, start_time=17.0),
    _fa2(max_dim=128, block_k=32, warps=8, slabs=1, stages=2,
         rate=77, item_time=5.0, start_time=17.0),
    _fa2(max_dim=128, block_k=32, warps=4, slabs=1, stages=1,
         rate=40, item_time=5.0, start_time=17.0),
    _fa2(max_dim=256, block_k=32, warps=8, slabs=1, stages=1,
         rate=71, item_time=6.0, start_time=17.0),
    _fa2(max_dim=256, block_k=32, warps=4, slabs=1, stages=1,
         rate=40, item_time=6.0, start_time=17.0),
    _fa1(max_dim=64,  block_k=128, warps=8, slabs=1, stages=2, step_k=32),
    _fa1(max_dim=128, block_k=64,  warps=8, slabs=1, stages=2, step_k=32),
    _fa1(max_dim=128, block_k=64,  warps=4, slabs=1, stages=2, step_k=32),
)
# fmt: on
