"""What the rows say of the paper's statements."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..statistics import Estimate, mean_of_sets
from ..study import Grid, table
from .methods import AS23, EXACT, MEAN, NAMES, OURS
from .paper import BENCHMARKS, CHANCE, paper_average
from .rows import TaskRow, joined

WITHIN = {OURS[6]: 1.0, OURS[4]: 3.0}  # points that the paper's method may lose
NEAR_CHANCE = 5.0  # points above chance up to which a method counts as guessing
ENOUGH = 2000  # items that are needed to say so


@dataclass(frozen=True)
class Scored:
    """All tasks of one model answered by one method."""

    model: str
    method: str
    rows: dict[str, TaskRow]

    @property
    def items(self) -> int:
        return sum(row.items for row in self.rows.values())

    def average(self) -> Estimate:
        return mean_of_sets([flags(row.right) for row in self.rows.values()])

    def against(self, other: Scored) -> Estimate:
        """Points that this method is better, over all tasks, on the items that both answered."""
        return mean_of_sets([self._gains(other, task) for task in self.rows])

    def against_on(self, other: Scored, task: str) -> Estimate:
        return mean_of_sets([self._gains(other, task)])

    def _gains(self, other: Scored, task: str) -> list[float]:
        pairs = zip(flags(self.rows[task].right), flags(other.rows[task].right), strict=False)
        return [mine - theirs for mine, theirs in pairs]

    def unparsable(self) -> float:
        return 100 * sum(row.unparsable for row in self.rows.values()) / len(self.rows)

    def written(self) -> float:
        """Accuracy in percent when every answer has to be written."""
        shares = [row.written.count("1") / row.items for row in self.rows.values()]
        return 100 * sum(shares) / len(shares)


def flags(text: str) -> list[float]:
    """Of a row of ones and zeros, as numbers."""
    return [float(letter) for letter in text]


def scored(rows: Sequence[TaskRow]) -> dict[str, dict[str, Scored]]:
    """By model and method, in the order of methods; only what answered all tasks."""
    parts: dict[tuple[str, str, str], list[TaskRow]] = {}
    for row in rows:
        parts.setdefault((row.model, row.method, row.task), []).append(row)
    found: dict[str, dict[str, Scored]] = {}
    for (model, method, task), mine in parts.items():
        methods = found.setdefault(model, {})
        methods.setdefault(method, Scored(model, method, {})).rows[task] = joined(mine)
    return {model: _complete(methods) for model, methods in found.items()}


def _complete(methods: dict[str, Scored]) -> dict[str, Scored]:
    made = ((name, methods[name]) for name in NAMES if name in methods)
    return {name: scored for name, scored in made if len(scored.rows) == len(BENCHMARKS)}


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


def statements(made: dict[str, Scored]) -> list[Statement]:
    """Of one model."""
    exact = made[EXACT]
    found = [_within(made[name], exact, WITHIN[name]) for name in WITHIN if name in made]
    return found + [_guessing(made[name]) for name in AS23.values() if name in made]


def _within(mine: Scored, exact: Scored, points: float) -> Statement:
    lost = mine.against(exact)
    verdict = _verdict(
        lost.low >= -points and lost.high <= points, lost.high < -points or lost.low > points
    )
    paper = paper_average(mine.method) - paper_average(EXACT)
    text = f"{mine.method}: within {points:g} point{'s' * (points != 1)} of exact"
    return Statement(text, f"{paper:+.2f}", str(lost), _weighed(verdict, mine.items))


def _guessing(mine: Scored) -> Statement:
    average = mine.average()
    limit = chance() + NEAR_CHANCE
    verdict = _verdict(average.high <= limit, average.low > limit)
    measured = f"{average} %, chance is {chance():g} %"
    text = f"{mine.method}: at chance (within {NEAR_CHANCE:g} points)"
    return Statement(text, "0 %", measured, _weighed(verdict, mine.items))


def _verdict(holds: bool, fails: bool) -> str:
    if holds:
        return "confirmed"
    return "refuted" if fails else "open: the interval reaches over the limit"


def _weighed(verdict: str, items: int) -> str:
    if items >= ENOUGH:
        return verdict
    return f"cannot be confirmed with {items} items; they point to: {verdict}"


def statement_table(title: str, found: Sequence[Statement]) -> Grid:
    columns: dict[str, Callable[[Statement], str]] = {
        "expected": lambda item: item.text,
        "paper": lambda item: item.paper,
        "measured": lambda item: item.measured,
        "so it is": lambda item: item.verdict,
    }
    return table(title, found, columns, lost=lambda item: item.verdict == "refuted")


def sentences(made: dict[str, Scored]) -> list[str]:
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
