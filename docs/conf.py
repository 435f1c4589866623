"""Sphinx configuration."""

import re

from sphinx.application import Sphinx

import supportbasis

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


def setup(app: Sphinx) -> None:
    app.connect("autodoc-process-docstring", plain_docstring)
