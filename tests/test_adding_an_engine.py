"""docs/adding-an-engine.md is true: its engine works in a copy of the package."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import cuflash

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "adding-an-engine.md"

USE = """
import numpy as np
from emulated import attention
from tolerance import assert_forward_close

rng = np.random.default_rng(0)
shapes = (2, 4, 37, 5), (2, 2, 41, 5), (2, 2, 41, 3)
q, k, v = (rng.standard_normal(shape, dtype=np.float32) for shape in shapes)
k[:, :, 40] = np.nan  # which nobody may see
options = {"causal": "top_left", "window": (9, None), "softcap": 2.0, "enable_gqa": True}
options |= {"kv_lengths": [40, 7], "q_lengths": [37, 30]}
result = attention(q, k, v, engine="naive", **options)
print(result.plan.kernel, result.plan.engine, result.plan.grid)
assert_forward_close(result.out, result.lse, q, k, v, **options)
"""


def test_the_engine_of_the_page(tmp_path):
    package = Path(shutil.copytree(Path(cuflash.__file__).parent, tmp_path / "cuflash"))
    module, line = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (package / "planning" / "naive.py").write_text(module)
    plan = package / "planning" / "plan.py"
    text, count = re.subn(r"(?m)^_ENGINE_MODULES = \([^)]*\)\n", line, plan.read_text())
    assert count == 1
    plan.write_text(text)
    path = f"{tmp_path}:{ROOT / 'tests'}"
    done = subprocess.run(
        [sys.executable, "-c", USE], capture_output=True, text=True, check=False,
        cwd=tmp_path, env=os.environ | {"PYTHONPATH": path},
    )  # fmt: skip
    assert done.stderr == ""
    assert done.stdout == "naive naive 8\n"
