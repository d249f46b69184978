"""Lists transformers whose input stays whole: only samples and guidance branches are shared out."""

from __future__ import annotations

from partsong.parallel.adapters.row import Adapter, row

__all__ = ["ROWS"]

ROWS = (
    Adapter(
        family="Sana-WM",
        model="SanaWMTransformer3DModel",
        whole="its delta rule takes frame after frame, each with the state that all frames before, or after, have left",
        splits=row(),
        gather=row(),
        batched=(
            "hidden_states",
            "timestep",
            "encoder_hidden_states",
            "encoder_attention_mask",
            "mask",
            "camera_conditions",
            "chunk_plucker",
            "cam_pos_embeds",
            "raymats",
            "frame_valid_mask",
        ),
        shared=("data_info", "pos_embeds"),
    ),
    Adapter(
        family="AnyFlow FAR",
        model="AnyFlowFARTransformer3DModel",
        whole="it attends to a cache of the pipeline's, which holds all tokens of earlier chunks, some of them coarser",
        splits=row(),
        gather=row(),
        batched=("hidden_states", "timestep", "r_timestep", "encoder_hidden_states", "encoder_hidden_states_image"),
        layered=("kv_cache",),
        shared=("chunk_partition", "kv_cache_flag", "attention_mask"),
    ),
    Adapter(
        family="Kandinsky 6 SR",
        model="Kandinsky6SRTransformer3DModel",
        whole="which blocks of tokens attend to which is decided in every layer by the queries and keys of all of them",
        splits=row(),
        gather=row(),
        batched=("hidden_states", "timestep"),
    ),
    Adapter(
        family="RFD4-Proteina",
        model="RFD4ProteinaTransformer",
        whole="it keeps a state for every pair of tokens, and triangles of pairs join all of them",
        splits=row(),
        gather=row(),
        sample="bb_ca",
        timestep="bb_ca_time",
        batched=(
            "bb_ca",
            "local_latents",
            "bb_ca_time",
            "local_latents_time",
            "padding_mask",
            "token_type",
            "atom37_mask",
            "conditioning",
        ),
    ),
    Adapter(
        family="Mixtures of experts",
        model="ExpertMixture",
        whole="it is several models, and each would have to be cut",
        splits=row(),
        gather=row(),
        mixes=True,
    ),
)
