"""What the rows say of the paper's statements."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from ..report import Grid
from .contenders import AS23, EXACT, MEAN, NAMES, OURS
from .paired import Estimate, difference, flags, mean
from .paper import BENCHMARKS, CHANCE, paper_average
from .rows import TaskRow, joined

WITHIN = {OURS[6]: 1.0, OURS[4]: 3.0}  # points that the paper's method may lose
NEAR_CHANCE = 5.0  # points above chance up to which a method counts as guessing
ENOUGH = 2000  # items that are needed to say so


@dataclass(frozen=True)
class Judged:
    """All tasks of one model answered by one method."""

    model: str
    method: str
    rows: dict[str, TaskRow]

    @property
    def items(self) -> int:
        return sum(row.items for row in self.rows.values())

    def average(self) -> Estimate:
        return mean([flags(row.right) for row in self.rows.values()])

    def against(self, other: Judged) -> Estimate:
        """Points that this method is better, over all tasks, on the items that both answered."""
        pairs = [self._pair(other, task) for task in self.rows]
        return difference([mine for mine, _ in pairs], [theirs for _, theirs in pairs])

    def against_on(self, other: Judged, task: str) -> Estimate:
        mine, theirs = self._pair(other, task)
        return difference([mine], [theirs])

    def _pair(self, other: Judged, task: str) -> tuple[Tensor, Tensor]:
        mine, theirs = flags(self.rows[task].right), flags(other.rows[task].right)
        count = min(len(mine), len(theirs))
        return mine[:count], theirs[:count]

    def unparsable(self) -> float:
        return 100 * sum(row.unparsable for row in self.rows.values()) / len(self.rows)

    def written(self) -> float:
        """Accuracy in percent when every answer has to be written."""
        shares = [row.written.count("1") / row.items for row in self.rows.values()]
        return 100 * sum(shares) / len(shares)


def judged(rows: Sequence[TaskRow]) -> dict[str, dict[str, Judged]]:
    """By model and method, in the order of methods; only what answered all tasks."""
    parts: dict[tuple[str, str, str], list[TaskRow]] = {}
    for row in rows:
        parts.setdefault((row.model, row.method, row.task), []).append(row)
    found: dict[str, dict[str, Judged]] = {}
    for (model, method, task), mine in parts.items():
        methods = found.setdefault(model, {})
        methods.setdefault(method, Judged(model, method, {})).rows[task] = joined(mine)
    return {model: _complete(methods) for model, methods in found.items()}


def _complete(methods: dict[str, Judged]) -> dict[str, Judged]:
    made = ((name, methods[name]) for name in NAMES if name in methods)
    return {name: judged for name, judged in made if len(judged.rows) == len(BENCHMARKS)}


def chance() -> float:
    return sum(CHANCE.values()) / len(CHANCE)


# ---- statements ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Statement:
    """What the paper leads one to expect, what was measured, and what follows."""

    text: str
    paper: str
    measured: str
    verdict: str


def statements(made: dict[str, Judged]) -> list[Statement]:
    """Of one model."""
    exact = made[EXACT]
    found = [_within(made[name], exact, WITHIN[name]) for name in WITHIN if name in made]
    return found + [_guessing(made[name]) for name in AS23.values() if name in made]


def _within(mine: Judged, exact: Judged, points: float) -> Statement:
    lost = mine.against(exact)
    if lost.low >= -points and lost.high <= points:
        verdict = "confirmed"
    elif lost.high < -points or lost.low > points:
        verdict = "refuted"
    else:
        verdict = "open: the interval reaches over the limit"
    paper = paper_average(mine.method) - paper_average(EXACT)
    text = f"{mine.method}: within {points:g} point{'s' * (points != 1)} of exact"
    return Statement(text, f"{paper:+.2f}", str(lost), _weighed(verdict, mine.items))


def _guessing(mine: Judged) -> Statement:
    average = mine.average()
    limit = chance() + NEAR_CHANCE
    if average.high <= limit:
        verdict = "confirmed"
    elif average.low > limit:
        verdict = "refuted"
    else:
        verdict = "open: the interval reaches over the limit"
    measured = f"{average} %, chance is {chance():g} %"
    text = f"{mine.method}: at chance (within {NEAR_CHANCE:g} points)"
    return Statement(text, "0 %", measured, _weighed(verdict, mine.items))


def _weighed(verdict: str, items: int) -> str:
    if items >= ENOUGH:
        return verdict
    return f"cannot be confirmed with {items} items; they point to: {verdict}"


def statement_table(title: str, found: Sequence[Statement]) -> Grid:
    lines = [[item.text, item.paper, item.measured, item.verdict] for item in found]
    lost = frozenset(at for at, item in enumerate(found) if item.verdict == "refuted")
    return Grid(title, ["expected", "paper", "measured", "so it is"], lines, lost)


def sentences(made: dict[str, Judged]) -> list[str]:
    """In plain words, of one model."""
    exact = made[EXACT]
    said = [
        f"{exact.model}: exact attention answers {exact.average()} % of {exact.items} items right; "
        f"chance is {chance():g} %."
    ]
    if MEAN in made:
        broken = made[MEAN]
        said.append(
            f"With the mean of the values instead it is {broken.average()} %: the answers need "
            "attention."
        )
    for item in statements(made):
        said.append(f"{item.text}: {item.verdict}. Measured {item.measured}.")
    for name in AS23.values():
        if name in made:
            said.append(
                f"{name}: {made[name].unparsable():.0f} % of the answers could not be parsed; "
                f"where every answer has to be written, {made[name].written():.1f} % are right."
            )
    return said
