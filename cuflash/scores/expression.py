"""Score expressions: Python's syntax, read once into a tree of typed nodes.

C (`emit.py`) and NumPy (`evaluate.py`) are made from the tree, so both mean the same.
"""

from __future__ import annotations

import ast
import functools
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, NoReturn, TypeAlias

Kind: TypeAlias = Literal["bool", "integer", "real"]

POSITIONS = ("batch", "head", "q", "k", "shift")
RESERVED = ("score", *POSITIONS)
FUNCTIONS = {
    "where": 3, "minimum": 2, "maximum": 2, "abs": 1, "exp": 1, "log": 1, "tanh": 1, "sqrt": 1,
}  # fmt: skip
_OPERATORS: dict[type[ast.AST], str] = {
    ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/", ast.FloorDiv: "//", ast.Mod: "%",
    ast.BitAnd: "&", ast.BitOr: "|", ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=",
    ast.Eq: "==", ast.NotEq: "!=", ast.USub: "negative", ast.UAdd: "positive", ast.Invert: "~",
}  # fmt: skip
_HINTS: dict[type[ast.AST], str] = {
    ast.IfExp: "write where(condition, a, b)",
    ast.BoolOp: "write & for `and`, | for `or`, with both sides in brackets",
    ast.Not: "write ~ for `not`",
    ast.Pow: "write a product, or exp and log",
    ast.Attribute: f"functions are {', '.join(FUNCTIONS)}, without a module",
    ast.Slice: "give an index for each axis",
}
_LARGEST = 2**31 - 1


class Capture(NamedTuple):
    """A name that an expression captures, without its value.

    Parameters
    ----------
    name : str
    element : str
        "real", "integer" or "bool" for a number; the type of an array's elements.
    axes : int
        Of an array; -1 for a number.
    adjacent : bool
        Whether elements of an array's last axis lie side by side.
    """

    name: str
    element: str
    axes: int = -1
    adjacent: bool = False

    @property
    def is_array(self) -> bool:
        """Whether it is no number."""
        return self.axes >= 0

    @property
    def kind(self) -> Kind:
        """What its elements count as."""
        if "float" in self.element or self.element == "real":
            return "real"
        return "bool" if self.element == "bool" else "integer"


@dataclass(frozen=True, eq=False)
class Node:
    """A part of an expression.

    Parameters
    ----------
    operation : str
        "score", "position", "number" (of the text), "capture", "read" (of an array, at `inputs`),
        an operator or a function.
    kind : {"bool", "integer", "real"}
    inputs : tuple of Node
    value : object
        Of a number; the name of a position, or the Capture.
    """

    operation: str
    kind: Kind
    inputs: tuple[Node, ...] = ()
    value: Any = None

    @functools.cached_property
    def reads_score(self) -> bool:
        """Whether it depends on the score."""
        return self.operation == "score" or any(x.reads_score for x in self.inputs)

    @functools.cached_property
    def reads_place(self) -> bool:
        """Whether it depends on the query or the key."""
        own = self.operation == "position" and self.value in ("q", "k")
        return own or any(x.reads_place for x in self.inputs)

    @functools.cached_property
    def loads(self) -> bool:
        """Whether it reads an array at other elements for each query or key."""
        own = self.operation == "read" and self.reads_place
        return own or any(x.loads for x in self.inputs)

    @functools.cached_property
    def key(self) -> tuple[Any, ...]:
        """What is equal for nodes that mean the same."""
        return self.operation, self.kind, self.value, *(x.key for x in self.inputs)

    def reads(self, name: str) -> tuple[Node, ...]:
        """The reads of the captured array of that name, one for each place that is read."""
        found = {x.key: x for part in self.inputs for x in part.reads(name)}
        if self.operation == "read" and self.value.name == name:
            found[self.key] = self
        return tuple(found.values())

    def depends_on(self, variable: Node | None) -> bool:
        """Whether it depends on that read or, by default, on the score."""
        own = self.operation == "score" if variable is None else self.key == variable.key
        return own or any(x.depends_on(variable) for x in self.inputs)


@functools.lru_cache(maxsize=1024)
def parse(text: str, captures: tuple[Capture, ...]) -> Node:
    """The tree of an expression.

    Raises
    ------
    ValueError
        If it is none; the message shows the place.
    """
    node = _Reader(text, captures).read()
    return node if node.kind == "real" else _number_of(node, "real")


@functools.lru_cache(maxsize=1024)
def parse_condition(text: str, captures: tuple[Capture, ...]) -> Node:
    """The tree of an expression that is true or false.

    Raises
    ------
    ValueError
        If it is none.
    """
    node = _Reader(text, captures).read()
    if node.kind != "bool":
        raise ValueError(f"score expression: {text} is {node.kind}, no condition")
    return node


