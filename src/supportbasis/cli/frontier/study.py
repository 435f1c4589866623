"""``supportbasis bench frontier``: measure, write, print."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from rich.console import Console

from ..chapters import Chapter, publish
from ..machine import Machine
from ..measure import part
from ..progress import Steps
from ..report import write_table
from . import claims, encoder, pictures, shipped, tables, timing
from .errors import ROWS, Row, measure_head
from .heads import SYNTHETIC, Source, spread
from .sources import Extent, Models, encoder_source, sources, synthetic_source
from .summary import Group, KeysNeeded, groups, keys_needed

TITLE = "supportbasis bench frontier"
LEAD = (
    "Error against cost of BlockSupport and of published approximations, written from their "
    "papers. The error is the relative Frobenius error of a head's output on "
    f"{ROWS} sampled query rows against float64 attention. The cost counts multiply-adds relative "
    "to exact attention, everything included: pooling, scores of blocks, hashing, sorting, trees, "
    "selection. Every method chooses its sizes so that its cost is within the budget; a method "
    "without such a choice has no answer there. float32, scale 1/√d."
)


@dataclass
class Measured:
    """All rows of the study, as they come in."""

    errors: list[Row] = field(default_factory=list)
    autos: list[timing.AutoRow] = field(default_factory=list)  # planned and run once
    promises: list[timing.AutoRow] = field(default_factory=list)  # at other tolerances
    times: list[timing.AutoRow] = field(default_factory=list)  # timed

    def needed(self) -> list[KeysNeeded]:
        """Of the trained encoder."""
        made = [group for group in groups(self.errors) if group.model == encoder.MODEL]
        return [item for group in made for item in keys_needed(group)]


def run_frontier(
    extent: Extent, models: Models, out: Path, seed: int, timed: bool, console: Console
) -> None:
    """Measure every source, write tables after each, then the report, and print last."""
    machine = Machine.here()
    problem = shipped.missing() if extent.shipped else None
    notes = [*models.notes, problem] if problem else models.notes
    for note in notes:
        console.print(note)
    measured = _measure(extent, models, seed, timed, out, machine, console)
    chapters = _chapters(measured, out)
    lead = " ".join([LEAD, *notes])
    publish(out, TITLE, lead, chapters, machine, console)


# ---- measuring -------------------------------------------------------------------------------


def _measure(
    extent: Extent,
    models: Models,
    seed: int,
    timed: bool,
    out: Path,
    machine: Machine,
    console: Console,
) -> Measured:
    measured = Measured()
    compared = sources(models, extent, seed)
    raced = _races(models, extent, seed) if timed else []
    with Steps(console, len(compared) + len(raced)) as steps:
        for source in compared:
            _compare(source, extent, seed, measured, steps, timing.in_turns if timed else None)
            _write_tables(measured, machine, out)
        for source, race in raced:
            with steps.step(f"time of {source}") as tick:
                measured.times += timing.measure_source(source, seed, race, tick)
            _write_tables(measured, machine, out)
    return measured


def _compare(
    source: Source,
    extent: Extent,
    seed: int,
    measured: Measured,
    steps: Steps,
    race: timing.Race | None,
) -> None:
    """Errors of all methods and the plans of `Auto`, head by head; these are timed in a race."""
    budgets, ours = extent.budgets_at(source.n), extent.our_budgets_at(source.n)
    with steps.step(str(source)) as tick:
        for done, head in enumerate(source.make()):
            measured.errors += measure_head(
                head, budgets, ours, seed, part(tick, done, source.count)
            )
            measured.autos.append(timing.measure_auto(head, seed))
            for tolerance in timing.PROMISED:
                measured.promises.append(timing.measure_auto(head, seed, race, tolerance))


def _races(models: Models, extent: Extent, seed: int) -> list[tuple[Source, timing.Race]]:
    """What is timed beside SDPA, and what alone because SDPA would take minutes."""
    made: list[tuple[Source, timing.Race]] = [
        (synthetic_source(n, seed, extent.heads), timing.in_turns) for n in extent.timed_synthetic
    ]
    count = encoder.LAYERS * encoder.HEADS
    chosen = spread(count, extent.heads)
    few = spread(count, min(extent.growth_heads, len(chosen)))
    for model in models.encoders:
        made += [(encoder_source(model, n, seed, chosen), timing.in_turns) for n in extent.timed]
        for n in extent.growth:
            if n not in extent.timed or not set(few) <= set(chosen):
                made.append((encoder_source(model, n, seed, few), timing.alone))
    return made


def _write_tables(measured: Measured, machine: Machine, out: Path) -> None:
    def write(name: str, lines: Iterable[dict[str, object]]) -> None:
        write_table(out / f"{name}.csv", machine, lines)

    write("errors", (row.line() for row in measured.errors))
    write("plans", (row.line() for row in measured.autos + measured.promises))
    write("keys", (asdict(item) for item in measured.needed()))
    write("times", (row.line() for row in measured.times))


# ---- chapters --------------------------------------------------------------------------------


def _chapters(measured: Measured, out: Path) -> list[Chapter]:
    made = groups(measured.errors)
    compared = [g for g in made if g.model != SYNTHETIC and g.baselines]
    generated = [g for g in made if g.model == SYNTHETIC]
    causal = [g for g in made if not g.baselines]
    chapters = [_asked(measured)]
    if compared:
        chapters.append(_trained(compared, out))
    if generated:
        chapters.append(_generated(generated, out))
    if causal:
        chapters.append(_causal(causal))
    if measured.needed():
        chapters.append(_keys(measured, out))
    chapters.append(_plans(measured.autos, measured.promises))
    if measured.times:
        chapters.append(_times(measured.times, out))
    return chapters


def _asked(measured: Measured) -> Chapter:
    made = claims.error_claims(measured.errors) + claims.keys_claim(measured.needed())
    made += claims.promise_claims(measured.promises)
    made += claims.time_claims(measured.times, timing.growths(measured.times))
    if not made:
        said = "The statements of the project are about other lengths than those measured here."
        return Chapter("In short", "", [said], [], [])
    holds = sum(claim.holds for claim in made)
    grid = claims.claims_table(made)
    said = f"{holds} of {len(made)} statements hold."
    return Chapter("In short", "", [said], [grid], [grid])


def _trained(made: Sequence[Group], out: Path) -> Chapter:
    text = (
        "Heads of trained models: encoders on random points in the order in which they were "
        "drawn; the diffusion model that comes with the package on generated text, longer "
        "than the 1024 tokens it was trained on. "
        "Medians and percentiles are over heads; where a method has no answer within the budget "
        "its error counts as infinite. “Heads” is on how many ours has a plan within the budget. "
        "“Sorted blocks + centroids” is not published: it is PISA after sorting queries and keys "
        "by median splits, and shows what order alone is worth; it is no baseline of the tables."
    )
    picture = out / "frontier.png"
    pictures.draw_frontier(made, picture)
    figures = [(picture, "Median error against cost. Band: 10th to 90th percentile of ours.")]
    for group in filter(pictures.shown_heads, made):
        label = "" if group.model == encoder.MODEL else f"{group.model.replace(' ', '-')}-"
        path = out / f"heads-{label}n{group.n}.png"
        pictures.draw_heads(group, path)
        figures.append((path, f"{group.label}: every head, ours and the best baseline."))
    said = [claims.error_findings(group) for group in made]
    said += [claims.head_findings(group) for group in made]
    shown = [tables.frontier_table(group) for group in made]
    grids = [
        grid for pair in zip(shown, map(tables.method_table, made), strict=True) for grid in pair
    ]
    grids += [tables.head_table(group, _asked_budget(group)) for group in made]
    return Chapter("Trained heads: error at equal cost", text, said, grids, shown, figures)


def _asked_budget(group: Group) -> float:
    """The budget of the statement about this length, or the middle one."""
    wanted = claims.TRAINED.get(group.n, (0.15,))[0]
    return wanted if wanted in group.budgets else group.budgets[len(group.budgets) // 2]


def _generated(made: Sequence[Group], out: Path) -> Chapter:
    text = (
        "Generated heads, d=64, values from N(0, 1). Diffuse: scores of standard deviation 0.5 in "
        "16 directions. Clusters: standard deviation 4, queries and keys in 64 clusters each, "
        "whose tokens spread by a tenth of what the centres do; loose clusters: by three tenths; "
        "own cluster: the same loose clusters for both. Isotropic: standard deviation 1 in all 64 "
        "directions, the hard case. Sinks: the diffuse head with four keys that every query "
        "scores high."
    )
    figures = []
    for group in made:
        path = out / f"synthetic-n{group.n}.png"
        pictures.draw_synthetic(group, path)
        figures.append((path, f"{group.label}: error against cost."))
    said = [claims.synthetic_findings(group) for group in made]
    grids = [tables.synthetic_table(group) for group in made]
    shown = [tables.synthetic_table(group, names=False) for group in made]
    return Chapter("Generated heads", text, said, grids, shown, figures)


def _causal(made: Sequence[Group]) -> Chapter:
    text = (
        "Causal heads, ours alone: the baselines are not causal. Cost is relative to causal exact "
        "attention."
    )
    grids = [tables.causal_table(group) for group in made]
    return Chapter("Causal heads", text, [], grids, grids)


def _keys(measured: Measured, out: Path) -> Chapter:
    needed = measured.needed()
    autos = [row for row in measured.autos if row.model == encoder.MODEL]
    picture = out / "keys.png"
    pictures.draw_keys(needed, autos, picture)
    text = (
        "How many keys, exact and coarse, a query needs, between the budgets that were tried on a "
        "log-log scale; “≤”: the cheapest plan was more accurate already. “Median error”: the keys "
        "at which the median error of all heads is 2 %; “median head”: the median of what the "
        "heads need. All work, trees and selection included, is counted in keys too."
    )
    grid = tables.keys_table(needed, autos)
    said = [f"{claim.text}: {claim.measured}." for claim in claims.keys_claim(needed)]
    caption = "Keys a query for an error of 2 % against length."
    return Chapter("Keys a query", text, said, [grid], [grid], [(picture, caption)])


def _plans(rows: Sequence[timing.AutoRow], promises: Sequence[timing.AutoRow]) -> Chapter:
    grid = tables.plan_table(rows)
    said = [*claims.promise_findings([*rows, *promises]), *claims.exact_findings(rows)]
    text = (
        "For each head Auto takes the cheapest plan whose error, measured on rows of its own "
        "choice, is within the tolerance at its upper limit. Errors here are on other rows."
    )
    return Chapter("Which heads stay exact", text, said, [grid], [grid])


def _times(rows: Sequence[timing.AutoRow], out: Path) -> Chapter:
    growing = timing.growths(rows)
    picture = out / "times.png"
    pictures.draw_times(rows, growing, picture)
    grids = [tables.time_table(rows)]
    if growing:
        grids.append(tables.growth_table(growing))
    text = (
        "Best of several calls in turns with SDPA, one head at a time. The plan was made before, "
        "saved and loaded; trees and selection are part of every call. Heads whose plan is exact "
        "are not timed. Beyond 131072 points SDPA is left out, and the encoder passes its layers "
        "with an error of 0.1 %."
    )
    caption = "Speed-up over SDPA, and seconds against length."
    return Chapter(
        "Wall clock", text, claims.exact_findings(rows), grids, grids, [(picture, caption)]
    )
