"""Mutation testing: one small change of a random line of the core at a time; do tests go red?

`python tests/mutants.py --count 40 --seed 0` prints killed or survived for every mutant, and the
diff of each survivor. Nothing is changed in this tree: mutants live in a temporary copy.

A first run finds out which test calls which functions, and how long it takes (ten minutes; kept in
.pytest_cache/mutants.json, and renewed for test files that change). A mutant meets the tests that
call a function of its file, in three rounds: fast ones and those of its own function first.

The lines are those with the smallest hash of (seed, path, text), so that the choice is
deterministic and an edit of one line does not change the choice of others. Left out: messages,
annotations, tuning constants (names in capitals), kernels and devices.
"""

from __future__ import annotations

import argparse
import ast
import copy
import difflib
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "src/supportbasis"
CACHE = ROOT / ".pytest_cache" / "mutants.json"
MUTATED = "problem paper polynomials components lists plans engine accuracy methods sketch"
FOLDERS = ("", *(f"{name}/" for name in MUTATED.split()))
LEFT_OUT = {
    *("__init__.py", "__main__.py"),
    *("cost.py", "drawing.py"),  # rates of machines; pictures
}
# Tests of the command line, of kernels and of devices: slow, and not what tests the core.
OTHER_TESTS = (
    *("cli", "examples", "selftest"),
    *("device", "device_fitted", "device_lists", "device_ranges", "fused"),
    *(
        "gpu",
        "list_backward",
        "list_kernels",
        "rectangle",
        "sorting_kernels",
        "triton",
    ),
)
ROUNDS = (10.0, 30.0, 100.0)  # seconds of tests for one mutant, as timed without it
SLOWER = 8.0  # a run that takes this many times longer, and a minute, does not end: killed


def both(*pairs: str) -> dict[str, str]:
    return {a: b for pair in pairs for a, b in (pair.split(), pair.split()[::-1])}


def nodes(table: dict[str, str]) -> dict[type, type]:
    return {getattr(ast, a): getattr(ast, b) for a, b in table.items()}


SWAPPED = nodes(
    both("Add Sub", "Mult Div", "BitAnd BitOr", "And Or")
    | {"FloorDiv": "Mult", "Mod": "Mult", "Pow": "Mult"}
)
FLIPPED = nodes(both("Lt Gt", "LtE GtE", "Eq NotEq", "Is IsNot", "In NotIn"))
SHIFTED = nodes(both("Lt LtE", "Gt GtE"))
RENAMED = both("min max", "amin amax", "minimum maximum", "any all", "floor ceil", "argmin argmax")
SYMMETRIC = {*RENAMED, "isinstance", "gcd", "isclose", "allclose", "hypot", "einsum", "zip"}
TORCH_DEFAULTS = {"dtype", "keepdim", "right", "descending", "largest", "upper"}
SILENT = {"warn", "print", "InputError", "SupportBasisError", "TypeVar", "cast", "__setattr__"}
TEXT = {"__repr__", "__str__", "extra_repr", "shown", "plot"}  # what people look at
COARSE = {"arguments swapped", "an argument returned"}  # most raise at once: if nothing else can be


@dataclass(frozen=True)
class Mutant:
    path: str  # under src/supportbasis
    unit: str  # the function, method or class that holds the line, or ""
    line: int
    span: tuple[int, int]  # bytes of the file
    text: str  # what stands there instead
    kind: str
    source: bytes  # of the file

    def __str__(self) -> str:
        return f"{self.path}:{self.line} {self.unit}: {self.kind}"

    def applied(self) -> str:
        first, last = self.span
        return (self.source[:first] + self.text.encode() + self.source[last:]).decode()

    def diff(self) -> str:
        texts = (text.splitlines() for text in (self.source.decode(), self.applied()))
        return "\n".join(list(difflib.unified_diff(*texts, n=1, lineterm=""))[2:])


def changed(node: ast.AST, **fields: object) -> ast.AST:
    node = copy.copy(node)
    for name, value in fields.items():
        setattr(node, name, value)
    return node


