"""A long video that was killed goes on from its journal, on any number of ranks, and is the same to the last bit."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch

from partsong import DualParallel, Ulysses
from partsong.errors import ArgumentError, DistributedError, OutputError, UnsupportedError
from partsong.parallel import parallelize
from partsong.parallel.ranks.launch import launch
from partsong.samplers import generate, stream
from partsong.samplers.long_video.journal import VideoJournal
from tests.parallel import dual_worker, resume_worker


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [
        ("dual", 2, 1),
        pytest.param("rarely", 1, 3, marks=pytest.mark.full),
        pytest.param("timestep", 2, 2, marks=pytest.mark.full),
        pytest.param("timestep", 3, 1, marks=pytest.mark.full),
    ],
)
def test_a_killed_run_goes_on(name: str, before: int, after: int, tmp_path: Path) -> None:
    whole, calls = launch(resume_worker.video, before, name, None)
    # In a queue all ranks make as many calls. In a chain of steps they do not: the first rank, whose calls are known,
    # stands at its end, so blocks are done when it dies.
    rank = 0 if name == "timestep" else random.Random(f"{name}{before}{after}").randrange(before)
    call = int(calls * 0.7)
    with pytest.raises(DistributedError):
        launch(resume_worker.video, before, name, tmp_path / "j", (rank, call))
    resumed, again = launch(resume_worker.video, after, name, tmp_path / "j")
    assert torch.equal(resumed, whole)
    # Blocks that were done are not computed again. Six blocks make four steps each, which the ranks share.
    assert again < (calls if name != "timestep" else 24 // after)
    finished, none = launch(resume_worker.video, after, name, tmp_path / "j")
    assert torch.equal(finished, whole)
    assert none < again


def test_a_journal_of_another_video_is_refused(tmp_path: Path) -> None:
    with parallelize(dual_worker.pipeline(), DualParallel(block_frames=2, context=1)) as plan:
        list(stream(plan, journal=tmp_path / "j", **dual_worker.call(13)))
        with pytest.raises(ArgumentError, match="journal of another video .*seeds"):
            generate(plan, journal=tmp_path / "j", **dual_worker.call(13, generator=torch.Generator().manual_seed(6)))
        with pytest.raises(ArgumentError, match=r"guidance_scale=3.0 there, 1.0 asked"):
            generate(plan, journal=tmp_path / "j", **dual_worker.call(13, guided=False))
        (tmp_path / "other").mkdir()
        (tmp_path / "other" / "a.safetensors").touch()
        with pytest.raises(ArgumentError, match=r"holds files but no run\.json"):
            generate(plan, journal=tmp_path / "other", **dual_worker.call(13))
    with (
        parallelize(dual_worker.pipeline(), Ulysses()) as plan,
        pytest.raises(UnsupportedError, match="keep a journal"),
    ):
        generate(plan, journal=tmp_path / "k", **dual_worker.call(13))


def test_a_cut_counts_when_all_its_files_are_there(tmp_path: Path) -> None:
    first, second = (VideoJournal(tmp_path, {"a": 1}, index, 2) for index in range(2))
    assert json.loads((tmp_path / "run.json").read_text()) == {"a": 1}
    x = torch.arange(6.0).view(2, 3)
    first.write_keys(3, {"x": x})
    first.write_latents(3, {"y": x.to(torch.bfloat16)}, {"z": [1, None]})
    assert first.newest_cut() is None
    second.write_keys(3, {"w": x.T})
    assert second.newest_cut() == 3
    assert torch.equal(second.keys(3)["w"], x.T)
    assert first.keys(3).keys() == {"x", "w"}
    tensors, values = second.latents(3)
    assert tensors["y"].dtype == torch.bfloat16
    assert values == {"z": [1, None]}
    for journal in (first, second):
        journal.write_keys(5, {})
    assert first.newest_cut() == 3
    first.write_latents(5, {}, {})
    assert first.newest_cut() == 5
    second.write_keys(6, {})
    assert sorted(path.name for path in tmp_path.glob("cut-*keys-1*")) == [
        "cut-000005-keys-1-of-2.safetensors",
        "cut-000006-keys-1-of-2.safetensors",
    ]


def test_a_journal_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    journal = VideoJournal(tmp_path / "j", {"a": 1}, 0, 1)
    (tmp_path / "j" / "run.json").unlink()
    (tmp_path / "j").rmdir()
    with pytest.raises(OutputError, match=r"block-000000\.safetensors cannot be written"):
        journal.write_block(0, torch.zeros(2))
