"""Plan the attention of a video denoiser, its first steps dense: `python
examples/diffusers_model.py`.

A tiny Wan transformer with random weights stands for a real one; with a pipeline, `sample` is
`pipe(prompt)` and `model` is `pipe.transformer`. Needs the extra `diffusers`.
"""

import torch
from diffusers import WanTransformer3DModel

import supportbasis as sb

FRAMES, PIXELS, STEPS = 5, 64, 6
LIMIT = 1e-2  # squared change of the prediction that is allowed, relative to its square


def sample(model: WanTransformer3DModel, seed: int = 0) -> torch.Tensor:
    """Euler steps from noise, as a pipeline takes them."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(1, 4, FRAMES, PIXELS, PIXELS, generator=generator)
    words = torch.randn(1, 8, 16, generator=generator)
    for step in range(STEPS):
        t = torch.tensor([1000 * (STEPS - step) // STEPS])
        x = x - model(x, t, words).sample / STEPS
    return x


@torch.no_grad()
def main() -> float:
    torch.manual_seed(0)
    model = WanTransformer3DModel(
        patch_size=(1, 2, 2), num_attention_heads=2, attention_head_dim=32, in_channels=4,
        out_channels=4, text_dim=16, freq_dim=32, ffn_dim=64, num_layers=2,
    ).eval()  # fmt: skip
    with sb.integrations.diffusers.recorded(model) as batches:  # what the denoiser is asked
        exact = sample(model)
    plan = sb.models.plan(model, batches[2:], change=LIMIT)  # without the first, dense steps
    print(plan)
    with sb.models.use(model, {(0, 700): plan, (700, 1000): sb.Exact()}) as answers:
        other = sample(model)
    change = float((other - exact).square().sum() / exact.square().sum())
    print(f"{answers.calls} calls; the sample changed by {change:.1e} of its square")
    return change


if __name__ == "__main__":
    main()
