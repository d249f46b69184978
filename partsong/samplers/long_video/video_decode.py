"""Decodes a video block by block, with the same result as all at once: causal decoders continue from their state."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from partsong.accelerator import current
from partsong.errors import UnsupportedError

__all__ = ["StreamingDecoder"]

logger = logging.getLogger(__name__)


class StreamingDecoder:
    """Decodes the latents of a video in pieces, in order.

    Causal decoders need the inputs of their convolutions from earlier frames. They are kept here from one piece to the
    next, so the result equals the whole decoding and memory does not grow. Wan's decodes frame by frame, Mochi's any
    piece, and CogVideoX's pairs of frames, so one may wait for the next piece. LTX-Video's looks both ways in time, and
    HunyuanVideo's norms cover all frames: their latents are kept, and decoded with the last piece.

    Args:
        vae: the autoencoder of the pipeline; its own cache is left alone.
        frames: latent frames of the whole video.

    Raises:
        UnsupportedError: the autoencoder would decode in tiles, each from the first frame on.
    """

    def __init__(self, vae: Any, frames: int) -> None:
        self.vae, self.left = vae, frames
        kind = _KINDS.get(type(vae).__name__)
        if kind is not None and vae.use_tiling:
            raise UnsupportedError("tiled decoding starts anew for every tile; call vae.disable_tiling()")
        if kind is None:
            logger.warning(
                "%s does not decode in pieces: its latents are kept, and all frames come at the end", type(vae).__name__
            )
        self._decoder: _Pieces = (kind or _Whole)(vae, frames)
        # Every block's call has its own thread, and most allocators an arena per thread, which keeps freed memory.
        # Decoding in many threads would leave the memory of a decoding in each.
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="partsong-decoder")

    def decode(self, z: Tensor, *args: Any, return_dict: bool = True, **kwargs: Any) -> Any:
        """Decodes the next latents; called like the autoencoder's own ``decode``.

        Args:
            z: `[B, C, f, h, w]`, as the pipeline gives them to its autoencoder.
            *args: what else the pipeline gives it.
            return_dict: answers with an output object instead of a tuple.
            **kwargs: as `args`.

        Returns:
            `[B, 3, F, H, W]`: of a causal decoder with a factor of 4 in time ``4 (f - 1) + 1`` frames for the first
            piece and 4 f afterwards; of others none before the last piece.
        """
        inference = torch.is_inference_mode_enabled()
        return self._worker.submit(self._decode, z, args, kwargs, return_dict, inference).result()

    def close(self) -> None:
        """Ends the thread; nothing is decoded afterwards."""
        self._worker.shutdown(wait=False)

    def _decode(self, z: Tensor, args: Any, kwargs: Any, return_dict: bool, inference: bool) -> Any:
        from diffusers.models.autoencoders.vae import DecoderOutput

        # A new thread begins on the first GPU, whichever one its process has chosen.
        with current(z.device), torch.inference_mode(inference), torch.no_grad():
            out = self._decoder.decode(z, *args, **kwargs)
        return DecoderOutput(sample=out) if return_dict else (out,)


class _Pieces(ABC):
    """Decodes pieces of one video with one autoencoder."""

    def __init__(self, vae: Any, frames: int) -> None:
        self.vae, self.left = vae, frames
        self.is_first = True
        self.seen: Any = None
        self.waiting: list[Tensor] = []

    @abstractmethod
    def decode(self, z: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Decodes the next latents."""

    def nothing(self, z: Tensor, side: int) -> Tensor:
        """Returns no frames, of the right size."""
        return z.new_zeros((len(z), self.vae.config.out_channels, 0, z.shape[3] * side, z.shape[4] * side))


