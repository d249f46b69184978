"""Real sizes of models that put text and picture in one sequence by themselves; pictures of 1024 x 1024 pixels."""

from __future__ import annotations

import torch

from tests.parallel.real_size import Attends, Gathers, RealSize, flags, full, present, real, whole

_TOKENS = 64 * 64
#: 189 frames of 720 x 1280 pixels are 48 x 45 x 80 latents, in patches of 1 x 2 x 2, of which the last row is half.
_WORDS, _WORLD = 300, 48 * 23 * 40
#: 31 frames of 720 x 1280 pixels' latents in patches of 1 x 2 x 2, and their sound.
_FILM, _SOUND = 31 * 22 * 40, 400
_PACKED = _WORDS + _SOUND + _FILM

SEQUENCES = (
    RealSize(
        model="Krea2Transformer2DModel",
        checkpoint="the class' defaults",
        inputs=lambda batch: {
            "hidden_states": real(batch, _TOKENS, 64),
            "encoder_hidden_states": real(batch, 512, 12, 2560),
            "timestep": real(batch),
            "position_ids": whole(512 + _TOKENS, 3),
            "encoder_attention_mask": flags(batch, 512),
        },
        attends=(Attends(layers=28, tokens=(512 + _TOKENS,), heads=48, kv_heads=12, dim=128),),
        gathers=(Gathers(tokens=512 + _TOKENS, numbers=6144),),
        output=((_TOKENS, 64),),
    ),
    RealSize(
        model="ErnieImageTransformer2DModel",
        checkpoint="the class' defaults",
        values="autocast on its device, which meta tensors have not",
        inputs=lambda batch: {
            "hidden_states": real(batch, 128, 64, 64),
            "timestep": real(batch),
            "text_bth": real(batch, 256, 2560),
            "text_lens": whole(batch),
        },
        attends=(Attends(layers=24, tokens=(256 + _TOKENS,), heads=24, dim=128),),
        gathers=(Gathers(tokens=256 + _TOKENS, numbers=3072),),
        output=((128, 64, 64),),
    ),
    RealSize(
        model="Ideogram4Transformer2DModel",
        checkpoint="the class' defaults",
        values="autocast on its device, which meta tensors have not",
        inputs=lambda batch: {
            "hidden_states": real(batch, 512 + _TOKENS, 128),
            "timestep": real(batch),
            "encoder_hidden_states": real(batch, 512 + _TOKENS, 53248),
            "position_ids": whole(batch, 512 + _TOKENS, 3),
            "segment_ids": whole(batch, 512 + _TOKENS),
            "indicator": whole(batch, 512 + _TOKENS),
        },
        attends=(Attends(layers=34, tokens=(512 + _TOKENS,), heads=18, dim=256),),
        gathers=(Gathers(tokens=512 + _TOKENS, numbers=4608),),
        output=((512 + _TOKENS, 128),),
    ),
    # A text of 1024 words is summed up in 384 tokens: 256 and one more for every seven words after 256, up to a 64th.
    RealSize(
        model="BriaFibo2Transformer2DModel",
        checkpoint="the class' defaults",
        inputs=lambda batch: {
            "hidden_states": real(batch, 32, 128, 128),
            "timestep": real(batch),
            "encoder_hidden_states": real(batch, 6, 1024, 7680),
            "encoder_attention_mask": present(batch, 1024),
        },
        attends=(
            Attends(layers=2, tokens=(_TOKENS,), heads=28, dim=128),
            Attends(layers=44, tokens=(384 + _TOKENS,), heads=28, dim=128),
        ),
        gathers=(Gathers(tokens=_TOKENS, numbers=3584), Gathers(tokens=384 + _TOKENS, numbers=3584)),
        output=((32, 128, 128),),
    ),
    # Words, a token of the time, and the picture.
    RealSize(
        model="OmniGenTransformer2DModel",
        checkpoint="Shitao/OmniGen-v1-diffusers",
        values="autocast on its device, which meta tensors have not",
        config={"rope_scaling": {"long_factor": [1.0] * 48, "short_factor": [1.0] * 48}},
        inputs=lambda batch: {
            "hidden_states": real(batch, 4, 128, 128),
            "timestep": real(batch),
            "input_ids": whole(batch, 127),
            "input_img_latents": [],
            "input_image_sizes": {},
            "attention_mask": whole(batch, 128 + _TOKENS, 128 + _TOKENS),
            "position_ids": torch.arange(128 + _TOKENS).repeat(batch, 1),
        },
        attends=(Attends(layers=32, tokens=(128 + _TOKENS,), heads=32, dim=96),),
        gathers=(Gathers(tokens=128 + _TOKENS, numbers=3072),),
        output=((4, 128, 128),),
    ),
    # Words, sounds and frames in one sequence; both output layers run on all of it.
    RealSize(
        model="MiniMaxH3Transformer3DModel",
        checkpoint="the class' defaults",
        inputs=lambda batch: {
            "hidden_states": real(batch, _FILM, 96),
            "audio_hidden_states": real(batch, _SOUND, 32),
            "encoder_hidden_states": real(batch, _WORDS, 5120),
            "timestep": real(2),
            "timestep_indices": whole(_PACKED),
            "token_tags": whole(_PACKED),
            "position_ids": whole(_PACKED, 3),
            "video_indices": whole(_FILM),
            "audio_indices": whole(_SOUND),
            "text_indices": whole(_WORDS),
        },
        attends=(Attends(layers=50, tokens=(_PACKED,), heads=56, dim=128),),
        gathers=(Gathers(tokens=_PACKED, numbers=96), Gathers(tokens=_PACKED, numbers=32)),
        output=((_FILM, 96), (_SOUND, 32)),
    ),
    # Four tokens of the picture have one place in the mask. The words stay whole, and travel as those of Cosmos below.
    RealSize(
        model="QwenImage21Transformer2DModel",
        checkpoint="the class' defaults",
        inputs=lambda batch: {
            "hidden_states": real(batch, _TOKENS, 64),
            "encoder_hidden_states": real(batch, 512, 4096),
            "encoder_hidden_states_mask": present(batch, 512).long(),
            "timestep": real(batch),
            "img_shapes": [[(1, 64, 64)]] * batch,
            "img_mask": torch.cat([~present(batch, 512), present(batch, 1024)], dim=1),
        },
        attends=(Attends(layers=32, tokens=(512, _TOKENS), heads=32, dim=128),),
        gathers=(Gathers(tokens=_TOKENS, numbers=4096),),
        output=((512 + _TOKENS, 64),),
    ),
    # Words are attended to by the video, and travel as if they asked something; they read themselves on every rank.
    RealSize(
        model="Cosmos3OmniTransformer",
        checkpoint="the class' defaults",
        config={"rope_axes_dim": (24, 20, 20)},
        inputs=lambda batch: {
            "input_ids": whole(_WORDS),
            "text_indexes": torch.arange(_WORDS),
            "position_ids": torch.arange(_WORDS + _WORLD).expand(3, -1),
            "und_len": _WORDS,
            "sequence_length": _WORDS + _WORLD,
            "vision_tokens": [real(1, 48, 48, 45, 80)],
            "vision_token_shapes": [(48, 23, 40)],
            "vision_sequence_indexes": torch.arange(_WORDS, _WORDS + _WORLD),
            "vision_mse_loss_indexes": torch.arange(_WORDS, _WORDS + _WORLD),
            "vision_timesteps": full(_WORLD),
            "vision_noisy_frame_indexes": [torch.arange(48)],
        },
        attends=(Attends(layers=36, tokens=(_WORDS, _WORLD), heads=32, kv_heads=8, dim=128),),
        gathers=(Gathers(tokens=_WORLD, numbers=4096),),
        output=((48, 48, 45, 80),),
        batches=False,
    ),
)
