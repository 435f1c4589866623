"""Entries of Q, K and V: streamed as if they were there at once, as attention sees them."""

from __future__ import annotations

import csv
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from typer.testing import CliRunner

pytest.importorskip("matplotlib")

from supportbasis import InputError, analysis
from supportbasis.cli import loading
from supportbasis_studies import commands
from supportbasis_studies.distribution import models, texts
from supportbasis_studies.distribution.stream import EntrySketch, LayerStream
from supportbasis_studies.models import observed


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# ---- the sketch ------------------------------------------------------------------------------


def heavy(count: int, seed: int) -> Tensor:
    return random(count, seed=seed) / random(count, seed=seed + 1).abs()


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 5000), st.integers(0, 10**6), st.floats(1e-3, 1e3))
def test_order_statistics_are_known_to_a_part_in_a_thousand(
    count: int, seed: int, size: float
) -> None:
    x = size * heavy(count, seed)
    sketch = EntrySketch()
    for part in x.split(777):
        sketch.add(part)
    ordered = x.abs().sort().values.double()
    assert sketch.total == count and sketch.largest == float(ordered[-1])
    for share in (0.1, 0.5, 0.9, 1.0):
        true = float(ordered[max(0, -int(-share * count // 1) - 1)])
        assert true * (1 - 1e-6) <= sketch.quantile(share) <= true * 1.001 + 1e-9 * size
    proxy = analysis.variance_proxy(x)
    assert proxy * (1 - 1e-6) <= sketch.variance_proxy() <= 1.003 * proxy
    assert sketch.mean == pytest.approx(float(x.double().mean()), rel=1e-5, abs=1e-7 * size)


def test_the_histogram_is_that_of_the_entries() -> None:
    x = random(50_000) + 0.3
    sketch = EntrySketch()
    sketch.add(x)
    found = torch.tensor(sketch.histogram())
    edge = sketch.largest
    true = torch.histc(x, len(found), -edge, edge)
    assert int(found.sum()) == len(x)
    assert float((found.cumsum(0) - true.cumsum(0)).abs().max()) < 0.002 * len(x)


def test_zeros_and_extremes_have_a_place() -> None:
    sketch = EntrySketch()
    sketch.add(torch.tensor([0.0, -0.0, 1e-38, 3e38, -3e38]))
    assert sketch.total == 5 and sum(sketch.histogram()) == 5
    assert sketch.largest == sketch.quantile(1.0) == pytest.approx(3e38)
    assert sketch.variance_proxy() >= analysis.variance_proxy(torch.tensor([0.0, 0, 0, 3e38, 3e38]))
    sketch = EntrySketch()
    sketch.add(torch.zeros(7))
    assert sketch.variance_proxy() == 0 and sketch.quantile(0.5) == 0


def test_a_layer_in_windows_is_the_profile_of_its_tensors() -> None:
    query, key = 1.4 * random(3, 4, 64, 8), 1.2 * random(3, 2, 64, 8, seed=1)
    stream = LayerStream(64)
    for window in range(3):
        at = slice(window, window + 1)
        stream.add(query[at], key[at], key[at])
    made = stream.profile(0.5)
    true = analysis.EntryProfile.of(query, key, alpha=0.5)
    assert made.thresholds[0] == true.thresholds[0]
    assert made.pair_shares is not None and true.pair_shares is not None
    assert made.pair_shares[0] == pytest.approx(true.pair_shares[0])
    assert 0 < made.pair_shares[0] < 1
    for mine, theirs in zip(made.sides, true.sides, strict=True):
        assert (mine.matrices, mine.n, mine.d) == (theirs.matrices, theirs.n, theirs.d)
        assert mine.large[0].entries == theirs.large[0].entries > 0
        assert mine.large[0].rows == theirs.large[0].rows
        assert mine.large[0].alpha == pytest.approx(theirs.large[0].alpha)
        assert mine.std == pytest.approx(theirs.std, rel=1e-6)
        assert theirs.proxy * (1 - 1e-6) <= mine.proxy <= 1.003 * theirs.proxy


# ---- texts -----------------------------------------------------------------------------------


def bytes_of(text: str) -> Tensor:
    return torch.tensor(list(text.encode()))


def a_model(context: int | None = 512, encode: Any = bytes_of) -> models.Loaded:
    return models.Loaded("m", None, encode, context)


def test_windows_are_cut_and_the_repeated_letters_counted() -> None:
    natural, repeated = texts.inputs_for(a_model(), None, None)
    assert natural.windows.shape[1] == 512 and natural.windows.shape[0] >= 16
    assert repeated.windows.shape == (1, 512) and "2048 letters, 2048 tokens" in repeated.said
    merged = a_model(encode=lambda text: bytes_of(text[::8]))
    assert "2048 letters, 256 tokens, 1 different" in texts.inputs_for(merged, None, None)[1].said


def test_a_short_text_names_the_way_out(tmp_path: Path) -> None:
    file = tmp_path / "short.txt"
    file.write_text("a few words and no more")
    with pytest.raises(InputError, match=r"short.txt has 23 tokens.*--window 23"):
        texts.inputs_for(a_model(), file, None)
    (shown,) = texts.inputs_for(a_model(), file, 23)
    assert shown.windows.shape == (1, 23)
    with pytest.raises(InputError, match="no file"):
        texts.inputs_for(a_model(), tmp_path / "absent.txt", None)
    with pytest.raises(InputError, match="more than the 512"):
        texts.inputs_for(a_model(), file, 513)


def test_without_transformers_the_install_line_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "find_spec", lambda name: None)
    result = CliRunner().invoke(commands.reproduce, ["distribution", "--out", str(tmp_path)])
    assert result.exit_code == 2 and 'pip install "supportbasis[hf]"' in result.output
    assert len(result.output.strip().splitlines()) == 1


# ---- models ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def hf() -> Any:
    return pytest.importorskip("transformers")


SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}


def tiny(hf: Any, name: str) -> Any:
    """A model of each of the paper's architectures, and an encoder; random weights."""
    text = SIZES | {"vocab_size": 300, "max_position_embeddings": 64, "intermediate_size": 48}
    made = {
        "llama": lambda: hf.LlamaModel(hf.LlamaConfig(**text, num_key_value_heads=2)),
        "opt": lambda: hf.OPTModel(
            hf.OPTConfig(**text, ffn_dim=48, word_embed_proj_dim=32, dropout=0.0)
        ),
        "phi": lambda: hf.PhiModel(hf.PhiConfig(**text)),
        "bert": lambda: hf.BertModel(hf.BertConfig(**text)),
        "vit": lambda: hf.ViTModel(
            hf.ViTConfig(**SIZES, intermediate_size=48, image_size=32, patch_size=8)
        ),
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return made[name]().eval()


def shown_to(model: Any) -> dict[str, Tensor]:
    if model.main_input_name == "pixel_values":
        return {"pixel_values": random(1, 3, 32, 32)}
    return {"input_ids": torch.arange(40).view(1, 40)}


@pytest.mark.parametrize("name", ["llama", "opt", "phi", "bert", "vit"])
@torch.no_grad()
def test_every_layer_is_seen_and_nothing_changes(hf: Any, name: str) -> None:
    model = tiny(hf, name)
    given, seen = shown_to(model), []
    before = model(**given).last_hidden_state
    with observed(model, lambda layer, *tensors: seen.append((layer, tensors))):
        during = model(**given).last_hidden_state
    after = model(**given).last_hidden_state
    assert [layer for layer, _ in seen] == [0, 1]
    assert torch.equal(before, during) and torch.equal(before, after)
    heads = 2 if name == "llama" else 4
    n = 17 if name == "vit" else 40
    for _, (query, key, value) in seen:
        assert query.shape == (1, 4, n, 8)
        assert key.shape == value.shape == (1, heads, n, 8)


@torch.no_grad()
def test_queries_and_keys_are_seen_after_rotation(hf: Any) -> None:
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    model = tiny(hf, "llama")
    given, seen = shown_to(model), {}
    with observed(model, lambda layer, *tensors: seen.setdefault(layer, tensors)):
        model(**given)
    layer = model.layers[0]
    hidden = layer.input_layernorm(model.embed_tokens(given["input_ids"]))
    raw = [
        projection(hidden).view(1, 40, -1, 8).transpose(1, 2)
        for projection in (layer.self_attn.q_proj, layer.self_attn.k_proj)
    ]
    rotated = apply_rotary_pos_emb(*raw, *model.rotary_emb(hidden, torch.arange(40)[None]))
    for mine, true, before in zip(seen[0], rotated, raw, strict=False):
        torch.testing.assert_close(mine, true)
        assert not torch.allclose(mine, before)


class OwnCode(torch.nn.Module):
    """Attention outside the registry, as models bring it that come with their own code."""

    main_input_name = "x"

    def _can_set_attn_implementation(self) -> bool:
        return False

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = torch.nn.functional.scaled_dot_product_attention(x, 2 * x, value=x)
        return x


def test_own_attention_code_is_seen_where_it_calls_pytorch() -> None:
    x, seen = random(1, 2, 20, 4), []
    with observed(OwnCode(), lambda layer, *tensors: seen.append((layer, tensors))):
        output = OwnCode()(x)
    assert [layer for layer, _ in seen] == [0, 1, 2]
    assert torch.equal(seen[0][1][1], 2 * x) and torch.equal(output, OwnCode()(x))


def test_names_that_lead_nowhere_get_one_line(hf: Any, tmp_path: Path) -> None:
    for name, said in {
        str(tmp_path / "absent"): "there is no folder",
        "nobody/has-this-model": "--download",
        "tinyllama": "TinyLlama/TinyLlama-1.1B-Chat-v1.0",
        str(tmp_path): "cannot be read as a model",
    }.items():
        command = ["distribution", "--model", name, "--out", str(tmp_path / "out")]
        result = CliRunner().invoke(commands.reproduce, command)
        assert result.exit_code == 2 and said in result.output
        assert len(result.output.strip().splitlines()) == 1


# ---- the command -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def done(hf: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    out = tmp_path_factory.mktemp("distribution") / "new"
    command = ["distribution", "--quick", "--window", "64", "--out", str(out)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(models, "LAYERS", 2)
        result = CliRunner().invoke(commands.reproduce, command)
    if result.exception is not None:
        raise result.exception
    return out, " ".join(result.output.split())


def read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_it_says_that_the_weights_are_random_and_counts_tokens(done: tuple[Path, str]) -> None:
    out, text = done
    assert "weights of the built-in model are random" in text
    assert "2048 letters, 2048 tokens" in text
    page = (out / "report.html").read_text(encoding="utf-8")
    assert "weights of the built-in model are random" in page
    assert not re.search(r"https?:|file:|<script|<link|@import|url\(", page)
    assert page.count("<img ") == 6


def test_there_is_a_page_for_each_layer_and_all_links_lead_somewhere(
    done: tuple[Path, str],
) -> None:
    out = done[0]
    pages = sorted((out / "layers").glob("*.html"))
    assert [page.name for page in pages] == [f"layer-{number:02d}.html" for number in range(2)]
    for page in (*pages, out / "report.html"):
        for target in re.findall(r'href="([^"]+)"', page.read_text(encoding="utf-8")):
            assert (page.parent / target).resolve().is_file()
    for picture in out.rglob("*.png"):
        assert picture.with_suffix(".svg").is_file()


def test_rows_are_tidy(done: tuple[Path, str]) -> None:
    rows = read(done[0] / "layers.csv")
    assert len(rows) == 2 * 2 * 2 * 3  # texts, before and after rotation, layers, sides
    assert all(float(row["std"]) > 0 and row["n"] == "64" for row in rows)
    bins = read(done[0] / "histograms.csv")
    for row in rows:
        mine = [b for b in bins if all(b[k] == row[k] for k in ("unit", "layer", "side"))]
        entries = int(row["matrices"]) * int(row["n"]) * int(row["d"])
        assert sum(int(b["count"]) for b in mine) == entries


@pytest.mark.slow
def test_what_is_there_is_kept_and_drawn_again(
    done: tuple[Path, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from supportbasis_studies.distribution import study

    out = done[0]
    before = (out / "layers.csv").read_bytes()
    (out / "layers.png").unlink()
    monkeypatch.setattr(study, "_run", None)
    command = ["distribution", "--quick", "--window", "64", "--out", str(out)]
    with monkeypatch.context() as patch:
        patch.setattr(study, "_publish", lambda *_: None)
        result = CliRunner().invoke(commands.reproduce, command)
    assert result.exit_code == 0 and "and kept" in result.output
    monkeypatch.setattr(study, "load", None)
    result = CliRunner().invoke(commands.reproduce, [*command, "--redraw"])
    assert result.exit_code == 0 and (out / "layers.png").is_file()
    assert (out / "layers.csv").read_bytes() == before


def test_the_built_in_model_is_the_same_every_time(hf: Any) -> None:
    state = torch.random.get_rng_state()
    one, two = (models.load(None, models.Access()).model for _ in range(2))
    assert torch.equal(one.layers[0].self_attn.q_proj.weight, two.layers[0].self_attn.q_proj.weight)
    assert torch.equal(state, torch.random.get_rng_state())


def test_all_parts_run_in_their_folders_and_an_index_leads_to_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(*given: Any, **_: Any) -> None:
        out = next(item for item in given if isinstance(item, Path))
        (out / "report.html").write_text("")

    monkeypatch.setattr(commands, "check_installed", lambda: None)
    monkeypatch.setattr(commands, "run_efficiency", run)
    monkeypatch.setattr(commands, "run_distribution", run)
    monkeypatch.setattr(commands, "run_downstream", run)
    monkeypatch.setattr(commands, "run_protocol", run)
    monkeypatch.setattr(commands, "run_study", run)
    monkeypatch.setattr(commands, "run_video", run)
    result = CliRunner().invoke(commands.reproduce, ["all", "--quick", "--out", str(tmp_path)])
    assert result.exit_code == 0
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    links = re.findall(r'href="([^"]+)"', page)
    assert len(links) == 6 and all((tmp_path / target).is_file() for target in links)
