"""The authors' protocol: prompts and patterns, batches, resuming, a model with code of its own."""

from __future__ import annotations

import csv
import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

pytest.importorskip("matplotlib")
pytest.importorskip("transformers")

from llada_cases import save_llada
from supportbasis import InputError
from supportbasis_studies import commands
from supportbasis_studies.downstream import benchmarks, models, protocol, protocol_study
from supportbasis_studies.downstream.items import Item
from supportbasis_studies.downstream.language import ids
from supportbasis_studies.downstream.measure import Subject

REAL = Path(__file__).resolve().parents[3] / "shared" / "data" / "bench"
SIZES = {"gsm8k": 1319, "mmlu": 14042, "hellaswag": 1000, "arc_easy": 2376, "arc_challenge": 1172}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A few items of each benchmark in the form of its files."""
    folder = tmp_path_factory.mktemp("bench")
    (folder / "mmlu_test").mkdir()
    arc = {"query": "Question: which?", "choices": ["one", "two", "three", "four"], "gold": 2}
    story = {"ctx": "She runs", "endings": ["a", "b", "c", "d"], "label": 1}
    lines = {
        "gsm8k_test.jsonl": [{"question": f"{n} and 1?", "answer": f"so\n#### {n + 1}"}
                             for n in range(7)],
        "arc_easy.jsonl": [arc] * 3,
        "arc_challenge.jsonl": [arc | {"choices": [*arc["choices"], "five"], "gold": 4}],
        "hellaswag_val_3.jsonl": [story] * 3,
    }  # fmt: skip
    for name, items in lines.items():
        (folder / name).write_text("\n".join(map(json.dumps, items)))
    (folder / "mmlu_test" / "x_test.csv").write_text(
        "question,choice0,choice1,choice2,choice3,answer\nwhat?,p,q,r,s,3\n"
    )
    return folder


def test_benchmarks_are_read_with_their_answers(data: Path) -> None:
    found = {task: benchmarks.read_benchmark(data, task) for task in benchmarks.FILES}
    assert [len(items) for items in found.values()] == [7, 1, 3, 3, 1]
    assert [items[0].answer for items in found.values()] == ["1", "D", "B", "C", "E"]
    assert "D. s" in found["mmlu"][0].text and "Question: which?" in found["arc_easy"][0].text
    with pytest.raises(InputError, match=r"holds no gsm8k_test\.jsonl"):
        benchmarks.read_benchmark(data / "mmlu_test", "gsm8k")
    with pytest.raises(InputError, match="no folder"):
        benchmarks.read_benchmark(data / "absent", "gsm8k")


@pytest.mark.skipif(not REAL.is_dir(), reason="the benchmarks' files are not beside the project")
@pytest.mark.parametrize("task", sorted(SIZES))
def test_the_real_files_are_read(task: str) -> None:
    found = benchmarks.read_benchmark(REAL, task)
    assert len(found) == SIZES[task]
    read = [item.read(f"The answer is {item.answer}.") == item.answer for item in found]
    assert sum(read) >= len(read) - 5  # a negative or fractional number may be written otherwise


@pytest.mark.parametrize(
    ("pattern", "text", "answer"),
    [
        (benchmarks.FOUR, " B. because", "B"),
        (benchmarks.FOUR, "The answer is (C)", "C"),
        (benchmarks.FOUR, "A cat sat", "A"),  # the published pattern takes the article
        (benchmarks.FOUR, "E", None),
        (benchmarks.FIVE, "E", "E"),
        (benchmarks.FOUR, "Boat abcd", None),
        (benchmarks.NUMBER, "16 - 3 = 13, so #### 26", "26"),
        (benchmarks.NUMBER, "about $1,000.50", "1000.5"),
        (benchmarks.NUMBER, "no idea", None),
    ],
)
def test_answers_are_read_by_the_pattern(pattern: str, text: str, answer: str | None) -> None:
    assert benchmarks.Asked("", "", pattern).read(text) == answer


@pytest.mark.parametrize(
    ("written", "found"),
    [
        ("lamp . boat", "lamp"),
        ("so boat lamp", "boat"),
        ("key . <end>", None),
    ],
)
def test_own_answers_are_the_first_of_the_choices(written: str, found: str | None) -> None:
    item = Item([], ids("boat"), [ids("boat"), ids("lamp")])
    assert protocol.read_own(item, ids(written)) == (None if found is None else ids(found))


def test_own_sums_and_endings_of_several_words() -> None:
    total = Item([], ids("+ 5 12 answer 12 ."), [])
    assert protocol.read_own(total, ids("+ 5 12 answer 13 . <end>")) == ids("13")
    assert protocol.read_own(total, ids("+ 5 12 . answer lamp")) is None
    ending = Item(
        [], ids("attic and has lamp"), [ids("attic and has lamp"), ids("barn and has key")]
    )
    assert protocol.read_own(ending, ids("barn and has key . so")) == ids("barn and has key")
    assert protocol.read_own(ending, ids("ada . barn and has key")) is None


# ---- the command -----------------------------------------------------------------------------


def invoke(*arguments: object) -> tuple[int, str]:
    command = ["downstream", "--protocol", "paper", *map(str, arguments)]
    result = CliRunner().invoke(commands.reproduce, command)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, " ".join(result.output.split())


def rows_of(out: Path) -> list[dict[str, str]]:
    with (out / "protocol.csv").open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def llada(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llada(tmp_path_factory.mktemp("llada"))


def user_chat(llada: Path, data: Path) -> protocol.UserChat:
    wish = commands.BenchmarkWish(str(llada), ("gsm8k",), None, commands.Access(False, True))
    return protocol.UserChat(wish, data, torch.device("cpu"))


def test_a_model_with_code_of_its_own_answers_and_resumes(
    llada: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = ("--model", llada, "--trust-remote-code", "--data", data, "--out", tmp_path)
    chosen = ("--methods", "ours6,mean", "--tasks", "gsm8k,arc_easy,gsm8k", "--batch", 2)
    code, text = invoke(*given, *chosen, "--limit", 3)
    assert code == 0, text
    assert "In all about" in text and "unparsable" in text and "8-billion-parameter" in text
    rows = rows_of(tmp_path)
    assert len(rows) == 3 * 2 and {row["items"] for row in rows} == {"3"}
    assert {row["method"] for row in rows} == {"exact", "ours (6), emulation", "mean(V)"}
    assert len({row["unit"] for row in rows}) == len(rows)
    monkeypatch.setattr(protocol.Chat, "answers", None)  # nothing is asked again
    assert invoke(*given, *chosen, "--limit", 3)[0] == 0 and rows_of(tmp_path) == rows
    assert invoke(*given, *chosen, "--limit", 3, "--redraw")[0] == 0


@pytest.mark.slow
def test_code_that_neither_counts_layers_nor_has_a_cache(data: Path, tmp_path: Path) -> None:
    folder = save_llada(tmp_path / "other")
    for name, old, new in (
        ("configuration", "num_hidden_layers", "depth"),
        ("modeling", "use_cache=None, return_dict=None", "**more"),
        ("modeling", "if use_cache is None:", "assert not more\n        if True:"),
    ):
        file = folder / f"{name}_tiny_llada.py"
        assert old in file.read_text()
        file.write_text(file.read_text().replace(old, new))
    given = ("--model", folder, "--trust-remote-code", "--data", data, "--out", tmp_path / "out")
    code, text = invoke(*given, "--methods", "block", "--tasks", "arc_easy", "--limit", 1)
    assert code == 0, text
    assert len(rows_of(tmp_path / "out")) == 2


def test_batches_change_nothing(llada: Path, data: Path) -> None:
    chat = user_chat(llada, data)
    written: list[tuple[list[int], list[int]]] = []

    def keep(question: protocol.Prompted, tokens: list[int]) -> protocol.Answer:
        written.append((question.tokens, tokens))
        return protocol.Answer(True, True, True)

    chat.answer = keep  # type: ignore[method-assign]
    asked = chat.prompted("gsm8k", 0, 7)
    for batch in (1, 4):
        chat.answers(asked, batch)
    assert len(written) == 14 and sorted(written[:7]) == sorted(written[7:])


def test_methods_change_the_logits_of_a_model_with_code_of_its_own(llada: Path, data: Path) -> None:
    chat = user_chat(llada, data)
    tokens = torch.tensor([chat.prompted("gsm8k", 0, 1)[0].tokens])
    with torch.no_grad():
        truth = chat.model(tokens).logits
        for name in protocol.METHODS.values():
            if name == protocol.PLAN:
                continue
            with chat.by(name):
                error = float((chat.model(tokens).logits - truth).abs().max())
            if name in ("exact", "Auto"):  # too short for anything but exact attention
                assert error < 1e-4
            if name in ("mean(V)", "AS23 (4), emulation"):
                assert error > 1e-2


@pytest.mark.slow
def test_the_model_of_the_package_is_asked_with_a_stand_in(
    tmp_path: Path,
) -> None:
    code, text = invoke("--limit", 2, "--methods", "mean", "--tasks", "easy", "--out", tmp_path)
    assert code == 0, text
    assert "Generated tasks stand for the benchmarks" in text
    by_method = {row["method"]: row for row in rows_of(tmp_path)}
    assert by_method["mean(V)"]["right"] == "00" and "1" in by_method["exact"]["right"]


def test_the_model_of_the_package_answers_in_this_protocol() -> None:
    chat = protocol.OwnChat(
        Subject.of("diffusion", models.FOLDER / "diffusion", torch.device("cpu"))
    )
    found = chat.answers(chat.prompted("hard", 0, 6), 6)
    assert sum(answer.right for answer in found) >= 4  # chance of that is 4 %


class Counting(protocol.Chat):
    """Questions of 100 tokens, which name their task and number."""

    name, tasks, mask = "counting", ("a", "b", "c"), 0
    model = SimpleNamespace(device=torch.device("cpu"))

    def __init__(self, size: int | None):
        self.items = size

    def size(self, task: str) -> int | None:
        return self.items

    def prompted(self, task: str, first: int, count: int) -> list[protocol.Prompted]:
        last = first + count if self.items is None else min(first + count, self.items)
        name = self.tasks.index(task) * 10**7
        return [protocol.Prompted([name + n] * 100, Item([], [], [])) for n in range(first, last)]

    def answer(self, question: protocol.Prompted, written: list[int]) -> protocol.Answer:
        raise NotImplementedError


@pytest.mark.parametrize("size", [None, 40, 6])
def test_every_batch_of_a_plan_has_all_tasks_and_questions_scored_last(
    size: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[torch.Tensor] = []
    monkeypatch.setattr(
        protocol.sb.models, "plan", lambda model, batches, **_: given.extend(batches)
    )
    assert Counting(size).plan is None
    assert len(given) >= 2  # the last is held back to verify
    for batch in given:
        assert batch.shape[0] == 1 and 512 <= batch.shape[1] <= protocol.PLANNED
        assert (batch // 10**7).unique().tolist() == [0, 1, 2]
    if size != 6:  # then all questions are needed
        assert all(((batch % 10**7) >= 32).all() for batch in given)


def test_time_is_estimated_from_a_batch_of_about_the_mean_length() -> None:
    class Growing(Counting):
        def prompted(self, task: str, first: int, count: int) -> list[protocol.Prompted]:
            made = super().prompted(task, first, count)
            return [protocol.Prompted(q.tokens[: 10 * n], q.asked) for n, q in enumerate(made, 1)]

    for limit, batch, expected in ((5, 10, [30] * 3), (100, 2, [50] * 2)):
        extent = protocol_study.Extent(("exact",), limit, batch)
        asked = protocol_study._typical(Growing(9), extent)
        assert [len(question.tokens) for question in asked] == expected


def test_rows_of_other_weights_and_data_are_not_used(
    llada: Path, data: Path, tmp_path: Path
) -> None:
    model, bench = tmp_path / "model", tmp_path / "bench"
    shutil.copytree(llada, model)  # with times of modification
    shutil.copytree(data, bench)
    found = [user_chat(folder, data).digest for folder in (llada, model)]
    found.append(user_chat(model, bench).digest)
    assert len(set(found)) == 1
    weights = model / "model.safetensors"
    os.utime(weights, ns=(0, weights.stat().st_mtime_ns + 1))
    found.append(user_chat(model, bench).digest)
    config = model / "config.json"
    config.write_text(config.read_text() + " ")
    found.append(user_chat(model, bench).digest)
    with (bench / "gsm8k_test.jsonl").open("a") as file:
        file.write("\n")
    found.append(user_chat(model, bench).digest)
    assert len(set(found)) == 4


def test_rows_of_a_plan_are_named_by_the_tasks_it_is_made_on() -> None:
    names = {}
    for tasks in (("a", "b"), ("a",)):
        chat = Counting(None)
        chat.name, chat.digest, chat.tasks = "counting", "", tasks
        extent = protocol_study.Extent((protocol.PLAN, "exact"), 1, 1)
        parts = protocol_study._parts(chat, extent, SimpleNamespace())  # type: ignore[arg-type]
        names[tasks] = [part.unit.name for part in parts][:2]
    (plan, exact), (other, same) = names.values()
    assert plan != other and exact == same


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--protocol", "lm-eval", "--batch", 2), "--batch: only for --protocol paper"),
        (("--protocol", "lm-eval", "--dtype", "float32"), "--dtype: only for a model of your own"),
        (("--dtype", "float32"), "--dtype: only for a model of your own"),
        (("--download",), "--download: only for a model of your own"),
        (("--trust-remote-code",), "--trust-remote-code: only for a model of your own"),
        (("--models", "."), "--models: only for the models of the package"),
        (("--protocol", "lm-eval", "--model", "x", "--models", "."), "--models: only for"),
    ],
)
def test_arguments_that_would_be_ignored_are_refused(
    arguments: tuple[object, ...], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("run_protocol", "run_downstream", "run_benchmarks"):
        monkeypatch.setattr(commands, name, lambda *given, **named: None)
    code, text = invoke(*arguments, "--out", tmp_path)
    assert code == 2 and said in text


@pytest.mark.parametrize(
    ("given", "dtype"), [((), torch.float32), (("--dtype", "bfloat16"), torch.bfloat16)]
)
def test_the_protocol_is_in_float32_unless_another_dtype_is_asked_for(
    given: tuple[str, ...], dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also on a GPU, where other commands take the dtype of the file."""
    wishes = []
    monkeypatch.setattr(commands, "_chat", lambda wish, *_: wishes.append(wish))
    monkeypatch.setattr(commands, "run_protocol", lambda *_, **__: None)
    code, text = invoke("--model", "x", "--data", tmp_path, "--out", tmp_path, *given)
    assert code == 0 and wishes[0].dtype == dtype, text


