"""Attaches strategies to a language model of transformers, and takes them off again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor, nn

from partsong.errors import UnsupportedError
from partsong.parallel.hooks.gradients import check_gradients
from partsong.parallel.hooks.model_hooks import HookSet
from partsong.parallel.plan.attached import Attached
from partsong.parallel.protocols import TextShards
from partsong.parallel.ranks.agreement import AGREED_STEPS, Comparison, check_alike
from partsong.parallel.ranks.mesh import AXES, Mesh
from partsong.parallel.ranks.pieces import WeightPiece
from partsong.parallel.strategy import Kind, Strategy, refuse_shares
from partsong.parallel.text.shard import shard_of
from partsong.parallel.text.stacks import entries_of

__all__ = ["TextPlan", "is_text_model"]

_KNOWN = "TensorParallel, ShardedWeights, LayerPipeline, TokenExperts or ContextParallel"
#: What the ranks compare. Masks follow from it, and have a number for each pair of tokens.
_READ = ("input_ids", "inputs_embeds", "position_ids")
_ADVICE = "give every rank the same prompts, options and seed"


def is_text_model(model: Any) -> bool:
    """Says whether something is a model of transformers with a head over a vocabulary."""
    if not isinstance(model, nn.Module) or not hasattr(model, "base_model"):
        return False
    head: Any = getattr(model, "get_output_embeddings", None)
    return head is not None and head() is not None


class TextPlan(Attached):
    """Holds strategies attached to a language model, until `undo` takes them off.

    Every rank calls the model, or decodes with it, with the same arguments, and every rank gets the same result. The
    cache of a rank holds the keys of its own heads.

    Args:
        model: of transformers, with a head over a vocabulary.
        strategies: `TensorParallel`, `ShardedWeights`, `LayerPipeline`, `TokenExperts` or `ContextParallel`.
        mesh: the ranks.
        owns_mesh: whether `undo` closes the mesh.

    Attributes:
        kind: ``exact``.

    Raises:
        UnsupportedError: another strategy, several at once, or a model that cannot be cut.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> sizes = dict(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, vocab_size=9)
        >>> from partsong import TensorParallel, parallelize
        >>> with parallelize(LlamaForCausalLM(LlamaConfig(**sizes)), TensorParallel()) as plan:  # one rank here
        ...     plan.explain()
        'one rank, nothing is shared out'
    """

    kind: Kind = "exact"

    def __init__(self, model: Any, strategies: Sequence[Strategy], mesh: Mesh, *, owns_mesh: bool) -> None:
        self.target, self.strategies, self.mesh, self._owns_mesh = model, tuple(strategies), mesh, owns_mesh
        self.is_undone, self._hooks, self._has_share_only = False, HookSet(), False
        self.shards: TextShards | None = None
        self._calls, self._axis = 0, mesh.axis(*AXES)
        self._tokens = Comparison(self._axis, "tokens")
        try:
            self._attach()
        except BaseException:
            self.undo()
            raise

    def _attach(self) -> None:
        name = type(self.target).__name__
        if len(self.strategies) > 1:
            raise UnsupportedError(
                f"{name}: a language model takes {_KNOWN}, and not {len(self.strategies)} strategies"
            )
        refuse_shares(self.strategies, self.mesh.degrees, self.mesh.shares)
        if self._axis.size == 1 or not self.strategies:
            return
        (strategy,) = self.strategies
        if shard_of(self.target) is not None:
            raise UnsupportedError(f"this {name} is under another plan already; call undo() on that plan first")
        self.shards = strategy.text_shards(self.target, self.mesh)
        if self.shards is None:
            raise UnsupportedError(
                f"{type(strategy).__name__} does not run on a language model ({name}); these do: {_KNOWN}"
            )
        entries = entries_of(self.target)
        if len(entries) > 1 and not self.shards.takes_several_stacks:
            raise UnsupportedError(
                f"{type(strategy).__name__} on {name}: its encoder and decoder are called by themselves, and have "
                "their weights in common; use TensorParallel"
            )
        # What ranks compare are the tokens of the call, before a strategy cuts them.
        for entry in entries:
            self._hooks.on_remove(entry.register_forward_pre_hook(self._begin, with_kwargs=True).remove)
        self.shards.attach(self._hooks)

    def _begin(self, module: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        assert self.shards is not None, "it was attached with them"
        named = {**{f"argument {place}": each for place, each in enumerate(given)}, **named}
        check_gradients(type(self.target).__name__, [module], named, type(self.strategies[0]).__name__)
        read = (named.get(key) for key in (*_READ, "argument 0"))
        self._compare([each for each in read if isinstance(each, Tensor) and not each.is_meta])
        self.shards.begin_forward()

    def piece_of(self, part: nn.Module, name: str) -> WeightPiece | None:
        """Says which part of a weight this rank holds; None where it holds all."""
        return None if self.shards is None else self.shards.piece_of(part, name)

    def spared(self) -> int:
        """Returns the bytes of weights that only other ranks hold while no block is gathered."""
        return 0 if self.shards is None else self.shards.spared()

    def heads_here(self, heads: int) -> int:
        """Returns how many of a model's heads of keys this rank computes."""
        return heads if self.shards is None else self.shards.heads_here(heads)

    def layers_here(self, layers: int) -> range:
        """Returns which of a model's layers this rank computes."""
        return range(layers) if self.shards is None else self.shards.layers_here(layers)

    def parts_of(self, texts: int, tokens: int) -> int:
        """Returns how many parts a call of so many tokens in all its texts goes through the ranks in."""
        return 1 if self.shards is None else self.shards.parts_of(texts, tokens)

    def cut_row(self, sizes: tuple[int, ...], begin: Callable[[int], None]) -> AbstractContextManager[None]:
        """Lets calls within it, of one row that holds several texts, go through the ranks in parts, in flight together.

        Args:
            sizes: tokens of each part; `parts_of` says how many parts are worth it.
            begin: is called with the number of each part before its layers run, on every rank.
        """
        return nullcontext() if self.shards is None else self.shards.cut_row(sizes, begin)

    def note_read(self) -> None:
        """Notes that the weights of this rank's share were read after they were cut, so the others are nowhere here."""
        self._hooks.refresh()
        self._has_share_only = True

    def _compare(self, read: list[Tensor]) -> None:
        """Lets ranks compare what they read: at once in the first calls, and later one call late."""
        if self._calls < AGREED_STEPS:
            check_alike(self._axis, {"call of the model": read}, advice=_ADVICE)
        else:
            self._tokens.check()
            self._tokens.post(read, self._calls)
        self._calls += 1

    def bytes_sent(self, tokens: int) -> int | None:
        """Returns the bytes that this rank sends in a forward of so many tokens in all rows, up to their hidden states.

        Comparisons between the ranks and what the head moves are left out. None where it is weights that move.
        """
        return 0 if self.shards is None else self.shards.bytes_sent(tokens)

    def explain(self) -> str:
        """Says in a line what is shared out."""
        if self.shards is None:
            return "one rank, nothing is shared out"
        return f"{type(self.target).__name__} on {self._axis.size} ranks, exact: {self.shards.describe()}"

    def undo(self) -> None:
        """Waits for pending messages and takes every hook off; may be called again."""
        self.is_undone = True
        try:
            if not self._hooks.has_failed:
                self._tokens.check()
        finally:
            self._hooks.remove()
            if self._has_share_only:
                self.target.base_model.register_forward_pre_hook(_refuse_call)
            if self._owns_mesh:
                self.mesh.close()
                self._owns_mesh = False

    def abandon(self) -> None:
        """Drops pending messages without waiting, after an error; `undo` then expects nothing of other ranks."""
        self._hooks.has_failed = True
        self._tokens.abandon()
        self.mesh.abandon()


def _refuse_call(module: nn.Module, given: tuple[Any, ...]) -> None:
    raise UnsupportedError(
        f"each rank read its share of this {type(module).__name__} only, and the plan was undone; load the model again"
    )
