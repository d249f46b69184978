"""Lists the families of language models this package decodes, and recognises a checkpoint's own.

A configuration names its family by ``model_type`` and ``architectures``. Where these leave it open (a Llama with a mask
token may be a masked or a block diffusion model, shifted or not) nothing is guessed: the caller names the row.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

from partsong.errors import ArgumentError, ArgumentTypeError, UnsupportedError
from partsong.knobs import Count, check_value
from partsong.samplers.text.model import TextAdapter

__all__ = ["ADAPTERS", "Family", "adapter_of", "family_of"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """Holds an adapter, and how a configuration shows that it belongs to it.

    Attributes:
        adapter: how it is decoded.
        model_types: values of ``model_type``, any of which is needed; empty for rows that are only named.
        architectures: values of ``architectures``, any of which is needed; empty for any.
        mask_token_id: the public checkpoints' mask token, where their configuration does not say it.
        end_token_ids: tokens that end a text with that mask token besides the configuration's ``eos_token_id``.
        block_field: the configuration's name for the block size, which goes before the row's own.
    """

    adapter: TextAdapter
    model_types: tuple[str, ...] = ()
    architectures: tuple[str, ...] = ()
    mask_token_id: int | None = None
    end_token_ids: tuple[int, ...] = ()
    block_field: str = ""


def _blocks(name: str, size: int, shifted: bool = False) -> TextAdapter:
    return TextAdapter(name=name, attention="block_causal", block_size=size, shifted=shifted)


#: First match wins. Sources: LLaDA arXiv 2502.09992, LLaDA 2.0 arXiv 2512.15745, Dream arXiv 2508.15487, SDAR arXiv
#: 2510.06303, BD3-LM arXiv 2503.09573, Fast-dLLM v2 arXiv 2509.26328.
FAMILIES: tuple[Family, ...] = (
    Family(
        adapter=TextAdapter(name="llada", attention="full"),
        model_types=("llada",),
        architectures=("LLaDAModelLM",),
        mask_token_id=126336,
        end_token_ids=(126081, 126348),
    ),
    Family(
        adapter=TextAdapter(name="llada-moe", attention="full"),
        model_types=("llada", "lladamoe", "llada_moe"),
        architectures=("LLaDAMoEModel", "LLaDAMoEModelLM"),
        mask_token_id=156895,
        end_token_ids=(156892,),
    ),
    Family(
        adapter=_blocks("llada2", 32),
        model_types=("llada2_moe", "llada21_moe"),
        architectures=("LLaDA2MoeModelLM",),
        mask_token_id=156895,
        end_token_ids=(156892,),
    ),
    # "DreamForCausalLM" is another model with the same model_type, which is not shifted.
    Family(
        adapter=TextAdapter(name="dream", attention="full", shifted=True),
        model_types=("Dream",),
        architectures=("DreamModel",),
        mask_token_id=151666,
        end_token_ids=(151643, 151645),
    ),
    Family(
        adapter=_blocks("sdar", 4),
        model_types=("sdar", "sdar_moe"),
        architectures=("SDARForCausalLM", "SDARMoeForCausalLM"),
        mask_token_id=151669,
        end_token_ids=(151643, 151645),
        block_field="block_size",
    ),
    Family(
        adapter=_blocks("fast-dllm-v2", 32, shifted=True),
        model_types=("Fast_dLLM_Qwen",),
        architectures=("Fast_dLLM_QwenForCausalLM",),
        mask_token_id=151665,
        end_token_ids=(151643, 151645),
        block_field="bd_size",
    ),
    Family(
        adapter=TextAdapter(name="bert", attention="full", transform="cls.predictions.transform", keeps_keys=False),
        model_types=("bert",),
        architectures=("BertForMaskedLM", "BertForPreTraining"),
    ),
    Family(
        adapter=TextAdapter(name="modernbert", attention="full", transform="head", keeps_keys=False),
        model_types=("modernbert",),
        architectures=("ModernBertForMaskedLM",),
    ),
    Family(
        adapter=TextAdapter(
            name="diffusion-gemma",
            attention="block_causal",
            noise="uniform",
            block_size=256,
            block_origin="prompt",
            needs_keys=True,
        ),
        model_types=("diffusion_gemma",),
        block_field="canvas_length",
    ),
    # Rows that no public configuration names by itself.
    Family(adapter=TextAdapter(name="mdlm", attention="full")),
    Family(adapter=_blocks("bd3", 4), block_field="block_size"),
    Family(adapter=TextAdapter(name="causal", attention="causal", shifted=True, noise="none")),
)

_BY_NAME = {family.adapter.name: family for family in FAMILIES}

#: Every adapter by its name.
ADAPTERS: dict[str, TextAdapter] = {name: family.adapter for name, family in _BY_NAME.items()}

#: Stock decoders that use the given mask and positions as they are; the tests compare each with its own forward.
DECODERS = (
    "llama", "mistral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "olmo", "olmo2", "olmoe", "gemma", "granite",
    "cohere", "phi3", "glm4_moe", "mixtral", "smollm3", "gpt2", "gpt_neox",
)  # fmt: skip

#: The field under which a model that was re-keyed here keeps the name of its row when it is saved.
ADAPTER_FIELD = "partsong_adapter"


def adapter_of(config: Mapping[str, object], asked: str | TextAdapter | None = None) -> TextAdapter:
    """Finds the adapter that decodes a model.

    Args:
        config: a configuration's fields, as in ``config.json`` or ``model.config.to_dict()``.
        asked: a name out of `ADAPTERS`, a row of the caller's own, or None to recognise it from the configuration.

    Returns:
        The row. Its block size is the configuration's where that names one, unless the caller gave the row itself.

    Raises:
        UnsupportedError: the configuration does not say which row it is; the message lists the names.
        ArgumentError: an unknown name, or a block size that is not a positive integer.
        ArgumentTypeError: `asked` is neither a name nor a row.

    >>> adapter_of({"model_type": "sdar", "architectures": ["SDARForCausalLM"], "block_size": 8}).block_size
    8
    """
    if isinstance(asked, TextAdapter):
        return asked
    family = family_of(config, asked)
    size = config.get(family.block_field) if family.block_field else None
    if size is None:
        return family.adapter
    check_value(family.block_field, size, Count, "the model's configuration: ")
    return dataclasses.replace(family.adapter, block_size=cast(int, size))


def family_of(config: Mapping[str, object], asked: str | None = None) -> Family:
    """Finds the family a configuration belongs to; `asked`, a name out of `ADAPTERS`, goes before it.

    Raises:
        UnsupportedError: not recognised.
        ArgumentError: an unknown name.
        ArgumentTypeError: `asked` is not a name.
    """
    name = asked if asked is not None else config.get(ADAPTER_FIELD)
    if name is not None:
        if not isinstance(name, str):
            raise ArgumentTypeError(f"an adapter is a name, a TextAdapter or None, found {type(name).__name__}")
        if name not in _BY_NAME:
            raise ArgumentError(f"there is no adapter {name!r}; there are {_names()}")
        return _BY_NAME[name]
    model_type = config.get("model_type")
    stated = config.get("architectures") or ()
    architectures = tuple(stated) if isinstance(stated, list | tuple) else (str(stated),)
    for family in FAMILIES:
        if model_type in family.model_types and _agrees(family, architectures):
            return family
    if model_type in DECODERS and config.get("mask_token_id") is None:
        return _BY_NAME["causal"]
    raise UnsupportedError(_unknown(model_type, architectures, config.get("mask_token_id")))


def _agrees(family: Family, architectures: tuple[object, ...]) -> bool:
    # A model object may state no architectures; then a model_type that two families share decides nothing.
    if not architectures:
        return sum(bool(set(family.model_types) & set(other.model_types)) for other in FAMILIES) == 1
    return not family.architectures or bool(set(architectures) & set(family.architectures))


def _unknown(model_type: object, architectures: tuple[object, ...], mask: object) -> str:
    fields = f"model_type {model_type!r}, architectures {list(architectures)}"
    if model_type in DECODERS:
        reason = f"a stock decoder with mask token {mask} may be a masked or a block diffusion model, shifted or not"
    else:
        reason = "no family here has these"
    return f"how to decode this model is unknown ({fields}): {reason}. Name it with adapter=, one of {_names()}"


def _names() -> str:
    return ", ".join(sorted(_BY_NAME))
