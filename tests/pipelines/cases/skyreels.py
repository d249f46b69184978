"""SkyReels-V2, which can give later frames later noise."""

from __future__ import annotations

from typing import Any

from diffusers import (
    SkyReelsV2DiffusionForcingImageToVideoPipeline,
    SkyReelsV2DiffusionForcingPipeline,
    SkyReelsV2DiffusionForcingVideoToVideoPipeline,
    SkyReelsV2ImageToVideoPipeline,
    SkyReelsV2Pipeline,
    SkyReelsV2Transformer3DModel,
)

from tests.parallel.video_families import wan_like
from tests.pipelines.case import Case
from tests.pipelines.cases.wan import SEEING, unipc
from tests.pipelines.parts import prompts
from tests.pipelines.unet_parts import clip_pictures
from tests.pipelines.video_parts import clip_vision, pictures
from tests.tiny_models.autoencoders import wan_autoencoder
from tests.tiny_models.weights import randomized


def _pipe(kind: Any, more: Any = None, **changed: Any) -> Any:
    transformer = randomized(wan_like(SkyReelsV2Transformer3DModel, **changed))
    parts = {"tokenizer": None, "text_encoder": None, "vae": wan_autoencoder(), "scheduler": unipc()}
    return kind(transformer=transformer, **parts, **more or {})


def _video(samples: int) -> dict[str, Any]:
    return prompts(samples) | {"num_frames": 9}


def _forcing(samples: int) -> dict[str, Any]:
    return _video(samples) | {"fps": 24, "ar_step": 1, "prompt": None}


def _from_picture(samples: int) -> dict[str, Any]:
    return _video(samples) | {"image": pictures(1)[0]}


HERE = (
    Case(name="SkyReelsV2Pipeline", build=lambda: _pipe(SkyReelsV2Pipeline), call=_video),
    Case(
        name="SkyReelsV2ImageToVideoPipeline",
        build=lambda: _pipe(
            SkyReelsV2ImageToVideoPipeline,
            {"image_encoder": clip_vision(), "image_processor": clip_pictures(16)},
            **SEEING,
        ),
        call=_from_picture,
        samples=1,
    ),
    Case(
        name="SkyReelsV2DiffusionForcingPipeline",
        build=lambda: _pipe(SkyReelsV2DiffusionForcingPipeline, inject_sample_info=True),
        call=_forcing,
        samples=1,
    ),
    Case(
        name="SkyReelsV2DiffusionForcingImageToVideoPipeline",
        build=lambda: _pipe(SkyReelsV2DiffusionForcingImageToVideoPipeline, inject_sample_info=True),
        call=lambda samples: _from_picture(samples) | {"fps": 24, "ar_step": 0},
        samples=1,
    ),
    Case(
        name="SkyReelsV2DiffusionForcingVideoToVideoPipeline",
        build=lambda: _pipe(SkyReelsV2DiffusionForcingVideoToVideoPipeline, inject_sample_info=True),
        call=lambda samples: (
            _video(samples)
            # In two parts, each with steps of its own.
            | {"video": pictures(9), "num_frames": 25, "base_num_frames": 17, "overlap_history": 9, "output_type": "pt"}
        ),
        samples=1,
    ),
)
