"""What a call costs besides its arithmetic."""

import numpy as np

import cuflash

from . import gpu


class Overhead:
    """Time of the host for a call of (1, 8, 128, 64): of fa2, on wgmma of fa3."""

    version = "1"
    params = (["simt", "mma", "wgmma"],)
    param_names = ("engine",)

    def setup(self, engine):
        gpu.need_gpu()
        problem = gpu.Problem((1, 8, 128, 64), "fp32" if engine == "simt" else "bf16", True)
        arrays = [*problem.inputs, problem.out.cupy]
        call = problem.served("fa3" if engine == "wgmma" else "fa2", engine)
        calls = [call, gpu.bare_launch(arrays)]
        self.mine, self.bare = gpu.host_times(calls, 10)

    def track_seconds(self, engine):
        return gpu.samples(1e-6 * x for x in self.mine)

    def track_against_bare_launch(self, engine):
        return gpu.samples(a / b for a, b in zip(self.mine, self.bare))

    track_seconds.unit = "seconds"
    track_against_bare_launch.unit = "x its time"


class HostOverhead:
    """The NumPy engine on a problem of next to no arithmetic."""

    version = "1"
    params = (["fa1", "fa2"],)
    param_names = ("algo",)
    number = 20  # calls of a sample

    def setup(self, algo):
        self.arrays = [np.ones((1, 1, 4, 8), np.float32)] * 3

    def time_call(self, algo):
        cuflash.attention(*self.arrays, algo=algo)
