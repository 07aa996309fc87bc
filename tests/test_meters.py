"""Times and memory: turns, how many calls, data, and the unfused expression."""

import itertools
import types
from collections import Counter

import numpy as np
import pytest

from cuflash import reference
from cuflash.compare import meters
from cuflash.compare.machine import DTYPES


def test_contenders_take_turns():
    """Each as often behind each other, and as the first."""
    order, names, rounds = [], "abcd", 400
    calls = [lambda name=name: order.append(name) for name in names]
    columns = meters.HostMeter().rounds(calls, rounds)
    assert [len(column) for column in columns] == [rounds] * 4
    for begin in range(0, len(order), 4):
        assert sorted(order[begin : begin + 4]) == list(names)
    pairs = Counter(pair for pair in itertools.pairwise(order) if len(set(pair)) == 2)
    firsts = Counter(order[::4])
    assert len(pairs) == 12
    for counts in (pairs, firsts):
        assert max(counts.values()) < 1.5 * min(counts.values())
    assert all(0 <= time < 1e5 for column in columns for time in column)


@pytest.mark.parametrize("host", [1, 30])
def test_the_gpu_never_waits_for_the_host(host):
    """A GPU where a flush takes 10 and a call nothing, and a host that takes `host` for a call."""
    clock, end, flushes = 0, 0, 0

    class Event:
        def record(self):
            nonlocal end
            self.time = end = max(end, clock)

        @property
        def done(self):
            return self.time <= clock

    class Buffer:
        def memset_async(self, value, size):
            nonlocal end, flushes
            end, flushes = max(end, clock) + 10, flushes + 1

    def call():
        nonlocal clock
        clock += host

    cuda = types.SimpleNamespace(
        Event=Event, Device=lambda: types.SimpleNamespace(synchronize=lambda: None),
        get_elapsed_time=lambda start, stop: (stop.time - start.time) / 1e3,
    )  # fmt: skip
    buffer = types.SimpleNamespace(data=Buffer())
    cupy = types.SimpleNamespace(cuda=cuda, empty=lambda *_: buffer, uint8=None)
    columns = meters.GpuMeter(cupy).rounds([call, call], 50)
    assert columns == [[0.0] * 50] * 2
    more = flushes - meters.LEAD - 100
    assert more == 0 if host < 10 else more > 100


@pytest.mark.parametrize(("milliseconds", "most", "count"), [(0.01, 200, 5), (1000, 7, 7)])
def test_measure_warms_up_and_counts(milliseconds, most, count):
    calls = []
    (column,) = meters.HostMeter().measure([lambda: calls.append(0)], milliseconds, most)
    assert len(column) == count
    assert len(calls) > count + 1 + 3  # the first, three to estimate, and some to warm up


def test_measured_times_are_those_of_the_calls(monkeypatch):
    clock = iter(range(0, 10**9, 10))
    monkeypatch.setattr(meters.time, "perf_counter", lambda: next(clock) / 1e6)
    (column,) = meters.HostMeter().rounds([lambda: None], 4)
    assert column == pytest.approx([10.0] * 4)


def test_memory_beyond_the_result():
    def call():
        scratch = np.ones(1 << 20, np.uint8)
        return scratch[: 1 << 10].copy(), np.zeros(1 << 12, np.uint8)

    meter = meters.HostMeter()
    extra = meter.extra_bytes(call)
    assert (1 << 20) <= extra + (1 << 10) + (1 << 12) < (1 << 20) + (1 << 14)
    taken, result = meter.taken_bytes(lambda: np.empty(1 << 16, np.uint8))
    assert taken >= result.nbytes == 1 << 16


def test_paired_ratio_is_the_median_of_ratios():
    assert meters.paired_ratio([2, 30, 4], [1, 10, 4]) == 2


@pytest.mark.parametrize("dtype", DTYPES)
def test_drawn_values_are_normal_and_differ_between_heads(dtype):
    x = meters.draw(np, (2, 3, 4096, 64), dtype, seed=1)
    assert x.dtype == DTYPES[dtype]
    wide = x.astype(np.float64)
    assert abs(wide.mean()) < 0.01
    assert abs(wide.std() - 1) < 0.01
    assert not (wide[0, 0] == wide[1, 0]).mean() > 0.1
    assert (x == meters.draw(np, (2, 3, 4096, 64), dtype, seed=1)).all()
    assert not (x[0] == meters.draw(np, (2, 3, 4096, 64), dtype, seed=2)[0]).all()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_unfused_is_attention(causal, dtype):
    q, k, v = (meters.draw(np, (2, 3, 17, 8), dtype, seed) for seed in range(3))
    bias = meters.causal_bias(np, 17, dtype) if causal else None
    found = meters.unfused(q, k, v, bias)
    bound = reference.forward_bound(q, k, v, dtype, causal=causal)
    assert found.dtype == DTYPES[dtype]
    assert np.abs(found - bound.out).max() < (1e-5 if dtype == "float32" else 1e-13)
