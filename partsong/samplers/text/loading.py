"""Makes a `TextModel` from a model object, a folder or a hub id, without running any code of a model folder."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
from accelerate import init_empty_weights
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from partsong.errors import ArgumentError, ArgumentTypeError, UnsupportedError
from partsong.knobs import Whole, check_value
from partsong.model_folders import model_folder, read_settings
from partsong.parallel import Mesh, Strategy, parallelize
from partsong.parallel.loading.text_share import TextShare, read_share
from partsong.parallel.text.plan import TextPlan
from partsong.samplers.text import rekey_llada, rekey_llada2, rekey_qwen
from partsong.samplers.text.diffusion_gemma import DiffusionGemmaTextModel
from partsong.samplers.text.families import ADAPTER_FIELD, ADAPTERS, Family, adapter_of, family_of
from partsong.samplers.text.model import TextAdapter, TextModel
from partsong.samplers.text.rekey import Loader
from partsong.samplers.text.runner import StockTextModel, check_mask_token
from partsong.samplers.text.weights import load_rekeyed, load_stock, make_runnable, stacked_experts, weight_files

__all__ = ["load_text_model", "text_model_of"]

#: Native loaders, by architecture.
LOADERS: dict[str, Loader] = {
    "LLaDAModelLM": rekey_llada.llada,
    "LLaDAMoEModel": rekey_llada.llada_moe,
    "LLaDAMoEModelLM": rekey_llada.llada_moe,
    "LLaDA2MoeModelLM": rekey_llada2.llada2,
    "DreamModel": rekey_qwen.dream,
    "SDARForCausalLM": rekey_qwen.sdar,
    "SDARMoeForCausalLM": rekey_qwen.sdar,
    "Fast_dLLM_QwenForCausalLM": rekey_qwen.fast_dllm_v2,
}


def load_text_model(
    source: str | Path | PreTrainedModel,
    *,
    adapter: str | TextAdapter | None = None,
    mask_token_id: int | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    strategies: Sequence[Strategy] = (),
    mesh: Mesh | None = None,
) -> TextModel:
    """Loads a language model for the decoding loop, on one rank or on each of several.

    Public checkpoints of LLaDA, LLaDA-MoE, LLaDA 2.x, Dream, SDAR and Fast-dLLM v2, whose own code is remote, are
    re-keyed onto stock transformers modules; anything else is loaded by transformers itself. Weights are safetensors
    only and are read shard by shard straight into place; no code and no pickle of a model folder is ever executed.

    Args:
        source: a transformers model (used as it is, in eval mode), a checkpoint folder, a model of the zoo, or a hub
            id "owner/name".
        adapter: how it is decoded: a name in `families.ADAPTERS`, or your own row. Default: recognised.
        mask_token_id: default: the configuration's, the family's, or the folder's tokenizer's.
        dtype: that of the weights. Default: the checkpoint's.
        device: default: that of the mesh, or the CPU.
        strategies: `TensorParallel`, `ShardedWeights` or `LayerPipeline`, attached as by `parallelize`. Of a checkpoint
            a rank reads only its share.
        mesh: the ranks; None makes a mesh that the plan closes.

    Returns:
        The model. Its `plan` is a `TextPlan` where there are strategies, and None otherwise.

    Raises:
        ArgumentError: no such folder or repository, a file that is missing or broken, tensors that are missing,
            unexpected or of the wrong shape (named), a mask token outside the vocabulary, dtype or device given for
            a model object.
        UnsupportedError: a family that is not recognised, or a configuration that the stock module does not compute.
        ArgumentTypeError: `source` is something else.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> sizes = dict(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, vocab_size=9)
    >>> load_text_model(LlamaForCausalLM(LlamaConfig(**sizes)).eval()).adapter.name
    'causal'
    """
    if isinstance(source, PreTrainedModel):
        if dtype is not None or device is not None:
            raise ArgumentError("dtype and device are for checkpoints; a model object is used as it is: move it first")
        plan = parallelize(source, *strategies, mesh=mesh) if strategies else None
        return _with_plan(text_model_of(source, adapter=adapter, mask_token_id=mask_token_id), plan)
    if not isinstance(source, str | Path):
        raise ArgumentTypeError(f"load_text_model needs a model, a folder or a hub id, found {type(source).__name__}")
    folder = model_folder(source)
    config = read_settings(folder)
    row, family, mask = _recognise(config, adapter, mask_token_id, folder)
    loader = next((LOADERS[a] for a in config.get("architectures") or () if a in LOADERS), None)
    share, device = TextShare(strategies, mesh), device or (None if mesh is None else mesh.device)
    options: dict[str, Any] = {"dtype": dtype, "device": device}
    if loader is None:
        check_mask_token(row, mask, config.get("vocab_size") or sys.maxsize)
        weight_files(folder)
        module = _stock(folder, row, share, **options)
    else:
        rekeying = loader(config)
        check_mask_token(row, mask, rekeying.config.vocab_size)
        setattr(rekeying.config, ADAPTER_FIELD, row.name if row.name in ADAPTERS else None)
        rekeying.config.mask_token_id = mask
        options["dtype"] = dtype or _stated_dtype(config)
        module = load_rekeyed(folder, rekeying, **options, share=share if share.reads_shares else None)
    return _with_plan(_wrap(module, row, mask, _end_tokens(module, family, mask, folder)), share.finished(module))


def _stock(folder: Path, row: TextAdapter, share: TextShare, **options: Any) -> PreTrainedModel:
    """Loads a native class of transformers, this rank's share of it where its files can be read like that."""
    module = read_share(folder, share, **options) if share.reads_shares and row.keeps_keys else None
    stacked = stacked_experts(folder) if module is None and share.reads_shares and row.keeps_keys else None
    if stacked is not None:
        return load_rekeyed(folder, stacked, **options, share=share)
    return load_stock(folder, masked_lm=not row.keeps_keys, **options) if module is None else make_runnable(module)


