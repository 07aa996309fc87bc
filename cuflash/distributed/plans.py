"""`plan`: which method a call of several ranks takes, and why."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from ..operands.checks import checked_truth
from .estimate import Estimate
from .machine import Machine
from .task import Call, checked

if TYPE_CHECKING:
    from ..masks.block_mask import BlockMask
    from ..typing import Algo, AnyArray, Causal, Engine, Integer, Real, Window
    from .communicator import Communicator
    from .shards import Layout
    from .task import Method

_TITLES = ("method", "ms", "work", "transfer", "hidden", "sent MB", "calls", "memory MB")


class RanksPlan(NamedTuple):
    """What a call of several ranks does; printing it shows the estimates of all methods.

    Attributes
    ----------
    method : str
        The one that is taken.
    size : int
        Ranks.
    layout : str
    title : str
        The problem in words.
    machine : Machine
        What the estimates know of ranks and their connections.
    estimates : tuple of Estimate
        Of the rank that takes longest.
    """

    method: str
    size: int
    layout: str
    title: str
    machine: Machine
    estimates: tuple[Estimate, ...]

    def __str__(self) -> str:
        lines = [_TITLES, *(_cells(x) for x in self.estimates if not x.refused)]
        widths = [max(map(len, column)) for column in zip(*lines)]
        texts = [
            "  ".join(
                [line[0].ljust(widths[0]), *(x.rjust(n) for x, n in zip(line[1:], widths[1:]))]
            )
            for line in lines
        ]
        texts += [f"not {x.method}: {x.refused}" for x in self.estimates if x.refused]
        m = self.machine
        return "\n".join(
            [
                f"{self.method} on {self.size} ranks, {self.layout}: {self.title}",
                *texts,
                f"with {m.bandwidth / 1e9:g} GB/s to ranks of a host, {m.network / 1e9:g} GB/s to "
                f"others, {m.forward / 1e12:g} and {m.backward / 1e12:g} TFLOP/s",
            ]
        )


def _cells(x: Estimate) -> tuple[str, ...]:
    times = (f"{1e3 * seconds:.3g}" for seconds in (x.total, x.work, x.transfer))
    sizes = f"{x.sent / 1e6:.3g}", str(x.calls), f"{x.memory / 1e6:.3g}"
    return x.method, *times, f"{x.hidden:.0%}", *sizes


def plan(
    q: AnyArray,
    k: AnyArray,
    v: AnyArray,
    *,
    comm: Communicator,
    layout: Layout = "contiguous",
    method: Method | None = None,
    algo: Algo | None = None,
    engine: Engine | None = None,
    causal: Causal = False,
    window: Window | None = None,
    mask: BlockMask | None = None,
    softcap: Real | None = None,
    scale: Real | None = None,
    enable_gqa: bool = False,
    dropout_p: Real = 0.0,
    seed: Integer | AnyArray | None = None,
    backward: bool = False,
) -> RanksPlan:
    """What :func:`attention` or :func:`attention_backward` would do for these arguments.

    Parameters
    ----------
    q, k, v, comm, layout, method, algo, engine, causal, window, mask
        As of :func:`attention`. Other ranks need not call.
    softcap, scale, enable_gqa, dropout_p, seed
        As of :func:`attention`.
    backward : bool
        Plan the gradients.

    Returns
    -------
    RanksPlan
        Printable: of each method the time that is estimated, of it that of the kernels and that of
        transfers, which share of these is hidden behind kernels, the bytes a rank sends, its calls
        of kernels, and the memory it takes beside operands and results.

    Raises
    ------
    ValueError, TypeError, NotImplementedError
        As :func:`attention`, on this rank alone.

    Notes
    -----
    `comm.machine` has the constants of the estimate: those of H200s in one host, unless another
    :class:`Machine` is set on all ranks.

    Examples
    --------
    >>> import numpy as np
    >>> from cuflash import distributed
    >>> comm = distributed.LocalComm.make(4)[0]
    >>> q = np.zeros((8, 4096, 128), np.float16)
    >>> k = np.zeros((2, 4096, 128), np.float16)
    >>> p = distributed.plan(
    ...     q, k, k, comm=comm, layout="zigzag", causal=True, enable_gqa=True
    ... )
    >>> p.method
    'ring'
    >>> str(p).splitlines()[-2]
    'not ulysses: 8 heads of queries and 2 of keys do not divide by 4 ranks'
    """
    arrays: dict[str, Any] = {"q": q, "k": k, "v": v}
    options = {
        "algo": algo, "engine": engine, "softcap": softcap, "scale": scale,
        "enable_gqa": enable_gqa,
    }  # fmt: skip
    name = "attention_backward" if checked_truth("backward", backward) else "attention"
    call = Call(
        name, comm, arrays, layout, method, causal, window, mask, dropout_p, seed, options, {}
    )  # fmt: skip
    task = checked(call)
    queries, keys = task.sight.lengths
    band = task.sight.band
    title = f"{queries} x {keys} tokens, {task.heads[0]} heads on {task.heads[1]}, {name}"
    if not band.is_open:
        title += ", causal" if band.right == 0 and band.left is None else ", window"
    return RanksPlan(task.method, comm.size, task.layout, title, comm.machine, task.estimates)
