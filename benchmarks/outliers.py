"""Costs and errors of `Auto` and `MultiThreshold` where 1 % of the tokens are 50 times longer.

`python benchmarks/outliers.py [n]` plans the inputs with outliers of `supportbasis reproduce
efficiency` and compares 512 rows with float64.
"""

from __future__ import annotations

import sys
import warnings

import torch

import supportbasis as sb
from supportbasis_studies.efficiency.inputs import harder_setting

METHODS = (sb.Auto(0.01), sb.MultiThreshold(2.0, 1, 64), sb.MultiThreshold(2.0, 1, 16))


def main(n: int) -> None:
    warnings.simplefilter("ignore")
    rows = torch.randperm(n, generator=torch.Generator().manual_seed(1))[:512]
    print(f"n={n}, d=64\nsigma  method                   cost    error    head")
    for sigma in (0.01, 0.1, 0.3, 1.0, 2.0):
        setting = harder_setting(n, sigma, True, 0)
        query, key, value = (
            x.reshape(1, 1, n, -1) for x in (setting.query, setting.key, setting.value)
        )
        scores = query[0, 0, rows].double() @ key[0, 0].double().T / query.shape[-1] ** 0.5
        exact = scores.softmax(1) @ value[0, 0].double()
        for method in METHODS:
            plan = sb.plan(query, key, value, method=method)
            output = sb.attention(query, key, value, plan=plan)[0, 0, rows].double()
            error = float((output - exact).norm() / exact.norm())
            name = type(method).__name__
            setting_of = method.tolerance if isinstance(method, sb.Auto) else method.sketch_size
            name += f"({setting_of})"
            print(f"{sigma:5g}  {name:22s} {plan.cost:6.3f}  {error:.1e}  {plan.heads[0].kind}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 32768)
