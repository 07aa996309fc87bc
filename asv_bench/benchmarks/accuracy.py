"""How far results are from the definition in float64."""

import numpy as np

import cuflash

from . import gpu

DTYPES = gpu.EVERY_DTYPE


class Accuracy:
    """Of causal self-attention of (2, 4, 300, 64): the largest error, by the largest value."""

    version = "1"
    params = (list(DTYPES), ["fa1", "fa2", "fa3"], ["numpy", "simt", "mma", "wgmma"])
    param_names = ("dtype", "algo", "engine")

    def setup(self, dtype, algo, engine):
        rng = np.random.default_rng(0)
        shape = (2, 4, 300, 64)
        self.arrays = [rng.standard_normal(shape).astype(DTYPES[dtype]) for _ in "qkv"]
        arrays = self.arrays if engine == "numpy" else [*map(gpu.need_gpu().asarray, self.arrays)]
        gpu.need_kernel(*arrays, algo=algo, engine=engine)
        out = cuflash.attention(*arrays, algo=algo, engine=engine, causal=True)
        self.found = (out if engine == "numpy" else out.get()).astype(np.float64)

    def track_relative_error(self, dtype, algo, engine):
        right = cuflash.reference.attention(*self.arrays, causal=True)
        right = right[0] if isinstance(right, tuple) else right
        return float(np.abs(self.found - right).max() / np.abs(right).max())

    track_relative_error.unit = "of the largest value"
