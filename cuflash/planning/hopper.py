"""What the rows of Hopper's engine have in common: wgmma on halves, tiles that the copy engine
brings (sm_90a).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from ..operands.dtypes import HALF
from .problem import Device, Problem
from .tile import KernelTile, round_up

if TYPE_CHECKING:
    from ..typing import Engine

WARPGROUP = 128  # threads
WARPGROUP_ROWS = 64
BARRIER_BYTES = 1024  # of shared memory, with what else is not tiles


@dataclass(frozen=True, kw_only=True)
class HopperTile(KernelTile):
    """A row whose warpgroups have 64 rows each; four more warps copy tiles.

    Parameters
    ----------
    modified : bool
        Whether there are registers to change scores in.
    loads : bool
        Whether there are registers to load an element of an array in for each query or key.
    drops : bool
        Whether there are registers for dropout.
    """

    engine: ClassVar[Engine] = "wgmma"
    compile_options: ClassVar[tuple[str, ...]] = ("-arch=sm_90a",)

    dtypes: tuple[str, ...] = HALF
    modified: bool = True
    loads: bool = True
    drops: bool = True

    def stages_rows(self, problem: Problem) -> bool:
        """Whether elements of an array for each query and key come by way of shared memory."""
        return False

    @property
    def threads(self) -> int:
        """Threads of one block."""
        return 32 * self.warps + WARPGROUP

    @property
    def finds_regions(self) -> bool:
        """Whether its kernels find out which packed sequence a tile is of."""
        return True

    def reject(self, problem: Problem, device: Device) -> str:
        """Why this row cannot or should not serve, or an empty string."""
        if problem.score.stages and not self.modified:
            return "has no registers for modified scores"
        if problem.score.loads and not (self.loads or self.stages_rows(problem)):
            return "has no registers for elements of arrays"
        if problem.dropout and not self.drops:
            return "has no registers for dropout"
        return super().reject(problem, device)

    def missing(self, problem: Problem, device: Device) -> str:
        """What the device or the operands lack, or an empty string."""
        if device.arch != 90:
            return f"needs sm_90, the device is sm_{device.arch}"
        if not device.has_features:
            return "needs NVRTC 12.9 or later"
        if problem.head_dim % 8 or problem.value_dim % 8:
            return "serves head dims that are multiples of 8"
        return problem.unmappable if problem.aligned else "needs rows aligned to 16 bytes"

    def widths(self, problem: Problem) -> tuple[int, int]:
        """Columns of a query or key row and of a value row, in steps of the narrowest swizzle."""
        return round_up(problem.head_dim, 32), round_up(problem.value_dim, 32)
