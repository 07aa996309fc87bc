"""Two ranks with a GPU each: `python -m cuflash launch -n 2 tests/nccl_ranks.py` runs all checks.

`killed` as an argument: rank 1 ends in the middle; `silent`: it does not send.
"""

import os
import signal
import sys
import time

import cupy
import numpy as np
import pytest
from cases import numpy_dtype
from tolerance import assert_backward_close, assert_forward_close

from cuflash import BlockMask, distributed

N = 512
MASK = BlockMask.sliding_window((N, N), (200, 50), block_size=64)
CHECKS = {
    "full": ({}, "bfloat16", 4),
    "causal": ({"causal": True}, "bfloat16", 4),
    "causal, fp16": ({"causal": True}, "float16", 4),
    "causal, fp32": ({"causal": True}, "float32", 4),
    "grouped heads, softcap": ({"causal": True, "enable_gqa": True, "softcap": 5.0}, "bfloat16", 2),
    "window": ({"window": (100, 20)}, "bfloat16", 4),
    "dropout": ({"causal": True, "dropout_p": 0.25, "seed": 3}, "bfloat16", 4),
    "blocks": ({"mask": MASK, "causal": True}, "bfloat16", 4),
}


def check(comm, name):
    """One line: the worst error over its bound, of all methods and layouts."""
    options, dtype, heads = CHECKS[name]
    dense = options | ({"mask": MASK.to_dense()} if "mask" in options else {})
    rng = np.random.default_rng(1)
    q, dout = rng.standard_normal((2, 1, 4, N, 64)).astype(numpy_dtype(dtype))
    k, v = rng.standard_normal((2, 1, heads, N, 64)).astype(numpy_dtype(dtype))
    worst = 0.0
    for layout in ("contiguous", "zigzag"):
        mine = [distributed.shard(cupy.asarray(x), comm, layout=layout) for x in (q, k, v, dout)]
        for method in ("ring", "ulysses", "gather"):
            how = {"comm": comm, "layout": layout, "method": method, **options}
            bits = []
            for _ in range(2):
                out, lse = distributed.attention(*mine[:3], return_lse=True, **how)
                grads = distributed.attention_backward(mine[3], *mine[:3], out, lse, **how)
                parts = [out, *grads]
                whole = [distributed.unshard(x, comm, layout=layout) for x in parts]
                whole.append(distributed.unshard(lse, comm, -1, layout))
                bits.append([x.view(np.uint8).get() for x in whole])
            for first, second in zip(*bits, strict=True):
                np.testing.assert_array_equal(first, second)
            if comm.rank == 0:
                out, *grads, lse = whole
                worst = max(worst, assert_forward_close(out, lse, q, k, v, **dense))
                worst = max(worst, assert_backward_close(grads, dout, q, k, v, **dense))
    return f"{name}: {worst:.2f} of its bound"


def check_errors(comm):
    """Options and shapes that differ are the same error on both ranks, who go on."""
    x = cupy.ones((1, 2, 128, 64), np.float16)
    for options, words in (
        ({"causal": comm.rank == 0}, "causal differs between ranks: True on rank 0; False on rank"),
        ({"window": -comm.rank}, "rank 1: window=-1: widths are not negative"),
    ):
        with pytest.raises(ValueError) as raised:
            distributed.attention(x, x, x, comm=comm, **options)
        assert str(raised.value).startswith(words), raised.value
    distributed.attention(x, x, x, comm=comm)
    return "errors: the same on both ranks"


def main():
    asked = sys.argv[1:]
    comm = distributed.NcclComm.from_environment(timeout=4 if asked else 60)
    if asked:
        fail_on_purpose(comm, asked[0])
    for name in CHECKS:
        line = check(comm, name)
        if comm.rank == 0:
            print(line, flush=True)
    line = check_errors(comm)
    if comm.rank == 0:
        print(line, flush=True)
    comm.tell("end")


def fail_on_purpose(comm, how):
    x = cupy.ones((1, 2, 4096, 64), np.float16)
    distributed.attention(x, x, x, comm=comm, method="ring")
    begin = time.monotonic()
    if comm.rank == 1 and how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if comm.rank == 1 and how == "silent":
        time.sleep(6)
    try:
        while True:
            if how == "silent":
                comm.start([], [(1, x)]).wait()
                cupy.cuda.get_current_stream().synchronize()
                comm.check()
            distributed.attention(x, x, x, comm=comm, method="ring")
    except distributed.RankError as error:
        seconds = time.monotonic() - begin
        print(f"rank {comm.rank}, {seconds:.1f} s: {error}", flush=True)
        raise SystemExit(0 if seconds < 20 else 1) from None


if __name__ == "__main__":
    main()
