"""Cosmos 1, 2, 2.5 and 3."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from diffusers import (
    AutoencoderKLCosmos,
    Cosmos2_5_PredictBasePipeline,
    Cosmos2_5_TransferPipeline,
    Cosmos2TextToImagePipeline,
    Cosmos2VideoToWorldPipeline,
    Cosmos3OmniPipeline,
    Cosmos3OmniTransformer,
    CosmosControlNetModel,
    CosmosTextToWorldPipeline,
    CosmosTransformer3DModel,
    CosmosVideoToWorldPipeline,
    EDMEulerScheduler,
    FlowMatchEulerDiscreteScheduler,
    UniPCMultistepScheduler,
)
from diffusers.models.controlnets import controlnet_cosmos

from tests.parallel.video_families_2026 import cosmos
from tests.pipelines import image_transforms
from tests.pipelines.case import Case
from tests.pipelines.parts import prompts
from tests.pipelines.video_parts import pictures
from tests.tiny_models.autoencoders import wan_autoencoder
from tests.tiny_models.weights import randomized


class _Harmless:
    """Stands for the checker of prompts and videos, which downloads its weights."""

    def to(self, device: Any) -> None:
        """Has nothing to move."""

    def check_text_safety(self, text: str) -> bool:
        """Finds no fault."""
        return True

    def check_video_safety(self, video: Any) -> Any:
        """Changes nothing."""
        return video


def _transformer(**changed: Any) -> CosmosTransformer3DModel:
    settings = {"rope_scale": (2.0, 1.0, 1.0), "extra_pos_embed_type": "learnable"}
    return randomized(cosmos(6, **settings | changed))


def _pipe(kind: Any, transformer: Any, scheduler: Any, vae: Any = None, **more: Any) -> Any:
    parts = {"text_encoder": None, "tokenizer": None, "safety_checker": _Harmless(), "scheduler": scheduler}
    return kind(transformer=transformer, vae=vae or wan_autoencoder(), **parts, **more)


def _first_autoencoder() -> AutoencoderKLCosmos:
    vae = AutoencoderKLCosmos(
        latent_channels=4,
        encoder_block_out_channels=(8, 8, 8, 8),
        decode_block_out_channels=(8, 8, 8, 8),
        attention_resolutions=(8,),
        resolution=64,
        num_layers=1,
        patch_size=4,
        patch_type="haar",
        scaling_factor=1.0,
        spatial_compression_ratio=8,
        temporal_compression_ratio=8,
        latents_mean=None,
        latents_std=None,
    )
    return randomized(vae)


def _edm() -> EDMEulerScheduler:
    return EDMEulerScheduler(prediction_type="epsilon", final_sigmas_type="sigma_min")


def _coarse(samples: int) -> dict[str, Any]:
    texts = {name: value.float() for name, value in prompts(samples).items() if name.endswith("embeds")}
    return prompts(samples) | texts | {"num_frames": 17}


def _video(samples: int) -> dict[str, Any]:
    return prompts(samples) | {"num_frames": 9}


def _from_picture(samples: int) -> dict[str, Any]:
    return _video(samples) | {"image": pictures(1)[0]}


def _transfer() -> Any:
    image_transforms.lend_to(controlnet_cosmos)
    net = CosmosControlNetModel(
        n_controlnet_blocks=1,
        in_channels=6,
        latent_channels=6,
        model_channels=48,
        num_attention_heads=3,
        attention_head_dim=16,
        mlp_ratio=2,
        text_embed_dim=12,
        adaln_lora_dim=4,
        max_size=(4, 32, 32),
    )
    return _pipe(
        Cosmos2_5_TransferPipeline,
        _transformer(in_channels=5, extra_pos_embed_type=None, controlnet_block_every_n=2),
        UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True),
        controlnet=randomized(net),
    )


def _controlled(samples: int) -> dict[str, Any]:
    return prompts(samples) | {"controls": pictures(9), "num_frames": 9, "num_frames_per_chunk": 9}


def _flow() -> FlowMatchEulerDiscreteScheduler:
    return FlowMatchEulerDiscreteScheduler(use_karras_sigmas=True)


class _Spelling:
    """A tokenizer that gives every letter a number."""

    eos_token_id = 1

    def convert_tokens_to_ids(self, token: str) -> int:
        """Knows one special token."""
        return 2

    def apply_chat_template(self, messages: Any, **options: Any) -> SimpleNamespace:
        """What is said, without a frame around it."""
        return SimpleNamespace(input_ids=[3 + ord(letter) % 29 for letter in messages[-1]["content"]])


def _omni() -> Cosmos3OmniPipeline:
    transformer = Cosmos3OmniTransformer(
        head_dim=12,
        hidden_size=24,
        intermediate_size=32,
        latent_channel=4,
        patch_latent_dim=16,
        num_attention_heads=6,
        num_hidden_layers=2,
        num_key_value_heads=3,
        vocab_size=32,
        rope_axes_dim=(2, 2, 2),
    )
    return Cosmos3OmniPipeline(
        transformer=randomized(transformer),
        text_tokenizer=_Spelling(),
        vae=wan_autoencoder(),
        scheduler=UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True),
        enable_safety_checker=False,
    )


def _spoken(samples: int) -> dict[str, Any]:
    sizes = {"height": 48, "width": 80, "num_frames": 9, "add_resolution_template": False}
    steps = {"num_inference_steps": 2, "output_type": "latent", "add_duration_template": False}
    return {"prompt": "a red kite", "negative_prompt": "blur", **sizes, **steps}


HERE = (
    Case(
        name="CosmosTextToWorldPipeline",
        build=lambda: _pipe(CosmosTextToWorldPipeline, _transformer().float(), _edm(), _first_autoencoder().float()),
        call=_coarse,
        tolerance=1e-4,  # the learned positions take no float64
    ),
    Case(
        name="CosmosVideoToWorldPipeline",
        build=lambda: _pipe(
            CosmosVideoToWorldPipeline, _transformer(in_channels=5).float(), _edm(), _first_autoencoder().float()
        ),
        call=lambda samples: _coarse(samples) | {"image": pictures(1)[0]},
        samples=1,
        tolerance=1e-4,
    ),
    Case(
        name="Cosmos2TextToImagePipeline",
        build=lambda: _pipe(Cosmos2TextToImagePipeline, _transformer(extra_pos_embed_type=None), _flow()),
        call=prompts,
    ),
    Case(
        name="Cosmos2VideoToWorldPipeline",
        build=lambda: _pipe(
            Cosmos2VideoToWorldPipeline, _transformer(in_channels=5, extra_pos_embed_type=None), _flow()
        ),
        call=_from_picture,
        samples=1,
    ),
    Case(
        name="Cosmos2_5_PredictBasePipeline",
        build=lambda: _pipe(
            Cosmos2_5_PredictBasePipeline,
            _transformer(in_channels=5, extra_pos_embed_type=None),
            UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True),
        ),
        call=_video,
    ),
    Case(name="Cosmos2_5_TransferPipeline", build=_transfer, call=_controlled),
    Case(name="Cosmos3OmniPipeline", build=_omni, call=_spoken, samples=1),
)