def empty_text_model(folder: Path) -> PreTrainedModel:
    """Builds a model whose weights have shapes only, in the type that its configuration states.

    Args:
        folder: with ``config.json``; weights need not be there.

    Raises:
        ArgumentError: the configuration cannot be read.
        UnsupportedError: transformers has no causal class for it.
    """
    config = read_settings(folder)
    loader = next((LOADERS[a] for a in config.get("architectures") or () if a in LOADERS), None)
    try:
        with init_empty_weights():
            if loader is not None:
                rekeying = loader(config)
                module = rekeying.model_class(rekeying.config)
            else:
                own = AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
                module = AutoModelForCausalLM.from_config(own, trust_remote_code=False)
    except ValueError as problem:
        raise UnsupportedError(
            f"{folder} is no language model that transformers has a class for: {problem}"
        ) from problem
    nn.Module.to(module, _stated_dtype(config) or torch.float32)
    return module.eval()


def _with_plan(model: StockTextModel | DiffusionGemmaTextModel, plan: TextPlan | None) -> TextModel:
    model.plan = plan
    return model


def text_model_of(
    module: PreTrainedModel, *, adapter: str | TextAdapter | None = None, mask_token_id: int | None = None
) -> StockTextModel | DiffusionGemmaTextModel:
    """Wraps a model object for the decoding loop; arguments and errors as in `load_text_model`."""
    config = module.config.to_dict()
    config["architectures"] = config.get("architectures") or [type(module).__name__]
    row, family, mask = _recognise(config, adapter, mask_token_id, None)
    return _wrap(module, row, mask, _end_tokens(module, family, mask, None))


def _wrap(
    module: PreTrainedModel, row: TextAdapter, mask: int | None, ends: tuple[int, ...]
) -> StockTextModel | DiffusionGemmaTextModel:
    if row.noise == "uniform":
        return DiffusionGemmaTextModel(module, row, eos_token_ids=ends)
    return StockTextModel(module, row, mask_token_id=mask, eos_token_ids=ends)


def _recognise(
    config: Mapping[str, Any], adapter: str | TextAdapter | None, mask: int | None, folder: Path | None
) -> tuple[TextAdapter, Family | None, int | None]:
    """Finds the row, its family (None for a row of the caller's own) and the mask token."""
    row = adapter_of(config, adapter)
    family = family_of(config, row.name) if row.name in ADAPTERS else None
    return row, family, _mask_token(config, row, family, folder) if mask is None else mask


def _mask_token(config: Mapping[str, Any], row: TextAdapter, family: Family | None, folder: Path | None) -> int | None:
    if row.noise != "mask":
        return None
    stated = config.get("mask_token_id")
    if stated is not None:
        check_value("mask_token_id", stated, Annotated[int, Whole(0)], "the model's configuration: ")
        return stated
    if family is not None and family.mask_token_id is not None:
        return family.mask_token_id
    if folder is None or not any((folder / name).is_file() for name in ("tokenizer.json", "vocab.txt")):
        return None
    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False).mask_token_id
    except (OSError, ValueError) as error:
        raise ArgumentError(f"the tokenizer in {folder} cannot be read: {error}; give mask_token_id=") from error


def _end_tokens(
    module: PreTrainedModel, family: Family | None, mask: int | None, folder: Path | None
) -> tuple[int, ...]:
    """Collects the ids that end a text: the configuration's, the generation configuration's, and the family's own."""
    text = module.config.get_text_config()
    stated = [
        getattr(text, "eos_token_id", None),
        getattr(getattr(module, "generation_config", None), "eos_token_id", None),
    ]
    if folder is not None and (path := folder / "generation_config.json").is_file():
        try:
            stated.append(json.loads(path.read_text(encoding="utf-8")).get("eos_token_id"))
        except (OSError, ValueError, AttributeError) as error:
            raise ArgumentError(f"{path} cannot be read as a generation configuration: {error}") from error
    ids = {i for entry in stated if entry is not None for i in (entry if isinstance(entry, list | tuple) else [entry])}
    # The public checkpoints' chat templates end turns with tokens that their configurations do not name.
    if family is not None and mask is not None and mask == family.mask_token_id:
        ids.update(family.end_token_ids)
    return tuple(sorted(i for i in ids if 0 <= i < text.vocab_size))


def _stated_dtype(config: Mapping[str, Any]) -> torch.dtype | None:
    name = config.get("dtype") or config.get("torch_dtype")
    dtype = getattr(torch, name.removeprefix("torch."), None) if isinstance(name, str) else None
    if name is not None and not isinstance(dtype, torch.dtype):
        raise UnsupportedError(f"config.json names the dtype {name!r}, which torch does not have: give dtype=")
    return dtype
