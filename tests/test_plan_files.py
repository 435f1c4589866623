"""Files of plans: they come back as they were, claim nothing unproved, and say what is wrong."""

import json
import os
import random
from dataclasses import fields
from itertools import islice

import pytest
import torch

import damage
import supportbasis as sb
from cases import dense_attention, max_error, qkv
from supportbasis.plans import files as plan_json


@pytest.fixture(scope="module")
def made():
    return {case.name: case for case in damage.cases()}


def write(path, text):
    path.write_text(text)
    return path


def refusal(path):
    with pytest.raises(sb.InputError) as caught:
        sb.Plan.load(path)
    message = str(caught.value)
    assert str(path) in message and "\n" not in message
    return message


def test_a_loaded_plan_is_the_plan_that_was_saved(made, tmp_path):
    """To the bit: output, lse, certificate, what is proved of its polynomials, and its file."""
    for case in made.values():
        loaded = sb.Plan.load(write(tmp_path / "plan.json", case.text))
        loaded.save(tmp_path / "again.json")
        assert (tmp_path / "again.json").read_text() == case.text, case.name
        assert loaded.method == case.plan.method
        first, second = (
            sb.attention(*case.tensors, **case.call, plan=plan, return_result=True)
            for plan in (case.plan, loaded)
        )
        assert torch.equal(first.output, second.output), case.name
        assert torch.equal(first.lse, second.lse), case.name
        assert torch.equal(first.certificate.bound, second.certificate.bound), case.name
        for mine, theirs in zip(case.plan.heads, loaded.heads, strict=True):
            for field in fields(mine):
                if field.name != "transform":  # whose tensors are compared by what they do
                    assert getattr(theirs, field.name) == getattr(mine, field.name), field.name


@pytest.mark.parametrize("method", [sb.Polynomial(2), sb.MultiThreshold(2.0, 2)], ids=str)
def test_coefficients_are_certified_when_they_are_read(method, tmp_path):
    """A coefficient that is not what it was takes its place in the bound."""
    q, k, _ = qkv(1, 1, n=60, d=3, scale=0.3)
    v = k  # so that weights of near and far keys do not cancel
    plan = sb.plan(q, k, v, method=method)
    exact, _ = dense_attention(q, k, v)
    plan.save(tmp_path / "plan.json")
    content = json.loads((tmp_path / "plan.json").read_text())
    head = content["heads"][0]
    polynomials = [pair["kernel"]["polynomial"] for pair in head.get("pairs", [])]
    for polynomial in polynomials or [head["polynomial"]]:
        polynomial["coefficients"][1] = 0.0
    loaded = sb.Plan.load(write(tmp_path / "plan.json", json.dumps(content)))
    before, after = (sb.attention(q, k, v, plan=p, return_result=True) for p in (plan, loaded))
    assert max_error(after.output, exact, v) > float(before.certificate.bound)
    assert max_error(after.output, exact, v) <= float(after.certificate.bound)


def test_claims_are_not_in_the_file(made):
    claims = {"error", "log_ratio", "positive", "degree", "chunk", "leaf_size"}
    for case in made.values():
        names = {str(step) for at in damage.places(json.loads(case.text)["heads"]) for step in at}
        assert not names & claims


PLACES = {
    "cost": (("heads", 0, "cost"), '"x"', "heads[0].cost is 'x'; expected a number >= 0"),
    "dim": (("dim",), "1e999", "dim is Infinity; expected an integer from 0 to 281474976710656"),
    "flag": (("dim",), "true", "dim is true; expected an integer"),
    "flag for a number": (("heads", 0, "cost"), "true", "heads[0].cost is true; expected a number"),
    "digits": (("dim",), "9" * 5000, "is not JSON"),
    "depth": (("dim",), "[" * 100_000, "is not JSON (it is nested too deeply)"),
    "nan": (("heads", 0, "n"), "NaN", "is not JSON (NaN is no JSON)"),
    "kind": (("heads", 0, "kind"), '"power"', "heads[0].kernel is missing"),
    "method": (("method", "name"), '"eval"', "method.name is 'eval'; expected 'Exact' or"),
    "argument": (("method", "degree"), "-1", "method: degree must be an integer >= 0, got -1"),
    "name": (("heads", 0, "error"), "0.0", "heads[0].error is not a name of a plan"),
    "coefficient": (
        ("heads", 0, "polynomial", "coefficients", 1),
        "null",
        "heads[0].polynomial.coefficients[1] is null; expected a number",
    ),
    "degree": (
        ("heads", 0, "polynomial", "coefficients"),
        json.dumps([1.0] * 200),
        "heads[0]: degree 199 in head dim 3 needs 1353400 features",
    ),
}


@pytest.mark.parametrize("name", PLACES)
def test_messages_name_the_place_what_came_and_what_was_expected(name, made, tmp_path):
    at, by, expected = PLACES[name]
    text = damage.replaced(made["threshold"].text, at, by)
    assert expected in refusal(write(tmp_path / "plan.json", text))


def test_missing_and_repeated_names_are_said(made, tmp_path):
    text, at = made["threshold"].text, ("heads", 1, "threshold")
    path = tmp_path / "plan.json"
    assert "heads[1].threshold is missing" in refusal(write(path, damage.deleted(text, at)))
    assert "the name 'threshold' is repeated" in refusal(write(path, damage.repeated(text, at)))


