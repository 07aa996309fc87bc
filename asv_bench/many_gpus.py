"""Attention on all GPUs of this host against one: times, hidden communication, memory.

    python -m cuflash launch -n 2 asv_bench/many_gpus.py [--tokens 16384 65536 262144] [--out FILE]

bfloat16, head dim 128, 16 heads; causal with zigzag shards, and full. A time is the mean of calls
that are given to the device one behind another, on the slower rank. "Work" is the same calls with
copies on the device in the place of transfers; "transfer" is the transfers alone. What of these
shows in the time of a call beyond its work is not hidden.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import cupy
import ml_dtypes
import numpy as np

import cuflash
from cuflash import distributed
from cuflash.distributed.schedule import Sight, ring_steps
from cuflash.masks.band import Band

HEADS, DIM = 16, 128
SECONDS = 1.5  # of one measurement, about
LEAST, MOST = 5, 30  # calls in it: one by itself is off by up to a tenth
WARM = 3  # calls before
WORK_RATE = 4e14  # operations per second, to choose how many calls are measured


class Still(distributed.Communicator):
    """A rank that gets copies of random arrays of its own in the place of others'."""

    def __init__(self, comm):
        super().__init__(comm.rank, comm.size)
        self.stream, self.arrays = cupy.cuda.Stream(non_blocking=True), {}

    def start(self, sends, receives):
        ready = cupy.cuda.Event(disable_timing=True)
        ready.record()
        for _, x in receives:
            if x.shape not in self.arrays:
                self.arrays[x.shape] = draw(len(self.arrays), x.shape[-2])
        self.stream.wait_event(ready)
        for _, x in receives:
            x.data.copy_from_device_async(self.arrays[x.shape].data, x.nbytes, self.stream)
        done = cupy.cuda.Event(disable_timing=True)
        done.record(self.stream)
        return Copied(done)

    def tell(self, words):
        return [words] * self.size

    def check(self):
        """Nobody fails."""


class Copied:
    def __init__(self, event):
        self.event = event

    def wait(self):
        cupy.cuda.get_current_stream().wait_event(self.event)

    def lead(self):
        """The copies begin when they can."""


def milliseconds(comm, call, operations, host=None) -> float:
    """Of one call, on the rank that takes longer; the host's own go to the list `host`."""
    count = max(LEAST, min(MOST, int(SECONDS * WORK_RATE / operations)))
    for _ in range(WARM):  # memory comes from the pool from then on
        call()
    cupy.cuda.get_current_stream().synchronize()
    comm.tell("ready")
    begin, end = cupy.cuda.Event(), cupy.cuda.Event()
    begin.record()
    since = time.perf_counter()
    for _ in range(count):
        call()
    if host is not None:
        host.append(1e3 * (time.perf_counter() - since) / count)
    end.record()
    end.synchronize()
    return max(comm.tell(cupy.cuda.get_elapsed_time(begin, end) / count))


def draw(seed, tokens):
    """Random bfloat16."""
    random = cupy.random.default_rng(seed)
    shape = (1, HEADS, tokens, DIM)
    made = cupy.empty(shape, ml_dtypes.bfloat16)
    for head in range(HEADS):
        made[:, head] = random.standard_normal((1, tokens, DIM), np.float32)
    return made


def transfers(comm, tokens, layout, causal, backward):
    """A call that moves what a ring moves, and computes nothing."""
    sight = Sight(Band(right=0 if causal else None), (tokens, tokens), None, False)
    steps = ring_steps(comm.rank, comm.size, layout, sight)[1:]
    moved = []
    for x in steps:
        moved.append((x.target, x.send, x.source, x.receive))
        if backward:
            moved.append((x.source, x.receive, x.target, x.send))
    parcels = [
        [
            [(peer, cupy.empty((1, HEADS, len(span), DIM), ml_dtypes.bfloat16))] * 2
            if span else []
            for peer, span in ((target, send), (source, receive))
        ]
        for target, send, source, receive in moved
    ]  # fmt: skip

    def call():
        for sends, receives in parcels:
            comm.start(sends, receives).wait()

    return call, sum(x.nbytes for _, receives in parcels for _, x in receives)


