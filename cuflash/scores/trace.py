"""Functions of scores, traced once into expressions."""

from __future__ import annotations

import inspect
import linecache
import sys
import types
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import numpy as np

from .expression import FUNCTIONS, RESERVED
from .score_mod import ScoreMod

_MODULE = __name__
_INSTEAD = "where(condition, a, b) chooses"
_UFUNCS = {
    np.add: "+", np.subtract: "-", np.multiply: "*", np.true_divide: "/", np.floor_divide: "//",
    np.remainder: "%", np.bitwise_and: "&", np.bitwise_or: "|", np.logical_and: "&",
    np.logical_or: "|", np.less: "<", np.less_equal: "<=", np.greater: ">", np.greater_equal: ">=",
    np.equal: "==", np.not_equal: "!=",
}  # fmt: skip
_CALLED = {
    np.exp: "exp", np.log: "log", np.tanh: "tanh", np.sqrt: "sqrt", np.absolute: "abs",
    np.minimum: "minimum", np.maximum: "maximum", np.where: "where",
}  # fmt: skip
# Of functions that were traced, by the names of what they capture.
_texts: weakref.WeakKeyDictionary[types.FunctionType, dict[tuple[str, ...], str]]
_texts = weakref.WeakKeyDictionary()
_PREFIXES = {np.negative: "-", np.positive: "+", np.invert: "~", np.logical_not: "~"}


def as_score_mod(given: object) -> ScoreMod | None:
    """`score_mod` as a ScoreMod; a function is traced.

    Raises
    ------
    TypeError
        If it is neither, or cannot be traced; the message shows the line.
    ValueError
        If what it computes is no score expression.
    """
    if given is None or isinstance(given, ScoreMod):
        return given
    if not isinstance(given, types.FunctionType):
        raise TypeError(
            f"score_mod is a {type(given).__name__}: give a cuflash.ScoreMod or a function"
        )
    captures = captures_of(given)
    texts = _texts.setdefault(given, {})
    names = tuple(captures)
    if names not in texts:
        texts[names] = _text_of(given, captures)
    return ScoreMod(texts[names], **captures)


def captures_of(function: types.FunctionType) -> dict[str, Any]:
    """Arrays and numbers that the function finds in its closure and its module."""
    found = inspect.getclosurevars(function)
    seen = {**found.globals, **found.nonlocals}
    return {name: value for name, value in seen.items() if _is_captured(value)}


def _is_captured(value: object) -> bool:
    if isinstance(value, (bool, int, float, np.generic)):
        return True
    is_array = hasattr(value, "dtype") and hasattr(value, "shape")
    return is_array and not isinstance(value, (type, types.ModuleType))


def _text_of(function: types.FunctionType, captures: dict[str, Any]) -> str:
    """The expression of what the function returns, whose captures stand by their names."""
    for name in captures:
        if name in RESERVED:
            raise _untraceable(
                function, f"{name} of its closure or module has the name of an argument: rename it"
            )
    try:
        count = sum(
            p.default is p.empty or p.name == "shift"
            for p in inspect.signature(function).parameters.values()
        )
        names = RESERVED[: 6 if count == 6 else 5]
        inspect.signature(function).bind(*names)
    except TypeError:
        raise TypeError(
            f"score_mod {function.__qualname__} takes {inspect.signature(function)}: it is called "
            "with (score, batch, head, q, k) and, if it takes six, shift"
        ) from None
    return trace(function, names, {name: name for name in captures})


def trace(
    function: types.FunctionType, arguments: Sequence[str], captures: Mapping[str, str]
) -> str:
    """The expression of what a function returns.

    Parameters
    ----------
    function : function
    arguments : sequence of str
        What stands for its arguments in the expression.
    captures : mapping of str to str
        What stands for the names of its closure and its module.

    Raises
    ------
    TypeError
        If it cannot be traced; the message shows the line.
    """
    code = function.__code__
    stand_ins = {name: _Traced(text) for name, text in captures.items()}
    cells = tuple(
        types.CellType(stand_ins[name]) if name in stand_ins else cell
        for name, cell in zip(code.co_freevars, function.__closure__ or ())
    )
    traced = types.FunctionType(
        code, {**function.__globals__, **stand_ins}, function.__name__, function.__defaults__, cells
    )
    traced.__kwdefaults__ = function.__kwdefaults__
    try:
        result = traced(*map(_Traced, arguments))
    except _Untraceable as error:
        raise TypeError(str(error)) from None
    except (TypeError, AttributeError) as error:
        line = _line_of(function, error)
        raise _untraceable(function, f"{error}{line}; functions are {_functions()}") from error
    if isinstance(result, (bool, int, float, np.generic)):
        result = _Traced(_text(result))
    if not isinstance(result, _Traced):
        raise _untraceable(function, f"it returns a {type(result).__name__}")
    return result._text