def of_operator(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    if isinstance(node, ast.BinOp | ast.AugAssign | ast.BoolOp) and type(node.op) in SWAPPED:
        yield "operator", changed(node, op=SWAPPED[type(node.op)]())
    if isinstance(node, ast.Compare):
        for kind, table in (("flipped", FLIPPED), ("off by one", SHIFTED)):
            if type(node.ops[0]) in table:
                yield kind, changed(node, ops=[table[type(node.ops[0])](), *node.ops[1:]])
    if isinstance(node, ast.UnaryOp) and not isinstance(node.op, ast.Invert | ast.UAdd):
        yield "sign or not dropped", node.operand


def of_value(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    if isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield "constant", ast.Constant(not node.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        yield "constant", ast.Constant(2 * node.value if node.value else 1)
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id in RENAMED:
        yield "renamed", ast.Name(RENAMED[node.id])
    if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load) and node.attr in RENAMED:
        yield "renamed", changed(node, attr=RENAMED[node.attr])
    if isinstance(node, ast.IfExp):
        yield "branches swapped", changed(node, body=node.orelse, orelse=node.body)


@dataclass(frozen=True)
class Signature:
    optional: set[str]  # arguments with defaults
    alike: bool  # whether the first two arguments are of one type


def positional(function: ast.FunctionDef) -> list[ast.arg]:
    named = function.args.posonlyargs + function.args.args
    return [a for a in named if a.arg not in ("self", "cls")]


def called(node: ast.Call) -> str:
    return getattr(node.func, "attr", getattr(node.func, "id", ""))


def of_call(node: ast.AST, known: dict[str, Signature]) -> Iterator[tuple[str, ast.AST]]:
    if not isinstance(node, ast.Call):
        return
    signature = known.get(called(node), Signature(TORCH_DEFAULTS, True))
    alike = len({type(argument) for argument in node.args[:2]} - {ast.Starred}) == 1
    if len(node.args) > 1 and alike and signature.alike and called(node) not in SYMMETRIC:
        yield "arguments swapped", changed(node, args=[*node.args[1::-1], *node.args[2:]])
    for i, keyword in enumerate(node.keywords):
        if keyword.arg in signature.optional:
            rest = node.keywords[:i] + node.keywords[i + 1 :]
            yield f"{keyword.arg} dropped", changed(node, keywords=rest)


def of_return(node: ast.AST, function: ast.FunctionDef) -> Iterator[tuple[str, ast.AST]]:
    if not isinstance(node, ast.Return) or node.value is None:
        return
    inside = {name.id for name in ast.walk(node.value) if isinstance(name, ast.Name)}
    for argument in positional(function):
        typed = argument.annotation is not None and function.returns is not None
        same = typed and ast.dump(argument.annotation) == ast.dump(function.returns)
        if same and argument.arg in inside and not isinstance(node.value, ast.Name):
            yield "an argument returned", changed(node, value=ast.Name(argument.arg))
    if isinstance(node.value, ast.Tuple):
        swapped = changed(node.value, elts=node.value.elts[::-1])
        if ast.dump(swapped) != ast.dump(node.value):
            yield "returned values swapped", changed(node, value=swapped)


def silent(node: ast.AST) -> bool:
    """Whether what stands in a node is a message, a type, an import, or a tuning constant."""
    if isinstance(node, ast.Raise | ast.JoinedStr | ast.Import | ast.ImportFrom | ast.Assert):
        return True
    if isinstance(node, ast.Call):
        return called(node) in SILENT
    if isinstance(node, ast.FunctionDef):
        return node.name in TEXT or node.name.startswith("_draw")
    if isinstance(node, ast.If):
        return "TYPE_CHECKING" in ast.dump(node.test)
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    names = [n for target in targets if target for n in ast.walk(target)]
    return any(isinstance(name, ast.Name) and name.id.isupper() for name in names)


def children(node: ast.AST) -> Iterator[ast.AST]:
    for name, value in ast.iter_fields(node):
        if name not in ("annotation", "returns", "decorator_list", "bases"):
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST) and not silent(child):
                    yield child


def found(
    node: ast.AST,
    known: dict[str, Signature],
    unit: str = "",
    function: ast.FunctionDef | None = None,
) -> Iterator[tuple[str, ast.AST, str, ast.AST]]:
    """(function, node, kind, what stands in its place), of everything that can be changed."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef) and function is None:
        unit = f"{unit}.{node.name}".lstrip(".")
    if isinstance(node, ast.FunctionDef):
        function = node
    words = any(isinstance(n, ast.Constant) and isinstance(n.value, str) for n in children(node))
    if not (isinstance(node, ast.BinOp) and (words or not unit)):  # text; types
        yield from ((unit, node, *one) for one in (*of_operator(node), *of_value(node)))
        yield from ((unit, node, *one) for one in of_call(node, known))
    if function is not None:
        yield from ((unit, node, *one) for one in of_return(node, function))
    for child in children(node):
        yield from found(child, known, unit, function)


def signatures() -> dict[str, Signature]:
    """Of the package's functions; what holds for every function of a name."""
    known: dict[str, Signature] = {}
    for path in (ROOT / PACKAGE).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                named = positional(node)
                optional = {a.arg for a in named[len(named) - len(node.args.defaults) :]}
                pairs = zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)
                optional |= {a.arg for a, value in pairs if value is not None}
                types = {ast.dump(a.annotation) for a in named[:2] if a.annotation}
                old = known.get(node.name, Signature(optional, True))
                known[node.name] = Signature(old.optional & optional, old.alike and len(types) == 1)
    return known


