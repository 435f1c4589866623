"""Train an encoder of points as `supportbasis bench frontier --models DIR` takes it, to check what
is said of tsp50 on heads that nobody has looked at: `python benchmarks/train_encoder.py
models/tsp20 --points 20 --seconds 555 --device cuda`.

An encoder (3 layers of 8 heads of dim 16, batch normalisation, no positions) and a pointer learn
short tours by REINFORCE: tours of one input that start at different points are compared with their
mean. With prizes, a third number for each point, only half of the points are visited.
"""

from __future__ import annotations

import argparse
import math
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.progress import Progress
from safetensors.torch import save_file
from torch import Tensor, nn

from supportbasis_studies.frontier.encoder import FILE, HEADS, INPUT, LAYERS

WIDTH, WIDE = 128, 512
RATE, CLIP = 3e-4, 1.0
FALLING = 4.0  # the rate falls in the last of so many parts of the time
STARTS = 20  # tours of one input
CENTRES, SPREAD = 8, 0.05  # of clustered points
HIDDEN = -1e9  # bias of a point that was visited


class Attention(nn.Module):
    """Weights by the names and in the shapes of the file."""

    def __init__(self) -> None:
        super().__init__()
        dim = WIDTH // HEADS
        shapes = {"W_query": (WIDTH, dim), "W_key": (WIDTH, dim), "W_val": (WIDTH, dim)}
        for name, shape in (shapes | {"W_out": (dim, WIDTH)}).items():
            limit = 1 / math.sqrt(shape[1])
            self.register_parameter(
                name, nn.Parameter(torch.empty(HEADS, *shape).uniform_(-limit, limit))
            )

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (
            torch.einsum("bnd,hde->bhne", x, self.get_parameter(f"W_{side}"))
            for side in ("query", "key", "val")
        )
        mixed = F.scaled_dot_product_attention(query, key, value)
        return torch.einsum("bhne,hed->bnd", mixed, self.get_parameter("W_out"))


class Layer(nn.Module):
    """Attention and two linear maps, each added and normalised."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention()
        self.first, self.second = nn.Linear(WIDTH, WIDE), nn.Linear(WIDE, WIDTH)
        self.norms = nn.ModuleList(nn.BatchNorm1d(WIDTH) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self._normalise(0, x + self.attention(x))
        return self._normalise(1, x + self.second(F.relu(self.first(x))))

    def _normalise(self, which: int, x: Tensor) -> Tensor:
        normalised: Tensor = self.norms[which](x.flatten(0, 1))
        return normalised.view_as(x)


class Model(nn.Module):
    """Encoder and pointer."""

    def __init__(self, told: int) -> None:
        super().__init__()
        self.embed = nn.Linear(told, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.step = nn.Linear(2 * WIDTH, WIDTH, bias=False)  # of the first and the last point
        self.whole = nn.Linear(WIDTH, WIDTH, bias=False)  # of the mean of all
        self.sides = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.mixed = nn.Linear(WIDTH, WIDTH, bias=False)

    def tours(self, inputs: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """Points in the order of sampled tours [batch, starts, length], and their log-weights."""
        batch, n, _ = inputs.shape
        hidden = self.embed(inputs)
        for layer in self.layers:
            hidden = layer(hidden)
        key, value, pointer = self.sides(hidden).chunk(3, -1)
        key, value = (x.unflatten(-1, (HEADS, -1)).transpose(1, 2) for x in (key, value))
        whole = self.whole(hidden.mean(1, keepdim=True))
        here = torch.randperm(n, device=inputs.device)[:STARTS].expand(batch, -1)
        bias = torch.zeros(batch, here.shape[1], n, device=inputs.device)
        first = last = _take(hidden, here)
        tour, weight = [here], torch.zeros_like(here, dtype=hidden.dtype)
        for _ in range(length - 1):
            bias = bias.scatter(2, here[..., None], HIDDEN)
            query = self.step(torch.cat([first, last], -1)) + whole
            query = query.unflatten(-1, (HEADS, -1)).transpose(1, 2)
            glimpse = F.scaled_dot_product_attention(query, key, value, attn_mask=bias[:, None])
            glimpse = self.mixed(glimpse.transpose(1, 2).flatten(2))
            score = 10 * torch.tanh(glimpse @ pointer.mT / math.sqrt(WIDTH)) + bias
            chances = score.log_softmax(-1)
            with torch.no_grad():
                here = chances.exp().flatten(0, 1).multinomial(1).view_as(here)
            weight = weight + chances.gather(2, here[..., None])[..., 0]
            last = _take(hidden, here)
            tour.append(here)
        return torch.stack(tour, -1), weight

    def saved(self) -> dict[str, Tensor]:
        """The encoder's weights by their names in the file."""
        named = {f"{INPUT}.{name}": x for name, x in self.embed.state_dict().items()}
        for index, layer in enumerate(self.layers):
            parts = {"0.module": "attention", "2.module.0": "first", "2.module.2": "second",
                     "1.normalizer": "norms.0", "3.normalizer": "norms.1"}  # fmt: skip
            for part, module in parts.items():
                for name, x in layer.get_submodule(module).state_dict().items():
                    named[f"embedder.layers.{index}.{part}.{name}"] = x
        return {name: x.float().cpu().contiguous() for name, x in named.items()}


