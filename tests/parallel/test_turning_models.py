"""Blocks of frames on models with rotary positions of other forms than Wan's: LTX, CogVideoX, HunyuanVideo and more."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import AutoencoderKLMochi

from partsong import DualParallel, TimestepPipeline
from partsong.errors import UnsupportedError
from partsong.parallel import Mesh, parallelize
from partsong.parallel.ranks.launch import launch
from partsong.samplers import generate
from partsong.samplers.long_video.video_decode import StreamingDecoder
from tests.parallel import turning_worker
from tests.parallel.families import FAMILIES
from tests.parallel.turning_worker import CAUSAL, TURNING
from tests.pipelines.cases import CASES
from tests.pipelines.video_parts import cogvideox_autoencoder, hunyuan_video_autoencoder, ltx_autoencoder
from tests.tiny_models.weights import noise, randomized


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    return turning_worker.ranks(1)


@pytest.fixture(scope="module", params=[2, pytest.param(3, marks=pytest.mark.full)])
def several(request: pytest.FixtureRequest) -> dict[str, Any]:
    return launch(turning_worker.ranks, request.param, request.param, tuple(TURNING))


@pytest.mark.parametrize("name", TURNING)
def test_keys_of_neighbours_lie_where_the_model_has_them(name: str) -> None:
    with Mesh() as mesh:
        assert turning_worker.neighbours(name, mesh) <= 1e-10


@pytest.mark.parametrize("name", [name for name, turning in TURNING.items() if turning.recomputes])
def test_frames_computed_again_lie_where_the_model_has_them(name: str) -> None:
    with Mesh() as mesh:
        assert turning_worker.neighbours(name, mesh, previous="recomputed") <= 1e-10


def test_one_block_is_the_pipeline(alone: dict[str, Any], several: dict[str, Any]) -> None:
    for found in (alone, several):
        assert max(apart for apart, _ in found.values()) <= 1e-10


def test_the_same_bits_on_any_number_of_ranks(alone: dict[str, Any], several: dict[str, Any]) -> None:
    for name, (_, (video, told)) in several.items():
        assert torch.equal(alone[name][1][0], video), name
        assert all(told), name


@pytest.mark.parametrize("nproc", [1, 2])
def test_a_window_that_holds_the_past_is_the_causal_model(nproc: int) -> None:
    found = turning_worker.streamed(1) if nproc == 1 else launch(turning_worker.streamed, nproc, nproc)
    assert max(found.values()) <= 1e-10


@pytest.mark.parametrize(("name", "guidance"), [("LTX-Video", 3.0), ("Kandinsky 5", 1.0)])
def test_blocks_that_see_clean_blocks_are_the_causal_model(name: str, guidance: float) -> None:
    with Mesh(stage=1) as mesh:
        assert turning_worker.cascaded(name, mesh, guidance) <= 1e-10


@pytest.mark.parametrize(
    ("name", "counts"),
    [
        ("LTX-Video", [0, 0, 0, 49]),
        ("HunyuanVideo", [0, 0, 0, 25]),
        pytest.param("Kandinsky 5", [0, 0, 0, 25], marks=pytest.mark.full),  # with HunyuanVideo's autoencoder
        # Frames are decoded in pairs, and the first of an odd number along with a pair.
        ("CogVideoX", [0, 9, 8, 8]),
    ],
)
def test_frames_equal_the_whole_decoding(name: str, counts: list[int]) -> None:
    assert turning_worker.decoded(name) == (pytest.approx(0.0, abs=1e-10), counts)


@pytest.mark.parametrize("name", ["Mochi", "LTX-Video", "Kandinsky 5"])
def test_a_stopped_video_goes_on(name: str, tmp_path: Path) -> None:
    assert turning_worker.resumed(name, tmp_path)


def _mochi_autoencoder() -> Any:
    widths: dict[str, Any] = {
        "encoder_block_out_channels": (32, 32, 32, 32),
        "decoder_block_out_channels": (32, 32, 32, 32),
    }
    return randomized(AutoencoderKLMochi(**widths, latent_channels=4, layers_per_block=(1, 1, 1, 1, 1)), scale=0.1)


MAKERS = (_mochi_autoencoder, cogvideox_autoencoder, hunyuan_video_autoencoder, ltx_autoencoder)
SIZES = ((2, 2, 1), (3, 1), (1, 1, 2), (5, 2), (1,))


@pytest.mark.parametrize(
    ("make", "sizes"),
    [  # by default two ways to cut each, in turns
        pytest.param(make, sizes, marks=[] if (turn - place) % len(MAKERS) < 2 else [pytest.mark.full])
        for place, make in enumerate(MAKERS)
        for turn, sizes in enumerate(SIZES)
    ],
)
def test_pieces_equal_the_whole_decoding(make: Any, sizes: tuple[int, ...]) -> None:
    vae, z = make(), noise(1, 4, sum(sizes), 2, 3, seed=4)
    decoder = StreamingDecoder(vae, sum(sizes))
    with torch.no_grad():
        pieces = [decoder.decode(part, return_dict=False)[0] for part in z.split(sizes, dim=2)]
        whole = vae.decode(z, return_dict=False)[0]
    decoder.close()
    torch.testing.assert_close(torch.cat(pieces, dim=2), whole, rtol=1e-10, atol=1e-10)


def test_positions_that_are_added_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="use_rotary_positional_embeddings=False in its configuration"):
        parallelize(FAMILIES["CogVideoX"].build(4), DualParallel())


@pytest.mark.parametrize("name", [name for name, turning in TURNING.items() if not turning.recomputes])
def test_frames_without_positions_are_not_computed_again(name: str) -> None:
    with pytest.raises(UnsupportedError, match="gives the positions of a block's own frames"):
        parallelize(TURNING[name].make(1), DualParallel(previous="recomputed"))


def test_a_picture_to_begin_with_is_refused() -> None:
    case = CASES["Kandinsky5I2VPipeline"]
    with (
        parallelize(case.make(), DualParallel(block_frames=2, context=1)) as plan,
        pytest.raises(UnsupportedError, match="prepares more than latents"),
    ):
        generate(plan, **case.call(1))


@pytest.mark.parametrize("name", [name for name in TURNING if name not in CAUSAL])
def test_text_that_sees_the_future_is_refused(name: str) -> None:
    with pytest.raises(UnsupportedError, match="early frames would hear of later ones"):
        parallelize(TURNING[name].make(2), TimestepPipeline())
