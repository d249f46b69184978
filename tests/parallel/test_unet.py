"""UNets over ranks: exact where claimed, displaced by the definition, refused with a reason, predicted to the byte."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from partsong import DisplacedPatch, PartialPatch
from partsong.parallel import predict
from partsong.parallel.ranks.launch import launch
from tests import covering
from tests.covering import chosen
from tests.parallel import unet_worker
from tests.parallel.real_sizes_unets import SDXL
from tests.parallel.unet_worker import LAYERS, Case, PipeCase

TOLERANCE = {"float64": 1e-10, "float32": 5e-6}
#: Ranks where three show no more than two.
FEW = 3 if covering.FULL else 2
RANKS = (1, 2, 3, 4)


POSSIBLE = unet_worker.product if covering.FULL else unet_worker.usual
PRODUCT = [case for nproc in (RANKS if covering.FULL else RANKS[1:3]) for case in POSSIBLE(nproc)]
SEVERAL = chosen([case for case in PRODUCT if case[0] > 1], prefer=lambda case: (case[3] != "float64", case[0]))
CASES = [*SEVERAL, *(chosen(POSSIBLE(1), beside=SEVERAL) if covering.FULL else ())]
PIPE_PRODUCT = [
    case
    for case in itertools.product((2, 3), unet_worker.PIPE_STRATEGIES, unet_worker.UNET_PIPES)
    # What is in a pipeline besides its UNet does not depend on how the UNet is cut.
    if covering.FULL or (case[0] == 2 and case[2] == "SD")
]
PIPE_CASES = chosen(PIPE_PRODUCT)


@functools.cache
def matrix(nproc: int) -> dict[Case, dict[str, Any]]:
    return launch(unet_worker.matrix, nproc, nproc, [case for case in CASES if case[0] == nproc])


@functools.cache
def pipelines(nproc: int) -> dict[PipeCase, list[Any]]:
    return launch(unet_worker.pipelines, nproc, nproc, [case for case in PIPE_CASES if case[0] == nproc])


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
@pytest.mark.slow
def test_equals_the_whole_unet(case: Case) -> None:
    result = matrix(case[0])[case]
    assert result["error"] <= TOLERANCE[case[3]]
    assert result["counted"] == result["predicted"]
    assert result["restored"]


@pytest.mark.parametrize("case", PIPE_CASES, ids=lambda case: "-".join(map(str, case)))
def test_pipelines_give_the_serial_picture(case: PipeCase) -> None:
    rows = pipelines(case[0])[case]
    assert len(rows) == case[0]
    for error, told, hooked_outside, clean in rows:
        assert error <= 1e-10
        assert told
        assert not hooked_outside
        assert clean


@functools.cache
def convergence() -> dict[tuple[int, float], float]:
    return launch(unet_worker.convergence, 3, 3)


@pytest.mark.full
@pytest.mark.parametrize("order", [0, 1])
def test_a_step_ten_times_smaller_errs_by_the_order(order: int) -> None:
    """Old values err in proportion to the step; extrapolated ones to its square."""
    ratio = convergence()[order, 1e-1] / convergence()[order, 1e-2]
    assert 10 ** (order + 1) * 0.7 < ratio < 10 ** (order + 1) * 1.4


#: By default the strategies take turns with every other model.
OLD = [
    (name, label)
    for place, name in enumerate(unet_worker.MODELS)
    for turn, label in enumerate(unet_worker.OLD)
    if covering.FULL or (place % 2 == 0 and turn == place // 2 % 2)
]


@pytest.mark.parametrize(("name", "strategy"), OLD)
def test_what_is_old_is_exact_where_nothing_changes(name: str, strategy: str) -> None:
    distance, told = unchanged()[name, strategy]
    assert distance <= 1e-10
    assert told


@functools.cache
def unchanged() -> dict[tuple[str, str], tuple[float, bool]]:
    return launch(unet_worker.unchanged, FEW, FEW, OLD)


# --- one layer, from the definition -----------------------------------------------------------------------------------

SHARES = (slice(0, 4), slice(4, 8), slice(8, 11))
PACE = (None, None, 2.0, 0.5, 0.5)  # how far each step goes, in units of the one before


@functools.cache
def layers() -> dict[tuple[str, int], list[Tensor]]:
    return launch(unet_worker.layers, 3, 3)


def remembered(images: list[Tensor], step: int, order: int) -> Tensor:
    """What a rank knows of the others' rows."""
    if step < 2:
        return images[step]
    last = images[step - 1]
    pace = PACE[step]
    return last if order == 0 or pace is None else last + pace * (last - images[step - 2])


def moments(image: Tensor) -> list[Tensor]:
    """Mean and biased variance of each rank's rows."""
    return [torch.stack([image[:, :, s].mean((1, 2, 3)), image[:, :, s].var((1, 2, 3), correction=0)]) for s in SHARES]


def whole(parts: list[Tensor]) -> Tensor:
    """Mean and biased variance of the image out of those of its ranks."""
    counts = torch.tensor([s.stop - s.start for s in SHARES], dtype=torch.float64)[:, None]
    mean, var = torch.stack(parts).unbind(1)
    total = (counts * mean).sum(0) / counts.sum()
    return torch.stack([total, (counts * (var + mean**2)).sum(0) / counts.sum() - total**2])


