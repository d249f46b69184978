"""Saves and loads the `tiles` model: a stock transformers folder, with a stock `VQModel` of diffusers inside it.

Importing this module loads torch.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import LlamaForCausalLM, PreTrainedTokenizerBase

from partsong.errors import ArgumentError
from partsong_zoo.folders import save_folder
from partsong_zoo.shapes.grammar import parse
from partsong_zoo.shapes.model import build_tokenizer
from partsong_zoo.tiles import PICTURES
from partsong_zoo.tiles.reader import CaptionedTiles
from partsong_zoo.tiles.tokenizer import decode

__all__ = ["TilesModel", "load_tiles", "save_tiles"]


class TilesModel(NamedTuple):
    """Holds the parts of a model of picture tokens.

    Attributes:
        model: what `AutoModelForCausalLM` makes of the folder, in evaluation mode.
        tokenizer: what `AutoTokenizer` makes of it: one token for each word of a caption.
        pictures: what `VQModel` makes of its folder `pictures`.
    """

    model: LlamaForCausalLM
    tokenizer: PreTrainedTokenizerBase
    pictures: Any

    def captioned(self, captions: Sequence[str], guidance: float | None = None) -> CaptionedTiles:
        """Binds captions to the transformer: what the samplers of any order ask.

        Args:
            captions: sentences of the grammar of `shapes`.
            guidance: how far to go beyond the captions' own logits; None takes what the model's settings say.

        Raises:
            ArgumentError: a caption is not of the grammar; the model has no other words.
        """
        for caption in captions:
            parse(caption)
        ids = self.tokenizer(list(captions), padding=True, return_tensors="pt").input_ids
        guidance = float(self.model.config.partsong_guidance or 1.0) if guidance is None else guidance
        return CaptionedTiles(model=self.model, words=ids.to(self.model.device), guidance=guidance)

    def draw(self, tokens: torch.Tensor) -> NDArray[np.float32]:
        """Draws pictures `[B, 64, 64, 3]` in [0, 1] from their tokens, int64 `[B, 64]`."""
        images = decode(self.pictures, tokens).float().clamp(-1, 1)
        return ((images.permute(0, 2, 3, 1) + 1) / 2).cpu().numpy()


def save_tiles(model: LlamaForCausalLM, pictures: Any, folder: Path, *, guidance: float) -> None:
    """Saves a folder, float16 safetensors that load as float32.

    Args:
        model: the transformer; changed to half precision.
        pictures: the picture tokenizer; changed to half precision.
        folder: where to.
        guidance: what the model draws with if nothing else is asked for.
    """
    model.config.partsong_guidance = guidance
    save_folder(model, build_tokenizer(), folder)
    pictures.half().save_pretrained(folder / PICTURES)
    path = folder / PICTURES / "config.json"
    settings = {k: v for k, v in json.loads(path.read_text()).items() if k != "_name_or_path"}
    path.write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n")


def load_tiles(folder: Path, dtype: torch.dtype | None = None) -> TilesModel:
    """Loads a folder of `save_tiles` on the CPU; float32 if `dtype` is None.

    Raises:
        ArgumentError: the folder holds another model.
    """
    from diffusers import VQModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    options: dict[str, Any] = {"local_files_only": True, "use_safetensors": True}
    if not (folder / PICTURES / "config.json").is_file():
        raise ArgumentError(f"{folder} holds no model of picture tokens: it has no {PICTURES}/config.json")
    model: Any = AutoModelForCausalLM.from_pretrained(folder, **options)
    pictures: Any = VQModel.from_pretrained(folder / PICTURES, **options)
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    # The settings say float32, so only another type needs a conversion.
    if dtype is not None and dtype != torch.float32:
        model, pictures = model.to(dtype=dtype), pictures.to(dtype=dtype)
    return TilesModel(model.eval(), tokenizer, pictures.eval())
