"""Whether `cuflash.plan.TILES` still has the fastest rows: ../tile_sweep.py ranks them."""

import sys
from pathlib import Path

from . import gpu

CASES = [
    "hopper64", "hopper128", "half64", "half128", "small64", "fp32_32", "fp32_64", "fa1_64",
    "bwd64", "bwd128",
]  # fmt: skip


class Tiles:
    """Time of the row that the plan takes, as a multiple of that of its fastest neighbour."""

    version = "1"
    timeout = 600
    params = (CASES,)
    param_names = ("case",)

    def setup(self, case):
        gpu.need_gpu()
        sys.path.insert(0, str(Path(__file__).parents[1]))
        try:
            import tile_sweep
        except ImportError:
            raise NotImplementedError("this version of cuflash has other tables") from None
        self.sweep = tile_sweep.Sweep(case, deterministic=False)

    def track_against_best_row(self, case):
        worst = 0.0
        for sizes in self.sweep.case.shapes:
            self.sweep.run(sizes, gpu.meter(), gpu.MILLISECONDS)
            gpu.release()
        for label, times in self.sweep.times.items():
            (taken,) = (times[i] for i, shape in self.sweep.chosen if shape == label)
            others = (column for i, column in times.items() if i >= 0)
            worst = max(worst, *(gpu.paired_ratio(taken, column) for column in others))
        return worst

    track_against_best_row.unit = "x its time"