def test_what_is_refused(llada: Path, data: Path, tmp_path: Path) -> None:
    given = ("--model", llada, "--trust-remote-code", "--out", tmp_path)
    for more, said in (
        ((), "reads benchmarks from files"),
        (("--data", tmp_path / "absent"), "there is no folder"),
        (("--data", data, "--methods", "best"), "'best' is not one of"),
        (("--data", data, "--methods", " "), "no method is named in ' '; there are exact, ours4"),
        (("--data", data, "--tasks", "nobody"), "'nobody' is not one of"),
    ):
        code, text = invoke(*given, *more)
        assert code == 2 and said in text
    code, text = invoke("--protocol", "theirs", "--out", tmp_path)
    assert code == 2 and "expected lm-eval or paper" in text
    code, text = invoke("--data", data, "--out", tmp_path)
    assert code == 2 and "knows no English" in text and "add --model" in text


def test_a_model_that_cannot_be_planned_is_a_line(
    llada: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def plan(*_: object, **__: object) -> None:
        raise RuntimeError("its own code failed\nhere")

    monkeypatch.setattr(protocol.sb.models, "plan", plan)
    chat = user_chat(llada, data)
    with pytest.raises(InputError, match=r"failed as it ran \(RuntimeError: its own code failed\)"):
        _ = chat.plan


def test_a_chat_template_that_fails_is_a_line(llada: Path, data: Path) -> None:
    chat = user_chat(llada, data)
    chat.loaded.tokenizer.chat_template = "{{ raise_exception('not this user') }}"
    with pytest.raises(InputError, match=r"the tokenizer of .* failed as it ran .*not this user"):
        chat.prompted("gsm8k", 0, 1)


def test_a_tokenizer_that_cannot_read_what_is_written_is_a_line(
    llada: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def decode(*_: object, **__: object) -> str:
        raise KeyError(7)

    chat = user_chat(llada, data)
    monkeypatch.setattr(chat.loaded.tokenizer, "decode", decode)
    with pytest.raises(InputError, match=r"the tokenizer of .* failed as it ran \(KeyError: 7\)"):
        chat.answers(chat.prompted("gsm8k", 0, 1), 1)


def test_a_causal_model_is_refused(data: Path, tmp_path: Path) -> None:
    folder = tmp_path / "causal"
    save_llada(folder)  # for its tokenizer
    for file in folder.glob("*.py"):
        file.unlink()
    models.save_model(models.new_model("causal", 0, layers=1, width=64), folder)
    code, text = invoke("--model", folder, "--data", data, "--out", tmp_path)
    assert code == 2 and "is causal" in text


def test_the_cost_of_a_large_model_is_its_formula() -> None:
    assert f"{2 * 8e9 * 8 * 232 * 28951:.1e}" in protocol_study.large_cost()
    assert sum(SIZES.values()) + 9042 == protocol_study.ALL_ITEMS  # HellaSwag has 10042