def simulated_norm(layer: Any, images: list[Tensor], step: int, order: int) -> Tensor:
    fresh, out = moments(images[step]), torch.empty_like(images[step])
    known = [moments(image) for image in images]
    for rank, share in enumerate(SHARES):
        if step < 2:
            mean, var = whole(fresh)
        elif order == 0:
            old, own = known[step - 1], fresh[rank]
            mean = whole(old)[0] + own[0] - old[rank][0]
            square = whole(old)[1] + whole(old)[0] ** 2 + own[1] + own[0] ** 2 - old[rank][1] - old[rank][0] ** 2
            var = torch.where(square - mean**2 < 0, own[1], square - mean**2)
        else:
            # Statistics of one other rank are extrapolated, those of several are the last step's.
            last, older, pace = known[step - 1], known[step - 2], PACE[step] if len(SHARES) == 2 else 0.0
            parts = [a + pace * (a - b) for a, b in zip(last, older, strict=True)]
            parts = [torch.stack([p[0], torch.where(p[1] > 0, p[1], fresh[rank][1])]) for p in parts]
            parts[rank] = fresh[rank]
            mean, var = whole(parts)
        scaled = (images[step][:, :, share] - mean.view(-1, 1, 1, 1)) / (var.view(-1, 1, 1, 1) + layer.eps).sqrt()
        out[:, :, share] = scaled * layer.weight.view(1, -1, 1, 1) + layer.bias.view(1, -1, 1, 1)
    return out


def simulated_convolution(layer: Any, images: list[Tensor], step: int, order: int) -> Tensor:
    out = []
    for share in SHARES:
        seen = remembered(images, step, order).clone()
        seen[:, :, share] = images[step][:, :, share]
        out.append(F.conv2d(seen, layer.weight, layer.bias, padding=layer.padding)[:, :, share])
    return torch.cat(out, dim=2)


@pytest.mark.parametrize("order", [0, 1])
@pytest.mark.parametrize("name", LAYERS)
def test_a_displaced_layer_is_its_definition(name: str, order: int) -> None:
    torch.manual_seed(3)
    layer, images = LAYERS[name](), [torch.randn(2, 3, 11, 5, dtype=torch.float64) for _ in range(5)]
    simulate = simulated_norm if name == "group norm" else simulated_convolution
    with torch.no_grad():
        for step, got in enumerate(layers()[name, order]):
            torch.testing.assert_close(got, simulate(layer, images, step, order), rtol=1e-9, atol=1e-9)


def test_norms_that_are_waited_for_are_exact() -> None:
    torch.manual_seed(3)
    layer, images = LAYERS["group norm"](), [torch.randn(2, 3, 11, 5, dtype=torch.float64) for _ in range(5)]
    for image, got in zip(images, layers()["group norm", unet_worker.FRESH], strict=True):
        torch.testing.assert_close(got, layer(image), rtol=1e-9, atol=1e-9)
    for sent, predicted in launch(unet_worker.fresh_bytes, 2, 2):
        assert sent == predicted > 0


REFUSED = {
    "rows": "has 1 rows, too few to cut over 2 ranks; use at most 1 ranks or a latent of at least 8 rows",
    "mask": "attention_mask was given",
    "masks of an IP-Adapter": "ip_adapter_masks were given",
    "residual": "a residual of mid_block_additional_residual has 5 rows, and the image has (16, 8, 4) at its levels",
    "pairs of rows": "14 rows are no multiple of 4, and its blocks put rows together in pairs",
    "no text": "encoder_hidden_states were not given, and what attends to a text would attend to this rank's rows",
    "dora": "merge the adapter",
    "freeu": "has FreeU on",
    "unknown": "MultiheadAttention) is not known to this splitting into rows; use CfgParallel or DataParallel",
}


@pytest.fixture(scope="module")
def refused() -> dict[str, str]:
    return launch(unet_worker.refusals, 2, 2)


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(refused: dict[str, str], name: str) -> None:
    assert refused[name].startswith("UnsupportedError")
    assert REFUSED[name] in refused[name]


def test_a_prediction_without_ranks_is_what_ranks_send() -> None:
    cases = scaled_down()
    assert len(cases) == 4
    for key, (told, counted) in cases.items():
        assert told == counted, key
        assert min(told) > 0, key


@functools.cache
def scaled_down() -> dict[tuple[str, str], tuple[list[int], list[int]]]:
    return launch(unet_worker.scaled_down, FEW, FEW)


@pytest.mark.full
def test_bytes_of_sdxl_on_eight_patches() -> None:
    half = {"dtype": torch.float16, "device": "meta"}
    named = {
        "sample": torch.empty(1, 4, 128, 128, **half),
        "timestep": torch.empty((), device="meta"),
        "encoder_hidden_states": torch.empty(1, 77, 2048, **half),
        "added_cond_kwargs": {"text_embeds": torch.empty(1, 1280, **half), "time_ids": torch.empty(1, 6, **half)},
    }
    model = SDXL.build().half()
    displaced = predict(model, DisplacedPatch(), ranks=8, **named).bytes_per_step
    partial = predict(model, PartialPatch(portion=0.3), ranks=8, **named).bytes_per_step
    assert 370e6 < max(displaced) <= 375e6
    assert 35e6 < max(partial) <= 45e6
