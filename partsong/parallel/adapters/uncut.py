"""Lists transformers whose input stays whole: only samples and guidance branches are shared out."""

from __future__ import annotations

from partsong.parallel.adapters.shared_cuts import names, whole

__all__ = ["ROWS"]

ROWS = (
    whole(
        "Sana-WM",
        "SanaWMTransformer3DModel",
        "its delta rule takes frame after frame, each with the state that all frames before, or after, have left",
        "hidden_states timestep encoder_hidden_states encoder_attention_mask mask camera_conditions chunk_plucker "
        "cam_pos_embeds raymats frame_valid_mask",
        shared=("data_info", "pos_embeds"),
    ),
    whole(
        "AnyFlow FAR",
        "AnyFlowFARTransformer3DModel",
        "it attends to a cache of the pipeline's, which holds all tokens of earlier chunks, some of them coarser",
        "hidden_states timestep r_timestep encoder_hidden_states encoder_hidden_states_image",
        layered=("kv_cache",),
        shared=("chunk_partition", "kv_cache_flag", "attention_mask"),
    ),
    whole(
        "Wan-Animate 2",
        "WanAnimate2Transformer3DModel",
        "each frame attends to one of another video too, whose keys an earlier call has kept in an order of their own",
        "hidden_states timestep encoder_hidden_states condition_latents encoder_hidden_states_image "
        "reference_grid_sizes offset_grid_sizes",
        per_sample=names("hidden_states encoder_hidden_states condition_latents"),
        shared=("origin_area",),
    ),
    whole(
        "Kandinsky 6 SR",
        "Kandinsky6SRTransformer3DModel",
        "which blocks of tokens attend to which is decided in every layer by the queries and keys of all of them",
        "hidden_states timestep",
    ),
    whole(
        "RFD4-Proteina",
        "RFD4ProteinaTransformer",
        "it keeps a state for every pair of tokens, and triangles of pairs join all of them",
        "bb_ca local_latents bb_ca_time local_latents_time padding_mask token_type atom37_mask conditioning",
        sample="bb_ca",
        timestep="bb_ca_time",
    ),
    whole(
        "Mixtures of experts",
        "ExpertMixture",
        "it is several models, and each would have to be cut",
        "hidden_states encoder_hidden_states timestep",
        mixes=True,
    ),
)