def test_a_pair_reaches_no_further_than_its_polynomial(made, tmp_path):
    text = damage.replaced(made["one bucket"].text, ("heads", 0, "pairs", 0, "reach"), "9.0")
    message = refusal(write(tmp_path / "plan.json", text))
    assert "heads[0].pairs[0]: the polynomial is for" in message and "within ±9.0" in message


def test_transforms_undo_each_other_and_powers_are_those_of_the_method(made, tmp_path):
    path, at = tmp_path / "plan.json", ("heads", 0, "transform", "key_map", 0, 0)
    entry = damage.value_at(made["fit"].text, at)
    text = damage.replaced(made["fit"].text, at, json.dumps(entry * (1 + 1e-6)))
    assert "heads[0].transform: query_map and key_map do not undo" in refusal(write(path, text))
    text = damage.replaced(made["power"].text, ("heads", 0, "kernel", "power"), "6")
    assert "heads[0]: power is 6; expected 4" in refusal(write(path, text))


def test_paths_that_are_no_plans(tmp_path, monkeypatch):
    assert "does not exist" in refusal(tmp_path / "missing.json")
    assert "is not a file" in refusal(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    assert "is not a file" in refusal(tmp_path / "pipe")
    with pytest.raises(sb.InputError, match="path must be a string or a Path, got None"):
        sb.Plan.load(None)
    (tmp_path / "binary").write_bytes(bytes(range(256)))
    assert "is not JSON" in refusal(tmp_path / "binary")
    assert "is not JSON" in refusal(write(tmp_path / "empty", ""))
    for text, found in (("[]", "a list of 0"), ('{"format": "supportbasis-plan-1"}', "'support")):
        message = refusal(write(tmp_path / "other", text))
        assert f"has format {found}" in message and "make the plan again" in message
    monkeypatch.setattr(plan_json, "LARGEST_FILE", 1000)
    message = refusal(write(tmp_path / "large", " " * 2000))
    assert "it has 2000 bytes, more than the limit of 1000" in message


@pytest.mark.skipif(os.name == "nt" or os.geteuid() == 0, reason="root reads everything")
def test_unreadable_files_are_said(tmp_path):
    write(tmp_path / "plan.json", "{}").chmod(0)
    assert "cannot be read: Permission denied" in refusal(tmp_path / "plan.json")


def test_what_could_not_be_read_is_not_written(made, tmp_path, monkeypatch):
    monkeypatch.setattr(plan_json, "LARGEST_FILE", 100)
    with pytest.raises(sb.InputError, match="more than the limit of 100"):
        made["exact"].plan.save(tmp_path / "plan.json")

    class Mine(sb.Exact):
        pass

    q, k, v = qkv(1, 1, n=5)
    with pytest.raises(sb.InputError, match="name is 'Mine'; expected one of Exact"):
        sb.plan(q, k, v, method=Mine()).save(tmp_path / "plan.json")
    assert not (tmp_path / "plan.json").exists()


def test_damaged_files_are_refused_or_keep_their_bound(made, tmp_path):
    """A slice of `every_damage` and of `damaged`; more of them: `python tests/damage.py 8000`."""
    for number, case in enumerate(made.values()):
        every = list(damage.every_damage(case.text))
        for make in random.Random(number).sample(every, 20):
            damage.outcome(case, make(), tmp_path)
        for seed in islice(range(number, 10**6, len(made)), 20):
            damage.outcome(case, damage.damaged(case.text, seed), tmp_path)


@pytest.mark.parametrize(
    ("name", "at", "by", "expected"),
    [
        ("one bucket", ("pairs", 0, "kernel", "polynomial", "coefficients", 0), "1e308", "ran"),
        ("fit", ("fitted", "coefficients", 0), "1e308", "refused"),
        ("fit", ("transform", "query_centre", 0), "1e308", "refused"),
        ("lists", ("lists", "price"), "1e308", "ran"),
        ("lists", ("lists", "price"), "-1e308", "refused"),
        ("lists", ("lists", "window"), "64", "refused"),
        ("causal lists", ("lists", "window"), "0", "refused"),
        ("causal lists", ("lists", "block"), "48", "refused"),
        ("causal lists", ("lists", "leaf"), "128", "refused"),
        ("strict lists", ("lists", "window"), "281474976710656", "refused"),
    ],
)
def test_numbers_that_no_sum_can_hold(name, at, by, expected, made, tmp_path):
    text = damage.replaced(made[name].text, ("heads", 0, *at), by)
    assert damage.outcome(made[name], text, tmp_path) == expected


def test_a_head_does_what_its_method_says(made, tmp_path):
    """Softmax attention under the name of a power would have a bound for something else."""
    other = json.dumps(json.loads(made["exact"].text)["heads"])
    text = damage.replaced(made["power"].text, ("heads",), other)
    assert "heads[0]: kind is 'exact'; expected power" in refusal(write(tmp_path / "plan", text))


def test_a_causal_fit_serves_fewer_tokens_than_it_has_exact_rows(made, tmp_path):
    case = made["causal fit"]
    loaded = sb.Plan.load(write(tmp_path / "plan.json", case.text))
    first = loaded.heads[0].exact_rows
    q, k, v = (x[..., : first - 3, :] for x in case.tensors)
    given = sb.attention(q, k, v, is_causal=True, plan=loaded)
    exact, _ = dense_attention(q, k, v, is_causal=True)
    # every row is exact: products of two numbers and sums of fewer than 64, in float32
    torch.testing.assert_close(given.double(), exact, rtol=0, atol=128 * 2.0**-24)
