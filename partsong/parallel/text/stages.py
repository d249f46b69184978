"""Gives each rank a run of a language model's layers, and hands the states of a call from rank to rank."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor, nn

from partsong.errors import UnsupportedError
from partsong.parallel.cuts.handed_on import hand_on, share_output
from partsong.parallel.hooks.dropped_weights import drop_weights
from partsong.parallel.hooks.model_hooks import HookSet
from partsong.parallel.protocols import TextShards
from partsong.parallel.ranks.collectives import Pending
from partsong.parallel.ranks.mesh import Axis
from partsong.parallel.ranks.pieces import WeightPiece
from partsong.parallel.ranks.shards import offsets
from partsong.parallel.ranks.sums import sum_sends
from partsong.parallel.tensor_parallel.quantised_weights import check_layers
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

    In the place of layers that other ranks have, states pass unchanged, and a cache gets keys without channels, so that
    it counts the tokens of those layers as well.

    Args:
        model: of transformers.
        axis: the ranks.
        sizes: layers of each rank.

    Raises:
        UnsupportedError: the layers hand on more than states, or weights cannot be taken off.
    """

    def __init__(self, model: Any, axis: Axis, sizes: tuple[int, ...]) -> None:
        check_layers(model)
        self.model, self.axis, self.sizes = model, axis, sizes
        self._layers = find_layers(model)
        self._pieces: dict[tuple[nn.Module, str], WeightPiece] = {}
        self._sent: list[Pending] = []

    def attach(self, hooks: HookSet) -> None:
        """Leaves this rank's layers in the model, and its tokens in the vocabulary."""
        mine, layers = self.layers_here(len(self._layers)), self._layers
        for number, layer in enumerate(layers):
            if number not in mine:
                self._take_off(layer, number, hooks)
        base: Any = self.model.base_model
        for hook in (
            base.register_forward_pre_hook(self._refuse_states, with_kwargs=True),
            layers[mine[-1]].register_forward_hook(self._check_states),
            base.register_forward_hook(self._share),
            *(
                layers[start].register_forward_pre_hook(partial(self._pass, stage), with_kwargs=True)
                for stage, start in enumerate(offsets(self.sizes))
                if stage
            ),
        ):
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

    def describe(self) -> str:
        """Says in words what is shared out."""
        return f"{', '.join(map(str, self.sizes))} layers one after the other, and the vocabulary"

    def _take_off(self, layer: nn.Module, number: int, hooks: HookSet) -> None:
        """Leaves nothing of a layer but its place."""
        self._pieces |= drop_weights(layer, hooks)
        from transformers.cache_utils import Cache  # whoever has such a model has loaded it

        vars(layer)["forward"] = partial(_pass_on, number, Cache)
        hooks.on_remove(partial(vars(layer).pop, "forward"))

    def _refuse_states(self, base: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        for what in ("output_hidden_states", "output_attentions"):
            if named.get(what, getattr(self.model.config, what, False)):
                raise UnsupportedError(
                    f"{what}=True: under LayerPipeline a rank has those of its own layers only; leave it out, or use "
                    "TensorParallel"
                )

    def _pass(self, stage: int, layer: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Hands the states on to a stage, in the place of what passed unchanged through layers of other ranks."""
        states: Tensor = given[0] if given else named["hidden_states"]
        (arrived,), message = hand_on(self.axis, stage - 1, stage, (states,), name="states of a stage")
        if self.axis.index != stage:
            self._sent.append(message)
            return None
        message.wait()
        return ((arrived, *given[1:]), named) if given else (given, {**named, "hidden_states": arrived})

    def _check_states(self, layer: nn.Module, given: tuple[Any, ...], states: Any) -> None:
        if not isinstance(states, Tensor):
            raise UnsupportedError(
                f"LayerPipeline on {type(self.model).__name__}: its layers return more than states; use ShardedWeights"
            )

    def _share(self, base: nn.Module, given: tuple[Any, ...], output: Any) -> Any:
        """Gives every rank the states after the last layer and the norm."""
        for message in self._sent:
            message.wait()
        self._sent.clear()
        last = self.axis.size - 1
        states = share_output(self.axis, last, output[0], name="states after all layers")
        if isinstance(output, tuple):
            return (states, *output[1:])
        output["last_hidden_state"] = states
        return output


def _pass_on(number: int, kind: type, hidden_states: Tensor, *given: Any, **named: Any) -> Tensor:
    """Stands in for a layer that another rank runs; a cache among its arguments counts its tokens."""
    cache: Any = next((each for each in (*given, *named.values()) if isinstance(each, kind)), None)
    if cache is not None:
        rows, tokens = hidden_states.shape[:2]
        nothing = hidden_states.new_empty(rows, 1, tokens, 0)
        cache.update(nothing, nothing, number)
    return hidden_states
