"""Random calls of every method, checked against what must hold for any of them.

    python tests/fuzz.py --cases 100000 --seed 0        # every check
    python tests/fuzz.py --cases 1000000 --only bound   # many small heads; a case is one head
    python tests/fuzz.py --one 4711                     # one case, with its traceback
    python tests/fuzz.py --cases 100000 --resume        # goes on where a stopped run was

Failures that differ only in numbers are one failure. It is made simpler as long as it stays the
same, and printed with Python that runs it again. The exit code is 1 if there is any.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields, replace
from multiprocessing import get_context
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from fuzz_cases import HEADS, TURNS, Case, draw, draw_bound
from fuzz_checks import Violation, check

__all__ = ["Case", "check", "draw", "draw_bound"]

FOLDER = Path("supportbasis-out/fuzz")
CHUNK = 20  # calls that a process takes at a time
DRAW = {"all": draw, "bound": draw_bound}
CASES_A_CALL = {"all": 1, "bound": HEADS * TURNS}  # an estimate: calls may be refused


@dataclass
class Failure:
    """The first case that failed in some way, and how many more did."""

    text: str
    number: int
    count: int = 1


@dataclass
class State:
    """How far a run has come."""

    seed: int
    only: str
    calls: int = 0  # those with smaller numbers are done
    cases: int = 0
    seconds: float = 0.0
    families: dict[str, int] = field(default_factory=dict)
    failures: dict[str, Failure] = field(default_factory=dict)

    @property
    def path(self) -> Path:
        return FOLDER / f"{self.only}-{self.seed}.json"

    def save(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(asdict(self), indent=1))

    @staticmethod
    def load(path: Path) -> State:
        content = json.loads(path.read_text())
        failures = {key: Failure(**value) for key, value in content.pop("failures").items()}
        return State(**content, failures=failures)

    def add(self, chunk: Chunk) -> None:
        self.calls = chunk.stop
        self.cases += sum(chunk.families.values())
        self.families = dict(Counter(self.families) + chunk.families)
        for number, key, text in chunk.failures:
            if key in self.failures:
                self.failures[key].count += 1
            else:
                self.failures[key] = Failure(text, number)


@dataclass
class Chunk:
    """What became of some calls."""

    stop: int
    families: Counter[str] = field(default_factory=Counter)
    failures: list[tuple[int, str, str]] = field(default_factory=list)


def run_chunk(job: tuple[str, int, int, int]) -> Chunk:
    """Calls start..stop of a run."""
    only, seed, start, stop = job
    torch.set_num_threads(1)
    chunk = Chunk(stop)
    for number in range(start, stop):
        case = DRAW[only](seed, number)
        try:
            heads = check(case)
        except Violation as violation:
            heads = 1
            chunk.failures.append((number, key_of(case, str(violation)), str(violation)))
        chunk.families[case.family] += heads if only == "bound" else 1
    return chunk


def key_of(case: Case, text: str) -> str:
    """Failures of one method whose first lines differ only in numbers are the same."""
    line = re.sub(r"[-+]?(\d+\.?\d*(e[-+]?\d+)?|inf|nan)\b", "#", text.split("\n")[0])
    return f"{case.family}: {line}"


def simplified(case: Case, key: str, seconds: float = 10.0) -> Case:
    """The case with as many fields as usual, and as few tokens, as keep the failure."""
    until, usual = time.monotonic() + seconds, Case()
    changed = True
    while changed and time.monotonic() < until:
        changed = False
        for simpler in _simpler(case, usual):
            if simpler != case and _fails(simpler, key):
                case, changed = simpler, True
                break
    return case


def _simpler(case: Case, usual: Case) -> Iterator[Case]:
    for one in fields(Case):
        if one.name == "leading" and not case.leading:
            continue  # simpler than usual
        if one.name not in ("method", "run", "check", "seed", "n", "m", "d", "dv"):
            yield replace(case, **{one.name: getattr(usual, one.name)})
    if case.key_leading is None and len(case.leading) <= 1:
        yield replace(case, leading=())
    for i in range(3):
        yield replace(case, layouts=(*case.layouts[:i], "contiguous", *case.layouts[i + 1 :]))
    yield replace(case, check="nothing")
    for name in ("n", "m", "d", "dv"):
        for size in (1, getattr(case, name) // 2, getattr(case, name) - 1):
            if 0 < size < getattr(case, name):
                yield replace(case, **{name: size})


def _fails(case: Case, key: str) -> bool:
    try:
        check(case)
    except Violation as violation:
        return key_of(case, str(violation)) == key
    return False


def run(state: State, cases: int, jobs: int) -> None:
    """Chunks in order, so that a stopped run knows what is done."""
    started, before = time.monotonic(), state.seconds
    for chunk in _chunks(state, cases, jobs):
        state.add(chunk)
        state.seconds = before + time.monotonic() - started
        state.save()
        print(f"\r{_line(state, cases)}", end="", flush=True)
    print(f"\r{_line(state, cases)}")


def _line(state: State, cases: int) -> str:
    failures = sum(failure.count for failure in state.failures.values())
    speed = state.cases / max(state.seconds, 1e-9)
    return (
        f"{state.cases} of {cases} cases, {speed:.0f} a second, {failures} failures "
        f"({len(state.failures)} kinds)   "
    )


def _chunks(state: State, cases: int, jobs: int) -> Iterator[Chunk]:
    def pending() -> Iterator[tuple[str, int, int, int]]:
        start = state.calls
        while state.cases < cases:
            left = (cases - state.cases) / CASES_A_CALL[state.only]
            stop = start + min(CHUNK, max(1, int(left)))
            yield state.only, state.seed, start, stop
            start = stop

    if jobs == 1:
        yield from map(run_chunk, pending())
        return
    with get_context("spawn").Pool(jobs) as pool:
        source = pending()
        waiting = [pool.apply_async(run_chunk, (next(source),)) for _ in range(2 * jobs)]
        while state.cases < cases:
            yield waiting.pop(0).get()
            job = next(source, None)
            if job is not None:
                waiting.append(pool.apply_async(run_chunk, (job,)))


def report(state: State) -> None:
    """Counts by method, then every kind of failure with its reproducer."""
    for family, count in sorted(state.families.items()):
        print(f"{count:10d}  {family}")
    for key, failure in state.failures.items():
        case = simplified(DRAW[state.only](state.seed, failure.number), key)
        print(f"\n{failure.count} x {key}\n  first: --one {failure.number} --seed {state.seed}")
        print(f"{failure.text.split(chr(10))[0]}\n{case.reproducer}")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=sorted(DRAW), default="all")
    parser.add_argument("--jobs", type=int, default=1, help="processes, of one thread each")
    parser.add_argument("--one", type=int, metavar="NUMBER", help="run this call alone")
    parser.add_argument("--resume", nargs="?", const="", metavar="FILE", help="go on with a run")
    given = parser.parse_args(arguments)
    state = State(given.seed, given.only)
    if given.one is not None:
        return run_one(DRAW[given.only](given.seed, given.one))
    if given.resume is not None:
        path = Path(given.resume) if given.resume else state.path
        state = State.load(path) if path.exists() else state
    try:
        run(state, given.cases, given.jobs)
    except KeyboardInterrupt:
        print(f"\nstopped; go on with --cases {given.cases} --resume {state.path}")
    report(state)
    return 1 if state.failures else 0


def run_one(case: Case) -> int:
    print(case.reproducer)
    torch.set_num_threads(1)
    try:
        check(case)
    except Violation:
        traceback.print_exc()
        return 1
    print("holds")
    return 0


if __name__ == "__main__":
    sys.exit(main())
