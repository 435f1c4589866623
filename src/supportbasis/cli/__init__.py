"""The command ``supportbasis``. Everything beyond `main` needs the ``cli`` extra."""

from __future__ import annotations

import sys
from importlib.util import find_spec

NEEDS = ("typer", "rich", "matplotlib", "jinja2")


def main() -> None:
    """Run the command line, or say how to install what it needs."""
    missing = [name for name in NEEDS if find_spec(name) is None]
    if missing:
        print(f"supportbasis: the command line needs {', '.join(missing)}:", file=sys.stderr)
        print('  pip install "supportbasis[cli]"', file=sys.stderr)
        raise SystemExit(1)
    try:
        from .app import app

        app(prog_name="supportbasis")
    except KeyboardInterrupt:  # typer answers one while a command runs, not while it is loaded
        print("supportbasis: interrupted", file=sys.stderr)
        raise SystemExit(130) from None
