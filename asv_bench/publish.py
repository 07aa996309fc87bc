"""The published pages, readable without the internet.

    python publish.py                # asv publish, with the scripts that its pages load
    python publish.py --serve 8080   # and serve them on http://localhost:8080

asv's pages load their scripts from other sites. Here these come from the npm registry, once, into
html/vendor, and the pages are made to load them from there. They must be served: opened as files
they cannot read the graphs' data.

A graph opens on fa2 and fa3, on the machine with the longest history, commits at even distances,
times on a logarithmic axis. asv has no setting for that: without a view in the address it takes all
machines, the first values of each parameter, which is fa1, and a linear axis. The legend lies where
a logarithmic axis has room, at the bottom. A point opens its commit: where asv.conf.json names no
site that shows commits, a page in html/commits with what git says of it.
"""

from __future__ import annotations

import argparse
import collections
import functools
import html
import http.server
import json
import re
import shutil
import subprocess
import sys
import urllib.parse
from pathlib import Path

HERE = Path(__file__).resolve().parent
HTML, STORE = HERE / "html", HERE / "env" / "npm"
PACKAGES = (
    "jquery@3.3.1", "flot@0.8.3", "flot-orderbars@1.0.0", "stupid-table-plugin@1.1.3",
    "blueimp-md5@2.19.0", "bootstrap@3.1.1",
)  # fmt: skip
# What the name of a script or style sheet in asv's page is in these packages.
FILES = {
    "jquery-3.3.1.min.js": "jquery/dist/jquery.min.js",
    "jquery.flot.min.js": "flot/jquery.flot.js",
    "jquery.flot.time.min.js": "flot/jquery.flot.time.js",
    "jquery.flot.selection.min.js": "flot/jquery.flot.selection.js",
    "jquery.flot.categories.min.js": "flot/jquery.flot.categories.js",
    "jquery.flot.orderBars.js": "flot-orderbars/js/jquery.flot.orderBars.js",
    "stupidtable.min.js": "stupid-table-plugin/stupidtable.min.js",
    "md5.min.js": "blueimp-md5/js/md5.min.js",
    "bootstrap.min.js": "bootstrap/dist/js/bootstrap.min.js",
    "bootstrap.min.css": "bootstrap/dist/css/bootstrap.min.css",
}
MOST_LINES = 8  # of a graph as it opens: asv's own limit
# Before asv's scripts: the address of a benchmark without a view gets its view, which then is the
# address that asv reads. A view that somebody chose is left alone.
OPENING = """<script>
const views = VIEWS;
function open_on_view() {
  const view = views[location.hash.slice(1)];
  if (view) history.replaceState(null, "", location.hash + "?" + view);
}
open_on_view();
window.addEventListener("hashchange", open_on_view);
</script>
"""
COMMIT = """<!DOCTYPE html>
<meta charset="utf-8">
<title>{title}</title>
<pre>{text}</pre>
"""
OUTSIDE = re.compile(r'<(script|link) [^>]*?(src|href)="https://[^"]*/([^"/]+)"[^>]*>')


def fetch_packages() -> Path:
    """The folder of the packages, downloaded unless they are there."""
    if not (STORE / "node_modules").is_dir():
        if shutil.which("npm") is None:
            raise SystemExit("npm is not installed: it downloads the pages' scripts")
        STORE.mkdir(parents=True, exist_ok=True)
        command = ["npm", "install", "--no-audit", "--no-fund", "--ignore-scripts", "--silent"]
        subprocess.run([*command, "--prefix", str(STORE), *PACKAGES], check=True)
    return STORE / "node_modules"


def localise(page: str) -> str:
    """The page with every script and style sheet of another site replaced by one in vendor/."""

    def tag(match):
        kind, attribute, name = match.groups()
        if name not in FILES:
            raise SystemExit(f"the pages load {name}, which FILES does not know")
        more = ' rel="stylesheet"' if kind == "link" else ""
        return f'<{kind}{more} {attribute}="vendor/{name}">'

    return OUTSIDE.sub(tag, page)


