"""Events between streams. Needs CuPy."""

from __future__ import annotations

import cupy


class Mark:
    """The place that the current stream has come to, for others to wait for."""

    def __init__(self) -> None:
        self.event = cupy.cuda.Event(disable_timing=True)
        self.event.record()

    def wait_here(self) -> cupy.cuda.Stream:
        """Let the current stream wait until the other one is there; returns the current one."""
        stream = cupy.cuda.get_current_stream()
        stream.wait_event(self.event)
        return stream
