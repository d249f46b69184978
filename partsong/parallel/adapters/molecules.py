"""Lists models of molecules."""

from __future__ import annotations

from partsong.parallel.adapters.row import Adapter, row

__all__ = ["ROWS"]

ROWS = (
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
)