def core() -> list[str]:
    base = ROOT / PACKAGE
    paths = [path for folder in FOLDERS for path in (base / folder).glob("*.py")]
    return sorted({str(path.relative_to(base)) for path in paths} - LEFT_OUT)


def mutants_of(path: str, known: dict[str, Signature]) -> Iterator[Mutant]:
    source = (ROOT / PACKAGE / path).read_bytes()
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    for unit, node, kind, other in found(ast.parse(source), known):
        first = starts[node.lineno - 1] + node.col_offset
        last = starts[node.end_lineno - 1] + node.end_col_offset
        text = ast.unparse(other)
        bare = isinstance(other, ast.stmt | ast.Constant | ast.Name | ast.Attribute | ast.Call)
        text = text if bare else f"({text})"
        yield Mutant(path, unit, node.lineno, (first, last), text, kind, source)


def chosen(count: int, seed: int) -> list[Mutant]:
    """One mutant of each of `count` random lines."""

    def rank(*words: object) -> str:
        return hashlib.sha256(repr((seed, *words)).encode()).hexdigest()

    known, best = signatures(), {}
    for path in core():
        lines = (ROOT / PACKAGE / path).read_text().splitlines()
        by_line: dict[int, list[Mutant]] = {}
        for mutant in mutants_of(path, known):
            by_line.setdefault(mutant.line, []).append(mutant)
        for line, here in by_line.items():
            text = lines[line - 1].strip()
            place = rank(path, here[0].unit, text)
            best[place] = min(here, key=lambda m: (m.kind in COARSE, rank(m.kind, m.text)))
    return [best[place] for place in sorted(best)[:count]]


# What follows runs in pytest, as a plugin.


def units(path: Path) -> list[tuple[int, int, str]]:
    """(first line, last line, name) of every function and method."""
    spans = []
    for node in ast.parse(path.read_text()).body:
        inner = node.body if isinstance(node, ast.ClassDef) else [node]
        prefix = f"{node.name}." if isinstance(node, ast.ClassDef) else ""
        for one in inner:
            if isinstance(one, ast.FunctionDef):
                first = min([one.lineno, *(d.lineno for d in one.decorator_list)])
                spans.append((first, one.end_lineno or first, prefix + one.name))
    return spans


