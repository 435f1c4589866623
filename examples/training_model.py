"""Train a model whose attention runs by a plan, forward and backward: `python
examples/training_model.py`.

The model sees points of a plane with noisy values, and learns the smooth function behind them.
"""

import warnings

import torch

import supportbasis as sb

POINTS, STEPS = 8192, 60  # of a step; how many steps
METHOD = sb.BlockSupport(0.1)  # a tenth of the work of exact attention


def batch(points: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Places and noisy values [1, points, 3], and what is behind them [1, points, 1]."""
    place = torch.rand(1, points, 2)
    behind = torch.sin(place @ (8 * torch.rand(2, 1)) + 6 * torch.rand(1))
    return torch.cat([place, behind + torch.randn_like(behind)], 2), behind


def main(points: int = POINTS, steps: int = STEPS) -> tuple[list[float], int]:
    torch.manual_seed(0)
    encoder = sb.nn.SupportBasisEncoder(2, 64, 2, method=METHOD)
    first, last = torch.nn.Linear(3, 64), torch.nn.Linear(64, 1)
    weights = [*first.parameters(), *encoder.parameters(), *last.parameters()]
    optimizer = torch.optim.Adam(weights, lr=2e-3)
    losses, plans, is_outdated = [], 0, True
    for _ in range(steps):
        seen, behind = batch(points)
        if is_outdated:
            encoder.plan(first(seen))
            plans += 1
        # Weights move. Heads whose scores leave the range of their plan run exactly, with a
        # warning; then it is time for a new plan.
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            loss = (last(encoder(first(seen))) - behind).square().mean()
        is_outdated = bool(said)
        optimizer.zero_grad()
        loss.backward()  # of the function that ran: time and memory grow like the forward pass's
        optimizer.step()
        losses.append(loss.item())
    print(f"mean squared error {losses[0]:.3f}, then {losses[-1]:.3f}, by {plans} plans")
    encoder.method = sb.Exact()  # the same weights with exact attention, on other points
    with torch.no_grad():
        seen, behind = batch(points)
        print(f"exact: {float((last(encoder(first(seen))) - behind).square().mean()):.3f}")
    return losses, plans


if __name__ == "__main__":
    main()
