"""Gives each rank a run of a language model's layers, and hands the states of a call from rank to rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn
from transformers.cache_utils import DynamicLayer

from partsong.errors import UnsupportedError
from partsong.parallel.cuts.relay import Relay
from partsong.parallel.hooks.dropped_weights import drop_weights
from partsong.parallel.hooks.model_hooks import HookSet
from partsong.parallel.protocols import TextShards
from partsong.parallel.ranks.mesh import Axis
from partsong.parallel.ranks.pieces import WeightPiece
from partsong.parallel.ranks.shards import offsets, split_sizes
from partsong.parallel.ranks.sums import sum_sends
from partsong.parallel.tensor_parallel.quantised_weights import check_layers
from partsong.parallel.text.cut_calls import states_of, with_states
from partsong.parallel.text.kept_keys import add_layers, cache_of
from partsong.parallel.text.parted_call import CutRow, NotAChainError, PartedCall
from partsong.parallel.text.vocabulary import cut_vocabulary

__all__ = ["TextStages", "find_layers"]


def find_layers(model: Any) -> nn.ModuleList:
    """Returns the layers of a transformers model that hand on nothing but states, by the plan its class has for stages.

    Raises:
        UnsupportedError: transformers has no such plan for its class.
    """
    plan = getattr(model.config.get_text_config(), "base_model_pp_plan", None) or {}
    lists = [name for name, part in model.base_model.named_children() if isinstance(part, nn.ModuleList)]
    if len(lists) != 1 or lists[0] not in plan or list(plan[lists[0]][1]) != ["hidden_states"]:
        raise UnsupportedError(
            f"LayerPipeline on {type(model).__name__}: transformers has no plan that says how its layers follow each "
            "other; use ShardedWeights"
        )
    return model.base_model.get_submodule(lists[0])


class TextStages(TextShards):
    """Runs a rank's layers on the states that the rank before it sends; the last one sends its result to all.

    A call may be made in parts of its rows, which follow each other from rank to rank: whoever has
    handed a part on goes on with the next. In the place of layers that other ranks have, states pass unchanged, and a
    cache gets keys without channels, so that it counts the tokens of those layers as well.

    Args:
        model: of transformers.
        axis: the ranks.
        sizes: layers of each rank.
        parts: says how many parts a call of so many rows and tokens has.

    Raises:
        UnsupportedError: the layers hand on more than states, or weights cannot be taken off.
    """

    def __init__(self, model: Any, axis: Axis, sizes: tuple[int, ...], parts: Callable[[int, int], int]) -> None:
        check_layers(model)
        self.model, self.axis, self.sizes, self._parts = model, axis, sizes, parts
        self._layers = find_layers(model)
        self._owners = [rank for rank, count in enumerate(sizes) for _ in range(count)]
        self._pieces: dict[tuple[nn.Module, str], WeightPiece] = {}
        self._relay = Relay(axis, "states of a stage")
        self._row: CutRow | None = None
        self._call: PartedCall | None = None
        self._whole: str | None = None  # why calls go through the ranks as a whole
        self._is_chain, self._in_flight = True, 1
        self._own_hooks: set[int] = set()

    def attach(self, hooks: HookSet) -> None:
        """Leaves this rank's layers in the model, and its tokens in the vocabulary."""
        mine, layers = self.layers_here(len(self._layers)), self._layers
        for number, layer in enumerate(layers):
            if number not in mine:
                self._take_off(layer, number, hooks)
        base: Any = self.model.base_model
        vars(base)["forward"] = again = partial(self._or_whole, base.forward)
        hooks.on_remove(partial(_restore, base, again))
        for hook in (
            base.register_forward_pre_hook(self._begin, with_kwargs=True),
            layers[mine[-1]].register_forward_hook(self._check_states),
            base.register_forward_hook(self._end, always_call=True),
            *(
                layers[start].register_forward_pre_hook(partial(self._pass, stage), with_kwargs=True)
                for stage, start in enumerate(offsets(self.sizes))
            ),
        ):
            self._own_hooks.add(hook.id)
            hooks.on_remove(hook.remove)
        self._pieces |= cut_vocabulary(self.model, self.axis, hooks)

    def piece_of(self, part: nn.Module, name: str) -> WeightPiece | None:
        """Says which part of a weight this rank holds; None where it holds all."""
        return self._pieces.get((part, name))

    def layers_here(self, layers: int) -> range:
        """Returns the layers that this rank runs."""
        first = offsets(self.sizes)[self.axis.index]
        return range(first, first + self.sizes[self.axis.index])

    def bytes_sent(self, tokens: int) -> int:
        """Returns the bytes that this rank sends in a forward of so many tokens, up to their hidden states."""
        numbers, axis = tokens * self.model.config.get_text_config().hidden_size, self.axis
        is_last = axis.index == axis.size - 1
        passed = numbers * (axis.size - 1 if is_last else 1)
        return (passed + sum_sends(numbers, axis.size, axis.index)) * self.model.dtype.itemsize  # and the embeddings

    def parts_of(self, texts: int, tokens: int) -> int:
        """Returns how many parts a call of so many tokens in all its texts goes through the ranks in."""
        parts = self._parts(texts, tokens)
        # A step of one token a row is one part, and is not asked for hooks.
        return parts if parts == 1 or (self._is_chain and not self._is_watched()) else 1

    def _is_watched(self) -> bool:
        """Says whether somebody has hooks on layers: those would see the call that is noted, which computes nothing."""
        hooks = (each for layer in self._layers for each in (layer._forward_hooks, layer._forward_pre_hooks))
        return any(number not in self._own_hooks for each in hooks for number in each)

    @contextmanager
    def cut_row(self, sizes: tuple[int, ...], begin: Callable[[int], None]) -> Iterator[None]:
        """Lets calls within it, of one row, go through the ranks in parts of so many tokens."""
        self._row = CutRow(sizes, begin)
        try:
            yield
        finally:
            self._row = None

    def describe(self) -> str:
        """Says in words what is shared out."""
        stages = f"{', '.join(map(str, self.sizes))} layers one after the other, and the vocabulary"
        whole = "hooks on layers see whole calls" if self._is_watched() else self._whole
        if whole is not None:
            return f"{stages}; all rows of a call at once ({whole})"
        return stages if self._in_flight == 1 else f"{stages}; {self._in_flight} parts of a call in flight"

    def _take_off(self, layer: nn.Module, number: int, hooks: HookSet) -> None:
        """Leaves nothing of a layer but its place."""
        self._pieces |= drop_weights(layer, hooks)
        vars(layer)["forward"] = partial(_pass_on, number)
        hooks.on_remove(partial(vars(layer).pop, "forward"))

    def _begin(self, base: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        for what in ("output_hidden_states", "output_attentions"):
            if named.get(what, getattr(self.model.config, what, False)):
                raise UnsupportedError(
                    f"{what}=True: under LayerPipeline a rank has those of its own layers only; leave it out, or use "
                    "TensorParallel"
                )
        read = (*given[:1], named.get("input_ids"), named.get("inputs_embeds"))
        rows, length = next(each for each in read if each is not None).shape[:2]
        self._relay.owner = None
        self._in_flight = self.parts_of(rows, rows * length) if self._row is None else len(self._row.sizes)
        if self._in_flight > 1:
            sizes = split_sizes(rows, self._in_flight)
            self._call = PartedCall(self._layers, self._owners, self._relay, sizes, self._row)

    def _or_whole(self, forward: Callable[..., Any], *given: Any, **named: Any) -> Any:
        """Makes a call anew, as a whole, where the model is not the chain of layers that parts need."""
        try:
            return forward(*given, **named)
        except NotAChainError:
            assert self._call is not None and self._row is None, "rows of several texts are for chains"
            self._is_chain, self._whole = False, "the model does more between its layers"
        self._give_up()
        return forward(*given, **named)

    def _give_up(self) -> None:
        """Leaves the call as it is from here on."""
        if self._call is not None:
            self._call.end()
        self._call, self._in_flight, self._relay.owner = None, 1, None

    def _pass(self, stage: int, layer: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Hands the states on to a stage, in the place of what passed unchanged through layers of other ranks."""
        if self._call is not None and not self._call.is_noted:
            return None
        (arrived,) = self._relay.enter(stage, (states_of((given, named)),))
        return with_states((given, named), arrived)

    def _check_states(self, layer: nn.Module, given: tuple[Any, ...], states: Any) -> None:
        if not isinstance(states, Tensor):
            raise UnsupportedError(
                f"LayerPipeline on {type(self.model).__name__}: its layers return more than states; use ShardedWeights"
            )

    def _end(self, base: nn.Module, given: tuple[Any, ...], output: Any) -> Any:
        """Gives every rank the states after the last layer and the norm."""
        call = self._call
        self._call = None
        if call is not None:
            call.end()
            self._whole = call.whole
        if output is None:  # an error goes on to the caller
            self._relay.abandon()
            return None
        assert call is None or call.is_noted, "a model calls all its layers"
        (states,) = self._relay.share([self.axis.size - 1], [output[0]], name="states after all layers")
        if isinstance(output, tuple):
            return (states, *output[1:])
        output["last_hidden_state"] = states
        return output


def _restore(base: nn.Module, forward: Any) -> None:
    """Takes a call off that nobody has replaced since."""
    if vars(base).get("forward") is forward:
        vars(base).pop("forward")


class _CountedLayer(DynamicLayer):
    """Counts the tokens of a layer that another rank runs, by keys without channels."""

    def get_seq_length(self) -> int:
        """Returns how many there are; the class above takes keys without channels for none."""
        return 0 if self.keys is None or self.keys.dim() < 4 else self.keys.shape[-2]


def _pass_on(number: int, hidden_states: Tensor, *given: Any, **named: Any) -> Tensor:
    """Stands in for a layer that another rank runs; a cache among its arguments counts its tokens."""
    cache = cache_of([(given, named)])
    if cache is not None:
        add_layers(cache, number + 1)
        if type(cache.layers[number]) is DynamicLayer:
            cache.layers[number] = _CountedLayer()
        rows, tokens = hidden_states.shape[:2]
        nothing = hidden_states.new_empty(rows, 1, tokens, 0)
        cache.update(nothing, nothing, number)
    return hidden_states
