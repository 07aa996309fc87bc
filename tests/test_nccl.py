"""Ranks that are processes with a GPU each; `nccl_ranks.py` is what they do."""

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import missing_gpu
from tolerance import assert_backward_close, assert_forward_close

from cuflash import distributed
from cuflash.distributed import NcclComm

pytestmark = pytest.mark.gpu
SCRIPT = Path(__file__).with_name("nccl_ranks.py")


def launched(*arguments):
    import cupy
    from cupy.cuda import nccl

    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("one CUDA device: two are needed")
    if not nccl.available:
        pytest.skip("NCCL is missing")
    command = [sys.executable, "-m", "cuflash", "launch", "-n", "2", str(SCRIPT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)


def test_results_and_errors_on_two_gpus():
    done = launched()
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[-1] == "errors: the same on both ranks"
    assert len(lines) == 9


def test_killing_a_rank_ends_the_other():
    done = launched("killed")
    assert re.fullmatch(r"rank 0, \d\.\d s: rank 1 has left: its process has ended\n", done.stdout)


def test_transfers_that_do_not_end_are_aborted():
    done = launched("silent")
    said = sorted(done.stdout.splitlines())
    assert [x.split(": ", 1)[1] for x in said] == ["rank 1 has moved no array in 4 s"] * 2


@pytest.mark.parametrize("method", ["ring", "ulysses", "gather"])
def test_threads_share_one_gpu(method):
    import cupy

    host = np.random.default_rng(0).standard_normal((4, 1, 4, 256, 64)).astype(np.float16)
    q, k, v, dout = map(cupy.asarray, host)

    def rank(comm):
        mine = [distributed.shard(x, comm, layout="zigzag") for x in (q, k, v, dout)]
        how = {"comm": comm, "layout": "zigzag", "method": method, "causal": True}
        out, lse = distributed.attention(*mine[:3], return_lse=True, **how)
        grads = distributed.attention_backward(mine[3], *mine[:3], out, lse, **how)
        whole = [distributed.unshard(x, comm, layout="zigzag") for x in (out, *grads)]
        return whole[0], distributed.unshard(lse, comm, -1, "zigzag"), whole[1:]

    for out, lse, grads in distributed.LocalComm.run(2, rank):
        assert_forward_close(out, lse, *host[:3], causal=True)
        assert_backward_close(grads, host[3], *host[:3], causal=True)


def test_without_an_environment(monkeypatch):
    assert not missing_gpu()
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises((ValueError, RuntimeError), match="RANK is not set|NCCL is missing"):
        NcclComm.from_environment()
