"""The documentation site: it builds without a warning, and a browser shows what it should."""

import functools
import http.server
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import urllib.parse
from pathlib import Path

import pytest

import cuflash
from cuflash import distributed

ROOT = Path(__file__).parents[1]
NEEDED = "sphinx", "numpydoc", "pydata_sphinx_theme", "myst_parser", "sphinx_gallery"
LINK = re.compile(r'<(?:a|link|script|img)\b[^>]*?\b(?:href|src)="([^"]*)"')
OUTSIDE = re.compile(r'<(?:link|script|img)\b[^>]*?\b(?:href|src)="https?://')
SEEN = (
    "index.html",
    "gallery_pages/plot_2_online_softmax.html",
    "api/generated/cuflash.attention.html",
)
GALLERY, WIDTHS = "gallery_pages/plot_1_masks.html", (1300, 420)
# Loads pages at several widths, and writes what it measures into itself.
PROBE = """<!doctype html><body><script>
const views = VIEWS, found = [];
function measure(page, width, inside) {
  const all = (what) => [...inside.querySelectorAll(what)];
  const height = (x) => x.getBoundingClientRect().height;
  const right = (x) => x.getBoundingClientRect().right;
  found.push({page, width, right: Math.max(...all("article :is(h1, section > p, img)").map(right)),
    heading: height(all("h1")[0]), line: parseFloat(getComputedStyle(all("p")[0]).lineHeight),
    maths: all("math").map(height), fractions: all("mfrac").map(height),
    pictures: all("article img").map((x) => [x.naturalWidth, x.getBoundingClientRect().width])});
  if (found.length == views.length) {
    document.body.innerHTML = "<pre id=found></pre>";
    document.getElementById("found").textContent = JSON.stringify(found);
  }
}
for (const [page, width] of views) {
  const frame = document.createElement("iframe");
  frame.style.width = width + "px"; frame.style.height = "1000px";
  frame.onload = () => measure(page, width, frame.contentDocument);
  frame.src = page; document.body.append(frame);
}
</script>"""


def require(missing, variable):
    if os.environ.get(variable) == "1":
        pytest.fail(f"{variable}=1, but {missing}")
    pytest.skip(missing)


