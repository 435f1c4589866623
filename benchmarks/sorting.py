"""Sorting alone on one GPU: `python benchmarks/sorting.py`.

Milliseconds to sort 8 heads of 131072 tokens in bfloat16: one side of an attention call.
"""

from __future__ import annotations

import itertools

import torch

from supportbasis.cuda.lists.window_sorting import head_permutation, window_permutation
from supportbasis_studies.gpu.measure import milliseconds

HEADS, TOKENS = 8, 131072


def main() -> None:
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks/sorting.py needs a CUDA device")
    for d, leaf in itertools.product((64, 128), (64, 128)):
        x = torch.randn(HEADS, TOKENS, d, device="cuda").bfloat16()
        for window in (2048, 1024):
            permutation = window_permutation(x, window, leaf)
            parts = permutation.view(HEADS, -1, window).sort().values - torch.arange(
                TOKENS, device="cuda", dtype=torch.int32
            ).view(-1, window)
            assert not parts.any(), "every window is a permutation"
            time = milliseconds(lambda: window_permutation(x, window, leaf))  # noqa: B023
            print(f"d={d} leaf={leaf} windows of {window}: {time:.3f} ms", flush=True)
        permutation = head_permutation(x, leaf)
        assert (permutation.sort().values == torch.arange(TOKENS, device="cuda")).all(), (
            "a permutation"
        )
        time = milliseconds(lambda: head_permutation(x, leaf))  # noqa: B023
        print(f"d={d} leaf={leaf} whole heads: {time:.3f} ms", flush=True)


if __name__ == "__main__":
    main()
