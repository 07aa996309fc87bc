"""The NumPy engine, in seconds and in bytes, beside the same expression written out in NumPy."""

import tracemalloc

import numpy as np

import cuflash


def unfused(q, k, v, causal):
    """What a NumPy user writes: the whole matrix of scores, worked on in place."""
    scores = np.matmul(q, k.swapaxes(-1, -2))
    scores *= q.shape[-1] ** -0.5
    if causal:
        scores[..., np.triu(np.ones(scores.shape[-2:], bool), k=1)] = -np.inf
    scores -= scores.max(axis=-1, keepdims=True)
    np.exp(scores, out=scores)
    scores /= scores.sum(axis=-1, keepdims=True)
    return np.matmul(scores, v)


class Host:
    """Self-attention of (1, 8, N, 64) in float32 on the CPU."""

    version = "1"
    timeout = 300
    params = ([512, 2048], [False, True], ["fa1", "fa2", "unfused"])
    param_names = ("length", "causal", "algo")
    prepared = None

    def setup(self, length, causal, algo):
        """Once per process and set of parameters: asv calls this before every timed call."""
        if self.prepared == (length, causal, algo):
            return
        rng = np.random.default_rng(0)
        shape = (1, 8, length, 64)
        self.arrays = [rng.standard_normal(shape, dtype=np.float32) for _ in range(3)]
        if algo == "unfused":
            self.call = lambda: unfused(*self.arrays, causal)
        else:
            out = np.empty(shape, np.float32)
            options = {"algo": algo, "causal": causal, "out": out}
            self.call = lambda: cuflash.attention(*self.arrays, **options)
        self.call()
        self.prepared = (length, causal, algo)

    def time_forward(self, length, causal, algo):
        self.call()

    time_forward.version = version

    def track_extra_bytes(self, length, causal, algo):
        """Peak memory during a call beyond what was there before it."""
        tracemalloc.start()
        try:
            before, _ = tracemalloc.get_traced_memory()
            self.call()
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        return int(peak - before)

    track_extra_bytes.version = version
    track_extra_bytes.unit = "bytes"
