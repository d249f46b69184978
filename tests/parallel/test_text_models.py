"""Language models over ranks: the logits, tokens and bytes of one process, a share of its weights, and refusals."""

from __future__ import annotations

import functools
import itertools
import tempfile
from typing import Any

import pytest
import torch

from partsong.parallel.ranks.launch import launch
from tests.parallel import text_models_worker as worker
from tests.parallel.text_models_worker import IDS
from tests.samplers.text.checkpoints import CHECKPOINTS, random_weights, write

#: Norms over the width of all heads add up squares in single precision, as transformers does.
SINGLE = {"olmo2": 1e-6, "olmoe": 1e-6}
QUICK = ("llama", "phi3", "mixtral", "glm4_moe")


@functools.cache
def results(nproc: int, families: tuple[str, ...]) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        return launch(worker.run, nproc, nproc, [*families], [*worker.STRATEGIES], folder)


PAIRS = [pair for pair in itertools.product(worker.FAMILIES, worker.STRATEGIES) if pair not in worker.REFUSED]
CASES = [
    *((2, QUICK, *pair) for pair in PAIRS if pair[0] in QUICK),
    *(pytest.param(3, (*worker.FAMILIES,), *pair, marks=pytest.mark.full) for pair in PAIRS),
]


@pytest.mark.slow
@pytest.mark.parametrize(("nproc", "families", "family", "name"), CASES)
def test_equals_one_process(nproc: int, families: tuple[str, ...], family: str, name: str) -> None:
    for rank in results(nproc, families):
        case = rank[f"{family}, {name}"]
        assert case["logits"] <= SINGLE.get(family, 1e-10) and case["after"] == 0.0
        assert case["same"]
        if name == "experts":  # what moves depends on where tokens go
            assert case["sent"] == case["by routing"] and case["sent in a call"] <= case["predicted of a call"]
        else:
            assert case["sent in a call"] == case["predicted of a call"]
        assert case["held"] == case["predicted to be held"]
        if name in ("tensor", "layers"):
            assert case["sent"] == case["predicted"] or family in SINGLE  # which exchange squares as well
        assert "exact" in case["said"]


@pytest.mark.parametrize("family", QUICK)
def test_a_rank_holds_its_share_of_the_weights(family: str) -> None:
    shares = [rank[f"{family}, tensor"]["share"] for rank in results(2, QUICK)]
    # One rank has two of three heads of keys; only norms and routers are whole on both.
    assert 1.0 <= sum(shares) <= 1.1 and max(shares) <= 0.6


@pytest.mark.parametrize("family", QUICK)
def test_a_rank_holds_the_weights_and_keys_of_its_layers(family: str) -> None:
    first, second = (rank[f"{family}, layers"] for rank in results(2, QUICK))
    assert 1.0 <= first["share"] + second["share"] <= 1.05 and max(first["share"], second["share"]) <= 0.7  # 2 of 3
    logits = IDS.numel() * 61 * 8
    assert first["held"][1] - logits == 2 * (second["held"][1] - logits)


def test_a_rank_holds_its_experts_and_a_placement_moves_less() -> None:
    first, second = (rank["mixtral, experts"] for rank in results(2, QUICK))
    assert max(first["share"], second["share"]) <= 0.6  # of four experts two; attention is whole
    for rank in results(2, QUICK):
        case = rank["placed"]
        assert max(case["in order"][1], case["placed"][1]) <= 1e-10 and case["after"] == 0.0
    sent = [sum(rank["placed"][name][0] for rank in results(2, QUICK)) for name in ("in order", "placed")]
    assert sent[1] < sent[0]


@pytest.mark.parametrize("strategy", worker.DECODING)
@pytest.mark.parametrize("rule", worker.RULES)
@pytest.mark.parametrize("name", worker.MASKED)
def test_masked_models_write_the_same(name: str, rule: str, strategy: str) -> None:
    assert all(rank[f"{name}, {rule}, {strategy}"] for rank in results(2, QUICK))


@pytest.mark.parametrize("strategy", worker.DECODING)
def test_generate_with_drafts_writes_the_same(strategy: str) -> None:
    assert all(rank[f"speculated, {strategy}"] for rank in results(2, QUICK))


def test_ranks_with_fewer_layers_guess_as_many_tokens() -> None:
    first, second = (rank["costs"] for rank in results(2, QUICK))
    assert first == second


def test_adapters_on_layers_and_encoders_are_shared_out_too() -> None:
    for rank in results(2, QUICK):
        assert rank["others"]["lora"] <= 1e-10 and rank["others"]["bert"] <= 1e-10


def test_an_encoder_and_a_decoder_have_their_shares_in_common() -> None:
    for rank in results(2, QUICK):
        case = rank["in two stacks"]
        assert isinstance(case, dict), case
        assert case["error"] <= 1e-6 and case["after"] == 0.0  # norms and routers are of single precision
        assert case["same"] and case["sent"] == case["predicted"]
        assert case["share"] <= 0.6


def test_what_cannot_be_shared_out_is_refused_on_all_ranks() -> None:
    for rank in results(2, QUICK):
        said = rank["refused"]
        assert "has 1 heads of keys for 2 ranks; choose a degree of at most 1" in said["one head of keys"]
        assert "transformers has no plan that says how its layers are cut" in said["no plan"]
        assert "Ulysses does not run on a language model" in said["another strategy"]
        assert "is under another plan already" in said["twice"]
        assert "called for a gradient of its weights" in said["gradients"]
        assert "leave it out with a language model" in said["adapter"]
        assert "rank 1 was given another call of the model than rank 0" in said["other tokens"]
        assert "its encoder and decoder are called by themselves" in said["two stacks"]
        assert "no plan that says how its layers follow each other" in said["no plan for stages"]
        assert "1 blocks of LlamaForCausalLM cannot be 2 stages; use at most 1" in said["too few layers"]
        assert "layers=(2, 2) are 2 stages of 4 blocks; LlamaForCausalLM has 3 blocks" in said["other layers"]
        assert "it has no layers of experts; use TensorParallel" in said["no experts"]
        assert "1 experts cannot be shared by 2 ranks; use at most 1" in said["too few experts"]
        assert "placement='nowhere' cannot be read" in said["no placement"]
        assert (
            "output_hidden_states=True: under LayerPipeline a rank has those of its own layers only" in said["states"]
        )


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Checkpoints of stock classes, tied and not, and those under the public names of masked models."""
    there = tmp_path_factory.mktemp("checkpoints")
    for name in ("llama", "qwen3", "mixtral"):
        worker.model_of(name).save_pretrained(there / name)
    worker.model_of("llama").to(torch.bfloat16).save_pretrained(there / "llama in bfloat16")
    for name in ("llada", "llada2", "dream", "sdar"):
        config, shapes, _, _ = CHECKPOINTS[name]
        write(there / name, config, random_weights(shapes(config)), shards=3)
    return {folder.name: str(folder) for folder in sorted(there.iterdir())}


def test_a_rank_reads_its_share_of_a_checkpoint(folders: dict[str, str]) -> None:
    for rank in launch(worker.run_loaded, 2, folders):
        for name, case in rank.items():
            assert case["same"], name
            if "experts" not in name:
                # Norms and routers are whole, and neither three heads of keys nor three layers divide.
                assert case["share"] <= 0.67, name
            if "sharded" not in name and "experts" not in name:
                assert "each rank read its share of this" in case["undone"] and "load the model again" in case["undone"]
