"""What a process's first call costs."""

from . import gpu

KERNELS = {
    "fa1 mma bf16 64": ("bf16", (1, 8, 512, 64), "fa1", "mma"),
    "fa2 mma bf16 64": ("bf16", (1, 8, 512, 64), "fa2", "mma"),
    "fa2 mma bf16 128": ("bf16", (1, 8, 512, 128), "fa2", "mma"),
    "fa2 simt fp32 64": ("fp32", (1, 8, 512, 64), "fa2", "simt"),
    "fa3 wgmma bf16 64": ("bf16", (4, 16, 1024, 64), "fa3", "wgmma"),
    "fa3 wgmma bf16 128": ("bf16", (4, 16, 1024, 128), "fa3", "wgmma"),
}


class Compile:
    """Seconds of a first call: of the compiler, or of a kernel from CuPy's cache on disk."""

    version = "1"
    params = (list(KERNELS),)
    param_names = ("kernel",)

    def setup(self, kernel):
        dtype, shape, algo, engine = KERNELS[kernel]
        gpu.need_gpu()
        gpu.Problem(shape, dtype, True).served(algo, engine)

    def track_nothing_compiled(self, kernel):
        return gpu.first_call_seconds(*KERNELS[kernel])

    def track_from_disk(self, kernel):
        gpu.first_call_seconds(*KERNELS[kernel], compiled=True)
        return gpu.first_call_seconds(*KERNELS[kernel], compiled=True)

    track_nothing_compiled.unit = track_from_disk.unit = "seconds"


class CompileGradients:
    """Seconds of a first call and of its gradients, by the default kernels, nothing compiled."""

    version = "1"
    params = ([64, 128, 256],)
    param_names = ("head_dim",)

    def setup(self, head_dim):
        gpu.need_gpu()

    def track_nothing_compiled(self, head_dim):
        return gpu.first_call_seconds("bf16", (4, 16, 1024, head_dim), backward=True)

    track_nothing_compiled.unit = "seconds"