class Tracer:
    """Writes which functions of the package each passing test calls, and its seconds."""

    def __init__(self, target: Path, base: Path) -> None:
        self.target, self.base = target, f"{base / PACKAGE}{os.sep}"
        self.tests: dict[str, dict[str, object]] = {}
        self.failed: set[str] = set()

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        calls: set[tuple[str, int]] = set()

        def trace(frame, event, argument):  # of calls alone
            code = frame.f_code
            if code.co_filename.startswith(self.base):
                calls.add((code.co_filename, code.co_firstlineno))

        start = time.perf_counter()
        sys.settrace(trace)
        yield
        sys.settrace(None)
        seconds = round(time.perf_counter() - start, 3)
        self.tests[item.nodeid] = {"seconds": seconds, "calls": sorted(calls)}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.outcome != "passed":
            self.failed.add(report.nodeid)

    def pytest_sessionfinish(self) -> None:
        spans = {}
        for test in self.tests.values():
            names = set()
            for name, line in test["calls"]:
                spans[name] = spans.get(name) or units(Path(name))
                inside = [unit for first, last, unit in spans[name] if first <= line <= last]
                names |= {f"{name.removeprefix(self.base)}:{unit}" for unit in inside}
            test["calls"] = sorted(names)
        kept = {name: test for name, test in self.tests.items() if name not in self.failed}
        self.target.write_text(json.dumps(kept))


class Only:
    """Runs the tests that a file names."""

    def __init__(self, source: Path) -> None:
        self.names = set(json.loads(source.read_text()))

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = [item for item in items if item.nodeid in self.names]


def pytest_configure(config: pytest.Config) -> None:
    if "MUTANTS_TRACE" in os.environ:
        config.pluginmanager.register(Tracer(Path(os.environ["MUTANTS_TRACE"]), config.rootpath))
    if "MUTANTS_ONLY" in os.environ:
        config.pluginmanager.register(Only(Path(os.environ["MUTANTS_ONLY"])))


# What follows starts pytest.


