"""Reads and writes ParScale's published checkpoint layout, without running any code of the folder.

One folder holds backbone and streams. Tensors of layer i's prefixes are `model.layers.{i}.self_attn.prefix_k` and
`prefix_v`, those of the aggregator `model.aggregate_layer.0` and `.2`. `config.json` has `parscale_n`,
`parscale_n_tokens` and `parscale_attn_smooth`, and names the type `qwen2_parscale` if the backbone is `qwen2`. The
published models are such folders (Chen et al., arXiv 2505.10475). Other backbones keep their own type, so transformers
loads them as the base model.
"""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, PreTrainedModel

from partsong.errors import ArgumentError, ArgumentTypeError
from partsong.model_folders import model_folder, read_settings
from partsong.reasoning.parscale.weights import FAMILIES, StreamWeights

__all__ = ["LoadedStreams", "load_model", "load_streams", "save"]

_SUFFIX = "_parscale"
_NUM, _LENGTH, _SMOOTHING = "parscale_n", "parscale_n_tokens", "parscale_attn_smooth"


class LoadedStreams(NamedTuple):
    """Holds a folder's model.

    Attributes:
        model: the backbone, in eval mode.
        weights: the weights of its streams; empty if the folder has one stream, which is the base model.
    """

    model: PreTrainedModel
    weights: tuple[StreamWeights, ...]


def load_model(
    folder: str | Path, *, dtype: torch.dtype | None = None, device: str | torch.device | None = None
) -> LoadedStreams:
    """Loads backbone and streams: `ParScale(*flat)` with `flat = (loaded.model, *loaded.weights)` attaches them.

    Args:
        folder: a folder of the published layout, with safetensors, or its hub id.
        dtype: the type of the weights. Default: the checkpoint's own.
        device: where the model goes. Default: the CPU.

    Raises:
        ArgumentError: there is no such folder, it has another layout, or tensors are missing.
        ArgumentTypeError: the dtype is not floating.
    """
    if dtype is not None and not dtype.is_floating_point:
        raise ArgumentTypeError(f"dtype={dtype}; weights need a floating one")
    folder = model_folder(folder)
    settings, family = _settings(folder)
    with _Tensors(folder) as read:
        state = {name: read(name) for name in read.names}
    rest = {name: value for name, value in state.items() if not _is_stream(name)}
    kinds = {value.dtype for value in rest.values()}
    own = kinds.pop() if len(kinds) == 1 else torch.float32
    model: Any = _backbone(AutoConfig.for_model(family, **settings), rest, dtype or own, folder)
    model = model.eval().to(device or "cpu")
    if settings[_NUM] == 1:
        return LoadedStreams(model, ())
    return LoadedStreams(model, (_streams(settings, model, state),))


def load_streams(folder: str | Path, model: PreTrainedModel) -> StreamWeights:
    """Loads the streams only, for a backbone that is loaded already: several folders can share one.

    Args:
        folder: a folder of the published layout, or its hub id. Of its backbone's tensors, if it has them, only the
            last norm is read.
        model: the backbone the streams were trained on.

    Raises:
        ArgumentError: there is no such folder, or it has one stream, other sizes, or another backbone.
    """
    folder = model_folder(folder)
    settings, family = _settings(folder)
    if settings[_NUM] == 1:
        raise ArgumentError(f"{folder} has one stream, which is the base model, and no weights of streams")
    if family != model.config.model_type:
        raise ArgumentError(f"{folder} has streams for {family!r}, the model is {model.config.model_type!r}")
    with _Tensors(folder) as read:
        state = {name: read(name) for name in read.names if _is_stream(name)}
        norm = "model.norm.weight"
        if norm in read.names:
            ours = model.state_dict()[norm].cpu()
            theirs = read(norm)
            if theirs.shape != ours.shape or not torch.equal(theirs.to(ours.dtype), ours):
                raise ArgumentError(f"the streams of {folder} were trained on another backbone: {norm} differs")
    return _streams(settings, model, state)


