"""How Sphinx builds the documentation: `python -m sphinx -W --keep-going docs build/site`."""

from __future__ import annotations

import os
import shutil
import sys
import warnings
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
sys.path[:0] = [str(ROOT), str(HERE / "extensions")]
# The gallery, the API and what `python -m cuflash` prints are of this checkout and this Python.
os.environ["OPENBLAS_NUM_THREADS"] = "1"  # other programs may run beside
os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])

import cuflash  # noqa: E402

project = "cuflash"
author = "cuflash developers"
copyright = author
version = release = cuflash.__version__

extensions = [
    "mathml",
    "myst_parser",
    "numpydoc",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx_design",
    "sphinxcontrib.programoutput",
    "sphinx_gallery.gen_gallery",
]
templates_path = ["templates"]
exclude_patterns = ["gallery/*", "gallery_pages/sg_execution_times.rst", "sg_execution_times.rst"]
nitpicky = True
smartquotes = False  # "fa1" is what one types
default_role = "code"  # what a docstring has in single backticks
highlight_language = "none"  # of blocks that do not name theirs: drawings

# Markdown
myst_enable_extensions = ["colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3
html_math_renderer = "mathml"

# The API, from the docstrings. Signatures come without types: these stand in the text.
autosummary_generate = True
autosummary_imported_members = False
autodoc_typehints = "none"
toc_object_entries_show_parents = "hide"
autodoc_member_order = "bysource"
numpydoc_show_class_members = False
numpydoc_class_members_toctree = False

# The gallery: scripts that are run when the site is built.
sphinx_gallery_conf = {
    "examples_dirs": "gallery",
    "gallery_dirs": "gallery_pages",
    "filename_pattern": r"\.py$",
    "within_subsection_order": "FileNameSortKey",
    "abort_on_example_error": True,
    "download_all_examples": False,
    "remove_config_comments": True,
    "show_memory": False,
    "show_signature": False,
    "min_reported_time": 1e9,
    "plot_gallery": True,
    "image_scrapers": ("matplotlib",),
    "matplotlib_animations": False,
}
warnings.filterwarnings("ignore", message="Matplotlib is currently using agg")

html_theme = "pydata_sphinx_theme"
html_title = "cuflash"
html_static_path = ["static"]
html_css_files = ["style.css"]
html_show_sourcelink = False
html_copy_source = False
# Pages without others below them have no list of these.
html_sidebars = {
    page: [] for page in ("index", "start", "porting", "performance", "reading-kernels")
}
html_theme_options = {
    "show_toc_level": 2,
    "navigation_with_keys": False,
    "show_prev_next": True,
    "header_links_before_dropdown": 8,
    "footer_start": ["copyright"],
    "footer_end": [],
    "secondary_sidebar_items": ["page-toc"],
}

# `python asv_bench/publish.py` writes the graphs of the history; a site built afterwards has them.
GRAPHS = ROOT / "asv_bench" / "html"
if (GRAPHS / "index.html").exists():
    tags.add("graphs")  # noqa: F821


def _copy_graphs(app, exception):
    if exception is None and app.tags.has("graphs"):
        shutil.copytree(GRAPHS, Path(app.outdir) / "asv", dirs_exist_ok=True)


def _keep_bars(app, what, name, obj, options, lines):
    """Bars in the prose of a docstring mean absolute values, not reST's substitutions."""
    for i, line in enumerate(lines):
        if not line.startswith((" ", ">>>")):
            parts = line.split("``")  # those between are literal
            lines[i] = "``".join(
                part if j % 2 else part.replace("|", r"\|") for j, part in enumerate(parts)
            )


def _skip_fields(app, what, name, obj, skip, options):
    """Fields of a named tuple stand among its attributes; of themselves they say their number."""
    return skip or (getattr(obj, "__doc__", None) or "").startswith("Alias for field number")


def setup(app):
    """Connect what is above with Sphinx."""
    app.connect("build-finished", _copy_graphs)
    app.connect("autodoc-skip-member", _skip_fields)
    app.connect("autodoc-process-docstring", _keep_bars, priority=400)  # ahead of numpydoc
