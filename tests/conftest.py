import functools
import gc
import os
import sys
import warnings
import zlib
from collections import Counter, defaultdict

os.environ.setdefault(
    "OPENBLAS_NUM_THREADS", "1"
)  # before NumPy is imported: tests run side by side

import emulator
import hypothesis
import pytest

# The same examples in every run, however long a busy machine takes for them;
# `--hypothesis-profile default` looks for new ones.
hypothesis.settings.register_profile(
    "steady",
    derandomize=True,
    deadline=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("steady")

COVERED = 4  # cases of a test


@pytest.fixture
def empty_cache(monkeypatch):
    """No call is known yet."""
    from cuflash.calls import run

    monkeypatch.setattr(run, "_calls", {})


@pytest.fixture(autouse=True)
def torch_as_it_was():
    """What the comparison and the benchmarks set in torch stays in their tests."""
    torch = sys.modules.get("torch")
    enabled = torch is None or torch.is_grad_enabled()
    yield
    if torch := sys.modules.get("torch"):
        torch.set_grad_enabled(enabled)


@functools.cache
def missing_gpu():
    """Why tests marked `gpu` cannot run here, or an empty string."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import cupy

        count = cupy.cuda.runtime.getDeviceCount()
    except Exception as error:  # no CuPy, no driver, a driver too old: all said by the message
        return f"no CUDA device: {type(error).__name__}: {error}"
    return "" if count else "no CUDA device: CuPy counts 0"


def pytest_configure(config):
    """Where a machine is said to have a GPU or a compiler, its absence is no reason to skip."""
    if os.environ.get("CUFLASH_REQUIRE_GPU") == "1" and missing_gpu():
        raise pytest.UsageError(f"CUFLASH_REQUIRE_GPU=1, but {missing_gpu()}")
    if os.environ.get("CUFLASH_REQUIRE_EMULATOR") == "1" and emulator.available():
        raise pytest.UsageError(f"CUFLASH_REQUIRE_EMULATOR=1, but {emulator.available()}")


@pytest.hookimpl(tryfirst=True)  # before those marked `full` are left out
def pytest_collection_modifyitems(items):
    """Of the cases of a test marked `one_in(n)` a share of 1 / n stays, others are marked `full`.

    Which ones says a checksum of their names: every n-th might always be of the same type. First
    come those with most words, such as engines and types, and kernels that none before them has.
    """
    cases = defaultdict(list)
    for item in items:
        if item.get_closest_marker("one_in"):
            cases[item.nodeid.split("[")[0]].append(item)
    for of_test in cases.values():
        share = -(-len(of_test) // of_test[0].get_closest_marker("one_in").args[0])
        for item in _in_turn(of_test)[share:]:
            item.add_marker("full")
    _limit_coverage(items)


def _words(name):
    """What a case stands for: each word at its place, and each beginning, such as a kernel's."""
    return {*enumerate(name), *(tuple(name[:end]) for end in range(2, len(name)))}


def _in_turn(of_test):
    """Cases of a test, by a checksum, but those first that bring most words not seen before."""
    rest = sorted(of_test, key=lambda item: zlib.crc32(item.nodeid.split("[")[-1].encode()))
    words = {item: _words(item.nodeid.split("[", 1)[1][:-1].split("-")) for item in of_test}
    common = Counter(word for found in words.values() for word in found)
    seen, first = {word for word in common if common[word] == 1}, []
    while rest:
        item = max(rest, key=lambda item: len(words[item] - seen))
        if words[item] <= seen:
            break
        seen |= words[item]
        rest.remove(item)
        first.append(item)
    return first + rest


def _limit_coverage(items):
    """Coverage makes a case half as long again: the first few of a test call what all others do,
    and examples that hypothesis draws call what other tests do.
    """
    run = Counter()
    for item in items:
        if not item.get_closest_marker("full"):
            test = item.nodeid.split("[")[0]
            run[test] += 1
            drawn = getattr(getattr(item, "obj", None), "is_hypothesis_test", False)
            if run[test] > COVERED or drawn:
                item.add_marker("no_cover")


def pytest_collection_finish():
    """The tests themselves are no garbage: nobody need look at all of them again and again."""
    gc.freeze()


def pytest_runtest_setup(item):
    if item.get_closest_marker("gpu") and missing_gpu():
        pytest.skip(missing_gpu())
