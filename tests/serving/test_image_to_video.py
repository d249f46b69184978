"""Checks a video that begins with a picture, from a client's file to the frames, against the pipeline itself."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import imageio.v3 as imageio
import numpy as np
import pytest
import torch
from diffusers import WanImageToVideoPipeline
from PIL import Image

from partsong import zoo
from partsong.seeds import generators
from tests.serving.running import running

PROMPT = "a red circle moves right"


@pytest.mark.full
def test_a_video_begins_with_the_picture_that_was_sent(tmp_path: Path) -> None:
    parts = {name: part for name, part in zoo.load("motion").components.items() if part is not None}
    pipe: Any = WanImageToVideoPipeline(**parts, image_encoder=None, image_processor=None, expand_timesteps=True)
    pipe.set_progress_bar_config(disable=True)
    pipe.save_pretrained(tmp_path / "begins")
    start = Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=np.uint8))
    arguments = {"num_frames": 9, "num_inference_steps": 4, "height": 64, "width": 64, "guidance_scale": 3.0}
    with torch.no_grad():
        frames = pipe(image=start, prompt=PROMPT, generator=generators(5, 1)[0], output_type="np", **arguments).frames[
            0
        ]
        other = pipe(
            image=Image.new("RGB", (64, 64)),
            prompt=PROMPT,
            generator=generators(5, 1)[0],
            output_type="np",
            **arguments,
        ).frames[0]
    buffer = io.BytesIO()
    start.save(buffer, "PNG")
    fields = {name: value for name, value in arguments.items() if name not in ("height", "width")}
    with running(
        tmp_path / "served", "--model", str(tmp_path / "begins"), "--nproc", "2", "--strategy", "ulysses"
    ) as server:
        client = server.client()
        video = client.videos.create_and_poll(
            model="begins", prompt=PROMPT, input_reference=("a.png", buffer.getvalue()),
            extra_body={"size": "64x64", "seed": 5, **fields}, poll_interval_ms=200,
        )  # fmt: skip
        assert video.status == "completed", video.error
        (tmp_path / "made.mp4").write_bytes(client.videos.download_content(video.id).read())
    made = imageio.imread(tmp_path / "made.mp4", plugin="FFMPEG") / 255
    assert made.shape == frames.shape
    # A file of a film holds frames that are near to those that were drawn.
    assert np.abs(made - frames).mean() < 0.5 * np.abs(made - other).mean()