def run(base: Path, files: list[str], seconds: float, **variables: object) -> tuple[int, str]:
    """pytest in a copy of the tree: the exit status (-1: it did not end), and the failures."""
    paths = os.pathsep.join((str(base / "src"), str(base / "tests")))
    fixed = {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
    options = ["-q", "-p", "mutants", "-p", "no:cacheprovider", "--hypothesis-seed=0", "--tb=no"]
    options += ["-m", "not gpu"] + (["-x"] if "MUTANTS_ONLY" in variables else [])
    environment = os.environ | fixed | {name: str(value) for name, value in variables.items()}
    command = [sys.executable, "-m", "pytest", *options, *files]
    try:
        done = subprocess.run(
            command, cwd=base, env=environment, capture_output=True, text=True, timeout=seconds
        )
    except subprocess.TimeoutExpired:
        return -1, "did not end"
    said = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return done.returncode, "\n".join(said) or done.stdout[-300:] + done.stderr[-300:]


def copied(base: Path) -> Path:
    ignored = shutil.ignore_patterns(".*", "__pycache__", "*.safetensors", "_build")
    return Path(shutil.copytree(ROOT, base, ignore=ignored))


def test_files() -> list[str]:
    other = {f"test_{name}.py" for name in OTHER_TESTS}
    files = [f"tests/{p.name}" for p in ROOT.glob("tests/test_*.py") if p.name not in other]
    examples = [f"{PACKAGE}/{p}" for p in core() if ">>>" in (ROOT / PACKAGE / p).read_text()]
    return sorted(files) + examples


def traced(copies: list[Path]) -> dict[str, dict]:
    """Of every test: its seconds, and the functions that it calls."""
    known = json.loads(CACHE.read_text()) if CACHE.exists() else {}
    sums = {f: hashlib.sha256((ROOT / f).read_bytes()).hexdigest() for f in test_files()}
    known = {f: entry for f, entry in known.items() if entry["sum"] == sums.get(f)}
    stale = [f for f in sums if f not in known]
    jobs = [(base, stale[i :: len(copies)]) for i, base in enumerate(copies)]

    def trace(job: tuple[Path, list[str]]) -> dict[str, dict]:
        base, files = job
        target = base / "trace.json"
        status, message = run(base, files, 7200.0, MUTANTS_TRACE=target) if files else (0, "")
        if status not in (0, 1):
            raise SystemExit(message)
        if status == 1:
            print(f"left out, since they fail without a mutant:\n{message}", flush=True)
        return json.loads(target.read_text()) if files else {}

    with ThreadPoolExecutor(len(copies)) as pool:
        tests = [item for part in pool.map(trace, jobs) for item in part.items()]
    for f in stale:
        here = {name: test for name, test in tests if name.split("::")[0] == f}
        known[f] = {"sum": sums[f], "tests": here}
    CACHE.parent.mkdir(exist_ok=True)
    CACHE.write_text(json.dumps(known))
    return {name: test for entry in known.values() for name, test in entry["tests"].items()}


def rounds(mutant: Mutant, tests: dict[str, dict]) -> Iterator[tuple[list[str], float]]:
    """Names of tests and their seconds. First come those that are fast, call little beside the
    file, and call the function (which a cache may have hidden)."""
    unit, prefix = f"{mutant.path}:{mutant.unit}", f"{mutant.path}:"
    ranked = []
    for name, test in tests.items():
        calls = test["calls"]
        own = name.startswith(f"{PACKAGE}/{mutant.path}::")  # an example in the file
        share = own or sum(call.startswith(prefix) for call in calls) / max(1, len(calls))
        if share:
            ranked.append((test["seconds"] / share * (1 if unit in calls else 4), name))
    queue = iter(sorted(ranked))
    for limit in ROUNDS:
        batch, seconds = [], 0.0
        for _, name in queue:
            batch.append(name)
            seconds += tests[name]["seconds"]
            if seconds > limit:
                break
        if batch:
            yield batch, seconds


def killer(mutant: Mutant, base: Path, tests: dict[str, dict]) -> str:
    """What killed a mutant in a copy of the tree, or ""."""
    target, names_file = base / PACKAGE / mutant.path, base / "only.json"
    target.write_text(mutant.applied())
    os.utime(target, (time.time(), mutant.span[0] + 1))  # bytecode of another text is stale
    try:
        for names, seconds in rounds(mutant, tests):
            names_file.write_text(json.dumps(names))
            files = sorted({name.split("::")[0] for name in names})
            limit = 60.0 + SLOWER * seconds
            status, message = run(base, files, limit, MUTANTS_ONLY=names_file)
            if status not in (0, 5):
                return message or "?"
    finally:
        target.write_bytes(mutant.source)
        os.utime(target)
    return ""


def tested(mutants: list[tuple[int, Mutant]], copies: list[Path]) -> int:
    """How many are killed; each is printed when it is known."""
    tests = traced(copies)
    free: SimpleQueue[Path] = SimpleQueue()
    for base in copies:
        free.put(base)

    def killed(numbered: tuple[int, Mutant]) -> bool:
        i, mutant = numbered
        base, start = free.get(), time.perf_counter()
        by = killer(mutant, base, tests)
        free.put(base)
        seconds = time.perf_counter() - start
        ending = f" by {by[:200]}" if by else f"\n{mutant.diff()}"
        print(
            "killed  " if by else "SURVIVED", f"{i} {mutant} ({seconds:.0f} s){ending}", flush=True
        )
        return bool(by)

    with ThreadPoolExecutor(len(copies)) as pool:
        return sum(pool.map(killed, mutants))


def main() -> None:
    parser = argparse.ArgumentParser(description="Changes random lines; do tests go red?")
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--list", action="store_true", help="only show the mutants")
    parser.add_argument("--only", type=int, nargs="*", help="numbers of mutants to run")
    options = parser.parse_args()
    mutants = list(enumerate(chosen(options.count, options.seed)))
    mutants = [m for m in mutants if options.only is None or m[0] in options.only]
    if options.list:
        for i, mutant in mutants:
            print(f"{i} {mutant}\n{mutant.diff()}\n")
        return
    with tempfile.TemporaryDirectory() as folder:
        copies = [copied(Path(folder) / str(i)) for i in range(options.jobs)]
        killed = tested(mutants, copies)
    print(f"killed {killed} of {len(mutants)}")


if __name__ == "__main__":
    main()
