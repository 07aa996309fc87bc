"""One query over caches of keys and values, on a GPU."""

import numpy as np

from . import gpu

SIZES = ["1x65536", "16x8192", "128x4096"]  # batch and keys
CACHES = ["whole", "lengths", "pages", "split_keys"]
PAGE_SIZE, SPAN = 64, 1024  # keys


def draw(sizes: str, cache: str = "whole"):
    """One query of 32 heads on 8 key heads of width 128; lengths are random, in pages all keys."""
    batch, length = map(int, sizes.split("x"))
    options = {"key_heads": 8, "queries": 1}
    if cache == "lengths":
        options["kv_lengths"] = np.random.default_rng(0).integers(1, length, batch, endpoint=True)
    elif cache == "pages":
        options["kv_lengths"] = np.full(batch, length)
    elif cache == "split_keys":
        options["split_keys"] = SPAN
    problem = gpu.Problem((batch, 32, length, 128), "bf16", layout="bnhd", **options)
    return problem.in_pages(PAGE_SIZE) if cache == "pages" else problem


class Decode:
    """What the plan chooses, and what a call costs the host."""

    version = "1"
    params = (SIZES, CACHES)
    param_names = ("batch and keys", "cache")

    def setup(self, sizes, cache):
        gpu.need_gpu()
        self.call = draw(sizes, cache).served(None)

    def track_seconds(self, *parameters):
        return gpu.seconds(self.call)

    def track_host_seconds(self, *parameters):
        (column,) = gpu.host_times([self.call], 10)
        return gpu.samples(1e-6 * x for x in column)

    track_seconds.unit = track_host_seconds.unit = "seconds"


class DecodeOverhead:
    """The host's time against that for a whole cache whose keys are not split."""

    version = "1"
    params = (CACHES[:3], [0, SPAN])
    param_names = ("cache", "split_keys")

    def setup(self, cache, span):
        gpu.need_gpu()
        call = draw("8x4096", cache).served(None, split_keys=span)
        whole = draw("8x4096").served(None, split_keys=0)
        self.mine, self.whole = gpu.host_times([call, whole], 10)

    def track_against_a_whole_cache(self, *parameters):
        return gpu.samples(a / b for a, b in zip(self.mine, self.whole))

    track_against_a_whole_cache.unit = "x its time"


class DecodePeers:
    """What the plan chooses, against the fastest of torch's kernels."""

    version = "1"
    params = (SIZES,)
    param_names = ("batch and keys",)

    def setup(self, sizes):
        gpu.need_torch()
        problem = draw(sizes)
        self.calls = [problem.ours(None), *problem.peers()]

    def track_ratio(self, sizes):
        return gpu.times_as_long(*self.calls)

    track_ratio.unit = "x the peer's time"
