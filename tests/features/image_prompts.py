"""Random IP-Adapters for tiny models, as the state of a file that `load_ip_adapter` takes."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tests.tiny_models.weights import noise

#: Tokens that an adapter makes of a picture, and numbers in what an encoder of pictures makes of one.
TOKENS, EMBEDDED = 4, 10


def load_into_unet(pipe: Any) -> None:
    """Puts an adapter on a UNet's cross-attention."""
    width = pipe.unet.config.cross_attention_dim
    plain: Any = type(pipe.unet)(**pipe.unet.config)  # ranks may hold a part of the other one's width
    names = [name for name in plain.attn_processors if name.endswith("attn2.processor")]
    sizes = [plain.get_submodule(name.removesuffix(".processor")).inner_dim for name in names]
    layers = {
        f"{1 + 2 * number}.to_{kind}_ip.weight": _random(size, width, seed=number)
        for number, size in enumerate(sizes)
        for kind in "kv"
    }
    pipe.load_ip_adapter(_state(width, layers), subfolder="", weight_name="", image_encoder_folder=None)


def load_into_flux(pipe: Any) -> None:
    """Puts an adapter on the attention of Flux' double blocks."""
    width, size = pipe.transformer.config.joint_attention_dim, pipe.transformer.inner_dim
    layers: dict[str, Tensor] = {}
    for number in range(pipe.transformer.config.num_layers):
        for kind in "kv":
            layers[f"{number}.to_{kind}_ip.weight"] = _random(size, width, seed=number)
            layers[f"{number}.to_{kind}_ip.bias"] = _random(size, seed=number + 9)
    pipe.load_ip_adapter(
        _state(width, layers), subfolder="", weight_name="", image_encoder_pretrained_model_name_or_path=None
    )


def unet_pictures(samples: int) -> dict[str, Any]:
    """Embeddings of a picture for a call with guidance, those without one first."""
    return {"ip_adapter_image_embeds": [noise(2, 1, EMBEDDED, seed=8)]}


def flux_pictures(samples: int) -> dict[str, Any]:
    """Embeddings of a picture, and of one that is not wanted."""
    return {
        "ip_adapter_image_embeds": [noise(1, 1, EMBEDDED, seed=8)],
        "negative_ip_adapter_image_embeds": [noise(1, 1, EMBEDDED, seed=9)],
    }


def _state(width: int, layers: dict[str, Tensor]) -> dict[str, Any]:
    projection = {
        "proj.weight": _random(TOKENS * width, EMBEDDED, seed=20),
        "proj.bias": _random(TOKENS * width, seed=21),
        "norm.weight": _random(width, seed=22),
        "norm.bias": _random(width, seed=23),
    }
    return {"image_proj": projection, "ip_adapter": layers}


def _random(*shape: int, seed: int) -> Tensor:
    return 0.3 * noise(*shape, seed=seed)
