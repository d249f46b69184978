"""Real sizes of UNets that make videos: frames are a batch, and norms in the layers along time see all of them."""

from __future__ import annotations

from tests.parallel.real_size import Attends, Gathers, RealSize, full, real
from tests.parallel.real_sizes_unets import norms, rows_of

_CHANNELS, _ATTENDING = (320, 640, 1280, 1280), (0, 1, 2)

VIDEO_UNETS = (
    # 16 frames of 512 x 512 pixels. Motion is added behind every block, attention or not, and once in the middle.
    RealSize(
        model="UNetMotionModel",
        checkpoint="guoyww/animatediff-motion-adapter-v1-5-2 on Stable Diffusion 1.5",
        config={"cross_attention_dim": 768},
        inputs=lambda batch: {
            "sample": real(batch, 4, 16, 64, 64),
            "timestep": full(),
            "encoder_hidden_states": real(batch * 16, 77, 768),
        },
        attends=(
            Attends(layers=5 * 16, tokens=(64 * 64,), heads=8, dim=40),
            Attends(layers=5 * 16, tokens=(32 * 32,), heads=8, dim=80),
            Attends(layers=5 * 16, tokens=(16 * 16,), heads=8, dim=160),
            Attends(layers=1 * 16, tokens=(8 * 8,), heads=8, dim=160),
        ),
        rows=(*rows_of(_CHANNELS, 64, _ATTENDING, frames=16), norms(4 * 2 + 1 + 4 * 3)),
        gathers=(Gathers(tokens=64, numbers=4 * 64, times=16),),
        output=((4, 16, 64, 64),),
        grid=64,
        step=8,
    ),
    # 24 frames of 576 x 1024 pixels. Behind each of 22 blocks stand four convolutions along time with a norm each, and
    # behind each of 16 transformers one along time, which is also what the rows meet first.
    RealSize(
        model="UNet3DConditionModel",
        checkpoint="cerspense/zeroscope_v2_XL",
        inputs=lambda batch: {
            "sample": real(batch, 4, 24, 72, 128),
            "timestep": full(),
            "encoder_hidden_states": real(batch, 77, 1024),
        },
        attends=(
            Attends(layers=5 * 24, tokens=(72 * 128,), heads=5, dim=64),
            Attends(layers=5 * 24, tokens=(36 * 64,), heads=10, dim=64),
            Attends(layers=5 * 24, tokens=(18 * 32,), heads=20, dim=64),
            Attends(layers=1 * 24, tokens=(9 * 16,), heads=20, dim=64),
        ),
        rows=(*rows_of(_CHANNELS, 128, _ATTENDING, frames=24), norms(22 * 4 + 16 + 1)),
        gathers=(Gathers(tokens=72, numbers=4 * 128, times=24),),
        output=((4, 24, 72, 128),),
        grid=72,
        step=8,
    ),
    # 25 frames of 576 x 1024 pixels. Behind each of 22 blocks stands one along time with two norms.
    RealSize(
        model="UNetSpatioTemporalConditionModel",
        checkpoint="stabilityai/stable-video-diffusion-img2vid-xt",
        inputs=lambda batch: {
            "sample": real(batch, 25, 8, 72, 128),
            "timestep": full(),
            "encoder_hidden_states": real(batch, 1, 1024),
            "added_time_ids": real(batch, 3),
        },
        attends=(
            Attends(layers=5 * 25, tokens=(72 * 128,), heads=5, dim=64),
            Attends(layers=5 * 25, tokens=(36 * 64,), heads=10, dim=64),
            Attends(layers=5 * 25, tokens=(18 * 32,), heads=20, dim=64),
            Attends(layers=1 * 25, tokens=(9 * 16,), heads=20, dim=64),
        ),
        rows=(*rows_of(_CHANNELS, 128, _ATTENDING, frames=25), norms(22 * 2)),
        gathers=(Gathers(tokens=72, numbers=4 * 128, times=25),),
        output=((25, 4, 72, 128),),
        grid=72,
        step=8,
    ),
)
