"""Lists video models whose input is cut neither into tokens nor into frames: they run over guidance and batches."""

from __future__ import annotations

from partsong.parallel.adapters.row import Adapter, row

__all__ = ["ROWS"]

ROWS = (
    Adapter(
        family="Cosmos 3",
        model="Cosmos3OmniTransformer",
        whole="each of its layers attends twice, causally over the text and then over text and video in one sequence",
        splits=row(),
        gather=row(),
        sample="vision_tokens",
        timestep="vision_timesteps",
        # A call makes one sample, and its lists hold pieces of that one.
        batched=("vision_tokens", "sound_tokens", "action_tokens"),
    ),
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
        family="Kandinsky 6 SR",
        model="Kandinsky6SRTransformer3DModel",
        whole="which blocks of tokens attend to which is decided in every layer by the queries and keys of all of them",
        splits=row(),
        gather=row(),
        batched=("hidden_states", "timestep"),
    ),
)
