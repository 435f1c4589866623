"""``supportbasis reproduce efficiency``: measure what is missing, write, print."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from ..comparison.measure import SAMPLED_ROWS
from ..comparison.settings import DIM
from ..study import Machine, Records, Section, in_short, measure, publish
from . import authors, findings, pictures
from .inputs import EXPERIMENTS, SCALES, THEORY, Extent
from .measure import units
from .methods import AUTO, DEGREE, NAIVE, SKETCH
from .rows import MATRIX_ROWS, EfficiencyRow

TITLE = "supportbasis reproduce efficiency"
LEAD = (
    f"The paper's figure on running time and error against the threshold T: d={DIM}, entries of "
    "Q and K from N(0, 0.1²), V from N(0, 1), float32. The paper compares with AS23 and with an "
    "exact computation that writes down exp(QKᵀ); SDPA, PyTorch's own exact attention, and the "
    "mean of V are added here, and so are the methods the paper does not show. Then the same "
    "methods on harder inputs."
)
TIMES = (
    "Times are the best of at least two whole calls, planning included, all methods and SDPA "
    "taking turns. Errors are against float64 on sampled query rows over all keys: of the output, "
    f"relative Frobenius and largest over max|V|, on {SAMPLED_ROWS} rows; of the attention matrix "
    f"D⁻¹A, relative Frobenius, on {MATRIX_ROWS} rows, its weights written down in float64 from "
    "the plan, because a whole n × n matrix in float64 takes up to 8 GB. A dash: the method has "
    "no such number. "
)


def run_efficiency(
    extent: Extent, out: Path, seed: int, console: Console, *, redraw: bool = False
) -> None:
    """Measure the units that the folder lacks; then tables, pictures and the report."""
    machine = Machine.here()
    records = Records(out / "efficiency.csv", EfficiencyRow, machine)
    wanted = units(records, extent, seed)
    matrices = Records(out / "authors.csv", authors.MatrixRow, machine)
    theirs = authors.unit(matrices, *extent.authors, seed)
    measure([*wanted, theirs], console, redraw=redraw, whole=True)
    rows = records.of([unit.name for unit in wanted])
    title = "The paper's statements and ours"
    sections = [
        in_short(title, findings.checks(rows)), _authors(matrices.of([theirs.name])),
        _paper(rows, out), _errors(rows, out), _map(rows, out),
    ]  # fmt: skip
    publish(out, TITLE, LEAD, sections, machine, console)


def _authors(rows: Sequence[authors.MatrixRow]) -> Section:
    grids = [authors.table(rows)]
    return Section("The authors' script", authors.TEXT, authors.findings(rows), grids)


def _paper(rows: Sequence[EfficiencyRow], out: Path) -> Section:
    text = TIMES + (
        f"AS23 is Polynomial({DEGREE}) with the bound B on the scores from the largest entries "
        f"(scale·d·max|Q|·max|K|) or from the largest norms; single threshold is "
        f"SingleThreshold(T, {DEGREE}); “multi-threshold” is MultiThreshold(2, 1), quadratic "
        f"without a sketch, and with one of size {SKETCH}. “{NAIVE}” is in groups of "
        "rows where 2 GiB would not hold it. The paper states neither the degree, V, the error nor "
        "the number of repeats of its figure; the authors' script does, see above. “Chebyshev”: "
        "the same threshold with AS23's polynomial; “one best polynomial”: the same polynomial "
        "without a threshold. Red: no better than the mean of V."
    )
    figures, grids = [], []
    for scale, name in ((EXPERIMENTS, "thresholds"), (THEORY, "thresholds-theory")):
        path = out / f"{name}.png"
        pictures.draw_thresholds(rows, scale, path)
        figures.append((path, f"Time, error and share of exact pairs against T, scale {scale}."))
    for n, scale in findings.panels(rows):
        grids.append(findings.panel_table(rows, n, scale))
    longest = max(n for n, _ in findings.panels(rows))
    every = [findings.threshold_table(rows, longest, scale) for scale in SCALES]
    said = findings.panel_findings(rows)
    title = "The paper's setting: time and error against T"
    return Section(title, text, said, [*grids, *every], figures, printed=grids)


def _errors(rows: Sequence[EfficiencyRow], out: Path) -> Section:
    path = out / "errors.png"
    pictures.draw_errors(rows, path)
    longest = max(n for n, _ in findings.panels(rows))
    caption = (
        f"Three errors against T, n={longest}; below {pictures.LEAST:g} they leave the picture."
    )
    text = (
        "The same comparison in three errors. The matrix error has no line where a method forms no "
        "matrix; it is that of the weights before rounding."
    )
    return Section("Three errors", text, figures=[(path, caption)])


def _map(rows: Sequence[EfficiencyRow], out: Path) -> Section:
    path = out / "map.png"
    pictures.draw_map(rows, path)
    text = (
        "Scores of standard deviation σ, scale 1/√d, in all directions alike, which is the hard "
        "case for every method; “outliers”: 1 % of the queries and of the keys × 50 after that. "
        f"A method counts where its error is within {findings.ACCURATE:g}. “Exact”: it found "
        "nothing cheaper and runs exactly; its time is that of planning and of SDPA, and it is not "
        "run again. “cost”: the plan takes that many times the work of exact attention and is not "
        f"run. {AUTO} is asked for exactly this error. Times are of planning and one call, the "
        "best of three where they are short."
    )
    lengths = sorted({row.n for row in rows if row.part == "map"})
    grids = [findings.map_table(rows, n) for n in lengths]
    caption = (
        "Speed against SDPA where the error is within 1e-2; elsewhere the error, or what happened."
    )
    said = findings.map_findings(rows)
    title = "Harder inputs: who wins where"
    return Section(title, text, said, grids, [(path, caption)], printed=grids[-1:])
