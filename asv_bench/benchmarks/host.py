"""The NumPy engine, in seconds and in bytes, beside the same expression written out in NumPy."""

import numpy as np

import cuflash

from .block_sparse import DENSITIES, draw_mask
from .gpu import meters, samples


def draw(length: int) -> list[np.ndarray]:
    """q, k and v."""
    return [meters.draw(np, (1, 8, length, 64), "float32", seed) for seed in range(3)]


class Host:
    """Self-attention of (1, 8, N, 64) in float32 on the CPU."""

    version = "2"
    timeout = 300
    params = ([512, 2048], [False, True], ["fa1", "fa2", "unfused"])
    param_names = ("length", "causal", "algo")
    prepared = None

    def setup(self, length, causal, algo):
        """Once per process and set of parameters: asv calls this before every timed call."""
        if self.prepared == (length, causal, algo):
            return
        self.arrays = draw(length)
        if algo == "unfused":
            bias = meters.causal_bias(np, length, "float32") if causal else None
            self.call = lambda: meters.unfused(*self.arrays, bias)
        else:
            out = np.empty_like(self.arrays[0])
            options = {"algo": algo, "causal": causal, "out": out}
            self.call = lambda: cuflash.attention(*self.arrays, **options)
        self.call()
        self.prepared = (length, causal, algo)

    def time_forward(self, length, causal, algo):
        self.call()

    def track_extra_bytes(self, length, causal, algo):
        """Peak memory during a call beyond what was there before it."""
        return int(meters.HostMeter().taken_bytes(self.call)[0])

    track_extra_bytes.unit = "bytes"


class HostRatio:
    """The same against the unfused expression, call by call in turn."""

    version = "1"
    timeout = 300
    params = ([512, 2048], [False, True], ["fa1", "fa2"])
    param_names = ("length", "causal", "algo")

    def track_ratio(self, length, causal, algo):
        arrays = draw(length)
        options = {"algo": algo, "causal": causal, "out": np.empty_like(arrays[0])}
        bias = meters.causal_bias(np, length, "float32") if causal else None
        calls = [
            lambda: cuflash.attention(*arrays, **options),
            lambda: meters.unfused(*arrays, bias),
        ]
        mine, plain = meters.HostMeter().measure(calls, 300)
        return samples(a / b for a, b in zip(mine, plain))

    track_ratio.unit = "x its time"


class HostBlockSparse:
    """A mask of random blocks: how far its time is from the share of the dense time."""

    version = "1"
    timeout = 300
    params = (DENSITIES, ["fa1", "fa2"])
    param_names = ("density", "algo")

    def setup(self, density, algo):
        self.mask, _ = draw_mask(density, 8, 2048)

    def track_against_share_of_dense(self, density, algo):
        arrays = draw(2048)
        options = {"algo": algo, "out": np.empty_like(arrays[0])}
        calls = [
            lambda: cuflash.attention(*arrays, mask=self.mask, **options),
            lambda: cuflash.attention(*arrays, **options),
        ]
        masked, dense = meters.HostMeter().measure(calls, 300)
        return samples(a / b / self.mask.density for a, b in zip(masked, dense))

    track_against_share_of_dense.unit = "x density x the dense time"
