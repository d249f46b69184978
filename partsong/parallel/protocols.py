"""Defines what a strategy may add to a plan: attachments, cuts, rounds, borders and work on the autoencoder."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, runtime_checkable

from torch import Tensor, nn

from partsong.parallel.hooks.clock import StepClock
from partsong.parallel.hooks.model_hooks import HookSet
from partsong.parallel.ranks.mesh import Axis
from partsong.parallel.ranks.pieces import WeightPiece

__all__ = [
    "Attachment",
    "Borders",
    "Coder",
    "Cut",
    "Ghosts",
    "KeptRows",
    "Rounds",
    "Shards",
    "Statistics",
    "TextShards",
]

#: The rows right above and right below a rank's own, `[B, C, p, W]`; None at the image's edge.
Ghosts = tuple[Tensor | None, Tensor | None]
#: Mean and biased variance `[B, G]` of the groups of a norm.
Statistics = tuple[Tensor, Tensor]


class Attachment(Protocol):
    """Describes what a strategy has put on a denoiser's blocks.

    Attributes:
        skips_blocks: whether it leaves blocks out in some steps.
    """

    skips_blocks: bool

    @property
    def postponed(self) -> Sequence[int]:
        """Lists the samples of the current call for which the model has to run once more."""
        ...

    def predict(self, step: int, batch: int, index: int) -> int:
        """Returns the bytes a rank sends for it in one call of a step.

        Args:
            step: number of the step.
            batch: samples on that rank.
            index: its place among those that hold parts of the tokens.
        """
        ...


class Cut(Protocol):
    """Describes how one denoiser's input is cut over ranks; implementations derive from it for the defaults.

    Attributes:
        axis: the ranks it is cut over.
        sizes: tokens or rows of each rank in every stream of the current call.
        varies: whether calls of one shape may compute different parts of the model.
        overlaps: whether calls take less time where they are made by `together`.
        pauses: whether a call may pause while others run, so that the loop which makes them counts their time.
    """

    axis: Axis
    sizes: Mapping[str, tuple[int, ...]]
    varies: bool = False
    overlaps: bool = False
    pauses: bool = False

    def attach(self, hooks: HookSet) -> None:
        """Puts on the hooks that cut, exchange and gather."""
        ...

    def begin_forward(self, sample: Any) -> None:
        """Prepares for a call with these latents, whose shape may differ from the last call's."""
        ...

    def predict(self, batch: int, tokens: dict[str, int], itemsize: int, index: int, step: tuple[int, bool]) -> int:
        """Returns the bytes the rank at `index` sends in one forward of a step (its number, whether it is the last)."""
        ...

    def takes(self, argument: str) -> bool:
        """Says whether it has a form for an argument of the model that a row refuses otherwise."""
        return False

    def together(self, calls: Sequence[Callable[[], Any]]) -> list[Any]:
        """Makes several calls of the model, none of which needs the result of another."""
        return [call() for call in calls]

    def call_notes(self) -> Any:
        """Returns what the bytes of the current call depend on besides its tokens; `recall` takes it."""
        return None

    def recall(self, notes: Any) -> None:
        """Prepares `predict` for a call by what `call_notes` returned after it."""

    def abandon(self) -> None:
        """Drops pending messages without waiting, after an error; most cuts have none."""

    def describe(self, tokens: Mapping[str, int]) -> str:
        """Says in words what is cut.

        Args:
            tokens: tokens of each stream in the last call.
        """
        streams = " and ".join(f"{total} {stream}" for stream, total in tokens.items())
        return streams if all(stream.endswith("rows") for stream in tokens) else f"{streams} tokens"

    def kept(self) -> str | None:
        """Says what is kept between calls and how much memory it takes; None where a strategy leaves no choice."""
        return None


class Shards(Protocol):
    """Describes the shares of a denoiser's weights that ranks hold.

    Attributes:
        axis: the ranks.
        axes: names of their mesh axes.
        stays_cut: whether layers compute with the shares; otherwise whole weights are gathered first.
        holds: what a module has in place of its weights, for errors.
    """

    axis: Axis
    axes: tuple[str, ...]
    stays_cut: bool = False
    holds: str = "only this rank's part of its weights"

    def attach(self, hooks: HookSet) -> None:
        """Puts this rank's shares into the layers, with the hooks that gather whole weights."""
        ...

    def begin_forward(self, batch: int, cut: Cut | None) -> None:
        """Prepares for a call with a number of samples, whose input may be cut over other ranks."""
        ...

    def call_notes(self) -> Any:
        """Returns what the bytes of the current call depend on; `predict` takes it."""
        ...

    def predict(self, notes: Any, batch: int, place: int, index: int) -> int:
        """Returns the bytes a rank sends for a call like an earlier one.

        Args:
            notes: what `call_notes` returned after that one.
            batch: samples in the call.
            place: the rank's index among those that the input is cut over.
            index: its index on the axis of the shares.
        """
        ...

    def check_bytes(self) -> int:
        """Returns the bytes a rank sends in a call without the plan's other hooks, to check a row."""
        return 0

    def piece_of(self, part: nn.Module, name: str) -> WeightPiece | None:
        """Says which part of the whole weight this rank holds; None where it holds all of it.

        Args:
            part: a module of the denoiser.
            name: its own weight.
        """
        ...

    def spared(self) -> int:
        """Returns how many bytes of the module's weights are on other ranks; 0 where it keeps only its share."""
        return 0

    def describe(self) -> str:
        """Says in words what is shared out."""
        ...

    def kept(self) -> str | None:
        """Says which weights are elsewhere than on a device; None where none are."""
        return None


