"""Real sizes of UNets and of other models whose input is no sequence of tokens."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from tests.parallel.real_size import Attends, Gathers, RealSize, Rows, full, present, real, whole


def _norm() -> Rows:
    """A mean and a variance of each of 32 groups, in single precision."""
    return Rows(layers=1, all=2 * 32, itemsize=4)


def _block(width: int, channels: int, out: int) -> Iterator[Rows]:
    """A residual block: twice a norm and a convolution, which reads the rows right above and right below."""
    for each in (channels, out):
        yield _norm()
        yield Rows(layers=1, up=each * width, down=each * width)


def _rows(channels: Sequence[int], width: int, attending: Collection[int], halving: str) -> tuple[Rows, ...]:
    """What the layers of a UNet with two blocks at every level exchange; the first convolution is computed by all.

    Args:
        channels: of every level, finest first.
        width: of the finest level.
        attending: levels with attention, which has a norm of its own.
        halving: whether the convolution that halves reads a row from above or from below: ``down`` or ``up``, which
            says where it goes.
    """
    rows: list[Rows] = []
    now, kept, last = channels[0], [channels[0]], len(channels) - 1
    for level, out in enumerate(channels):
        for _ in range(2):
            rows += [*_block(width >> level, now, out), *[_norm()] * (level in attending)]
            now = out
            kept.append(now)
        if level < last:
            padded = (width >> level) + (halving == "up")  # a column of zeros has been put beside them
            rows.append(Rows(layers=1, **{halving: now * padded}))
            kept.append(now)
    rows += [*_block(width >> last, now, now), _norm(), *_block(width >> last, now, now)]
    for level, out in reversed([*enumerate(channels)]):
        for _ in range(3):
            rows += [*_block(width >> level, now + kept.pop(), out), *[_norm()] * (level in attending)]
            now = out
        if level:  # of doubled rows one copy of every column travels
            rows.append(Rows(layers=1, up=now * (width >> level), down=now * (width >> level)))
    return (*rows, _norm(), Rows(layers=1, up=now * width, down=now * width))


ROWS = (
    # 512 x 512 pixels.
    RealSize(
        model="UNet2DConditionModel",
        checkpoint="stable-diffusion-v1-5/stable-diffusion-v1-5",
        config={"cross_attention_dim": 768, "sample_size": 64},
        inputs=lambda batch: {
            "sample": real(batch, 4, 64, 64),
            "timestep": full(),
            "encoder_hidden_states": real(batch, 77, 768),
        },
        attends=(
            Attends(layers=5, tokens=(64 * 64,), heads=8, dim=40),
            Attends(layers=5, tokens=(32 * 32,), heads=8, dim=80),
            Attends(layers=5, tokens=(16 * 16,), heads=8, dim=160),
            Attends(layers=1, tokens=(8 * 8,), heads=8, dim=160),
        ),
        rows=_rows((320, 640, 1280, 1280), 64, (0, 1, 2), "down"),
        gathers=(Gathers(tokens=64, numbers=4 * 64),),
        output=((4, 64, 64),),
        grid=64,
        step=8,
    ),
    RealSize(
        model="UNet2DModel",
        checkpoint="google/ddpm-celebahq-256",
        config={
            "sample_size": 256,
            "block_out_channels": (128, 128, 256, 256, 512, 512),
            "down_block_types": (*("DownBlock2D",) * 4, "AttnDownBlock2D", "DownBlock2D"),
            "up_block_types": ("UpBlock2D", "AttnUpBlock2D", *("UpBlock2D",) * 4),
            "downsample_padding": 0,
            "flip_sin_to_cos": False,
            "freq_shift": 1,
            "attention_head_dim": None,
            "norm_eps": 1e-6,
        },
        inputs=lambda batch: {"sample": real(batch, 3, 256, 256), "timestep": full()},
        attends=(
            Attends(layers=5, tokens=(16 * 16,), heads=1, dim=512),
            Attends(layers=1, tokens=(8 * 8,), heads=1, dim=512),
        ),
        rows=_rows((128, 128, 256, 256, 512, 512), 256, (4,), "up"),
        gathers=(Gathers(tokens=256, numbers=3 * 256),),
        output=((3, 256, 256),),
        grid=256,
        step=32,
    ),
)

WHOLE = (
    # Ten seconds.
    RealSize(
        model="AudioLDM2UNet2DConditionModel",
        checkpoint="cvssp/audioldm2",
        config={
            "in_channels": 8,
            "out_channels": 8,
            "block_out_channels": (128, 256, 384, 640),
            "cross_attention_dim": ((None, 768, 1024),) * 4,
            "attention_head_dim": 32,
        },
        inputs=lambda batch: {
            "sample": real(batch, 8, 256, 16),
            "timestep": full(),
            "encoder_hidden_states": real(batch, 8, 768),
            "encoder_hidden_states_1": real(batch, 128, 1024),
            "encoder_attention_mask_1": whole(batch, 128),
        },
        output=((8, 256, 16),),
    ),
    RealSize(
        model="Kandinsky3UNet",
        checkpoint="kandinsky-community/kandinsky-3",
        inputs=lambda batch: {
            "sample": real(batch, 4, 128, 128),
            "timestep": full(),
            "encoder_hidden_states": real(batch, 128, 4096),
            "encoder_attention_mask": whole(batch, 128),
        },
        output=((4, 128, 128),),
    ),
    RealSize(
        model="DreamLiteUNetModel",
        checkpoint="the class' defaults",
        inputs=lambda batch: {
            "sample": real(batch, 4, 128, 256),
            "timestep": real(batch),
            "encoder_hidden_states": real(batch, 500, 2048),
            "encoder_attention_mask": present(batch, 500),
        },
        output=((4, 128, 256),),
    ),
    RealSize(
        model="PriorTransformer",
        checkpoint="kandinsky-community/kandinsky-2-2-prior",
        config={"embedding_dim": 1280, "clip_embed_dim": 1280},
        inputs=lambda batch: {
            "hidden_states": real(batch, 1280),
            "timestep": full(),
            "proj_embedding": real(batch, 1280),
            "encoder_hidden_states": real(batch, 77, 1280),
            "attention_mask": present(batch, 77),
        },
        output=((1280,),),
    ),
    RealSize(
        model="StableCascadeUNet",
        checkpoint="stabilityai/stable-cascade-prior",
        config={"clip_image_in_channels": 768, "clip_text_in_channels": 1280, "switch_level": (False,)},
        inputs=lambda batch: {
            "sample": real(batch, 16, 24, 24),
            "timestep_ratio": real(batch),
            "clip_text_pooled": real(batch, 1, 1280),
            "clip_text": real(batch, 77, 1280),
            "clip_img": real(batch, 1, 768),
        },
        output=((16, 24, 24),),
    ),
    # 16 frames of 512 x 512 pixels.
    RealSize(
        model="UNetMotionModel",
        checkpoint="guoyww/animatediff-motion-adapter-v1-5-2 on Stable Diffusion 1.5",
        config={"cross_attention_dim": 768},
        inputs=lambda batch: {
            "sample": real(batch, 4, 16, 64, 64),
            "timestep": full(),
            "encoder_hidden_states": real(batch * 16, 77, 768),
        },
        output=((4, 16, 64, 64),),
    ),
    # 16 frames of 256 x 256 pixels.
    RealSize(
        model="UNet3DConditionModel",
        checkpoint="ali-vilab/text-to-video-ms-1.7b",
        inputs=lambda batch: {
            "sample": real(batch, 4, 16, 32, 32),
            "timestep": full(),
            "encoder_hidden_states": real(batch, 77, 1024),
        },
        output=((4, 16, 32, 32),),
    ),
    # 25 frames of 576 x 1024 pixels.
    RealSize(
        model="UNetSpatioTemporalConditionModel",
        checkpoint="stabilityai/stable-video-diffusion-img2vid-xt",
        inputs=lambda batch: {
            "sample": real(batch, 25, 8, 72, 128),
            "timestep": full(),
            "encoder_hidden_states": real(batch, 1, 1024),
            "added_time_ids": real(batch, 3),
        },
        output=((25, 4, 72, 128),),
    ),
)
