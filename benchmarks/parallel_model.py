"""Time of context-parallel attention from 8 to 1024 GPUs, predicted, and checked on this machine.

    python benchmarks/parallel_model.py validate   # 2 and 4 ranks here: predicted against measured
    python benchmarks/parallel_model.py scaling    # one rank against two, 65536 tokens
    python benchmarks/parallel_model.py table      # bytes that a rank sends
    python benchmarks/parallel_model.py draw       # docs/figures/context-parallel.png

A layer takes the work of one rank, measured on one device and divided among the ranks, plus what
its exchanges take on links of a given latency and bandwidth. Three ways are compared: a ring of
key slices (its transfers hidden behind the work, where they are shorter), an all-gather of keys,
and the exchange of degree-2 states. Nothing else is modelled: no contention, no imbalance.
"""

import argparse
import csv
import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import torch
import torch.distributed as dist

import supportbasis as sb
from supportbasis.distributed.ranks import Ranks

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests"))
FLOAT = 4  # bytes of an entry of a state


@dataclass(frozen=True)
class Machine:
    """Ranks in nodes; seconds, bytes per second, multiply-adds per second of one rank."""

    exact_rate: float
    state_rate: float  # multiply-adds of features and values
    token_bytes: int  # of an entry of a key or a value
    latency: float  # of one exchange
    message: float  # of each message within it
    bandwidth: float  # of a rank within a node
    outside: float  # and to other nodes
    node: int = 8
    overlaps: bool = True  # whether a ring sends while it computes

    def transfer(self, sent: float, ranks: int, messages: int) -> float:
        speed = self.bandwidth if ranks <= self.node else self.outside
        return self.latency + messages * self.message + sent / speed


@dataclass(frozen=True)
class Layer:
    """Heads of one layer, not causal, forward."""

    tokens: int
    heads: int
    dim: int

    @property
    def features(self) -> int:
        return math.comb(self.dim + 2, 2)

    def exact_work(self) -> float:
        return 2.0 * self.heads * self.tokens**2 * self.dim

    def state_work(self) -> float:
        """Features of keys and of queries, each times a value."""
        return 2.0 * self.heads * self.tokens * self.features * self.dim

    def state_bytes(self, ranks: int) -> float:
        """What a rank sends: its state, transposed, and sums back."""
        state = FLOAT * self.heads * (self.features * (self.dim + 1) + 1)
        return 2 * state * (ranks - 1) / ranks

    def key_bytes(self, ranks: int, size: int) -> float:
        """Keys and values that pass through a rank of a ring."""
        return 2.0 * self.heads * self.tokens * self.dim * size * (ranks - 1) / ranks


# One H200: degree 2 and cuDNN on 8 heads of 131072 tokens, dim 128, in docs/gpu-notes.md. Links by
# public specifications: NVLink 4 has 450 GB/s in each direction, an NDR InfiniBand port 50 GB/s;
# 20 us for a collective and 1 us for a message are usual figures of NCCL's tests.
_MEASURED = Layer(131072, 8, 128)
H200 = Machine(
    exact_rate=_MEASURED.exact_work() / 0.113,
    state_rate=_MEASURED.state_work() / 0.0139,
    token_bytes=2,
    latency=20e-6,
    message=1e-6,
    bandwidth=450e9,
    outside=50e9,
)


def ring_time(machine: Machine, layer: Layer, ranks: int) -> float:
    work = layer.exact_work() / machine.exact_rate / ranks**2  # of one slice of the keys
    sent = layer.key_bytes(ranks, machine.token_bytes) / max(1, ranks - 1)
    move = machine.transfer(sent, ranks, 1)
    return work + (ranks - 1) * (max(work, move) if machine.overlaps else work + move)


def gather_time(machine: Machine, layer: Layer, ranks: int) -> float:
    work = layer.exact_work() / machine.exact_rate / ranks
    sent = layer.key_bytes(ranks, machine.token_bytes)
    return work + machine.transfer(sent, ranks, ranks - 1)


