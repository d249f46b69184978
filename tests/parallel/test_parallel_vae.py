"""Autoencoders over all ranks: exact in rows, by definition in tiles, refused with a reason, predicted to the byte."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import numpy as np
import pytest

from partsong import CfgParallel, DataParallel, ParallelVae, Ulysses, parse_strategy
from partsong.errors import ArgumentError
from partsong.parallel import Strategy, mesh_for
from partsong.parallel.cuts.row_blocks import AUTOENCODER_BLOCKS, UNET_BLOCKS
from partsong.parallel.ranks.launch import launch
from tests import covering
from tests.covering import chosen
from tests.parallel import parallel_vae_worker as worker
from tests.parallel.autoencoders import VAES
from tests.parallel.parallel_vae_worker import Case
from tests.parallel.shared_decoding_worker import LOOPS, videos

TOLERANCE = {"float64": 1e-10, "float32": 5e-6}


@functools.cache
def pipelines(nproc: int) -> dict[str, dict[str, Any]]:
    return launch(worker.pipelines, nproc, nproc)


#: More ranks than cores by default share one autoencoder of pictures and one of videos, and one rank has the first.
#: Single precision and several samples are of these two as well.
PRODUCT = [
    case
    for case in itertools.product((1, 2, 3, 4), VAES, (1, 2), worker.DTYPES)
    if covering.FULL
    or (case[0] == 2 and (case[1] in ("KL", "Wan") or case[2:] == (1, "float64")))
    or (case[0] < 4 and case[1] in ("KL", "Wan")[: case[0]] and case[2:] == (1, "float64"))
]
CASES = chosen(PRODUCT, prefer=lambda case: (case[3] != "float64", case[0]))


@functools.cache
def matrix(nproc: int) -> dict[Case, dict[str, Any]]:
    return launch(worker.matrix, nproc, nproc, [case for case in CASES if case[0] == nproc])


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_equals_the_whole_autoencoder(case: Case) -> None:
    (nproc, name, _, dtype), result = case, matrix(case[0])[case]
    assert result["error"] <= TOLERANCE[dtype]
    assert result["counted"] == result["told"]
    assert result["clean"]
    assert VAES[name].frames is None or result["unclamped"] > 0.1
    assert nproc == 1 or min(result["counted"]) > 0


@pytest.mark.parametrize("nproc", [2, 3, 4])
def test_pipelines_give_the_serial_picture(nproc: int) -> None:
    for name, case in pipelines(nproc).items():
        assert case["error"] <= 1e-10, name
        assert case["counted"] == case["told"], name
        assert case["clean"], name
        assert any(f"decoder over {nproc} ranks" in line for line in case["split"]), name


def test_ranks_that_nobody_takes_share_out_the_batch() -> None:
    assert pipelines(3)["SD"]["degrees"] == {"data": 3}
    assert pipelines(4)["SD"]["degrees"] == {"cfg": 2, "ulysses": 2}
    assert pipelines(4)["SD3"]["degrees"] == {"data": 2, "ulysses": 2}


def test_goes_with_a_loop_of_its_own() -> None:
    error, moved = launch(worker.own_loop, 2)
    assert error <= 1e-10
    assert moved > 0


#: Tiles and what they share: smaller than a rank's rows, larger, and as large as all.
TILES = ((4, 1), (4, 2), (3, 0), (8, None), (11, None), (99, 3))


@pytest.mark.parametrize("nproc", [2, pytest.param(3, marks=pytest.mark.full)])
def test_tiles_are_what_their_definition_says(nproc: int) -> None:
    for key, case in launch(worker.tiled, nproc, nproc, TILES).items():
        assert case["error"] <= 1e-10, key
        assert case["counted"] == case["told"], key
        assert case["kind"] == "approximate"
        tile = int(key.split(",")[0])
        assert case["drift"] > 1e-3 if tile < 11 else case["drift"] <= 1e-10, key


@pytest.mark.parametrize("nproc", [2, pytest.param(4, marks=pytest.mark.full)])
def test_a_rank_holds_its_rows_only(nproc: int) -> None:
    for name, (whole, part) in launch(worker.largest, nproc, nproc).items():
        # The largest map has 64 rows; a rank's has its share of them and one border row on either side.
        assert part <= whole * (64 // nproc + 2) / 64, name


SAID = {
    "few latent rows": "has 1 rows, too few to cut over 2 ranks; use at most 1 ranks or a latent of at least 2 rows",
    "few picture rows": "use at most 1 ranks or a picture of at least 8 rows",
    "few rows for wide convolutions": "whose convolutions reach 2 rows; use at most 1 ranks or a latent of at least 4",
    "few positions": "a rank would hold 2 rows of 2 positions, and linear attention over fewer than 5 positions",
    "half a pair": "34 rows are no multiple of 4",
    "other latents": "ArgumentError: rank 1 was given another input of the decoder than rank 0",
    "other height": "ArgumentError: rank 1 was given another input of the decoder than rank 0",
    "unknown blocks": "HunyuanImageEncoder2D is not known to this splitting into rows; use ParallelVae(tile=32)",
    "tiles of frames": "AutoencoderKLWan remembers earlier frames, which tiles would mix up; leave tile out",
    "two kinds of tiles": "AutoencoderKL makes tiles of its own; call disable_tiling()",
    "uneven tiles": "AutoencoderKL: 33 rows are no multiple of 4",
    "no autoencoder": "SD3Transformer2DModel has no autoencoder to cut; drop ParallelVae",
    "already there": "is under another plan already",
    "unknown blocks in tiles": "accepted",
}


def test_refused_on_all_ranks_alike() -> None:
    told = launch(worker.refusals, 2)
    assert told.keys() == SAID.keys()
    for name, (first, second) in told.items():
        assert first == second, name
        assert SAID[name] in first, name


@pytest.mark.parametrize(
    ("chosen", "ranks", "degrees"),
    [
        ((ParallelVae(),), 4, {"data": 4}),
        ((Ulysses(degree=2), ParallelVae()), 6, {"data": 3, "ulysses": 2}),
        ((CfgParallel(), ParallelVae()), 2, {"cfg": 2}),
        ((DataParallel(), ParallelVae()), 3, {"data": 3}),
    ],
)
def test_the_mesh_has_room_for_all_ranks(chosen: tuple[Strategy, ...], ranks: int, degrees: dict[str, int]) -> None:
    assert {axis: degree for axis, degree in mesh_for(chosen, ranks).items() if degree > 1} == degrees


def test_a_degree_that_was_asked_for_is_kept() -> None:
    with pytest.raises(ArgumentError, match="multiply to 2, but there are 4 ranks"):
        mesh_for((DataParallel(degree=2), ParallelVae()), 4)


def test_knobs() -> None:
    assert (ParallelVae().kind, ParallelVae(tile=8).kind) == ("exact", "approximate")
    assert parse_strategy("parallel-vae:tile=8,overlap=2") == ParallelVae(tile=8, overlap=2)
    for wrong in ("tile=0", "tile=8,overlap=5", "overlap=1", "tile=4,overlap=-1"):
        with pytest.raises(ArgumentError, match="ParallelVae"):
            parse_strategy(f"parallel-vae:{wrong}")


def test_every_known_block_is_one_that_a_tested_autoencoder_has() -> None:
    kinds = {type(module).__name__ for row in VAES.values() for module in row.build().modules()}
    assert kinds >= AUTOENCODER_BLOCKS - UNET_BLOCKS


@pytest.mark.parametrize("name", [*list(LOOPS)[:-1], pytest.param("dual", marks=pytest.mark.full)])
def test_ranks_decode_the_blocks_of_a_video_together(name: str) -> None:
    # All ranks come to a block's decoding at the same point, and the first one alone is given its frames.
    (alone, streamed, at_once), counts = launch(videos, LOOPS[name][2], name)
    np.testing.assert_allclose(streamed, alone, rtol=0, atol=1e-5)
    np.testing.assert_array_equal(at_once, streamed)
    assert counts[0] > 1 and set(counts[1:]) == {0}
