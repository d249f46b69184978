"""Builds the parts of the `shapes` pipeline for the recipe; loading the shipped folder does not need this file.

Every part is a stock class of diffusers or transformers with a small configuration, so the saved folder loads without
this package. Importing this module loads torch.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from diffusers import AutoencoderKL, SD3Transformer2DModel
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, processors
from torch import Tensor, nn
from transformers import CLIPTextConfig, CLIPTextModelWithProjection, PreTrainedTokenizerFast, T5Config, T5EncoderModel

from partsong.errors import ArgumentError
from partsong_zoo.shapes.grammar import WORDS

SPECIAL = ("<pad>", "<bos>", "<unk>", "<eos>")
VOCABULARY = {word: index for index, word in enumerate(SPECIAL + WORDS)}
#: Tokens per caption: the longest sentence of the grammar with its two ends, rounded up.
TEXT_LENGTH = 20
#: Positions reach pictures of 32 x 32 patches (256 x 256 pixels).
MAX_GRID = 32
#: Width of the two CLIP encoders' features together.
TEXT_WIDTH = 192


def build_vae(channels: int = 16, **options: Any) -> Any:
    """Builds an AutoencoderKL that halves the picture twice: 4 latent channels of 16 x 16.

    Args:
        channels: Width of the outermost block.
        **options: Further configuration of the stock class.
    """
    # The signature names tuples of one, but any length works.
    widths: Any = tuple(channels * m for m in (1, 2, 4))
    down: Any = ("DownEncoderBlock2D",) * 3
    up: Any = ("UpDecoderBlock2D",) * 3
    return AutoencoderKL(
        block_out_channels=widths,
        down_block_types=down,
        up_block_types=up,
        layers_per_block=1,
        latent_channels=4,
        norm_num_groups=8,
        sample_size=64,
        **options,
    )


def vae_loss(vae: Any, images: Tensor) -> tuple[Tensor, float]:
    """Computes the loss of reconstruction, with a little latent noise as from a sampler, and a weak KL term."""
    posterior = vae.encode(images).latent_dist
    mean = posterior.mean
    latent = posterior.sample() + 0.05 * mean.detach().std() * torch.randn_like(mean)
    error = vae.decode(latent).sample.float() - images
    mse = error.square().mean()
    return error.abs().mean() + 2.0 * mse + 1e-5 * posterior.kl().mean() / 64, float(mse.detach())


class TextEncoders(nn.Module):
    """Runs two CLIP text encoders as the Stable-Diffusion-3 pipeline does."""

    def __init__(self) -> None:
        super().__init__()
        self.first = CLIPTextModelWithProjection(clip_config(width=128, layers=3, heads=4))
        self.second = CLIPTextModelWithProjection(clip_config(width=64, layers=2, heads=2))

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Computes token features `[batch, 20, 192]` (penultimate layers) and pooled features `[batch, 192]`."""
        one, two = (encoder(ids, output_hidden_states=True) for encoder in (self.first, self.second))
        tokens = torch.cat([one.hidden_states[-2], two.hidden_states[-2]], dim=-1)
        return tokens, torch.cat([one.text_embeds, two.text_embeds], dim=-1)