class Borders(Protocol):
    """Describes how ranks with neighbouring rows of an image exchange border rows.

    Attributes:
        axis: the ranks, from the image's top to its bottom.
        joins: whether border rows and statistics that are needed together are sent in one message, by `joined`.
    """

    axis: Axis
    joins: bool = False

    def ghosts(self, layer: int, first: Tensor | None, last: Tensor | None) -> Ghosts:
        """Returns the rows right above and right below this rank's, `[B, C, p, W]`; None at the image's edge.

        Args:
            layer: number of the layer in its model.
            first: own first rows, which the rank before needs; None where the layer reads nothing below its rows.
            last: own last rows, which the rank after needs; None where the layer reads nothing above.
        """
        ...

    def statistics(self, layer: int, own: Statistics, counts: Sequence[int]) -> Statistics:
        """Returns the mean and biased variance `[B, G]` of the whole image.

        Args:
            layer: number of the layer in its model.
            own: mean and variance of this rank's rows.
            counts: rows of each rank.
        """
        ...

    def joined(
        self, layer: int, own: Statistics, counts: Sequence[int], first: Tensor, last: Tensor
    ) -> tuple[Statistics, Ghosts]:
        """Returns both the statistics and the border rows."""
        return self.statistics(layer, own, counts), self.ghosts(layer, first, last)

    def sends(self, step: int, is_last: bool) -> bool:
        """Says whether border rows are sent in a step."""
        ...

    def sends_statistics(self, step: int, is_last: bool) -> bool:
        """Says whether statistics are sent in a step."""
        ...

    def row_bytes(self, numbers: int, itemsize: int, step: int) -> int:
        """Returns the bytes of border rows in a step's message, given their numbers of `itemsize` bytes each."""
        return numbers * itemsize

    def abandon(self) -> None:
        """Forgets pending messages without waiting, after an error."""
        ...


class Rounds(Protocol):
    """Describes the rounds of a loop that calls the model at several points of a trajectory in each.

    Attributes:
        axis: the ranks that share the points of a round.
    """

    axis: Axis

    def steps_of(self, number: int, index: int) -> Sequence[int]:
        """Lists the steps of the pipeline whose calls the rank at `index` makes in a round."""
        ...

    def predict(self, number: int, index: int) -> int:
        """Returns the bytes that the rank at `index` sends in a round, besides those of its calls."""
        ...

    def describe(self) -> str:
        """Says in words what the ranks share."""
        ...

    def kept(self) -> str:
        """Says how many rounds there were, and what was accepted."""
        ...


class Coder(Protocol):
    """Describes a strategy's share of encoding or decoding: its work on a pipeline's autoencoder or text encoders.

    Attributes:
        decodes: whether it shares out the calls of the autoencoder's decoder.
    """

    decodes: bool = True

    @property
    def known(self) -> bool:
        """Says whether a call has been seen."""
        ...

    def attach(self, hooks: HookSet, clock: StepClock) -> None:
        """Puts the hooks on."""
        ...

    def predict(self, rank: int) -> int:
        """Returns the bytes a rank sends in the calls of this generation."""
        ...

    def describe(self) -> list[str]:
        """Says in words what is split, one line for each half that was called."""
        ...


class TextShards(Protocol):
    """Describes the shares of a language model's weights that ranks hold; implementations inherit its defaults."""

    #: Whether an encoder and a decoder may have the shared weights in common.
    takes_several_stacks: bool = False

    def attach(self, hooks: HookSet) -> None:
        """Leaves this rank's shares in the layers."""
        ...

    def begin_forward(self) -> None:
        """Prepares for a call of the model; most shares have nothing to prepare."""

    def piece_of(self, part: nn.Module, name: str) -> WeightPiece | None:
        """Says which part of a weight this rank holds; None where it holds all."""
        ...

    def bytes_sent(self, tokens: int) -> int | None:
        """Returns the bytes that this rank sends in a forward of so many tokens, up to their hidden states.

        None where they depend on something else.
        """
        return None

    def parts_of(self, texts: int, tokens: int) -> int:
        """Returns how many parts a call of so many tokens in all its texts goes through the ranks in."""
        return 1

    def cut_row(self, sizes: tuple[int, ...], begin: Callable[[int], None]) -> AbstractContextManager[None]:
        """Lets calls within it, of one row, go through the ranks in parts of so many tokens; see `TextPlan.cut_row`."""
        return nullcontext()

    def heads_here(self, heads: int) -> int:
        """Returns how many of a model's heads of keys this rank computes."""
        return heads

    def layers_here(self, layers: int) -> range:
        """Returns which of a model's layers this rank computes."""
        return range(layers)

    def spared(self) -> int:
        """Returns the bytes of weights that the modules still hold, and other ranks in this one's place."""
        return 0

    def describe(self) -> str:
        """Says in words what is shared out."""
        ...


@runtime_checkable
class KeptRows(Protocol):
    """Describes a layer of a cache whose keys can be written for some rows after others."""

    def can_cut(self, total: int) -> bool:
        """Says whether it can be cut by the rows of a call."""
        ...

    def some(self, rows: slice) -> Any:
        """Returns a layer like it for some rows of the call."""
        ...

    def join(self, parts: Sequence[Any]) -> None:
        """Takes the keys of the parts of a call, one for some rows after another."""
        ...
