"""Attention inside models of TabPFN."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import supportbasis as sb
from host_cases import close, smooth


@pytest.fixture
def tabpfn() -> Iterator[Any]:
    found = pytest.importorskip("tabpfn", minversion="8.3")
    yield found
    sb.integrations.tabpfn.unregister()


def table_model() -> Any:
    from tabpfn.architectures.tabpfn_v3 import TabPFNV3, TabPFNV3Config

    torch.manual_seed(0)
    config = TabPFNV3Config(
        max_num_classes=4, num_buckets=100, nlayers=3, embed_dim=64, icl_num_heads=4
    )
    model = TabPFNV3(config=config, task_type="multiclass", n_out=4).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if not bool(weight.any()):
                weight.normal_(0, 0.1)
    return model


@pytest.mark.filterwarnings("ignore::UserWarning:tabpfn.*")
def test_exact_attention_of_every_length_is_that_of_the_table_model(tabpfn: Any) -> None:
    """Every call of the model, within columns, within rows and over rows, by `Exact`."""
    from tabpfn.architectures.shared.attention_backends import recorded_attention_backends

    model, x = table_model(), torch.randn(90, 1, 5, generator=torch.Generator().manual_seed(0))
    y = torch.randint(0, 4, (70, 1), generator=torch.Generator().manual_seed(1)).float()
    with torch.no_grad():
        with recorded_attention_backends() as own:
            native = model(x, y)
        backend = sb.integrations.tabpfn.register(min_tokens=0, method=sb.Exact())
        with recorded_attention_backends() as ran:
            close(native, model(x, y))
        assert own == [None] * len(own)
        assert ran == [backend] * len(own)
        assert backend.calls == backend.exact == len(own) >= 6


@pytest.mark.filterwarnings("ignore::UserWarning:tabpfn.*")
def test_a_table_model_predicts_the_same_with_exact_attention(tabpfn: Any) -> None:
    model, x = table_model(), torch.randn(600, 1, 5, generator=torch.Generator().manual_seed(0))
    y = torch.randint(0, 4, (512, 1), generator=torch.Generator().manual_seed(1)).float()
    with torch.no_grad():
        native = model(x, y)
        backend = sb.integrations.tabpfn.register(min_tokens=512)
        close(native, model(x, y))
        calls = backend.calls
        assert calls >= 3  # the layers of in-context learning
        assert backend.exact == calls  # too short for anything else
        model(x, y)
    assert backend.calls == 2 * calls


def test_plans_are_kept_in_the_order_of_layers_and_checked(tabpfn: Any) -> None:
    """Two layers in turn, then one that no plan serves."""
    from tabpfn.architectures.shared.scaled_dot_product_attention import (
        scaled_dot_product_attention,
    )

    backend = sb.integrations.tabpfn.register(0.05, min_tokens=4096)
    layers = [smooth(1, 2, 6000, 16, seed=seed).transpose(1, 2) for seed in (0, 1)]
    layers[1] = 2 * layers[1]
    exact = [
        F.scaled_dot_product_attention(*(3 * [x.transpose(1, 2)])).transpose(1, 2) for x in layers
    ]
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(3):
            for x, wanted in zip(layers, exact, strict=True):
                found = scaled_dot_product_attention(x, x, x)
                assert float((found - wanted).norm() / wanted.norm()) < 0.06
        assert backend.calls == 6
        assert backend.exact == 0
        assert backend.planned == 2
        other = torch.randn(1, 6000, 2, 16, generator=torch.Generator().manual_seed(0)) * 3
        found = scaled_dot_product_attention(other, other, other)
    wanted = F.scaled_dot_product_attention(*(3 * [other.transpose(1, 2)])).transpose(1, 2)
    assert float((found - wanted).norm() / wanted.norm()) < 0.06
    assert backend.planned == 3


@pytest.mark.parametrize(
    ("layers", "planned"),
    [
        ("abc", [3, 0, 0]),
        ("aaa", [1, 0, 0]),
        ("-ab", [3, 1, 0]),  # after the exact layer it is seen that the layers begin again
        ("--ab", [4, 2, 0]),
        ("a--b-", [5, 0, 0]),
        ("-a-b-", [5, 1, 0]),
        (24 * "-", [24, 24, 16, 0]),
        ("-" + "abcdefgh" * 2 + "-" * 7, [24, 1, 0]),
    ],
)
def test_plans_come_again_in_the_sequence_of_layers(layers: str, planned: list[int]) -> None:
    """Exact layers are "-"; a plan serves the layer that it was made for, an exact one any."""
    from supportbasis.integrations.tabpfn import Sequence

    kept, found = Sequence(), []
    for _ in planned:
        found.append(0)
        for layer in layers:
            number = kept.next()
            if number is not None and kept.plans[number].layer in ("-", layer):
                kept.served(number)
            else:
                kept.put(SimpleNamespace(layer=layer, is_exact=layer == "-"))  # type: ignore[arg-type]
                found[-1] += 1
    assert found == planned


def test_half_precision_and_one_shared_key_head_run(tabpfn: Any) -> None:
    """As TabPFN stores keys of in-context learning: fp16, all heads share one."""
    backend = sb.integrations.tabpfn.register(0.05, min_tokens=4096)
    q, k = (smooth(1, heads, 6000, 16, seed=heads).transpose(1, 2).half() for heads in (4, 1))
    with torch.no_grad():
        found = backend.run(q, k, k)
    wanted = F.scaled_dot_product_attention(
        *(x.transpose(1, 2).float() for x in (q, k, k)), enable_gqa=True
    ).transpose(1, 2)
    assert found.dtype == torch.float16
    assert backend.planned == 1
    assert backend.exact == 0
    assert 1e-4 < float((found - wanted).norm() / wanted.norm()) < 0.06


def test_calls_that_would_not_pay_are_declined(tabpfn: Any) -> None:
    from tabpfn.architectures.shared.attention_backends import (
        AttentionSpec,
        register_attention_backend,
        registered_attention_backends,
        unregister_attention_backend,
    )
    from tabpfn.architectures.shared.scaled_dot_product_attention import (
        scaled_dot_product_attention,
    )

    taken = SimpleNamespace(name="taken", is_preferred=lambda spec: False)
    register_attention_backend(taken)  # type: ignore[arg-type]
    backend = sb.integrations.tabpfn.register(min_tokens=100)
    plain = {
        "seq_len_q": 100, "seq_len_kv": 100, "num_heads": 4, "num_kv_heads": 1, "head_dim": 16,
        "dtype": torch.float16, "device": torch.device("cpu"), "batch_size": 1,
    }  # fmt: skip
    assert backend.is_preferred(AttentionSpec(**plain))
    for changed in (
        {"seq_len_q": 99}, {"seq_len_kv": 99}, {"seq_len_kv": None}, {"head_dim": 512},
        {"quantized_kv_dtype": torch.int8}, {"is_grad_enabled": True},
    ):  # fmt: skip
        assert not backend.is_preferred(AttentionSpec(**{**plain, **changed}))
    with pytest.raises(sb.InputError, match="quantised cache"):
        backend.run(torch.zeros(1, 2, 1, 4), None, None)
    with sb.integrations.sdpa.override(sb.Exact()) as answers:
        assert not backend.is_preferred(AttentionSpec(**plain))
        scaled_dot_product_attention(*(3 * [torch.randn(1, 128, 4, 16)]))
    assert (answers.calls, backend.calls) == (1, 0)
    for message, given in (
        ("min_tokens must be", {"min_tokens": -1}),
        ("tolerance must be", {"tolerance": 0.0}),
        ("method must be", {"method": "exact"}),
        ("has a backend 'taken' already", {"name": "taken"}),
    ):
        with pytest.raises(sb.InputError, match=message):
            sb.integrations.tabpfn.register(**given)
    assert registered_attention_backends()[:2] == (backend, taken)
    unregister_attention_backend("taken")


def test_compiled_calls_are_left_to_the_table_model(tabpfn: Any) -> None:
    from tabpfn.architectures.shared.scaled_dot_product_attention import (
        scaled_dot_product_attention,
    )

    backend = sb.integrations.tabpfn.register(min_tokens=0, method=sb.Exact())
    x = torch.randn(1, 128, 4, 16, generator=torch.Generator().manual_seed(0))
    compiled = torch.compile(scaled_dot_product_attention, backend="eager", fullgraph=True)
    with torch.no_grad():
        close(compiled(x, x, x), scaled_dot_product_attention(x, x, x))
    assert backend.calls == 1
