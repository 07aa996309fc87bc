"""What a call costs besides its arithmetic."""

import time

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


class PackedOverhead:
    """The host's time for 8 packed sequences of 128 tokens against that for them as a batch."""

    version = "1"
    params = ([False, True],)
    param_names = ("backward",)

    def setup(self, backward):
        cupy = gpu.need_gpu()
        count, heads, tokens, dim = 8, 8, 128, 64
        shape = 1, heads, count * tokens, dim
        draw = [gpu.draw(shape, "bf16", "bnhd").cupy for _ in range(4)]
        q, k, v, dout = packed = [x[0].swapaxes(0, 1) for x in draw]
        batch = [x.reshape(count, tokens, heads, dim).swapaxes(1, 2) for x in packed]
        starts = cupy.arange(count + 1, dtype="int32") * tokens
        options = {"causal": True, "max_seqlen_q": tokens, "max_seqlen_k": tokens}
        out, lse = cuflash.attention_varlen(q, k, v, starts, return_lse=True, **options)
        made = cuflash.attention(*batch[:3], causal=True, return_lse=True)
        calls = [
            lambda: cuflash.attention_varlen(q, k, v, starts, **options),
            lambda: cuflash.attention(*batch[:3], causal=True),
        ]
        if backward:
            calls = [
                lambda: cuflash.attention_varlen_backward(
                    dout, q, k, v, out, lse, starts, **options
                ),
                lambda: cuflash.attention_backward(batch[3], *batch[:3], *made, causal=True),
            ]
        self.packed, self.batch = gpu.host_times(calls, 10)

    def track_against_a_batch(self, backward):
        return gpu.samples(a / b for a, b in zip(self.packed, self.batch))

    track_against_a_batch.unit = "x its time"


class GrowingCache:
    """Time of the host for a step of decoding whose keys are one more each time, as an array that
    grows has: lengths that no call had before are planned. Beside that of one step again.
    """

    version = "1"
    timeout = 300
    params = (["bf16", "fp32"],)
    param_names = ("dtype",)
    keys = range(2049, 2305)
    prepared = None

    def setup(self, dtype):
        """Once per process and set of parameters: a length is new only once."""
        if self.prepared == dtype:
            return
        wait = gpu.need_gpu().cuda.Device().synchronize
        q, k, v = (gpu.draw((4, 32, self.keys.stop, 128), dtype).cupy for _ in range(3))
        q, k, v = q[:, :, :1], k[:, :8], v[:, :8]

        def step(keys):
            cuflash.attention(q, k[:, :, :keys], v[:, :, :keys], enable_gqa=True)

        step(self.keys.start - 1)  # compiles
        self.grown = []
        for keys in self.keys:
            wait()
            start = time.perf_counter()
            step(keys)
            self.grown.append(time.perf_counter() - start)
        (self.again,) = gpu.host_times([lambda: step(self.keys.start)], 10)
        self.prepared = dtype

    def track_mean_seconds(self, dtype):
        return float(np.mean(self.grown))

    def track_seconds(self, dtype):
        return gpu.samples(self.grown)

    def track_seconds_again(self, dtype):
        return gpu.samples(1e-6 * x for x in self.again)

    track_mean_seconds.unit = track_seconds.unit = track_seconds_again.unit = "seconds"


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
