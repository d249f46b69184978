"""Runs a stock transformers model as the engine needs it: over flat tokens, with our attention and packed weights."""

from __future__ import annotations

import copy
import math
import threading
import weakref
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from partsong.errors import ArgumentError, ArgumentTypeError, UnsupportedError
from partsong.kernels.key_reuse import why_keys_cannot_be_kept
from partsong.parallel.context_parallel import ContextParallel
from partsong.parallel.loading.text_share import TextShare
from partsong.parallel.text.shard import shard_of
from partsong.reasoning.local.fused_decoder import fuse_decoder
from partsong.reasoning.local.gated_lora import GatedLora
from partsong.reasoning.local.packed_linear import can_pack, least_rows, pack_linears
from partsong.reasoning.local.quantized_linear import Weights, quantize_linears
from partsong.reasoning.local.shared_attention import AttentionStep
from partsong.reasoning.local.thoughts import ThoughtEmbeddings

__all__ = ["FAMILIES", "LocalModel"]

#: Decoders whose layers take any positions and hand their attention on; each is compared with itself in the tests.
FAMILIES = (
    "llama", "mistral", "qwen2", "qwen3", "olmo", "olmo2", "gemma", "granite", "phi3", "smollm3", "gpt2", "gpt_neox",
)  # fmt: skip

_NAME = "partsong_local"
#: Reentrant, since a model may be collected while another one registers.
_LOCK = threading.RLock()
_open_models = 0


