"""CUDA C of a mask that kernels evaluate: what its function shows of a pair."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..scores.emit import Emitter

if TYPE_CHECKING:
    from ..masks.predicate import MaskForm
    from ..scores.expression import Capture, Node

MASK_ELEMENTS = {"int32": "int", "bool": "unsigned char"}  # C types of arrays


def mask_field_of(capture: Capture) -> str:
    """The name of the field of Params that holds what a mask's function captures."""
    return f"mask_{capture.name}"


class _MaskEmitter(Emitter):
    """Turns a mask's function into C. Indices of pairs that exist are inside its arrays."""

    def _emit(self, node: Node) -> str:
        if node.operation == "capture":
            field = f"p.{mask_field_of(node.value)}"
            return f"({field} != 0)" if node.kind == "bool" else field
        return super()._emit(node)

    def _read(self, node: Node) -> str:
        field = f"p.{mask_field_of(node.value)}"
        start = {0: "", 1: f", &{field}_size"}.get(node.value.axes, f", {field}_size")
        indices = "".join(f", {self._index(x)}" for x in node.inputs)
        text = f"mask_element({field}{start}{indices})"
        if node.kind == "bool":
            text = f"({text} != 0)"
        return self._reads.setdefault(text, f"element_{len(self._reads)}")


def mask_function(form: MaskForm, turned: bool) -> str:
    """`mask_shows`, of a row and a column: of a query and a key or, `turned`, the other way round.

    Head, defined further on, is a template's.
    """
    pair = "int k, int q" if turned else "int q, int k"
    reads, text = _MaskEmitter().stage(form.node)
    return f"""\
#line 1 "mask function"
// An element of an array in C order; of pairs that do not exist, any.
template <typename E>
__device__ __forceinline__ int mask_element(const E* element) {{ return __ldg(element); }}
template <typename E, typename... Index>
__device__ __forceinline__ int mask_element(const E* element, const int* size, Index... index) {{
    long long place = 0;
    int axis = 0;
    ((place = place * size[axis] + min(max(int(index), 0), size[axis] - 1), ++axis), ...);
    return __ldg(element + place);
}}
template <typename Head>
__device__ __forceinline__ bool mask_shows(const Head& located, {pair}, const Params& p) {{
    [[maybe_unused]] const int batch = located.batch, head = located.head;
    {reads}
    return {text};
}}"""