def _take(hidden: Tensor, which: Tensor) -> Tensor:
    """[batch, n, width] at [batch, starts]."""
    return hidden.gather(1, which[..., None].expand(-1, -1, hidden.shape[-1]))


def drawn(batch: int, n: int, clustered: bool, device: str) -> Tensor:
    """Points of the unit square, [batch, n, 2]."""
    if not clustered:
        return torch.rand(batch, n, 2, device=device)
    centres = torch.rand(batch, CENTRES, 2, device=device)
    which = torch.randint(CENTRES, (batch, n), device=device)
    points: Tensor = _take(centres, which) + SPREAD * torch.randn(batch, n, 2, device=device)
    return points.clamp(0, 1)


def train(given: argparse.Namespace) -> Model:
    torch.manual_seed(given.seed)
    model = Model(3 if given.prizes else 2).to(given.device)
    optimiser = torch.optim.Adam(model.parameters(), lr=RATE)
    length = given.points // 2 if given.prizes else given.points
    start = time.perf_counter()
    with Progress() as progress:
        task = progress.add_task("training", total=given.seconds)
        while (passed := time.perf_counter() - start) < given.seconds:
            left = 1 - passed / given.seconds
            optimiser.param_groups[0]["lr"] = RATE * min(1.0, FALLING * left + 0.03)
            points = drawn(given.batch, given.points, given.clustered, given.device)
            prize = torch.rand_like(points[..., :1])
            inputs = torch.cat([points, prize], -1) if given.prizes else points
            tour, weight = model.tours(inputs, length)
            path = points[torch.arange(given.batch, device=given.device)[:, None, None], tour]
            cost = (path - path.roll(1, 2)).norm(dim=-1).sum(-1)
            if given.prizes:
                found = prize[..., 0].unsqueeze(1).expand(-1, tour.shape[1], -1).gather(2, tour)
                cost = cost - found.sum(-1) * math.sqrt(5 / given.points)
            gain = (cost - cost.mean(1, keepdim=True)).detach()
            optimiser.zero_grad()
            (gain * weight).mean().backward()
            nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimiser.step()
            said = f"mean cost {float(cost.detach().mean()):.3f}"
            progress.update(task, completed=passed, description=said)
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path, help="folder of the model, named as the model")
    parser.add_argument("--points", type=int, default=20)
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--seconds", type=float, default=555.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--clustered", action="store_true", help="points around eight centres")
    parser.add_argument("--prizes", action="store_true", help="visit half of the points for prizes")
    given = parser.parse_args()
    if given.points < 4 or given.batch < 1 or not given.seconds > 0:
        parser.error("expected --points of at least 4, --batch of at least 1 and --seconds > 0")
    model = train(given)
    given.out.mkdir(parents=True, exist_ok=True)
    save_file(model.saved(), given.out / FILE)
    print(f"saved {given.out / FILE}")


if __name__ == "__main__":
    main()
