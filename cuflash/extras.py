"""How to install what the package can do without, in words for messages."""

import contextlib
from collections.abc import Iterator


def how_to_install(extra: str) -> str:
    """The commands that install one of the extras of setup.cfg.

    Examples
    --------
    >>> print(how_to_install("plot"))
    pip install ".[plot]" in a checkout, pip install "cuflash[plot]" from an index
    """
    return f'pip install ".[{extra}]" in a checkout, pip install "cuflash[{extra}]" from an index'


HOW_TO_INSTALL_CUPY = how_to_install("cuda13x") + "; cuda12x for a driver of CUDA 12"


@contextlib.contextmanager
def compiling() -> Iterator[None]:
    """Of what compiles kernels: without CuPy the error says how to install it."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name != "cupy":
            raise
        raise ModuleNotFoundError(
            f"kernels are compiled by CuPy, which is not installed: {HOW_TO_INSTALL_CUPY}",
            name="cupy",
        ) from None