class _Reader:
    """Turns Python's syntax tree into nodes."""

    def __init__(self, text: str, captures: tuple[Capture, ...]):
        self.text, self.captures = text, {x.name: x for x in captures}

    def read(self) -> Node:
        if not self.text.strip():
            self._show("it is empty: score is what changes nothing", 1, 0, 1)
        try:
            tree = ast.parse(f"({self.text}\n)", mode="eval")
        except SyntaxError as error:
            column = (error.offset or 2) - (2 if error.lineno == 1 else 1)
            self._show(error.msg, error.lineno or 1, column, column + 1)
        return self._node(tree.body)

    def _show(self, message: str, line: int, begin: int, end: int) -> NoReturn:
        lines = self.text.splitlines() or [""]
        row = min(line, len(lines)) - 1
        marks = " " * max(0, begin) + "^" * max(1, end - begin)
        raise ValueError(f"score expression: {message}\n    {lines[row]}\n    {marks}")

    def _fail(self, at: ast.expr, message: str) -> NoReturn:
        shift = 1 if at.lineno == 1 else 0  # the bracket that encloses the text
        begin = at.col_offset - shift
        end = begin + 1
        if at.end_lineno == at.lineno and at.end_col_offset is not None:
            end = at.end_col_offset - shift
        self._show(message, at.lineno, begin, end)

    def _node(self, at: ast.expr) -> Node:
        read = getattr(self, f"_{type(at).__name__.lower()}", None)
        if read is None:
            self._fail(at, _unknown(at, type(at).__name__))
        node: Node = read(at)
        return node

    def _constant(self, at: ast.Constant) -> Node:
        if isinstance(at.value, bool):
            return Node("number", "bool", value=at.value)
        if isinstance(at.value, int):
            if at.value > _LARGEST:
                self._fail(at, f"integers go up to {_LARGEST}: write a float")
            return Node("number", "integer", value=at.value)
        if isinstance(at.value, float):
            return Node("number", "real", value=at.value)
        self._fail(at, f"{at.value!r} is no number")

    def _name(self, at: ast.Name) -> Node:
        if at.id == "score":
            return Node("score", "real")
        if at.id in POSITIONS:
            return Node("position", "integer", value=at.id)
        capture = self.captures.get(at.id)
        if capture is None:
            if at.id == "inf":
                return Node("number", "real", value=float("inf"))
            known = ", ".join((*RESERVED, *self.captures))
            self._fail(at, f"{at.id} is not known: names are {known}")
        if capture.axes > 0:
            self._fail(at, f"{at.id} is an array of {capture.axes} axes: index it")
        return Node("read" if capture.is_array else "capture", capture.kind, (), capture)

    def _subscript(self, at: ast.Subscript) -> Node:
        name = at.value.id if isinstance(at.value, ast.Name) else ""
        capture = self.captures.get(name)
        if capture is None or not capture.is_array:
            self._fail(at.value, "only captured arrays have an index")
        given = at.slice.elts if isinstance(at.slice, ast.Tuple) else [at.slice]
        indices = tuple(self._node(x) for x in given)
        if len(indices) != capture.axes:
            self._fail(at, f"{name} has {capture.axes} axes, and {len(indices)} indices here")
        for x, index in zip(given, indices):
            if index.kind != "integer":
                self._fail(x, f"an index is an integer, this is {index.kind}")
        return Node("read", capture.kind, indices, capture)

    def _call(self, at: ast.Call) -> Node:
        if not isinstance(at.func, ast.Name):
            self._fail(at.func, _HINTS[ast.Attribute])
        name, count = at.func.id, FUNCTIONS.get(at.func.id)
        if count is None:
            self._fail(at.func, f"{name} is not known: functions are {', '.join(FUNCTIONS)}")
        if len(at.args) != count or at.keywords:
            self._fail(at, f"{name} takes {count} arguments")
        inputs = [self._node(x) for x in at.args]
        if name == "where":
            if inputs[0].kind != "bool":
                self._fail(at.args[0], f"a condition is bool, this is {inputs[0].kind}")
            kind = _joined(*inputs[1:])
            return Node(name, kind, (inputs[0], *(_number_of(x, kind) for x in inputs[1:])))
        if name in ("abs", "minimum", "maximum"):
            kind = _joined(*inputs, least="integer")
        else:
            kind = "real"
        return Node(name, kind, tuple(_number_of(x, kind) for x in inputs))

    def _unaryop(self, at: ast.UnaryOp) -> Node:
        name = _OPERATORS.get(type(at.op))
        if name is None:
            self._fail(at, _unknown(at.op, "this operator"))
        x = self._node(at.operand)
        if name == "~":
            if x.kind == "real":
                self._fail(at, "~ takes an integer or a bool, this is real")
            return Node(name, x.kind, (x,))
        x = _number_of(x, _joined(x, least="integer"))
        return x if name == "positive" else Node(name, x.kind, (x,))

    def _binop(self, at: ast.BinOp) -> Node:
        name = _OPERATORS.get(type(at.op))
        if name is None:
            self._fail(at, _unknown(at.op, "this operator"))
        inputs = self._node(at.left), self._node(at.right)
        if name in "&|":
            kind = _joined(*inputs)
            if kind == "real":
                self._fail(at, f"{name} takes integers or bools; comparisons need brackets")
        else:
            kind = _joined(*inputs, least="integer")
            if name == "/" and kind == "integer":
                self._fail(at, "/ between integers: write // , or make one of them a float")
        return Node(name, kind, tuple(_number_of(x, kind) for x in inputs))

    def _compare(self, at: ast.Compare) -> Node:
        values = [self._node(x) for x in (at.left, *at.comparators)]
        whole: Node | None = None
        for operator, a, b in zip(at.ops, values, values[1:]):
            name = _OPERATORS.get(type(operator))
            if name is None:
                self._fail(at, "comparisons are < <= > >= == !=")
            kind = _joined(a, b)
            compared = Node(name, "bool", (_number_of(a, kind), _number_of(b, kind)))
            whole = compared if whole is None else Node("&", "bool", (whole, compared))
        assert whole is not None
        return whole


def _unknown(at: ast.AST, name: str) -> str:
    hint = _HINTS.get(type(at))
    return f"{name} has no meaning here" + (f": {hint}" if hint else "")


def _joined(*nodes: Node, least: Kind = "bool") -> Kind:
    """The kind that holds the values of all."""
    kinds = {least, *(x.kind for x in nodes)}
    return "real" if "real" in kinds else "integer" if "integer" in kinds else "bool"


def _number_of(node: Node, kind: Kind) -> Node:
    """`node` as a number of that kind, which can hold it."""
    return node if node.kind == kind else Node(kind, kind, (node,))
