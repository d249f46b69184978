"""Under every strategy gradients are those of one rank, or the call for them is refused in one line."""

from __future__ import annotations

import pytest
import torch

from partsong import StepCache, Ulysses, UnsupportedError, parallelize
from partsong.parallel.ranks.launch import launch
from tests.parallel import equivalence_worker, gradients_worker
from tests.parallel.families import FAMILIES


@pytest.mark.parametrize("nproc", [2, pytest.param(3, marks=pytest.mark.full)])
def test_are_those_of_one_rank_or_refused(nproc: int) -> None:
    for name, ranks in launch(gradients_worker.every_strategy, nproc, nproc).items():
        passes = all(strategy.passes_gradients for strategy in equivalence_worker.strategies(nproc)[name])
        for found in ranks:
            if passes:
                assert all(isinstance(one, float) and one <= 1e-10 for one in found), (name, found)
            else:
                whose = "hidden_states", "its weights", "hidden_states"
                assert all(f"a gradient of {word}" in one for one, word in zip(found, whose, strict=True)), (
                    name,
                    found,
                )
                assert all("torch.no_grad()" in one and "\n" not in one for one in found)


def test_ranks_with_losses_of_their_own_are_refused() -> None:
    for said in launch(gradients_worker.other_losses, 2, 2):
        assert "compute the same loss on every rank" in said


def test_are_refused_of_what_stands_beside_the_denoiser() -> None:
    by = "SyncPatch", "ParallelVae", "ParallelVae", "EncodeOnce"
    for said in launch(gradients_worker.beside_the_denoiser, 2, 2):
        for one, name in zip(said, by, strict=True):
            assert "was called for a gradient of" in one and f"under {name}" in one and "\n" not in one, said


def test_on_one_rank_only_what_leaves_out_blocks_is_refused() -> None:
    family = FAMILIES["SD3"]
    model, named = family.model(8, torch.float64).requires_grad_(True), family.call(8, 1, torch.float64)
    want = gradients_worker.gradients(model, named)
    with parallelize(model, Ulysses()):
        assert all(map(torch.equal, _known(gradients_worker.gradients(model, named)), _known(want)))
    with parallelize(model, StepCache()), pytest.raises(UnsupportedError, match="under StepCache"):
        model(**named)


def _known(found: list[torch.Tensor | None]) -> list[torch.Tensor]:
    return [one for one in found if one is not None]
