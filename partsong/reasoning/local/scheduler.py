"""Decides which calls are in the batch: they join, share what they can, draw their tokens and leave."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from partsong.kernels.keyed_draw import draw
from partsong.kernels.no_token import NOT_A_NUMBER, why_no_token
from partsong.kernels.speculation.draft import DraftTree
from partsong.kernels.speculation.match import Match, follow, node_draws
from partsong.kernels.speculation.speculator import Speculator
from partsong.reasoning.calls.call import Completion
from partsong.reasoning.calls.engine import EngineError
from partsong.reasoning.local.batch import Batch, BatchOutput
from partsong.reasoning.local.batch_feed import BatchRow
from partsong.reasoning.local.model import LocalModel
from partsong.reasoning.local.prefix_node import PrefixNode
from partsong.reasoning.local.prefix_tree import PrefixTree, common_length
from partsong.reasoning.local.ticket import Ticket
from partsong.reasoning.threads.layout import TokenRun, Tokens

__all__ = ["SchedulerReport", "Scheduler"]

#: Answers shorter than this are not kept for later prompts.
_WORTH_KEEPING = 16


class SchedulerReport(NamedTuple):
    """Reports what a turn did for a call.

    Attributes:
        ticket: the call.
        text: the new text.
        tokens: how many tokens are drawn so far.
        confidence: that of the token drawn in this turn, if requested.
        ended: whether the engine is done with the call.
        completion: the result of a call that ended by itself; None for one that was cancelled or failed.
        error: why it failed.
    """

    ticket: Ticket
    text: str = ""
    tokens: int = 0
    confidence: tuple[float, ...] = ()
    ended: bool = False
    completion: Completion | None = None
    error: EngineError | None = None


@dataclass(slots=True, eq=False, kw_only=True)
class _CallRow(BatchRow):
    """Describes the row of a call.

    Attributes:
        ticket: whose answer it writes.
    """

    ticket: Ticket


class Scheduler:
    """Batches calls continuously (Yu et al., "Orca", OSDI 2022) over a tree of shared prompts.

    Args:
        model: the model that computes.
        max_rows: how many branches are written together.
        prefill_chunk: how many tokens of prompts are computed beside the rows in a step, so that these do not wait.
        kept_tokens: how many tokens keep their keys after use.
        speculator: guesses tokens that a step then verifies. Default: a step computes one token of every row.
    """

    def __init__(
        self,
        model: LocalModel,
        *,
        max_rows: int,
        prefill_chunk: int,
        kept_tokens: int,
        speculator: Speculator | None = None,
    ) -> None:
        self.model, self.max_rows, self.prefill_chunk = model, max_rows, prefill_chunk
        self.kept_tokens, self.speculator = kept_tokens, speculator or Speculator()
        self.waiting: deque[Ticket] = deque()
        self._held: list[tuple[Ticket, PrefixNode]] = []
        self._pending: list[PrefixNode] = []
        self.reset()

    def reset(self) -> None:
        """Forgets all calls and keys."""
        model = self.model
        self.speculator.reset()
        self.batch: Batch[_CallRow] = Batch(model)
        self.tree = PrefixTree(model.room_for, self.kept_tokens, self.batch.note_cut)
        self.waiting.clear()
        self._held.clear()
        self._pending.clear()

    @property
    def tickets(self) -> list[Ticket]:
        """Lists all calls that have not ended."""
        return [*self.waiting, *(ticket for ticket, _ in self._held), *(row.ticket for row in self.batch.rows)]

    def turn(self) -> list[SchedulerReport]:
        """Removes cancelled calls, admits new ones, computes one step, and draws a token for every row."""
        news = self._let_go()
        self._let_in()
        chunks = self._plan()
        output: BatchOutput | None = None
        rows = list(self.batch.rows)
        # The token that plain decoding would draw in this step needs no guess.
        rooms = [row.ticket.max_tokens - len(row.ticket.answer) - 1 for row in rows]
        drafts = self.speculator.propose(rows, rooms)
        if rows or chunks:
            guesses = self.speculator
            output = self.batch.forward(chunks, drafts, layers=guesses.layers, masks=guesses.masks)
            self._note(chunks, output)
        self._pending = [node for node in self._pending if not node.complete]
        ready = [(ticket, node) for ticket, node in self._held if node.complete and node.logits is not None]
        drawn = self._draw(rows, drafts, output, ready)
        self._held = [held for held in self._held if held not in ready]
        self.tree.trim()
        return news + drawn

    def _note(self, chunks: Sequence[tuple[PrefixNode, int]], output: BatchOutput) -> None:
        """Notes which parts of prompts were computed."""
        for place, ((node, count), end) in enumerate(zip(chunks, output.ends, strict=True)):
            if output.read and self.speculator.reads_prompts:
                node.take_states(output.read[place])
            node.done += count
            if end is not None:
                node.logits = end
                node.ahead = output.ahead[place].clone() if output.ahead else None

    # --- coming and going ---------------------------------------------------------------------------------------------

    def _let_go(self) -> list[SchedulerReport]:
        """Ends the cancelled calls."""
        gone = [ticket for ticket in self.tickets if ticket.cancelled]
        if not gone:
            return []
        self.waiting = deque(ticket for ticket in self.waiting if not ticket.cancelled)
        for row in [row for row in self.batch.rows if row.ticket.cancelled]:
            self._leave(row)
        for ticket, node in [held for held in self._held if held[0].cancelled]:
            self._held.remove((ticket, node))
            node.users -= 1
            self._forget(node)
        return [SchedulerReport(ticket, tokens=len(ticket.answer), ended=True) for ticket in gone]

    def _join(self, row: _CallRow, ahead: Tensor | None = None) -> None:
        self.batch.join(row)
        before = row.leaf.states_before() if self.speculator.reads_prompts else None
        self.speculator.join(row, row.ticket.draft_text(), ahead, before)

    def _leave(self, row: _CallRow) -> None:
        self.speculator.leave(row)
        self.batch.leave(row)

    def _forget(self, node: PrefixNode | None) -> None:
        """Drops prompts without waiting calls that are not computed yet."""
        while node is not None and node.parent is not None:
            if node.users or node.children or (node.complete and not node.joined):
                return
            if node in self._pending:
                self._pending.remove(node)
            parent, threads = node.parent, node.joined
            self.tree.drop(node)
            for thread in threads:
                # The walk up from there may reach the parent first.
                self._forget(thread)
            node = parent

    def _let_in(self) -> None:
        while self.waiting and len(self.batch.rows) + len(self._held) < self.max_rows:
            self._place(self.waiting[0])
            self.waiting.popleft()

    def _place(self, ticket: Ticket) -> None:
        node, ticket.cached = self._walk(ticket.prompt.parts, self.tree.root, 0, 1 if ticket.prompt.goes_on else None)
        if node.complete and node.logits is None:
            # The keys are there, but not the logits: the last token is fed once more, as a row's own.
            ticket.cached -= 1
            assert node.parent is not None
            leaf = node.parent if len(node.tokens) == 1 else self.tree.cut(node, len(node.tokens) - 1)
            self._join(_CallRow(leaf=leaf, next_token=node.tokens[-1], mark=node.mark, ticket=ticket))
            return
        node.users += 1
        self._held.append((ticket, node))
        if not node.complete:
            node.needs_logits = True
            if node not in self._pending:
                self._pending.append(node)

    def _walk(self, parts: Tokens, node: PrefixNode, mark: int, least: int | None) -> tuple[PrefixNode, int]:
        """Finds the node that ends a text of threads that begins after a node; also counts the tokens known before."""
        cached, run = 0, list[int]()
        for part in (*parts, None):
            if isinstance(part, TokenRun):
                run += part.tokens
                continue
            if run:
                node, known = self.tree.place(run, node, mark=mark, least=least)
                cached, run = cached + known, []
            if part is None or part.apart:
                continue
            threads = [self._walk(thread, node, part.mark(i) or mark, least) for i, thread in enumerate(part.threads)]
            cached += sum(known for _, known in threads)
            ends = [end for end, _ in threads]
            node = ends[0] if len(ends) == 1 else self.tree.join(node, ends)
        return node, cached

    def _plan(self) -> list[tuple[PrefixNode, int]]:
        """Decides which tokens of which prompts are computed in this step, first come first served."""
        left, plan, planned = self.prefill_chunk, list[tuple[PrefixNode, int]](), set[int]()
        for pending in self._pending:
            for node in pending.chain():
                if node.complete or id(node) in planned:
                    continue
                count = min(len(node.tokens) - node.done, left)
                if not count:
                    return plan
                plan.append((node, count))
                planned.add(id(node))
                left -= count
                if node.done + count < len(node.tokens):
                    return plan
        return plan

    # --- tokens -------------------------------------------------------------------------------------------------------

    def _draw(
        self,
        rows: list[_CallRow],
        drafts: Sequence[DraftTree],
        output: BatchOutput | None,
        ready: list[tuple[Ticket, PrefixNode]],
    ) -> list[SchedulerReport]:
        first = [node.logits for _, node in ready if node.logits is not None]
        every = [*([output.logits] if output is not None else []), *([torch.stack(first)] if first else [])]
        if not every or not (rows or ready):
            return []
        whole = every[0] if len(every) == 1 else torch.cat(every)
        trees = drafts or [DraftTree()] * len(rows)
        draws = [each for row, tree in zip(rows, trees, strict=True) for each in node_draws(tree, row.ticket.draw)]
        tokens = draw(whole, draws + [ticket.draw for ticket, _ in ready])
        if any(map(len, drafts)) and NOT_A_NUMBER in tokens[: len(tokens) - len(ready)]:
            # A guess that the model breaks on spoils its text though nothing sees it, since 0 * nan is nan.
            for row in rows:
                self.batch.clear(row, row.length)
            return self._draw(rows, (), self.batch.forward([], layers=self.speculator.layers), ready)
        news, ended, begin = list[SchedulerReport](), list[_CallRow](), 0
        states = output.states if output is not None and output.states else [None] * len(rows)
        for row, tree, seen in zip(rows, trees, states, strict=True):
            here = slice(begin, begin + 1 + len(tree))
            match = follow(tree, tokens[here], row.ticket.ends)
            if self._go_on(row, tree, match, whole[here], news):
                ended.append(row)
            # Drafters learn from an answer's last step, too: guesses are right most often there.
            if match.tokens[-1] >= 0:
                self.speculator.observe(row, row.ticket.draw, tree, match, seen)
            begin = here.stop
        # A row that leaves gives its place to another: only now do all of them hold their draws.
        for row in ended:
            if row.next_token < 0:  # its keys are no numbers
                self.batch.clear(row, 0)
            else:
                self._keep(row)
            self._leave(row)
        self._begin_rows(ready, tokens[begin:], whole[begin:], news)
        return news

    def _begin_rows(
        self, ready: list[tuple[Ticket, PrefixNode]], tokens: list[int], logits: Tensor, news: list[SchedulerReport]
    ) -> None:
        """Gives rows to calls whose prompts are computed, with their first tokens."""
        for (ticket, node), token, after in zip(ready, tokens, logits, strict=True):
            if not self._take(ticket, token, after, news):
                self._join(_CallRow(leaf=node, next_token=token, mark=ticket.prompt.mark, ticket=ticket), node.ahead)
            node.users -= 1

    def _go_on(self, row: _CallRow, tree: DraftTree, match: Match, logits: Tensor, news: list[SchedulerReport]) -> bool:
        """Appends a row's draws, up to a token that ends its answer; returns whether there was one."""
        taken, ended, ticket = 0, False, row.ticket
        ticket.drafted += len(tree)
        ticket.rejected += len(tree)
        while taken < len(match.tokens) and not ended:
            node, token = match.path[taken], match.tokens[taken]
            ticket.rejected -= tree.child(node, token) is not None
            ended = self._take(ticket, token, logits[node], news)
            taken += 1
        self.batch.advance(row, match.path[:taken], match.tokens[:taken])
        return ended

    def _take(self, ticket: Ticket, token: int, logits: Tensor, news: list[SchedulerReport]) -> bool:
        """Takes a drawn token and reports it; returns whether the answer ends, as it does without a token."""
        if token < 0:
            why = why_no_token(token, None, ticket.prompt.end + len(ticket.answer))
            news.append(SchedulerReport(ticket, tokens=len(ticket.answer), ended=True, error=EngineError(why)))
            return True
        if ticket.parameters.logprobs:
            ticket.note(*_logprobs(logits, token, ticket.parameters.logprobs))
        text, completion = ticket.take(token)
        ended, confidence = completion is not None, tuple(ticket.confidence[-1:])
        news.append(SchedulerReport(ticket, text, len(ticket.answer), confidence, ended, completion))
        return ended

    def _keep(self, row: _CallRow) -> None:
        """Makes an answer part of the tree, since a later prompt may continue it."""
        tail, ticket = row.tail, row.ticket
        # Text that is written piece by piece is kept, however short a piece is.
        short = len(tail) < _WORTH_KEEPING and not (tail and (ticket.prompt.goes_on or ticket.parameters.stop))
        if short or not self.kept_tokens:
            return
        same = (child for child in row.leaf.children if child.mark == row.mark)
        if any(common_length(child.tokens, tail) == len(tail) for child in same):
            return
        keys, values = self.batch.keys_of(row)
        node = self.tree.add(row.leaf, list(tail), row.mark)
        assert node.keys is not None and node.values is not None
        node.keys.copy_(keys)
        node.values.copy_(values)
        node.done = len(tail)


def _logprobs(logits: Tensor, token: int, alternatives: int) -> tuple[float, float]:
    """Computes a drawn token's log-probability under the model itself, before temperature and nucleus.

    The second number is the confidence of DeepConf (Fu et al., arXiv 2508.15260, equation 2).
    """
    row = (logits if logits.dtype is torch.float64 else logits.float()).log_softmax(dim=-1)
    return float(row[token]), -float(row.topk(alternatives).values.mean())