def save(folder: str | Path, model: PreTrainedModel, weights: StreamWeights, *, backbone: bool = True) -> None:
    """Writes the published layout.

    Args:
        folder: where to; made if it is not there.
        model: the backbone.
        weights: the weights of the streams.
        backbone: whether the backbone's tensors are written as well; without them `load_streams` reads the folder.

    Raises:
        ArgumentError: the weights do not fit the model, or have one stream, for which the layout has no tensors.

    >>> import tempfile
    >>> from transformers import Qwen2Config, Qwen2ForCausalLM
    >>> sizes = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, vocab_size=9)
    >>> model = Qwen2ForCausalLM(Qwen2Config(**sizes, num_key_value_heads=1))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save(folder, model, StreamWeights.new(model, 4))
    ...     again, (streams,) = load_model(folder)
    >>> again.config.model_type, streams.num_streams, streams.prefix_length
    ('qwen2', 4, 48)
    """
    target = Path(folder)
    weights.check(model.config)
    if weights.num_streams == 1:
        raise ArgumentError("the published layout knows one stream as the base model, without weights of its own")
    streams = {name: value.detach().cpu().contiguous() for name, value in _published(weights).items()}
    target.mkdir(parents=True, exist_ok=True)
    if backbone:
        whole: Any = {**model.state_dict(), **streams}
        model.save_pretrained(target, state_dict=whole)
    else:
        save_file(streams, target / "model.safetensors", metadata={"format": "pt"})
        model.config.save_pretrained(target)
    path = target / "config.json"
    settings = json.loads(path.read_text(encoding="utf-8"))
    if settings["model_type"] == "qwen2":
        settings |= {"model_type": "qwen2" + _SUFFIX, "architectures": ["Qwen2ParScaleForCausalLM"]}
    settings |= {_NUM: weights.num_streams, _LENGTH: weights.prefix_length, _SMOOTHING: weights.smoothing}
    path.write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _settings(folder: Path) -> tuple[dict[str, Any], str]:
    """Reads the configuration, without the entries that name code, and the backbone's family."""
    settings = read_settings(folder)
    if not isinstance(settings.get(_NUM), int):
        raise ArgumentError(f"{folder}/config.json has no {_NUM}: the folder does not hold a ParScale model")
    for name in ("auto_map", "architectures", "transformers_version"):
        settings.pop(name, None)
    family = str(settings.pop("model_type", "")).removesuffix(_SUFFIX)
    if family not in FAMILIES:
        raise ArgumentError(f"{folder}/config.json is of type {family!r}; ParScale runs {', '.join(FAMILIES)}")
    return settings, family


def _streams(settings: dict[str, Any], model: PreTrainedModel, state: dict[str, Tensor]) -> StreamWeights:
    weights = StreamWeights.new(
        model, settings[_NUM], prefix_length=settings.get(_LENGTH, 48), smoothing=settings.get(_SMOOTHING, 0.01)
    )
    own = _published(weights)
    if missing := sorted(set(own) - set(state)):
        raise ArgumentError(f"the checkpoint has no {missing[0]} ({len(missing)} of {len(own)} names are missing)")
    with torch.no_grad():
        for name, value in own.items():
            if state[name].shape != value.shape:
                shape, expected = tuple(state[name].shape), tuple(value.shape)
                raise ArgumentError(f"{name} has shape {shape} in the checkpoint, {expected} was expected")
            value.copy_(state[name])
    return weights.eval()


def _published(weights: StreamWeights) -> dict[str, Tensor]:
    """Returns the weights, not copied, under the names that published checkpoints have."""
    state = {f"model.{name}": value for name, value in weights.state_dict().items() if name.startswith("aggregate")}
    for layer in range(len(weights.prefix_k)):
        state[f"model.layers.{layer}.self_attn.prefix_k"] = weights.prefix_k[layer].detach()
        state[f"model.layers.{layer}.self_attn.prefix_v"] = weights.prefix_v[layer].detach()
    return state


def _is_stream(name: str) -> bool:
    return name.startswith("model.aggregate_layer.") or name.endswith((".prefix_k", ".prefix_v"))


def _backbone(config: Any, state: dict[str, Tensor], dtype: torch.dtype, folder: Path) -> PreTrainedModel:
    kind = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    try:
        model, report = kind.from_pretrained(
            None, config=config, state_dict=state, dtype=dtype, output_loading_info=True
        )
    except RuntimeError as error:
        raise ArgumentError(f"the backbone of {folder} does not fit its config.json: {error}") from error
    for what, names in (("lacks", report["missing_keys"]), ("has unknown", report["unexpected_keys"])):
        if names:
            raise ArgumentError(f"{folder} {what} {len(names)} tensors of the backbone, {min(names)} among them")
    return model


class _Tensors:
    """Reads tensors by name from one or several safetensors files."""

    def __init__(self, folder: Path) -> None:
        self._stack, self._file_of = ExitStack(), dict[str, Any]()
        index = folder / "model.safetensors.index.json"
        if index.is_file():
            files = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        else:
            files = ["model.safetensors"]
        for name in files:
            path = folder / name
            if Path(name).name != name or not path.is_file():
                raise ArgumentError(f"no {path}: ParScale folders hold their weights as safetensors")
            try:
                opened = self._stack.enter_context(safe_open(path, framework="pt"))
            except SafetensorError as error:
                raise ArgumentError(f"{path} is not a whole safetensors file: {error}") from error
            self._file_of |= dict.fromkeys(opened.keys(), opened)

    @property
    def names(self) -> list[str]:
        return list(self._file_of)

    def __call__(self, name: str) -> Tensor:
        return self._file_of[name].get_tensor(name)

    def __enter__(self) -> _Tensors:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()
