"""What is said of a machine: its device, its versions, and what it lacks."""

import sys
import types

import numpy as np
import pytest

from cuflash.compare import machine


class FewFacts:
    """The facts of a device, and of libraries that may not load, as `describe` reads them."""

    __version__ = "14.0"

    def __init__(self, compiler):
        facts = {"name": b"NVIDIA H200", "major": 9, "minor": 0, "totalGlobalMem": 139 << 30}
        runtime = types.SimpleNamespace(
            getDeviceCount=lambda: 1,
            getDeviceProperties=lambda number: facts,
            driverGetVersion=lambda: 13000,
        )
        nvrtc = types.SimpleNamespace(getVersion=compiler)
        self.cuda = types.SimpleNamespace(runtime=runtime, nvrtc=nvrtc)


def missing_library():
    raise RuntimeError("libnvrtc.so.13 not found")


@pytest.mark.parametrize(
    ("compiler", "words"),
    [(lambda: (13, 0), "NVRTC 13.0"), (missing_library, "no NVRTC (libnvrtc.so.13 not found)")],
)
def test_description_of_a_device(compiler, words):
    lines = machine.describe(FewFacts(compiler)).splitlines()
    assert lines[0] == "GPU 0    NVIDIA H200, compute capability 9.0, 139 GiB"
    assert lines[1] == f"CuPy 14.0, {words}, driver for CUDA 13"


def test_facts_name_the_machine(monkeypatch):
    facts = machine.facts()
    assert set(facts) == {"date", "python", "numpy", "device"}
    assert facts["numpy"] == np.__version__
    assert facts["device"].endswith(" cores")

    def missing(*args, **kwargs):
        raise FileNotFoundError

    monkeypatch.setattr("builtins.open", missing)
    monkeypatch.setattr(machine.platform, "processor", lambda: "a processor")
    assert machine.facts()["device"].startswith("a processor, ")


def test_torch_that_is_not_there(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    assert machine.find_torch.__wrapped__() is None


def test_torch_without_a_device(monkeypatch):
    class Torch(types.ModuleType):
        cuda = types.SimpleNamespace(is_available=lambda: False)
        __path__ = ()

    for name in ("torch", "torch.nn", "torch.nn.attention", "torch.utils"):
        monkeypatch.setitem(sys.modules, name, Torch(name))
    monkeypatch.setitem(sys.modules, "torch.utils.deterministic", Torch("deterministic"))
    assert machine.find_torch.__wrapped__() is None
