"""Defines what a row holds: how one architecture's tokens are cut, exchanged and put together again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any, Protocol, runtime_checkable

from torch import nn

from partsong.errors import UnsupportedError
from partsong.parallel.adapters.grid import LatentGrid
from partsong.parallel.adapters.turns import FrameTurns

__all__ = ["IMAGE", "JOINT", "TEXT", "Adapter", "Factored", "Frames", "Mixing", "Split", "places", "read_class_plan"]

#: Token streams: the picture's tokens, the text's, and both in one sequence that a model joins by itself.
IMAGE, TEXT, JOINT = "image", "text", "joint"


@dataclass(frozen=True, kw_only=True, slots=True)
class Split:
    """Describes how one tensor is cut along its tokens, or put together again.

    Tuples, lists and dictionaries of tensors are cut one by one, and None stays. A whole number counts the rows of the
    token grid and becomes the number of rows on this rank.

    Attributes:
        dim: the token dimension.
        stream: which token stream it belongs to; all tensors of a stream have the same number of tokens.
        ndim: cut only tensors with this number of dimensions, or with one of several; tensors with fewer have nothing
            per token. None cuts all.
        output: cut what the module returns instead of what it is given.
        optional: skip when the argument is None or absent.
        folded: the dimension holds the batch and, within each sample, the tokens; each sample is cut by itself.
        leading: a whole number counts the first tokens of the stream, not rows of the token grid; of a tensor only
            those at the front belong to the stream, as many as were cut before, and what follows stays.
        gathered: the module needs all tokens: the ranks' parts are put together before the module gets them.
        tail: the tensor holds only the last tokens of the stream; a whole number counts them.
        items: cut, or put together, only these items of a tuple; empty cuts all, and puts the first together.
        ones: a single entry stands for all tokens and is left as it is.
        after: argument of the same call that lists runs of tokens, `(first, end, ...)`, which stay whole on every rank:
            the stream begins where the last run ends. Without runs it begins at once. What modules return has as many
            tokens in front of the stream as entered last.
        present: the tensor `[B, L]` is nonzero at a sample's real tokens, which come first. The model
            attends sample by sample, to these tokens only.
    """

    dim: int
    stream: str = IMAGE
    ndim: int | tuple[int, ...] | None = None
    output: bool = False
    optional: bool = False
    folded: bool = False
    leading: bool = False
    gathered: bool = False
    tail: bool = False
    items: tuple[int, ...] = ()
    ones: bool = False
    after: str | None = None
    present: bool = False

    def allows(self, ndim: int) -> bool:
        """Says whether tensors of `ndim` dimensions are cut."""
        return self.ndim is None or ndim == self.ndim or (isinstance(self.ndim, tuple) and ndim in self.ndim)


@dataclass(frozen=True, kw_only=True, slots=True)
class Factored:
    """Names the blocks that attend within a frame and those that attend along time, where a model takes turns.

    A spatial block takes and returns `[B * F, L, C]`, for F frames of L tokens. Around the temporal blocks the model
    turns that to `[B * L, F, C]` and back, with sizes it reads from the tensor.

    Attributes:
        spatial: path of the blocks that attend within a frame.
        temporal: path of those that attend along time.
        per_frame: arguments of the spatial blocks that hold a row per sample and frame, `[B * F, ...]`.
        per_token: arguments of the temporal blocks that hold a row per sample and token of a frame, `[B * L, ...]`.
    """

    spatial: str
    temporal: str
    per_frame: tuple[str, ...] = ()
    per_token: tuple[str, ...] = ()


@runtime_checkable
class Mixing(Protocol):
    """Describes a module that holds several models and is called like one of them."""

    @property
    def like(self) -> nn.Module:
        """Returns a model of their class."""
        ...


Splits = Mapping[str, Mapping[str | int, Split]]
Gather = Mapping[str, Split]


@dataclass(frozen=True, kw_only=True, slots=True)
class Frames:
    """Says where a video model has its frames.

    Attributes:
        dim: the dimension of the sample that counts frames.
        argument: the argument with the number of frames, where the sample has one dimension for all tokens.
        sides: the arguments with the rows and columns of tokens of a frame, in that case.
        patch: the configuration value with the number of frames per frame of tokens; of several numbers, the first
            counts. None means one.
        mixers: class names of the modules that look across frames, where all others take frames as a batch; empty
            where the tokens of all frames are one sequence.
        folded: arguments of the root module whose first dimension is batch x frames.
        numbered: class names of modules whose ``time_proj`` is given the number of every frame, from 0 on.
        turns: how rotary positions depend on the frame; None where positions along time are not known to be
            relative.
        positions: the argument in which a pipeline gives the positions of all frames; None where the model computes
            them.
    """

    dim: int = 2
    argument: str | None = None
    sides: tuple[str, ...] = ()
    patch: str | None = None
    mixers: tuple[str, ...] = ()
    folded: tuple[str, ...] = ()
    numbered: tuple[str, ...] = ()
    turns: FrameTurns | None = None
    positions: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Adapter:
    """Describes one architecture.

    Paths name modules from the root (``""``). In a path ``*`` stands for one name, and ``-1`` for the last of a list.

    Attributes:
        family: short name, as in the support table.
        model: class name of the diffusers transformer.
        attention: path of softmax self-attention -> the token streams it mixes, in order. Any other attention, such as
            cross-attention to a replicated text, stays local.
        keys_only: streams that all ranks hold whole, whose tokens are attended to and do not attend to others.
        causal_text: the attention modules attend to that whole text once more, causally and on every rank alike; not
            needed where it stands in front of the tokens that are cut.
        gathered: path of modules that look across all tokens of the picture outside attention, such as experts that
            choose their tokens -> arguments `[B, L, C]` that they get whole; their output is cut again. Modules there
            without these arguments stay as they are.
        scaled_by_length: name of attention's keyword argument with the base of a logarithm: logits are scaled by this
            logarithm of the number of tokens. None where they are not.
        block_choice: name of an argument of the model's blocks and of their attention, with which each layer chooses
            the blocks of keys that its queries see. None where all see all.
        seems_cross: attention modules say they are cross-attention, although they attend to their own tokens.
        linear_attention: path of linear self-attention -> class name of the processor whose sum over tokens is known.
        convolutions: paths of convolutions over the token grid, whose border rows come from the neighbours.
        whole_frames: tokens are cut between frames: `sample` is `[B, C, F, H, W]` in patches of the configured
            ``patch_size``, which has a number for each of the last three.
        whole_rows: tokens are cut between rows of their grid: `sample` is `[B, C, H, W]` in patches of the
            configured ``patch_size``.
        rows: the image stays an image and is cut into rows, as in a UNet. The one output split names where it enters,
            `gather` where it leaves, and input splits what is added on the way.
        least_tokens: fewest tokens of the picture that its blocks can take; where a rank has fewer, they get a copy of
            one more.
        splits: path -> argument name or output index -> `Split`. None reads the class' own ``_cp_plan``.
        gather: path of modules whose output is put together again -> how; of several outputs, the first or the named
            item. None as above.
        blocks: name of each list of blocks, in order of execution -> the arguments its blocks return anew, in order.
            Needed only where blocks return more than ``hidden_states``, or where
            lists with self-attention that only prepare the tokens come before them: those are not named.
        long_skips: some blocks read what much earlier blocks returned.
        sample: the argument that holds the noisy latents, a tensor or a list with a tensor per picture.
        timestep: the argument that holds the timestep.
        batched: arguments of the root module whose first dimension is the batch, or that are lists with an item per
            sample; a dictionary is searched.
        per_sample: those of `batched` that are lists with an item per sample. Other lists are searched for tensors.
        first: those of `batched` that are lists of which the model reads the first item for all samples.
        numbered: those of `batched` that are dictionaries from a sample's number to a list -> the one that lists as
            many things, sample after sample.
        layered: arguments whose tensors have the batch second, after the layers of a text encoder, or after keys and
            values in a cache that the model fills; a dictionary is searched.
        padded: arguments `[B, L, ...]` as long as the longest item of another one -> its name, and the multiple that
            items fill up.
        trims_text: it cuts padding down to the longest text of a batch, so a text may be shorter in another batch.
        shared: arguments that all samples share, whatever their first dimension is.
        residuals: arguments that hold tensors, batch first: what a ControlNet adds to the blocks.
        refused: arguments of the root module that no parallel form here handles, with the reason.
        refused_pipelines: methods that identify pipelines which change this model so that its input cannot be cut, with
            the reason.
        text_inputs: names that belong to the text stream when the splits come from ``_cp_plan``.
        frames: where the frames of a video are; None for pictures.
        grid: how the tokens lie in the latent; None where that is not known, and for images that stay images.
        attentions: how often each of its attention modules attends; twice for differential attention.
        in_sections: pipelines make a video in sections, one after another and each with steps of its own.
        skips_attention: a call may leave out some attentions, such as those that guidance perturbs.
        repeats_keys: each key/value head is repeated for its group of query heads; one copy is moved.
        factored: which blocks attend within a frame and which along time; None where all blocks attend alike.
        whole: why its input is cut neither into tokens nor into rows; None where it is cut.
        inferred: the row was inferred from the model's structure.
        checked: the first calls are compared with those of one rank, since the row was inferred or comes from a caller.
        mixes: it holds several models and is called like one of them; arguments come from that one's row.
    """

    family: str
    model: str
    attention: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    keys_only: tuple[str, ...] = ()
    causal_text: bool = False
    gathered: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    scaled_by_length: str | None = None
    block_choice: str | None = None
    seems_cross: bool = False
    linear_attention: Mapping[str, str] = field(default_factory=dict)
    convolutions: tuple[str, ...] = ()
    whole_rows: bool = False
    whole_frames: bool = False
    rows: bool = False
    least_tokens: int = 1
    splits: Splits | None = None
    gather: Gather | None = None
    blocks: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    long_skips: bool = False
    sample: str = "hidden_states"
    timestep: str = "timestep"
    batched: tuple[str, ...] = ("hidden_states", "encoder_hidden_states", "timestep")
    per_sample: tuple[str, ...] = ()
    first: tuple[str, ...] = ()
    numbered: Mapping[str, str] = field(default_factory=dict)
    layered: tuple[str, ...] = ()
    padded: Mapping[str, tuple[str, int]] = field(default_factory=dict)
    trims_text: bool = False
    shared: tuple[str, ...] = ()
    residuals: tuple[str, ...] = ()
    refused: Mapping[str, str] = field(default_factory=dict)
    refused_pipelines: Mapping[str, str] = field(default_factory=dict)
    text_inputs: tuple[str, ...] = ()
    frames: Frames | None = None
    grid: LatentGrid | None = None
    attentions: int = 1
    in_sections: bool = False
    skips_attention: bool = False
    repeats_keys: bool = False
    factored: Factored | None = None
    whole: str | None = None
    inferred: bool = False
    checked: bool = False
    mixes: bool = False

    @property
    def attends_per_sample(self) -> bool:
        """Says whether attention is computed sample by sample, each over the sample's own tokens."""
        return any(cut.present for entry in (self.splits or {}).values() for cut in entry.values())

    @property
    def instead(self) -> str:
        """Returns what to use where a strategy has no form on this model, as the end of a refusal."""
        if self.whole is not None:
            return "use CfgParallel or DataParallel"
        if self.frames is not None and self.frames.mixers:
            return "use ClipParallel, CfgParallel or DataParallel"
        return "use Ulysses or another strategy that splits its tokens or rows"

    @property
    def gathers_inside(self) -> bool:
        """Says whether a module between the first and the last block needs all tokens together."""
        return any(cut.gathered for entry in (self.splits or {}).values() for cut in entry.values())

    @property
    def compared(self) -> tuple[str, ...]:
        """Lists the arguments of the root module that must be the same on every rank."""
        return (*self.batched, *self.residuals)

    def resolved(self, module: nn.Module) -> Adapter:
        """Returns this row with `splits` and `gather`, read from the class' own plan where the row leaves them out."""
        if self.splits is not None and self.gather is not None:
            return self
        plan = getattr(module, "_cp_plan", None)
        if not plan:
            raise UnsupportedError(
                f"{self.model} has no context-parallel plan in this version of diffusers; use diffusers 0.40 or newer"
            )
        splits, gather = read_class_plan(plan, self.model, lambda key: TEXT if key in self.text_inputs else IMAGE)
        return replace(self, splits=splits, gather=gather)

    def mixing(self, inner: Adapter) -> Adapter:
        """Returns this row, which is for several models, with the arguments of one of them."""
        own = {"family": self.family, "model": self.model, "whole": self.whole, "mixes": True}
        return replace(inner, **own, inferred=False, checked=False, refused_pipelines={})

    def streams_of(self, name: str) -> tuple[str, ...] | None:
        """Returns the token streams that the attention module called `name` mixes; None for any other module."""
        return next((streams for path, streams in self.attention.items() if _fits(name, path)), None)


