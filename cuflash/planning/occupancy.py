"""How many blocks of a kernel run on one multiprocessor at a time."""

from __future__ import annotations

from typing import NamedTuple

from .problem import Device
from .tile import round_up

WARP = 32  # threads
REGISTERS = 65536  # of a multiprocessor
PARTITIONS = 4  # of a multiprocessor, among which warps and registers are divided
REGISTER_STEP = 256  # registers that a warp takes at least, and by which it takes more


class Limits(NamedTuple):
    """What one multiprocessor holds: threads, blocks, and barriers; these are not counted if 0."""

    threads: int
    blocks: int
    barriers: int = 0


# By compute capability: CUDA C programming guide, table of technical specifications; barriers and
# the steps in which memory is given out as in the toolkit's cuda_occupancy.h.
LIMITS = {
    70: Limits(2048, 32), 72: Limits(2048, 32), 75: Limits(1024, 16),
    80: Limits(2048, 32), 86: Limits(1536, 16), 87: Limits(1536, 16), 88: Limits(1536, 16),
    89: Limits(1536, 24), 90: Limits(2048, 32, 64), 100: Limits(2048, 32, 64),
    103: Limits(2048, 32, 64), 110: Limits(1536, 24, 24), 120: Limits(1536, 24, 24),
    121: Limits(1536, 24, 24),
}  # fmt: skip


def blocks_in_shared_memory(device: Device, shared_bytes: int) -> int:
    """How many blocks of so much shared memory each it has room for on one multiprocessor."""
    # From 8.0 on the system keeps a KiB of each block's; a block may use all others.
    reserved, step = (1024, 128) if device.arch >= 80 else (0, 256)
    return (device.shared_bytes + reserved) // round_up(max(shared_bytes + reserved, 1), step)


def resident_blocks(
    device: Device, threads: int, registers: int, shared_bytes: int, barriers: int = 0
) -> int:
    """How many blocks of a kernel one multiprocessor holds.

    Parameters
    ----------
    device : Device
        Of a compute capability in `LIMITS`.
    threads : int
        Of a block.
    registers : int
        Of a thread.
    shared_bytes : int
        Of a block, static and dynamic ones.
    barriers : int
        Of a block.

    Examples
    --------
    >>> resident_blocks(Device(90), 128, registers=168, shared_bytes=49152)
    3
    >>> resident_blocks(Device(90), 128, registers=168, shared_bytes=98304)
    2
    """
    limits, warps = LIMITS[device.arch], -(-threads // WARP)
    of_warp = round_up(registers * WARP, REGISTER_STEP)
    in_registers = REGISTERS // PARTITIONS // of_warp * PARTITIONS // warps
    return min(
        limits.blocks,
        limits.threads // WARP // warps,
        in_registers,
        blocks_in_shared_memory(device, shared_bytes),
        limits.barriers // barriers if barriers and limits.barriers else limits.blocks,
    )
