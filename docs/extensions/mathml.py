"""Formulas as MathML, which browsers draw by themselves: no LaTeX, no script, no internet."""

from __future__ import annotations

import re

from docutils.nodes import SkipNode
from latex2mathml.converter import convert

# A command, with its name if it takes one; or a word, which is a name and no product of letters.
_WORD = re.compile(
    r"(?P<kept>\\(?:begin|end|operatorname|text|mathrm)\s*\{[^}]*\}|\\[A-Za-z]+)|[A-Za-z]{2,}"
)


def _with_names(formula):
    """The formula with its words as upright text: `lse` is not l s e."""
    return _WORD.sub(lambda m: m["kept"] or rf"\text{{{m[0]}}}", formula)


def _aligned(formula):
    """The formula in the environment that the converter knows for lines that are aligned."""
    if r"\begin{aligned}" in formula:
        return formula.replace("{aligned}", "{align*}")
    return rf"\begin{{align*}}{formula}\end{{align*}}" if "&" in formula else formula


def _inline(translator, node):
    """A formula within a line."""
    translator.body.append(convert(_with_names(node.astext()), display="inline"))


def _block(translator, node):
    """A formula of its own; lines that are parted by an empty one are formulas one by one."""
    translator.body.append(translator.starttag(node, "div", CLASS="formula"))
    for formula in node.astext().split("\n\n"):
        if formula.strip():
            translator.body.append(convert(_with_names(_aligned(formula)), display="block"))
    translator.body.append("</div>\n")


def _render(write):
    """A visitor that writes the whole node, so that nothing is left for its end."""

    def visit(translator, node):
        write(translator, node)
        raise SkipNode

    return visit


def setup(app):
    """Offer the renderer as `html_math_renderer = "mathml"`."""
    app.add_html_math_renderer("mathml", (_render(_inline), None), (_render(_block), None))
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
