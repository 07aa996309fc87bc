"""Runs CUDA C kernels on the CPU, from the source string that CuPy's RawKernel gets.

``Module`` compiles a source with g++, its inline PTX included; ``Memory`` holds emulated device
memory; ``Module.launch`` runs a kernel as the device would, and in check mode reports races,
accesses out of bounds, reads of never-written memory and misuse of the asynchronous instructions.
README.md says how, and what it cannot see.
"""

from .memory import Memory, TensorMap
from .module import EAGER, EmulatorError, Module, available

__all__ = ["EAGER", "EmulatorError", "Memory", "Module", "TensorMap", "available"]
