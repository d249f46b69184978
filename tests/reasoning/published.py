"""Writes small random drafters in the layouts of EAGLE-3, DFlash and DSpark, and computes them in the plainest way.

The forwards here know no caches: they read a whole text at once, with transformers' own norms, positions and layers.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

HIDDEN, HEADS, KEYS, WIDTH, INNER = 16, 4, 2, 6, 24
#: The drafter's own tokens: every second one of the model's, and the first ones.
DRAFT_TOKENS = (0, 1, 2, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29)
MASK, BLOCK, RANK = 4, 4, 5
LAYOUTS = ("eagle3", "eagle3 by speculators", "dflash", "dspark")


def write(folder: Path, layout: str, vocabulary: int, **changed: Any) -> Path:
    """Writes a drafter for a model of six layers and 16 numbers."""
    numbers = torch.Generator().manual_seed(len(layout))

    def drawn(*shape: int) -> Tensor:
        return 0.6 * torch.randn(*shape, generator=numbers, dtype=torch.float64)

    sizes: dict[str, Any] = {
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KEYS,
        "head_dim": WIDTH,
        "rms_norm_eps": 1e-5,
        "rope_theta": 5000.0,
        "max_position_embeddings": 96,
        "num_hidden_layers": 1 if "eagle" in layout else 2,
        "vocab_size": vocabulary,
    }
    read = 3 if "eagle" in layout else 2
    weights = {"fc.weight": drawn(HIDDEN, read * HIDDEN), "norm.weight": 1 + drawn(HIDDEN)}
    for number in range(sizes["num_hidden_layers"]):
        begin = "midlayer" if layout == "eagle3" else f"layers.{number}"
        inputs = 2 * HIDDEN if "eagle" in layout else HIDDEN
        shapes = {"q": HEADS * WIDTH, "k": KEYS * WIDTH, "v": KEYS * WIDTH}
        weights |= {f"{begin}.self_attn.{name}_proj.weight": drawn(rows, inputs) for name, rows in shapes.items()}
        weights[f"{begin}.self_attn.o_proj.weight"] = drawn(HIDDEN, HEADS * WIDTH)
        weights |= {f"{begin}.mlp.{name}_proj.weight": drawn(INNER, HIDDEN) for name in ("gate", "up")}
        weights[f"{begin}.mlp.down_proj.weight"] = drawn(HIDDEN, INNER)
        norms = ["input_layernorm", "post_attention_layernorm"] + ["hidden_norm"] * ("eagle" in layout)
        weights |= {f"{begin}.{name}.weight": 1 + drawn(HIDDEN) for name in norms}
        if "eagle" not in layout:
            weights |= {f"{begin}.self_attn.{name}_norm.weight": 1 + drawn(WIDTH) for name in "qk"}
    if "eagle" in layout:
        weights["lm_head.weight"] = drawn(len(DRAFT_TOKENS), HIDDEN)
        weights["d2t"] = torch.tensor(DRAFT_TOKENS) - torch.arange(len(DRAFT_TOKENS))
        weights["t2d"] = torch.zeros(vocabulary, dtype=torch.bool)
    else:
        weights["hidden_norm.weight"] = 1 + drawn(HIDDEN)
    config = _config(layout, sizes, weights, drawn, vocabulary)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**config, **changed}))
    save_file(weights, folder / "model.safetensors")
    return folder


def _config(layout: str, sizes: dict[str, Any], weights: dict[str, Tensor], drawn: Any, vocabulary: int) -> Any:
    if layout == "eagle3":
        return {**sizes, "architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": len(DRAFT_TOKENS)}
    if layout == "eagle3 by speculators":
        weights["embed_tokens.weight"] = drawn(vocabulary, HIDDEN)
        return {
            "architectures": ["Eagle3Speculator"],
            "speculators_model_type": "eagle3",
            "transformer_layer_config": sizes,
            "norm_before_residual": True,
            "eagle_aux_hidden_state_layer_ids": [1, 2, 5],
        }
    reads = {"target_layer_ids": [0, 3], "mask_token_id": MASK}
    if layout == "dflash":
        return {**sizes, "architectures": ["DFlashDraftModel"], "block_size": BLOCK, "dflash_config": reads}
    weights |= {f"markov_head.markov_w{number}.weight": drawn(vocabulary, RANK) for number in (1, 2)}
    weights["confidence_head.proj.weight"] = drawn(1, HIDDEN + RANK)
    weights["confidence_head.proj.bias"] = drawn(1)
    weights["embed_tokens.weight"], weights["lm_head.weight"] = drawn(vocabulary, HIDDEN), drawn(vocabulary, HIDDEN)
    spark = {"markov_rank": RANK, "markov_head_type": "vanilla", "enable_confidence_head": True}
    return {**sizes, **reads, **spark, "architectures": ["Qwen3DSparkModel"], "block_size": BLOCK}


class Plain:
    """Computes a drafter without caches.

    Args:
        folder: of the drafter.
        target: a model of transformers.
    """

    def __init__(self, folder: Path, target: Any) -> None:
        from safetensors.torch import load_file

        config = json.loads((folder / "config.json").read_text())
        self.config = {**config.get("transformer_layer_config", {}), **config, **config.get("dflash_config", {})}
        named = load_file(folder / "model.safetensors")
        self.weights = {name.replace("midlayer.", "layers.0."): each for name, each in named.items()}
        self.target = target
        names = ("hidden_size", "num_attention_heads", "head_dim", "rope_theta", "max_position_embeddings")
        self.rotary = LlamaRotaryEmbedding(LlamaConfig(**{name: self.config[name] for name in names}))
        self.is_eagle, self.is_spark = "d2t" in named, "markov_head.markov_w1.weight" in named
        layers = [0 if each == -1 else each + 1 for each in self.config.get("target_layer_ids", [])]
        if self.is_eagle:
            most = target.config.num_hidden_layers
            layers = self.config.get("eagle_aux_hidden_state_layer_ids", [2, most // 2, most - 3])
        self.layers = layers

    @torch.no_grad()
    def guesses(self, tokens: list[int], num: int) -> tuple[list[int], list[float]]:
        """Returns the likeliest guesses at the tokens after a text, and how sure DSpark is of them."""
        states = self.target(torch.tensor([tokens[:-1]]), output_hidden_states=True).hidden_states
        fused = torch.cat([states[layer][0] for layer in self.layers], -1) @ self.weights["fc.weight"].T
        return (self._eagle if self.is_eagle else self._block)(tokens, fused, num)

    def norm(self, x: Tensor, name: str) -> Tensor:
        weight = self.weights[f"{name}.weight"]
        return weight * x / (x.square().mean(-1, keepdim=True) + self.config["rms_norm_eps"]).sqrt()

    def embed(self, tokens: list[int]) -> Tensor:
        table = self.weights.get("embed_tokens.weight", self.target.get_input_embeddings().weight)
        return table[torch.tensor(tokens)]

    def attend(self, layer: str, x: Tensor, context: Tensor | None, first: int, causal: bool) -> Tensor:
        own, everything = f"{layer}.self_attn", x if context is None else torch.cat([context, x])
        q, k, v = (
            (rows @ self.weights[f"{own}.{name}_proj.weight"].T).unflatten(-1, (-1, WIDTH))
            for name, rows in (("q", x), ("k", everything), ("v", everything))
        )
        if f"{own}.q_norm.weight" in self.weights:
            q, k = self.norm(q, f"{own}.q_norm"), self.norm(k, f"{own}.k_norm")
        cos, sin = self.rotary(x[None], torch.arange(first, first + len(everything))[None])
        q, k = q.transpose(0, 1)[None], k.transpose(0, 1)[None]
        q = apply_rotary_pos_emb(q, q, cos[:, -len(x) :], sin[:, -len(x) :])[0]
        k = apply_rotary_pos_emb(k, k, cos, sin)[0]
        k, v = (each.repeat_interleave(HEADS // KEYS, 1) for each in (k, v.transpose(0, 1)[None]))
        scores = q @ k.transpose(-1, -2) / WIDTH**0.5
        if causal:
            scores = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), -torch.inf)
        out = (scores.softmax(-1) @ v)[0].transpose(0, 1).flatten(1)
        return out @ self.weights[f"{own}.o_proj.weight"].T

    def feed_forward(self, layer: str, x: Tensor) -> Tensor:
        gate, up, down = (self.weights[f"{layer}.mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
        return (torch.nn.functional.silu(x @ gate.T) * (x @ up.T)) @ down.T

    def _eagle(self, tokens: list[int], fused: Tensor, num: int) -> tuple[list[int], list[float]]:
        written, states = list(tokens), fused
        for _ in range(num):
            normed = self.norm(states, "layers.0.hidden_norm")
            x = torch.cat([self.norm(self.embed(written[1:]), "layers.0.input_layernorm"), normed], -1)
            out = self.attend("layers.0", x, None, 0, causal=True)
            out = out + (normed if self.config.get("norm_before_residual") else states)
            out = out + self.feed_forward("layers.0", self.norm(out, "layers.0.post_attention_layernorm"))
            logits = self.norm(out[-1], "norm") @ self.weights["lm_head.weight"].T
            best = int(logits.argmax())
            written.append(best + int(self.weights["d2t"][best]))
            states = torch.cat([states, out[-1:]])
        return written[len(tokens) :], []

    def _block(self, tokens: list[int], fused: Tensor, num: int) -> tuple[list[int], list[float]]:
        context = self.norm(fused, "hidden_norm")
        x = self.embed([tokens[-1], *[MASK] * (BLOCK - 1)])
        for number in range(self.config["num_hidden_layers"]):
            layer = f"layers.{number}"
            x = x + self.attend(layer, self.norm(x, f"{layer}.input_layernorm"), context, 0, causal=False)
            x = x + self.feed_forward(layer, self.norm(x, f"{layer}.post_attention_layernorm"))
        out = self.norm(x, "norm")[0 if self.is_spark else 1 :]
        head = self.weights.get("lm_head.weight", self.target.get_output_embeddings().weight)
        if not self.is_spark:
            return (out @ head.T).argmax(-1).tolist()[:num], []
        last, guesses, sure = tokens[-1], [], []
        for state in out[:num]:
            before = self.weights["markov_head.markov_w1.weight"][last]
            features = torch.cat([state, before])
            given = features @ self.weights["confidence_head.proj.weight"][0]
            sure.append(float((given + self.weights["confidence_head.proj.bias"][0]).sigmoid()))
            logits = state @ head.T + before @ self.weights["markov_head.markov_w2.weight"].T
            last = int(logits.argmax())
            guesses.append(last)
        return guesses, sure
