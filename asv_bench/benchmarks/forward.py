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
    params = (list(PROBLEMS), [False, True], ["fa1", "fa2", "fa3"])
    param_names = ("problem", "causal", "algo")

    def setup(self, problem, causal, algo):
        gpu.need_gpu()
        shape, dtype, layout = PROBLEMS[problem]
        self.problem = gpu.Problem(shape, dtype, causal, layout)
        self.call = self.problem.served(algo)

    def track_seconds(self, *parameters):
        return gpu.seconds(self.call)

    track_seconds.unit = "seconds"


class ForwardPeers:
    """What the plan chooses, against the fastest of torch's kernels."""

    version = "1"
    params = (list(PROBLEMS), [False, True])
    param_names = ("problem", "causal")

    def setup(self, problem, causal):
        gpu.need_torch()
        shape, dtype, layout = PROBLEMS[problem]
        problem = gpu.Problem(shape, dtype, causal, layout)
        self.calls = [problem.ours(None), *problem.peers()]

    def track_ratio(self, *parameters):
        return gpu.times_as_long(*self.calls)

    track_ratio.unit = "x the peer's time"


class ForwardRoofline:
    """What the plan chooses, against the least time by rates measured in the same process."""

    version = "1"
    params = (list(PROBLEMS), [False, True])
    param_names = ("problem", "causal")

    def setup(self, problem, causal):
        gpu.need_torch()
        shape, dtype, layout = PROBLEMS[problem]
        self.problem = gpu.Problem(shape, dtype, causal, layout)
        self.floor = self.problem.floor_seconds()

    def track_ratio(self, *parameters):
        found = gpu.seconds(self.problem.ours(None))
        return gpu.samples(x / self.floor for x in found["samples"])

    track_ratio.unit = "x the floor's time"


class ForwardUnfused:
    """What the plan chooses, against what one writes in CuPy."""

    version = "1"
    params = ([name for name in PROBLEMS if not name.startswith("bf16")], [False, True])
    param_names = ("problem", "causal")

    def setup(self, problem, causal):
        gpu.need_gpu()
        shape, dtype, layout = PROBLEMS[problem]
        problem = gpu.Problem(shape, dtype, causal, layout)
        self.calls = [problem.ours(None), problem.cupy_unfused()]

    def track_ratio(self, *parameters):
        return gpu.times_as_long(*self.calls)

    track_ratio.unit = "x its time"