def state_time(machine: Machine, layer: Layer, ranks: int) -> float:
    work = layer.state_work() / machine.state_rate / ranks
    return work + 2 * machine.transfer(layer.state_bytes(ranks) / 2, ranks, ranks - 1)


# ---- this machine ------------------------------------------------------------------------------


def times_of(run: Callable[[], object], repeats: int) -> list[float]:
    """Seconds of some runs, which all ranks begin together."""
    times = []
    for _ in range(repeats):
        dist.barrier()
        begin = time.perf_counter()
        run()
        times.append(time.perf_counter() - begin)
    return times


def on_all(ranks: int, *settings: object) -> dict[str, float]:
    """Seconds of the fastest run, each as long as the slowest rank takes."""
    from rank_cases import on_ranks

    found = on_ranks(ranks, on_rank, *settings)
    return {
        name: min(max(times) for times in zip(*(each[name] for each in found), strict=True))
        for name in found[0]
    }


def tokens(layer: Layer) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shape = (3, 1, layer.heads, layer.tokens, layer.dim)
    return list((torch.randn(shape, generator=generator) * 0.15).unbind(0))


METHODS = {"state": (sb.Polynomial(2), None), "ring": (sb.Exact(), "ring")}


def on_rank(layer: Layer, names: list[str], repeats: int) -> dict[str, list[float]]:
    """Seconds of exchanges of nothing and of 16 MB, of each way, and of a rank's own share of its
    work, while the other ranks do theirs."""
    torch.set_num_threads(1)
    ranks, own = Ranks(None), [sb.distributed.split_tokens(x) for x in tokens(layer)]
    runs: dict[str, Callable[[], object]] = {}
    for name, size in (("nothing", ranks.size), ("much", MUCH)):
        parts = [torch.zeros(size // ranks.size)] * ranks.size
        runs[name] = lambda parts=parts: ranks.gather_parts(parts)
    for name in names:
        method, exchange = METHODS[name]
        plan = sb.distributed.plan(*own, method=method)
        runs[name] = lambda plan=plan, exchange=exchange: sb.distributed.attention(
            *own, plan=plan, exchange=exchange
        )
        runs[f"own {name}"] = lambda plan=plan: sb.attention(*own, plan=plan)
    found = {name: times_of(run, repeats) for name, run in runs.items()}
    begin = time.process_time()
    times_of(runs["state"], repeats)
    return {**found, "processor state": [(time.process_time() - begin) / repeats]}


MUCH = 2**22  # entries


def validate(out: Path, repeats: int = 9) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    for layer in (Layer(16384, 1, 64), Layer(65536, 1, 64)):
        names = list(METHODS) if layer.tokens <= 16384 else ["state"]
        alone = on_all(1, layer, names, repeats)
        for ranks in (2, 4):
            found = on_all(ranks, layer, names, repeats)
            machine = _machine(layer, ranks, found)
            for name in names:
                model = state_time if name == "state" else ring_time
                predicted, measured = model(machine, layer, ranks), found[name]
                rows.append({
                    "exchange": name, "tokens": layer.tokens, "dim": layer.dim, "ranks": ranks,
                    "alone_s": alone[name], "predicted_s": predicted, "measured_s": measured,
                    "error": predicted / measured - 1, "speedup": alone[name] / measured,
                })  # fmt: skip
    with out.open("w", newline="") as stream:
        writer = csv.DictWriter(stream, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    return rows


def scaling(rounds: int, repeats: int = 12) -> dict[str, float]:
    """Seconds of one rank and of two for a layer of 65536 tokens, in turns, and processor seconds,
    which do not depend on what else the machine does."""
    from rank_cases import on_ranks

    layer, found = Layer(65536, 1, 64), {}
    for _ in range(rounds):
        for ranks in (1, 2):
            times = on_ranks(ranks, on_rank, layer, ["state"], repeats)
            wall = min(max(each) for each in zip(*(t["state"] for t in times), strict=True))
            spent = max(min(t["processor state"]) for t in times)
            for name, value in ((f"{ranks} wall", wall), (f"{ranks} processor", spent)):
                found[name] = min(value, found.get(name, math.inf))
    return found


def _machine(layer: Layer, ranks: int, times: dict[str, float]) -> Machine:
    """The machine at hand, from what its ranks measured."""
    sent = FLOAT * MUCH * (ranks - 1) / ranks
    exact = times.get("own ring", math.inf)
    return Machine(
        exact_rate=layer.exact_work() / ranks**2 / exact,
        state_rate=layer.state_work() / ranks / times["own state"],
        token_bytes=FLOAT, latency=times["nothing"], message=0.0,
        bandwidth=sent / max(1e-9, times["much"] - times["nothing"]), outside=1.0, overlaps=False,
    )  # fmt: skip


# ---- the table and the picture -----------------------------------------------------------------


def table() -> list[tuple[int, float, float, float]]:
    """Bytes that a rank sends for one head of a million tokens, dim 128."""
    layer = Layer(2**20, 1, 128)
    keys = layer.tokens * layer.dim * 2 * H200.token_bytes
    return [
        (ranks, layer.key_bytes(ranks, H200.token_bytes), keys / ranks * (ranks - 1),
         layer.state_bytes(ranks))
        for ranks in (8, 64, 256, 1024)
    ]  # fmt: skip


def draw(path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 3, figsize=(10, 3.4), layout="constrained", sharey=True)
    counts = [2**k for k in range(3, 11)]
    for axis, size in zip(axes, (2**20, 2**25, 2**30), strict=True):
        layer = Layer(size, 8, 128)
        for label, model, colour in (
            ("ring of keys", ring_time, "#bc4c00"),
            ("all-gather of keys", gather_time, "#8250df"),
            ("states, degree 2", state_time, "#1f6feb"),
        ):
            axis.loglog(counts, [model(H200, layer, r) for r in counts], "o-", color=colour,
                        label=label, markersize=3)  # fmt: skip
        only = [2 * H200.transfer(layer.state_bytes(r) / 2, r, r - 1) for r in counts]
        axis.loglog(counts, only, ":", color="#1f6feb", label="states, exchanges alone")
        axis.set_title({2**20: "1 M tokens", 2**25: "32 M tokens", 2**30: "1 G tokens"}[size])
        axis.set_xticks([8, 64, 1024], ["8", "64", "1024"])
        axis.set_xlabel("GPUs")
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("seconds for a layer of 8 heads, d = 128")
    axes[0].legend(fontsize=7)
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("validate", "scaling", "table", "draw"))
    what = parser.parse_args().what
    if what == "validate":
        path = ROOT / "benchmarks" / "results" / f"context-parallel-{date.today()}.csv"
        for row in validate(path):
            print(", ".join(f"{k} {v:.3g}" if isinstance(v, float) else f"{k} {v}"
                            for k, v in row.items()))  # fmt: skip
    elif what == "scaling":
        found = scaling(rounds=4)
        for name, seconds in found.items():
            print(f"{name}: {seconds:.4f} s")
        for name in ("wall", "processor"):
            print(f"two ranks, {name}: {found[f'1 {name}'] / found[f'2 {name}']:.2f} times one")
    elif what == "table":
        for ranks, ring, gather, state in table():
            print(f"{ranks:5} ranks: ring {ring / 1e6:.1f} MB, all-gather {gather / 1e6:.1f} MB, "
                  f"state {state / 1e6:.2f} MB: {ring / state:.0f} times less")  # fmt: skip
        for size in (2**20, 2**25, 2**30):
            for ranks in (8, 64, 1024):
                times = [f(H200, Layer(size, 8, 128), ranks) for f in
                         (ring_time, gather_time, state_time)]  # fmt: skip
                print(size, ranks, *(f"{x:.3g}" for x in times))
    else:
        draw(ROOT / "docs" / "figures" / "context-parallel.png")


if __name__ == "__main__":
    main()
