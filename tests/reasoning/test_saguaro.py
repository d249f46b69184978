"""Drafts on a rank of their own: the text is that of plain decoding, and likely outcomes are prepared for."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from partsong import decode, load_text_model
from partsong.errors import ArgumentError, PartsongError
from partsong.kernels.keyed_draw import TokenDraw
from partsong.parallel import Mesh, launch
from partsong.reasoning.local import LocalEngine
from partsong.reasoning.local.model import LocalModel
from partsong.reasoning.local.speculation.draft_line import DraftOrder, DraftOutcome
from partsong.reasoning.local.speculation.draft_server import DraftServer, serve_drafts
from partsong.reasoning.local.speculation.saguaro import Saguaro
from tests.reasoning import saguaro_worker
from tests.reasoning.local_models import all_of, engine, llama, run, tokenizer
from tests.reasoning.saguaro_worker import CASES, requests

PROMPT = (3, 4, 5, 3, 4, 5, 3)
DRAW = TokenDraw(0.9, 1.0, seed=11, place=0)


def test_answers_are_those_of_plain_decoding() -> None:
    for (kind, which, is_thorough), row in zip(CASES, launch(saguaro_worker.answers, 2), strict=True):
        plain = [answer.tokens for answer in run(all_of(engine(end_tokens=()), requests(which)))]
        assert row["tokens"] == plain, kind
        right = row["drafted"] - row["rejected"]
        written = 24 * len(plain)
        assert right >= {"same": written // 2, "near": written // 8, "far": 0}[kind], (kind, row)
        assert row["seconds"] > 0 and row["lengths"][0] >= 1.0
        if is_thorough:
            assert row["hits"] >= {"same": 3, "near": 5}[kind], (kind, row)


def test_decoders_write_what_they_write_without_and_draw_with_the_same_noise(tmp_path: Path) -> None:
    llama(eos_token_id=None).save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    for name, (is_same, cost) in launch(saguaro_worker.texts_of_decoders, 2, str(tmp_path)).items():
        assert is_same, name
        # The second model is the first one, in float32.
        assert cost["tokens_drafted"] >= 10 and cost["tokens_rejected"] <= cost["tokens_drafted"] // 4, (name, cost)


class Serving:
    """A server in this process, whose forwards are counted."""

    def __init__(self, cost: float, **more: Any) -> None:
        self.server = DraftServer(LocalModel(llama()), Saguaro(model=llama(), length=3, **more), cost)
        self.forwards = 0
        forward = self.server._known.batch.forward

        def counted(*args: Any, **named: Any) -> Any:
            self.forwards += 1
            return forward(*args, **named)

        self.server._known.batch.forward = counted  # pyright: ignore[reportAttributeAccessIssue]

    @torch.inference_mode()
    def ask(self, tokens: tuple[int, ...], place: int, room: int = 9) -> tuple[tuple[int, ...], str, int]:
        """The draft, how it came about, and the forwards that were computed for it."""
        before = self.forwards
        draw = TokenDraw(DRAW.temperature, DRAW.top_p, DRAW.seed, place)
        reply = self.server.answer(DraftOrder((DraftOutcome(0, tokens, draw, room),)))
        return reply.drafts[0][0], reply.how[0], self.forwards - before

    @torch.inference_mode()
    def prepare(self) -> None:
        while self.server.prepare():
            pass


#: A step that is never worth the wait, and one that always is.
DEAR, FREE = 9.0, 0.0


def drafted_anew(tokens: tuple[int, ...], place: int) -> tuple[int, ...]:
    """What a server drafts that has read the text and prepared nothing."""
    fresh = Serving(FREE, fan_out=1)
    fresh.ask(tokens[:-1], place - 1)
    fresh.prepare()
    return fresh.ask(tokens[-1:], place)[0]


@pytest.mark.parametrize("accepted", [0, 1, 2, 3])
@pytest.mark.parametrize("rank", [1, 2, 3])
def test_every_likely_outcome_is_answered_from_what_was_prepared(accepted: int, rank: int) -> None:
    serving = Serving(DEAR)
    assert serving.ask(PROMPT, 0) == ((), "unread", 0)
    serving.prepare()
    tree = serving.server._texts[0].tree
    begin = tree._root.children[0].token
    first, how, forwards = serving.ask((begin,), 1)
    assert (how, forwards, len(first)) == ("hit", 0, 3)
    serving.prepare()
    place = tree._root
    for _ in range(accepted):
        place = place.children[0]
    assert first[:accepted] == tuple(tree.path(place))
    outcome = (*first[:accepted], place.children[rank - 1].token)
    again, how, forwards = serving.ask(outcome, 2 + accepted)
    assert (how, forwards) == ("hit", 0)
    # Unlikely outcomes have shorter drafts: their last guesses were less likely than what is prepared.
    assert len(again) == 3 or (again and rank + accepted > 3)
    assert again == drafted_anew((*PROMPT, begin, *outcome), 2 + accepted)[: len(again)]


def test_an_outcome_that_was_not_prepared_is_drafted_then_as_far_as_it_pays() -> None:
    for cost, guesses in ((FREE, 3), (DEAR, 0)):
        serving = Serving(cost, fan_out=1)
        serving.ask(PROMPT, 0)
        serving.prepare()
        right = serving.server._texts[0].tree._root.children[0].token
        wrong = next(token for token in range(2, 9) if token != right)
        draft, how, forwards = serving.ask((wrong,), 1)
        assert (how, len(draft), forwards) == ("miss", guesses, guesses)
        assert draft == drafted_anew((*PROMPT, wrong), 1)[:guesses]


def test_rooms_and_the_second_models_context_bound_what_is_prepared() -> None:
    serving = Serving(FREE)
    serving.ask(PROMPT, 0, room=2)
    serving.prepare()
    draft, *_ = serving.ask((5,), 1, room=1)
    assert len(draft) <= 1
    serving.server.answer(DraftOrder(forgotten=(0,)))
    assert not serving.server._known.batch.rows and not serving.server.prepare()


FAULTS = [(1, "raises"), (1, "killed"), (0, "raises"), pytest.param(0, "killed", marks=pytest.mark.full)]


@pytest.mark.parametrize(("victim", "how"), FAULTS)
@pytest.mark.slow
def test_a_rank_that_fails_ends_the_other(victim: int, how: str, tmp_path: Path) -> None:
    with pytest.raises(PartsongError) as caught:
        launch(saguaro_worker.fail, 2, victim, how, str(tmp_path))
    seconds = time.time() - (tmp_path / str(victim)).stat().st_mtime
    text = "\n".join([str(caught.value), *getattr(caught.value, "__notes__", [])])
    assert ("bad luck in the third step" if how == "raises" else "SIGKILL") in text, text
    assert f"rank {victim}" in text
    assert seconds < 20.0


def test_what_ranks_cannot_do_is_refused_by_both() -> None:
    (first, second) = launch(saguaro_worker.refusals, 2)
    for rank in (first, second):
        assert "lists-ar cannot draft for this model: its vocabulary has 58 tokens" in rank[0]
        assert "not-there" in rank[1]
    assert "rank 0 was given the work of rank 1; make the engine" in first[2]
    assert "rank 1 was given the work of rank 0; call serve_drafts" in second[2]


def test_objects_of_any_length_arrive_in_an_inbox() -> None:
    assert launch(saguaro_worker.objects_there_and_back, 2) == [["short"], ["long" * 5000], [None]]


def test_other_meshes_and_loops_are_refused() -> None:
    with pytest.raises(ArgumentError, match=r"mesh=None; give mesh=Mesh\(pipe=2\)"):
        LocalEngine("lists-ar", speculate="saguaro:model=lists-ar")
    with Mesh() as mesh, pytest.raises(ArgumentError, match="takes two ranks along pipe, and has Mesh"):
        LocalEngine("lists-ar", speculate=Saguaro(model="lists-ar", mesh=mesh))
    three: Any = SimpleNamespace(world_size=3)
    with pytest.raises(ArgumentError, match="takes two ranks along pipe"):
        serve_drafts(Saguaro(model="lists-ar", mesh=three), tokenizer())
    with pytest.raises(ArgumentError, match="fan_out=0; use a positive integer"):
        serve_drafts(Saguaro(model="lists-ar", fan_out=0))
    model = load_text_model("lists-ar")
    with pytest.raises(ArgumentError, match=r"mesh=None; give mesh=Mesh\(pipe=2\)"):
        decode(model, [[4, 5]], max_new_tokens=2, speculate=Saguaro(model="lists-ar"))
