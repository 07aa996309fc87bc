"""What keeps the house in order: no import circles, files of one idea, engines in their modules."""

import ast
import graphlib
import io
import re
import subprocess
import sys
import tokenize
from pathlib import Path

import pytest

import cuflash

ROOT = Path(cuflash.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))
# They bear their engine's name.
OF_ENGINES = {"mma.py", "simt.py", "wgmma.py", "numpy.py", "numpy_engine"}
QUESTION = re.compile(r"(engine|algo)\w*\s*(==|!=|in|not in)\s*[({[]?[\"']|[\"']fa[123][\"']\s*:")


def name_of(path):
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name_of(path) for path in FILES}


def is_for_checkers(node):
    return isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING"


def walk(node):
    """All nodes but what only type checkers see."""
    for child in ast.iter_child_nodes(node):
        if not is_for_checkers(child):
            yield child
            yield from walk(child)


def imported_by(path):
    """Modules of the package that a file imports, inside functions as well."""
    own = name_of(path).split(".")
    package = own if path.name == "__init__.py" else own[:-1]
    found = set()
    for node in walk(ast.parse(path.read_text())):
        names = [alias.name for alias in node.names] if isinstance(node, ast.ImportFrom) else []
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            start = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*start, *([node.module] if node.module else [])])
            found |= {f"{module}.{name}" for name in names if f"{module}.{name}" in MODULES}
            found |= {module} if {f"{module}.{name}" for name in names} - MODULES else set()
    return found & MODULES


def test_no_import_circles():
    """The package's own name is no exception, but for the modules that use it as users do."""
    graph = {name_of(path): imported_by(path) for path in FILES}
    tuple(graphlib.TopologicalSorter(graph).static_order())


def code_lines(path):
    """Lines that are neither docstring nor comment nor blank."""
    lines = set()
    for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
        if token.type not in (
            tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT,
            tokenize.ENDMARKER,
        ):  # fmt: skip
            lines |= set(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(
            node
        ):
            text = node.body[0]
            lines -= set(range(text.lineno, text.end_lineno + 1))
    return len(lines)


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_a_file_holds_one_idea(path):
    assert code_lines(path) <= 400


def test_engines_answer_for_themselves():
    """Outside its own module hardly anybody asks which engine or algorithm it is."""
    asked = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in FILES
        if not OF_ENGINES & set(path.relative_to(ROOT).parts)
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if QUESTION.search(line.split("#")[0]) and ">>>" not in line
    ]
    assert len(asked) <= 5, "\n".join(asked)


def test_modules_that_are_imported_when_they_are_first_used():
    lines = (
        "import sys, cuflash",
        "print('cuflash.distributed' in sys.modules)",
        "print(len(cuflash.distributed.LocalComm.make(2)), 'Algo' in vars(cuflash.typing))",
        "print(hasattr(cuflash, 'atention'))",
    )
    command = [sys.executable, "-c", "\n".join(lines)]
    done = subprocess.run(command, cwd=ROOT.parent, capture_output=True, text=True, check=True)
    assert done.stdout == "False\n2 True\nFalse\n"
