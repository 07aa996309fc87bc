"""Functions of scores, traced once into expressions."""

from __future__ import annotations

import inspect
import linecache
import re
import types
import weakref
from collections.abc import Callable, Mapping, Sequence
from operator import is_
from typing import Any, NoReturn

import numpy as np

from .closure import Closure
from .expression import FUNCTIONS, RESERVED
from .score_mod import ScoreMod

# What to write instead.
_KNOWN = f"functions are {', '.join(FUNCTIONS)} of NumPy"
_CHOOSES = "where(condition, a, b) chooses"
_NAMED = "an array that values index has a name in the module or closure: table = layer.table"
_DECIDES = "a number that decides what is traced is the default of an argument: n=n"
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
# Of functions that were traced, as far as the same closure makes the same of them.
_expressions: weakref.WeakKeyDictionary[types.FunctionType, _Expression]
_expressions = weakref.WeakKeyDictionary()
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
    closure = Closure(given)
    expression = _expressions.get(given)
    if expression is None or not expression.is_of(closure):
        expression = _Expression(_text_of(closure), closure)
        if closure.is_settled:
            _expressions[given] = expression
    found = closure.captures
    return ScoreMod(expression.text, **{name: found[name] for name in expression.names})


class _Expression:
    """What a function was traced into, which captures that reads, and the key of its closure."""

    __slots__ = ("key", "names", "text")

    def __init__(self, text: str, closure: Closure):
        words = frozenset(re.findall(r"\w+", text))
        self.text, self.key = text, closure.key
        self.names = tuple(name for name in closure.captures if name in words)

    def is_of(self, closure: Closure) -> bool:
        """Whether the function is the same with this closure."""
        key = closure.key
        return closure.is_settled and len(key) == len(self.key) and all(map(is_, key, self.key))


def _text_of(closure: Closure) -> str:
    """The expression of what a function returns, whose captures stand by their names."""
    function = closure.function
    for name in closure.captures:
        if name in RESERVED:
            raise _untraceable(
                function, f"{name} of its closure or module has the name of an argument: rename it"
            )
    signature = inspect.signature(function)
    wanted = [p.default is p.empty or p.name == "shift" for p in signature.parameters.values()]
    names = RESERVED[: 6 if sum(wanted) == 6 else 5]
    try:
        signature.bind(*names)
    except TypeError:
        raise TypeError(
            f"score_mod {function.__qualname__} takes {signature}: it is called with "
            "(score, batch, head, q, k) and, if it takes six, shift"
        ) from None
    return trace(closure, names, {name: name for name in closure.captures})


def trace(closure: Closure, arguments: Sequence[str], captures: Mapping[str, str]) -> str:
    """The expression of what a function returns.

    Parameters
    ----------
    closure : Closure
        That of the function.
    arguments : sequence of str
        What stands for its arguments in the expression.
    captures : mapping of str to str
        What stands for its captures.

    Raises
    ------
    TypeError
        If it cannot be traced; the message shows the line.
    """
    function = closure.function
    traced = closure.with_captures({name: _Traced(text) for name, text in captures.items()})
    try:
        result = traced(*map(_Traced, arguments))
    except _Untraceable as error:
        raise _untraceable(function, f"{error}{_line_of(error)}; {error.instead}") from None
    except (TypeError, AttributeError) as error:
        raise _untraceable(function, f"{error}{_line_of(error)}; {_KNOWN}") from error
    if isinstance(result, (bool, int, float, np.generic)):
        result = _Traced(_text(result))
    if not isinstance(result, _Traced):
        raise _untraceable(function, f"it returns a {type(result).__name__}")
    return result._text


def _untraceable(function: Callable[..., Any], why: str) -> TypeError:
    return TypeError(f"score_mod {function.__qualname__} cannot be traced: {why}")


def _line_of(error: BaseException) -> str:
    """Where an error came up: in the innermost function that is none of NumPy's or of here."""
    trace, where = error.__traceback__, ""
    while trace is not None:
        frame = trace.tb_frame
        module = str(frame.f_globals.get("__name__"))
        if module != __name__ and module.split(".")[0] not in ("numpy", "cupy"):
            where = _show(frame.f_code.co_filename, trace.tb_lineno)
        trace = trace.tb_next
    return where


def _show(path: str, number: int) -> str:
    text = linecache.getline(path, number).strip()
    return f", in line {number} of {path}" + (f": {text}" if text else "")


class _Untraceable(Exception):
    """What Python wants to know of a value that is not known while a function is traced.

    Parameters
    ----------
    why : str
    instead : str
        What to write.
    """

    def __init__(self, why: str, instead: str):
        super().__init__(why)
        self.instead = instead


def _refuse(wanted: str, instead: str) -> NoReturn:
    raise _Untraceable(f"it asks for {wanted}", instead)


def _unknown(function: Any) -> _Untraceable:
    name = getattr(function, "__name__", str(function))
    return _Untraceable(f"it calls {name}", _KNOWN)


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
    raise _Untraceable(f"a {type(x).__name__} stands in its arithmetic", _NAMED)


class _Traced:
    """The text of a value, which operators and functions of NumPy add to."""

    __slots__ = ("_text",)

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
        raise _unknown(ufunc)

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
        wanted = "the truth of a value (`if`, `and`, `or`, `not`, min, max)"
        _refuse(wanted, f"{_CHOOSES}; {_DECIDES}")

    def __float__(self) -> float:
        _refuse("a value as a float", _KNOWN)

    def __int__(self) -> int:
        _refuse("a value as an int", _DECIDES)

    def __index__(self) -> int:
        _refuse("a value as an index", f"{_NAMED}; {_DECIDES}")

    def __array__(self, *options: Any, **more: Any) -> Any:
        _refuse("a value as an array or an index of one", _NAMED)

    def __hash__(self) -> int:
        _refuse("a value as a key", _NAMED)

    def __iter__(self) -> Any:
        _refuse("the items of a value", _DECIDES)

    def __len__(self) -> int:
        _refuse("the length of a value", _DECIDES)


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
