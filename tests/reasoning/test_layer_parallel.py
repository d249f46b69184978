"""Drafts whose layers attend in groups, on one rank and on several: the text is that of plain decoding."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch

from partsong.errors import UnsupportedError
from partsong.kernels.speculation.drafter import DraftText
from partsong.parallel import launch
from partsong.parallel.layer_parallel import LayerParallel, layer_groups
from partsong.parallel.ranks.mesh import Axis
from partsong.reasoning.local.speculation.assistant import AssistantDrafter
from tests.reasoning.hogwild_twin import tiny
from tests.reasoning.layer_parallel_worker import answers, draft_model, forward_bytes, requests, write
from tests.reasoning.local_models import llama, reference

ALONE = Axis("alone", (0,), 0)


def plain() -> list[list[int]]:
    model = draft_model()
    return [reference(model, asked)[0] for asked in requests()]


def test_groups_leave_the_first_and_the_last_layer_alone() -> None:
    for layers in range(2, 12):
        for size in range(1, 6):
            groups = layer_groups(layers, size)
            assert [number for group in groups for number in group] == list(range(layers))
            assert len(groups[0]) == len(groups[-1]) == 1 and max(map(len, groups)) <= size


@pytest.mark.parametrize(
    "size", [1, pytest.param(2, marks=pytest.mark.full), 3, pytest.param(4, marks=pytest.mark.full), 5]
)
def test_answers_are_those_of_plain_decoding(size: int) -> None:
    tickets = write(size)
    assert [ticket.answer for ticket in tickets] == plain()
    assert sum(ticket.drafted for ticket in tickets) > 20
    if size == 1:  # the draft is the model itself
        behind_ends = sum(4 for ticket in tickets if ticket.answer[-1] == 1)
        assert sum(ticket.rejected for ticket in tickets) <= behind_ends


def test_groups_of_one_layer_are_the_model_bit_for_bit() -> None:
    model, ids = draft_model(), torch.arange(2, 20)[None]
    with torch.no_grad():
        whole = model(ids).logits
        layers = LayerParallel(model, 1, ALONE)
        assert torch.equal(model(ids).logits, whole)
        layers.undo()
        layers = LayerParallel(model, 4, ALONE)
        assert not torch.allclose(model(ids).logits, whole, atol=1e-3)
        with layers.exact():
            assert torch.equal(model(ids).logits, whole)
        layers.undo()
        assert torch.equal(model(ids).logits, whole)


def test_keys_are_exact_after_every_step() -> None:
    """Bonus calibration: what was computed in groups is computed anew, so the draft's keys are the exact model's."""
    seen = list[tuple[list[int], torch.Tensor]]()

    def watch(drafter: AssistantDrafter) -> None:
        catch_up = drafter._catch_up

        def spy(most: Mapping[DraftText, int]) -> None:
            catch_up(most)
            for text in most:
                keys = drafter._batch.store.keys[:, 0, :, : len(text.tokens)]
                seen.append((list(text.tokens), keys.clone()))

        drafter._catch_up = spy  # pyright: ignore[reportAttributeAccessIssue]

    write(3, asked=requests()[:1], change=watch)
    assert len(seen) > 2
    model = draft_model()
    for tokens, keys in seen:
        cache = model(torch.tensor([tokens]), use_cache=True).past_key_values
        exact = torch.stack([layer.keys[0] for layer in cache.layers])
        assert keys.shape == exact.shape and (keys - exact).abs().max() < 1e-10


@pytest.mark.parametrize("size", [pytest.param(1, marks=pytest.mark.full), 3, pytest.param(4, marks=pytest.mark.full)])
@pytest.mark.parametrize("nproc", [2, pytest.param(4, marks=pytest.mark.full)])
def test_any_number_of_ranks_gives_the_same(nproc: int, size: int) -> None:
    alone, together = launch(answers, 1, size), launch(answers, nproc, size)
    assert together["answers"] == alone["answers"] == plain()
    assert together["counts"] == alone["counts"]
    assert together["sent"] > 0 == alone["sent"]


@pytest.mark.parametrize(("nproc", "size"), [(2, 4), (3, 2)])
def test_bytes_are_those_of_the_formula(nproc: int, size: int) -> None:
    hidden, tokens, predicted = 32, 11, 0
    for counted, predicted, drift in launch(forward_bytes, nproc, size, tokens):
        assert counted == predicted and drift < 1e-12
    # Rank 0 owns layers 0 and 5 or 0 and 3 alone, and the first share of each group.
    own = {(2, 4): 1 + 2, (3, 2): 1 + 1 + 1}[nproc, size]
    assert predicted == own * (nproc - 1) * tokens * hidden * 8


def test_other_layers_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="layers of 'gpt2' cannot be grouped"):
        LayerParallel(tiny("gpt2"), 2, ALONE)
    model = llama()
    layers = LayerParallel(model, 2, ALONE)
    with pytest.raises(UnsupportedError, match="under another plan already"):
        LayerParallel(model, 2, ALONE)
    layers.undo()
