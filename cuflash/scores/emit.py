"""Score expressions in C."""

from __future__ import annotations

from ..operands.dtypes import SINGLE
from .expression import Capture, Node
from .line import Line

# C types of a captured array's elements, and of a captured number's field.
ELEMENTS = {
    "float16": "__half", "bfloat16": "__nv_bfloat16", "float32": "float", "float64": "double",
    "bool": "bool", "int8": "signed char", "uint8": "unsigned char", "int16": "short",
    "uint16": "unsigned short", "int32": "int", "uint32": "unsigned int", "int64": "long long",
}  # fmt: skip
_TYPES = {"uint32": "long long", "int64": "long long", "bool": "bool"}  # of elements as numbers
NUMBERS = {"real": "Accumulator", "integer": "int", "bool": "int"}
_CALLS = {
    "//": "floor_divide", "%": "floor_modulo", "abs": "abs", "exp": "exp", "log": "log",
    "tanh": "tanh", "sqrt": "sqrt", "minimum": "minimum", "maximum": "maximum",
}  # fmt: skip
_COMPARISONS = ("<", "<=", ">", ">=", "==", "!=")


class Emitter:
    """Turns the stages of a score into C, and keeps what they read of arrays.

    Parameters
    ----------
    of_head : bool
        Whether to keep apart what is the same for all queries and keys of a head, and what may be
        loaded ahead.
    variable : Node, optional
        A read of an array: a stage that depends on it is differentiated by that alone.

    Attributes
    ----------
    of_head : list of (str, str, str)
        Type, name and C of each element that is the same for all queries and keys of a head. Stages
        find them in `of_head`.
    rows : Node or None
        What reads an array that has an element of two or four bytes for each query and key, or for
        each key, the first such. Kernels may load these together: stages ask `element` for them.
    """

    def __init__(self, of_head: bool = True, variable: Node | None = None) -> None:
        self._hoists = of_head
        self._variable = variable
        self._is_by_variable = False  # in the stage at hand
        self.of_head: list[tuple[str, str, str]] = []
        self.rows: Node | None = None
        self._rows_text = ""
        self._reads: dict[str, str] = {}
        self._names: dict[str, str] = {}

    def stage(self, node: Node) -> tuple[str, str]:
        """An expression over `score` of a type T, which is a dual number or a plain one.

        What depends on the score is a T, all other real numbers are Accumulators.

        Returns
        -------
        declarations, expression : str
            The former hold what is read of arrays for a query or a key, each element once.
        """
        self._reads = {}
        self._is_by_variable = self._variable is not None and node.depends_on(self._variable)
        text = self._emit(node)
        names = [f"const auto {name} = {read};" for read, name in self._reads.items()]
        return " ".join(names), text

    def slope(self, line: Line) -> str:
        """A line's slope, behind the stages."""
        slope = self._emit(line.slope) if line.slope else "Accumulator(1)"
        return f"{'-' if line.sign < 0 else ''}{slope}"

    def rows_text(self) -> tuple[str, str, bool]:
        """The type of the elements of `rows`, what finds them in C, and whether all queries of a
        head share one row.
        """
        assert self.rows is not None
        capture, *indices = self.rows.value, *map(self._index, self.rows.inputs[:-1])
        shared = indices[-1:] != ["int(q)"]
        if not shared:
            indices.pop()
        function = "captured_row" if shared else "captured_rows"
        arguments = ", ".join([f"p.{field_of(capture)}", *_extents(capture), *indices])
        return ELEMENTS[capture.element], f"{function}({arguments})", shared

    def _emit(self, node: Node) -> str:
        operation = node.operation
        if operation == "real":
            return self._real(node.inputs[0])
        if operation == "read":
            found = self._read(node)
            return f"T({found}, Accumulator(1))" if self._is_variable(node) else found
        inputs = [self._emit(x) if _is_place(node) else self._index(x) for x in node.inputs]
        if operation == "score":
            return "T(score.value)" if self._is_by_variable else "score"
        if operation == "position":
            return "located.shift" if node.value == "shift" else str(node.value)
        if operation == "number":
            return _number(node)
        if operation == "capture":
            field = f"p.{field_of(node.value)}"
            return f"({field} != 0)" if node.kind == "bool" else field
        if operation == "integer":
            return f"int({inputs[0]})"
        if operation == "negative":
            return f"(-{inputs[0]})"
        if operation == "~":
            return f"({'!' if node.kind == 'bool' else '~'}{inputs[0]})"
        if operation in "&|":
            doubled = operation * 2 if node.kind == "bool" else operation
            return f"({inputs[0]} {doubled} {inputs[1]})"
        return self._operation(node, inputs)

    def _is_variable(self, node: Node) -> bool:
        return self._variable is not None and node.key == self._variable.key

    def _is_dual(self, node: Node) -> bool:
        """Whether it is a T."""
        by_variable = self._is_by_variable and node.depends_on(self._variable)
        return by_variable or node.reads_score

    def _operation(self, node: Node, inputs: list[str]) -> str:
        """One whose inputs may be dual numbers."""
        operation, dual = node.operation, [self._is_dual(x) for x in node.inputs]
        if operation in _COMPARISONS:
            a, b = (f"{x}.value" if is_dual else x for x, is_dual in zip(inputs, dual))
            return f"({a} {operation} {b})"
        if added := _hides_or_adds(node):
            name = "add_variable_or_hide" if self._is_dual(added[1]) else "add_or_hide"
            return f"{name}({', '.join(map(self._emit, added))}, element)"
        if operation == "where":
            a, b = inputs[1:]
            if any(dual[1:]):
                a, b = f"T({a})", f"T({b})"
            return f"({inputs[0]} ? {a} : {b})"
        if operation in _CALLS:
            arguments = [
                f"T({x})" if any(dual) and not is_dual else x for x, is_dual in zip(inputs, dual)
            ]
            return f"{_CALLS[operation]}({', '.join(arguments)})"
        return f"({inputs[0]} {operation} {inputs[1]})"

    def _index(self, node: Node) -> str:
        """A node where C wants no Place."""
        return f"int({self._emit(node)})" if _is_place(node) else self._emit(node)

    def _real(self, node: Node) -> str:
        """An integer as a real number; the distance of positions without converting each."""
        if _is_magnitude(node):
            inner = self._real(node.inputs[0])
            return f"abs({inner})" if node.operation == "abs" else f"(-{inner})"
        return f"real({self._emit(node)})"

    def _read(self, node: Node) -> str:
        """An element of a captured array."""
        capture, indices = node.value, [self._index(x) for x in node.inputs]
        of_place = any(x.reads_place for x in node.inputs)
        function = "captured_of_pair" if of_place else "captured"
        arguments = ", ".join([f"p.{field_of(capture)}", *_extents(capture), *indices])
        text = f"{function}<{str(capture.adjacent).lower()}>({arguments})"
        if self._hoists and not of_place:
            if text not in self._names:
                self._names[text] = name = f"element_{len(self._names)}"
                self.of_head.append(
                    (_TYPES.get(capture.element, NUMBERS[capture.kind]), name, text)
                )
            return f"of_head.{self._names[text]}"
        if self._hoists and self.rows is None and of_place and _has_rows(node):
            self.rows, self._rows_text = node, text
        if text == self._rows_text:
            text = f"element.get([&] {{ return {text}; }})"
        return self._reads.setdefault(text, f"element_{len(self._reads)}")