class LocalModel:
    """Computes logits of tokens of many sequences at once.

    The given module stays as it is: the engine works on a second tree of modules that shares its weights.

    Args:
        module: a causal language model of `FAMILIES`, in eval mode.
        pack: whether linear layers get a packed copy of their weights (twice the memory, unless `owned`); None
            does so where it is known to be faster, on CPUs.
        owned: whether the module is not shared, so that weights can be dropped once they are packed.
        thoughts: embeddings of marks; None ignores marks, as embeddings of zero would.
        weights: rounds the weights of linear layers to "int8" or "int4", which changes the model.
        share: which part of the model this rank computes; None for all of it.

    Attributes:
        plan: what shares the model out over ranks; None where one rank has all of it.

    Raises:
        UnsupportedError: the model's results would be wrong, or the processor has no products with such weights.
        ArgumentError: the module is in training mode, or its weights cannot be packed.
        ArgumentTypeError: the module is not a transformers model.
    """

    def __init__(
        self,
        module: PreTrainedModel,
        *,
        pack: bool | None = None,
        owned: bool = False,
        thoughts: ThoughtEmbeddings | None = None,
        weights: Weights | None = None,
        share: TextShare | None = None,
    ) -> None:
        _check(module, share, weights)
        # Weights are memoised as themselves, so only modules and the configuration are copied.
        shared = {id(x): x for x in (*module.parameters(), *module.buffers())}
        self._module: Any = module if owned else copy.deepcopy(module, shared)
        self.plan = None if share is None else share.finished(self._module)
        self._read_sizes(module.config)
        self._read_weights()
        # One forward at a time: an engine and workers that share its model compute in threads of their own.
        self._turn = threading.Lock()
        self._step: AttentionStep | None = None
        self._tokens = self._total = 0  # of a step, and of all steps of a forward
        self._masks: GatedLora | None = None
        #: How many forwards it has computed.
        self.forwards = 0
        # The request of `look`, and the results of the current forward for it.
        self._watched, self._layers = False, tuple[int, ...]()
        self._states: Tensor | None = None
        self.quantized = 0 if weights is None else quantize_linears(self._module, weights)
        self._thoughts = thoughts
        self.packed = self._pack(pack, owned, share)
        self._least_rows = least_rows() if self.packed else 1
        self._head = self._module.get_output_embeddings()
        if thoughts is not None:
            thoughts.attach(self._module)
        self._attend_here()

    def _read_sizes(self, config: Any) -> None:
        self.layers: int = config.num_hidden_layers
        heads: int = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        self.kv_heads = heads if self.plan is None else self.plan.heads_here(heads)
        self.head_dim: int = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        here = range(self.layers) if self.plan is None else self.plan.layers_here(self.layers)
        self._first_layer = here.start
        #: Layers, heads and channels of the keys that are kept here.
        self.key_shape = (len(here), self.kv_heads, self.head_dim)
        self.context: int = config.max_position_embeddings
        #: Where the model was loaded from: a folder or a name on the hub; empty if it was not.
        self.source: str = config.name_or_path or ""
        self._scale: float = getattr(config, "logits_scaling", 1.0)

    def _read_weights(self) -> None:
        inputs, outputs = (
            getattr(each, "weight", None)
            for each in (self._module.get_input_embeddings(), self._module.get_output_embeddings())
        )
        assert isinstance(inputs, Tensor) and isinstance(outputs, Tensor)
        shard = shard_of(self._module)
        self.vocab_size = len(outputs) if shard is None else shard.total
        self._embedding = inputs.detach()
        self.dtype, self.device, self.hidden_size = inputs.dtype, inputs.device, inputs.shape[1]
        self.num_weights = sum(each.numel() for each in self._module.parameters())
        #: Bytes of a token's keys and values.
        self.bytes_per_token = 2 * math.prod(self.key_shape) * self.dtype.itemsize

    def _attend_here(self) -> None:
        """Makes the layers hand their attention to `attend`."""
        self._module.config._attn_implementation = _NAME
        for each in self._module.modules():
            if isinstance(getattr(each, "layer_idx", None), int):
                each.partsong_local = self
        _register()
        # A model that was never closed leaves the registry when it is collected.
        self._leave = weakref.finalize(self, _unregister)
        self._leave.atexit = False

    def _pack(self, pack: bool | None, owned: bool, share: TextShare | None) -> int:
        able, why = can_pack(self._embedding)
        comes_and_goes = share is not None and share.reads_shares and not share.cuts_columns
        if comes_and_goes:
            able, why = False, "the weights of a block come and go with ShardedWeights"
        if pack and not able:
            raise ArgumentError(f"pack=True, but {why}; use pack=False or None")
        packs = able and pack is not False
        # Else the joined weights would be there twice. In float64 models are compared with those of transformers, whose
        # norms are of float32 all the same. Thoughts are added to what separate projections give.
        joins = packs or (owned and not comes_and_goes and self.dtype != torch.float64)
        if joins and self._thoughts is None:
            fuse_decoder(self._module.get_decoder())
        # A plan's hooks add up outputs, and read no weights.
        return pack_linears(self._module, hooked=share is not None) if packs else 0

    @property
    def module(self) -> PreTrainedModel:
        """Returns the modules that compute, which are the engine's own."""
        return self._module

    def room_for(self, tokens: int) -> tuple[Tensor, Tensor]:
        """Allocates memory for keys and values, each `[layers, kv_heads, tokens, head_dim]`."""
        layers, heads, width = self.key_shape
        both = torch.empty(2, layers, heads, tokens, width, dtype=self.dtype, device=self.device)
        return both[0], both[1]

    def forward(
        self,
        tokens: Sequence[int],
        positions: Sequence[int],
        keep: Sequence[int],
        steps: AttentionStep | Sequence[AttentionStep],
        marks: Sequence[int] = (),
    ) -> Tensor:
        """Computes the logits after some tokens.

        Args:
            tokens: the tokens of all sequences, in one row.
            positions: each token's position in its own sequence.
            keep: indices of the tokens whose logits are returned.
            steps: what each token attends to; several for tokens that go through the ranks in parts (see `parts_of`).
            marks: each token's thought embedding; empty for no embeddings.

        Returns:
            `[len(keep), vocabulary]`.
        """
        return self._compute(tokens, positions, keep, steps, marks, {}, ())[0]

    def look(
        self,
        tokens: Sequence[int],
        positions: Sequence[int],
        keep: Sequence[int],
        steps: AttentionStep | Sequence[AttentionStep],
        marks: Sequence[int] = (),
        *,
        masks: Mapping[int, int] = MappingProxyType({}),
        layers: tuple[int, ...] = (-1,),
    ) -> tuple[Tensor, Tensor]:
        """Computes what `forward` does, lets masks take part, and returns states as well.

        Args:
            tokens: as there; ids of masks do not matter.
            positions: as there.
            keep: as there.
            steps: as there.
            marks: as there.
            masks: which of the tokens are masks, each with its number (see `GatedLora`).
            layers: whose states are returned: 0 is the embedding, -1 the input of the head.

        Returns:
            Logits `[len(keep), vocabulary]`, and states of all tokens `[tokens, layers, hidden size]`.
        """
        if not self._watched:
            self._module.get_decoder().register_forward_hook(self._see)
            self._watched = True
        logits, states = self._compute(tokens, positions, keep, steps, marks, masks, layers)
        assert states is not None
        return logits, states

    def take_masks(self, masks: GatedLora) -> None:
        """Lets masks take part in forwards. They change nothing for tokens.

        Args:
            masks: the masks, on the model's device and of its dtype.

        Raises:
            ArgumentError: the model has masks, or these were trained for another one.
        """
        if self._masks is not None:
            raise ArgumentError("the model looks ahead from masks already: give an engine one trained head")
        masks.build_into(self._module)
        self._masks = masks

    def embed(self, tokens: Sequence[int]) -> Tensor:
        """Returns the embeddings of tokens, `[tokens, hidden size]`."""
        return F.embedding(torch.tensor(tokens, device=self.device), self._embedding)

    def read(self, states: Tensor) -> Tensor:
        """Computes logits from states with the head, `[..., hidden size]` to `[..., vocabulary]`."""
        logits = self._head(states)
        return logits if self._scale == 1.0 else logits / self._scale

    def _compute(
        self,
        tokens: Sequence[int],
        positions: Sequence[int],
        keep: Sequence[int],
        steps: AttentionStep | Sequence[AttentionStep],
        marks: Sequence[int],
        masks: Mapping[int, int],
        layers: tuple[int, ...],
    ) -> tuple[Tensor, Tensor | None]:
        # Padding, so that there are enough rows; its results are never read.
        spare = max(0, self._least_rows - len(tokens))
        known = [list(numbers) + [0] * spare for numbers in (tokens, positions)]
        last = [len(tokens) + spare - 1] * max(0, self._least_rows - len(keep))
        flat, places, kept = (torch.tensor(x, device=self.device) for x in ([known[0]], [known[1]], [*keep, *last]))
        marked = [*marks, *[0] * spare]
        thinking = nullcontext() if self._thoughts is None or not marks else self._thoughts.at([marked])
        looking = nullcontext() if self._masks is None or not masks else self._masks.at(masks)
        more = {"output_hidden_states": True} if any(layer != -1 for layer in layers) else {}
        steps = steps if isinstance(steps, Sequence) else (steps,)
        with self._turn, thinking, looking, self._in_parts(steps, len(tokens), spare):
            self._layers = layers
            self.forwards += 1
            try:
                out = self._module(
                    input_ids=flat, position_ids=places, use_cache=False, logits_to_keep=kept.long(), return_dict=True,
                    **more,
                )  # fmt: skip
                return out.logits[0, : len(keep)], self._states
            finally:
                self._step, self._layers, self._states = None, (), None

    def parts_of(self, texts: int, tokens: int) -> int:
        """Returns how many parts a forward of so many tokens of several texts goes through the ranks in."""
        return 1 if self.plan is None else self.plan.parts_of(texts, tokens)

    def _in_parts(self, steps: Sequence[AttentionStep], tokens: int, spare: int) -> AbstractContextManager[None]:
        """Takes the first step, or lets the ranks take each of several for its tokens."""
        sizes = [each.size for each in steps] if len(steps) > 1 else [tokens]

        def begin(number: int) -> None:
            self._step, self._tokens = steps[number], sizes[number]

        self._total = tokens
        begin(0)
        if self.plan is None or len(steps) == 1:
            return nullcontext()
        return self.plan.cut_row((*sizes[:-1], sizes[-1] + spare), begin)

    def _see(self, _module: nn.Module, _inputs: Any, out: Any) -> None:
        """Keeps the states that `look` returns."""
        if self._layers == (-1,):
            self._states = out.last_hidden_state[0, : self._total, None]
        elif self._layers:
            self._states = torch.stack([out.hidden_states[layer][0, : self._total] for layer in self._layers], dim=1)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        """Computes the attention of a layer."""
        if self._step is None or key.shape[1:] != value.shape[1:] or key.shape[3] != self.head_dim:
            raise UnsupportedError(
                f"keys {tuple(key.shape)} and values {tuple(value.shape)} are not of one size {self.head_dim}, "
                f"as LocalEngine needs them"
            )
        count, total = self._tokens, query.shape[2]
        query, key, value = (x[:, :, :count] for x in (query, key, value))
        factor = self.head_dim**-0.5 if scale is None else scale
        out = self._step.attend(layer - self._first_layer, query, key, value, factor)
        return out if count == total else F.pad(out, (0, 0, 0, 0, 0, total - count))

    def close(self) -> None:
        """Takes the attention function out of transformers' registry if this is the last model. Twice does nothing."""
        self._leave()
        if self.plan is not None and not self.plan.is_undone:
            self.plan.undo()


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Computes attention as transformers' ``AttentionInterface`` calls it."""
    if attention_mask is not None or options.get("sliding_window") is not None or options.get("softcap") is not None:
        raise UnsupportedError("LocalEngine takes no mask, sliding window or softcap: the model asked for one")
    model = getattr(module, "partsong_local")  # noqa: B009
    return model.attend(module.layer_idx, query, key, value, scaling), None


