"""Strings that change with the files of a model or a benchmark: rows are named by them."""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import sha256
from pathlib import Path

READ = (".json", ".jinja", ".model", ".py", ".txt")  # of a model's files, all but its weights
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth")


def file_state(files: Iterable[Path]) -> str:
    """Names, sizes and times of modification."""
    found = [(file.name, file.stat()) for file in sorted(files)]
    return str([(name, stat.st_size, stat.st_mtime_ns) for name, stat in found])


def model_state(name: str) -> str:
    """Changes with the configuration, code, tokenizer and weights of a folder, or of what is on
    this machine of a model on the hub."""
    folder = Path(name)
    if not folder.is_dir():
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(name, "config.json")
        if not isinstance(found, str):
            return "not on this machine"
        folder = Path(found).parent
    files = sorted(file for file in folder.iterdir() if file.is_file())
    read = b"".join(file.read_bytes() for file in files if file.suffix in READ)
    return sha256(read).hexdigest() + file_state(file for file in files if file.suffix in WEIGHTS)


def folder_digest(name: str) -> str:
    """Of the files of a model's folder, short."""
    return sha256(model_state(name).encode()).hexdigest()[:8]