def rows_of(nodes: tuple[Node, ...]) -> Node | None:
    """What an Emitter of these stages keeps as `rows`."""
    emitter = Emitter()
    for node in nodes:
        emitter.stage(node)
    return emitter.rows


def _extents(capture: Capture) -> tuple[str, str]:
    """Sizes and strides of a captured array, in C."""
    if not capture.axes:
        return "nullptr", "nullptr"
    start = "&" if capture.axes == 1 else ""
    return f"{start}p.{field_of(capture)}_size", f"{start}p.{field_of(capture)}_stride"


def _has_rows(node: Node) -> bool:
    """Whether a read is of two or four bytes at (..., q, k) or (..., k), which lie side by side."""
    capture, (*leading, last) = node.value, node.inputs
    if not (capture.adjacent and capture.element in SINGLE and last.value == "k"):
        return False
    if leading and leading[-1].value == "q":
        leading.pop()
    return not any(x.reads_place or x.reads_score or _reads(x) for x in leading)


def _reads(node: Node) -> bool:
    """Whether it depends on elements of arrays."""
    return node.operation == "read" or any(map(_reads, node.inputs))


def is_infinite(node: Node) -> bool:
    """Whether it is -infinity."""
    return node.operation == "negative" and node.inputs[0].value == float("inf")


def _hides_or_adds(node: Node) -> tuple[Node, Node] | None:
    """The score and x of where(x == -inf, -inf, score + x), the stage of a bias; None of others."""
    if node.operation != "where":
        return None
    condition, hidden, total = node.inputs
    if condition.operation != "==" or total.operation != "+":
        return None
    score, x = total.inputs
    same = condition.inputs[0].key == x.key and condition.inputs[1].key == hidden.key
    known = score.operation == "score" and not x.reads_score
    return (score, x) if same and known and is_infinite(hidden) else None


def _is_place(node: Node) -> bool:
    """Whether it is a sum of the query's or key's position and integers, which C has as a Place."""
    if node.operation == "position":
        return node.value in ("q", "k")
    if node.operation not in ("+", "-", "negative"):
        return False
    return any(map(_is_place, node.inputs)) and all(x.kind == "integer" for x in node.inputs)


def _is_magnitude(node: Node) -> bool:
    """Whether it is abs of a Place, or that times -1."""
    if node.operation == "negative":
        return _is_magnitude(node.inputs[0])
    return node.operation == "abs" and _is_place(node.inputs[0])


def _number(node: Node) -> str:
    if node.kind == "bool":
        return "true" if node.value else "false"
    if node.kind == "integer":
        return str(node.value)
    if node.value == float("inf"):
        return "score_infinity()"
    return f"Accumulator({node.value!r})"


def field_of(capture: Capture) -> str:
    """The name of the field of Params that holds a capture, or where an array of it begins."""
    return f"capture_{capture.name}"
