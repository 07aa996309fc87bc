"""What estimates know of ranks and their connections."""

from __future__ import annotations

from typing import NamedTuple


class Machine(NamedTuple):
    """What a rank can do, and its connection; of H200s in one host unless given.

    Attributes
    ----------
    forward, backward : float
        Operations of products per second in attention.
    bandwidth, network : float
        Bytes per second that a rank sends while it receives as many: to ranks of its host, and to
        those of others.
    host : int
        Ranks of a host: the first ones are of the first host, and so on.
    latency : float
        Seconds that a transfer takes beside its bytes.
    launch : float
        Seconds that a call takes beside its products.
    memory : float
        Bytes per second of device memory.
    """

    forward: float = 7.4e14
    backward: float = 5.5e14
    bandwidth: float = 3.0e11
    network: float = 5.0e10
    host: int = 8
    latency: float = 3.0e-5
    launch: float = 1.5e-5
    memory: float = 4.0e12

    def seconds(self, rank: int, other: int, count: int) -> float:
        """How long so many bytes take between two ranks."""
        near = rank // self.host == other // self.host
        return count / (self.bandwidth if near else self.network)

    def seconds_to_all(self, size: int, count: int) -> float:
        """How long it takes to send so many bytes to each other rank and receive as many."""
        near = min(self.host, size) - 1
        far = size - 1 - near
        return max(near * count / self.bandwidth, far * count / self.network)
