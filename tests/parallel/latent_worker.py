"""Runs on every rank: overlapping parts of the latent, and the same by their definition."""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from diffusers import PyramidAttentionBroadcastConfig
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from partsong import CfgParallel, DataParallel, LatentParallel, StepCache, Ulysses
from partsong.ledger import Ledger
from partsong.parallel import Mesh, Strategy, mesh_for, parallelize
from partsong.parallel.adapters import Adapter
from partsong.parallel.adapters.row import IMAGE
from partsong.parallel.hooks.samples import sample_of
from tests.parallel import two_denoisers_worker
from tests.parallel.families import FAMILIES, Family, adapter_of, flux
from tests.parallel.ranks import gathered, refusal, staying_connected
from tests.parallel.unets import UNETS
from tests.parallel.video_families import FRAMES
from tests.pipelines.case import denoisers
from tests.pipelines.cases import CASES

#: Steps of a generation: the fourth cuts a video as the first does.
TIMES = (900.0, 600.0, 300.0, 100.0)
#: Every side of a latent has at least three patches.
SIDE = 10
#: Families whose latent has no grid as `FAMILIES` calls them: their ids are those of a picture with tokens left out.
_OWN_INPUTS = ("Flux", "Flux2", "Chroma", "Bria", "Bria FIBO", "Ovis-Image", "LongCat-Image")
NAMES = [name for name in FAMILIES if LatentParallel().refuses(adapter_of(name)) is None]

#: Runs a model on the part of a latent from one place to another along a dimension of the latent.
Run = Callable[[int, int, int], Tensor]
#: Frames, rows and columns of tokens.
Sizes = tuple[int, int, int]


def call_of(name: str, dtype: torch.dtype = torch.float64) -> dict[str, Any]:
    """Inputs of a family, whose tokens are those of a whole picture."""
    named = FAMILIES[name].call(SIDE, 2, dtype)
    if name in _OWN_INPUTS:
        rows, columns = 4, 5
        ids = torch.zeros(rows * columns, named["img_ids"].shape[-1], dtype=dtype)
        ids[:, 1], ids[:, 2] = torch.arange(rows * columns) // columns, torch.arange(rows * columns) % columns
        torch.manual_seed(3)
        channels = named["hidden_states"].shape[-1]
        named |= {"img_ids": ids, "hidden_states": torch.randn(2, rows * columns, channels, dtype=dtype)}
        if "attention_mask" in named:
            tokens = named["encoder_hidden_states"].shape[1] + rows * columns
            named["attention_mask"] = torch.ones(2, tokens, dtype=dtype)
            named["attention_mask"][-1, 2:4] = 0
        if "joint_attention_kwargs" in named:
            keep = torch.ones(2, named["encoder_hidden_states"].shape[1] + rows * columns, dtype=torch.bool)
            keep[-1, 4:7] = False
            named["joint_attention_kwargs"] = {"attention_mask": keep[:, None, None]}
    return named


def sizes_of(name: str, named: dict[str, Any]) -> Sizes:
    """Frames, rows and columns of tokens, as the shapes of the inputs tell a reader."""
    latent = named[adapter_of(name).sample]
    if name in _OWN_INPUTS:
        return 1, 4, 5
    if "num_frames" in named:
        return named["num_frames"], named["height"], named["width"]
    if "img_shapes" in named:
        first = named["img_shapes"][0]
        return first if isinstance(first[0], int) else first[0]
    config = FAMILIES[name].build(SIDE).config
    patch = config["patch_size"]
    rows, columns = patch[-2:] if isinstance(patch, list | tuple) else (patch, patch)
    if latent.ndim == 4:
        return 1, latent.shape[2] // rows, latent.shape[3] // columns
    frames = patch[0] if isinstance(patch, list | tuple) else config.get("patch_size_t") or 1
    at = 1 if latent.shape[2] == 4 and latent.shape[1] == FRAMES else 2  # frames come before channels
    return latent.shape[at] // frames, latent.shape[3] // rows, latent.shape[4] // columns


