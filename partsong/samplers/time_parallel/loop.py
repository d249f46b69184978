"""Runs the loops of `TimeParallel` and `DraftedSteps`: learns a pipeline's steps, then solves for several at once."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from partsong.errors import UnsupportedError
from partsong.parallel import Plan
from partsong.parallel.hooks.replaced_method import Method, replace_method
from partsong.parallel.ranks.agreement import AGREED_STEPS
from partsong.parallel.ranks.collectives import agree, all_gather
from partsong.samplers.denoising.drafts import drafts
from partsong.samplers.denoising.fixed_point import Evaluate, Solution, SolverStep, picard
from partsong.samplers.pipeline.paused import PausedCall
from partsong.samplers.pipeline.plan_call import call_pipeline, refuse_arguments
from partsong.samplers.time_parallel.rehearsal import Findings, Rehearsal
from partsong.samplers.time_parallel.rehearse import rehearse
from partsong.samplers.time_parallel.strategy import DraftedSteps, TimeParallel, TimePoints

__all__ = ["Solve", "drafted_steps", "solve_over_time", "time_parallel"]

#: Solves for a trajectory, from the model, the first points and the steps.
Solve = Callable[[Evaluate, Tensor, Sequence[SolverStep]], Solution]
_NO_CALLBACK = "several steps are made at a time, and their latents change until they settle; leave it out"
_REFUSED = {"callback_on_step_end": _NO_CALLBACK, "callback": _NO_CALLBACK}


def time_parallel(plan: Plan, strategy: TimeParallel, **arguments: Any) -> Any:
    """Samples with `TimeParallel`; see `StrategyRow.loop`.

    Raises:
        UnsupportedError: the pipeline's step is not a sum, or a callback was given.

    Source: ParaDiGMS, arXiv 2305.16317.
    """

    def solve(evaluate: Evaluate, start: Tensor, rules: Sequence[SolverStep]) -> Solution:
        return picard(evaluate, start, rules, window=strategy.window, tolerance=strategy.tolerance, bundles=True)

    return solve_over_time(plan, arguments, solve)


def drafted_steps(plan: Plan, strategy: DraftedSteps, **arguments: Any) -> Any:
    """Samples with `DraftedSteps`; see `StrategyRow.loop`.

    Raises:
        UnsupportedError: as `time_parallel`.

    Source: DRiffusion, arXiv 2603.25872.
    """

    def solve(evaluate: Evaluate, start: Tensor, rules: Sequence[SolverStep]) -> Solution:
        if strategy.check is None:
            return drafts(evaluate, start, rules, num=strategy.depth, warmup=strategy.warmup_steps)
        return picard(evaluate, start, rules, window=strategy.depth, tolerance=strategy.check, bundles=True)

    return solve_over_time(plan, arguments, solve)


@torch.no_grad()
def solve_over_time(plan: Plan, arguments: dict[str, Any], solve: Solve) -> Any:
    """Calls a pipeline whose trajectory a function solves for.

    Args:
        plan: with `TimeParallel` or `DraftedSteps`; its ranks evaluate the points.
        arguments: of the pipeline's call.
        solve: returns the solution. A sample of it is a bundle: all pictures of the call. Pipelines that read more of
            their scheduler's last step than the latents need `Solution.last`.

    Raises:
        UnsupportedError: the pipeline's step is not a sum, or a callback was given.
    """
    adapter = plan.denoisers[0].adapter
    assert plan.loop is not None
    if (reason := plan.loop.refuses(adapter)) is not None:  # one rank samples with this loop too
        raise UnsupportedError(f"{type(plan.loop).__name__} on {adapter.model}: {reason}")
    refuse_arguments(arguments, _REFUSED)
    plan.begin_loop()
    with ExitStack() as stack, plan.looping():
        rehearsal = _rehearsed(plan, arguments, stack)
        points = _Points(plan, rehearsal)
        points.share_numbers()
        # A batch is one bundle of samples that move together: a call of the model has all of them.
        solution = solve(points.evaluate, rehearsal.start[None], rehearsal.rules)
        points.rounds.residual = solution.residual
        plan.clock.step = plan.clock.num_steps = solution.rounds
        if solution.last is None:
            return rehearsal.finish((solution.sample[0],))
        latents, prediction, carried = solution.last[0]
        shape = rehearsal.start.shape  # without the dimension of bundles
        return rehearsal.finish(rehearsal.rules[-1].results(latents.view(shape), prediction.view(shape), carried))


def _rehearsed(plan: Plan, arguments: dict[str, Any], stack: ExitStack) -> Rehearsal:
    """Learns the steps of a call, on two different sets of random numbers."""
    denoiser = plan.denoisers[0]
    key, prompts = denoiser.adapter.sample, list[Any]()

    branches = itertools.count()

    def first(named: dict[str, Any]) -> Any:
        plan.clock.step, plan.clock.branch = 0, next(branches)
        denoiser.begin_call(named, 0)
        return denoiser.module(**named)

    rounds = _points_of(plan)
    rounds.generations += 1
    seed = 2 * rounds.generations  # other random numbers than in the previous generation
    call = stack.enter_context(call_pipeline(plan, arguments))
    _keep_prompts(call, prompts)
    rehearsal = rehearse(call, key, first, seed=seed)
    if rehearsal.is_over:  # it makes fewer steps than its scheduler has, unpredictably
        num_steps, call = len(rehearsal.steps), stack.enter_context(call_pipeline(plan, arguments))
        answers = iter(rehearsal.outputs)
        rehearsal = rehearse(call, key, lambda named: next(answers), seed=seed, num_steps=num_steps)
        if rehearsal.is_over:
            raise UnsupportedError(f"{type(call.pipe).__name__} ends without a last step; use another strategy")
    findings = Findings.of(rehearsal)
    # All ranks rehearse again if one has to: a rehearsal may make collective calls.
    known = agree(denoiser.everyone, [float(findings.are_those_of(rounds.findings))], name="what steps are")
    if not all(row[0] for row in known):
        again = stack.enter_context(call_pipeline(plan, arguments, decodes=False, shows_progress=False))
        _give_prompts(again, prompts)
        answers, num_steps = iter(rehearsal.outputs), len(rehearsal.steps)
        other = rehearse(again, key, lambda named: next(answers), seed=seed + 1, num_steps=num_steps)
        findings.check_same(Findings.of(other), type(call.pipe).__name__)
        again.close()
    rounds.findings = findings
    for number, step in enumerate(rehearsal.steps[1:AGREED_STEPS], 1):
        denoiser.begin_call(step.calls[0].arguments, number)
    return rehearsal


def _keep_prompts(call: PausedCall, prompts: list[Any]) -> None:
    """Keeps the prompts that a call encodes, for another one."""
    if not hasattr(call.pipe, "encode_prompt"):
        return

    def keep(method: Method) -> Method:
        def encode(*args: Any, **named: Any) -> Any:
            prompts.append(method(*args, **named))
            return prompts[-1]

        return encode

    replace_method(call.pipe, "encode_prompt", keep)


def _give_prompts(call: PausedCall, prompts: Sequence[Any]) -> None:
    """Gives a call the prompts that another one encoded."""
    if prompts:
        ready = iter(prompts)
        replace_method(call.pipe, "encode_prompt", lambda method: lambda *_, **__: next(ready))


def _points_of(plan: Plan) -> TimePoints:
    assert isinstance(plan.rounds, TimePoints)
    return plan.rounds


class _Points:
    """Evaluates the points of a round, each on its rank."""

    def __init__(self, plan: Plan, rehearsal: Rehearsal) -> None:
        self.plan, self.rehearsal, self.denoiser = plan, rehearsal, plan.denoisers[0]
        self.rounds = _points_of(plan)
        self.axis = self.rounds.axis
        self.rounds.begin(len(rehearsal.steps), rehearsal.start.nbytes)
        self._note_calls()

    def _note_calls(self) -> None:
        """Notes the calls of every step, from which the bytes of its evaluations follow."""
        steps = [[call.arguments for call in step.calls] for step in self.rehearsal.steps]
        # Every rank has made the calls of the first step, and any additional calls of later ones.
        steps[0] = [next(step[b] for step in steps if len(step) > b) for b in range(len(self.rehearsal.outputs))]
        for number, arguments in enumerate(steps):
            self._note_step(number, arguments, is_shared=number > 0 and self._are_shared(arguments))

    def _note_step(self, number: int, arguments: Sequence[dict[str, Any]], *, is_shared: bool) -> None:
        seen = self.denoiser.seen
        for branch, named in enumerate(arguments):
            seen.note_call(named[self.rehearsal.key], self.rehearsal.outputs[branch], branch)
            shared, is_split = len(arguments) if is_shared and branch == 0 else 0, self.denoiser.splits(named)
            seen.note_work(number, branch, is_split=is_split, branches=shared, was_ready=is_shared)

    def _are_shared(self, arguments: Sequence[dict[str, Any]]) -> bool:
        """Says whether ranks share the calls of a step as branches of guidance, rather than the samples of each."""
        return self.denoiser.guidance.is_shared(arguments) and not any(map(self.denoiser.splits, arguments))

    def share_numbers(self) -> None:
        """Sends every rank the numbers that the first one learned: their last bits may differ."""
        table = agree(self.denoiser.everyone, self.rehearsal.numbers, name="numbers of the rehearsed steps")
        self.rehearsal.numbers = table[0]
        self.rounds.number_bytes = 8 * (1 + len(table[0]))

    def evaluate(self, points: Tensor, numbers: list[int], samples: list[int]) -> Tensor:
        """Returns the predictions at some points, `[points, ...]`, on every rank; see `Evaluate`."""
        num, first = len(points), not self.rounds.rounds
        self.rounds.rounds.append(numbers)
        self.plan.clock.step = len(self.rounds.rounds) - 1
        dealt = [self.rounds.points_of(rank, num) for rank in range(self.axis.size)]
        buffer = torch.empty_like(points)
        rows = dict(zip(itertools.chain(*dealt), buffer, strict=True))
        # Each point has one owner: two ranks that evaluate the same point may round differently and diverge.
        for place in dealt[self.axis.index]:
            rows[place].copy_(self._known() if first else self._prediction(points[place], numbers[place]))
        all_gather(self.axis, buffer, [len(each) for each in dealt], name="predictions at points in time").wait()
        self.plan.close_record()
        return torch.stack([rows[place] for place in range(num)])

    def _known(self) -> Tensor:
        """Returns the prediction at the start, which was evaluated to learn the steps."""
        return self.rehearsal.prediction(0, self.rehearsal.start, self.rehearsal.outputs)

    def _prediction(self, latents: Tensor, step: int) -> Tensor:
        arguments = [self.rehearsal.arguments(call, latents) for call in self.rehearsal.steps[step].calls]
        if self._are_shared(arguments):
            outputs = self.denoiser.guidance.share(self.denoiser.module, arguments)
        else:
            outputs = [self._output(branch, named) for branch, named in enumerate(arguments)]
        return self.rehearsal.prediction(step, latents, outputs)

    def _output(self, branch: int, named: dict[str, Any]) -> Any:
        self.plan.clock.branch = branch
        return self.denoiser.module(**named)
