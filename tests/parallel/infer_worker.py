"""Runs on every rank: models without a row of their own, plain ones and ones that only look plain."""

from __future__ import annotations

import logging
from typing import Any, ClassVar

import torch
from diffusers import LTXVideoTransformer3DModel
from diffusers.models._modeling_parallel import ContextParallelInput, ContextParallelOutput
from diffusers.models.attention_processor import Attention, AttnProcessor2_0
from torch import Tensor, nn

from partsong import DataParallel, Ring, ShardedWeights, Ulysses
from partsong.ledger import Ledger
from partsong.parallel import Mesh, Strategy, mesh_for, parallelize
from tests.parallel.ranks import error, gathered, staying_connected
from tests.parallel.video_families import ltx

WIDTH = 24


class Plain(nn.Module):
    """Embeds patches of two, attends to itself and to a text, projects."""

    def __init__(self, **more: bool) -> None:
        super().__init__()
        self.centred = more.get("centred", False)
        self.pos_embed = _Patches()
        self.blocks = nn.ModuleList(_Block() for _ in range(2))
        self.proj_out = nn.Linear(WIDTH, 16)

    def forward(self, hidden_states: Tensor, encoder_hidden_states: Tensor, timestep: Tensor) -> Tensor:
        x = self.pos_embed(hidden_states) + timestep[:, None, None] / 1000
        for block in self.blocks:
            x = block(x, encoder_hidden_states)
            if self.centred:
                x = x - x.mean(dim=1, keepdim=True)
        return self.proj_out(x)


class OtherNames(nn.Module):
    """Is as plain, with other names for its parts and arguments, and returns a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.times = nn.Linear(1, WIDTH)
        self.cutter = _Patches()
        self.trunk = nn.ModuleList(_Block() for _ in range(2))
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 16))

    def forward(self, x: Tensor, t: Tensor, context: Tensor) -> dict[str, Tensor]:
        tokens = self.cutter(x) + self.times(t[:, None] / 1000)[:, None]
        for block in self.trunk:
            tokens = block(tokens, context)
        return {"sample": self.head(tokens)}


class Planned(OtherNames):
    """Carries a plan that cuts within its blocks and gathers two outputs."""

    _cp_plan: ClassVar[dict[str, Any]] = {
        "trunk.0": {"x": ContextParallelInput(split_dim=1, expected_dims=3)},
        "head": ContextParallelOutput(gather_dim=1, expected_dims=3),
        "sound": ContextParallelOutput(gather_dim=1, expected_dims=3),
    }

    def __init__(self) -> None:
        super().__init__()
        self.sound = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor, t: Tensor, context: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        tokens = self.cutter(x) + self.times(t[:, None] / 1000)[:, None]
        for block in self.trunk:
            tokens = block(tokens, context)
        return self.head(tokens), self.sound(tokens)


class Centred(Plain):
    """Looks plain, but its blocks look at the mean of all tokens."""

    def __init__(self) -> None:
        super().__init__(centred=True)


class Rolled(Plain):
    """Adds positions that are as many as all tokens."""

    def forward(self, hidden_states: Tensor, encoder_hidden_states: Tensor, timestep: Tensor) -> Tensor:
        x = self.pos_embed(hidden_states)
        x = x + torch.arange(hidden_states[0, 0].numel() // 4)[None, :, None]
        return self.proj_out(self.blocks[0](x, encoder_hidden_states))


class NoProjection(Plain):
    """Has no last layer of a known name."""

    def __init__(self) -> None:
        super().__init__()
        self.proj_out = nn.Identity()


class _Patches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, WIDTH, 2, stride=2)

    def forward(self, latents: Tensor) -> Tensor:
        return self.conv(latents).flatten(2).transpose(1, 2)


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn1 = Attention(WIDTH, heads=3, dim_head=8, processor=AttnProcessor2_0())
        self.attn2 = Attention(WIDTH, cross_attention_dim=12, heads=3, dim_head=8, processor=AttnProcessor2_0())

    def forward(self, x: Tensor, text: Tensor) -> Tensor:
        x = x + self.attn1(x)
        return x + self.attn2(x, encoder_hidden_states=text)


class Unlisted(LTXVideoTransformer3DModel):
    """Carries diffusers' own context-parallel plan, under a name that has no row."""


