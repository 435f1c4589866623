"""Where and when a measurement was made."""

from __future__ import annotations

import os
import platform
import subprocess
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

import torch

import supportbasis


@dataclass(frozen=True)
class Machine:
    """The first columns of every result."""

    date: str
    device: str
    cpu: str
    cores: int
    torch: str
    version: str
    commit: str

    @staticmethod
    def here(device: str = "cpu") -> Machine:
        """The machine of this process; a device of CUDA gets its own name."""
        known = torch.device(device).type == "cuda" and torch.cuda.is_available()
        return Machine(
            date=datetime.now(timezone.utc).isoformat(timespec="seconds"),
            device=torch.cuda.get_device_name(device) if known else device,
            cpu=_cpu(),
            cores=torch.get_num_threads(),
            torch=torch.__version__,
            version=supportbasis.__version__,
            commit=_commit(),
        )


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _commit() -> str:
    """Of the checkout this package is imported from; empty for an installed package. A copy
    without its history may say it in SUPPORTBASIS_COMMIT."""
    package = Path(supportbasis.__file__).resolve().parent
    top = _git(package, "rev-parse", "--show-toplevel")
    if not top or package != Path(top).resolve() / "src" / "supportbasis":
        return os.environ.get("SUPPORTBASIS_COMMIT", "")
    return _git(package, "describe", "--always", "--dirty", "--exclude", "*")


def _git(folder: Path, *arguments: str) -> str:
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=folder, capture_output=True, text=True, timeout=10
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
