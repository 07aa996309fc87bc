"""The README as a package index shows it; everything else is in setup.cfg.

An index resolves no relative links. Where `project_urls` of setup.cfg has a `Source`, links and
pictures lead to the files of the release's tag there; without one, paths stand behind the words.
"""

import configparser
import re
from pathlib import Path

from setuptools import setup

HERE = Path(__file__).resolve().parent
# A link or, with !, a picture, unless its target is an address or a place on the page.
RELATIVE = re.compile(r"(!?)\[([^\]]*)\]\((?![a-z]+:|#)([^)\s]+)\)")
FENCED = re.compile(r"(^```.*?^```$)", re.DOTALL | re.MULTILINE)


def source_url() -> str:
    """The address of the repository, or an empty string."""
    config = configparser.ConfigParser()
    config.read(HERE / "setup.cfg", encoding="utf-8")
    lines = config.get("metadata", "project_urls", fallback="").splitlines()
    urls = dict(map(str.strip, line.split("=", 1)) for line in lines if "=" in line)
    return urls.get("Source", "").rstrip("/")


def version() -> str:
    """`__version__` of the package, which is the only place that says it."""
    text = (HERE / "cuflash" / "__init__.py").read_text(encoding="utf-8")
    (found,) = re.findall(r'^__version__ = "(.+)"$', text, re.MULTILINE)
    return found


def for_an_index(text: str, source: str, tag: str) -> str:
    """A page whose relative links and pictures lead into the repository `source` at `tag`."""

    def replace(match: re.Match) -> str:
        is_picture, title, path = match.groups()
        if not source:
            return f"{title} (`{path}`)"
        kind = "raw" if is_picture else "blob"
        return f"{is_picture}[{title}]({source}/{kind}/{tag}/{path})"

    parts = FENCED.split(text)  # every other one is code
    parts[::2] = [RELATIVE.sub(replace, part) for part in parts[::2]]
    return "".join(parts)


if __name__ == "__main__":
    readme = (HERE / "README.md").read_text(encoding="utf-8")
    setup(
        version=version(),
        long_description=for_an_index(readme, source_url(), f"v{version()}"),
        long_description_content_type="text/markdown",
    )