def _register() -> None:
    global _open_models
    with _LOCK:
        if _open_models == 0:
            AttentionInterface.register(_NAME, _attention)
        _open_models += 1


def _unregister() -> None:
    global _open_models
    with _LOCK:
        _open_models -= 1
        if _open_models == 0:
            getattr(AttentionInterface, "_global_mapping").pop(_NAME, None)  # noqa: B009


def _check(module: object, share: TextShare | None, weights: Weights | None) -> None:
    if not isinstance(module, PreTrainedModel):
        raise ArgumentTypeError(f"a local model is a transformers model, found {type(module).__name__}")
    config: Any = module.config
    if config.model_type not in FAMILIES:
        raise UnsupportedError(
            f"LocalEngine runs {', '.join(FAMILIES)}; found {config.model_type!r}, which was not tested with tokens of "
            f"several sequences in one row"
        )
    if getattr(config, "mask_token_id", None) is not None or getattr(config, "partsong_adapter", "causal") != "causal":
        raise UnsupportedError("this is a masked or block diffusion model: `partsong text` decodes those")
    if module.get_output_embeddings() is None:
        raise UnsupportedError(f"{type(module).__name__} has no language-model head")
    if module.training:
        raise ArgumentError(f"{type(module).__name__} is in training mode, where dropout is active: call .eval()")
    if (why := why_keys_cannot_be_kept(config)) is not None:
        raise UnsupportedError(why)
    if share is None and shard_of(module) is not None:
        raise UnsupportedError("this model is under a plan: undo it, and give LocalEngine the strategies and the mesh")
    if share is not None and any(isinstance(each, ContextParallel) for each in share.strategies):
        raise UnsupportedError(
            "ContextParallel cuts the tokens of a prompt, and LocalEngine computes several texts in one row; use "
            "TensorParallel, or `decode`"
        )
    if share is not None and share.reads_shares and weights is not None:
        raise UnsupportedError(
            f"weights={weights!r} rounds whole rows of a weight, and a rank has a part of them; leave weights out, or "
            f"run the model on one rank"
        )
