"""Gradients on Hopper's engine for short problems: the blocks of two kernels in one."""

from __future__ import annotations

from dataclasses import dataclass

from .hopper import PLAIN
from .launches import Buffer
from .problem import Device, Problem
from .wgmma_two_kernels import QUERIES, WgmmaKeysTile

MOST_WAVES = 1  # of blocks: behind the first one two more products cost more than they save


@dataclass(frozen=True, kw_only=True)
class WgmmaShortTile(WgmmaKeysTile):
    """A row for problems that leave multiprocessors idle, where a call takes as long as its kernels
    wait for memory and for each other.

    A block for dQ works out what it has to know of its queries, and reads nothing that blocks of
    others have written; one for dK and dV waits, when it has its tiles, for what is known of
    queries. As two kernels they would not run beside each other.
    """

    without: tuple[str, ...] = PLAIN

    @property
    def kernel(self) -> str:
        """Name of the kernel, and of its file."""
        return "hopper_backward_short"

    @property
    def side_by_side(self) -> bool:
        """Whether the kernel has blocks of two kinds, each with one item: yes."""
        return True

    def reject(self, problem: Problem, device: Device) -> str:
        """Why this row cannot or should not serve, or an empty string."""
        if problem.is_packed or problem.mask:
            return "for short problems: packed sequences and masks are not served"
        if problem.wrt:
            return "for short problems: gradients of arrays are not served"
        if reason := super().reject(problem, device):
            return reason
        if (blocks := self.blocks(problem)) > MOST_WAVES * device.multiprocessors:
            return f"for short problems: its {blocks} blocks do not run at a time"
        return ""

    def blocks(self, problem: Problem) -> int:
        """Thread blocks: tiles of keys, then tiles of queries, of all heads."""
        return super().blocks(problem) + self.queries.blocks(problem)

    def workspace(self, problem: Problem) -> tuple[Buffer, ...]:
        """Without what blocks of other kernels are told: each finds out by itself."""
        unused = "tickets", "located", "nonfinite_keys"
        parts = super().workspace(problem)
        return tuple(x._replace(tiles=0) if x.name in unused else x for x in parts)

    def constants(self, problem: Problem) -> dict[str, int | bool]:
        """Sizes that the kernels read."""
        return super().constants(problem) | {
            "V_STAGES": self.queries.value_stages(problem),
            "TICKETS": 0,
            "LOCATES_HEADS": False,
        }

    def products(self, problem: Problem) -> str:
        """Those of both kinds of blocks."""
        return f"{super().products(problem)}\n{self.queries.products(problem)}"


@dataclass(frozen=True, kw_only=True)
class WgmmaShortPackedTile(WgmmaKeysTile):
    """The same for packed sequences, as two kernels: where in the arrays a sequence lies is known
    too late for one.

    The sums are those of the one kernel, so gradients of a batch have the same bits when packed.
    """

    without: tuple[str, ...] = PLAIN

    def reject(self, problem: Problem, device: Device) -> str:
        """Why this row cannot or should not serve, or an empty string."""
        if not problem.is_packed:
            return "for short problems: those that are packed"
        return ROWS[0].reject(problem.typical, device) or super().reject(problem, device)


ROWS = (
    WgmmaShortTile(algo="fa2", max_dim=128, block_q=QUERIES),
    WgmmaShortPackedTile(algo="fa2", max_dim=128, block_q=QUERIES),
)
