"""Holds ParScale's learned weights: each stream's prefix of keys and values, and the network that weights streams."""

from __future__ import annotations

from typing import Any, Self

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from partsong import seeds
from partsong.errors import ArgumentError, ArgumentTypeError, UnsupportedError
from partsong.kernels.key_reuse import why_keys_cannot_be_kept
from partsong.knobs import Count, Share, check_knobs, type_hints
from partsong.parallel.text.cache_names import returned_cache

__all__ = ["FAMILIES", "StreamWeights", "aggregate", "check_model", "smooth"]

#: Decoders whose layers write their keys to the cache and take masks from its length. The tests compare each with its
#: own streams, computed one by one.
FAMILIES = (
    "llama", "mistral", "qwen2", "qwen3", "olmo", "olmo2", "gemma", "granite", "phi3", "smollm3",
)  # fmt: skip


def smooth(weights: Tensor, smoothing: float) -> Tensor:
    """Keeps every stream in play: `w (1 - e) + e / P`, which still sums to one (the paper's label smoothing).

    Args:
        weights: `[..., streams]`.
        smoothing: e, 0 to 1.

    Returns:
        `[..., streams]`.

    >>> smooth(torch.tensor([1.0, 0.0, 0.0, 0.0]), 0.2).tolist()
    [0.8500000238418579, 0.05000000074505806, 0.05000000074505806, 0.05000000074505806]
    """
    return weights * (1.0 - smoothing) + smoothing / weights.shape[-1]


def aggregate(hidden: Tensor, network: nn.Module, num_streams: int, smoothing: float) -> tuple[Tensor, Tensor]:
    """Computes the weighted sum of the streams, token by token.

    Args:
        hidden: the hidden states after the last norm, `[streams * batch, tokens, width]`, stream by stream.
        network: maps `[batch, tokens, width * streams]`, in which the streams of one feature lie side by side, to
            `[batch, tokens, streams]`.
        num_streams: P.
        smoothing: as in `smooth`.

    Returns:
        `[batch, tokens, width]` and the weights, `[batch, tokens, streams]`, in float32 or float64.
    """
    split = hidden.unflatten(0, (num_streams, -1))  # [streams, batch, tokens, width]
    # Feature by feature, as published weights have it: h0 of all streams, h1 of all streams, ...
    scores = network(split.permute(1, 2, 3, 0).flatten(2))
    weights = smooth(scores.to(torch.promote_types(scores.dtype, torch.float32)).softmax(dim=-1), smoothing)
    joined = torch.einsum("btp,pbth->bth", weights, split.to(weights.dtype))
    return joined.to(hidden.dtype), weights


