"""Long tables in TabPFN: `python examples/tabpfn_model.py`.

A TabPFN network with random weights stands for the trained one, which `tabpfn.TabPFNClassifier`
fetches; the backend is registered once and serves both. Needs the extra `tabpfn`.
"""

import torch
from tabpfn.architectures.tabpfn_v3 import TabPFNV3, TabPFNV3Config

import supportbasis as sb

ROWS, TESTED, COLUMNS, CLASSES = 9000, 200, 4, 3
TOLERANCE = 0.03  # relative error of a head's output


@torch.no_grad()
def main(rows: int = ROWS) -> float:
    torch.manual_seed(0)
    config = TabPFNV3Config(
        max_num_classes=CLASSES, num_buckets=100, nlayers=2, embed_dim=64, icl_num_heads=4
    )
    model = TabPFNV3(config=config, task_type="multiclass", n_out=CLASSES).eval()
    for weight in model.parameters():  # some start at zero, and would hide everything
        if not bool(weight.any()):
            weight.normal_(0, 0.1)
    table = torch.randn(rows + TESTED, 1, COLUMNS)
    labels = torch.randint(0, CLASSES, (rows, 1)).float()
    exact = model(table, labels)

    # From here on, calls of at least `min_tokens` rows are planned by `Auto(TOLERANCE)`, and
    # checked on sampled rows whenever a plan is used again. Cross-attention from few test rows,
    # and everything shorter, runs as before.
    backend = sb.integrations.tabpfn.register(TOLERANCE, min_tokens=rows)
    other = model(table, labels)
    sb.integrations.tabpfn.unregister()
    change = float((other - exact).norm() / exact.norm())
    print(f"{backend.calls} long calls, {backend.planned} planned, {backend.exact} exact")
    print(f"the prediction changed by {change:.1e}, relative to its norm")
    return change


if __name__ == "__main__":
    main()
