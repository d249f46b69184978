"""Decodes a video block by block, exactly as all at once: causal decoders go on from what they have seen."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from partsong.errors import UnsupportedError

__all__ = ["StreamingDecoder"]


class StreamingDecoder:
    """Decodes the latents of a video in pieces, in order.

    Wan's decoder is causal: each latent frame needs what its convolutions have seen of those before, which is kept
    here from one piece to the next. What comes out equals the whole decoding bit for bit, and memory does not grow.

    Args:
        vae: the autoencoder of the pipeline; its own cache is left alone.

    Raises:
        UnsupportedError: the autoencoder's decoding cannot be cut in time exactly.
    """

    def __init__(self, vae: Any) -> None:
        if type(vae).__name__ != "AutoencoderKLWan":
            raise UnsupportedError(
                f"{type(vae).__name__} cannot decode a video in pieces exactly; AutoencoderKLWan can (its decoder is "
                'causal). Ask for output_type="latent" and decode the whole'
            )
        if vae.use_tiling:
            raise UnsupportedError("tiled decoding starts anew for every tile; call vae.disable_tiling()")
        self.vae = vae
        self._seen: list[Any] | None = None
        # Every block's call has its own thread, and most systems' allocators an arena per thread, which keeps what
        # was freed there. Decoded in many threads, a long video would leave the memory of a decoding in each.
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="partsong-decoder")

    def decode(self, z: Tensor, return_dict: bool = True) -> Any:
        """Decodes the next latents; called and answered as the autoencoder's own ``decode``.

        Args:
            z: `[B, C, f, h, w]`, as the pipeline gives them to its autoencoder.
            return_dict: answers with an output object instead of a tuple.

        Returns:
            ``4 (f - 1) + 1`` frames `[B, 3, F, H, W]` for the first piece (with a factor of 4 in time), 4 f afterwards.
        """
        inference = torch.is_inference_mode_enabled()
        return self._worker.submit(self._decode, z, return_dict, inference).result()

    def close(self) -> None:
        """Ends the thread; nothing is decoded afterwards."""
        self._worker.shutdown(wait=False)

    def _decode(self, z: Tensor, return_dict: bool, inference: bool) -> Any:
        with torch.inference_mode(inference), torch.no_grad():
            return self._pieces(z, return_dict)

    def _pieces(self, z: Tensor, return_dict: bool) -> Any:
        from diffusers.models.autoencoders.autoencoder_kl_wan import unpatchify
        from diffusers.models.autoencoders.vae import DecoderOutput

        vae, first = self.vae, self._seen is None
        if self._seen is None:
            vae.clear_cache()
            self._seen = [None] * vae._conv_num
        x = vae.post_quant_conv(z)
        pieces = []
        for frame in range(z.shape[2]):
            start = {"first_chunk": True} if first and frame == 0 else {}
            pieces.append(vae.decoder(x[:, :, frame : frame + 1], feat_cache=self._seen, feat_idx=[0], **start))
        out = torch.cat(pieces, dim=2)
        if vae.config.patch_size is not None:
            out = unpatchify(out, patch_size=vae.config.patch_size)
        out = out.clamp(-1.0, 1.0)
        return DecoderOutput(sample=out) if return_dict else (out,)
