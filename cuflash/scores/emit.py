"""Score expressions in C."""

from __future__ import annotations

from .expression import Capture, Node

# C types of a captured array's elements, and of a captured number's field.
ELEMENTS = {
    "float16": "__half", "bfloat16": "__nv_bfloat16", "float32": "float", "float64": "double",
    "bool": "bool", "int8": "signed char", "uint8": "unsigned char", "int16": "short",
    "uint16": "unsigned short", "int32": "int", "uint32": "unsigned int", "int64": "long long",
}  # fmt: skip
NUMBERS = {"real": "Accumulator", "integer": "int", "bool": "int"}
_CALLS = {
    "//": "floor_divide", "%": "floor_modulo", "abs": "abs", "exp": "exp", "log": "log",
    "tanh": "tanh", "sqrt": "sqrt", "minimum": "minimum", "maximum": "maximum",
}  # fmt: skip
_COMPARISONS = ("<", "<=", ">", ">=", "==", "!=")


def emit(node: Node) -> tuple[str, str]:
    """The expression, over `score` of a type T, which is a dual number or a plain one.

    What depends on the score is a T, all other real numbers are Accumulators.

    Returns
    -------
    declarations, expression : str
        The former hold what is read of arrays, each element once.
    """
    reads: dict[str, str] = {}
    text = _emit(node, reads)
    names = [f"const auto {name} = {read};" for read, name in reads.items()]
    return " ".join(names), text


def _emit(node: Node, reads: dict[str, str]) -> str:
    operation, inputs = node.operation, [_emit(x, reads) for x in node.inputs]
    if operation == "score":
        return "score"
    if operation == "position":
        return "located.shift" if node.value == "shift" else str(node.value)
    if operation == "number":
        return _number(node)
    if operation == "capture":
        field = f"p.{field_of(node.value)}"
        return f"({field} != 0)" if node.kind == "bool" else field
    if operation == "read":
        return reads.setdefault(_read(node, inputs), f"element_{len(reads)}")
    if operation in ("real", "integer"):
        return f"{'Accumulator' if operation == 'real' else 'int'}({inputs[0]})"
    if operation == "negative":
        return f"(-{inputs[0]})"
    if operation == "~":
        return f"({'!' if node.kind == 'bool' else '~'}{inputs[0]})"
    if operation in "&|":
        return f"({inputs[0]} {operation * 2 if node.kind == 'bool' else operation} {inputs[1]})"
    if operation in _COMPARISONS:
        a, b = (f"{x}.value" if n.reads_score else x for x, n in zip(inputs, node.inputs))
        return f"({a} {operation} {b})"
    if operation == "where":
        a, b = inputs[1:]
        if node.inputs[1].reads_score or node.inputs[2].reads_score:
            a, b = f"T({a})", f"T({b})"
        return f"({inputs[0]} ? {a} : {b})"
    if operation in _CALLS:
        arguments = [
            f"T({x})" if node.reads_score and not n.reads_score else x
            for x, n in zip(inputs, node.inputs)
        ]
        return f"{_CALLS[operation]}({', '.join(arguments)})"
    return f"({inputs[0]} {operation} {inputs[1]})"


def _number(node: Node) -> str:
    if node.kind == "bool":
        return "true" if node.value else "false"
    if node.kind == "integer":
        return str(node.value)
    if node.value == float("inf"):
        return "score_infinity()"
    return f"Accumulator({node.value!r})"


def _read(node: Node, indices: list[str]) -> str:
    """An element of a captured array."""
    capture, field = node.value, field_of(node.value)
    start = "&" if capture.axes == 1 else ""
    shape = [f"{start}p.{field}_{x}" if capture.axes else "nullptr" for x in ("size", "stride")]
    function = "captured_of_pair" if any(x.reads_place for x in node.inputs) else "captured"
    adjacent = str(capture.adjacent).lower()
    return f"{function}<{adjacent}>({', '.join([f'p.{field}', *shape, *indices])})"


def field_of(capture: Capture) -> str:
    """The name of the field of Params that holds a capture, or where an array of it begins."""
    return f"capture_{capture.name}"
