"""Checks scores by reward models, against a small real server that answers in the documented shapes of vLLM's."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse

from partsong.cli import main
from partsong.errors import ArgumentError, PartsongError
from partsong.reasoning.strategies import VerifierAddress
from tests.serving.text_server import LoopThread, app_of, listening

#: What the model thinks of a step that has this number in it, as a logit.
LOGITS = {"7": -2.0, "5": 3.0, "8": 0.5}


def _sigmoid(logit: float) -> float:
    return 1.0 / (1.0 + math.exp(-logit))


def _logit(text: str) -> float:
    return next(logit for number, logit in LOGITS.items() if number in text)


class Rewards:
    """A server with a model "prm", and one "sums" that answers by turns."""

    def __init__(self) -> None:
        self.bodies: list[tuple[str, dict[str, Any]]] = []
        self.keys: set[str] = set()
        self.has_activation, self.tag, self.failures = True, "<extra_0>", 0
        self.answers: Any = None
        self.router = APIRouter()
        self.router.add_api_route("/v1/models", lambda: {"data": [{"id": "sums"}, {"id": "prm"}]})
        self.router.add_api_route("/v1/chat/completions", self.answer, methods=["POST"])
        for path in ("/pooling", "/classify", "/score"):
            self.router.add_api_route(path, self.number, methods=["POST"])

    async def answer(self, request: Request) -> Any:
        self.bodies.append(("/chat", json.loads(await request.body())))
        number = [*LOGITS][sum(path == "/chat" for path, _ in self.bodies) % 3]
        message = {"role": "assistant", "content": f"Both are small.\n\nThe answer is {number}."}
        usage = {"prompt_tokens": 10, "completion_tokens": 9, "total_tokens": 19}
        return {"choices": [{"index": 0, "message": message, "finish_reason": "stop"}], "usage": usage}

    async def number(self, request: Request) -> Any:
        body, path = json.loads(await request.body()), request.url.path
        self.bodies.append((path, body))
        self.keys.add(request.headers["authorization"])
        if self.failures:
            self.failures -= 1
            return JSONResponse({"error": {"message": "busy"}}, status_code=503, headers={"retry-after": "0"})
        if body["model"] != "prm":
            words = {"message": f"The model `{body['model']}` does not exist.", "type": "NotFoundError", "code": 404}
            return JSONResponse({"error": words}, status_code=404)
        numbers = getattr(self, path[1:])(body) if self.answers is None else self.answers
        usage = {"prompt_tokens": 12, "total_tokens": 12, "completion_tokens": 0, "prompt_tokens_details": None}
        return {"id": "pool-1", "object": "list", "created": 1, "model": "prm", "data": [numbers], "usage": usage}

    def pooling(self, body: dict[str, Any]) -> Any:
        *_, last = body["messages"]
        assert last["role"] == "assistant" and body["use_activation"] is True
        *steps, rest = last["content"].split(self.tag)
        if not steps:  # a number for each token
            logits = [[-5.0], [-4.0], [_logit(rest)]]
            return {"index": 0, "object": "pooling", "data": [[self.activate(row[0])] for row in logits]}
        chances = [_sigmoid(_logit(step)) if any(digit in step for digit in LOGITS) else 0.75 for step in steps]
        return {"index": 0, "object": "pooling", "data": [[1 - chance, chance] for chance in chances]}

    def classify(self, body: dict[str, Any]) -> Any:
        chance = _sigmoid(_logit(body["input"].split("\n\n")[-1]))
        return {"index": 0, "label": "LABEL_0", "probs": [1 - chance, chance], "num_classes": 2}

    def score(self, body: dict[str, Any]) -> Any:
        return {"index": 0, "object": "score", "score": self.activate(_logit(body["text_2"]))}

    def activate(self, logit: float) -> float:
        return _sigmoid(logit) if self.has_activation else logit


@pytest.fixture
def behind(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    monkeypatch.setenv("PARTSONG_SCORER_KEY", "scorer-key")
    loop, rewards = LoopThread(), Rewards()
    with listening(app_of(rewards.router), loop) as address:
        yield SimpleNamespace(address=address, rewards=rewards)
    loop.close()


def _scores(behind: SimpleNamespace, kind: str, *texts: str, model: str = "prm") -> list[float]:
    async def ask() -> list[float]:
        verifier = VerifierAddress(base_url=behind.address, model=model, kind=kind).open()
        try:
            return [*await asyncio.gather(*(verifier.score("2+3?", text) for text in texts))]
        finally:
            await verifier.close()

    return asyncio.run(ask())


@pytest.mark.parametrize("kind", ["reward", "process", "classify", "score"])
def test_every_kind_gives_the_chance_that_a_text_is_right(behind: SimpleNamespace, kind: str) -> None:
    texts = [f"It is {number}." for number in LOGITS]
    assert _scores(behind, kind, *texts) == pytest.approx([_sigmoid(logit) for logit in LOGITS.values()])
    assert behind.rewards.keys == {"Bearer scorer-key"}
    assert all("2+3?" in json.dumps(body) for _, body in behind.rewards.bodies)


def test_a_process_has_a_number_for_each_step(behind: SimpleNamespace) -> None:
    text = "Both are small.\n\nSo it is 7.\n\n\nNo, it is 5<extra_0>."
    low, high = _sigmoid(-2.0), _sigmoid(3.0)
    for how, score in {"": high, ":aggregate=min": low, ":aggregate=prod": 0.75 * low * high}.items():
        assert _scores(behind, f"process{how}", text) == pytest.approx([score])
    steps = ["Both are small.", "So it is 7.", "No, it is 5."]
    _, body = behind.rewards.bodies[0]
    assert body["messages"][1]["content"] == "".join(f"{step}<extra_0>" for step in steps)
    assert _scores(behind, "process:label=0", text) == pytest.approx([1 - high])


def test_logits_become_chances(behind: SimpleNamespace) -> None:
    behind.rewards.has_activation = False
    for kind in ("reward", "score"):
        with pytest.raises(ArgumentError, match=f"answers with -[25], which is no chance .* use {kind}:logits=true"):
            _scores(behind, kind, "7")
        assert _scores(behind, f"{kind}:logits=true", "7", "5") == pytest.approx([_sigmoid(-2.0), _sigmoid(3.0)])
    behind.rewards.answers = {"data": [1000.0, 1003.0]}
    assert _scores(behind, "reward:logits=true", "5") == pytest.approx([_sigmoid(3.0)])


def test_a_server_that_is_busy_is_asked_again(behind: SimpleNamespace) -> None:
    behind.rewards.failures = 2
    assert _scores(behind, "reward", "5") == pytest.approx([_sigmoid(3.0)])


def test_what_cannot_be_scored_is_said_in_one_line(behind: SimpleNamespace) -> None:
    def error(kind: str, model: str = "prm") -> str:
        with pytest.raises(PartsongError) as raised:
            _scores(behind, kind, "5", model=model)
        assert "\n" not in str(raised.value)
        return str(raised.value)

    for kind in ("reward", "classify"):
        assert error(kind, "prn").endswith("has no model 'prn'; served are: sums, prm")
    behind.rewards.tag = "ки"
    assert "answers with 3 numbers for 1 steps; use tag=" in error("process")
    assert "classes, and label=2 is none of them; use 0 to 1" in error("classify:label=2")
    for numbers in ({}, {"data": []}, {"data": "AACAPw=="}, {"data": [[]]}, {"data": [[0.5], ["high"]]}, "none", [0.5]):
        behind.rewards.answers = numbers
        assert "answers without a number in data[0].data: " in error("reward"), numbers
    behind.rewards.answers = {"probs": [True]}
    assert "without a number in data[0].probs" in error("classify")


def test_a_server_without_the_endpoint_says_so() -> None:
    loop, router = LoopThread(), APIRouter()
    router.add_api_route("/v1/models", lambda: {"data": [{"id": "prm"}]})
    with listening(app_of(router), loop) as address:
        for kind, path in {"reward": "/pooling", "classify": "/v1/classify or /classify"}.items():
            with pytest.raises(PartsongError, match=f"has no {path}, where a scorer of the kind {kind} is asked"):
                _scores(SimpleNamespace(address=address), kind, "5")
    loop.close()


def test_think_asks_a_process_reward_model(
    behind: SimpleNamespace, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["think", "2+3?", "--server", behind.address, "--model", "sums", "--strategy", "best-of-n:num=3"]
    command += ["--scorer", behind.address, "--scorer-model", "prm", "--json", str(tmp_path / "r.json")]
    with pytest.raises(SystemExit) as ended:
        main([*command, "--scorer-kind", "process:aggregate=min"])
    assert (ended.value.code, capsys.readouterr().out.splitlines()[0]) == (0, "5")
    assert json.loads((tmp_path / "r.json").read_text())["verdicts"] == {"calls": 3, "tokens": 36}
    for wrong, part in {
        "words": "no kind of scorer 'words'; the kinds of scorer are judge, reward, process, classify, score",
        "reward:aggregate=min": "kind of scorer reward has no option 'aggregate'; its options are label, logits",
    }.items():
        with pytest.raises(SystemExit) as ended:
            main([*command, "--scorer-kind", wrong])
        assert (ended.value.code, part in capsys.readouterr().err) == (2, True), wrong
