"""Real sizes of models that make sound."""

from __future__ import annotations

from tests.parallel.real_size import Attends, Gathers, RealSize, angles, flags, real

SOUNDS = (
    # 47 seconds; one token in front tells of the whole.
    RealSize(
        model="StableAudioDiTModel",
        checkpoint="stabilityai/stable-audio-open-1.0",
        inputs=lambda batch: {
            "hidden_states": real(batch, 64, 1024),
            "timestep": real(batch),
            "encoder_hidden_states": real(batch, 130, 768),
            "global_hidden_states": real(batch, 1, 1536),
            "rotary_embedding": angles(1025, 32),
        },
        attends=(Attends(layers=24, tokens=(1025,), heads=24, dim=64),),
        gathers=(Gathers(tokens=1025, numbers=64),),
        output=((64, 1024),),
    ),
    # 64 tokens of memory stand in front; every layer attends twice.
    RealSize(
        model="StableAudio3DiTModel",
        checkpoint="the class' defaults",
        inputs=lambda batch: {
            "hidden_states": real(batch, 256, 1300),
            "timestep": real(batch),
            "encoder_hidden_states": real(batch, 257, 768),
            "global_hidden_states": real(batch, 768),
            "local_add_cond": real(batch, 257, 1300),
        },
        attends=(Attends(layers=2 * 24, tokens=(1364,), heads=24, dim=64),),
        gathers=(Gathers(tokens=1364, numbers=1536),),
        output=((256, 1300),),
    ),
    # Four minutes at 25 moments a second, two to a token.
    RealSize(
        model="AceStepTransformer1DModel",
        checkpoint="ACE-Step/Ace-Step1.5",
        inputs=lambda batch: {
            "hidden_states": real(batch, 6000, 64),
            "timestep": real(batch),
            "timestep_r": real(batch),
            "encoder_hidden_states": real(batch, 1000, 2048),
            "context_latents": real(batch, 6000, 128),
        },
        attends=(Attends(layers=24, tokens=(3000,), heads=16, kv_heads=8, dim=128),),
        gathers=(Gathers(tokens=3000, numbers=2048),),
        output=((6000, 64),),
    ),
    RealSize(
        model="LongCatAudioDiTTransformer",
        checkpoint="the class' defaults",
        inputs=lambda batch: {
            "hidden_states": real(batch, 701, 64),
            "encoder_hidden_states": real(batch, 120, 768),
            "encoder_attention_mask": flags(batch, 120),
            "timestep": real(batch),
            "attention_mask": flags(batch, 701),
            "latent_cond": real(batch, 701, 64),
        },
        attends=(Attends(layers=24, tokens=(701,), heads=24, dim=64, mask=1),),
        gathers=(Gathers(tokens=701, numbers=1536),),
        output=((701, 64),),
    ),
    # Three minutes, 44 100 / 2048 moments a second, and a token of the time in front.
    RealSize(
        model="MiniMaxMusic3Transformer1DModel",
        checkpoint="the class' defaults",
        inputs=lambda batch: {
            "hidden_states": real(batch, 128, 3875),
            "timestep": real(batch),
            "encoder_hidden_states": real(batch, 3875, 2048),
        },
        attends=(Attends(layers=36, tokens=(3876,), heads=32, dim=64),),
        gathers=(Gathers(tokens=3876, numbers=2048),),
        output=((128, 3875),),
    ),
)
