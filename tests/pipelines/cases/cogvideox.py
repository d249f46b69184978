"""CogVideoX, ConsisID, Mochi and Latte: videos of 2024."""

from __future__ import annotations

from typing import Any

from diffusers import (
    CogVideoXDDIMScheduler,
    CogVideoXDPMScheduler,
    CogVideoXFunControlPipeline,
    CogVideoXImageToVideoPipeline,
    CogVideoXPipeline,
    CogVideoXTransformer3DModel,
    CogVideoXVideoToVideoPipeline,
    DDIMScheduler,
    FlowMatchEulerDiscreteScheduler,
    LattePipeline,
    MochiPipeline,
)
from diffusers.pipelines.consisid.pipeline_consisid import ConsisIDPipeline

from tests.parallel.video_families import cogvideox, latte, mochi
from tests.parallel.video_families_2026 import consis_id
from tests.pipelines.case import Case
from tests.pipelines.parts import prompts
from tests.pipelines.video_parts import cogvideox_autoencoder, kept, pictures
from tests.tiny_models.autoencoders import kl_autoencoder
from tests.tiny_models.weights import noise, randomized


def _transformer(**changed: Any) -> CogVideoXTransformer3DModel:
    return randomized(cogvideox(6, sample_width=10, **changed))


def _pipe(kind: Any, transformer: Any, scheduler: Any = None) -> Any:
    return kind(
        tokenizer=None,
        text_encoder=None,
        vae=cogvideox_autoencoder(),
        transformer=transformer,
        scheduler=scheduler or CogVideoXDDIMScheduler(),
    )


def _video(samples: int) -> dict[str, Any]:
    return prompts(samples) | {"num_frames": 9}


def _faces(samples: int) -> dict[str, Any]:
    face = {"id_cond": noise(1, 12, seed=3), "id_vit_hidden": [noise(1, 5, 12, seed=4)]}
    return _video(samples) | {"image": pictures(1)[0], **face}


def _mochi() -> MochiPipeline:
    scheduler = FlowMatchEulerDiscreteScheduler(invert_sigmas=True)
    return MochiPipeline(scheduler, None, None, None, randomized(mochi(6)))


def _mochi_call(samples: int) -> dict[str, Any]:
    return prompts(samples) | {
        "prompt_embeds": noise(samples, 7, 16, seed=1),
        "prompt_attention_mask": kept(samples).bool(),
        "negative_prompt_embeds": noise(samples, 7, 16, seed=2),
        "negative_prompt_attention_mask": kept(samples, present=3).bool(),
        "num_frames": 13,
    }


def _latte() -> LattePipeline:
    return LattePipeline(None, None, kl_autoencoder(), randomized(latte(6)), DDIMScheduler())


def _latte_call(samples: int) -> dict[str, Any]:
    return prompts(samples) | {"height": 48, "width": 48, "video_length": 3, "negative_prompt": None}


HERE = (
    Case(name="CogVideoXPipeline", build=lambda: _pipe(CogVideoXPipeline, _transformer()), call=_video),
    Case(
        name="CogVideoXPipeline + rotary",
        build=lambda: _pipe(
            CogVideoXPipeline, _transformer(use_rotary_positional_embeddings=True), CogVideoXDPMScheduler()
        ),
        call=_video,
    ),
    Case(
        name="CogVideoXImageToVideoPipeline",
        build=lambda: _pipe(
            CogVideoXImageToVideoPipeline,
            _transformer(
                in_channels=8,
                use_rotary_positional_embeddings=True,
                use_learned_positional_embeddings=True,
                ofs_embed_dim=8,
            ),
        ),
        call=lambda samples: _video(samples) | {"image": pictures(1)[0]},
        samples=1,
    ),
    Case(
        name="CogVideoXVideoToVideoPipeline",
        build=lambda: _pipe(CogVideoXVideoToVideoPipeline, _transformer()),
        call=lambda samples: prompts(samples) | {"video": pictures(9), "num_inference_steps": 3},
        samples=1,
    ),
    Case(
        name="CogVideoXFunControlPipeline",
        build=lambda: _pipe(CogVideoXFunControlPipeline, _transformer(in_channels=8)),
        call=lambda samples: prompts(samples) | {"control_video": pictures(9)},
        samples=1,
    ),
    # diffusers offers it where OpenCV is installed, which draws the points of faces; these are optional.
    Case(
        name="ConsisIDPipeline",
        build=lambda: _pipe(ConsisIDPipeline, randomized(consis_id(6, in_channels=8, sample_width=10))),
        call=_faces,
        samples=1,
    ),
    Case(name="MochiPipeline", build=_mochi, call=_mochi_call),
    Case(name="LattePipeline", build=_latte, call=_latte_call),
)
