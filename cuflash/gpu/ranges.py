"""Named ranges on a profiler's time line, where the environment asks for them. Needs CuPy."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import ParamSpec

Params = ParamSpec("Params")


def are_wanted() -> bool:
    """Whether `CUFLASH_NVTX` is 1: asked once for each kind of call and for each compilation."""
    return os.environ.get("CUFLASH_NVTX") == "1"


@contextlib.contextmanager
def marked(text: str) -> Iterator[None]:
    """A range of this name around a block, where ranges are wanted."""
    if not are_wanted():
        yield
        return
    from cupy.cuda import nvtx

    nvtx.RangePush(text)
    try:
        yield
    finally:
        nvtx.RangePop()


def with_range(launch: Callable[Params, None], text: str) -> Callable[Params, None]:
    """`launch` with a range of this name around each call; itself, where ranges are not wanted."""
    if not are_wanted():
        return launch
    from cupy.cuda import nvtx

    def launch_in_range(*arguments: Params.args, **named: Params.kwargs) -> None:
        nvtx.RangePush(text)
        try:
            launch(*arguments, **named)
        finally:
            nvtx.RangePop()

    return launch_in_range
