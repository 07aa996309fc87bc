"""How far a task of many steps has come, on a terminal."""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def progress_bar(total: int, unit: str, wanted: bool) -> Iterator[Callable[[], object]]:
    """A function to call after each of `total` steps.

    It moves a bar, tqdm's where that is installed, if one is `wanted` and stderr is a terminal.
    """
    if not (wanted and total and sys.stderr is not None and sys.stderr.isatty()):
        yield lambda: None
        return
    try:
        from tqdm import tqdm
    except ModuleNotFoundError:
        numbers = itertools.count()

        def step() -> None:
            text = f"\r{next(numbers)} of {total} {unit}s"
            print(text, end="", file=sys.stderr, flush=True)

        step()
        try:
            yield step
        finally:
            print(file=sys.stderr)
    else:
        with tqdm(total=total, unit=unit) as bar:
            yield bar.update
