"""RFD4-Proteina, which designs the atoms of molecules."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import (
    RFD4ProteinaAutoencoder,
    RFD4ProteinaPipeline,
    RFD4ProteinaScheduler,
    RFD4ProteinaTransformer,
)

from tests.pipelines.case import Case
from tests.tiny_models.weights import randomized

_TOKENS, _RESIDUES, _KINDS = 7, 5, 2
_TIMES = ("time_emb_bb_ca", "time_emb_local_latents")


def _transformer() -> RFD4ProteinaTransformer:
    transformer = RFD4ProteinaTransformer(
        nlayers=3,
        token_dim=24,
        nheads=3,
        dim_cond=12,
        pair_repr_dim=8,
        latent_dim=4,
        token_type_emb_dim=4,
        t_emb_dim=8,
        xt_pair_dist_dim=6,
        feats_seq=("xt_bb_ca", "xt_local_latents", "token_type"),
        feats_cond_seq=(*_TIMES, "recycle_remaining"),
        feats_pair_repr=("xt_bb_ca_pair_dists", "molecule_idx_pair"),
        feats_pair_cond=_TIMES,
        tri_mult_c=8,
        num_sequence_classes=_RESIDUES,
        num_token_types=_KINDS,
        recycle_conditioning_dim=2,
    )
    return randomized(transformer, torch.float32)


def _autoencoder() -> RFD4ProteinaAutoencoder:
    autoencoder = RFD4ProteinaAutoencoder(
        atom37_mask=[[atom <= residue + 2 for atom in range(37)] for residue in range(_RESIDUES)],
        allowed_residue_types=[[True] * _RESIDUES] * _KINDS,
        latent_dim=4,
        n_residue_types=_RESIDUES,
        num_token_types=_KINDS,
        nlayers=1,
        token_dim=24,
        nheads=3,
        dim_cond=8,
        pair_repr_dim=8,
        token_type_emb_dim=4,
        encoder_feats_seq=("token_type",),
    )
    return randomized(autoencoder, torch.float32)


def _scheduler(mode: str) -> RFD4ProteinaScheduler:
    return RFD4ProteinaScheduler(mode, "1/t", tsr_k=1.0, tsr_sigma=1.0, tail_steps=1)


def _pipe() -> RFD4ProteinaPipeline:
    return RFD4ProteinaPipeline(
        transformer=_transformer(),
        vae=_autoencoder(),
        bb_ca_scheduler=_scheduler("log"),
        local_latents_scheduler=_scheduler("power"),
        recycle_depths=[1, 2, 2],
    )


def _call(samples: int) -> dict[str, Any]:
    """Two chains, of which the first token is given; the last sample is one token shorter."""
    real = torch.ones(samples, _TOKENS, dtype=torch.bool)
    real[-1, -1] = False
    given = torch.zeros_like(real)
    given[:, 0] = True
    return {
        "padding_mask": real,
        "is_in_context_conditioning": given,
        "supports_local_latent": real & ~given,
        "token_type": torch.zeros_like(real, dtype=torch.int64),
        "conditioning_features": {
            "condition_sequence_1_residue": torch.zeros_like(real, dtype=torch.int64),
            "molecule_iid": (torch.arange(_TOKENS) > 3).long().expand(samples, -1).contiguous(),
        },
        "generator": [torch.Generator().manual_seed(9 + sample) for sample in range(samples)],
    }


HERE = (
    Case(name="RFD4ProteinaPipeline", build=_pipe, call=_call, tolerance=1e-4),  # its features are float32
)