def part_bounds(length: int, parts: int, overlap: float) -> list[tuple[int, int]]:
    """Where each part begins and ends: the shortest of one size that cover all, and share enough with the next one."""
    size = next(n for n in range(1, length + 1) if parts * n - (parts - 1) * overlap * n >= length - 1e-9)
    return [(at, at + size) for at in (round(i * (length - size) / (parts - 1)) for i in range(parts))]


def blended(run: Run, dim: int, bounds: list[tuple[int, int]], at: int, unit: int) -> Tensor:
    """The predictions for parts, each weighted by how far a place is from its ends where it shares them.

    Args:
        run: predicts for one part, with the cut at dimension `at`.
        dim: of the latent: 0 frames, 1 rows, 2 columns.
        bounds: of the parts, in patches.
        at: the dimension of the prediction.
        unit: places in a patch.
    """
    total, weights = 0.0, 0.0
    length = bounds[-1][1] * unit
    for number, (start, end) in enumerate(bounds):
        before = bounds[number - 1][1] - start if number else 0
        after = end - bounds[number + 1][0] if number + 1 < len(bounds) else 0
        weight = torch.zeros(length, dtype=torch.float64)
        for place in range(start * unit, end * unit):
            near, far = place + 0.5 - start * unit, end * unit - place - 0.5
            up = min(1.0, near / (before * unit)) if before > 0 else 1.0
            down = min(1.0, far / (after * unit)) if after > 0 else 1.0
            weight[place] = up * down
        part = run(dim, start, end).movedim(at, -1)
        wide = F.pad(part, (start * unit, length - end * unit))
        total, weights = total + wide * weight, weights + weight
    return (total / weights).movedim(-1, at)  # type: ignore[union-attr, operator]


class _BlindBeyond(TorchFunctionMode):
    """Lets attention see nothing of a picture but some of its tokens.

    Args:
        seen: `[L]`, whether a token is seen.
        adapter: row of the model.
    """

    def __init__(self, seen: Tensor, adapter: Adapter) -> None:
        streams = next(iter(adapter.attention.values()))
        self.seen, self.is_first, self.is_joint = seen, streams[0] == IMAGE, not adapter.keys_only

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not F.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        return self._attend(func, *args, **(kwargs or {}))

    def _attend(
        self, func: Any, query: Tensor, key: Tensor, value: Tensor, attn_mask: Any = None, *more: Any, **named: Any
    ) -> Tensor:
        text = key.shape[-2] - len(self.seen)
        if text < 0 or (self.is_joint and query.shape[-2] != key.shape[-2]):
            return func(query, key, value, attn_mask, *more, **named)
        rest = torch.ones(text, dtype=torch.bool)
        seen = torch.cat([self.seen, rest] if self.is_first else [rest, self.seen])
        if attn_mask is None or attn_mask.dtype == torch.bool:
            mask = seen.expand(1, 1, 1, -1) if attn_mask is None else attn_mask & seen
        else:
            mask = attn_mask.masked_fill(~seen, -math.inf)
        return func(query, key, value, mask, *more, **named)


def defined(
    model: Any, adapter: Adapter, named: dict[str, Any], sizes: Sizes, step: int, context: int | None
) -> Tensor:
    """What a transformer predicts in a step by definition, in two parts with a quarter in common.

    Between where tokens enter and where they leave, they meet in attention only. So a part is the stock model on the
    whole latent, whose attention sees the part.

    Args:
        model: the transformer.
        adapter: its row; only what it says of attention is read.
        named: its arguments.
        sizes: frames, rows and columns of its tokens.
        step: number of the step.
        context: one of every so many rows and columns is seen by every part.
    """
    dim, bounds = cut_of(sizes, step, 2, 0.25)

    def run(dim: int, start: int, end: int) -> Tensor:
        seen = torch.zeros(sizes, dtype=torch.bool)
        seen.narrow(dim, start, end - start).fill_(True)
        every = context or 1 + max(sizes)
        for row, column in itertools.product(range(sizes[1]), range(sizes[2])):
            if context and row % every == column % every == every // 2:
                seen[:, row, column] = True
        with torch.no_grad(), _BlindBeyond(seen.flatten(), adapter):
            whole = sample_of(model(**named))
        at, unit, unfolded = line_of(whole, sizes, dim)
        return unfolded.narrow(at, start * unit, (end - start) * unit)

    plain = sample_of(_quiet(model, named))
    at, unit, _ = line_of(plain, sizes, dim)
    return blended(run, dim, bounds, at, unit).reshape(plain.shape)


