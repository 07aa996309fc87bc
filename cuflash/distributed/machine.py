"""What estimates know of ranks and their connections."""

from __future__ import annotations

from typing import NamedTuple


class Machine(NamedTuple):
    """What a rank can do, and its connection; of H200s in one host unless given.

    Attributes
    ----------
    forward, backward : float
        Operations of products per second in attention.
    bandwidth : float
        Bytes per second that a rank sends while it receives as many.
    latency : float
        Seconds that a transfer takes beside its bytes.
    launch : float
        Seconds that a call takes beside its products.
    memory : float
        Bytes per second of device memory.
    """

    forward: float = 6.2e14
    backward: float = 5.0e14
    bandwidth: float = 3.0e11
    latency: float = 3.0e-5
    launch: float = 1.5e-5
    memory: float = 4.0e12
