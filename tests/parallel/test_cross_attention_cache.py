"""Kept texts: the same bits with and without them, what is computed how often, and when they are dropped."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from partsong import ArgumentError, CrossAttentionCache, PackedWeights, UnsupportedError
from partsong.parallel import parallelize, predict_memory
from partsong.parallel.adapters import adapter_for
from partsong.parallel.hooks.samples import sample_of
from partsong.parallel.ranks.launch import launch
from tests import covering
from tests.parallel import cross_attention_cache_worker as worker
from tests.parallel.families import FAMILIES
from tests.parallel.tensor_worker import build, calls
from tests.parallel.unets import UNETS
from tests.pipelines.case import denoisers, distance
from tests.pipelines.cases import CASES, FAMILY

MODELS = list(FAMILIES) if covering.FULL else ["PixArt", "Wan", "Sana", "HunyuanDiT", "Flux", "CogVideoX"]
#: One of seven families, each with its last pipeline; all run with ``--full``.
PIPELINES = list(CASES) if covering.FULL else list({family: name for name, family in FAMILY.items()}.values())[3::7]
TIMES = (900.0, 500.0, 100.0)


class Products:
    """Counts the calls of the linear layers of a model that end in a name."""

    def __init__(self, model: nn.Module, *ends: str) -> None:
        self.calls = 0
        for name, layer in model.named_modules():
            if name.endswith(ends) and isinstance(layer, nn.Linear):
                self._count(layer)

    def _count(self, layer: Any) -> None:
        plain = layer.forward

        def forward(*given: Any) -> Any:
            self.calls += 1
            return plain(*given)

        layer.forward = forward


def sd(calls: tuple[float, ...] = TIMES) -> tuple[Any, list[dict[str, Any]]]:
    return UNETS["SD"].model(torch.float32).eval(), UNETS["SD"].calls((16, 16), torch.float32, calls)


@pytest.mark.parametrize("name", MODELS)
def test_the_same_bits(name: str) -> None:
    family = FAMILIES[name]
    model = family.model(8, torch.float64).eval()
    named = family.call(8, 2, torch.float64)
    steps = [family.at(named, time) for time in TIMES]
    if CrossAttentionCache().refuses(adapter_for(model)) is not None:
        with pytest.raises(UnsupportedError, match="reads no text"):
            parallelize(model, CrossAttentionCache())
        return
    with torch.no_grad():
        want = [sample_of(model(**step)) for step in steps]
        with parallelize(model, CrossAttentionCache()):
            got = [sample_of(model(**step)) for step in steps]
    assert all(torch.equal(one, other) for one, other in zip(got, want, strict=True))


@pytest.mark.parametrize("name", PIPELINES)
@pytest.mark.slow
def test_pipelines_make_the_same_picture(name: str) -> None:
    case = CASES[name]
    pipe = case.make()
    alone = case.run(pipe)
    with parallelize(pipe, PackedWeights()):  # it leaves float64 alone, and its hook changes nothing
        assert distance(case.run(pipe), alone) == 0
    if any(CrossAttentionCache().refuses(adapter_for(part)) for part in denoisers(pipe)):
        with pytest.raises(UnsupportedError, match="reads no text"):
            parallelize(pipe, CrossAttentionCache())
        return
    with parallelize(pipe, CrossAttentionCache()):
        assert distance(case.run(pipe), alone) == 0
        assert distance(case.run(pipe), alone) == 0


@pytest.mark.parametrize(
    ("name", "ends"),
    [("UNet", ("attn2.to_k", "attn2.to_v")), ("Wan", ("attn2.to_k", "attn2.to_v", "text_embedder.linear_1"))],
)
def test_a_text_is_computed_once_in_a_generation(name: str, ends: tuple[str, ...]) -> None:
    model, steps = sd() if name == "UNet" else (build("Wan"), calls("Wan"))
    layers = sum(each.endswith(ends) for each, _ in model.named_modules())
    counted = Products(model, *ends)
    with torch.no_grad(), parallelize(model, CrossAttentionCache()):
        for step in steps:
            model(**step)
        assert layers > 2 and counted.calls == layers
        model(**steps[0])  # a later time begins a new generation
        assert counted.calls == 2 * layers


def test_an_equal_text_in_inference_mode_is_the_same_text() -> None:
    model, steps = sd()
    layers = sum(name.endswith("attn2.to_k") for name, _ in model.named_modules())
    counted = Products(model, "attn2.to_k")
    with torch.inference_mode(), parallelize(model, CrossAttentionCache()):
        got = [model(**step | {"encoder_hidden_states": step["encoder_hidden_states"].clone()})[0] for step in steps]
    assert counted.calls == layers
    with torch.no_grad():
        assert all(torch.equal(one, model(**step)[0]) for one, step in zip(got, steps, strict=True))


def test_branches_called_one_by_one_are_kept_apart() -> None:
    model, steps = sd()
    other = torch.randn_like(steps[0]["encoder_hidden_states"])
    both = [step | more for step in steps for more in ({}, {"encoder_hidden_states": other})]
    with torch.no_grad():
        want = [model(**step)[0] for step in both]
        counted = Products(model, "attn2.to_k")
        for texts, times in ((2, 1), (1, len(steps))):
            counted.calls = 0
            with parallelize(model, CrossAttentionCache(texts=texts)):
                assert all(torch.equal(model(**step)[0], one) for step, one in zip(both, want, strict=True))
            layers = sum(name.endswith("attn2.to_k") for name, _ in model.named_modules())
            assert counted.calls == 2 * times * layers


@pytest.mark.parametrize("what", ["text", "weight", "other weight", "copy of the text"])
def test_what_was_written_to_is_computed_anew(what: str) -> None:
    model, steps = sd()
    name, layer = next((n, m) for n, m in model.named_modules() if n.endswith("attn2.to_k"))
    with torch.no_grad(), parallelize(model, CrossAttentionCache()) as plan:
        model(**steps[0])
        if what == "text":
            steps[1]["encoder_hidden_states"].mul_(2)
        elif what == "weight":
            layer.weight.mul_(2)
        elif what == "other weight":
            layer.weight.data = layer.weight.data * 2
        else:
            steps[1]["encoder_hidden_states"] = steps[1]["encoder_hidden_states"] * 2
        got = model(**steps[1])[0]
        plan.undo()
        assert torch.equal(got, model(**steps[1])[0]), name


def test_nothing_is_kept_of_training() -> None:
    model, steps = sd()
    counted = Products(model, "attn2.to_k")
    layers = sum(name.endswith("attn2.to_k") for name, _ in model.named_modules())
    with parallelize(model, CrossAttentionCache()):
        for step in steps:
            model(**step)[0].sum().backward()
        assert counted.calls == len(steps) * layers
        with torch.no_grad():
            for step in steps:
                model.train()(**step)
        assert counted.calls == 2 * len(steps) * layers


def test_kept_values_go_with_the_generation() -> None:
    model, steps = sd()
    with torch.no_grad(), parallelize(model, CrossAttentionCache()) as plan:
        kept = plan.denoisers[0].attachments[0]
        model(**steps[0])
        assert kept._kept
        plan.clock.begin()
        assert not kept._kept


def test_forecasts_of_memory_count_what_is_kept() -> None:
    model, (step, *_) = sd()
    made = list[int]()
    watched = [
        layer.register_forward_hook(lambda _layer, _given, output: made.append(output.nbytes))
        for name, layer in model.named_modules()
        if name.endswith(("attn2.to_k", "attn2.to_v"))
    ]
    with torch.no_grad():
        model(**step)
    for each in watched:
        each.remove()
    alone, kept = (predict_memory(model, *given, ranks=1, **step) for given in ((), (CrossAttentionCache(),)))
    assert sum(made) > 0
    assert kept.kept - alone.kept == sum(made)
    assert kept.working > alone.working


def test_bad_number_of_texts() -> None:
    with pytest.raises(ArgumentError, match="texts"):
        parallelize(sd()[0], CrossAttentionCache(texts=0))


def test_two_ranks_give_the_same_bits() -> None:
    cases = [("SDXL UNet", "SyncPatch"), ("SDXL UNet", "DisplacedPatch"), ("SDXL UNet", "CfgParallel")]
    cases += [("Wan", mix) for mix in worker.MIXES if mix not in ("SyncPatch", "DisplacedPatch", "CfgParallel")]
    assert launch(worker.differences, 2, cases) == [0.0] * len(cases)
