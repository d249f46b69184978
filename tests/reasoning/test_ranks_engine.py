"""A model that ranks share answers as one process does, with drafts and cancelled calls, and dead ranks come back."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from partsong.errors import ArgumentError, UnsupportedError
from partsong.reasoning import Completion, Request
from partsong.reasoning.calls.engine import EngineError
from partsong.reasoning.hosted import RanksEngine
from partsong.reasoning.local import LocalEngine
from partsong.samplers.registry import LayerPipeline, ShardedWeights, TensorParallel
from tests.reasoning.local_models import llama, request, tokenizer
from tests.reasoning.test_local_engine import mixed

#: Three heads of keys do not divide, and neither do the 31 tokens of the vocabulary.
SIZES: dict[str, Any] = {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 48, "head_dim": 8}
RANKS: dict[str, dict[str, Any]] = {
    "tensor": {"strategies": (TensorParallel(),), "speculate": ["ngram", "jacobi"]},
    "layers": {"strategies": (LayerPipeline(),), "speculate": "ngram"},
    "layers, in parts": {"strategies": (LayerPipeline(smallest=1),), "speculate": "ngram", "prefill_chunk": 7},
    "sharded": {"strategies": (ShardedWeights(),), "prefill_chunk": 7, "max_rows": 3},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("llama")
    llama(**SIZES).save_pretrained(path)
    tokenizer().save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module")
def plain(folder: str) -> list[Completion]:
    return asyncio.run(answers(LocalEngine(folder, dtype=torch.float64), asked()))


def asked() -> list[Request]:
    first, *more = mixed()
    return [replace(first, parameters=replace(first.parameters, logprobs=3)), *more]


async def answers(engine: Any, requests: list[Request]) -> list[Completion]:
    try:
        return list(await asyncio.gather(*map(engine.generate, requests)))
    finally:
        await engine.close()


@pytest.mark.parametrize(
    ("nproc", "name"), [*((2, name) for name in RANKS), pytest.param(3, "tensor", marks=pytest.mark.full)]
)
def test_answers_are_those_of_one_process(folder: str, plain: list[Completion], nproc: int, name: str) -> None:
    engine = RanksEngine(folder, nproc=nproc, dtype=torch.float64, **RANKS[name])
    found = asyncio.run(answers(engine, asked()))
    assert [each.text for each in found] == [each.text for each in plain]
    assert [each.finish for each in found] == [each.finish for each in plain]
    assert found[0].logprobs == pytest.approx(plain[0].logprobs, abs=1e-10)
    assert (sum(each.usage.drafted for each in found) > 0) == ("speculate" in RANKS[name])
    assert engine.name == f"local/{folder}/float64"


@pytest.fixture
def engine(folder: str) -> Iterator[RanksEngine]:
    made = RanksEngine(folder, dtype=torch.float64)
    yield made
    made._end()


def test_a_cancelled_call_leaves_and_the_others_go_on(engine: RanksEngine, plain: list[Completion]) -> None:
    async def main() -> list[Completion]:
        begun = asyncio.Event()
        long = asyncio.ensure_future(
            engine.generate(request("zz", max_tokens=80), lambda text, tokens, confidence=(), **more: begun.set())
        )
        await begun.wait()
        others = [asyncio.ensure_future(engine.generate(each)) for each in asked()]
        long.cancel()
        with pytest.raises(asyncio.CancelledError):
            await long
        return list(await asyncio.gather(*others))

    assert [each.text for each in asyncio.run(main())] == [each.text for each in plain]


def test_a_refused_call_ends_alone(engine: RanksEngine) -> None:
    async def main() -> Completion:
        with pytest.raises(ArgumentError, match="the prompt has 200 tokens and the model's context 96"):
            await engine.generate(request("a" * 200))
        return await engine.generate(request("zz"))

    assert asyncio.run(main()).text


@pytest.mark.slow
def test_ranks_that_die_come_back_once(engine: RanksEngine, plain: list[Completion]) -> None:
    async def killed() -> list[Completion]:
        begun = asyncio.Event()

        def begin(text: str, tokens: int, confidence: Any = (), **more: Any) -> None:
            if not begun.is_set():
                begun.set()
                os.kill(_last_rank(), signal.SIGKILL)

        tasks = [asyncio.ensure_future(engine.generate(each, begin)) for each in asked()]
        return list(await asyncio.gather(*tasks))

    found = asyncio.run(killed())
    assert [each.text for each in found] == [each.text for each in plain]
    assert sum(each.usage.wasted for each in found) > 0
    with pytest.raises(EngineError, match="rank 1 was killed by SIGKILL"):
        asyncio.run(killed())


@pytest.mark.full
@pytest.mark.slow
def test_ranks_that_are_starting_end_with_the_engine(engine: RanksEngine) -> None:
    async def main() -> None:
        os.kill(_last_rank(), signal.SIGKILL)
        while engine._life.error is None:
            await asyncio.sleep(0.01)
        waiting = asyncio.ensure_future(engine.generate(request("zz")))
        while engine._life.error is not None:  # until the ranks that follow are starting
            await asyncio.sleep(0.01)
        assert engine._life.state == "starting"
        await engine.close()
        with pytest.raises(EngineError, match="the engine is closed"):
            await waiting

    asyncio.run(main())
    for thread in engine._life._threads:
        thread.join(120)
    assert not _ranks()


def _ranks() -> list[Any]:
    return [child for child in multiprocessing.active_children() if child.name.startswith("rank ")]


def _last_rank() -> int:
    """Returns the process id of rank 1, by what its parent called it."""
    return max(child.pid for child in _ranks() if child.name == "rank 1")


@pytest.mark.parametrize(
    ("how", "kind", "words"),
    [
        ({"nproc": 4}, UnsupportedError, "has 3 heads of keys for 4 ranks; choose a degree of at most 3"),
        ({"nproc": 0}, ArgumentError, "nproc=0"),
        ({"row": 3}, ArgumentError, "row= is no option of ranks that share a model; there are dtype, device, max_rows"),
        ({"speculate": "tree"}, ArgumentError, "tree"),
        ({"weights": "int8", "dtype": torch.float32}, UnsupportedError, "weights='int8' rounds whole rows"),
        (
            {"strategies": (TensorParallel(), ShardedWeights())},
            UnsupportedError,
            "does not compose with ShardedWeights",
        ),
    ],
)
def test_what_cannot_run_is_one_error(folder: str, how: dict[str, Any], kind: type[Exception], words: str) -> None:
    with pytest.raises(kind) as refused:
        RanksEngine(folder, **how)
    assert words in str(refused.value) and "\n" not in str(refused.value)


def test_a_mesh_without_strategies_is_refused() -> None:
    class Two:
        world_size = 2

    mesh: Any = Two()
    with pytest.raises(ArgumentError, match="mesh= has 2 ranks, and nothing says how they share the model"):
        LocalEngine("sums", mesh=mesh)
