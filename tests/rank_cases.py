"""Work on several ranks: forked processes with a Gloo group, and what each of them returns."""

from __future__ import annotations

import multiprocessing
import pickle  # of the standard library: tensors are copied, not shared
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
import torch.distributed as dist


def _work(rank: int, size: int, path: Path, timeout: float, work: Callable[..., Any], pipe: Any,
          args: tuple[Any, ...]) -> None:  # fmt: skip
    torch.set_num_threads(1)  # threads do not survive a fork
    dist.init_process_group(
        "gloo", init_method=f"file://{path}", rank=rank, world_size=size,
        timeout=timedelta(seconds=timeout),
    )  # fmt: skip
    try:
        pipe.send_bytes(pickle.dumps((work(*args), None)))
    except Exception as error:
        pipe.send_bytes(pickle.dumps((error, traceback.format_exc())))
    finally:
        pipe.close()
        dist.destroy_process_group()


def outcomes(
    size: int, work: Callable[..., Any], *args: Any, timeout: float = 30.0
) -> list[tuple[Any, str | None]]:
    """What ``work(*args)`` returns or raises on each rank, with the traceback; None: nothing."""
    if torch.cuda.is_initialized():
        pytest.skip("processes are forked, which CUDA does not survive")
    context = multiprocessing.get_context("fork")
    with TemporaryDirectory() as folder:
        pipes, processes = [], []
        for rank in range(size):
            receive, send = context.Pipe(duplex=False)
            settings = (rank, size, Path(folder) / "store", timeout, work, send, args)
            process = context.Process(target=_work, args=settings, daemon=True)
            process.start()
            send.close()
            pipes.append(receive)
            processes.append(process)
        found = []
        for pipe, process in zip(pipes, processes, strict=True):
            try:
                found.append(
                    pickle.loads(pipe.recv_bytes())
                    if pipe.poll(4 * timeout)
                    else (None, "no answer")
                )
            except EOFError:
                found.append((None, None))  # the rank has died
            process.join(timeout)
            assert not process.is_alive()
    return found


def on_ranks(size: int, work: Callable[..., Any], *args: Any) -> list[Any]:
    """What ``work(*args)`` returns on each rank; raises if it raises."""
    found = outcomes(size, work, *args)
    for rank, (_, text) in enumerate(found):
        assert text is None, f"rank {rank}: {text}"
    return [result for result, _ in found]
