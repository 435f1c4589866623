"""Attention inside models of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import supportbasis as sb
from supportbasis.integrations.answers import Answers
from supportbasis.integrations.calls import Call, explicit
from transformer_cases import (
    BOTH,
    GROUPED,
    MODELS,
    SPECIAL,
    TOKENS,
    WIDE,
    both,
    close,
    ids,
    inputs,
    model_plan,
    padded,
    tiny,
)

transformers = pytest.importorskip("transformers")


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


def test_a_key_mask_of_the_caller_is_all_that_hides() -> None:
    model, mask = tiny("Llama"), padded("right").bool()
    given = {"input_ids": ids(), "attention_mask": mask[:, None, None]}
    close(*both(model, lambda: model(**given).logits)[:2])
    given["attention_mask"] = mask  # to which transformers adds causality
    exact, other, _ = both(model, lambda: model(**given).logits[mask])
    close(exact, other)


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


def test_a_cache_is_continued_within_autocast() -> None:
    q, k, v = torch.randn(3, 1, 2, 60, 8, generator=torch.Generator().manual_seed(0))
    call = Call(0, "", q[:, :, 40:], k, v.bfloat16(), is_causal=True, offset=40)
    with torch.autocast("cpu", torch.bfloat16):
        exact, other = call.exact(), Answers(sb.Exact())(call)
    assert other.dtype == exact.dtype == torch.bfloat16
    torch.testing.assert_close(exact, other, rtol=0.02, atol=0.02)  # bfloat16: 2^-8, some roundings


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


OWN_MASKS: dict[str, dict[str, Any]] = {
    "PegasusXForConditionalGeneration": {**BOTH, "num_global_tokens": 4, "block_size": 8},
    "BigBirdPegasusForConditionalGeneration": {**BOTH, "attention_type": "original_full"},
    "DogeForCausalLM": GROUPED,
    "DeepseekV32ForCausalLM": {
        **WIDE, "num_key_value_heads": 4, "moe_intermediate_size": 16, "n_routed_experts": 4,
        "n_group": 1, "topk_group": 1, "q_lora_rank": 16, "kv_lora_rank": 16, "v_head_dim": 8,
        "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "index_topk": 8, "index_n_heads": 2,
        "index_head_dim": 16, "first_k_dense_replace": 2},
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:supportbasis. model")
@pytest.mark.parametrize("side", [None, "left"])
@pytest.mark.parametrize("name", OWN_MASKS)
def test_what_a_model_learns_from_its_mask_only_is_kept(name: str, side: str | None) -> None:
    if not hasattr(transformers, name):
        pytest.skip(f"this version of transformers has no {name}")
    model, mask = tiny(name, **OWN_MASKS[name]), None if side is None else padded(side)
    given = {"input_ids": ids(), "attention_mask": mask}
    if model.config.is_encoder_decoder:
        given["decoder_input_ids"] = ids(tokens=40)
    exact, other, _ = both(model, lambda: model(**given).logits)
    shown = slice(None) if mask is None or model.config.is_encoder_decoder else mask.bool()
    close(exact[shown], other[shown])


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


def test_a_plan_with_modules_that_a_model_has_not_is_refused() -> None:
    model, q = tiny("Llama"), torch.randn(1, 4, TOKENS, 8)
    plan = sb.plan(q, q, q, is_causal=True, method=sb.Polynomial(0))
    made = model_plan([plan] * 3, [f"model.layers.{i}.self_attn" for i in range(3)])
    with (
        pytest.raises(sb.InputError, match=r"has no model\.layers\.2\.self_attn"),
        sb.models.use(model, made),
    ):
        pass


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