class _Wan(_Pieces):
    def decode(self, z: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        from diffusers.models.autoencoders.autoencoder_kl_wan import unpatchify

        vae, first = self.vae, self.seen is None
        if self.seen is None:
            vae.clear_cache()
            self.seen = [None] * vae._conv_num
        x = vae.post_quant_conv(z)
        pieces = []
        for frame in range(z.shape[2]):
            start = {"first_chunk": True} if first and frame == 0 else {}
            pieces.append(vae.decoder(x[:, :, frame : frame + 1], feat_cache=self.seen, feat_idx=[0], **start))
        out = torch.cat(pieces, dim=2)
        if vae.config.patch_size is not None:
            out = unpatchify(out, patch_size=vae.config.patch_size)
        return out.clamp(-1.0, 1.0)


class _CogVideoX(_Pieces):
    def decode(self, z: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        self.waiting.append(z)
        z = torch.cat(self.waiting, dim=2)
        batch, total, pieces = self.vae.num_latent_frames_batch_size, self.left, []
        # The first batch takes the remainder; a video shorter than a batch is one batch.
        size = min(total, batch + total % batch) if self.is_first else batch
        while z.shape[2] >= size > 0:
            piece, z = z[:, :, :size], z[:, :, size:]
            piece = piece if self.vae.post_quant_conv is None else self.vae.post_quant_conv(piece)
            out, self.seen = self.vae.decoder(piece, conv_cache=self.seen)
            pieces.append(out)
            self.is_first, size = False, batch
        self.waiting = [z]
        return (
            torch.cat(pieces, dim=2) if pieces else self.nothing(z, 2 ** (len(self.vae.config.block_out_channels) - 1))
        )


class _Mochi(_Pieces):
    """Continues from the inputs of convolutions over time, which diffusers' own cache does not keep for this model."""

    def decode(self, z: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        vae = self.vae
        with self._convolutions_go_on():
            out, _ = vae.decoder(z)
        factor = vae.temporal_compression_ratio
        # These precede the first frame of a video.
        if self.is_first and vae.drop_last_temporal_frames and out.shape[2] >= factor:
            out = out[:, :, factor - 1 :]
        self.is_first = False
        return out

    @contextmanager
    def _convolutions_go_on(self) -> Iterator[None]:
        if self.seen is None:
            layers = [layer for layer in self.vae.decoder.modules() if getattr(layer, "time_pad", 0) > 0]
            self.seen = {layer: _Past(layer.time_pad) for layer in layers}
        handles = [layer.register_forward_pre_hook(past.put_before) for layer, past in self.seen.items()]
        handles += [layer.register_forward_hook(past.cut_off) for layer, past in self.seen.items()]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


class _Past:
    """Keeps the last frames that a causal convolution has read, and lets it read them again with the next ones."""

    def __init__(self, num: int) -> None:
        self.num, self.again = num, 0
        self.frames: Tensor | None = None

    def put_before(self, _layer: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
        x, *others = args
        self.again = 0 if self.frames is None else self.frames.shape[2]
        whole = x if self.frames is None else torch.cat([self.frames, x], dim=2)
        self.frames = whole[:, :, -self.num :].clone()
        return whole, *others

    def cut_off(self, _layer: Any, _args: Any, out: tuple[Tensor, Any]) -> tuple[Tensor, Any]:
        return out[0][:, :, self.again :], out[1]


class _Whole(_Pieces):
    def decode(self, z: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        self.waiting.append(z)
        self.left -= z.shape[2]
        if self.left > 0:
            return self.nothing(z, self.vae.spatial_compression_ratio)
        whole, self.waiting = torch.cat(self.waiting, dim=2), []
        out: Tensor = self.vae.decode(whole, *args, return_dict=False, **kwargs)[0]
        return out


#: Autoencoder -> how its decoder continues from piece to piece. Others decode a whole video.
_KINDS: dict[str, type[_Pieces]] = {
    "AutoencoderKLWan": _Wan,
    "AutoencoderKLCogVideoX": _CogVideoX,
    "AutoencoderKLMochi": _Mochi,
}
