"""The zoo's pipelines of videos with one head, two layers and random weights, as folders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from partsong_zoo.folders import save_pipeline
from partsong_zoo.motion import model

__all__ = ["save_motion"]


class _Animator(torch.nn.Module):
    def __init__(self, transformer: Any) -> None:
        super().__init__()
        self.transformer, self.text = transformer, model.build_text_encoder(1)


def save_motion(root: Path) -> dict[str, Path]:
    """Writes both and returns their folders: "plain", and "causal" for the timestep pipeline."""
    made = {}
    torch.manual_seed(0)
    for name, build in (("plain", model.build_transformer), ("causal", model.build_causal_transformer)):
        transformer = build(heads=1, depth=2)
        with torch.no_grad():
            transformer.proj_out.weight.normal_(std=0.1)
        made[name] = root / name
        save_pipeline(model.build_pipeline(_Animator(transformer), model.build_vae(4)), made[name])
    return made
