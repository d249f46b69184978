"""Real sizes of UNets whose rows are cut, and what those exchange."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace

from tests.parallel.real_size import Attends, Gathers, RealSize, Rows, full, present, real, whole

#: What a residual block exchanges: of a width, of so many channels, to so many.
Block = Callable[[int, int, int], Iterator[Rows]]


def norms(count: int) -> Rows:
    """Group norms: a mean and a variance of each of 32 groups, in single precision."""
    return Rows(layers=count, all=2 * 32, itemsize=4)


def _block(width: int, channels: int, out: int) -> Iterator[Rows]:
    """A residual block: twice a norm and a convolution, which reads the rows right above and right below."""
    for each in (channels, out):
        yield norms(1)
        yield Rows(layers=1, up=each * width, down=each * width)


def _separable_block(width: int, channels: int, out: int) -> Iterator[Rows]:
    """One whose convolutions look around in each channel by itself; the second has twice as many to read."""
    yield from _block(width, channels, 2 * out)


def rows_of(
    channels: Sequence[int],
    width: int,
    attending: Collection[int],
    *,
    rising: Collection[int] | None = None,
    transformers: int = 1,
    halving: str = "down",
    frames: int = 1,
    block: Block = _block,
) -> tuple[Rows, ...]:
    """What the layers of a UNet with two blocks at every level exchange; the first convolution is computed by all.

    Args:
        channels: of every level, finest first.
        width: of the finest level.
        attending: levels whose blocks have transformers behind them, each with a norm of its own.
        rising: those of them on the way up, where there is one block more; None is the same.
        transformers: how many there are behind a block, and in the middle.
        halving: whether the convolution that halves reads a row from above or from below: ``down`` or ``up``, which
            says where it goes.
        frames: pictures that each layer computes one by one.
        block: what a residual block exchanges.
    """
    rows: list[Rows] = []
    now, kept, last = channels[0], [channels[0]], len(channels) - 1
    for level, out in enumerate(channels):
        for _ in range(2):
            rows += [*block(width >> level, now, out), norms(transformers * (level in attending))]
            now = out
            kept.append(now)
        if level < last:
            padded = (width >> level) + (halving == "up")  # a column of zeros has been put beside them
            rows.append(Rows(layers=1, **{halving: now * padded}))
            kept.append(now)
    rows += [*block(width >> last, now, now), norms(transformers), *block(width >> last, now, now)]
    for level, out in reversed([*enumerate(channels)]):
        for _ in range(3):
            here = level in (attending if rising is None else rising)
            rows += [*block(width >> level, now + kept.pop(), out), norms(transformers * here)]
            now = out
        if level:  # of doubled rows one copy of every column travels
            rows.append(Rows(layers=1, up=now * (width >> level), down=now * (width >> level)))
    rows += [norms(1), Rows(layers=1, up=now * width, down=now * width)]
    return tuple(replace(row, layers=row.layers * frames) for row in rows)


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
        rows=rows_of((320, 640, 1280, 1280), 64, (0, 1, 2)),
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
        rows=rows_of((128, 128, 256, 256, 512, 512), 256, (4,), halving="up"),
        gathers=(Gathers(tokens=256, numbers=3 * 256),),
        output=((3, 256, 256),),
        grid=256,
        step=32,
    ),
    # Ten seconds. Behind a block stand three transformers: one of the sound alone, which attends twice, and two that
    # read a text as well.
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
        attends=(
            Attends(layers=5 * 4, tokens=(256 * 16,), heads=32, dim=4),
            Attends(layers=5 * 4, tokens=(128 * 8,), heads=32, dim=8),
            Attends(layers=5 * 4, tokens=(64 * 4,), heads=32, dim=12),
            Attends(layers=1 * 4, tokens=(32 * 2,), heads=32, dim=20),
        ),
        rows=rows_of((128, 256, 384, 640), 16, (0, 1, 2), transformers=3),
        gathers=(Gathers(tokens=256, numbers=8 * 16),),
        output=((8, 256, 16),),
        grid=256,
        step=8,
    ),
    # 1024 x 1024 pixels to make, and beside them as many to go by. Only the coarsest level attends to itself; the
    # keys and values of its 64 heads are one.
    RealSize(
        model="DreamLiteUNetModel",
        checkpoint="the class' defaults",
        inputs=lambda batch: {
            "sample": real(batch, 4, 128, 256),
            "timestep": real(batch),
            "encoder_hidden_states": real(batch, 500, 2048),
            "encoder_attention_mask": present(batch, 500),
        },
        attends=(Attends(layers=2 + 1 + 3, tokens=(32 * 64,), heads=64, kv_heads=1, dim=20),),
        rows=rows_of((320, 640, 1280), 256, (0, 1, 2), rising=(1, 2), block=_separable_block),
        gathers=(Gathers(tokens=128, numbers=4 * 256),),
        output=((4, 128, 256),),
        grid=128,
        step=4,
    ),
)

#: 1024 x 1024 pixels: another checkpoint of a class that is in the table already.
SDXL = RealSize(
    model="UNet2DConditionModel",
    checkpoint="stabilityai/stable-diffusion-xl-base-1.0",
    config={
        "sample_size": 128,
        "block_out_channels": (320, 640, 1280),
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        "transformer_layers_per_block": (1, 2, 10),
        "attention_head_dim": (5, 10, 20),
        "cross_attention_dim": 2048,
        "use_linear_projection": True,
        "addition_embed_type": "text_time",
        "addition_time_embed_dim": 256,
        "projection_class_embeddings_input_dim": 2816,
    },
    inputs=lambda batch: {
        "sample": real(batch, 4, 128, 128),
        "timestep": full(),
        "encoder_hidden_states": real(batch, 77, 2048),
        "added_cond_kwargs": {"text_embeds": real(batch, 1280), "time_ids": real(batch, 6)},
    },
    attends=(
        Attends(layers=10, tokens=(64 * 64,), heads=10, dim=64),
        Attends(layers=60, tokens=(32 * 32,), heads=20, dim=64),
    ),
    rows=rows_of((320, 640, 1280), 128, (1, 2)),
    gathers=(Gathers(tokens=128, numbers=4 * 128),),
    output=((4, 128, 128),),
    grid=128,
    step=4,
)
