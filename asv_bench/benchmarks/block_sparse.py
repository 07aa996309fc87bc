"""Block masks of random blocks of 128 x 128, of each head its own, on a GPU."""

import numpy as np

import cuflash

from . import gpu

SHAPE = (1, 32, 16384, 64)
DENSITIES = [5, 10, 25, 50, 100]  # per cent of the blocks


def draw_mask(density: int, heads: int, length: int):
    """A mask and its grids of visible blocks; older versions of cuflash have none."""
    if not hasattr(cuflash, "BlockMask"):
        raise NotImplementedError("this version of cuflash has no block masks")
    rng = np.random.default_rng(density)
    shown = rng.random((heads, length // 128, length // 128)) < density / 100
    return cuflash.BlockMask(shown, 128), shown


class BlockSparse:
    """bf16 (1, 32, 16384, 64): seconds, and how far they are from the dense time's share."""

    version = "1"
    params = (DENSITIES, ["fa1", "fa2", "fa3", "fa2 backward", "fa3 backward"])
    param_names = ("density", "algo")

    def setup(self, density, algo):
        gpu.need_gpu()
        mask, _ = draw_mask(density, SHAPE[1], SHAPE[2])
        self.density = mask.density
        if algo.endswith("backward"):
            problem, more = gpu.Backward(SHAPE, "bf16", mask=mask), {"deterministic": False}
        else:
            problem, more = gpu.Problem(SHAPE, "bf16", mask=mask), {}
        self.call = problem.served(algo[:3], **more)
        self.dense = problem.ours(algo[:3], mask=None, **more)

    def track_seconds(self, *parameters):
        return gpu.seconds(self.call)

    def track_against_share_of_dense(self, *parameters):
        found = gpu.times_as_long(self.call, self.dense)
        return gpu.samples(x / self.density for x in found["samples"])

    track_seconds.unit = "seconds"
    track_against_share_of_dense.unit = "x density x the dense time"


class BlockSparsePeers:
    """What the plan chooses, against FlexAttention on the same mask."""

    version = "2"
    params = (DENSITIES,)
    param_names = ("density",)

    def setup(self, density):
        gpu.need_torch()
        mask, shown = draw_mask(density, SHAPE[1], SHAPE[2])
        problem = gpu.Problem(SHAPE, "bf16", mask=mask)
        self.calls = [problem.ours(None), gpu.flex(problem.q, problem.k, problem.v, shown)]

    def track_ratio(self, density):
        return gpu.times_as_long(*self.calls)

    track_ratio.unit = "x the peer's time"
