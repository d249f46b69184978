"""`RayEngine` on a real Ray of this machine: where calls go, what deaths cost, and problems that survive one."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import random
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

if importlib.util.find_spec("ray") is None:
    pytest.skip("Ray is not installed: pip install 'partsong[scale]'", allow_module_level=True)

from partsong.errors import ArgumentError, ArgumentTypeError
from partsong.reasoning import Completion, EngineError, Line, Message, Parameters, Request, Run, ScriptedEngine
from partsong.reasoning.calls.running_call import Partial
from partsong.reasoning.cluster import RayEngine
from partsong.reasoning.cluster.engine import _check_room
from partsong.reasoning.cluster.placement import MAX_LEAD, Placement, gpu_share
from partsong.reasoning.strategies import parse_thinking
from tests.serving.ray_cluster import RAY_ENVIRONMENT

#: Words of an answer that takes a second.
LONG = 500


def environment() -> dict[str, str]:
    return {**os.environ, **RAY_ENVIRONMENT}


@pytest.fixture(scope="module")
def ray() -> Iterator[Any]:
    """A cluster of this machine alone, with two cores to give away."""
    before = dict(os.environ)
    os.environ |= environment()
    import ray

    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=10**8)
    yield ray
    ray.shutdown()
    os.environ.clear()
    os.environ |= before


def request(text: str, seed: int = 0, **asked: Any) -> Request:
    return Request(messages=(Message("user", (text,)),), parameters=Parameters(**asked), seed=seed)


class Own(ScriptedEngine):
    """Says in which process it is; a prompt "long" is answered slowly, and "fail" not at all."""

    def __init__(self) -> None:
        super().__init__(self.say, seconds_per_token=0.002, chunk=1, name="own")
        self.cancelled = 0

    def say(self, asked: Request, draw: random.Random) -> Line:
        prompt = asked.messages[0].text
        if prompt.startswith("fail"):
            return Line(text="", error=ArgumentError("no room") if prompt == "fail" else KeyError("odd"))
        if prompt == "cancelled":
            return Line(text=str(self.cancelled))
        if prompt == "poison":
            os.kill(os.getpid(), signal.SIGKILL)
        words = [str(draw.randrange(1000)) for _ in range(LONG if prompt == "long" else 3)]
        return Line(text=" ".join([str(os.getpid()), *words]))

    async def generate(self, request: Request, progress: Any = None) -> Completion:
        try:
            return await super().generate(request, progress)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise


def processes(completions: Sequence[Completion]) -> list[int]:
    return [int(each.text.split()[0]) for each in completions]


def kill(engine: RayEngine, number: int) -> None:
    import ray

    ray.kill(engine._places[number].actor)


def busy(engine: RayEngine) -> int:
    """The engine that has a call."""
    (number,) = [place.number for place in engine._places if place.calls]
    return number


# --- placement --------------------------------------------------------------------------------------------------------


def test_calls_go_to_the_least_busy_and_equal_prompts_together() -> None:
    placement = Placement()
    assert [placement.choose({0: 2, 1: 1, 2: 1}, request(str(k))) for k in range(2)] == [1, 1]
    assert placement.choose({0: 1 + MAX_LEAD, 1: 1, 2: 1}, request("a")) == 1
    assert placement.choose({0: 0, 1: MAX_LEAD, 2: 1}, request("a", seed=9)) == 1  # at home, though not the least busy
    assert placement.choose({0: 0, 1: MAX_LEAD + 1, 2: 1}, request("a")) == 0  # too much is waiting there
    assert placement.choose({0: 0, 1: 1}, request("a")) == 1  # and it is still at home
    assert placement.choose({0: 0, 2: 0}, request("a")) == 0 == placement.choose({0: 1, 1: 0}, request("a"))


@pytest.mark.parametrize("engines", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("gpus", [1, 2, 3, 8])
def test_shares_of_gpus_find_room(engines: int, gpus: int) -> None:
    share = gpu_share(engines, gpus)
    assert 0 < share <= 1.0 and gpus * int(1 / share + 1e-9) >= engines
    assert share == 1.0 or gpus * (int(1 / share + 1e-9) - 1) < engines  # a larger one would not


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({}, "one of the two"),
        ({"model": "sums", "factory": Own}, "one of the two"),
        ({"factory": Own, "max_rows": 4}, "max_rows: these are for model="),
        ({"factory": Own, "num_engines": 0}, "num_engines=0"),
        ({"factory": Own, "restarts": -1}, "restarts=-1"),
        ({"factory": Own, "num_gpus": -0.5}, "num_gpus=-0.5"),
        ({"factory": Own, "num_cpus": float("inf")}, "num_cpus=inf"),
    ],
)
def test_what_cannot_be_is_refused_before_any_actor(options: dict[str, Any], named: str) -> None:
    with pytest.raises(ArgumentError, match=named):
        RayEngine(**options)
    with pytest.raises(ArgumentTypeError, match="found int"):
        RayEngine(3)  # pyright: ignore[reportArgumentType]


def test_importing_the_package_loads_neither_ray_nor_torch() -> None:
    code = "import sys, partsong.reasoning.cluster; print(sorted({'ray', 'torch', 'transformers'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_engines_a_cluster_of_ones_own_has_no_room_for_are_refused() -> None:
    _check_room(4, 0.5, 0.25, {"CPU": 2.0, "GPU": 1.0})
    with pytest.raises(ArgumentError, match=r"3 engines of num_cpus=1 need 3 CPUs, and this machine has 2:"):
        _check_room(3, 1.0, 0.0, {"CPU": 2.0})
    with pytest.raises(ArgumentError, match=r"3 engines of num_gpus=0\.5 need 1\.5 GPUs, and this machine has 0:"):
        _check_room(3, 0.0, 0.5, {"CPU": 2.0})


@pytest.mark.full
def test_a_cluster_of_its_own_ends_with_the_engine() -> None:
    code = (
        "import asyncio, ray\n"
        "from partsong.reasoning import Line, Message, Request, ScriptedEngine\n"
        "from partsong.reasoning.cluster import RayEngine\n"
        "engine = RayEngine(factory=lambda: ScriptedEngine(lambda request, draw: Line(text='4')), num_engines=1)\n"
        "asyncio.run(engine.generate(Request(messages=(Message('user', ('a',)),))))\n"
        "asyncio.run(engine.close())\n"
        "print(ray.is_initialized())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment())
    assert done.stdout == "False\n"


@pytest.mark.full
def test_engines_that_find_no_room_or_no_model_are_refused(ray: Any) -> None:
    # Engines that can never fit: on a busy machine, those that fit may not be there in time either.
    for num, num_cpus, seconds, missing in ((2, 3, 1, "2 of 2"), (3, 1, 4, "[123] of 3")):
        with pytest.raises(EngineError, match=rf"{missing} engines were not there after .*={seconds}; .* of 2 CPUs"):
            RayEngine(factory=Own, num_engines=num, num_cpus=num_cpus, start_seconds=seconds)
    with pytest.raises(ArgumentError, match="connected to a Ray cluster already"):
        RayEngine(factory=Own, address="127.0.0.1:1")

    def refuses() -> Any:
        raise ArgumentError("no model 'nope'")

    with pytest.raises(ArgumentError, match="no model 'nope'"):
        RayEngine(factory=refuses, num_engines=1)


# --- calls ------------------------------------------------------------------------------------------------------------


@pytest.mark.full
def test_calls_are_spread_and_answered_as_by_one_engine(ray: Any) -> None:
    asked = [request(f"{k % 6}", seed=k) for k in range(24)]
    reports: list[tuple[str, int]] = []

    async def main() -> tuple[list[Completion], list[Completion]]:
        engine, alone = RayEngine(factory=Own), Own()
        assert engine.name == "own"
        try:
            await engine.generate(asked[0], lambda text, tokens, confidence=(), **more: reports.append((text, tokens)))
            completions = list(await asyncio.gather(*map(engine.generate, asked)))
            with pytest.raises(ArgumentError, match="no room"):
                await engine.generate(request("fail"))
            with pytest.raises(EngineError, match=r"the engine failed: KeyError\('odd'\)"):
                await engine.generate(request("fail oddly"))
        finally:
            await engine.close()
            await engine.close()
        with pytest.raises(EngineError, match="closed"):
            await engine.generate(asked[0])
        return completions, list(await asyncio.gather(*map(alone.generate, asked)))

    completions, expected = asyncio.run(main())
    assert [each.text.split()[1:] for each in completions] == [each.text.split()[1:] for each in expected]
    assert [each.usage for each in completions] == [each.usage for each in expected]
    assert all(8 <= count <= 16 for count in Counter(processes(completions)).values())
    assert len(set(processes(completions))) == 2 and os.getpid() not in processes(completions)
    text = "".join(new for new, _ in reports)
    assert [tokens for _, tokens in reports] == [1, 2, 3, 4] and text.split()[1:] == expected[0].text.split()[1:]


@pytest.mark.full
def test_a_halt_falls_on_the_same_token_and_a_cancelled_call_ends_in_its_actor(ray: Any) -> None:
    def enough(seen: Partial) -> bool:
        return seen.tokens >= 33

    async def main() -> tuple[Completion, str, float]:
        engine = RayEngine(factory=Own, num_engines=1)
        try:
            run = Run(engine)
            halted = await run.call(request("long").messages, path=("a",), halt=enough)
            begun = asyncio.Event()
            task = asyncio.ensure_future(engine.generate(request("long"), lambda *a, **b: begun.set()))
            await begun.wait()
            task.cancel()
            before = asyncio.get_running_loop().time()
            with pytest.raises(asyncio.CancelledError):
                await task
            took = asyncio.get_running_loop().time() - before
            return halted, (await engine.generate(request("cancelled"))).text, took
        finally:
            await engine.close()

    halted, cancelled, took = asyncio.run(main())
    assert (halted.finish, halted.usage.completion, len(halted.text.split())) == ("halted", 33, 33)
    assert cancelled == "2" and took < 0.5  # it would have written for a second


class Notes(list[tuple[int, bool]]):
    """Keeps the reports of a call: tokens, and whether it began again."""

    def __init__(self) -> None:
        self.begun = asyncio.Event()

    def __call__(self, text: str, tokens: int, confidence: Any = (), *, restart: bool = False) -> None:
        self.append((tokens, restart))
        self.begun.set()


@pytest.mark.full
def test_a_dead_actors_calls_are_asked_again_elsewhere(ray: Any) -> None:
    """First with another to go on with, then with none."""

    async def main() -> tuple[Completion, Notes]:
        engine, notes, last = RayEngine(factory=Own, restarts=0), Notes(), Notes()
        try:
            task = asyncio.ensure_future(engine.generate(request("long", seed=7), notes))
            await notes.begun.wait()
            first = busy(engine)
            kill(engine, first)
            completion = await task
            task = asyncio.ensure_future(engine.generate(request("long"), last))
            await last.begun.wait()
            assert busy(engine) == 1 - first
            kill(engine, 1 - first)
            with pytest.raises(EngineError, match=r"no engine is left: engine 0 \(process \d+ on .*killed.*; engine 1"):
                await task
            return completion, notes
        finally:
            await engine.close()

    completion, notes = asyncio.run(main())
    expected = asyncio.run(Own().generate(request("long", seed=7)))
    assert completion.text.split()[1:] == expected.text.split()[1:]
    assert completion.usage.completion == expected.usage.completion
    (place,) = [place for place, (_, restart) in enumerate(notes) if restart]
    lost = notes[place][0]
    assert completion.usage.wasted == lost > 0
    assert notes == [(k + 1, False) for k in range(lost)] + [(lost, True)] + [
        (lost + k + 1, False) for k in range(expected.usage.completion)
    ]


@pytest.mark.full
def test_a_call_that_kills_engines_is_given_up(ray: Any) -> None:
    async def main() -> Completion:
        engine = RayEngine(factory=Own, num_engines=1, restarts=3)
        try:
            with pytest.raises(EngineError, match=r"under way on 3 engines that died; the last: .*engine 0 \(process"):
                await engine.generate(request("poison"))
            return await engine.generate(request("a"))
        finally:
            await engine.close()

    assert asyncio.run(main()).text


@pytest.mark.full
def test_an_actor_is_started_anew_and_calls_wait_for_it(ray: Any) -> None:
    async def main() -> tuple[Completion, Completion]:
        engine = RayEngine(factory=Own, num_engines=1, restarts=1)
        try:
            first = await engine.generate(request("a"))
            os.kill(processes([first])[0], signal.SIGKILL)
            return first, await engine.generate(request("a"))
        finally:
            await engine.close()

    first, second = asyncio.run(main())
    assert processes([first]) != processes([second]) and first.text.split()[1:] == second.text.split()[1:]


@pytest.mark.full
def test_closing_ends_calls_and_actors(ray: Any) -> None:
    async def main() -> None:
        engine, notes = RayEngine(factory=Own, num_engines=1, restarts=3), Notes()
        task = asyncio.ensure_future(engine.generate(request("long"), notes))
        await notes.begun.wait()
        await engine.close()
        with pytest.raises(EngineError, match="closed while this call was under way"):
            await task

    asyncio.run(main())
    assert asyncio.run(one_of_each(2)) == 2  # the cores are free again


async def one_of_each(num: int) -> int:
    engine = RayEngine(factory=Own, num_engines=num, start_seconds=60)
    try:
        completions = await asyncio.gather(*(engine.generate(request(f"{k}")) for k in range(num)))
        return len(set(processes(completions)))
    finally:
        await engine.close()


@pytest.mark.full
def test_one_engine_is_asked_from_several_loops(ray: Any) -> None:
    engine = RayEngine(factory=Own, num_engines=1)
    texts = [asyncio.run(engine.generate(request("a"))).text for _ in range(2)]
    asyncio.run(engine.close())
    assert texts[0] == texts[1]


# --- an evaluation ----------------------------------------------------------------------------------------------------


@pytest.mark.full
def test_problems_survive_the_death_of_an_engine(ray: Any) -> None:
    """The zoo's model in float64, voting: the same answers as from one engine, each problem once."""
    import torch

    from partsong.evals.reasoning.problem import Problem
    from partsong.evals.reasoning.suite import evaluate
    from partsong.reasoning.local import LocalEngine
    from partsong_zoo.sums import answer_of, check, draw

    drawn = [draw("sum", random.Random(seed), fresh=True) for seed in range(50)]
    problems = [
        Problem(
            task="sums", number=k, question=one.question, gold=str(answer_of(one.solution)), extract=answer_of,
            check=lambda answer, question=one.question: answer is not None and check(question, answer),
        )
        for k, one in enumerate(drawn)
    ]  # fmt: skip
    num, strategies = len(problems), {"vote": parse_thinking("self-consistency:num=4,early_stop=false")}
    given: dict[str, Any] = {"seed": 3, "parameters": Parameters(max_tokens=80), "together": 8}

    async def alone() -> list[Any]:
        engine = LocalEngine("sums", dtype=torch.float64)
        try:
            return await evaluate(problems, strategies, engine, **given)
        finally:
            await engine.close()

    async def spread() -> tuple[list[Any], list[Any]]:
        engine, reported = RayEngine("sums", dtype="float64", restarts=0), list[Any]()

        def note(outcome: Any) -> None:
            reported.append(outcome)
            if len(reported) == num // 3:
                kill(engine, 0)

        try:
            return await evaluate(problems, strategies, engine, on_outcome=note, **given), reported
        finally:
            await engine.close()

    outcomes, reported = asyncio.run(spread())
    expected = asyncio.run(alone())
    assert len({one.key for one in reported}) == num == len(reported)
    assert [(x.key, x.answer, x.right) for x in outcomes] == [(x.key, x.answer, x.right) for x in expected]
    assert [one.counts["tokens_total"] for one in outcomes] == [one.counts["tokens_total"] for one in expected]
    assert 0 < sum(one.right for one in outcomes) < num
