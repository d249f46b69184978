"""QwenImage 2.1."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from diffusers import (
    AutoencoderKLQwenImage21,
    FlowMatchEulerDiscreteScheduler,
    QwenImage21Pipeline,
    QwenImage21Transformer2DModel,
)

from tests.pipelines.case import Case
from tests.pipelines.parts import Absent
from tests.tiny_models.autoencoders import wan_settings
from tests.tiny_models.weights import noise, randomized


class _Processor:
    """Knows the words the pipeline asks for when it is made."""

    tokenizer = SimpleNamespace(encode=lambda text: [5])

    def apply_chat_template(self, *messages: Any, **options: Any) -> list[list[int]]:
        """Two words."""
        return [[1, 2]]


def _pipe() -> Any:
    transformer = QwenImage21Transformer2DModel(
        in_channels=4,
        out_channels=4,
        num_layers=2,
        attention_head_dim=8,
        num_attention_heads=3,
        context_in_dim=12,
        axes_dims_rope=(2, 2, 4),
    )
    vae = AutoencoderKLQwenImage21(**wan_settings(base_dim=4, decoder_base_dim=4))
    scheduler = FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True)
    return QwenImage21Pipeline(scheduler, vae.eval().double(), Absent(), _Processor(), randomized(transformer))


def _call(samples: int) -> dict[str, Any]:
    return {
        "prompt_embeds": noise(samples, 7, 12, seed=1),
        "prompt_embeds_mask": torch.ones(samples, 7, dtype=torch.int64),
        "negative_prompt_embeds": noise(samples, 7, 12, seed=2),
        "negative_prompt_embeds_mask": torch.ones(samples, 7, dtype=torch.int64),
        "true_cfg_scale": 3.0,
        "num_inference_steps": 2,
        "output_type": "latent",
        "height": 64,
        "width": 96,
    }


HERE = (Case(name="QwenImage21Pipeline", build=_pipe, call=_call),)