def clip_config(width: int, layers: int, heads: int, tokens: int = len(SPECIAL) + len(WORDS)) -> CLIPTextConfig:
    """Configures a text encoder (of the grammar's words by default) with pooled features as wide as its tokens."""
    return CLIPTextConfig(
        vocab_size=tokens,
        hidden_size=width,
        intermediate_size=4 * width,
        projection_dim=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        max_position_embeddings=TEXT_LENGTH,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=3,
    )


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Builds a tokenizer with one token per word of the grammar; unknown words become `<unk>`."""
    tokenizer = Tokenizer(models.WordLevel(VOCABULARY, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A <eos>", special_tokens=[("<bos>", 1), ("<eos>", 3)]
    )
    names = {"pad_token": "<pad>", "bos_token": "<bos>", "unk_token": "<unk>", "eos_token": "<eos>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=TEXT_LENGTH, **names)


def build_silent_encoder() -> T5EncoderModel:
    """Builds the third text encoder, which is silent: it has no layers, and zeros for every token.

    The pipeline may run without a T5 encoder and then uses zeros of just this shape, but its loader insists that the
    folder holds one unless the caller passes None. With this one the folder loads without arguments.
    """
    config = T5Config(vocab_size=2, d_model=TEXT_WIDTH, d_kv=1, d_ff=1, num_layers=0, num_heads=1, pad_token_id=0)
    encoder = T5EncoderModel(config)
    nn.init.zeros_(encoder.shared.weight)
    return encoder


def build_silent_tokenizer() -> PreTrainedTokenizerFast:
    """Builds the tokenizer of the silent encoder: every text is empty, so all is padding."""
    tokenizer = Tokenizer(models.WordLevel({"<pad>": 0, "<unk>": 1}, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Replace(Regex(r"[\s\S]+"), "")
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, model_max_length=512, pad_token="<pad>", unk_token="<unk>"
    )


def token_ids(captions: list[str]) -> Tensor:
    """Encodes the grammar's own sentences as the tokenizer does, padded to `TEXT_LENGTH`, but faster."""
    ids = torch.zeros(len(captions), TEXT_LENGTH, dtype=torch.long)
    for row, caption in enumerate(captions):
        words = [1, *(VOCABULARY[w] for w in caption.replace(",", " ,").split()), 3]
        ids[row, : len(words)] = torch.tensor(words)
    return ids


