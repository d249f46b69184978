"""A trained head as drafter: what it proposes, where its masks stand, and heads that are refused."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from partsong.errors import ArgumentError, UnsupportedError
from partsong.kernels.keyed_draw import TokenDraw, draw
from partsong.kernels.speculation.budget import with_masks
from partsong.kernels.speculation.draft import DraftTree
from partsong.kernels.speculation.drafter import DraftText, Observation
from partsong.kernels.speculation.match import Match
from partsong.reasoning import Completion
from partsong.reasoning.local import LocalEngine
from partsong.reasoning.local.speculation.head import HeadDrafter, TrainedHead
from tests.reasoning.drafters import FREE
from tests.reasoning.heads import Rows, head_folder, random_head
from tests.reasoning.local_models import all_of, engine, llama, request, run

PROMPT = [5, 9, 3, 17, 4, 4, 11, 8]
SETTINGS: tuple[dict[str, Any], ...] = ({"temperature": 0.0}, {"temperature": 0.7, "top_p": 0.9}, {"temperature": 1.0})


# --- drafts with masks ------------------------------------------------------------------------------------------------


def test_masks_are_rows_behind_all_nodes() -> None:
    draft = DraftTree((7, 9, 8), (0, 0, 1), masks=(2, 0, 1, 2))
    assert draft.num_rows == 9
    #                            nodes    behind 0   2   behind 3
    assert draft.row_parents == (0, 0, 1, 0, 4, 2, 3, 7)
    assert [draft.masks_after(node) for node in range(4)] == [slice(4, 6), slice(6, 6), slice(6, 7), slice(7, 9)]
    plain = DraftTree((7, 9, 8), (0, 0, 1))
    assert plain.num_rows == 4 and plain.row_parents == plain.parents and plain.masks_after(2) == slice(4, 4)
    with pytest.raises(ArgumentError, match="masks behind 2 nodes; give a number for each node"):
        DraftTree((7, 9, 8), (0, 0, 1), masks=(2, 0))


def test_masks_stand_where_texts_are_likeliest_to_go_on() -> None:
    costs = [1 + 0.01 * rows for rows in range(64)]
    chain = DraftTree.chain([4, 5, 6], [0.9, 0.3, 0.9])
    # Chances to be the last right node: .1, .63, .027, .243. The third is not worth four rows.
    assert with_masks([chain], costs, [20], 4, 2.0)[0].masks == (4, 4, 0, 4)
    assert with_masks([chain], costs[:12], [20], 4, 2.0)[0].masks == (0, 4, 0, 4)
    steep = [1 + 0.1 * rows for rows in range(64)]
    assert with_masks([chain], steep, [20], 4, 2.0)[0].masks == (0, 4, 0, 0)
    assert with_masks([chain], steep, [20], 4, 0.1)[0].masks == ()
    # A text of which five tokens are left has no use for masks that look further.
    assert with_masks([chain], costs, [4], 4, 2.0)[0].masks == (3, 2, 1, 0)
    # With more texts than a step is measured for, none gets masks.
    assert [each.masks for each in with_masks([DraftTree()] * 5, costs[:3], [9] * 5, 2, 2.0)] == [()] * 5


# --- what is proposed -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [(0.0, 1.0), (0.7, 0.9), (1.0, 1.0)])
def test_drafts_behind_each_node_are_those_of_a_text_that_ends_there(settings: tuple[float, float]) -> None:
    """Quadratic decoding: whichever guess was the last to be right, the next guesses are the same as if it was read."""
    module, head = llama(), random_head(llama())
    rows = Rows(module, head)
    rows.read(PROMPT)
    tree = DraftTree((3, 9, 12, 6), (0, 0, 1, 3), masks=(3,) * 5)
    logits, (states,) = rows.verify([2], [tree])
    drafter = HeadDrafter(head.double(), rows.model, TrainedHead())
    for node in range(5):
        path = tree.ancestors(node)
        kept = [tree.tokens[each - 1] for each in path[1:]]
        how = TokenDraw(*settings, seed=11, place=4 + len(path))
        (token,) = draw(logits[node][None], [replace(how, place=how.place - 1)])
        quadratic, fresh = DraftText([*PROMPT, 2, *kept, token], how), DraftText([*PROMPT, 2, *kept, token], how)
        seen = Match((*kept, token), tuple(path), ())
        drafter.observe(quadratic, Observation(tree, seen, states[:, None]))
        end, ahead = Rows(module, random_head(llama())).read([*PROMPT, 2, *kept], 3)
        assert draw(end[None], [replace(how, place=how.place - 1)]) == [token]
        drafter.observe(fresh, Observation(DraftTree(masks=(3,)), Match((token,), (0,), ()), ahead[:, None]))
        with torch.no_grad():
            one, other = drafter.propose([quadratic, fresh], [9, 9])
        assert one.tokens == other.tokens and one.parents == other.parents and max(one.depths) == 3


def test_a_guess_is_drawn_with_the_noise_of_its_place() -> None:
    module, head = llama(), random_head(llama())
    rows = Rows(module, head)
    how = TokenDraw(1.0, 1.0, seed=3, place=1)
    _, ahead = rows.read(PROMPT, 3)
    drafter, text = HeadDrafter(head.double(), rows.model, TrainedHead(heat=0.5)), DraftText([*PROMPT, 20], how)
    drafter.observe(text, Observation(DraftTree(masks=(3,)), Match((20,), (0,), ()), ahead[:, None]))
    with torch.no_grad():
        (draft,) = drafter.propose([text], [2])
        before, expected = 20, list[int]()
        for place in range(2):
            out = head.sampler(ahead[1 + place], module.get_input_embeddings()(torch.tensor(before)))
            before = draw(module.lm_head(out)[None], [replace(how, place=1 + place, temperature=0.5)])[0]
            expected.append(before)
    # Two guesses after each other one; the first is what is drawn.
    assert draft.parents == (0, 0, 1, 1, 2, 2) and [draft.tokens[0], draft.tokens[2]] == expected
    drafter.forget(text)
    assert drafter.propose([text], [2]) == [DraftTree()]


@pytest.mark.parametrize("settings", SETTINGS, ids=["greedy", "nucleus", "warm"])
def test_samples_of_one_prompt_share_its_masks(settings: dict[str, Any]) -> None:
    """Masks behind a prompt are computed once, with its logits, and serve every sample, also one that comes later."""
    asked = [request("the quick brown fox", seed=seed, max_tokens=9, **settings) for seed in range(3)]

    async def later(local: LocalEngine) -> list[Completion]:
        answers = [await local.generate(each) for each in asked]
        await local.close()
        return answers

    def head() -> TrainedHead:
        return TrainedHead(path=head_folder())

    plain = run(all_of(engine(end_tokens=()), asked))
    together = run(all_of(engine(end_tokens=(), speculate=head(), step_costs=FREE), asked))
    apart = run(later(engine(end_tokens=(), speculate=head(), step_costs=FREE)))
    assert [each.text for each in together] == [each.text for each in apart] == [each.text for each in plain]
    # Guesses are there in the first step after the prompt: without them there would be three fewer.
    assert all(each.usage.drafted >= 6 for each in (*together, *apart))


def test_guesses_end_where_tokens_or_the_context_do() -> None:
    room = 96 - 90
    for max_tokens in (1, 2, 3, room, 50):
        asked = request("ab" * 45, max_tokens=max_tokens, temperature=0.0)
        fast_engine = engine(end_tokens=(), speculate=TrainedHead(path=head_folder()), step_costs=FREE)
        (plain,), (fast,) = (run(all_of(local, [asked])) for local in (engine(end_tokens=()), fast_engine))
        assert fast.text == plain.text and fast.usage.completion == plain.usage.completion == min(max_tokens, room)


# --- heads that are refused -------------------------------------------------------------------------------------------


def test_a_head_of_another_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="whose hidden_size is 32; that of this model is 128"):
        LocalEngine("lists-ar", speculate=TrainedHead(path=head_folder()))
    shutil.copytree(head_folder(), tmp_path / "head")
    file = tmp_path / "head" / "head.json"
    settings = json.loads(file.read_text())
    for name, words in (("vocab_size", "whose vocab_size is 7"), ("vocabulary", "whose vocabulary is 7")):
        file.write_text(json.dumps({**settings, name: 7 if name == "vocab_size" else "7"}))
        with pytest.raises(UnsupportedError, match=words):
            engine(speculate=f"head:path={tmp_path / 'head'}")
    with pytest.raises(ArgumentError, match="give an engine one trained head"):
        engine(speculate=[TrainedHead(path=head_folder()), TrainedHead(path=head_folder())])


def test_a_head_that_is_not_there_or_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="nowhere holds no trained head: it has no head.json"):
        engine(speculate="head:path=nowhere")
    with pytest.raises(ArgumentError, match="was not loaded from a folder that may hold its head"):
        engine(speculate="head")
    with pytest.raises(ArgumentError, match="holds no trained head: it has no head.json"):
        LocalEngine("products", speculate="head")
    shutil.copytree(head_folder(), tmp_path / "head")
    (tmp_path / "head" / "head.json").write_text('{"num_masks": 0}')
    with pytest.raises(ArgumentError, match="holds no head that can be read"):
        engine(speculate=TrainedHead(path=tmp_path / "head"))
    (tmp_path / "head" / "head.safetensors").unlink()
    with pytest.raises(ArgumentError, match="it has no head.safetensors"):
        engine(speculate=TrainedHead(path=tmp_path / "head"))
    with pytest.raises(ArgumentError, match="TrainedHead: length=0; use a positive integer"):
        engine(speculate=TrainedHead(length=0))
