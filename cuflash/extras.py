"""How to install what the package can do without, in words for messages."""


def how_to_install(extra: str) -> str:
    """The commands that install one of the extras of setup.cfg.

    Examples
    --------
    >>> print(how_to_install("plot"))
    pip install ".[plot]" in a checkout, pip install "cuflash[plot]" from an index
    """
    return f'pip install ".[{extra}]" in a checkout, pip install "cuflash[{extra}]" from an index'


HOW_TO_INSTALL_CUPY = how_to_install("cuda13x") + "; cuda12x for a driver of CUDA 12"
