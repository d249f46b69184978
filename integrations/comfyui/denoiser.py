"""Stands in ComfyUI for a denoiser that runs on a partsong server: its weights are there, its sampler is here."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import safetensors.torch
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .client import ServerClient, ServerError

__all__ = ["FAMILIES", "Family", "RemoteDenoiser", "described"]

#: Seconds after its last call in which the server still holds the ranks for a sampler.
PAUSE = 3.0


@dataclass(frozen=True)
class Family:
    """Says how ComfyUI calls a kind of denoiser, and how diffusers does.

    Attributes:
        config: names the class of ``comfy.supported_models`` that samples it, from the configuration in diffusers.
        patch: how many latents of a row or column become one channel on the way.
        arguments: makes the arguments in diffusers of latents, timestep, text, pooled text and guidance.
        prediction: makes the prediction `[B, C, ...]` of what comes back and of the latents.
    """

    config: Callable[[Mapping[str, Any]], str]
    patch: int
    arguments: Callable[[Tensor, Tensor, Tensor, Tensor | None, Tensor | None], dict[str, Tensor | None]]
    prediction: Callable[[Tensor, Tensor], Tensor]


class RemoteDenoiser(nn.Module):
    """Sends each call to a server, in one session per generation.

    Args:
        client: the server.
        model: the server's description of the model.
        strategy: how its workers share each call; None lets its planner choose.

    Attributes:
        config: the class of ``comfy.supported_models`` that samples it.
        dtype: of its weights.
        in_channels: of its latents.

    Raises:
        ServerError: the pack does not know how ComfyUI samples this denoiser.
    """

    def __init__(self, client: ServerClient, model: Mapping[str, Any], strategy: str | None) -> None:
        super().__init__()
        facts = model["denoiser"]
        if facts["class"] not in FAMILIES:
            known = ", ".join(FAMILIES)
            raise ServerError(f"the pack can sample {known}; {model['id']} has a {facts['class']}")
        self._family = family = FAMILIES[facts["class"]]
        self.config = family.config(facts["config"])
        self.dtype: torch.dtype = getattr(torch, facts["dtype"])
        self.in_channels = facts["config"]["in_channels"] // family.patch**2
        # ComfyUI reads the number of channels of a video model there.
        self.patch_embedding = SimpleNamespace(weight=torch.empty(1, self.in_channels))
        self._client, self._fields = client, {"model": model["id"], "strategy": strategy, "pause": PAUSE}
        self._session: str | None = None
        self._last: dict[str, Tensor] = {}

    def forward(
        self,
        x: Tensor,
        timestep: Tensor,
        context: Tensor,
        y: Tensor | None = None,
        guidance: Tensor | None = None,
        control: Any = None,
        transformer_options: Mapping[str, Any] | None = None,
        **more: Any,
    ) -> Tensor:
        """Returns the prediction `[B, C, ...]` for latents `[B, C, ...]`.

        Raises:
            ServerError: the call has what a server cannot be sent, such as a ControlNet, or the server refuses it.
        """
        _refuse(control, transformer_options or {}, more)
        named = self._family.arguments(x, timestep, context, y, guidance)
        given = {name: tensor.detach().cpu().contiguous() for name, tensor in named.items() if tensor is not None}
        sample = safetensors.torch.load(self._call(given))["sample"]
        return self._family.prediction(sample, x).to(x)

    def _call(self, given: dict[str, Tensor]) -> bytes:
        if self._session is not None:
            try:
                return self._send(self._session, given)
            except ServerError as error:
                if error.status != 404:  # the session ended after a pause; another one knows nothing of earlier steps
                    raise
        self._last = {}
        self._session = self._client.post("/v1/denoise/sessions", self._fields)["id"]
        return self._send(self._session, given)

    def _send(self, session: str, given: dict[str, Tensor]) -> bytes:
        unchanged = [name for name, tensor in given.items() if _is_same(tensor, self._last.get(name))]
        sent = {name: tensor for name, tensor in given.items() if name not in unchanged}
        body = safetensors.torch.save(sent, {"unchanged": json.dumps(unchanged)})
        answer = self._client.send(f"/v1/denoise/sessions/{session}", body)
        self._last = given
        return answer


def described(client: ServerClient, name: str) -> dict[str, Any]:
    """Returns what the server says of a model with a denoiser: the first one where no name is given.

    Raises:
        ServerError: there is none, or its ranks are not there yet.
    """
    models = [model for model in client.get("/v1/models")["data"] if model["kind"] in ("image", "video")]
    found = next((model for model in models if name in ("", model["id"])), None)
    if found is None:
        names = ", ".join(model["id"] for model in models) or "none"
        raise ServerError(f"the server has no model of pictures or videos {name!r}; it has: {names}")
    if not found["denoiser"]:
        raise ServerError(f"the ranks of {found['id']} are starting; run again in a moment")
    return found


def _refuse(control: Any, options: Mapping[str, Any], more: Mapping[str, Any]) -> None:
    """Refuses what changes a model inside, which does not reach the server's."""
    changed = [name for name in ("patches", "patches_replace") if options.get(name)]
    given = [name for name, value in more.items() if value is not None]
    if control is not None or changed or given:
        what = ", ".join(["a ControlNet"] * (control is not None) + ["patches of the model"] * bool(changed) + given)
        raise ServerError(f"the model runs on a partsong server, which cannot be sent {what}; leave it out")


