"""Ideogram 4, Bria FIBO 2 and OmniGen, which put text and pictures in one sequence, and VisualCloze."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from diffusers import (
    BriaFibo2Pipeline,
    FlowMatchEulerDiscreteScheduler,
    Ideogram4Pipeline,
    OmniGenPipeline,
    VisualClozeGenerationPipeline,
    VisualClozePipeline,
)
from diffusers.pipelines.omnigen import pipeline_omnigen, processor_omnigen

from tests.parallel.families import flux
from tests.parallel.image_families_sequences import fibo2, ideogram4, omnigen
from tests.pipelines import image_transforms
from tests.pipelines.case import Case
from tests.pipelines.parts import Absent, Letters, pil_picture
from tests.tiny_models.autoencoders import flux2_autoencoder, kl_autoencoder
from tests.tiny_models.weights import noise, randomized


def _ideogram() -> Any:
    def transformer() -> Any:
        return randomized(ideogram4(6, in_channels=128, llm_features_dim=24))

    scheduler = FlowMatchEulerDiscreteScheduler()
    models = {"transformer": transformer(), "unconditional_transformer": transformer()}
    pipe = Ideogram4Pipeline(scheduler, flux2_autoencoder(latent_channels=32), Absent(), Letters(), **models)
    pipe._get_text_encoder_hidden_states = lambda encoder, ids, *rest: [
        noise(*ids.shape, 12, seed=layer) for layer in range(2)
    ]
    return pipe


def _fibo2() -> Any:
    scheduler = FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True)
    return BriaFibo2Pipeline(randomized(fibo2(6)), scheduler, flux2_autoencoder(), Absent(), None)


def _cloze(kind: Any) -> Any:
    transformer = flux(6, in_channels=288, out_channels=16, num_single_layers=1, guidance_embeds=True)
    encoders = {f"{part}{number}": None for part in ("text_encoder", "tokenizer") for number in ("", "_2")}
    vae = kl_autoencoder(shift_factor=0.1)
    pipe = kind(FlowMatchEulerDiscreteScheduler(), vae, transformer=randomized(transformer), resolution=32, **encoders)
    for part in (pipe, getattr(pipe, "generation_pipe", pipe), getattr(pipe, "upsampling_pipe", pipe)):
        part._get_clip_prompt_embeds = lambda **options: noise(1, 10, seed=3)  # what the text encoders would answer
        part._get_t5_prompt_embeds = lambda **options: noise(1, 7, 12, seed=1)
    return pipe


class _Words:
    """A tokenizer that gives every word a number."""

    model_max_length = 120

    def __call__(self, text: str) -> Any:
        """The numbers of a prompt."""
        return SimpleNamespace(input_ids=[1 + sum(map(ord, word)) % 63 for word in text.split()])


class _Processor(processor_omnigen.OmniGenMultiModalProcessor):
    """Gives masks in double precision, as the model is here: its least number is infinite in single precision."""

    def __call__(self, *args: Any, **more: Any) -> dict[str, Any]:
        """Words and pictures as the model wants them."""
        made: dict[str, Any] = super().__call__(*args, **more)
        return made | {"attention_mask": made["attention_mask"].double()}


def _omnigen() -> Any:
    image_transforms.lend_to(processor_omnigen)
    image_transforms.lend_to(pipeline_omnigen, OmniGenMultiModalProcessor=_Processor)
    scheduler = FlowMatchEulerDiscreteScheduler(invert_sigmas=True, num_train_timesteps=1)
    return OmniGenPipeline(randomized(omnigen(6)), scheduler, kl_autoencoder(), _Words())


def _ideogram_call(samples: int) -> dict[str, Any]:
    return {
        "prompt": ["a short one", "long"][:samples],
        "max_sequence_length": 13,
        "guidance_schedule": (3.0, 2.0),
        "num_inference_steps": 2,
        "output_type": "latent",
        "height": 48,
        "width": 80,
    }


def _fibo2_call(samples: int) -> dict[str, Any]:
    return {
        "prompt_embeds": noise(samples, 2, 7, 12, seed=1),
        "negative_prompt_embeds": noise(samples, 2, 7, 12, seed=2),
        "prompt_embeds_mask": torch.ones(samples, 7, dtype=torch.bool),
        "negative_prompt_embeds_mask": torch.ones(samples, 7, dtype=torch.bool),
        "guidance_scale": 3.0,
        "num_inference_steps": 2,
        "output_type": "latent",
        "height": 48,
        "width": 80,
    }


def _omnigen_call(samples: int) -> dict[str, Any]:
    return {
        "prompt": ["a short one", "<img><|image_1|></img> in snow"][:samples],
        "input_images": [None, [pil_picture(32, 32)]][:samples],
        "guidance_scale": 3.0,
        "num_inference_steps": 2,
        "output_type": "latent",
        "height": 48,
        "width": 80,
    }


def _cloze_call(samples: int) -> dict[str, Any]:
    return {
        "task_prompt": "task",
        "content_prompt": "content",
        "image": [[pil_picture(32, 32), pil_picture(32, 32, seed=6)], [pil_picture(32, 32, seed=7), None]],
        "num_inference_steps": 2,
        "output_type": "latent",
    }


HERE = (
    Case(name="Ideogram4Pipeline", build=_ideogram, call=_ideogram_call),
    Case(name="BriaFibo2Pipeline", build=_fibo2, call=_fibo2_call),
    Case(name="OmniGenPipeline", build=_omnigen, call=_omnigen_call),
    Case(
        name="VisualClozeGenerationPipeline",
        build=lambda: _cloze(VisualClozeGenerationPipeline),
        call=_cloze_call,
        samples=1,
    ),
    Case(
        name="VisualClozePipeline",
        build=lambda: _cloze(VisualClozePipeline),
        call=lambda samples: _cloze_call(samples) | {"upsampling_strength": 0.0, "output_type": "pt"},
        samples=1,
    ),
)