def begin(comm, tokens, causal, algo, layout, operations):
    """Milliseconds of one GPU, by whether backward; this rank's q, k, v, dout, out and lse."""
    q, k, v, dout = (draw(seed, tokens) for seed in range(4))
    options = {"causal": causal, "algo": algo, "return_lse": True}
    out, lse = cuflash.attention(q, k, v, **options)

    def backward():
        return cuflash.attention_backward(dout, q, k, v, out, lse, causal=causal)

    alone = {
        False: milliseconds(comm, lambda: cuflash.attention(q, k, v, **options), operations),
        True: milliseconds(comm, backward, 2.5 * operations),
    }
    mine = [distributed.shard(x, comm, layout=layout) for x in (q, k, v, dout, out)]
    return alone, [*mine, distributed.shard(lse, comm, axis=-1, layout=layout)]


def measure(comm, tokens, causal, algo, ring_only):
    """Rows of forward and backward."""
    layout = "zigzag" if causal else "contiguous"
    operations = 4 * tokens**2 * DIM * HEADS / (2 if causal else 1)
    alone, mine = begin(comm, tokens, causal, algo, layout, operations)
    q, k, v, dout, own_out, own_lse = mine
    pool = cupy.get_default_memory_pool()
    for backward in (False, True):

        def call(rank, backward=backward, method="ring", algo=algo):
            how = {"comm": rank, "layout": layout, "method": method, "causal": causal}
            if backward:
                given = dout, q, k, v, own_out, own_lse
                return distributed.attention_backward(*given, algo=algo, **how)
            return distributed.attention(q, k, v, return_lse=True, algo=algo, **how)

        cupy.cuda.get_current_stream().synchronize()
        pool.free_all_blocks()
        before = pool.used_bytes()
        call(comm)
        cupy.cuda.get_current_stream().synchronize()
        peak = pool.total_bytes() - before
        cost = operations * (2.5 if backward else 1)
        host = []
        ring = milliseconds(comm, lambda: call(comm), cost, host)
        still = Still(comm)
        work = milliseconds(comm, lambda: call(still), cost)  # noqa: B023
        move, received = transfers(comm, tokens, layout, causal, backward)
        transfer = milliseconds(comm, move, cost)
        others = {}
        if not ring_only:
            others["fa2_ms"] = milliseconds(comm, lambda: call(comm, algo="fa2"), cost)
        if not ring_only and tokens < 200_000:
            others |= {
                f"{name}_ms": milliseconds(comm, lambda: call(comm, method=name), cost)  # noqa: B023
                for name in ("ulysses", "gather")
            }
        yield {
            "device": cupy.cuda.runtime.getDeviceProperties(0)["name"].decode(),
            "ranks": comm.size, "tokens": tokens, "causal": causal, "backward": backward,
            "algo": algo or "chosen", "one_gpu_ms": alone[backward], "ring_ms": ring,
            "speedup": alone[backward] / ring, "work_ms": work, "transfer_ms": transfer,
            "gigabytes_per_second": max(comm.tell(received)) / transfer / 1e6,
            "hidden": 1 - max(0.0, min(1.0, (ring - work) / transfer)),
            "operands_mib": sum(x.nbytes for x in mine[:3]) / 2**20,
            "peak_mib": max(comm.tell(peak)) / 2**20,
            "host_ms": max(comm.tell(host[0])),
            **others,
        }  # fmt: skip


def line(row):
    """A row in a line."""
    cells = {k: f"{x:.4g}" if isinstance(x, float) else x for k, x in row.items()}
    return " ".join(f"{name}={x}" for name, x in cells.items() if name != "device")


def main():
    """Print a row for each length, mask and direction."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[16384, 65536, 262144])
    parser.add_argument("--causal-only", action="store_true")
    parser.add_argument("--ring-only", action="store_true", help="leave out what else there is")
    parser.add_argument("--algo", help="of the forward")
    parser.add_argument("--out", type=Path, help="file for the rows, a JSON object a line")
    asked = parser.parse_args()
    comm = distributed.NcclComm.from_environment()
    for tokens in asked.tokens:
        for causal in (True,) if asked.causal_only else (True, False):
            for row in measure(comm, tokens, causal, asked.algo, asked.ring_only):
                if comm.rank == 0:
                    print(line(row), flush=True)
                    if asked.out:
                        with asked.out.open("a") as file:
                            file.write(json.dumps(row) + "\n")
    comm.tell("end")


if __name__ == "__main__":
    main()
