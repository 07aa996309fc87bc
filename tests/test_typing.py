"""Type checkers on the package and on a file of correct and wrong uses of it."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
USES = ROOT / "tests" / "typing_uses.py"

MISSING = [x for x in ("mypy", "basedpyright") if importlib.util.find_spec(x) is None]
if MISSING and os.environ.get("CUFLASH_REQUIRE_TYPES") == "1":
    raise ModuleNotFoundError(
        f"CUFLASH_REQUIRE_TYPES=1, but there is no {' and no '.join(MISSING)}"
    )
pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"needs {' and '.join(MISSING)}")


def wrong_lines():
    """Numbers of the lines that are marked, and the rule of each."""
    found = (re.search("# wrong: (\\w+)$", line) for line in USES.read_text().splitlines())
    return {number: match[1] for number, match in enumerate(found, 1) if match}


def mypy_errors(folder):
    """(file, line, error) of each error in the package and the file of uses."""
    command = [sys.executable, "-m", "mypy", "--strict", f"--cache-dir={folder}"]
    done = subprocess.run(
        [*command, "cuflash", str(USES)], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode in (0, 1), done.stdout + done.stderr
    errors = re.findall("^(.+?):(\\d+): error: (.*)$", done.stdout, re.MULTILINE)
    return [(ROOT / file, int(line), error) for file, line, error in errors]


def pyright_errors(folder):
    """(line, rule) of each error in the file of uses."""
    settings = {
        "include": [str(USES)],
        "extraPaths": [str(ROOT)],
        "typeCheckingMode": "standard",
        "reportMissingImports": "none",  # CuPy need not be installed
    }
    (folder / "pyrightconfig.json").write_text(json.dumps(settings))
    command = [sys.executable, "-m", "basedpyright", "--project", str(folder), "--outputjson"]
    command += ["--pythonpath", sys.executable]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert found["summary"]["filesAnalyzed"] == 1
    return {
        (x["range"]["start"]["line"] + 1, x["rule"])
        for x in found["generalDiagnostics"]
        if x["severity"] == "error"
    }


def test_mypy_is_content_with_the_package_and_finds_wrong_uses(tmp_path):
    found = mypy_errors(tmp_path)
    assert [x for x in found if x[0] != USES] == []
    assert {line for file, line, _ in found if file == USES} == set(wrong_lines())


def test_pyright_finds_wrong_uses_and_no_others(tmp_path):
    expected, found = wrong_lines(), pyright_errors(tmp_path)
    assert {line for line, _ in found} == set(expected)
    assert set(expected.items()) <= found  # an argument may be found by a second rule, too
