"""Where the time of a ring's calls goes on each rank, by events on the stream that works.

    python -m cuflash launch -n 2 asv_bench/ring_timeline.py [--tokens 16384 65536]

The problems are those of many_gpus.py. A line tells of a rank the milliseconds until each of these
has ended: a block of keys, the wait for the keys of a step, the adding of dk and dv that have come
back. "still" is the same with copies on the device in the place of transfers.
"""

from __future__ import annotations

import argparse
import functools
import statistics

import cupy
from many_gpus import Still, draw

import cuflash
from cuflash import distributed
from cuflash.distributed import ring

RUNS, WARM = 6, 3
SHOWN = 0.02  # milliseconds, from which on a part is printed
PARTS = {
    "block": (ring, ("forward_block", "backward_block")),
    "keys": (ring._Keys, ("of",)),
    "returned": (ring, ("_add_returned",)),
}


class Timeline:
    """Events of the calls that it runs."""

    def __init__(self):
        self.marks = []
        for label, (owner, names) in PARTS.items():
            for name in names:
                setattr(owner, name, self._marked(getattr(owner, name), label))

    def mark(self, label):
        """Note where the stream is."""
        event = cupy.cuda.Event()
        event.record()
        self.marks.append((label, event))

    def _marked(self, function, label):
        @functools.wraps(function)
        def marked(*args, **options):
            self.mark("between")
            returned = function(*args, **options)
            self.mark(label)
            return returned

        return marked

    def of(self, comm, call):
        """Each part's label, and its milliseconds: medians of calls behind one another."""
        for _ in range(WARM):
            call()
        cupy.cuda.get_current_stream().synchronize()
        comm.tell("ready")
        runs = []
        for _ in range(RUNS):
            self.marks = []
            self.mark("")
            call()
            self.mark("rest")
            runs.append(self.marks)
        cupy.cuda.get_current_stream().synchronize()
        for i, (label, _) in enumerate(runs[0][1:]):
            times = (cupy.cuda.get_elapsed_time(x[i][1], x[i + 1][1]) for x in runs)
            yield label, statistics.median(times)


def main():
    """Print two lines of each rank for each problem and direction."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[16384, 65536])
    asked = parser.parse_args()
    comm, timeline = distributed.NcclComm.from_environment(), Timeline()
    for tokens in asked.tokens:
        for causal in (True, False):
            whole = [draw(seed, tokens) for seed in range(4)]
            whole += cuflash.attention(*whole[:3], causal=causal, return_lse=True)
            layout = "zigzag" if causal else "contiguous"
            mine = [distributed.shard(x, comm, layout=layout) for x in whole[:5]]
            q, k, v, dout, out = mine
            lse = distributed.shard(whole[5], comm, axis=-1, layout=layout)
            del whole
            for name, rank in {"nccl": comm, "still": Still(comm)}.items():
                how = {"comm": rank, "layout": layout, "method": "ring", "causal": causal}
                calls = {
                    "forward": functools.partial(
                        distributed.attention, q, k, v, return_lse=True, **how
                    ),
                    "backward": functools.partial(
                        distributed.attention_backward, dout, q, k, v, out, lse, **how
                    ),
                }
                for direction, call in calls.items():
                    parts = list(timeline.of(comm, call))
                    cells = [f"{label} {x:.2f}" for label, x in parts if x >= SHOWN]
                    total = sum(x for _, x in parts)
                    head = f"{tokens} {layout} {direction} {name} rank {comm.rank}"
                    for line in comm.tell(f"{head}: {total:.2f} = {', '.join(cells)}"):
                        if comm.rank == 0:
                            print(line, flush=True)
    comm.tell("end")


if __name__ == "__main__":
    main()