class RepeatedNullProcessor:
    """Computes joint attention in which the last text token stands for many equal ones.

    The silent third encoder adds `max_sequence_length` (256 by default) zero tokens to the text. They have
    no positions, so they stay equal in every layer, and n equal keys are one key whose logit is raised by log n.
    Training with that bias is exact and four times cheaper, and covers any `max_sequence_length`.
    """

    def __call__(
        self, attn: Any, hidden_states: Tensor, encoder_hidden_states: Tensor, attention_mask: Tensor, **_: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Attends over picture and text together; `attention_mask` is the bias `[batch, 1, 1, keys]`."""
        length = hidden_states.shape[1]

        def split(x: Tensor) -> Tensor:
            return x.unflatten(-1, (attn.heads, -1)).transpose(1, 2)

        projections = (
            (attn.to_q, attn.add_q_proj, attn.norm_q, attn.norm_added_q),
            (attn.to_k, attn.add_k_proj, attn.norm_k, attn.norm_added_k),
        )
        query, key = (
            torch.cat([norm(split(own(hidden_states))), added_norm(split(added(encoder_hidden_states)))], dim=2)
            for own, added, norm, added_norm in projections
        )
        value = torch.cat([split(attn.to_v(hidden_states)), split(attn.add_v_proj(encoder_hidden_states))], dim=2)
        # Written out: at this length a CPU takes five times longer for the backward pass of fused attention.
        scores = (query.to(value.dtype) * query.shape[-1] ** -0.5) @ key.to(value.dtype).transpose(-1, -2)
        out = torch.softmax(scores + attention_mask.to(value.dtype), dim=-1).to(value.dtype) @ value
        out = out.transpose(1, 2).flatten(2)
        picture = attn.to_out[1](attn.to_out[0](out[:, :length]))
        return picture, None if attn.context_pre_only else attn.to_add_out(out[:, length:])


def build_transformer(heads: int = 6, depth: int = 6, out_channels: int = 4) -> Any:
    """Builds the multimodal transformer: 8 x 8 picture tokens, positions for pictures up to 256 x 256.

    Args:
        heads: Attention heads, each 32 wide.
        depth: Layers.
        out_channels: Channels of what it returns; 4 for a latent.
    """
    model = SD3Transformer2DModel(
        sample_size=16,
        patch_size=2,
        in_channels=4,
        out_channels=out_channels,
        num_layers=depth,
        attention_head_dim=32,
        num_attention_heads=heads,
        joint_attention_dim=TEXT_WIDTH,
        caption_projection_dim=32 * heads,
        pooled_projection_dim=TEXT_WIDTH,
        pos_embed_max_size=MAX_GRID,
        qk_norm="rms_norm",
    )
    # The stock table scales with the largest grid until neighbouring patches look almost alike; this one tells them
    # apart at any size. It is a buffer of the saved weights, so the stock class loads it.
    width = 32 * heads
    angles = torch.arange(MAX_GRID).float()[:, None] * torch.logspace(math.log10(2.5), math.log10(0.05), width // 4)
    axis = torch.cat([angles.sin(), angles.cos()], dim=1)
    rows, columns = (t.expand(MAX_GRID, MAX_GRID, -1) for t in (axis[:, None], axis[None]))
    model.pos_embed.pos_embed.copy_(torch.cat([rows, columns], dim=-1).reshape(1, -1, width))
    # Every block starts as the identity and the output as zero, as is usual for diffusion transformers.
    for name, module in model.named_modules():
        if name.endswith(("norm1.linear", "norm1_context.linear", "norm_out.linear", "proj_out")):
            nn.init.zeros_(module.weight)
            nn.init.zeros_(module.bias)
    return model


def deepened(transformer: Any, copies: int) -> Any:
    """Builds a transformer that computes the same with more blocks.

    The last blocks but one, `copies` of them, are each followed by a copy whose gates are closed: it adds nothing until
    it is trained, and starts from what the block has learned. The last block of all has no text, so it has no copy.

    Args:
        transformer: an `SD3Transformer2DModel` of this file.
        copies: how many blocks are added, fewer than it has.

    Raises:
        ArgumentError: `copies` is out of these bounds.
    """
    depth = transformer.config.num_layers
    if not 0 <= copies < depth:
        raise ArgumentError(f"copies {copies} of {depth} blocks; use 0 to {depth - 1}, since the last has no text")
    sources = [index for index in range(depth) for _ in range(2 if depth - 1 - copies <= index < depth - 1 else 1)]
    deep: Any = SD3Transformer2DModel.from_config({**transformer.config, "num_layers": len(sources)})
    others = {n: w for n, w in transformer.state_dict().items() if not n.startswith("transformer_blocks.")}
    deep.load_state_dict(others, strict=False)
    for index, (block, source) in enumerate(zip(deep.transformer_blocks, sources, strict=True)):
        block.load_state_dict(transformer.transformer_blocks[source].state_dict())
        if index and sources[index - 1] == source:
            for norm in (block.norm1, block.norm1_context):
                # Shift, scale and gate of attention, then those of the feed-forward part.
                for gate in (2, 5):
                    norm.linear.weight.data.chunk(6)[gate].zero_()
                    norm.linear.bias.data.chunk(6)[gate].zero_()
    deep.set_attn_processor(next(iter(transformer.attn_processors.values())))
    return deep.to(transformer.device)


class Generator(nn.Module):
    """Joins the transformer and its text encoders, which are trained together."""

    def __init__(self, heads: int = 6, depth: int = 6, out_channels: int = 4) -> None:
        super().__init__()
        self.text = TextEncoders()
        self.transformer = build_transformer(heads, depth, out_channels)
        self.transformer.set_attn_processor(RepeatedNullProcessor())

    def forward(self, noisy: Tensor, sigma: Tensor, ids: Tensor, nulls: Tensor) -> Tensor:
        """Computes the velocity; `nulls` counts, per sample, the zero tokens that stand in for a T5 encoder."""
        tokens, pooled = self.text(ids)
        tokens = torch.cat([tokens, torch.zeros_like(tokens[:, :1])], dim=1)
        bias = torch.zeros(len(noisy), 1, 1, noisy.shape[-1] * noisy.shape[-2] // 4 + TEXT_LENGTH + 1)
        bias = bias.to(noisy.device)
        bias[..., -1] = nulls.float().log()[:, None, None]
        extra = {"attention_mask": bias}
        return self.transformer(noisy, tokens, pooled, sigma * 1000.0, joint_attention_kwargs=extra).sample


def draw_sigmas(num: int, shift: float) -> Tensor:
    """Draws noise levels: logit-normal (a fifth uniform), shifted towards noise as the scheduler shifts its own."""
    level = torch.where(torch.rand(num) < 0.2, torch.rand(num), torch.randn(num).sigmoid())
    return shift * level / (1 + (shift - 1) * level)
