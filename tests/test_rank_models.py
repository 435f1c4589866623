"""Models whose tokens are sliced among ranks: trained in DDP and FSDP with the losses of one
process, and the ring of diffusers."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import supportbasis as sb
from rank_cases import on_ranks

LENGTH, LETTERS = 128, 16


def llama(**more) -> nn.Module:
    """Two layers, rotary positions, four heads for each two of keys."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=LETTERS, hidden_size=32, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, pad_token_id=None, use_cache=False, **more,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config)


class Plain(nn.Module):
    """One layer that calls PyTorch's attention itself."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.read, self.project = nn.Embedding(LETTERS, 16), nn.Linear(16, 48)
        self.write = nn.Linear(16, LETTERS)

    def forward(self, input_ids, position_ids):
        x = self.read(input_ids) + (position_ids[..., None] / torch.logspace(0, 2, 16)).sin()
        query, key, value = self.project(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        found = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return {"logits": self.write(x + found.transpose(1, 2).flatten(2))}


MODELS = {"llama": llama, "plain": Plain}


def text(layout: str | None):
    """Letters, the letters after them, and positions, [2, tokens]; of this rank with a layout."""
    generator = torch.Generator().manual_seed(0)
    letters = torch.randint(LETTERS, (2, LENGTH + 1), generator=generator).sort().values
    parts = letters[:, :-1], letters[:, 1:], torch.arange(LENGTH).expand(2, -1)
    if layout is None:
        return parts
    return tuple(sb.distributed.split_tokens(x, -1, layout=layout) for x in parts)


def train(name: str, method, layout: str | None, wrap: str | None) -> list[float]:
    """Mean losses of the whole text in four steps, on one process without a layout."""
    model = MODELS[name]()
    letters, targets, positions = text(layout)
    sliced = {} if layout is None else {"group": dist.group.WORLD, "layout": layout}
    wrapped = model
    if wrap == "DDP":
        wrapped = DistributedDataParallel(model)
    elif wrap == "FSDP":
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    losses = []
    with sb.models.use(model, method, **sliced) as answers:
        for _ in range(4):
            given = {"attention_mask": torch.ones_like(letters)} if name == "llama" else {}
            logits = wrapped(input_ids=letters, position_ids=positions, **given)["logits"]
            # DDP and FSDP take the mean of the ranks' gradients: that of the mean loss over all
            # tokens, since each rank has as many
            loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total = loss.detach().clone()
            if sliced:
                dist.all_reduce(total)
                total /= dist.get_world_size()
            losses.append(float(total))
    assert answers.approximated.total() == 4 * len(answers.approximated) > 0
    return losses


@pytest.mark.filterwarnings("ignore:supportbasis")
@pytest.mark.parametrize(
    ("name", "method", "layout", "wrap"),
    [
        ("llama", sb.Exact(), "contiguous", "DDP"),
        ("llama", sb.SingleThreshold(1.0, degree=1), "zigzag", "FSDP"),
        ("plain", sb.Exact(), "zigzag", "DDP"),
    ],
)
def test_a_model_trained_on_two_ranks_has_the_losses_of_one(name, method, layout, wrap):
    alone = train(name, method, None, None)
    first, second = on_ranks(2, train, name, method, layout, wrap)
    assert first == second and alone[-1] < 0.95 * alone[0]
    # float32 rounds by 6e-8; without the polynomial the losses of the second case move by 7e-5
    assert first == pytest.approx(alone, rel=1e-5)


# ---- what a model must give --------------------------------------------------------------------


def padded() -> tuple[torch.Tensor, torch.Tensor]:
    """Logits with padding on the first rank only, and those of the whole text."""
    model, (letters, _, positions) = llama().eval(), text(None)
    mask = (torch.arange(LENGTH) >= 20).long().expand(2, -1)
    whole = {"input_ids": letters, "position_ids": positions, "attention_mask": mask}
    own = {name: sb.distributed.split_tokens(x, -1) for name, x in whole.items()}
    with torch.no_grad():
        with sb.models.use(model, sb.Exact(), group=dist.group.WORLD):
            found = sb.distributed.gather_tokens(model(**own).logits)
        return found[:, 20:], model(**whole).logits[:, 20:]


def test_padding_of_one_rank_hides_its_keys_from_all():
    for found, expected in on_ranks(2, padded):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def refused() -> list[str]:
    model, (letters, _, positions) = llama(attention_dropout=0.1), text("zigzag")
    found = []
    cases = ({}, {"position_ids": positions}, {"position_ids": positions, "attention_mask": None})
    for given in cases:
        model.train(given is cases[1])
        mask = {"attention_mask": torch.ones_like(letters)} | given
        use = sb.models.use(model, sb.Exact(), group=dist.group.WORLD, layout="zigzag")
        with pytest.raises(sb.SupportBasisError) as caught, use:
            model(letters, **mask)
        found.append(str(caught.value))
    return found


REFUSALS = "position_ids are not given", "it has dropout", "its mask depends on the query"


def test_calls_without_an_answer_over_slices_raise():
    for found in on_ranks(2, refused):
        for message, expected in zip(found, REFUSALS, strict=True):
            assert expected in message
    use = sb.models.use(Plain(), sb.Exact(), layout="zigzag")
    with pytest.raises(sb.InputError, match="no group is given"), use:
        pass


# ---- diffusers ---------------------------------------------------------------------------------


def tokens(n: int = 256):
    generator = torch.Generator().manual_seed(0)
    return list((torch.randn(3, 1, 2, n, 8, generator=generator) * 0.4).unbind(0))


def ring_of_diffusers(method) -> None:
    from diffusers import ContextParallelConfig, ParallelConfig
    from diffusers.models import attention_dispatch

    name = f"support_basis_{type(method).__name__.lower()}"
    answers = sb.integrations.diffusers.register(name, method=method, min_tokens=200)
    names, registry = (
        attention_dispatch.AttentionBackendName, attention_dispatch._AttentionBackendRegistry,
    )  # fmt: skip
    backend = registry._backends[names(name)]
    parallel = ParallelConfig(context_parallel_config=ContextParallelConfig(ring_degree=2))
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("ring", "ulysses"))
    parallel.setup(dist.get_rank(), 2, torch.device("cpu"), mesh=mesh)
    whole = [x.requires_grad_() for x in tokens()]
    sb.attention(*whole, method=method).sin().sum().backward()
    own = [sb.distributed.split_tokens(x.detach()).requires_grad_() for x in whole]
    given = [x.transpose(1, 2) for x in own]
    with sb.distributed.traffic() as sent:
        output = backend(*given, _parallel_config=parallel).transpose(1, 2)
    output.sin().sum().backward()
    assert answers.approximated.total() == 1  # 128 tokens here, 256 in all
    expected = sb.distributed.split_tokens(sb.attention(*tokens(), method=method))
    torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-5)
    for x, y in zip(own, whole, strict=True):
        torch.testing.assert_close(x.grad, sb.distributed.split_tokens(y.grad), rtol=1e-4,
                                   atol=1e-5)  # fmt: skip
    if isinstance(method, sb.Exact):  # diffusers merges what our ring merges
        assert sent.exchanges == 4  # twice what ranks agree about, then keys and values
        theirs, _ = backend(
            *(x.detach() for x in given), _parallel_config=parallel, return_lse=True
        )
        torch.testing.assert_close(theirs.transpose(1, 2), output, rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore")  # diffusers calls deprecated collectives
@pytest.mark.parametrize("method", [sb.Exact(), sb.Polynomial(2)])
def test_the_ring_of_diffusers_gives_what_one_device_gives(method):
    pytest.importorskip("diffusers")
    on_ranks(2, ring_of_diffusers, method)
