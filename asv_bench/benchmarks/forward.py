"""The forward kernels on a GPU."""

from . import gpu

# What the field times (16k tokens of 2048 features), what this library was first asked for, and a
# problem of a few microseconds: (B, H, N, D) and the type.
PROBLEMS = {
    "bf16 4x32x4096x64": ((4, 32, 4096, 64), "bf16", "bnhd"),
    "bf16 1x32x16384x64": ((1, 32, 16384, 64), "bf16", "bnhd"),
    "bf16 4x16x4096x128": ((4, 16, 4096, 128), "bf16", "bnhd"),
    "bf16 4x8x4096x256": ((4, 8, 4096, 256), "bf16", "bnhd"),
    "bf16 1x8x512x64": ((1, 8, 512, 64), "bf16", "bhnd"),
    "fp16 4x48x4096x32": ((4, 48, 4096, 32), "fp16", "bhnd"),
    "fp32 8x8x1024x8": ((8, 8, 1024, 8), "fp32", "bhnd"),
    "fp32 100x1x4096x32": ((100, 1, 4096, 32), "fp32", "bhnd"),
    "fp32 4x16x4096x64": ((4, 16, 4096, 64), "fp32", "bhnd"),
}


class Forward:
    version = "1"
    params = (list(PROBLEMS), [False, True], ["fa1", "fa2"])
    param_names = ("problem", "causal", "algo")

    def setup(self, problem, causal, algo):
        gpu.need_gpu()
        shape, dtype, layout = PROBLEMS[problem]
        self.problem = gpu.Problem(shape, dtype, causal, layout)
        self.call = self.problem.ours(algo)

    def track_seconds(self, *parameters):
        return gpu.seconds(self.call)

    track_seconds.unit = "seconds"


class ForwardRatios:
    """Of the algorithm that the plan chooses."""

    version = "1"
    params = (list(PROBLEMS), [False, True])
    param_names = ("problem", "causal")

    def setup(self, problem, causal):
        gpu.need_torch()
        shape, dtype, layout = PROBLEMS[problem]
        self.problem = gpu.Problem(shape, dtype, causal, layout)
        self.call = self.problem.ours(None)

    def track_against_best_peer(self, *parameters):
        return gpu.times_as_long(self.call, *self.problem.peers())

    def track_against_unfused(self, problem, causal):
        if problem.startswith("bf16"):
            raise NotImplementedError("CuPy has no products of bfloat16")
        return gpu.times_as_long(self.call, self.problem.cupy_unfused())

    def track_against_roofline(self, *parameters):
        floor = self.problem.floor_seconds()
        return gpu.samples(x / floor for x in gpu.seconds(self.call)["samples"])

    track_against_best_peer.unit = "x its time"
    track_against_unfused.unit = "x its time"
    track_against_roofline.unit = "x its time"


class Decode:
    """One query of 32 heads on 8 key heads of width 128, with a long cache."""

    version = "1"
    params = (["1x65536", "16x8192", "128x4096"],)
    param_names = ("batch and keys",)

    def setup(self, sizes):
        gpu.need_gpu()
        batch, length = map(int, sizes.split("x"))
        self.problem = gpu.Problem((batch, 32, length, 128), "bf16", key_heads=8, queries=1)

    def track_seconds(self, sizes):
        return gpu.seconds(self.problem.ours(None))

    track_seconds.unit = "seconds"

    def track_against_best_peer(self, sizes):
        return gpu.times_as_long(self.problem.ours(None), *self.problem.peers())

    track_against_best_peer.unit = "x its time"