def places(path: str, modules: Mapping[str, nn.Module], *, optional: bool = False) -> list[str]:
    """Lists the modules at a path by name; empty where the module list at that path is empty.

    Args:
        path: names modules from the root.
        modules: those of the model by name.
        optional: whether some models of the class have no such module.

    Raises:
        UnsupportedError: there is no such module.
    """
    parent, _, last = path.rpartition(".")
    if last == "-1" and parent in modules:
        names = [name for name in modules if _fits(name, f"{parent}.*")][-1:]
    else:
        names = [name for name in modules if _fits(name, path)]
    holder = modules.get(parent)
    if not names and not optional and not (isinstance(holder, nn.ModuleList) and len(holder) == 0):
        raise UnsupportedError(f"there is no module {path!r} here; the model's layout has changed")
    return names


def _fits(name: str, path: str) -> bool:
    return name.count(".") == path.count(".") and fnmatchcase(name, path)


def read_class_plan(
    plan: Mapping[str, Any], model: str, stream_of: Callable[[str | int], str | None]
) -> tuple[Splits, Gather]:
    """Reads the context-parallel plan of a diffusers class.

    Args:
        plan: the class' ``_cp_plan``.
        model: name of the class.
        stream_of: returns the token stream of an argument or output; None leaves it whole.

    Raises:
        UnsupportedError: an entry of the plan has an unknown form, or the plan gathers nothing.
    """
    splits: dict[str, dict[str | int, Split]] = {}
    gather: dict[str, Split] = {}
    for path, entry in plan.items():
        if hasattr(entry, "gather_dim"):
            gather[path] = Split(dim=entry.gather_dim)
        elif isinstance(entry, Mapping):
            streams = {key: stream for key in entry if (stream := stream_of(key)) is not None}
            splits[path] = {key: _read_cut(entry[key], stream, f"{model} at {path}") for key, stream in streams.items()}
        else:
            raise UnsupportedError(f"the context-parallel plan of {model} has an entry of unknown form at {path!r}")
    if not gather:
        raise UnsupportedError(f"the context-parallel plan of {model} gathers no output")
    return splits, gather


def _read_cut(cuts: Any, stream: str, where: str) -> Split:
    """Reads how a plan cuts an argument or output; one with several tensors may have an entry for each."""
    first, *others = cuts if isinstance(cuts, (list, tuple)) else (cuts,)
    alike = {(cut.split_dim, cut.expected_dims, cut.split_output) for cut in (first, *others)}
    if len(alike) > 1:
        raise UnsupportedError(f"the context-parallel plan of {where} cuts the tensors of one argument in several ways")
    return Split(dim=first.split_dim, stream=stream, ndim=first.expected_dims, output=first.split_output, optional=True)