def _functions() -> str:
    return f"{', '.join(FUNCTIONS)} of NumPy"


def _untraceable(function: Callable[..., Any], why: str) -> TypeError:
    return TypeError(f"score_mod {function.__qualname__} cannot be traced: {why}")


def _line_of(function: types.FunctionType, error: BaseException) -> str:
    """Where in the function an error came up."""
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code is function.__code__:
            return _show(trace.tb_frame.f_code.co_filename, trace.tb_lineno)
        trace = trace.tb_next
    return ""


def _show(path: str, number: int) -> str:
    text = linecache.getline(path, number).strip()
    return f", in line {number} of {path}" + (f": {text}" if text else "")


class _Untraceable(Exception):
    """What Python wants to know of a value that is not known while a function is traced."""


def _refuse(wanted: str) -> NoReturn:
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_globals.get("__name__") == _MODULE:
        frame = frame.f_back
    where = _show(frame.f_code.co_filename, frame.f_lineno)
    raise _Untraceable(f"score_mod cannot be traced: it asks for {wanted}{where}; {_INSTEAD}")


def _unknown(function: Any) -> _Untraceable:
    name = getattr(function, "__name__", str(function))
    return _Untraceable(f"score_mod cannot be traced: {name} is not among {_functions()}")


def _text(x: object) -> str:
    """A value in an expression."""
    if isinstance(x, _Traced):
        return x._text
    if isinstance(x, (bool, np.bool_)):
        return str(bool(x))
    if isinstance(x, (int, np.integer)):
        return str(int(x))
    if isinstance(x, (float, np.floating)):
        return repr(float(x))
    raise _Untraceable(f"score_mod cannot be traced: a {type(x).__name__} stands in its arithmetic")


class _Traced:
    """The text of a value, which operators and functions of NumPy add to."""

    __slots__ = ("_text",)
    __hash__ = None  # type: ignore[assignment]  # == is part of the expression

    def __init__(self, text: str):
        self._text = text

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **options: Any) -> Any:
        given = [_text(x) for x in inputs]
        if method == "__call__" and not options:
            if ufunc in _UFUNCS:
                return _Traced(f"({given[0]} {_UFUNCS[ufunc]} {given[1]})")
            if ufunc in _PREFIXES:
                return _Traced(f"({_PREFIXES[ufunc]}{given[0]})")
            if ufunc in _CALLED:
                return _Traced(f"{_CALLED[ufunc]}({', '.join(given)})")
        raise _Untraceable(
            f"score_mod cannot be traced: {ufunc.__name__} is not among {_functions()}"
        )

    def __array_function__(self, function: Any, types: Any, args: Any, options: Any) -> Any:
        if function in _CALLED and not options:
            return _Traced(f"{_CALLED[function]}({', '.join(map(_text, args))})")
        raise _unknown(function)

    def __getitem__(self, index: Any) -> _Traced:
        indices = index if isinstance(index, tuple) else (index,)
        return _Traced(f"{self._text}[{', '.join(map(_text, indices))}]")

    def __neg__(self) -> _Traced:
        return _Traced(f"(-{self._text})")

    def __pos__(self) -> _Traced:
        return _Traced(f"(+{self._text})")

    def __invert__(self) -> _Traced:
        return _Traced(f"(~{self._text})")

    def __abs__(self) -> _Traced:
        return _Traced(f"abs({self._text})")

    def __bool__(self) -> bool:
        _refuse("the truth of a value (`if`, `and`, `or`, `not`, min, max)")

    def __float__(self) -> float:
        _refuse("a value as a float")

    def __int__(self) -> int:
        _refuse("a value as an int")

    def __index__(self) -> int:
        _refuse("a value as an index")

    def __iter__(self) -> Any:
        _refuse("the items of a value")

    def __len__(self) -> int:
        _refuse("the length of a value")


def _operator(symbol: str, turned: bool = False) -> Callable[[_Traced, object], Any]:
    def operate(self: _Traced, other: object) -> Any:
        if not isinstance(other, (_Traced, bool, int, float, np.generic)):
            return NotImplemented
        a, b = (_text(other), self._text) if turned else (self._text, _text(other))
        return _Traced(f"({a} {symbol} {b})")

    return operate


for _name, _symbol in {
    "add": "+", "sub": "-", "mul": "*", "truediv": "/", "floordiv": "//", "mod": "%", "and": "&",
    "or": "|",
}.items():  # fmt: skip
    setattr(_Traced, f"__{_name}__", _operator(_symbol))
    setattr(_Traced, f"__r{_name}__", _operator(_symbol, turned=True))
for _name, _symbol in {
    "lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!="
}.items():  # fmt: skip
    setattr(_Traced, f"__{_name}__", _operator(_symbol))
