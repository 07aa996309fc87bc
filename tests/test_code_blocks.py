"""Code of the README and of the pages in docs/ runs, page by page; commands name what is there."""

import configparser
import doctest
import functools
import logging
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
FENCED = re.compile(
    r"^(?:<!-- (?P<note>[^\n]*) -->\n)?```(?P<language>\w+)\n(?P<text>.*?)^```$", re.M | re.S
)
GPU, GPUS = "on a GPU alone", "on several GPUs alone"
# Their blocks are files, with which tests/test_adding_an_engine.py runs kernels.
FILES = ROOT / "docs" / "adding-an-engine.md"
GENERATED = "generated", "gallery_pages"
OTHER_PROGRAMS = {
    "asv", "cd", "compute-sanitizer", "export", "git", "pre-commit", "pytest", "mypy",
}  # fmt: skip


class Block(NamedTuple):
    """A block of a page, the line at which it begins, and what a comment ahead of it says."""

    language: str
    text: str
    line: int
    note: str


def pages():
    found = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/**/*.md")]
    return [x for x in sorted(found) if not set(x.parts) & set(GENERATED)]


def blocks(page):
    text = page.read_text(encoding="utf-8")
    return [
        Block(m["language"], m["text"], text.count("\n", 0, m.start("text")), m["note"] or "")
        for m in FENCED.finditer(text)
    ]


def named(page):
    return page.relative_to(ROOT).as_posix()


def python_blocks(page):
    return [] if page == FILES else [x for x in blocks(page) if x.language == "python"]


PYTHON = [page for page in pages() if python_blocks(page)]
EACH_PAGE = pytest.mark.parametrize("page", PYTHON, ids=named)


def run(page, block, namespace, text):
    """Execute one block as a part of its page, so that errors name the page's line."""
    if ">>>" in text:
        test = doctest.DocTestParser().get_doctest(
            text, namespace, named(page), str(page), block.line
        )
        options = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS
        assert doctest.DocTestRunner(optionflags=options).run(test).failed == 0
        return
    code = compile("\n" * block.line + text, str(page), "exec")
    if not block.note.startswith((GPU, GPUS)):
        exec(code, namespace)


@pytest.fixture(autouse=True)
def _logging_as_it_was():
    """A page shows how to turn it on."""
    ours, root = logging.getLogger("cuflash"), logging.getLogger()
    level, handlers = ours.level, root.handlers[:]
    yield
    ours.setLevel(level)
    root.handlers[:] = handlers


@EACH_PAGE
def test_python_on_numpy_arrays(page, monkeypatch, tmp_path):
    """Blocks for CuPy take NumPy in its place, and float32, since NumPy is slow at halves."""
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": "page"}
    for block in python_blocks(page):
        text = block.text
        if "cupy" in text and not block.note:
            text = re.sub(r"\bcupy\b", "numpy", text).replace("float16", "float32")
        run(page, block, namespace, text)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "page", [x for x in PYTHON if any("cupy" in y.text or y.note for y in python_blocks(x))],
    ids=named,
)  # fmt: skip
def test_python_on_a_gpu(page, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": "page"}
    for block in python_blocks(page):
        run(page, block._replace(note=block.note.replace(GPU, "")), namespace, block.text)


def commands():
    """The lines of shell blocks, and indented lines that begin with a program, by page."""
    for page in pages():
        text = page.read_text(encoding="utf-8")
        lines = [line for x in blocks(page) if x.language == "sh" for line in x.text.splitlines()]
        bare = FENCED.sub("", text)
        lines += re.findall(r"^    ((?:pip|python|pytest|CUFLASH_\w+=1) .*)$", bare, re.M)
        for line in lines:
            for part in re.split(r"&&|;", line.split("#")[0].replace("...", "")):
                if words := shlex.split(part):
                    yield page, [x for x in words if not re.fullmatch(r"CUFLASH_\w+=\d", x)]


COMMANDS = list(commands())


@functools.cache
def help_of(command):
    done = subprocess.run(
        [sys.executable, "-m", "cuflash", *command, "--help"], capture_output=True, text=True,
        check=True, env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    return done.stdout


def options_of(words):
    return [x.split("=")[0] for x in words if x.startswith("--")]


def test_there_are_commands():
    assert len(COMMANDS) > 20


@pytest.mark.parametrize(
    ("page", "words"), COMMANDS, ids=[f"{named(page)}: {' '.join(w)}"[:90] for page, w in COMMANDS]
)
def test_command_names_what_is_there(page, words):
    """Scripts, commands, options and extras. That they work has tests of their own."""
    program, *rest = words
    if program == "pip":
        setup = configparser.ConfigParser()
        setup.read(ROOT / "setup.cfg", encoding="utf-8")
        extras = re.findall(r"\[([^\]]*)\]", " ".join(rest))
        wanted = {x for given in extras for x in given.split(",")}
        assert wanted <= set(setup["options.extras_require"])
    elif rest[:2] == ["-m", "cuflash"]:
        command = rest[2:3] if rest[2:] and not rest[2].startswith("-") else []
        assert all(option in help_of(tuple(command)) for option in options_of(rest))
    elif program == "python" and rest[0].endswith(".py"):
        folders = (ROOT, ROOT / "asv_bench") if "asv_bench" in str(page) else (ROOT,)
        (script,) = (x / rest[0] for x in folders if (x / rest[0]).exists())
        text = script.read_text(encoding="utf-8") + "--help"
        assert all(option in text for option in options_of(rest))
    else:
        assert program == "python" or program in OTHER_PROGRAMS
