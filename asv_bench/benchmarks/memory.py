"""Device memory that a call takes."""

from . import gpu


class Memory:
    """fp16 (1, 8, N, 64), causal: the peak during a call beyond operands and result."""

    version = "1"
    params = ([1024, 4096, 16384, 65536], ["fa1", "fa2", "fa3", "fa2 backward", "fa3 backward"])
    param_names = ("length", "algo")

    def setup(self, length, algo):
        gpu.need_gpu()
        kind = gpu.Backward if algo.endswith("backward") else gpu.Problem
        self.call = kind((1, 8, length, 64), "fp16", True).served(algo[:3])
        self.call()  # compiles

    def track_extra_bytes(self, length, algo):
        peak, _ = gpu.meter().taken_bytes(self.call)
        return int(peak)

    track_extra_bytes.unit = "bytes"
