"""Strategies as models of inspect_ai: a local task end to end, and what is told and refused.

Needs inspect_ai and skips itself where it is not installed (``pip install 'partsong[eval]'``).
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import random
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

if importlib.util.find_spec("inspect_ai") is None:
    pytest.skip("inspect_ai is not installed: pip install 'partsong[eval]'", allow_module_level=True)

from inspect_ai import Task, eval
from inspect_ai.dataset import MemoryDataset, Sample
from inspect_ai.model import (
    ChatMessageAssistant,
    ChatMessageSystem,
    ChatMessageTool,
    ChatMessageUser,
    ContentImage,
    GenerateConfig,
    Model,
    ModelOutput,
    get_model,
)
from inspect_ai.scorer import pattern
from inspect_ai.solver import generate
from inspect_ai.tool import ToolInfo

from partsong.errors import ArgumentError, UnsupportedError
from partsong.evals.harness.inspect_provider import ThinkingAPI
from partsong.reasoning import EngineError, Line, Request, ScriptedEngine
from partsong.reasoning.calls.journal import Journal
from partsong_zoo.sums import answer_of, draw
from tests.reasoning.counting import Counting

ROOT = Path(__file__).parents[2]
SUMS = [draw("sum", random.Random(seed), fresh=True, sizes=[3]) for seed in range(5)]
ENTRY_POINT = "partsong.evals.harness.inspect_provider"
VOTE = "self-consistency:num=3;early_stop=false"


def script(asked: Request, draw: Any) -> Line:
    return Line(text=f"it is {draw.randrange(4)}\nQuestion: 99 ?")


def scripted(**more: Any) -> ScriptedEngine:
    return ScriptedEngine(script, **more)


def thinker(engine: Any = None, strategy: str = VOTE, **more: Any) -> ThinkingAPI:
    return ThinkingAPI("m", strategy=strategy, engine=engine or scripted(), **more)


def ask(api: ThinkingAPI, *texts: str, tools: Any = (), **config: Any) -> list[ModelOutput]:
    """Outputs of chats of one question, asked for at once."""
    return chats(api, [[ChatMessageUser(content=text)] for text in texts], tools, **config)


def chats(api: ThinkingAPI, given: list[list[Any]], tools: Any = (), **config: Any) -> list[ModelOutput]:
    async def main() -> list[ModelOutput]:
        settings = GenerateConfig(**config)
        return list(await asyncio.gather(*(api.generate(chat, list(tools), "auto", settings) for chat in given)))

    return asyncio.run(main())


# --- one generation at a time -----------------------------------------------------------------------------------------


def test_settings_are_honoured() -> None:
    engine = scripted()
    (made,) = ask(thinker(engine), "7 ?", max_tokens=50, temperature=0.5, top_p=0.9, stop_seqs=["Question:"])
    assert made.completion.startswith("it is ") and made.completion.endswith("\n") and made.stop_reason == "stop"
    for each in engine.asked:
        asked = each.parameters
        assert (asked.max_tokens, asked.temperature, asked.top_p, asked.stop) == (50, 0.5, 0.9, ("Question:",))
    plain = scripted()
    ask(thinker(plain, max_tokens=33), "7 ?")
    assert (plain.asked[0].parameters.max_tokens, plain.asked[0].parameters.temperature) == (33, 1.0)


def test_seeds_and_repeats_have_draws_of_their_own() -> None:
    def seeds(*texts: str, seed: int = 0) -> set[int]:
        engine = scripted()
        ask(thinker(engine, "single", seed=seed), *texts)
        return {each.seed for each in engine.asked}

    first = seeds(*["7 ?"] * 4)
    assert len(first) == 4 and seeds("8 ?", *["7 ?"] * 4) > first
    assert not first & seeds(*["7 ?"] * 4, seed=1)


def test_inspects_seed_changes_the_draws() -> None:
    engine = scripted()
    for seed in (None, 1, 2, 1):
        ask(thinker(engine, "single"), "7 ?", seed=seed)
    none, one, two, again = (each.seed for each in engine.asked)
    assert len({none, one, two}) == 3 and one == again


def test_a_failed_generation_is_asked_again_with_its_own_draws() -> None:
    engine = scripted()
    engine.script = lambda asked, draw: Line(text="", error=EngineError("away"))
    api = thinker(engine, "single")
    with pytest.raises(EngineError, match="away"):
        ask(api, "7 ?")
    engine.script = script
    ask(api, "7 ?")
    assert engine.asked[0].seed == engine.asked[1].seed


def test_a_chat_stays_a_chat_and_usage_counts_all_calls() -> None:
    engine = scripted()
    chat = [
        ChatMessageSystem(content="Be brief."),
        ChatMessageUser(content="1 + 1?"),
        *(ChatMessageAssistant(content="2"), ChatMessageUser(content="3 + 4?")),
    ]
    (made,) = chats(thinker(engine), [chat])
    said = [("system", "Be brief."), ("user", "1 + 1?"), ("assistant", "2"), ("user", "3 + 4?")]
    assert len(engine.asked) == 3
    assert all([(message.role, message.text) for message in each.messages] == said for each in engine.asked)
    assert made.usage is not None and made.metadata is not None
    # 9 words of prompt and 6 of answer, three times.
    assert (made.usage.input_tokens, made.usage.output_tokens, made.usage.total_tokens) == (27, 18, 45)
    assert (made.metadata["calls"], made.metadata["tokens_critical"], made.metadata["answer"]) == (3, 6, "99")


def test_never_more_calls_are_under_way_than_asked_for() -> None:
    engine = Counting(script)
    api = thinker(engine, concurrency=4)
    ask(api, *map(str, range(20)))
    assert len(engine.asked) == 60 and engine.most == 4 and api.max_connections() == 4


def test_a_text_that_ran_out_of_tokens_says_so() -> None:
    (made,) = ask(thinker(strategy="single"), "7 ?", max_tokens=2)
    assert made.stop_reason == "max_tokens" and made.metadata is not None and made.metadata["truncated"] == 1


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("chat", "named"),
    [
        ([ChatMessageTool(content="4")], "tools"),
        ([ChatMessageUser(content=[ContentImage(image="data:image/png;base64,AA==")])], "image"),
    ],
)
def test_chats_that_cannot_be_answered_are_refused(chat: list[Any], named: str) -> None:
    engine = scripted()
    with pytest.raises(UnsupportedError, match=named):
        chats(thinker(engine), [[*chat, ChatMessageUser(content="7 ?")]])
    assert engine.asked == []


@pytest.mark.parametrize(
    "config", [{"top_k": 5}, {"num_choices": 2}, {"logprobs": True}, {"frequency_penalty": 0.5}, {"best_of": 3}]
)
def test_settings_that_would_change_answers_are_refused(config: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedError, match=next(iter(config))):
        ask(thinker(), "7 ?", **config)


def test_settings_that_ask_for_nothing_are_not() -> None:
    assert ask(thinker(), "7 ?", num_choices=1, logprobs=False, frequency_penalty=0.0, max_connections=3)


def test_tools_and_chats_that_end_otherwise_are_refused() -> None:
    tool = ToolInfo(name="add", description="adds")
    with pytest.raises(UnsupportedError, match=r"1 were given \(add"):
        ask(thinker(), "7 ?", tools=[tool])
    with pytest.raises(ArgumentError, match="the last one here is assistant"):
        chats(thinker(), [[ChatMessageUser(content="7 ?"), ChatMessageAssistant(content="It")]])


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"strategy": None}, "-M strategy="),
        ({"strategy": "dice"}, "no strategy 'dice'"),
        ({"api_key": "k"}, "OPENAI_API_KEY"),
        ({"max_tokens": 0}, "max_tokens=0"),
        ({"dtype": "int8"}, "leave out dtype"),
        ({"extract": "weight"}, "extract='weight'"),
    ],
)
def test_arguments_are_refused(options: dict[str, Any], named: str) -> None:
    with pytest.raises(ArgumentError, match=named):
        ThinkingAPI("m", **{"strategy": "single", "engine": scripted(), **options})


# --- inspect ----------------------------------------------------------------------------------------------------------


def task() -> Task:
    samples = [Sample(input=one.question, target=str(answer_of(one.solution)), id=k) for k, one in enumerate(SUMS)]
    return Task(dataset=MemoryDataset(samples), solver=generate(), scorer=pattern(r"answer: (-?\d+)"), name="sums")


def run_eval(model: str | Model, folder: Path, **options: Any) -> tuple[Any, dict[tuple[Any, int], str]]:
    """The log and the texts by sample and epoch."""
    (log,) = eval(task(), model=model, log_dir=str(folder), display="none", epochs=2, log_buffer=100, **options)
    assert log.status == "success" and log.samples is not None
    return log, {(one.id, one.epoch): one.output.completion for one in log.samples}


def test_a_local_task_runs_end_to_end(tmp_path: Path) -> None:
    """The zoo's model votes on its own task; run again, it makes no call and writes the same."""
    arguments = {"strategy": VOTE, "dtype": "float64", "journal": str(tmp_path / "calls.db")}
    log, texts = run_eval("partsong/sums", tmp_path, model_args=arguments, max_tokens=80)
    right = [texts[k, epoch].endswith(f"answer: {answer_of(SUMS[k].solution)}") for k, epoch in texts]
    assert len(texts) == 10 and 0 < sum(right) < 10
    assert log.results.scores[0].metrics["accuracy"].value == pytest.approx(sum(right) / 10)
    outputs = [one.output for one in log.samples]
    assert all(
        output.metadata["calls"] == 3 and output.metadata["strategy"] == VOTE.replace(";", ",") for output in outputs
    )
    usage = log.stats.model_usage["partsong/sums"]
    assert usage.output_tokens == sum(output.metadata["tokens_total"] for output in outputs) > 0
    assert usage.input_tokens_cache_read == sum(output.metadata["prefill_cached"] for output in outputs) > 0
    assert any(texts[k, 1] != texts[k, 2] for k in range(5))  # epochs draw anew
    _, again = run_eval("partsong/sums", tmp_path, model_args=arguments, max_tokens=80, max_connections=2)
    assert again == texts
    with Journal(tmp_path / "calls.db") as journal:
        assert journal.completed == 30