def cut_of(sizes: Sizes, step: int, parts: int, overlap: float) -> tuple[int, list[tuple[int, int]]]:
    """The dimension that a step cuts, and where parts begin and end."""
    cut = [(dim, part_bounds(sizes[dim], parts, overlap)) for dim in range(3) if sizes[dim] >= parts]
    cut = [(dim, bounds) for dim, bounds in cut if bounds[0][1] < sizes[dim]]
    return cut[step % len(cut)]


def line_of(sample: Tensor, sizes: Sizes, dim: int) -> tuple[int, int, Tensor]:
    """Where a prediction counts frames, rows or columns, how many places a patch has there, and it with such dims."""
    if sample.ndim == 3:
        return dim + 1, 1, sample.unflatten(1, sizes)
    at = dim + 1 if sample.ndim == 4 else dim + 2
    if sample.ndim == 5 and sample.shape[-1] == 4:  # channels come last
        at = dim + 1
    elif sample.ndim == 5 and sample.shape[1] % sizes[0] == 0 and sample.shape[2] == 4 and dim == 0:
        at = 1  # frames come before channels
    return at, sample.shape[at] // sizes[dim], sample


@torch.no_grad()
def _quiet(model: Any, named: dict[str, Any]) -> Any:
    return model(**named)


@torch.no_grad()
def sampled(model: Any, calls: list[dict[str, Any]], strategies: tuple[Strategy, ...], nproc: int) -> dict[str, Any]:
    """What a model returns in every step under strategies, and its bytes, counted and predicted."""
    with Mesh(**mesh_for(strategies, nproc)) as mesh, parallelize(model, *strategies, mesh=mesh) as plan:
        with Ledger(flops=False) as ledger:
            outputs = [sample_of(model(**call)).clone() for call in calls]
        told = plan.explain()
        return {
            "outputs": outputs,
            "counted": ledger.summary()["bytes_sent"],
            "predicted": told.bytes_total()[mesh.rank],
            "text": str(told),
        }


def calls_of(name: str, dtype: torch.dtype = torch.float64) -> tuple[Any, list[dict[str, Any]]]:
    """A model and its calls in all steps."""
    if name in UNETS:
        return UNETS[name].model(dtype), UNETS[name].calls((16, 24), dtype, TIMES)
    family: Family = FAMILIES[name]
    return family.model(SIDE, dtype), [family.at(call_of(name, dtype), time) for time in TIMES]


def _everyones(value: Any, nproc: int) -> list[Any]:
    return gathered(value) if nproc > 1 else [value]


#: Three parts on one, two and three ranks.
ON_RANKS = ("SD3", "Wan", "Flux", "HunyuanVideo", "SD")


@staying_connected
def on_ranks(nproc: int) -> dict[str, list[dict[str, Any]]]:
    """Some models with three parts, whatever the number of ranks, on every rank."""
    torch.set_num_threads(1)
    results = {}
    for name, dtype in itertools.product(ON_RANKS, (torch.float64, torch.float32)):
        model, calls = calls_of(name, dtype)
        results[f"{name}, {dtype}"] = _everyones(sampled(model, calls, (LatentParallel(parts=3),), nproc), nproc)
    return results


@staying_connected
def beside_others(nproc: int) -> dict[str, list[dict[str, Any]]]:
    """Two parts beside what shares out the samples of a batch, on four ranks; alone on one."""
    torch.set_num_threads(1)
    model, calls = calls_of("SD3")
    results = {}
    for other in (CfgParallel, DataParallel):
        strategies: tuple[Strategy, ...] = (LatentParallel(parts=2),)
        if nproc == 4:
            strategies = (other(degree=2), LatentParallel(degree=2))
        results[other.__name__] = _everyones(sampled(model, calls, strategies, nproc), nproc)
    return results