def find_machines(results: Path) -> dict[str, str]:
    """Of each benchmark the machine that has figures of most commits."""
    counts: collections.Counter[tuple[str, str]] = collections.Counter()
    for path in sorted(results.glob("*/*-*.json")):
        counts.update((name, path.parent.name) for name in json.loads(path.read_text())["results"])
    return {name: machine for (name, machine), _ in reversed(counts.most_common())}


def views(benchmarks, machines: dict[str, str]) -> dict[str, str]:
    """What asv's address of each benchmark says after "?" for the graph to open on."""
    found = {}
    for name, benchmark in benchmarks.items():
        chosen = dict(zip(benchmark["param_names"], benchmark["params"]))
        latest = [x for x in chosen.get("algo", ()) if x.startswith(("'fa2", "'fa3"))]
        lines = max(1, len(latest))
        for parameter, values in chosen.items():
            if parameter != "algo":
                chosen[parameter] = values[: max(1, MOST_LINES // lines)]
                lines *= len(chosen[parameter])
        query = [("machine", machines[name])] if name in machines else []
        query.append(("x-axis-scale", "even"))
        if benchmark["unit"] == "seconds":
            query.append(("y-axis-scale", "log"))
        if latest:
            chosen["algo"] = latest
            query += [(f"p-{key}", value) for key, values in chosen.items() for value in values]
        found[name] = urllib.parse.urlencode(query)
    return found


def with_views(page: str, opened: dict[str, str]) -> str:
    """The page with a script that opens each graph on its view, before all others."""
    script = OPENING.replace("VIEWS", json.dumps(opened, indent=1))
    return page.replace("<script", script + "<script", 1)


def with_legend_below(script: str) -> str:
    """The script of asv's graphs with the legend in the lower left corner, not the upper."""
    old = 'position: "nw"'
    if script.count(old) != 1:
        raise SystemExit(f"asv's graphdisplay.js has {script.count(old)} times {old}, not once")
    return script.replace(old, 'position: "sw"')


def write_commits(folder: Path, index) -> None:
    """A page for each commit of the graphs, under the part of its hash that asv links to."""
    for commit in index["revision_to_hash"].values():
        command = ["git", "-C", str(HERE), "show", "--stat=100", "--date=iso",
                   "--format=commit %H%n%ad%n%n%B", commit]  # fmt: skip
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        page = folder / commit[: index["hash_length"]] / "index.html"
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text(COMMIT.format(title=commit, text=html.escape(done.stdout)))


def main() -> None:
    """Publish, and serve if asked to."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--serve", type=int, metavar="PORT", help="0: any that is free")
    options = parser.parse_args()
    subprocess.run([sys.executable, "-m", "asv", "publish"], cwd=HERE, check=True)
    packages, vendor = fetch_packages(), HTML / "vendor"
    vendor.mkdir(exist_ok=True)
    for name, path in FILES.items():
        shutil.copy(packages / path, vendor / name)
    index = json.loads((HTML / "index.json").read_text())
    if index["show_commit_url"] == "#":
        index["show_commit_url"] = "commits/"
        write_commits(HTML / "commits", index)
        (HTML / "index.json").write_text(json.dumps(index))
    start = HTML / "index.html"
    opened = views(index["benchmarks"], find_machines(HERE / "results"))
    start.write_text(with_views(localise(start.read_text()), opened))
    graphs = HTML / "graphdisplay.js"
    graphs.write_text(with_legend_below(graphs.read_text()))
    print(f"{start}: to be served, for example by --serve 8080")
    if options.serve is not None:
        handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=HTML)
        server = http.server.ThreadingHTTPServer(("localhost", options.serve), handler)
        print(f"http://localhost:{server.server_port}", flush=True)
        server.serve_forever()


if __name__ == "__main__":
    main()
