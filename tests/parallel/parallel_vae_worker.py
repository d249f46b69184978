"""Runs on every rank: autoencoders cut over the ranks, against the whole ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from diffusers import AutoencoderKL, AutoencoderKLHunyuanImage
from diffusers.utils import logging
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from partsong import CfgParallel, DataParallel, ParallelVae, PatchPipeline, SyncPatch, Ulysses
from partsong.ledger import Ledger
from partsong.parallel import Mesh, Strategy, mesh_for, parallelize
from partsong.samplers import generate
from tests.parallel.autoencoders import VAES, result
from tests.parallel.families import FAMILIES
from tests.parallel.pipelines import PIPES
from tests.parallel.ranks import error, staying_connected
from tests.parallel.ranks import gathered as _gathered
from tests.parallel.unets import UNET_PIPES
from tests.parallel.unets import _picture as picture
from tests.tiny_models.autoencoders import kl_settings
from tests.tiny_models.weights import randomized

DTYPES = {"float64": torch.float64, "float32": torch.float32}
#: What a case is made of: number of ranks, autoencoder, batch and type.
Case = tuple[int, str, int, str]


def gathered(value: Any) -> list[Any]:
    """The value of every rank, also where there is one."""
    return _gathered(value) if dist.is_initialized() else [value]


def case(vae: Any, calls: list[tuple[str, Tensor]], mesh: Mesh, **knobs: int) -> dict[str, Any]:
    """Every call under a plan, with what it says it moves and what it leaves behind."""
    want = [result(vae, *call) for call in calls]
    before = {part: sorted(vars(module)) for part, module in vae.named_modules()}
    with parallelize(vae, ParallelVae(**knobs), mesh=mesh) as plan, Ledger(flops=False) as ledger:
        got = [result(vae, *call) for call in calls]
        told = plan.explain().bytes_total() if mesh.world_size > 1 else [0]
    after = {part: sorted(vars(module)) for part, module in vae.named_modules()}
    errors = gathered(max(error(g, w) for g, w in zip(got, want, strict=True)))
    return {
        "error": max(errors),
        "counted": gathered(int(ledger.summary()["bytes_sent"])),
        "told": told,
        "clean": before == after and torch.equal(result(vae, *calls[0]), want[0]),
        "unclamped": min((value.abs() < 1).double().mean().item() for value in want),
    }


def matrix(nproc: int, cases: list[Case]) -> dict[Case, dict[str, Any]]:
    """All these cases, which are on the ranks of this process: decoding and encoding."""
    logging.set_verbosity_error()
    results = {}
    with Mesh(**mesh_for((ParallelVae(),), nproc)) as mesh:
        for _, name, batch, dtype in cases:
            vae = VAES[name].make(DTYPES[dtype])
            results[nproc, name, batch, dtype] = case(vae, VAES[name].calls(vae, batch), mesh)
    return results


# --- pipelines -------------------------------------------------------------------------------------------------------

Call = Callable[[Any], Tensor]


def _pipeline(pipe: Any, call: Call, chosen: tuple[Strategy, ...], nproc: int) -> dict[str, Any]:
    want = call(pipe)
    with Mesh(**mesh_for(chosen, nproc)) as mesh, parallelize(pipe, *chosen, mesh=mesh) as plan:
        if nproc == 2:  # what is predicted is one generation, whatever went before
            call(pipe)
        with Ledger(flops=False) as ledger:
            got = call(pipe)
            told = plan.explain()
        degrees = {name: degree for name, degree in plan.mesh.degrees.items() if degree > 1}
        errors = gathered(error(got, want))
        counted = gathered(int(ledger.summary()["bytes_sent"]))
    clean = not any({"forward", "_diffusers_hook"} & vars(module).keys() for module in pipe.vae.modules())
    return {
        "error": max(errors),
        "counted": counted,
        "told": told.bytes_total(),
        "degrees": degrees,
        "clean": clean and (nproc > 2 or torch.equal(call(pipe), want)),
        "split": told.split,
    }


def _sliced(pipe: Any) -> Tensor:
    pipe.vae.enable_slicing()
    return UNET_PIPES["SD"].call(pipe, batch=2, steps=2)


def _own_tiles(pipe: Any) -> Tensor:
    pipe.vae.tile_latent_min_size, pipe.vae.tile_sample_min_size = 8, 32
    pipe.vae.enable_tiling()
    return _short("SD")(pipe)


def _short(name: str) -> Call:
    return lambda pipe: UNET_PIPES[name].call(pipe, steps=2)


def _repainted(pipe: Any) -> Tensor:
    whole = replace(UNET_PIPES["img2img"], more=lambda size, dtype: {"image": picture(3, size, dtype), "strength": 1.0})
    return whole.call(pipe, steps=2)


@staying_connected
def pipelines(nproc: int) -> dict[str, dict[str, Any]]:
    """Real pipelines, with the denoiser split in other ways or not at all."""
    logging.set_verbosity_error()
    sd3: Call = lambda pipe: PIPES["SD3"].call(pipe, 3)  # noqa: E731
    vae, sd = ParallelVae(), UNET_PIPES["SD"]
    cases: dict[int, dict[str, tuple[Any, Call, tuple[Strategy, ...]]]] = {
        2: {
            "inpaint": (UNET_PIPES["inpaint"], _short("inpaint"), (vae,)),
            "slicing": (sd, _sliced, (vae,)),
            "tiling": (sd, _own_tiles, (vae,)),
            "rows": (sd, _short("SD"), (SyncPatch(), vae)),
            "SD3": (PIPES["SD3"], sd3, (DataParallel(), vae)),
        },
        3: {"SD": (sd, _short("SD"), (vae,)), "img2img": (UNET_PIPES["img2img"], _repainted, (vae,))},
        4: {
            "SD": (sd, _short("SD"), (CfgParallel(), Ulysses(degree=2), vae)),
            "SD3": (PIPES["SD3"], PIPES["SD3"].call, (Ulysses(degree=2), vae)),
        },
    }
    return {name: _pipeline(row.make(), call, chosen, nproc) for name, (row, call, chosen) in cases[nproc].items()}


def own_loop() -> tuple[float, float]:
    """A strategy that samples with a loop of its own, and the autoencoder on the same ranks."""
    pipe = PIPES["SD3"].make()
    want = PIPES["SD3"].call(pipe)
    named = PIPES["SD3"].arguments(1, torch.float64, (48, 80)) | {"num_inference_steps": 3}
    found = []
    with Mesh(pipe=2) as mesh:
        for chosen in ((PatchPipeline(warmup_steps=3), ParallelVae()), (PatchPipeline(warmup_steps=3),)):
            with parallelize(pipe, *chosen, mesh=mesh) as plan, Ledger(flops=False) as ledger:
                picture = generate(plan, **named, generator=torch.Generator().manual_seed(9)).images
                found.append((max(gathered(error(torch.as_tensor(picture), want))), ledger.summary()["bytes_sent"]))
    return found[0][0], found[0][1] - found[1][1]


# --- tiles -----------------------------------------------------------------------------------------------------------


def blended(half: Any, image: Tensor, tile: int, overlap: int, taken: int, given: int) -> Tensor:
    """Tiles in one process, by the definition: straight ramps between one tile and the next."""
    rows, whole, start = image.shape[-2] // taken, None, 0
    while True:
        end = min(start + tile, rows)
        part = half(image[..., start * taken : end * taken, :])
        if whole is None:
            whole = part
        else:
            shared = overlap * given
            ramp = ((torch.arange(shared) + 0.5) / max(shared, 1))[:, None].to(part)
            seam = whole[..., whole.shape[-2] - shared :, :] * (1 - ramp) + part[..., :shared, :] * ramp
            whole = torch.cat([whole[..., : whole.shape[-2] - shared, :], seam, part[..., shared:, :]], dim=-2)
        if end == rows:
            return whole
        start += tile - overlap


def tiled(nproc: int, tiles: Sequence[tuple[int, int | None]]) -> dict[str, dict[str, Any]]:
    """Tiles against their definition, and against the whole where one tile covers it."""
    results = {}
    vae = VAES["KL"].make(torch.float64)
    vae.quant_conv = vae.post_quant_conv = None
    torch.manual_seed(5)
    latent, picture = torch.randn(2, 4, 11, 5).double(), torch.randn(2, 3, 44, 20).double()
    with Mesh(**mesh_for((ParallelVae(),), nproc)) as mesh:
        for tile, overlap in tiles:
            lap = tile // 4 if overlap is None else overlap
            with torch.no_grad():
                want = blended(vae.decoder, latent, tile, lap, 1, 4), blended(vae.encoder, picture, tile, lap, 4, 1)
            calls = [("decode", latent), ("encode", picture)]
            knobs = {"tile": tile} if overlap is None else {"tile": tile, "overlap": overlap}
            with parallelize(vae, ParallelVae(**knobs), mesh=mesh) as plan, Ledger(flops=False) as ledger:
                got = [result(vae, *call) for call in calls]
                told = plan.explain().bytes_total() if nproc > 1 else [0]
                kind = plan.kind
            whole = [result(vae, *call) for call in calls]
            definition = want if nproc > 1 else whole
            results[f"{tile},{overlap}"] = {
                "error": max(gathered(max(error(g, w) for g, w in zip(got, definition, strict=True)))),
                "drift": max(error(g, w) for g, w in zip(got, whole, strict=True)),
                "counted": gathered(int(ledger.summary()["bytes_sent"])),
                "told": told,
                "kind": kind,
            }
    return results


# --- memory ----------------------------------------------------------------------------------------------------------


class Largest(TorchDispatchMode):
    """The number of elements of the largest tensor that any operation makes."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if isinstance(output, Tensor):
            self.elements = max(self.elements, output.untyped_storage().nbytes() // output.element_size())
        return output


def largest(nproc: int) -> dict[str, tuple[int, int]]:
    """The largest tensor of a decoding and an encoding, whole and on each rank."""
    vae = AutoencoderKL(**kl_settings(3, block_out_channels=(32, 16, 8))).eval()
    found = {}
    torch.manual_seed(5)
    with Mesh(data=nproc) as mesh:
        for name, value in (("decode", torch.randn(1, 4, 16, 12)), ("encode", torch.randn(1, 3, 64, 48))):
            with Largest() as whole:
                result(vae, name, value)
            with parallelize(vae, ParallelVae(), mesh=mesh), Largest() as part:
                result(vae, name, value)
            found[name] = (whole.elements, max(gathered(part.elements)))
    return found


# --- refusals on two ranks -------------------------------------------------------------------------------------------


def _hunyuan() -> Any:
    return randomized(
        AutoencoderKLHunyuanImage(
            in_channels=3,
            out_channels=3,
            latent_channels=32,
            block_out_channels=(32, 64),
            layers_per_block=1,
            spatial_compression_ratio=2,
            sample_size=16,
        ),
        torch.float64,
    )


def _call(vae: Any, name: str, value: Tensor, mesh: Mesh, **knobs: int) -> str:
    with parallelize(vae, ParallelVae(**knobs), mesh=mesh):
        result(vae, name, value)
    return "accepted"


def _vae(name: str) -> Any:
    return VAES[name].make(torch.float32)


def _own_and_other_tiles(mesh: Mesh) -> str:
    vae = _vae("KL")
    vae.enable_tiling()
    return _call(vae, "decode", torch.randn(1, 4, 8, 8), mesh, tile=4)


REFUSED: dict[str, Callable[[Mesh], Any]] = {
    "few latent rows": lambda mesh: _call(_vae("KL"), "decode", torch.zeros(1, 4, 1, 8), mesh),
    "few picture rows": lambda mesh: _call(_vae("KL"), "encode", torch.zeros(1, 3, 7, 8), mesh),
    "few rows for wide convolutions": lambda mesh: _call(_vae("DC"), "decode", torch.zeros(1, 4, 3, 8), mesh),
    "few positions": lambda mesh: _call(_vae("DC"), "decode", torch.zeros(1, 4, 4, 2), mesh),
    "half a pair": lambda mesh: _call(_vae("DC"), "encode", torch.zeros(1, 3, 34, 32), mesh),
    "other latents": lambda mesh: _call(_vae("KL"), "decode", torch.full((1, 4, 8, 8), mesh.rank + 1.0), mesh),
    "other height": lambda mesh: _call(_vae("KL"), "decode", torch.zeros(1, 4, 8 + mesh.rank, 8), mesh),
    "unknown blocks": lambda mesh: parallelize(_hunyuan(), ParallelVae(), mesh=mesh),
    "tiles of frames": lambda mesh: _call(_vae("Wan"), "decode", torch.zeros(1, 4, 2, 8, 8), mesh, tile=4),
    "two kinds of tiles": _own_and_other_tiles,
    "uneven tiles": lambda mesh: _call(_vae("KL"), "encode", torch.zeros(1, 3, 33, 8), mesh, tile=4),
    "no autoencoder": lambda mesh: parallelize(FAMILIES["SD3"].build(8), DataParallel(), ParallelVae(), mesh=mesh),
    "already there": lambda mesh: parallelize(_vae("KL"), ParallelVae(), ParallelVae(tile=4), mesh=mesh),
    "unknown blocks in tiles": lambda mesh: _call(
        _hunyuan(),
        "decode",
        torch.randn(1, 32, 8, 8, generator=torch.Generator().manual_seed(1)).double(),
        mesh,
        tile=4,
    ),
}


def refusals() -> dict[str, list[str]]:
    """What each rank is told."""
    logging.set_verbosity_error()
    told = {}
    with Mesh(data=2, timeout=20.0) as mesh:
        for name, attempt in REFUSED.items():
            try:
                value = attempt(mesh)
            except Exception as problem:  # noqa: BLE001 - the test reads which one it was
                value = f"{type(problem).__name__}: {problem}"
            told[name] = gathered(str(value))
    return told
