"""Parallel-Probe asks growing samples for their present answer, and stops them once most of them agree."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from partsong.errors import ArgumentError
from partsong.knobs import Count
from partsong.reasoning.calls.answer import Answer, Extract
from partsong.reasoning.calls.call import Completion, Message, Parameters
from partsong.reasoning.calls.run import Run
from partsong.reasoning.strategies.knobs import checked
from partsong.reasoning.strategies.parts import Poll, together

__all__ = ["parallel_probe"]


@dataclass(slots=True)
class _Branch:
    """Holds a sample while it grows.

    Attributes:
        number: its own.
        parts: the calls that wrote it.
        asked: what it answered when it was asked last, behind the text so far; None before that.
        vote: the answer it names now.
        against: for how many probes in a row it has named another answer than most.
        is_open: whether it grows on.
    """

    number: int
    parts: list[Completion] = field(default_factory=list)
    asked: Completion | None = None
    vote: str | None = None
    against: int = 0
    is_open: bool = True

    @property
    def text(self) -> str:
        return "".join(part.text for part in self.parts)

    @property
    def length(self) -> int:
        return sum(part.usage.completion for part in self.parts)

    def whole(self, probe: str) -> Completion:
        """Returns what it stands for: its text, with the answer to the last probe where it has not ended."""
        last = self.parts[-1]
        if self.asked is None:
            return replace(last, text=self.text)
        return replace(self.asked, text=self.text + probe + self.asked.text, finish="stop")


@checked
async def parallel_probe(
    run: Run,
    question: str,
    *,
    extract: Extract,
    num: Count = 8,
    interval: Count = 256,
    stable: Count = 2,
    patience: Count = 3,
    warmup: Count = 2,
    probe: str = "\n\nThe final answer is \\boxed{",
    probe_tokens: Count = 32,
    parameters: Parameters | None = None,
) -> Answer:
    r"""Grows `num` samples, asks each every `interval` tokens for its answer, and stops once most agree for long.

    A probe is put behind the text so far and answered in a few tokens, which are then dropped: the sample grows on from
    where it was, and on `LocalEngine` both read the same keys. From the probe number `warmup` on, samples that have
    named another answer than the leading one `patience` times in a row are cut. All end when the same answer has led
    `stable` times in a row. Samples vote with their last answers; those that were cut do not vote. A tie goes to the
    sample of the lowest number.

    The answer need not be the one that all samples would have given in the end; ``stopped`` is ``confident`` then.

    Args:
        run: makes the calls, on an engine that continues an assistant message.
        question: the prompt.
        extract: finds the answer in a text.
        num: samples begun.
        interval: tokens from one probe to the next.
        stable: times in a row that an answer has to lead.
        patience: times in a row that a sample may name another one.
        warmup: the first probe that counts for either.
        probe: text that a sample is asked with. `extract` has to find the answer in what the model makes of it.
        probe_tokens: most tokens of the answer to a probe.
        parameters: how samples are drawn; `max_tokens` counts for a whole sample. Probes take the likeliest tokens.

    Returns:
        The answer. ``details`` hold what those of `self_consistency` hold, and ``cut``, the numbers of the samples that
        were cut, and ``probes``, how often samples were asked.

    Raises:
        ArgumentError: a knob is out of range, `interval` is as long as a whole sample, or the probe is empty.

    Source: Parallel-Probe, arXiv 2602.03845.
    """
    settings = parameters or Parameters()
    if interval >= settings.max_tokens:
        raise ArgumentError(f"interval={interval} of max_tokens={settings.max_tokens}; ask samples before they end")
    if not probe:
        raise ArgumentError("probe=''; use a text that asks for the answer, such as 'The final answer is '")
    rounds = _Rounds(run, question, extract, probe, interval, probe_tokens, settings)
    branches = [_Branch(number) for number in range(num)]
    leaders: list[str | None] = []
    cut: list[int] = []
    stopped = "done"
    while any(branch.is_open for branch in branches):
        if not await rounds.go_on(branches):
            stopped = "budget"
            break
        leaders.append(_leader(branches, cut))
        if len(leaders) >= warmup:
            open_ = [branch for branch in branches if branch.is_open]
            if open_ and _leads_for(leaders[warmup - 1 :], stable):
                stopped = "confident"
                break
            cut += _cut(open_, leaders[-1], patience)
    poll = Poll(num, extract)
    for branch in branches:
        if branch.parts and branch.number not in cut:
            poll.count(branch.number, branch.whole(probe))
    return poll.answer(run, stopped, cut=cut, probes=len(leaders))


@dataclass(slots=True)
class _Rounds:
    """Makes the calls of every round: a part of each open sample, and a probe of those that have not ended."""

    run: Run
    question: str
    extract: Extract
    probe: str
    interval: int
    probe_tokens: int
    settings: Parameters
    place: int = 0
    waits: tuple[str, ...] = ()

    async def go_on(self, branches: Sequence[_Branch]) -> bool:
        """Makes the calls of a round; returns whether the budget was enough."""
        growing = [branch for branch in branches if branch.is_open]
        parts = await together(self._grow(branch) for branch in growing)
        for branch, part in zip(growing, parts, strict=True):
            self._take(branch, part)
        open_ = [branch for branch in growing if branch.is_open]
        answers = await together(self._ask(branch) for branch in open_)
        for branch, answer in zip(open_, answers, strict=True):
            if answer is not None:
                branch.asked = answer
                branch.vote = self.extract(branch.whole(self.probe).text)
        self.place += 1
        self.waits = tuple(done.source for done in (*parts, *answers) if done is not None)
        return None not in parts and None not in answers

    async def _grow(self, branch: _Branch) -> Completion:
        limits = replace(self.settings, max_tokens=min(self.interval, self.settings.max_tokens - branch.length))
        path = ("grow", f"{self.place}")
        return await self.run.call(
            self._chat(branch), path=path, sample=branch.number, parameters=limits, waits=self.waits
        )

    async def _ask(self, branch: _Branch) -> Completion:
        limits = replace(self.settings, max_tokens=self.probe_tokens, temperature=0.0, logprobs=0)
        path, chat = ("probe", f"{self.place}"), self._chat(branch, self.probe)
        return await self.run.call(chat, path=path, sample=branch.number, parameters=limits)

    def _chat(self, branch: _Branch, *behind: str) -> list[Message]:
        begun = (*(part.piece for part in branch.parts), *behind)
        return [Message("user", (self.question,)), *([Message("assistant", begun)] if begun else [])]

    def _take(self, branch: _Branch, part: Completion | None) -> None:
        """Adds what a sample has written; one that has ended names its answer for good."""
        if part is None:
            return
        branch.parts.append(part)
        branch.is_open = part.finish == "length" and branch.length < self.settings.max_tokens
        if not branch.is_open:
            branch.asked = None
            branch.vote = self.extract(branch.text) if part.finish == "stop" else None


def _leader(branches: Sequence[_Branch], cut: Sequence[int]) -> str | None:
    """Returns the answer that most samples name now, of equal ones that of the lowest number."""
    votes = Counter(branch.vote for branch in branches if branch.vote is not None and branch.number not in cut)
    return max(votes, key=lambda vote: votes[vote]) if votes else None


def _leads_for(leaders: Sequence[str | None], times: int) -> bool:
    last = leaders[-times:]
    return len(last) == times and last[-1] is not None and len({*last}) == 1


def _cut(open_: Sequence[_Branch], leader: str | None, patience: int) -> list[int]:
    """Ends the samples that have named another answer than most for too long; returns their numbers."""
    for branch in open_:
        branch.against = branch.against + 1 if branch.vote not in (None, leader) else 0
        branch.is_open = branch.against < patience
    return [branch.number for branch in open_ if not branch.is_open]
