"""Attention inside models of transformers and of callers of PyTorch's attention."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import supportbasis as sb
from supportbasis.integrations.calls import Call, explicit
from supportbasis.integrations.replacing import has_interface

transformers = pytest.importorskip("transformers")
WORDS, TOKENS = 96, 70
SIZES = {"num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": WORDS}
WIDE = {"hidden_size": 32, "intermediate_size": 48, **SIZES}
GROUPED = {**WIDE, "num_key_value_heads": 2}
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
BOTH = {
    "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "vocab_size": WORDS,
    "decoder_start_token_id": 1, **SPECIAL,
}  # fmt: skip

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("LlamaForCausalLM", GROUPED),
    "Bidirectional": ("LlamaForCausalLM", {**GROUPED, "is_causal": False}),
    "Mistral": ("MistralForCausalLM", {**GROUPED, "sliding_window": None}),
    "Qwen2": ("Qwen2ForCausalLM", GROUPED),
    "Qwen3": ("Qwen3ForCausalLM", {**GROUPED, "head_dim": 16}),
    "OPT": ("OPTForCausalLM", {
        **SIZES, "hidden_size": 32, "ffn_dim": 48, "word_embed_proj_dim": 32,
        "max_position_embeddings": 256}),
    "Phi": ("PhiForCausalLM", WIDE),
    "GPT2": ("GPT2LMHeadModel", {
        "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256, "vocab_size": WORDS,
        **SPECIAL}),
    "Bert": ("BertForMaskedLM", WIDE),
    "ModernBert": ("ModernBertForMaskedLM", {
        **WIDE, "num_hidden_layers": 3, "cls_token_id": 1, "sep_token_id": 2, **SPECIAL}),
    "ViT": ("ViTForImageClassification", {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "image_size": 32, "patch_size": 4}),
    "Whisper": ("WhisperForConditionalGeneration", {
        **BOTH, "num_mel_bins": 8, "max_source_positions": 60, "max_target_positions": 80}),
    "Bart": ("BartForConditionalGeneration", BOTH),
}  # fmt: skip


def tiny(name: str, **more: Any) -> Any:
    """A model with random weights, large enough that attention is far from uniform."""
    cls, given = MODELS.get(name, (name, GROUPED))
    kind = getattr(transformers, cls)
    torch.manual_seed(0)
    model = kind(kind.config_class(**{**given, **more})).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1:
                weight *= 5
    return model


def ids(batch: int = 2, tokens: int = TOKENS) -> torch.Tensor:
    return torch.randint(3, WORDS, (batch, tokens), generator=torch.Generator().manual_seed(0))


def inputs(name: str, tokens: int = TOKENS) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)
    if name == "ViT":
        return {"pixel_values": torch.randn(2, 3, 32, 32, generator=generator)}
    if name == "Whisper":
        mel = torch.randn(2, 8, 120, generator=generator)
        return {"input_features": mel, "decoder_input_ids": ids(tokens=40)}
    if name == "Bart":
        return {"input_ids": ids(), "decoder_input_ids": ids(tokens=40)}
    return {"input_ids": ids(tokens=tokens)}


def padded(side: str, tokens: int = TOKENS) -> torch.Tensor:
    mask = torch.ones(2, tokens, dtype=torch.int64)
    hidden = tokens // 3
    mask[1, slice(0, hidden) if side == "left" else slice(tokens - hidden, tokens)] = 0
    return mask


@torch.no_grad()
def both(
    model: Any, run: Callable[[], torch.Tensor], method: Any = None
) -> tuple[torch.Tensor, torch.Tensor, Any]:
    """What a model computes by itself, and with a method."""
    exact = run()
    with sb.models.use(model, method or sb.Exact()) as answers:
        return exact, run(), answers


def close(one: torch.Tensor, two: torch.Tensor) -> None:
    """To rounding of float32 in two layers, beside logits of size one to ten."""
    assert float(one.abs().max()) > 0.1
    torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-4)


# ---- exactness -------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:supportbasis. model.layers.1.attn runs exactly")
@pytest.mark.parametrize("name", MODELS)
def test_exact_attention_gives_the_logits_of_the_model(name: str) -> None:
    model, given = tiny(name), inputs(name)
    exact, other, answers = both(model, lambda: model(**given).logits)
    close(exact, other)
    modules = 3 if name == "ModernBert" else 6 if name in ("Whisper", "Bart") else 2
    assert answers.calls == modules  # each attention module once, cross-attention too
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.filterwarnings("ignore:supportbasis. model.layers.1.attn runs exactly")
@pytest.mark.parametrize("tokens", [12, TOKENS])  # masks of few queries are made by transformers
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", ["Llama", "OPT", "GPT2", "Bert", "ModernBert"])
def test_padding_is_hidden(name: str, side: str, tokens: int) -> None:
    model, mask = tiny(name), padded(side, tokens)
    given = {**inputs(name, tokens), "attention_mask": mask}
    exact, other, _ = both(model, lambda: model(**given).logits[mask.bool()])
    close(exact, other)
    if side == "left" or "Bert" in name:  # it matters: no later token does in a causal model
        with torch.no_grad():
            unmasked = model(**inputs(name, tokens)).logits[mask.bool()]
        assert float((unmasked - exact).abs().max()) > 0.01


@pytest.mark.parametrize("tokens", [12, 40])
def test_a_mask_of_padding_is_no_square(tokens: int) -> None:
    """Long padded inputs get a key mask [batch, 1, 1, keys], never one of n x n entries."""
    model, shapes = tiny("Bert"), []

    def record(call: Call) -> torch.Tensor:
        shapes.append(None if call.attn_mask is None else tuple(call.attn_mask.shape))
        return call.exact()

    from supportbasis.integrations.replacing import replaced

    with torch.no_grad(), replaced(model, record):
        model(input_ids=ids(tokens=tokens), attention_mask=padded("right", tokens))
    assert shapes == ([None] * 2 if tokens == 12 else [(2, 1, 1, tokens)] * 2)


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("side", [None, "left"])
@pytest.mark.parametrize("sizes", [(60, 10), (40, 30), (30, 1, 39), (64, 1, 1, 4)])
def test_prefill_in_chunks_continues_a_cache(
    sizes: tuple[int, ...], side: str | None, static: bool
) -> None:
    model = tiny("Llama")
    mask = torch.ones(2, TOKENS, dtype=torch.int64) if side is None else padded(side)

    def run() -> torch.Tensor:
        kind = transformers.StaticCache if static else transformers.DynamicCache
        more = {"max_cache_len": TOKENS + 20} if static else {}
        cache, at, found = kind(config=model.config, **more), 0, []
        for size in sizes:
            part = slice(at, at + size)
            found.append(
                model(
                    input_ids=ids()[:, part], attention_mask=mask[:, : at + size],
                    past_key_values=cache, use_cache=True,
                    cache_position=torch.arange(at, at + size),
                ).logits
            )  # fmt: skip
            at += size
        return torch.cat(found, 1)[mask.bool()]

    close(*both(model, run)[:2])


@pytest.mark.parametrize(
    "settings",
    [{}, {"num_beams": 3}, {"cache_implementation": "static"}, {"do_sample": True, "top_k": 5}],
)
def test_generated_text_is_the_same(settings: dict[str, Any]) -> None:
    model, mask = tiny("Llama", **SPECIAL), padded("left")

    def run() -> torch.Tensor:
        torch.manual_seed(0)
        return model.generate(
            ids(), attention_mask=mask, max_new_tokens=8, min_new_tokens=8, **settings
        )

    exact, other, answers = both(model, run)
    assert torch.equal(exact, other)
    assert answers.exact.total() > 0  # decoding steps


def test_encoder_decoders_generate_the_same() -> None:
    model, given = tiny("Whisper"), inputs("Whisper")["input_features"]

    def run() -> torch.Tensor:
        return model.generate(given, max_new_tokens=6, return_timestamps=False)

    exact, other, _ = both(model, run)
    assert torch.equal(exact, other)


# ---- what only the model's own attention can do ----------------------------------------------


@pytest.mark.parametrize("side", [None, "left", "right"])
@pytest.mark.parametrize(
    ("name", "more", "reason"),
    [
        ("MistralForCausalLM", {"sliding_window": 16}, "sliding window"),
        ("Gemma2ForCausalLM", {"head_dim": 8, "sliding_window": 16}, "soft-capped"),
        ("GptOssForCausalLM",
         {"head_dim": 8, "sliding_window": 16, "num_local_experts": 2, "num_experts_per_tok": 1},
         "attention sinks"),
    ],
)  # fmt: skip
def test_other_kinds_of_scores_run_exactly_and_say_so(
    name: str, more: dict[str, Any], reason: str, side: str | None
) -> None:
    model = tiny(name, **more)
    mask = torch.ones(2, TOKENS, dtype=torch.int64) if side is None else padded(side)

    def run() -> torch.Tensor:
        return model(input_ids=ids(), attention_mask=mask).logits[mask.bool()]

    model.set_attn_implementation("eager")  # PyTorch's attention has neither caps nor sinks
    with torch.no_grad():
        exact = run()
    with pytest.warns(UserWarning, match=reason) as said:
        other = both(model, run, sb.BlockSupport(0.5))[1]
    assert len(said) == 1
    close(exact, other)


def test_packed_sequences_stay_apart() -> None:
    model, row = tiny("Llama"), ids(1)
    positions = torch.cat([torch.arange(30), torch.arange(TOKENS - 30)]).unsqueeze(0)

    def run() -> torch.Tensor:
        return model(input_ids=row, position_ids=positions, use_cache=False).logits

    with pytest.warns(UserWarning, match="packed sequences"):
        exact, other, _ = both(model, run)
    close(exact, other)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("offset", [0, 5])
def test_explicit_attention_is_the_formula(causal: bool, offset: int) -> None:
    """Caps, sinks, biases and masks, in parts of rows, against float64."""
    generator = torch.Generator().manual_seed(0)
    offset = offset if causal else 0
    q = torch.randn(2, 4, 9, 6, generator=generator)
    k, v = torch.randn(2, 2, 2, 9 + offset, 6, generator=generator)
    bias = torch.randn(1, 4, 9, 9 + offset, generator=generator)
    sinks, mask = torch.randn(4, generator=generator), torch.ones(2, 9 + offset, dtype=torch.bool)
    mask[1, :3] = False
    call = Call(0, "", q, k, v, mask, causal, offset, scale=0.7)
    keys, values = (x.double().repeat_interleave(2, 1) for x in (k, v))
    score = 3 * torch.tanh(0.7 * (q.double() @ keys.mT) / 3) + bias
    score = score.masked_fill(~mask[:, None, None], -torch.inf)
    if causal:
        score = score.masked_fill(torch.ones(9, 9 + offset).triu(offset + 1).bool(), -torch.inf)
    weight = torch.cat([score, sinks.double().view(1, 4, 1, 1).expand(2, 4, 9, 1)], 3)
    wanted = weight.softmax(-1)[..., :-1] @ values
    for entries in (2**26, 1):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("supportbasis.integrations.calls.MASK_ENTRIES", entries)
            found = explicit(call, None, 3.0, sinks, bias)
        torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-5)


def test_weights_that_were_asked_for_are_not_kept() -> None:
    model = tiny("Llama")
    with (
        torch.no_grad(),
        sb.models.use(model, sb.Exact()),
        pytest.warns(UserWarning, match="use 'eager' for them"),
    ):
        model(ids(), output_attentions=True)


# ---- approximate methods ---------------------------------------------------------------------


LISTS = sb.BlockSupport(0.9, block_size=8)


@pytest.mark.filterwarnings("ignore:supportbasis. BlockSupport")
@pytest.mark.parametrize("name", ["Llama", "OPT", "Bert", "ViT", "Bart"])
def test_methods_reach_every_layer(name: str) -> None:
    model, given = tiny(name), inputs(name)
    exact, other, answers = both(model, lambda: model(**given).logits, sb.Polynomial(0))
    assert float((exact - other).abs().max()) > 1e-2
    assert set(answers.approximated) == set(range(6 if name == "Bart" else 2))


@pytest.mark.filterwarnings("ignore:supportbasis. BlockSupport")
def test_training_steps_are_the_same_with_checkpoints() -> None:
    """Gradients through lists, with and without gradient checkpointing."""
    found = []
    for checkpointing in (False, True):
        model = tiny("Llama").train()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        with sb.models.use(model, LISTS) as answers:
            model(
                input_ids=ids(tokens=150), labels=ids(tokens=150), use_cache=False
            ).loss.backward()
        assert answers.approximated.total() == (4 if checkpointing else 2)
        found.append([weight.grad for weight in model.parameters()])
    for one, two in zip(*found, strict=True):
        torch.testing.assert_close(one, two)
        assert float(one.abs().max()) > 0


def test_the_trainer_trains_with_a_registered_method(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    answers = sb.integrations.transformers.register("sb_trained", sb.Polynomial(2))
    model = tiny("Llama")
    model.set_attn_implementation("sb_trained")
    rows = [{"input_ids": row, "labels": row} for row in ids(4)]
    arguments = transformers.TrainingArguments(
        tmp_path, max_steps=2, report_to=[], use_cpu=True, per_device_train_batch_size=2,
        disable_tqdm=True, save_strategy="no",
    )  # fmt: skip
    transformers.Trainer(model, arguments, train_dataset=rows).train()
    assert answers.approximated.total() == 4


# ---- register --------------------------------------------------------------------------------


def test_a_registered_name_works_as_transformers_describes_it() -> None:
    answers = sb.integrations.transformers.register(method=sb.Exact())
    model = tiny("Llama")
    with torch.no_grad():
        exact = model(ids()).logits
        model.set_attn_implementation("support_basis")
        close(exact, model(ids()).logits)
        loaded = transformers.AutoModelForCausalLM.from_config(
            model.config, attn_implementation="support_basis"
        )
        loaded.eval()(ids())
    assert answers.calls == 4


def test_registered_plans_are_taken_in_the_order_of_the_modules() -> None:
    """Two models one after the other, and a third one after their configurations are gone."""
    method = sb.Polynomial(0)
    q = torch.randn(1, 4, 64, 8)
    mean = sb.plan(q, q[:, :2], q[:, :2], is_causal=True, enable_gqa=True, method=method)
    exact = sb.plan(q, q[:, :2], q[:, :2], is_causal=True, enable_gqa=True, method=sb.Exact())
    plan = model_plan([exact, mean])
    answers = sb.integrations.transformers.register("sb_ordered", plan=plan, min_tokens=0)
    for _ in range(3):
        model = tiny("Llama")
        model.set_attn_implementation("sb_ordered")
        with torch.no_grad():
            model(ids())
            model(ids())
        del model
    assert (answers.exact, answers.approximated) == ({0: 6}, {1: 6})


def model_plan(plans: list[sb.Plan], names: list[str] | None = None) -> sb.ModelPlan:
    from supportbasis.plans import LayerPlan

    layers = tuple(
        LayerPlan(names[i] if names else f"layer {i}", plan, (0.0,) * plan.num_heads, 0)
        for i, plan in enumerate(plans)
    )
    return sb.ModelPlan(layers, "kl", 1.0, 64, 0.0)


def test_plans_find_their_modules_by_name() -> None:
    """Also where the first module that runs is not the first of the plan."""
    q = torch.randn(1, 4, 64, 8)
    mean, exact = (sb.plan(q, q, q, method=m) for m in (sb.Polynomial(0), sb.Exact()))
    model = tiny("Bert")
    names = [f"bert.encoder.layer.{i}.attention.self" for i in (1, 0)]  # the other way round
    with torch.no_grad(), sb.models.use(model, model_plan([mean, exact], names)) as answers:
        model(ids())
    assert answers.approximated == {1: 1}
    assert answers.exact == {0: 1}


@pytest.mark.parametrize("name", ["", "my_sdpa", "flash", "paged|x", 3])
def test_names_that_transformers_reads_are_refused(name: Any) -> None:
    with pytest.raises(sb.InputError, match="name must be a string without"):
        sb.integrations.transformers.register(name)


def test_wrong_arguments_are_named() -> None:
    register = sb.integrations.transformers.register
    with pytest.raises(sb.InputError, match="method must be a method"):
        register(method="auto")
    with pytest.raises(sb.InputError, match=r"plan must be an sb\.ModelPlan"):
        register(plan="plan.json")
    with pytest.raises(sb.InputError, match="both given"):
        register(method=sb.Exact(), plan=model_plan([]))
    with pytest.raises(sb.InputError, match="min_tokens must be"):
        register(min_tokens=-1)


# ---- never silently --------------------------------------------------------------------------


class OwnAttention(torch.nn.Module):
    """A model that attends in its own way: by PyTorch's attention, or by hand."""

    def __init__(self, by_hand: bool = False) -> None:
        super().__init__()
        self.by_hand, self.weight = by_hand, torch.nn.Parameter(torch.randn(8, 8) / 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            q = (x @ self.weight).unflatten(-1, (2, 4)).transpose(1, 2)
            if self.by_hand:
                y = (q @ q.mT / 2).softmax(-1) @ q
            else:
                y = F.scaled_dot_product_attention(q, q, q)
            x = y.transpose(1, 2).flatten(2)
        return x


class Renamed(transformers.LlamaPreTrainedModel):
    """A model of transformers with code of its own, and no class named ...Attention."""

    def __init__(self, config: Any, by_hand: bool) -> None:
        super().__init__(config)
        self.block = OwnAttention(by_hand)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.block(x)


@pytest.mark.parametrize("renamed", [False, True])
def test_a_replaced_attention_that_is_never_called_is_an_error(renamed: bool) -> None:
    config = transformers.LlamaConfig(**GROUPED)
    x = torch.randn(1, 40, 8)
    for by_hand in (False, True):
        model = Renamed(config, by_hand) if renamed else OwnAttention(by_hand)
        assert not has_interface(model)
        with torch.no_grad(), sb.models.use(model, sb.Exact()) as answers:
            if by_hand:
                with pytest.raises(sb.InputError, match=r"no attention of \w+ arrived"):
                    model(x)
            else:
                close(model(x), model(x))
                assert answers.calls == 4


def test_the_models_own_attention_comes_back_after_an_exception() -> None:
    model = tiny("Llama")

    def fail() -> None:
        with sb.models.use(model, sb.Exact()):
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        fail()
    assert model.config._attn_implementation == "sdpa"
    assert not model._forward_hooks
    assert not model._forward_pre_hooks
    exact, other, _ = both(model, lambda: model(ids()).logits)  # and can be replaced again
    close(exact, other)


def test_a_model_is_replaced_once_at_a_time() -> None:
    model = tiny("Llama")
    with (
        sb.models.use(model, sb.Exact()),
        pytest.raises(sb.InputError, match="replaced already"),
        sb.models.use(model, sb.Exact()),
    ):
        pass
    with pytest.raises(sb.InputError, match=r"must be a torch\.nn\.Module"), sb.models.use(3):
        pass
    with (
        pytest.raises(sb.InputError, match="expected one"),
        sb.models.use(model, sb.Exact(), method=sb.Exact()),
    ):
        pass


# ---- sdpa.override ---------------------------------------------------------------------------


def test_sites_are_numbered_by_their_order_in_a_forward_pass() -> None:
    torch.manual_seed(0)
    model, x = OwnAttention(), torch.randn(1, 40, 8)
    q = torch.randn(1, 2, 40, 4)
    mean, exact = (sb.plan(q, q, q, method=m) for m in (sb.Polynomial(0), sb.Exact()))
    plan = model_plan([mean, exact], ["call 0", "call 1"])
    with torch.no_grad(), sb.integrations.sdpa.override(plan=plan) as answers:
        model(x)
        model(x)
    assert (answers.approximated, answers.exact) == ({0: 2}, {1: 2})
    with (
        pytest.raises(sb.InputError, match="no multiple"),
        sb.integrations.sdpa.override(plan=plan),
    ):
        F.scaled_dot_product_attention(q, q, q)
    with pytest.raises(sb.InputError, match="was not called"), sb.integrations.sdpa.override():
        pass


@pytest.mark.parametrize("dims", [2, 3, 4, 5])
def test_shapes_and_masks_of_sdpa_are_answered(dims: int) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, *(2,) * (dims - 2), 20, 8, generator=generator)
    mask = torch.rand(20, 20, generator=generator) > 0.4
    key_mask = mask[:1].expand(*(1,) * (dims - 2), 1, 20)
    for given in ({}, {"is_causal": True}, {"attn_mask": mask}, {"attn_mask": key_mask},
                  {"scale": 0.3}, {"attn_mask": mask.float()}):  # fmt: skip
        exact = F.scaled_dot_product_attention(q, k, v, **given)
        with (
            warnings.catch_warnings(),
            sb.integrations.sdpa.override(sb.Exact()) as answers,
        ):
            warnings.simplefilter("ignore")
            other = F.scaled_dot_product_attention(q, k, v, **given)
        torch.testing.assert_close(exact, other)
        assert answers.calls == 1


def test_short_calls_are_exact_where_min_tokens_says_so() -> None:
    q = torch.randn(1, 2, 64, 8)
    for least, approximated in ((64, 1), (65, 0)):
        with sb.integrations.sdpa.override(sb.Polynomial(0), min_tokens=least) as answers:
            F.scaled_dot_product_attention(q, q, q)
        assert answers.approximated.total() == approximated


def test_dropout_runs_exactly_and_says_so() -> None:
    q = torch.randn(1, 2, 64, 8)
    with (
        pytest.warns(UserWarning, match="it has dropout"),
        sb.integrations.sdpa.override(sb.Polynomial(0)) as answers,
    ):
        F.scaled_dot_product_attention(q, q, q, dropout_p=0.5)
    assert answers.exact.total() == 1