def _ltx() -> nn.Module:
    return ltx(6, Unlisted, norm_elementwise_affine=False)


def _patched(seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    named = {"hidden_states": torch.randn(2, 4, 6, 10), "encoder_hidden_states": torch.randn(2, 5, 12)}
    return {name: value.double() for name, value in named.items()} | {"timestep": torch.full((2,), 500.0).double()}


def _renamed(seed: int) -> dict[str, Any]:
    names = {"hidden_states": "x", "timestep": "t", "encoder_hidden_states": "context"}
    return {names[name]: value for name, value in _patched(seed).items()}


def _video(seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    named = {"hidden_states": torch.randn(2, 15, 4), "encoder_hidden_states": torch.randn(2, 7, 12)}
    more = {"encoder_attention_mask": torch.ones(2, 7), "num_frames": 1, "height": 3, "width": 5}
    return {name: value.double() for name, value in named.items()} | more | {"timestep": torch.full((2,), 500.0)}


STRATEGIES: dict[str, Strategy] = {
    "Ulysses": Ulysses(),
    "Ring": Ring(),
    "DataParallel": DataParallel(),
    "ShardedWeights": ShardedWeights(),
}
MODELS = {
    "Plain": (Plain, _patched),
    "OtherNames": (OtherNames, _renamed),
    "Planned": (Planned, _renamed),
    "LTX": (_ltx, _video),
}
WRONG = {"Centred": Centred, "Rolled": Rolled, "NoProjection": NoProjection, "Linear": lambda: nn.Linear(2, 2)}


@staying_connected
def right(nproc: int, cases: list[tuple[str, str]]) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """Plain models under a strategy: error of two calls, bytes counted and predicted, and what was said of checks."""
    results = {}
    for label, strategy in STRATEGIES.items():
        with Mesh(**mesh_for((strategy,), nproc)) as mesh:
            for name in (name for other, name in cases if other == label):
                results[label, name] = gathered(_right(*MODELS[name], strategy, mesh))
    return results


def _right(build: Any, call: Any, strategy: Strategy, mesh: Mesh) -> dict[str, Any]:
    torch.manual_seed(4)
    model, told = build().double().eval(), _Told()
    logging.getLogger("partsong").addHandler(told)
    first, second = call(1), call(2)
    time = "t" if "t" in second else "timestep"
    second[time] = second[time] / 2
    with torch.no_grad():
        want = [_sample(model(**named)) for named in (first, second)]
        with parallelize(model, strategy, mesh=mesh) as plan, Ledger(flops=False) as ledger:
            got = [_sample(model(**named)) for named in (first, second)]
            predicted = plan.explain().bytes_total()[mesh.rank]
    logging.getLogger("partsong").removeHandler(told)
    apart = max(error(g, w) for g, w in zip(got, want, strict=True))
    sent = int(ledger.summary()["bytes_sent"])
    return {"error": apart, "sent": sent, "predicted": predicted, "told": told.messages}


def wrong() -> dict[str, list[str]]:
    """What each rank is told of models that no row can be inferred for."""
    results = {}
    with Mesh(ulysses=2) as mesh, torch.no_grad():
        for name, build in WRONG.items():
            torch.manual_seed(4)
            try:
                with parallelize(build().double().eval(), Ulysses(), mesh=mesh) as plan:
                    plan.target(**_patched(1))
                said = "accepted"
            except Exception as problem:  # noqa: BLE001 - the test reads which one it was
                said = f"{type(problem).__name__}: {problem}"
            results[name] = gathered(said)
    return results


class _Told(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def _sample(output: Any) -> Tensor:
    if isinstance(output, dict):
        return output["sample"]
    if isinstance(output, tuple):
        return torch.cat(output, dim=-1)
    return output if isinstance(output, Tensor) else output.sample
