"""Sphinx configuration."""

import re
from pathlib import Path

from sphinx.application import Sphinx
from sphinx.util import logging

import supportbasis

ROOT = Path(__file__).parent.parent
STUDIES = ROOT / "studies"
FOLDERS = [ROOT / "src" / "supportbasis", ROOT / "tests", ROOT]
FOLDERS += [STUDIES / "src" / "supportbasis_studies", STUDIES / "tests"]

project = "supportbasis"
author = copyright = "The supportbasis authors"
release = version = supportbasis.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
]
exclude_patterns = ["_build"]
myst_enable_extensions = ["dollarmath", "colon_fence", "deflist"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
add_module_names = False
python_use_unqualified_type_names = True

html_theme = "furo"
html_title = f"supportbasis {release}"


def plain_docstring(
    _app: Sphinx, _what: str, _name: str, _object: object, _options: object, lines: list[str]
) -> None:
    """Docstrings are written for people at a terminal; make them safe reStructuredText.

    `x` means code and |x| means a magnitude: neither is markup.
    """
    for index, line in enumerate(lines):
        if line.lstrip().startswith((">>>", "...")):
            continue
        parts = re.split(r"(``[^`]+``|`[^`]+`)", line)
        for i, part in enumerate(parts):
            if part.startswith("`") and not part.startswith("``"):
                parts[i] = f"`{part}`"
            elif not part.startswith("`"):
                parts[i] = part.replace("|", r"\|").replace("*", r"\*")
        lines[index] = "".join(parts)


def check_paper_map(_app: Sphinx) -> None:
    """Warn about a name in a table of paper-map.md that its file does not define.

    In a row, `some/file.py` names a file and the code words after it are names in that file.
    """
    logger = logging.getLogger(__name__)
    page = Path(__file__).parent / "paper-map.md"
    for number, line in enumerate(page.read_text().splitlines(), 1):
        text = ""
        for word in re.findall(r"`([^`]+)`", line) if line.startswith("|") else ():
            if word.endswith(".py"):
                found = [folder / word for folder in FOLDERS if (folder / word).is_file()]
                text = found[0].read_text() if found else ""
                if not found:
                    logger.warning("no file %s", word, location=f"{page}:{number}")
            elif re.fullmatch(r"[\w.]+", word):
                name = word.rpartition(".")[2]
                if not re.search(rf"^\s*((def|class) {name}\b|{name}\b *[:=])", text, re.MULTILINE):
                    logger.warning("no definition of %s", word, location=f"{page}:{number}")


def setup(app: Sphinx) -> None:
    app.connect("autodoc-process-docstring", plain_docstring)
    app.connect("builder-inited", check_paper_map)
