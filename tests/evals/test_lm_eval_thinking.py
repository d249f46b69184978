"""Strategies as models of lm-evaluation-harness: local tasks end to end, against the strategies called directly.

Needs the harness and skips itself where it is not installed (``pip install 'partsong[eval]'``).
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import random
import sqlite3
import sys
from collections import Counter
from functools import partialmethod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

if importlib.util.find_spec("lm_eval") is None:
    pytest.skip("lm-evaluation-harness is not installed: pip install 'partsong[eval]'", allow_module_level=True)

from lm_eval.tasks import TaskManager

from partsong.errors import ArgumentError, UnsupportedError
from partsong.evals.harness.lm_eval_model import PartsongLM, main
from partsong.evals.harness.lm_eval_thinking import ThinkingLM
from partsong.reasoning import EngineError, Line, Request, ScriptedEngine
from partsong.reasoning.calls.journal import Journal
from partsong_zoo.sums import answer_of, draw
from tests.reasoning.counting import Counting
from tests.reasoning.misbehaving import Misbehaving

SUMS = [draw("sum", random.Random(seed), fresh=True, sizes=[3]) for seed in range(6)]
VOTE = "self-consistency:num=3;early_stop=false"


def request(*args: Any) -> Any:
    return SimpleNamespace(args=args)


def scripted(**more: Any) -> ScriptedEngine:
    """Says a digit of its own random stream, and goes on."""

    def script(asked: Request, draw: Any) -> Line:
        return Line(text=f"it is {draw.randrange(4)}\nQuestion: 99 ?")

    return ScriptedEngine(script, **more)


def thinker(engine: Any = None, strategy: str = VOTE, **more: Any) -> ThinkingLM:
    return ThinkingLM(strategy, engine=engine or scripted(), **more)


# --- one request at a time --------------------------------------------------------------------------------------------


def test_what_is_written_does_not_depend_on_order_or_concurrency() -> None:
    asked = [request(f"{index} ?", {"until": ["Question:"], "max_gen_toks": 9}) for index in range(12)]
    one, many, engine = thinker(concurrency=1), thinker(concurrency=64), scripted()
    texts = many.generate_until(asked)
    assert len(set(texts)) == 4 and all(text.endswith("\n") for text in texts)
    assert one.generate_until(asked) == texts == thinker(engine).generate_until(asked[::-1])[::-1]
    assert {each.parameters.stop for each in engine.asked} == {("Question:",)}
    assert {each.parameters.max_tokens for each in engine.asked} == {9}


def test_a_prompt_that_is_asked_again_gets_other_draws() -> None:
    engine = scripted()
    thinker(engine, "single").generate_until([request("7 ?", {})] * 8)
    assert len({each.seed for each in engine.asked}) == 8
    again = scripted()
    thinker(again, "single", seed=1).generate_until([request("7 ?", {})] * 8)
    assert not {each.seed for each in engine.asked} & {each.seed for each in again.asked}


def test_never_more_calls_are_under_way_than_asked_for() -> None:
    engine = Counting(scripted().script)
    thinker(engine, concurrency=5).generate_until([request(f"{index} ?", {}) for index in range(20)])
    assert len(engine.asked) == 60 and engine.most == 5


def test_a_stopped_evaluation_goes_on_and_repeats_no_call(tmp_path: Path) -> None:
    journal, asked = str(tmp_path / "calls.db"), [request(f"{index} ?", {}) for index in range(6)]
    engine = scripted()
    plain = engine.script

    def dies(asked: Request, draw: Any) -> Line:
        return Line(text="", error=EngineError("away")) if len(engine.asked) == 11 else plain(asked, draw)

    engine.script = dies
    with pytest.raises(EngineError, match="away"):
        thinker(engine, journal=journal, concurrency=1).generate_until(asked)
    again = scripted()
    lm = thinker(again, journal=journal)
    texts, info = lm.generate_until(asked), lm.get_model_info()
    assert len(again.asked) == 18 - 10 and info["replayed"] == 10 and info["calls"] == 18
    assert texts == thinker().generate_until(asked)
    silent = scripted()
    assert thinker(silent, journal=journal).generate_until(asked) == texts and silent.asked == []


def test_a_chat_stays_a_chat() -> None:
    engine = scripted()
    lm = thinker(engine, "single")
    history = [
        {"role": "system", "content": "Be brief."},
        *({"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "2"}),
        {"role": "user", "content": "3 + 4?"},
    ]
    lm.generate_until([request(lm.apply_chat_template(history), {})])
    (made,) = engine.asked
    assert [(message.role, message.text) for message in made.messages] == [tuple(turn.values()) for turn in history]
    with pytest.raises(UnsupportedError, match="gen_prefix"):
        lm.apply_chat_template(history, add_generation_prompt=False)
    with pytest.raises(UnsupportedError, match="messages of tool"):
        lm.apply_chat_template([{"role": "tool", "content": "4"}])


def test_a_server_is_asked_in_one_evaluation_after_another() -> None:
    pytest.importorskip("openai")
    asked = [request("2+2=", {"max_gen_toks": 9, "until": ["\n"]})] * 2

    async def main() -> list[list[str]]:
        async with Misbehaving() as server:
            lm = ThinkingLM(VOTE, base_url=server.base_url, model="m", device="cuda:0")
            texts = [await asyncio.to_thread(lm.generate_until, asked) for _ in range(2)]
            assert len(server.bodies) == 12 and {body["model"] for body in server.bodies} == {"m"}
            assert {(body["max_tokens"], *body["stop"]) for body in server.bodies} == {(9, "\n")}
            return texts

    assert asyncio.run(main()) == [["the sum is 4"] * 2] * 2


def test_costs_are_those_of_all_requests() -> None:
    lm = thinker(strategy="single", extract="final_choice")
    lm.generate_until([request(f"{index} ?", {"max_gen_toks": 4 + index}) for index in range(3)])
    info = lm.get_model_info()
    # 6 words and limits of 4, 5 and 6; no letter is named.
    assert (info["requests"], info["calls"], info["unanswered"], info["truncated"]) == (3, 3, 3, 2)
    assert (info["tokens_total"], info["tokens_critical"], info["tokens_critical_longest"]) == (15, 15, 6)
    assert info["stopped"] == {"done": 3} and info["strategy"] == "single" and info["extract"] == "choice"


# --- temperatures and refusals ----------------------------------------------------------------------------------------


def test_the_temperature_is_the_tasks_unless_given(caplog: pytest.LogCaptureFixture) -> None:
    def drawn(options: dict[str, Any], **more: Any) -> float:
        engine = scripted()
        thinker(engine, **more).generate_until([request("7 ?", options)])
        return engine.asked[0].parameters.temperature

    assert drawn({}) == 1.0 and drawn({"temperature": 0.5}) == 0.5 and not caplog.records
    assert drawn({"temperature": 0.5, "do_sample": False}) == 0.0
    assert "all samples of self-consistency:num=3,early_stop=false are the same" in caplog.text
    assert drawn({"do_sample": False, "temperature": 0.0, "top_k": 50}, strategy="greedy") == 0.0
    assert drawn({"do_sample": False}, temperature=0.7) == 0.7


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"strategy": "dice"}, "no strategy 'dice'"),
        ({"strategy": "self-consistency:nun=4"}, "no option 'nun'"),
        ({"strategy": "edit-test-select"}, "needs"),
        ({"extract": "weight"}, "extract='weight'; there are number, choice"),
        ({"batch_size": 8}, "concurrency="),
        ({"concurrency": 0}, "concurrency=0"),
        ({"temperature": -1.0}, "temperature=-1.0"),
        ({"max_new_tokens": 0}, "max_new_tokens=0"),
        ({"top_p": 0.0}, "top_p=0.0"),
        ({"budget_tokens": 0}, "tokens=0"),
        ({"seed": -1}, "seed"),
        ({"pretrained": "sums"}, "leave out pretrained"),
    ],
)
def test_refusals(options: dict[str, Any], named: str) -> None:
    with pytest.raises(ArgumentError, match=named):
        ThinkingLM(**{"strategy": "single", "engine": scripted(), **options})


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({}, "name a model"),
        ({"pretrained": "sums", "base_url": "http://127.0.0.1:9/v1"}, "name a model"),
        ({"base_url": "http://127.0.0.1:9/v1"}, "needs model="),
        ({"base_url": "http://127.0.0.1:9/v1", "model": "m", "num_engines": 2}, "for pretrained="),
        ({"pretrained": "sums", "model": "m"}, "for a server"),
        ({"pretrained": "sums", "dtype": "int8"}, "dtype='int8'"),
        ({"pretrained": "sums", "num_engines": 0}, "num_engines=0"),
        ({"pretrained": "shapeless"}, "no model 'shapeless'"),
    ],
)
def test_models_that_cannot_be_are_refused(options: dict[str, Any], named: str) -> None:
    with pytest.raises(ArgumentError, match=named):
        ThinkingLM("single", **options)


def test_requests_that_cannot_be_met_are_refused_before_any_call() -> None:
    engine = scripted()
    lm = thinker(engine)
    with pytest.raises(ArgumentError, match="asks for top_k"):
        lm.generate_until([request("7 ?", {}), request("7 ?", {"top_k": 50})])
    with pytest.raises(ArgumentError, match="max_new_tokens=0"):
        lm.generate_until([request("7 ?", {"max_gen_toks": 0})])
    for ask in (lm.loglikelihood, lm.loglikelihood_rolling):
        with pytest.raises(UnsupportedError, match="generate_until"):
            ask([request("7 ?", " 8")])
    with pytest.raises(UnsupportedError, match="journal=FILE"):
        lm.set_cache_hook(object())
    with pytest.raises(TypeError, match="strategi"):
        ThinkingLM("single", pretrained="sums", strategi="pdr")
    assert engine.asked == []


# --- the harness ------------------------------------------------------------------------------------------------------


def write_task(folder: Path) -> None:
    docs = [{"q": one.question, "a": answer_of(one.solution)} for one in SUMS]
    (folder / "sums.jsonl").write_text("\n".join(map(json.dumps, docs)) + "\n")
    (folder / "sums.yaml").write_text(
        f"task: sums\ndataset_path: json\n"
        f"dataset_kwargs: {{data_files: {{test: {folder}/sums.jsonl}}, cache_dir: {folder}/cache}}\n"
        "test_split: test\ndoc_to_text: '{{q}}'\ndoc_to_target: '{{a}}'\noutput_type: generate_until\nrepeats: 2\n"
        "generation_kwargs: {until: ['#'], max_gen_toks: 80, do_sample: false, temperature: 0.0}\n"
        "filter_list: [{name: number, filter: [{function: regex, regex_pattern: 'answer: (-?[0-9]+)'},"
        " {function: take_first}]}]\n"
        "metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]\n"
    )


def run_harness(out: Path, command: list[str], monkeypatch: pytest.MonkeyPatch) -> tuple[dict[int, list[str]], Any]:
    """Texts of every document and the results file."""
    # The harness reads the thousands of tasks that come with it, for half a minute; ours are given.
    indexed = partialmethod(TaskManager.__init__, include_defaults=False)
    monkeypatch.setattr(TaskManager, "__init__", indexed)
    # It asks twelve programs what machine this is.
    monkeypatch.setattr("torch.utils.collect_env.get_pretty_env_info", str)
    monkeypatch.setattr(sys, "argv", [*command, "--log_samples", "--output_path", str(out)])
    main()
    monkeypatch.undo()
    lines = next(out.rglob("samples_sums*")).read_text().splitlines()
    texts = {doc["doc_id"]: doc["resps"][0] for doc in map(json.loads, lines)}
    return texts, json.loads(next(out.rglob("results*.json")).read_text())


def test_the_command_line_thinks_about_a_local_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The zoo's model votes on its own task; then once more, from the journal alone."""
    write_task(tmp_path)
    arguments = f"strategy={VOTE},pretrained=sums,dtype=float64,temperature=1.0,seed=5,journal={tmp_path}/calls.db"
    command = ["lm_eval", "run", "--model", "partsong", "--model_args", arguments, "--tasks", "sums"]
    command += ["--include_path", str(tmp_path)]
    texts, first = run_harness(tmp_path / "first", command, monkeypatch)
    info = first["config"]
    assert (info["requests"], info["calls"], info["replayed"], info["temperature"]) == (12, 36, 0, 1.0)
    assert info["tokens_total"] > info["tokens_critical"] > 0 and info["prefill_cached"] > 0
    right = [texts[index][0].endswith(f"answer: {answer_of(one.solution)}") for index, one in enumerate(SUMS)]
    assert first["results"]["sums"]["exact_match,number"] == pytest.approx(sum(right) / 6)
    assert 0 < sum(right) < 6 and any(first != second for first, second in texts.values())
    # The votes, counted by hand: no other answer has more of them.
    samples = runs_of(tmp_path / "calls.db")
    assert len(samples) == 12 and {len(drawn) for drawn in samples} == {3}
    for prompt, text in ((one.question, text) for index, one in enumerate(SUMS) for text in texts[index]):
        drawn = [said for said in samples if said[0][0] == prompt and text in {each for _, each in said}]
        votes = [Counter(answer_of(each) for _, each in said) for said in drawn]  # Two runs may hold the same text.
        assert any(counts[answer_of(text)] == max(counts.values()) for counts in votes)
    same, again = run_harness(tmp_path / "again", command, monkeypatch)
    assert same == texts and again["config"]["replayed"] == again["config"]["calls"] == 36
    assert again["results"]["sums"] == first["results"]["sums"]


def runs_of(journal: Path) -> list[list[tuple[str, str]]]:
    """Prompt and text of every call, run by run."""
    with Journal(journal) as kept:
        assert kept.completed == 36
    rows = sqlite3.connect(journal).execute("SELECT run, request, completion FROM calls").fetchall()
    found: dict[str, list[tuple[str, str]]] = {}
    for run, request, completion in rows:
        found.setdefault(run, []).append((json.loads(request)["chat"][0][1], json.loads(completion)["text"]))
    return list(found.values())


def test_the_harness_takes_a_strategy_where_one_is_asked_for() -> None:
    made = PartsongLM.create_from_arg_obj({"strategy": "greedy", "engine": scripted()}, {"batch_size": 1})
    assert isinstance(made, ThinkingLM) and made.thinker.draws_once