def test_refusals_reach_the_log(tmp_path: Path) -> None:
    model = get_model("partsong/m", memoize=False, strategy="single", engine=scripted())
    (log,) = eval(task(), model=model, log_dir=str(tmp_path), display="none", top_k=5)
    assert log.status == "error" and log.error is not None and "top_k" in log.error.message


def test_the_package_declares_the_provider() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["inspect_ai"] == {"partsong": ENTRY_POINT}


@pytest.mark.full  # the entry point is declared, and what it names is used by the tests above
def test_inspects_command_line_finds_the_provider(tmp_path: Path) -> None:
    """By the same entry point, here that of a package of its own, so that it does not matter how ours is installed."""
    made = tmp_path / "path" / "declares_partsong-1.dist-info"
    made.mkdir(parents=True)
    (made / "METADATA").write_text("Metadata-Version: 2.1\nName: declares-partsong\nVersion: 1\n")
    (made / "entry_points.txt").write_text(f"[inspect_ai]\npartsong = {ENTRY_POINT}\n")
    (tmp_path / "one.py").write_text(
        "from inspect_ai import Task, task\nfrom inspect_ai.dataset import Sample\n"
        f"@task\ndef one():\n    return Task(dataset=[Sample(input={SUMS[0].question!r}, target='1')])\n"
    )
    command = [sys.executable, "-m", "inspect_ai", "eval", "one.py", "--model", "partsong/sums", "--max-tokens", "80"]
    command += ["-M", "strategy=self-consistency:num=2,early_stop=false", "--display", "none", "--log-format", "json"]
    paths = os.pathsep.join([str(tmp_path / "path"), str(ROOT)])
    subprocess.run(command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": paths}, check=True)
    log = json.loads(next((tmp_path / "logs").glob("*.json")).read_text())
    (sample,) = log["samples"]
    assert log["status"] == "success" and sample["output"]["metadata"]["calls"] == 2
