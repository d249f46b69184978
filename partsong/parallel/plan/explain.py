"""Predicts what a plan splits and moves from shapes alone; the ledger counts the same bytes when they are sent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from partsong.parallel.attention_call import TOKEN_AXES
from partsong.parallel.plan.control import ControlNet
from partsong.parallel.plan.denoiser import Denoiser
from partsong.parallel.plan.seen import DenoiserCall, ModelRun, Seen
from partsong.parallel.plan.state import PlanState
from partsong.parallel.ranks.agreement import AGREED_STEPS, NUMBERS_PER_VALUE
from partsong.parallel.ranks.mesh import AXES
from partsong.parallel.ranks.noise import SHAPE_NUMBERS
from partsong.parallel.ranks.shards import split_sizes
from partsong.parallel.strategy import Coder, Cut, Rounds, Strategy

__all__ = ["Explanation", "bytes_by_step", "explain"]

#: Mesh axes over which a model's input, its layers or its parts are cut.
_CUT_AXES = ("expert", "pipe", "stage", "clip", *TOKEN_AXES)


@dataclass(frozen=True, slots=True)
class Explanation:
    """Says what a plan splits, keeps stale, rounds and moves.

    Attributes:
        kind: ``exact``, ``bounded`` or ``approximate``.
        split: what is cut, one line per mesh axis.
        stale: what is one step old; empty where nothing is.
        rounded: what is sent in fewer bits; empty where nothing is.
        kept: what is kept between calls and how much memory it takes, where a strategy leaves a choice.
        bytes_by_step: for each step of a generation, the bytes each rank sends.
        bytes_once: bytes each rank sends once per generation.
    """

    kind: str
    split: tuple[str, ...]
    stale: tuple[str, ...]
    rounded: tuple[str, ...]
    kept: tuple[str, ...]
    bytes_by_step: tuple[tuple[int, ...], ...]
    bytes_once: tuple[int, ...]

    @property
    def bytes_per_step(self) -> list[int]:
        """Returns the bytes each rank sends in a step in the middle of a generation."""
        return list(self.bytes_by_step[len(self.bytes_by_step) // 2])

    def bytes_total(self) -> list[int]:
        """Returns the bytes each rank sends in the whole generation."""
        in_steps = map(sum, zip(*self.bytes_by_step, strict=True))
        return [once + steps for once, steps in zip(self.bytes_once, in_steps, strict=True)]

    def __str__(self) -> str:
        lines = [f"{self.kind}; {len(self.bytes_by_step)} steps", *(f"  split: {line}" for line in self.split)]
        lines += [f"  stale: {line}" for line in self.stale]
        lines += [f"  rounded: {line}" for line in self.rounded]
        lines += [f"  kept: {line}" for line in self.kept]
        for rank, sent in enumerate(self.bytes_per_step):
            lines.append(f"  rank {rank} sends {sent:,} bytes per step, {self.bytes_total()[rank]:,} in all")
        return "\n".join(lines)


def explain(
    plan: PlanState, denoisers: Sequence[Denoiser], coders: Sequence[Coder], controlnets: Sequence[ControlNet]
) -> Explanation:
    """Predicts, for the shapes that were seen last, what a plan moves.

    Args:
        plan: strategies on a mesh.
        denoisers: the models they are attached to.
        coders: their work on the autoencoder and the text encoders.
        controlnets: the ControlNets that are cut like the denoisers.
    """
    return _Account(plan, denoisers, coders, controlnets).explanation()


def bytes_by_step(
    plan: PlanState, denoisers: Sequence[Denoiser], controlnets: Sequence[ControlNet], steps: int
) -> list[tuple[int, ...]]:
    """Predicts the bytes each rank sends in the first steps of the current generation."""
    return _Account(plan, denoisers, (), controlnets).by_step(steps)


class _Account:
    def __init__(
        self, plan: PlanState, denoisers: Sequence[Denoiser], coders: Sequence[Coder], controlnets: Sequence[ControlNet]
    ) -> None:
        self.plan, self.denoisers, self.coders, self.controlnets = plan, denoisers, coders, controlnets
        self.degrees, self.world_size = plan.mesh.degrees, plan.mesh.world_size

    def explanation(self) -> Explanation:
        clock = self.plan.clock
        steps = clock.step + 1 if clock.steps_made is None else clock.steps_made
        ranks = range(self.world_size)
        kept = [None if self.plan.rounds is None else self.plan.rounds.kept()]
        kept += [denoiser.cut.kept() for denoiser in self.denoisers if denoiser.cut is not None]
        kept += [denoiser.shards.kept() for denoiser in self.denoisers if denoiser.shards is not None]
        kept += [stage.kept() for denoiser in self.denoisers for stage in denoiser.stages]
        return Explanation(
            kind=self.plan.kind,
            split=tuple(self.split_lines()),
            stale=tuple(line for strategy in self.used() if (line := strategy.stale()) is not None),
            rounded=tuple(line for strategy in self.used() if (line := strategy.rounded()) is not None),
            kept=tuple(line for line in kept if line is not None),
            bytes_by_step=(*self.plan.finished, *self.by_step(steps)),
            bytes_once=tuple(self.once_bytes(rank) for rank in ranks),
        )

    def by_step(self, steps: int) -> list[tuple[int, ...]]:
        ranks = range(self.world_size)
        return [tuple(self.step_bytes(step, rank) for rank in ranks) for step in range(steps)]

    def place(self, rank: int, *axes: str) -> int:
        """Returns the index of a rank along flattened axes; ranks count through the mesh with the last axis fastest."""
        stride, index, scale = 1, 0, 1
        for axis in reversed(AXES):
            if axis in axes:
                index += rank // stride % self.degrees[axis] * scale
                scale *= self.degrees[axis]
            stride *= self.degrees[axis]
        return index

    def step_bytes(self, step: int, rank: int) -> int:
        agreement = 8 * NUMBERS_PER_VALUE * (self.world_size - 1)
        total = sum(self.control_bytes(net, step, rank, agreement) for net in self.controlnets)
        for denoiser in self.denoisers:
            if denoiser.seen.known:
                total += self.denoiser_bytes(denoiser, step, rank, agreement)
        return total

    def denoiser_bytes(self, denoiser: Denoiser, step: int, rank: int, agreement: int) -> int:
        if self.plan.rounds is not None:
            # All arguments are compared before the first round.
            compared = 0 if step else len(denoiser.seen.steps) * len(denoiser.compared)
            return self.round_bytes(denoiser, self.plan.rounds, step, rank) + agreement * compared
        called = self.called_in(denoiser)
        if step not in called:
            return 0
        compared = len(denoiser.compared) if called.index(step) < AGREED_STEPS else int(self.plan.loop is None)
        return self.calls_bytes(denoiser, step, step, rank) + agreement * compared

    def round_bytes(self, denoiser: Denoiser, rounds: Rounds, number: int, rank: int) -> int:
        """Counts what a rank sends in one round of a loop that takes several steps at a time."""
        index = self.place(rank, "time")
        in_calls = sum(self.calls_bytes(denoiser, each, number, rank) for each in rounds.steps_of(number, index))
        return in_calls + rounds.predict(number, index)

    def called_in(self, denoiser: Denoiser) -> list[int]:
        """Lists the steps a denoiser is called in; future steps count for the one that was called last."""
        last = {id(each): max(each.seen.steps, default=-1) for each in self.denoisers}
        done = max(last.values())
        ahead = range(done + 1, self.plan.clock.steps_made or 0) if last[id(denoiser)] == done else ()
        return sorted({*denoiser.seen.steps, *ahead})

    def calls_bytes(self, denoiser: Denoiser, like: int, step: int, rank: int) -> int:
        """Counts what a rank sends in a step for calls like those of some step."""
        calls = denoiser.seen.calls_of(like, denoiser.guidance.works)
        return sum(self.call_bytes(denoiser, call, step, rank) for call in calls)

    def call_bytes(self, denoiser: Denoiser, call: DenoiserCall, step: int, rank: int) -> int:
        place = self.place(rank, *TOKEN_AXES)
        if call.is_split:
            index = self.place(rank, "data", "cfg")
            gathered = denoiser.batch.predict(call.sample_bytes, call.batch, index)
            local = max(1, split_sizes(call.batch, denoiser.batch.axis.size)[index])
            decided = sum(attachment.predict(step, local, place) for attachment in denoiser.attachments)
            return decided + gathered + self.cut_bytes(denoiser, call, 0, step, rank, local)
        decided = sum(attachment.predict(step, call.batch, place) for attachment in denoiser.attachments)
        total = 0
        if call.branches:
            index = self.place(rank, "cfg")
            own = denoiser.guidance.of_rank(call.branches, index)
            total += denoiser.guidance.predict(call.sample_bytes, call.branches, index) + decided * len(own)
            total += sum(self.cut_bytes(denoiser, call, b, step, rank, call.batch) for b in own)
        if not call.was_ready:
            total += decided + self.cut_bytes(denoiser, call, -1, step, rank, call.batch)
        return total

    def cut_bytes(self, denoiser: Denoiser, call: DenoiserCall, branch: int, step: int, rank: int, batch: int) -> int:
        # A denoiser's own first step has nothing stale to read, however late in the generation it comes,
        # and neither has one with another shape than before.
        begins = step in denoiser.seen.changed or step == min(denoiser.seen.steps, default=step)
        tokens, runs = call.tokens[branch], call.runs[branch] or (ModelRun(batch, None),)
        batch = runs[0].samples if call.branches else batch  # branches may differ in their number of samples
        total = 0
        for run in runs:
            # A rank with another share of the batch is assumed to skip the same fraction of it.
            samples = batch * run.samples // runs[0].samples
            if denoiser.cut is not None:
                denoiser.cut.recall(run.notes)
                total += self.forward_bytes(denoiser, denoiser.cut, samples, tokens, (step, begins), rank)
            if denoiser.shards is not None and run.sums is not None:
                place, index = self.place(rank, *_CUT_AXES), self.place(rank, *denoiser.shards.axes)
                total += denoiser.shards.predict(run.sums, samples, place, index)
        return total

    def control_bytes(self, net: ControlNet, step: int, rank: int, agreement: int) -> int:
        total = 0
        for call in net.calls_of(step):
            net.cut.recall(call.notes)
            total += self.forward_bytes(net, net.cut, call.batch, call.tokens, (step, call.begins), rank)
            total += agreement * len(net.adapter.compared) * call.is_compared
        return total

    def forward_bytes(
        self,
        under: Denoiser | ControlNet,
        cut: Cut,
        batch: int,
        tokens: Mapping[str, int],
        step: tuple[int, bool],
        rank: int,
    ) -> int:
        """Counts the bytes a rank sends in one forward of a step (its number, whether nothing earlier fits)."""
        index = self.place(rank, *_CUT_AXES)
        number, begins = step
        when = (0 if begins else number, self.plan.clock.num_steps == number + 1)
        return cut.predict(batch, dict(tokens), _itemsize(under.module), index, when)

    def once_bytes(self, rank: int) -> int:
        seen, peers = self.plan.seen, self.world_size - 1
        total = 8 * SHAPE_NUMBERS * peers * len(seen.latents)
        total += (sum(seen.latents) + seen.state_bytes) * peers if rank == 0 else 0
        total += seen.check_bytes + sum(denoiser.seen.check_bytes for denoiser in self.denoisers)
        total += sum(coder.predict(rank) for coder in self.coders)
        total += sum(stage.bytes_once for under in (*self.denoisers, *self.controlnets) for stage in under.stages)
        size = self.degrees["data"]
        for samples, sample_bytes in seen.decoded:
            index = self.place(rank, "data")
            total += len(range(index, samples, size)) * sample_bytes * (size - 1) if size > 1 else 0
        return total

    def split_lines(self) -> list[str]:
        lines = [line for coder in self.coders for line in coder.describe()]
        seen = next((denoiser.seen for denoiser in self.denoisers if denoiser.seen.known), Seen())
        cut = self.denoisers[0].cut if self.denoisers else None
        shards = self.denoisers[0].shards if self.denoisers else None
        for axis in AXES:
            if self.degrees[axis] > 1 and seen.known:
                pieces = f"{seen.batch} samples, {seen.branches} calls per step"
                parts = [shards.describe()] if shards is not None and shards.axes == (axis,) else []
                parts += [cut.describe(seen.tokens)] if cut is not None and axis in _CUT_AXES else []
                pieces = ", ".join(parts) or pieces
                if self.plan.rounds is not None and axis == self.plan.rounds.axis.name:
                    pieces = self.plan.rounds.describe()
                lines.append(f"{pieces} over {self.degrees[axis]} ranks ({axis}){self.told_shares(axis)}")
        if shards is not None and len(shards.axes) > 1 and seen.known:
            lines.append(f"{shards.describe()} over all {shards.axis.size} ranks")
        lines += [f"the {net.adapter.model} like the model" for net in self.controlnets]
        return lines or ["nothing: one rank"]

    def told_shares(self, axis: str) -> str:
        """Says by which shares an axis is cut, if the mesh has shares."""
        if self.plan.mesh.shares is None:
            return ""
        is_uneven = any(axis in strategy.uneven_axes for strategy in self.plan.strategies if strategy.denoises)
        return (self.plan.mesh.axis(axis).told_shares if is_uneven else "") or " in equal parts"

    def used(self) -> list[Strategy]:
        """Returns the strategies that have ranks, or that need none."""
        return [s for s in self.plan.strategies if any(self.degrees[a] > 1 for a in s.axes) or not s.axes]


def _itemsize(module: nn.Module) -> int:
    return next(p for p in module.parameters() if p.is_floating_point()).element_size()
