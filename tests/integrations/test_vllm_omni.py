"""The custom pipeline for vLLM-Omni draws what one rank draws, and refuses what it does not read."""

from __future__ import annotations

import pytest

from partsong import CfgParallel, ParallelVae, TensorParallel, Usp, launch
from partsong.errors import UnsupportedError
from tests.integrations import vllm_omni_worker as worker
from tests.pipelines.case import distance

MODEL = "StableDiffusion3Pipeline"


@pytest.mark.parametrize(
    ("ranks", "parallel"),
    [
        (2, {"cfg_parallel_size": 2}),
        (2, {"ulysses_degree": 2, "vae_patch_parallel_size": 2}),
        pytest.param(4, {"cfg_parallel_size": 2, "ring_degree": 2}, marks=pytest.mark.full),
        pytest.param(4, {"tensor_parallel_size": 2, "cfg_parallel_size": 2}, marks=pytest.mark.full),
    ],
)
def test_requests_are_answered_as_on_one_rank(ranks: int, parallel: dict[str, int]) -> None:
    alone = worker.CASES[MODEL].run(worker.CASES[MODEL].make())
    for drawn in launch(worker.draw, ranks, MODEL, parallel, 2):
        assert distance(drawn, alone) <= 1e-9


def test_options_become_strategies() -> None:
    module = worker.load()
    asked = {"cfg_parallel_size": 2, "ulysses_degree": 2, "ring_degree": 3, "tensor_parallel_size": 2}
    strategies, degrees = module.strategies_of(worker.Parallel(**asked, vae_patch_parallel_size=24))
    assert strategies == [CfgParallel(), Usp(), TensorParallel(), ParallelVae()]
    assert degrees == {"cfg": 2, "ring": 3, "ulysses": 2, "tensor": 2}
    assert module.strategies_of(worker.Parallel())[0] == []


@pytest.mark.parametrize("name", ["pipeline_parallel_size", "data_parallel_size", "allgather_degree", "use_hsdp"])
def test_what_is_not_read_is_refused(name: str) -> None:
    module = worker.load()
    with pytest.raises(UnsupportedError, match=f"{name}: partsong reads cfg_parallel_size"):
        module.strategies_of(worker.Parallel(**{name: 2}))


def test_the_adapter_still_refuses_the_rest() -> None:
    module = worker.load()
    config = worker.Config(MODEL, worker.Parallel(cfg_parallel_size=2), cache_backend="tea_cache")
    with pytest.raises(NotImplementedError, match="caches"):
        module.PartsongPipeline(od_config=config)
