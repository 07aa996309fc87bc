"""The gradients on a GPU."""

from . import gpu

PROBLEMS = {
    "bf16 4x32x4096x64": ((4, 32, 4096, 64), "bf16", "bnhd"),
    "bf16 4x16x4096x128": ((4, 16, 4096, 128), "bf16", "bnhd"),
    "bf16 4x8x4096x256": ((4, 8, 4096, 256), "bf16", "bnhd"),
    "fp16 4x48x4096x32": ((4, 48, 4096, 32), "fp16", "bhnd"),
    "fp32 4x16x4096x64": ((4, 16, 4096, 64), "fp32", "bhnd"),
}


class Backward:
    """Gradients that are the same bits each time, and such that are not.

    Each algorithm on the fastest engine that serves.
    """

    version = "1"
    params = (
        list(PROBLEMS),
        [False, True],
        ["fa1", "fa2", "fa2 any order", "fa3", "fa3 any order"],
    )
    param_names = ("problem", "causal", "algo")

    def setup(self, problem, causal, algo):
        gpu.need_gpu()
        shape, dtype, layout = PROBLEMS[problem]
        self.problem = gpu.Backward(shape, dtype, causal, layout)
        self.call = self.problem.served(algo[:3], deterministic=not algo.endswith("any order"))

    def track_seconds(self, *parameters):
        return gpu.seconds(self.call)

    track_seconds.unit = "seconds"


class BackwardPeers:
    """What the plan chooses, in any order as torch does by default, against its fastest kernel."""

    version = "1"
    params = (list(PROBLEMS), [False, True])
    param_names = ("problem", "causal")

    def setup(self, problem, causal):
        gpu.need_torch()
        shape, dtype, layout = PROBLEMS[problem]
        problem = gpu.Backward(shape, dtype, causal, layout)
        self.calls = [problem.ours(None, deterministic=False), *problem.peers()]

    def track_ratio(self, *parameters):
        return gpu.times_as_long(*self.calls)

    track_ratio.unit = "x the peer's time"
