"""Real sizes of models whose input stays whole: samples are shared out, and the branches of guidance."""

from __future__ import annotations

from typing import Any

import torch
from diffusers.models.transformers.transformer_wan_animate_2 import WanAnimate2KVCache

from tests.parallel.real_size import RealSize, flags, full, present, real, whole


def _cached(batch: int) -> dict[int, dict[str, Any]]:
    """Keys and values of earlier chunks: room for three of three frames in fine tokens, and for six in coarse ones."""
    fine, coarse = 3 * 3 * 30 * 52, 6 * 3 * 15 * 26
    return {
        layer: {"full_cache": real(2, batch, 40, fine, 128), "compressed_cache": real(2, batch, 40, coarse, 128)}
        for layer in range(40)
    }


def _kept(batch: int) -> WanAnimate2KVCache:
    """Keys and values of a video of 20 frames of tokens."""
    cache = WanAnimate2KVCache(40)
    for layer in cache.layer_caches:
        layer.store(*(real(batch, 20 * 30 * 52, 40, 128) for _ in range(2)))
    return cache


UNCUT = (
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
    # The last chunk of 81 frames of 480 x 832 pixels, which attends to all chunks before it.
    RealSize(
        model="AnyFlowFARTransformer3DModel",
        checkpoint="the class' defaults, which say that they are those of the published 81 frames",
        values="flexible attention, which meta tensors have not",
        inputs=lambda batch: {
            "hidden_states": real(batch, 2, 16, 60, 104),
            "timestep": full(batch, 2),
            "r_timestep": full(batch, 2),
            "encoder_hidden_states": real(batch, 512, 4096),
            "chunk_partition": [1, 3, 3, 3, 3, 3, 3, 2],
            "kv_cache": _cached(batch),
            "kv_cache_flag": {"num_cached_chunks": 7, "is_cache_step": False},
        },
        output=((2, 16, 60, 104),),
    ),
    # A step of 77 frames of 480 x 832 pixels beside as many of the video that they follow, whose keys are kept.
    RealSize(
        model="WanAnimate2Transformer3DModel",
        checkpoint="the class' defaults",
        values="flexible attention, which meta tensors have not",
        inputs=lambda batch: {
            "hidden_states": [real(16, 20, 60, 104)] * batch,
            "condition_latents": [real(20, 20, 60, 104)] * batch,
            "timestep": full(batch),
            "encoder_hidden_states": [real(512, 4096)] * batch,
            "encoder_hidden_states_image": real(batch, 257, 1280),
            "reference_grid_sizes": torch.tensor([[20, 30, 52]] * batch),
            "kv_cache": _kept(batch),
            "kv_cache_mode": "cached",
            "seq_len": 20 * 30 * 52,
            "origin_len": 77,
            "origin_area": [480, 832],
        },
        output=((16, 20, 60, 104),),
    ),
    # 121 frames of a tile of 512 x 768 pixels, the noise beside what is known of them.
    RealSize(
        model="Kandinsky6SRTransformer3DModel",
        checkpoint="the class' defaults, as kandinskylab/Kandinsky-6.0-VSR-distilled2steps-5s-Diffusers",
        values="flexible attention, which meta tensors have not",
        inputs=lambda batch: {"hidden_states": real(batch, 31, 32, 48, 129), "timestep": full(batch)},
        output=((31, 32, 48, 640),),
    ),
    # 161 frames of 704 x 1280 pixels, of which a latent has 8 x 32 x 32, and where the camera is in each.
    RealSize(
        model="SanaWMTransformer3DModel",
        checkpoint="the class' defaults, those of Efficient-Large-Model/SANA-WM_bidirectional-diffusers",
        values="autocast on its device, which meta tensors have not",
        inputs=lambda batch: {
            "hidden_states": real(batch, 128, 21, 22, 40),
            "timestep": full(batch, 1, 21),
            "encoder_hidden_states": real(batch, 1, 300, 2304),
            "mask": whole(batch, 300),
            "camera_conditions": real(batch, 21, 20),
            "chunk_plucker": real(batch, 48, 21, 22, 40),
        },
        output=((128, 21, 22, 40),),
    ),
    # A molecule of 256 tokens.
    RealSize(
        model="RFD4ProteinaTransformer",
        checkpoint="the class' defaults, but for most of what nvidia/RFD4-Proteina-Diffusers is told of a molecule",
        config={
            "feats_seq": ("xt_bb_ca", "xt_local_latents", "token_type"),
            "feats_pair_repr": ("xt_bb_ca_pair_dists", "molecule_idx_pair"),
            "feats_cond_seq": ("time_emb_bb_ca", "time_emb_local_latents", "recycle_remaining"),
        },
        inputs=lambda batch: {
            "bb_ca": full(batch, 256, 3),
            "local_latents": full(batch, 256, 32),
            "bb_ca_time": full(batch),
            "local_latents_time": full(batch),
            "padding_mask": flags(batch, 256),
            "token_type": whole(batch, 256),
            "conditioning": {
                "is_in_context_conditioning": flags(batch, 256),
                "supports_local_latent": flags(batch, 256),
                "molecule_iid": whole(batch, 256),
            },
        },
        output=((256, 3), (256, 32), (256, 147), (256, 256)),
    ),
)
