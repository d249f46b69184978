"""Checks scores by a model behind a server, against verdicts that a small real server gives."""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse

from partsong.cli import main
from partsong.errors import ArgumentError
from partsong.reasoning import Line, Run, ScriptedEngine
from partsong.reasoning.answers.extract import final_number
from partsong.reasoning.calls.engine import EngineError
from partsong.reasoning.strategies import STRATEGIES, Verifier, VerifierAddress
from partsong.serving.texts.upstream import Upstream, UpstreamText
from tests.serving.text_server import LoopThread, app_of, client_of, listening, serving, user

#: What the server draws, by turns, and how sure its verifier is of each.
DRAWN = {"The answer is 7.": 0.2, "The answer is 5.": 0.9, "The answer is 8.": 0.6}


class Sums:
    """A server with a model that answers by turns, and another one that knows which answer is right."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.keys: set[str] = set()
        self.reports = True
        self.router = APIRouter()
        self.router.add_api_route("/v1/models", lambda: {"data": [{"id": "sums"}, {"id": "verifier"}]})
        self.router.add_api_route("/v1/chat/completions", self.answer, methods=["POST"])

    async def answer(self, request: Request) -> Any:
        body = json.loads(await request.body())
        self.bodies.append(body)
        if body["model"] == "sums":
            drawn = sum(each["model"] == "sums" for each in self.bodies) - 1
            return _reply([*DRAWN][drawn % len(DRAWN)])
        self.keys.add(request.headers.get("authorization", ""))
        likely = next(likely for text, likely in DRAWN.items() if text in body["messages"][0]["content"])
        if body.get("logprobs") and not self.reports:
            return JSONResponse({"error": {"message": "no logprobs here"}}, status_code=400)
        word, chance = ("Yes", likely) if likely > 0.5 else ("No", 1 - likely)
        top = [{"token": word, "logprob": math.log(chance)}]
        shown = {"content": [{**top[0], "top_logprobs": top}]}
        return _reply(word, shown if body.get("logprobs") else None)


def _reply(text: str, logprobs: Any = None) -> JSONResponse:
    choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
    usage = {"prompt_tokens": 10, "completion_tokens": 1, "total_tokens": 11}
    return JSONResponse({"choices": [{**choice, "logprobs": logprobs}], "usage": usage})


@pytest.fixture
def linked(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    monkeypatch.setenv("PARTSONG_SCORER_KEY", "scorer-key")
    loop, far, sums = LoopThread(), LoopThread(), Sums()
    with listening(app_of(sums.router), far) as behind:

        async def open_upstream() -> tuple[Upstream, UpstreamText]:
            upstream = Upstream(behind, api_key="sk-upstream")
            return upstream, UpstreamText("sums", upstream, verifier=VerifierAddress(base_url=behind, model="verifier"))

        upstream, text = loop.run(open_upstream())
        with serving(loop, [text]) as address:
            yield SimpleNamespace(client=client_of(address), sums=sums, behind=behind)
        loop.run(text.close())
        loop.run(upstream.close())
    loop.close()
    far.close()


def test_the_server_takes_the_answer_that_the_verifier_likes_best(linked: SimpleNamespace) -> None:
    reply = linked.client.chat.completions.create(model="sums:best-of-n:num=3", messages=user("2+3?"))
    assert reply.choices[0].message.content == "The answer is 5."
    assert reply.partsong["verdicts"] == {"calls": 3, "tokens": 33}
    asked = [body for body in linked.sums.bodies if body["model"] == "verifier"]
    assert all("2+3?" in body["messages"][0]["content"] and body["temperature"] == 0 for body in asked)
    assert linked.sums.keys == {"Bearer scorer-key"}  # and not the key of the server that answers
    plain = linked.client.chat.completions.create(model="sums:self-consistency:num=3", messages=user("2+3?"))
    assert plain.partsong["verdicts"] is None


def test_a_verifier_without_log_probabilities_says_yes_or_no(linked: SimpleNamespace) -> None:
    linked.sums.reports = False
    reply = linked.client.chat.completions.create(model="sums:best-of-n:num=3", messages=user("2+3?"))
    assert reply.choices[0].message.content in ("The answer is 5.", "The answer is 8.")  # both are called right


def test_think_asks_a_verifier(linked: SimpleNamespace, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["think", "2+3?", "--server", linked.behind, "--model", "sums", "--scorer", linked.behind]
    command += ["--scorer-model", "verifier", "--json", str(tmp_path / "r.json"), "--strategy"]
    with pytest.raises(SystemExit) as ended:
        main([*command, "best-of-n:num=3"])
    assert (ended.value.code, capsys.readouterr().out.splitlines()[0]) == (0, "5")
    assert json.loads((tmp_path / "r.json").read_text())["verdicts"] == {"calls": 3, "tokens": 33}
    for wrong, part in [
        ([*command, "pdr"], "strategy pdr takes none; these do: best-of-n,"),
        ([*command[:8], *command[10:], "best-of-n"], "--scorer URL and --scorer-model NAME go together"),
    ]:
        with pytest.raises(SystemExit) as ended:
            main(wrong)
        assert (ended.value.code, part in capsys.readouterr().err) == (2, True), wrong


def _verdict(text: str, **more: Any) -> float:
    engine = ScriptedEngine(lambda request, draw: Line(text=text, **more))
    return asyncio.run(Verifier(engine).score("2+3?", "5"))


def test_the_last_word_of_a_verdict_counts() -> None:
    assert [_verdict(text) for text in ("Yes", "**No**", "no... wait: yes!", "Yesterday, no.")] == [1.0, 0.0, 1.0, 0.0]
    with pytest.raises(ArgumentError, match="neither yes nor no, but 'Maybe'"):
        _verdict("Maybe")
    with pytest.raises(EngineError, match="down"):
        _verdict("", error=EngineError("down"))


@pytest.mark.parametrize("name", [name for name in STRATEGIES if "scorer" in STRATEGIES[name].__annotations__])
def test_every_method_with_a_scorer_can_use_one(name: str) -> None:
    """The right text is rare, and the verifier alone knows it."""

    def script(request: Any, draw: Any) -> Line:
        asked = request.messages[-1].text
        if "Yes or No" in asked:
            return Line(text="Yes" if "answer is 5" in asked or not re.search(r"answer is \d", asked) else "No")
        if request.path[0] == "observe":
            return Line(text="- both are small\n- both are whole\n- one is odd")
        text = "The final answer is 5." if draw.random() < 0.5 else f"The final answer is {draw.choice('89')}."
        return Line(text=text, confidence=(1.0,) * 5)

    async def think() -> str | None:
        engine = ScriptedEngine(script)
        verifier = Verifier(engine)
        scorer = verifier.scorer(name, "2+3?")
        answer = await STRATEGIES[name](Run(engine, seed=1), "2+3?", extract=final_number, scorer=scorer)
        assert verifier.calls > 0
        return answer.answer

    answer = asyncio.run(think())
    assert answer == "5" or name == "compute-optimal"  # which reads from the scores how hard the question is


def test_the_same_text_is_judged_once() -> None:
    verifier = Verifier(ScriptedEngine(lambda request, draw: Line(text="Yes")))

    async def ask() -> list[float]:
        return [*await asyncio.gather(*(verifier.score("2+3?", text) for text in ("5", "5", "6")))]

    assert (asyncio.run(ask()), verifier.calls) == ([1.0] * 3, 2)


def test_a_key_is_not_sent_in_the_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PARTSONG_SCORER_KEY", "k" * 20)
    with pytest.raises(ArgumentError, match="https"):
        VerifierAddress(base_url="http://judge.example/v1", model="m").open()


async def refuse() -> JSONResponse:
    return JSONResponse({"error": {"message": "wrong key"}}, status_code=401)


def test_a_refused_key_is_named_by_its_own_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PARTSONG_SCORER_KEY", "scorer-key")
    router, far = APIRouter(), LoopThread()
    router.add_api_route("/v1/chat/completions", refuse, methods=["POST"])
    with listening(app_of(router), far) as behind:
        verifier = VerifierAddress(base_url=behind, model="verifier").open()
        with pytest.raises(EngineError, match="wrong key.*; set the environment's PARTSONG_SCORER_KEY$"):
            asyncio.run(verifier.score("2+3?", "5"))
    far.close()