def _is_same(tensor: Tensor, last: Tensor | None) -> bool:
    return last is not None and tensor.dtype == last.dtype and torch.equal(tensor, last)


def _plain(
    x: Tensor, timestep: Tensor, context: Tensor, y: Tensor | None, guidance: Tensor | None
) -> dict[str, Tensor | None]:
    return {"hidden_states": x, "timestep": timestep, "encoder_hidden_states": context}


def _stable_diffusion_3(
    x: Tensor, timestep: Tensor, context: Tensor, y: Tensor | None, guidance: Tensor | None
) -> dict[str, Tensor | None]:
    return {**_plain(x, timestep, context, y, guidance), "pooled_projections": y}


def _flux(
    x: Tensor, timestep: Tensor, context: Tensor, y: Tensor | None, guidance: Tensor | None
) -> dict[str, Tensor | None]:
    height, width = (-(-side // 2) for side in x.shape[-2:])
    padded = F.pad(x, (0, 2 * width - x.shape[-1], 0, 2 * height - x.shape[-2]), mode="circular")
    # Two by two latents are one token, whose channels are those of the four.
    tokens = padded.unflatten(-1, (width, 2)).unflatten(-3, (height, 2)).permute(0, 2, 4, 1, 3, 5)
    places = torch.cartesian_prod(torch.zeros(1, dtype=torch.long), torch.arange(height), torch.arange(width))
    return {
        **_plain(tokens.flatten(3).flatten(1, 2), timestep, context, y, guidance),
        "pooled_projections": y,
        "guidance": None if guidance is None else guidance.expand(len(x)),
        "img_ids": places.to(torch.float32),
        "txt_ids": torch.zeros(context.shape[1], 3),
    }


def _from_tokens(sample: Tensor, x: Tensor) -> Tensor:
    height, width = (-(-side // 2) for side in x.shape[-2:])
    grid = sample.unflatten(1, (height, width)).unflatten(-1, (-1, 2, 2)).permute(0, 3, 1, 4, 2, 5)
    return grid.flatten(-2).flatten(2, 3)[..., : x.shape[-2], : x.shape[-1]]


def _as_it_is(sample: Tensor, x: Tensor) -> Tensor:
    return sample


#: By the class of the denoiser in diffusers.
FAMILIES = {
    "SD3Transformer2DModel": Family(lambda config: "SD3", 1, _stable_diffusion_3, _as_it_is),
    "FluxTransformer2DModel": Family(
        lambda config: "Flux" if config["guidance_embeds"] else "FluxSchnell", 2, _flux, _from_tokens
    ),
    "WanTransformer3DModel": Family(lambda config: "WAN21_T2V", 1, _plain, _as_it_is),
}