def build(folder):
    """The site, built of a copy of the pages, since building writes beside them."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        require(f"{', '.join(missing)} missing: pip install '.[docs]'", "CUFLASH_REQUIRE_SITE")
    generated = shutil.ignore_patterns("generated", "gallery_pages", "sg_*", "__pycache__")
    shutil.copytree(ROOT / "docs", folder / "docs", ignore=generated)
    (folder / "asv_bench").mkdir()
    for path in (*ROOT.glob("*.md"), ROOT / "asv_bench" / "README.md"):
        shutil.copy(path, folder / path.relative_to(ROOT))
    ours = {name: x for name, x in os.environ.items() if not name.startswith(("COV", "PYTEST"))}
    done = subprocess.run(
        [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "docs", "site"],
        cwd=folder, env=ours | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
        timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "site"


def check_links(pages):
    """Nothing is loaded from elsewhere, and what is linked to within the site is there."""
    anchors = {path: set(re.findall(r'\bid="([^"]+)"', text)) for path, text in pages.items()}
    broken = []
    for path, text in pages.items():
        assert not OUTSIDE.findall(text), path
        for link in LINK.findall(text):
            url = urllib.parse.urlsplit(link)
            if url.scheme or url.netloc:
                continue
            target = (path.parent / urllib.parse.unquote(url.path)).resolve() if url.path else path
            found = target.exists() and (target not in pages or not url.fragment
                     or urllib.parse.unquote(url.fragment) in anchors[target])  # fmt: skip
            broken += [] if found else [f"{path.name}: {link}"]
    assert not broken


def check_public_names(text):
    """The API reference has every public name."""
    named = [(cuflash, "cuflash"), (distributed, "cuflash.distributed")]
    named.append((cuflash.reference, "cuflash.reference"))
    public = {f"{prefix}.{x}" for module, prefix in named for x in module.__all__}
    public.remove("cuflash.reference")  # a module, which has a page
    assert {name for name in public if f'id="{name}"' not in text} == set()


def check_maths(pages):
    """No formula is left as it was written."""
    for path, text in pages.items():
        bare = re.sub(r"<pre.*?</pre>|<code.*?</code>|<script.*?</script>", "", text, flags=re.S)
        assert not re.search(r"\\(frac|begin|operatorname|sum|text)\b|\$\$", bare), path
        # merror would be what a converter makes of what it does not know.
        assert "<merror" not in bare, path


def look(site, tmp_path):
    """What headless Chromium measures of the pages, and its picture of one."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        require("chromium is not installed", "CUFLASH_REQUIRE_BROWSER")
    views = [(page, width) for page in (*SEEN, GALLERY) for width in WIDTHS]
    probe = PROBE.replace("VIEWS", json.dumps(views))
    (site / "probe.html").write_text(probe, encoding="utf-8")

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_):
            pass

    handler = functools.partial(Quiet, directory=site)
    with http.server.ThreadingHTTPServer(("localhost", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()

        def show(page, *options):
            command = [browser, "--headless", "--no-sandbox", "--disable-gpu",
                       "--window-size=1300,2000", "--virtual-time-budget=20000", *options,
                       f"http://localhost:{server.server_port}/{page}"]  # fmt: skip
            done = subprocess.run(command, capture_output=True, text=True, timeout=120)
            assert done.returncode == 0, done.stderr[-2000:]
            return done.stdout

        dom = show("probe.html", "--dump-dom")
        picture = tmp_path / "page.png"
        show(GALLERY, f"--screenshot={picture}")
        server.shutdown()
    found = re.search(r'<pre id="found">(.*)</pre>', dom, re.S)
    assert found, dom[:2000]
    return json.loads(found[1]), picture


def check_measures(measures):
    """Pages fit their windows, pictures are loaded, fractions are higher than a line."""
    assert len(measures) == len(WIDTHS) * (len(SEEN) + 1)
    for seen in measures:
        where = seen["page"], seen["width"]
        assert 0 < seen["right"] <= seen["width"], where
        assert seen["heading"] > 20, where
        assert all(natural > 100 and shown > 100 for natural, shown in seen["pictures"]), where
        assert all(x > 4 for x in seen["maths"]), where
    by_page = {seen["page"]: seen for seen in measures}
    start, softmax, api = (by_page[page] for page in SEEN)
    assert len(start["maths"]) == 1
    assert len(softmax["maths"]) > 10
    assert len(softmax["pictures"]) == 1
    assert max(softmax["fractions"], default=0) > 1.3 * softmax["line"]
    assert len(by_page[GALLERY]["pictures"]) == 6
    assert api["heading"] > 0


def check_picture(path):
    """The masks of the gallery are blue squares in the page's middle."""
    image = pytest.importorskip("matplotlib.image", reason="reads the screenshot")
    pixels = image.imread(path)[1000:, 300:1100, :3]
    red, green, blue = (pixels[..., i] for i in range(3))
    assert ((blue > red + 0.3) & (blue > green + 0.1)).mean() > 0.05


def test_the_site(tmp_path):
    """One test: what is looked at is built once, and tests run side by side."""
    assert all(
        "assert " in x.read_text(encoding="utf-8") for x in (ROOT / "docs" / "gallery").glob("*.py")
    )
    site = build(tmp_path)
    made = (path.resolve() for path in site.rglob("*.html") if "_static" not in path.parts)
    pages = {path: path.read_text(encoding="utf-8") for path in made}
    assert len(pages) > 60
    check_links(pages)
    check_public_names("".join(pages.values()))
    check_maths(pages)
    measures, picture = look(site, tmp_path)
    check_measures(measures)
    check_picture(picture)