@staying_connected
def two_denoisers(nproc: int) -> list[dict[str, Any]]:
    """A film of a pipeline whose second transformer takes over in mid-generation, with its bytes, on every rank."""
    torch.set_num_threads(1)
    strategy = LatentParallel(parts=2)
    pipe = two_denoisers_worker.pipeline()
    with Mesh(**mesh_for((strategy,), nproc)) as mesh, parallelize(pipe, strategy, mesh=mesh) as plan:
        with Ledger(flops=False) as ledger:
            film, counts = two_denoisers_worker.calls(pipe)
        total = plan.explain().bytes_total()[mesh.rank]
    row = {"film": film, "calls": counts, "counted": ledger.summary()["bytes_sent"], "predicted": total}
    return _everyones(row, nproc)


@staying_connected
def refusals(nproc: int) -> dict[str, list[str]]:
    """What every rank is told."""
    wan, (video, *_) = calls_of("Wan")
    dit, (picture, *_) = calls_of("DiT")
    packed, odd = flux(SIDE).double(), FAMILIES["Flux"].call(8, 1, torch.float64)
    even = call_of("Flux")
    unet, (image, *_) = calls_of("SD")
    acts: dict[str, Callable[[], Any]] = {
        "beside Ulysses": lambda: parallelize(wan, LatentParallel(), Ulysses(degree=1)),
        "beside StepCache": lambda: parallelize(wan, LatentParallel(), StepCache()),
        "fewer parts than ranks": lambda: parallelize(wan, LatentParallel(parts=1)),
        "too many parts": lambda: _call(dit, picture, LatentParallel(parts=6)),
        "no frames": lambda: _call(dit, picture, LatentParallel(dims="time")),
        "other tokens": lambda: _call(packed, odd, LatentParallel()),
        "other order": lambda: _call(packed, even | {"img_ids": even["img_ids"].flip(0)}, LatentParallel()),
        "odd sides": lambda: _call(unet, image | {"sample": image["sample"][..., :13, :13]}, LatentParallel()),
        "masks over the picture": lambda: _call(
            unet, image | {"cross_attention_kwargs": {"ip_adapter_masks": []}}, LatentParallel()
        ),
        "Sana": lambda: parallelize(FAMILIES["Sana"].build(8), LatentParallel()),
        "beside a cache": lambda: beside_cache(wan, LatentParallel()),
        "video, too many": lambda: _call(wan, video, LatentParallel(parts=9)),
    }
    return {name: gathered(refusal(act)) for name, act in acts.items()}


def beside_cache(model: Any, strategy: LatentParallel) -> None:
    """Puts a cache of diffusers on a model, which keeps what attention has returned, and then a strategy."""
    whole = {"spatial_attention_block_skip_range": 2, "spatial_attention_timestep_skip_range": (100, 800)}
    model.enable_cache(PyramidAttentionBroadcastConfig(**whole, current_timestep_callback=lambda: 500))
    try:
        parallelize(model, strategy)
    finally:
        model.disable_cache()


def _call(model: Any, named: dict[str, Any], strategy: Strategy) -> None:
    with torch.no_grad(), parallelize(model, strategy):
        model(**named)


@torch.no_grad()
def calls_in(name: str, strategy: LatentParallel) -> tuple[Any, list[tuple[dict[str, Any], Tensor]]]:
    """The denoiser of a pipeline, and the arguments of each call of it under a strategy with what it returned."""
    pipe = CASES[name].make()
    model = denoisers(pipe)[0]
    seen: list[tuple[dict[str, Any], Tensor]] = []

    def note(module: Any, args: Any, kwargs: Any, output: Any) -> None:
        names = list(inspect.signature(type(module).forward).parameters)[1:]
        given = dict(zip(names, args, strict=False)) | kwargs
        # Pipelines write to their latents.
        kept = tree_map(lambda value: value.clone() if isinstance(value, Tensor) else value, given)
        seen.append((kept, sample_of(output).clone()))

    handle = model.register_forward_hook(note, with_kwargs=True)
    try:
        with parallelize(pipe, strategy):
            CASES[name].run(pipe)
    finally:
        handle.remove()
    return model, seen


@contextmanager
def in_place(module: Any, change: Callable[[Any], Any]) -> Iterator[None]:
    """Changes what a module returns."""
    handle = module.register_forward_hook(lambda module, args, output: change(output))
    try:
        yield
    finally:
        handle.remove()