class StreamWeights(nn.Module):
    """Holds prefixes and aggregator for one number of streams.

    The parameters are separate from the model's.

    Args:
        num_streams: P. One stream without weights is the base model. With weights it is prefix tuning (Li & Liang,
            arXiv 2101.00190), to compare more streams with, and has no aggregator.
        num_layers: how many layers the model has.
        kv_heads: how many key heads each layer has.
        head_dim: channels of a head.
        hidden_size: the model's hidden size.
        prefix_length: how many learned keys each layer has in front.
        smoothing: the least share of the weights that is spread evenly over all streams.
        seed: the seed of the first values.
        spread: standard deviation of the first prefixes.

    Attributes:
        prefix_k: the prefix of every layer, `[streams, kv_heads, prefix, head_dim]`; without rotary embedding.
        prefix_v: of the same shapes.
        aggregate_layer: Linear(streams * hidden, hidden), SiLU, Linear(hidden, streams). The last begins at zero, so
            the streams are averaged at first. Empty for one stream.

    Raises:
        ArgumentError: a number is out of bounds.
    """

    def __init__(
        self,
        num_streams: Count,
        *,
        num_layers: int,
        kv_heads: int,
        head_dim: int,
        hidden_size: int,
        prefix_length: Count = 48,
        smoothing: Share = 0.01,
        seed: int = 0,
        spread: float = 0.02,
    ) -> None:
        super().__init__()
        knobs = {"num_streams": num_streams, "prefix_length": prefix_length, "smoothing": smoothing}
        check_knobs(type_hints(StreamWeights.__init__), knobs)
        self.num_streams, self.prefix_length, self.smoothing = num_streams, prefix_length, smoothing
        shape = (num_streams, kv_heads, prefix_length, head_dim)

        def first(name: str, layer: int) -> nn.Parameter:
            return nn.Parameter(seeds.noise(seeds.derive(seed, name, layer), shape) * spread)

        self.prefix_k = nn.ParameterList([first("prefix_k", layer) for layer in range(num_layers)])
        self.prefix_v = nn.ParameterList([first("prefix_v", layer) for layer in range(num_layers)])
        self.aggregate_layer = nn.Sequential()
        if num_streams == 1:
            return
        wide = num_streams * hidden_size
        inner, last = nn.Linear(wide, hidden_size), nn.Linear(hidden_size, num_streams)
        with torch.no_grad():
            inner.weight.copy_(seeds.noise(seeds.derive(seed, "aggregate"), (hidden_size, wide)) * wide**-0.5)
            for zero in (inner.bias, last.weight, last.bias):
                zero.zero_()
        self.aggregate_layer = nn.Sequential(inner, nn.SiLU(), last)

    @classmethod
    def new(cls, model: PreTrainedModel, num_streams: int, **more: Any) -> Self:
        """Makes fresh weights of a model's sizes, on its device and in its type.

        Args:
            model: a model of `FAMILIES`.
            num_streams: P, 1 or more.
            **more: `prefix_length`, `smoothing`, `seed` and `spread` of the class.
        """
        check_model(model)
        first = next(model.parameters())
        return cls(num_streams, **_sizes(model.config), **more).to(device=first.device, dtype=first.dtype)

    @classmethod
    @torch.no_grad()
    def from_prompts(cls, model: PreTrainedModel, prompts: Tensor, **more: Any) -> Self:
        """Makes streams that begin as prompts: each first writes what the model writes after its prompt.

        That holds exactly if `prefix_length` is not given: the keys are those of a text at the positions before 0.
        Training continues from there. Prefixes learn better from the activations of words than from noise (Li & Liang,
        arXiv 2101.00190), and streams start out different.

        Args:
            model: a model of `FAMILIES`, without ParScale attached.
            prompts: token ids, `[streams, tokens]`; prompts of one length, without padding.
            **more: `prefix_length`, by default that of the prompts; further keys go in front of the prompts, with
                values as in `new`. Also `smoothing`, `seed` and `spread` of the class.

        Raises:
            ArgumentError: the prompts are not token ids of that shape, or longer than the prefix.
            UnsupportedError: streams would be wrong for the model, or it has some already.

        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> sizes = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, vocab_size=9)
        >>> weights = StreamWeights.from_prompts(LlamaForCausalLM(LlamaConfig(**sizes)), torch.tensor([[1, 2], [3, 4]]))
        >>> weights.num_streams, weights.prefix_length
        (2, 2)
        """
        if prompts.ndim != 2 or prompts.is_floating_point() or not prompts.numel():
            raise ArgumentError(f"prompts are token ids [streams, tokens], found {prompts.dtype} {[*prompts.shape]}")
        num_streams, tokens = prompts.shape
        weights = cls.new(model, num_streams, **{"prefix_length": tokens, **more})
        if weights.prefix_length < tokens:
            raise ArgumentError(
                f"prompts of {tokens} tokens do not fit prefix_length={weights.prefix_length}; give more"
            )
        mode, places = model.training, torch.arange(-tokens, 0, device=model.device)[None]
        model.eval()
        try:
            read: Any = model.base_model(prompts.to(model.device), position_ids=places, use_cache=True)
        finally:
            model.train(mode)
        for layer, cached in enumerate(returned_cache(read).layers):
            if len(cached.keys) != num_streams:
                raise UnsupportedError("this model has ParScale attached; undo() that first")
            weights.prefix_k[layer][:, :, -tokens:] = cached.keys
            weights.prefix_v[layer][:, :, -tokens:] = cached.values
        return weights

    def aggregate(self, hidden: Tensor) -> Tensor:
        """Sums the streams: `[streams * batch, tokens, width]` to `[batch, tokens, width]`; see `aggregate` above."""
        if self.num_streams == 1:
            return hidden
        return aggregate(hidden, self.aggregate_layer, self.num_streams, self.smoothing)[0]

    def check(self, config: Any) -> None:
        """Compares sizes with a model's configuration.

        Raises:
            ArgumentError: they differ.
        """
        sizes = _sizes(config)
        streams, heads, _, width = self.prefix_k[0].shape
        own = {"num_layers": len(self.prefix_k), "kv_heads": heads, "head_dim": width}
        if self.num_streams > 1:
            own["hidden_size"] = self.aggregate_layer[0].out_features
        assert streams == self.num_streams
        if wrong := {name: (own[name], sizes[name]) for name in own if own[name] != sizes[name]}:
            differences = ", ".join(f"{name} {ours} against {theirs}" for name, (ours, theirs) in wrong.items())
            raise ArgumentError(f"the weights have other sizes than the model: {differences}")


def check_model(model: object) -> None:
    """Refuses models that streams would be wrong for.

    Raises:
        ArgumentTypeError: it is not a transformers model.
        UnsupportedError: it is of another family, its layers do not attend to all tokens before, or its rotary
            embedding makes `generate` drop its cache.
    """
    if not isinstance(model, PreTrainedModel):
        raise ArgumentTypeError(f"ParScale attaches to a transformers model, found {type(model).__name__}")
    config: Any = model.config
    if config.model_type not in FAMILIES:
        raise UnsupportedError(f"ParScale runs {', '.join(FAMILIES)}; found {config.model_type!r}")
    if (why := why_keys_cannot_be_kept(config)) is not None:
        raise UnsupportedError(why)


def _sizes(config: Any) -> dict[str, int]:
    return {
        "num_layers": config.num_hidden_layers,
        "kv_heads": getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
        "head_dim": getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        "hidden_size": config.hidden_size,
    }
