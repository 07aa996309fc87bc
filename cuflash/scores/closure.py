"""What a function finds outside of itself: names of its closure and of its module."""

from __future__ import annotations

import dis
import functools
import sys
import types
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

_MISSING = object()
# What is the same whenever it is called with the same.
_BUILTINS = frozenset(
    "abs all any bool dict divmod enumerate float int isinstance len list map max min pow range "
    "reversed round set slice sorted str sum tuple zip".split()
)
_LIBRARIES = ("numpy", "math")
_OF_LIBRARIES = np.ufunc, type(np.where), types.BuiltinFunctionType, types.FunctionType, type


class Closure:
    """What a function finds outside of itself, and what the functions find that it finds there.

    Numbers and arrays are captures, whose values are no part of an expression. Functions written
    in Python are followed. Anything else decides what the expression is.

    Parameters
    ----------
    function : function

    Attributes
    ----------
    captures : dict of str to number or array
        By their names. Another one of the same name is name_2, the next one name_3.
    key : list
        What decides the expression: it is the same where all items are the same objects. Of a
        capture that is its name, of a function its number, code and defaults.
    is_settled : bool
        Whether all items of the key are for ever what they are; others hold what may change.
    """

    def __init__(self, function: types.FunctionType):
        self.function = function
        self.captures: dict[str, Any] = {}
        self.key: list[Any] = []
        self.is_settled = True
        self._functions = [function]
        self._names: dict[tuple[int, str], str] = {}  # of captures, by where they are found
        for one in self._functions:  # which grow
            self._add_function(one)

    def _add_function(self, function: types.FunctionType) -> None:
        defaults = function.__defaults__
        self.key += (function.__code__, defaults)
        if function.__kwdefaults__ or function.__dict__ or not _is_settled(defaults):
            self.is_settled = False
        for place, name, value in _found_by(function):
            if is_captured(value):
                self.key.append(self._captured(place, name, value))
            elif type(value) is types.FunctionType and not _is_of_library(value):
                if value not in self._functions:
                    self._functions.append(value)
                self.key.append(self._functions.index(value))
            else:
                self.key.append(value)
                if not (name in _BUILTINS if value is _MISSING else _is_settled(value)):
                    self.is_settled = False

    def _captured(self, place: object, name: str, value: Any) -> str:
        """The name of a capture."""
        where = id(place), name
        known = self._names.get(where)
        if known is None:
            known, count = name, 1
            while known in self.captures and not _are_one_array(self.captures[known], value):
                count += 1
                known = sys.intern(f"{name}_{count}")
            self._names[where] = known
            self.captures[known] = value
        return known

    def with_captures(self, stand_ins: Mapping[str, Any]) -> types.FunctionType:
        """The function as if its captures, and those of the functions it finds, had other values.

        Parameters
        ----------
        stand_ins : mapping of str to object
            These values, by the captures' names.
        """
        places: dict[int, Any] = {}  # copies of modules' names and of cells
        copies: dict[types.FunctionType, types.FunctionType] = {}
        for one in self._functions:
            space = places.setdefault(id(one.__globals__), one.__globals__.copy())
            cells = tuple(
                places.setdefault(id(cell), types.CellType()) for cell in one.__closure__ or ()
            )
            made = types.FunctionType(one.__code__, space, one.__name__, one.__defaults__, cells)
            made.__kwdefaults__ = one.__kwdefaults__
            made.__dict__.update(one.__dict__)
            copies[one] = made
        for one in self._functions:
            for place, name, value in _found_by(one):
                known = self._names.get((id(place), name))
                if known is not None:
                    value = stand_ins[known]
                elif type(value) is types.FunctionType:
                    value = copies.get(value, value)
                if value is _MISSING:
                    continue
                if isinstance(place, types.CellType):
                    places[id(place)].cell_contents = value
                else:
                    places[id(place)][name] = value
        return copies[self.function]


def is_captured(value: object) -> bool:
    """Whether it is a number or an array."""
    if isinstance(value, (bool, int, float, np.generic, np.ndarray)):
        return True
    is_array = hasattr(value, "dtype") and hasattr(value, "shape")
    return is_array and not isinstance(value, (type, types.ModuleType))


def _are_one_array(a: object, b: object) -> bool:
    """Whether both are the same array, which has one gradient then."""
    return a is b and not isinstance(a, (bool, int, float, np.generic))


def _found_by(function: types.FunctionType) -> Iterator[tuple[Any, str, Any]]:
    """The module's names or the cell that a function reads, the name and its value."""
    code, space = function.__code__, function.__globals__
    for name in _globals_of(code):
        yield space, name, space.get(name, _MISSING)
    for name, cell in zip(code.co_freevars, function.__closure__ or ()):
        try:
            yield cell, name, cell.cell_contents
        except ValueError:  # it has no value yet
            yield cell, name, _MISSING


@functools.lru_cache(maxsize=1024)
def _globals_of(code: types.CodeType) -> tuple[str, ...]:
    """The names of its module that code reads, and those of modules that it imports."""
    names: dict[str, None] = {}
    for step in dis.get_instructions(code):
        if "GLOBAL" in step.opname or step.opname in ("LOAD_NAME", "IMPORT_NAME"):
            names[step.argval] = None
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            names |= dict.fromkeys(_globals_of(inner))
    return tuple(names)


def _is_settled(value: object) -> bool:
    """Whether what it holds can never change."""
    if value is None or isinstance(value, (str, bool, int, float, np.generic, complex)):
        return True
    if type(value) is tuple:
        return all(map(_is_settled, value))
    return _is_of_library(value)


def _is_of_library(value: object) -> bool:
    """Whether it is NumPy or math, or a function or a type of them."""
    if type(value) is types.ModuleType:
        return value.__name__ in _LIBRARIES
    return type(value) in _OF_LIBRARIES and (value.__module__ or "").split(".")[0] in _LIBRARIES
