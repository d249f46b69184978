"""Packed weights: the same answers up to rounding, which products they make, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from partsong import OffloadWeights, PackedWeights, ShardedWeights, UnsupportedError
from partsong.parallel import packed_weights, parallelize, predict_memory
from partsong.parallel.hooks.samples import sample_of
from partsong.parallel.ranks.launch import launch
from partsong.parallel.strategy import check_strategies
from tests import covering
from tests.parallel import packed_weights_worker as worker
from tests.parallel.families import FAMILIES
from tests.parallel.ranks import error
from tests.parallel.unets import UNETS

SINGLE, LEAST = 5e-6, 1
FAMILY_NAMES = list(FAMILIES) if covering.FULL else list(FAMILIES)[::9]
UNET_NAMES = list(UNETS) if covering.FULL else list(UNETS)[::5]


@pytest.fixture
def packs(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[int]]:
    """Packs small weights too, and counts calls of the operators with packed weights by the number of rows."""
    monkeypatch.setattr(packed_weights, "_FEWEST", LEAST)
    made: dict[str, list[int]] = {"_multiply": [], "_convolve": []}
    for name, seen in made.items():
        plain = getattr(packed_weights._Packed, name)

        def counted(self: Any, x: torch.Tensor, *given: Any, plain: Any = plain, seen: list[int] = seen) -> Any:
            before = len(self.copies)
            output = plain(self, x, *given)
            seen += [len(x)] * (len(self.copies) > before)
            return output

        monkeypatch.setattr(packed_weights._Packed, name, counted)
    return made


def large(model: nn.Module, kind: type[nn.Module]) -> int:
    """How many layers of a kind there are that can be packed."""
    parts: list[Any] = [part for part in model.modules() if type(part) is kind]
    return sum(kind is nn.Linear or part.kernel_size[0] > 1 for part in parts)


@pytest.mark.parametrize("name", ["UNet", "Wan", "Flux"])
def test_the_same_answer_up_to_rounding(name: str, packs: dict[str, list[int]]) -> None:
    model, named = worker.model_of(name)
    with torch.no_grad():
        want = [sample_of(model(**call)) for call in named]
        with parallelize(model, PackedWeights()):
            got = [sample_of(model(**call)) for call in named]
        assert all(error(one, other) <= SINGLE for one, other in zip(got, want, strict=True))
        # Every layer was packed, once for both calls.
        assert len(packs["_multiply"]) == large(model, nn.Linear)
        assert len(packs["_convolve"]) == large(model, nn.Conv2d)
        assert all(torch.equal(sample_of(model(**call)), one) for call, one in zip(named, want, strict=True))


@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_every_family_gives_the_same_answer_up_to_rounding(name: str, packs: dict[str, list[int]]) -> None:
    family = FAMILIES[name]
    model = family.model(8, torch.float32).eval()
    named = family.at(family.call(8, 2, torch.float32), 500.0)
    _compare(model, named)


@pytest.mark.parametrize("name", UNET_NAMES)
def test_every_unet_gives_the_same_answer_up_to_rounding(name: str, packs: dict[str, list[int]]) -> None:
    _compare(UNETS[name].model(torch.float32).eval(), UNETS[name].calls((16, 16), torch.float32, (500.0,))[0])


def _compare(model: Any, named: dict[str, Any]) -> None:
    with torch.no_grad():
        want = sample_of(model(**named))
        with parallelize(model, PackedWeights()):
            got = sample_of(model(**named))
    assert error(got, want) <= SINGLE


def test_other_types_stay_as_they_are(packs: dict[str, list[int]]) -> None:
    model, named = worker.model_of("UNet")
    model.to(torch.float64)
    call = {key: value.double() if value.is_floating_point() else value for key, value in named[0].items()}
    with torch.no_grad():
        want = sample_of(model(**call))
        with parallelize(model, PackedWeights()):
            assert torch.equal(sample_of(model(**call)), want)
    assert packs == {"_multiply": [], "_convolve": []}


@pytest.mark.parametrize("kind", [nn.Linear, nn.Conv2d])
@pytest.mark.parametrize("how", ["in place", "as data"])
def test_weights_that_were_written_to_are_packed_anew(kind: type[nn.Module], how: str, packs: Any) -> None:
    model, named = worker.model_of("UNet")
    layer: Any = next(part for part in model.modules() if type(part) is kind and part.weight.shape[-1] > 1)
    with torch.no_grad(), parallelize(model, PackedWeights()) as plan:
        model(**named[0])
        if how == "in place":
            layer.weight.mul_(3)
        else:
            layer.weight.data = layer.weight.data * 3
        got = sample_of(model(**named[1]))
        plan.undo()
        assert error(got, sample_of(model(**named[1]))) <= SINGLE


@pytest.mark.parametrize("kind", [nn.Linear, nn.Conv2d])
def test_a_generation_packs_weights_that_a_lora_was_merged_into(kind: type[nn.Module], packs: Any) -> None:
    model, named = worker.model_of("UNet")
    layer: Any = next(part for part in model.modules() if type(part) is kind and part.weight.shape[-1] > 1)
    with torch.no_grad(), parallelize(model, PackedWeights()) as plan:
        for call in named:
            model(**call)
        before = layer.weight._version
        layer.weight.data += 1.0  # as peft merges: the weight does not count this write
        assert layer.weight._version == before
        got = sample_of(model(**named[0]))
        plan.undo()
        assert error(got, sample_of(model(**named[0]))) <= SINGLE


def test_memory_of_dropped_weights_is_not_taken_for_theirs(packs: Any) -> None:
    model, named = worker.model_of("UNet")
    layer: Any = next(part for part in model.modules() if type(part) is nn.Linear)
    with torch.no_grad(), parallelize(model, PackedWeights()) as plan:
        model(**named[0])
        for _ in range(4):  # the second may get the memory of the first
            layer.weight.data = layer.weight.data * 2
        got = sample_of(model(**named[1]))
        plan.undo()
        assert error(got, sample_of(model(**named[1]))) <= SINGLE


def test_copies_go_with_the_plan() -> None:
    model, named = worker.model_of("UNet")
    with torch.no_grad():
        plan = parallelize(model, PackedWeights())
        model(**named[0])
        plan.undo()
        plain = model(**named[0])[0]
    assert torch.equal(plain, worker.model_of("UNet")[0](**named[0])[0])


def test_forecasts_of_memory_count_copies(packs: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    model, named = worker.model_of("UNet")
    taken = dict[int, int]()
    plain = packed_weights._Packed._copy_of
    monkeypatch.setattr(
        packed_weights._Packed,
        "_copy_of",
        lambda self, weight, pack: (taken.update({id(weight): weight.nbytes}), plain(self, weight, pack))[1],
    )
    with torch.no_grad(), parallelize(model, PackedWeights()):
        model(**named[0])
    real, call = sum(taken.values()), dict[str, Any](named[0])
    alone, kept = (predict_memory(model, *given, ranks=1, **call) for given in ((), (PackedWeights(),)))
    assert kept.kept - alone.kept == real > 0


@pytest.mark.parametrize("other", [ShardedWeights(), OffloadWeights()])
def test_weights_that_come_and_go_are_not_packed(other: Any) -> None:
    for pair in ((other, PackedWeights()), (PackedWeights(), other)):
        with pytest.raises(UnsupportedError, match="does not compose with"):
            check_strategies(pair)


def test_gradients_are_refused() -> None:
    model, named = worker.model_of("UNet")
    with parallelize(model, PackedWeights()), pytest.raises(UnsupportedError, match="under PackedWeights"):
        model(**named[0])


def test_other_devices_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = worker.model_of("UNet")
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    with pytest.raises(UnsupportedError, match="built without oneDNN"):
        parallelize(model, PackedWeights())


def test_two_ranks_give_what_one_gives() -> None:
    found = launch(worker.distances, 2)
    assert set(found) == set(worker.MIXES)
    assert all(distance <= SINGLE for distance in found.values()), found
