"""Clip parallelism: its keys and the whole model against the definition, on any number of ranks; bytes; refusals."""

from __future__ import annotations

import functools
import itertools
import math
from typing import Any

import pytest
from torch import Tensor

from partsong import ClipParallel, Ulysses, parse_strategy
from partsong.errors import ArgumentError, UnsupportedError
from partsong.parallel import parallelize
from partsong.parallel.clip.keys import ClipLayout, KeySet
from partsong.parallel.ranks.launch import launch
from partsong.parallel.ranks.shards import split_sizes
from tests import covering
from tests.covering import chosen
from tests.parallel import clip_worker
from tests.parallel.clip_models import MAIN, VIDEOS
from tests.parallel.clip_pipelines import PIPES
from tests.parallel.clip_worker import Case, PipeCase
from tests.parallel.families import FAMILIES
from tests.parallel.ranks import error

TOLERANCE = {"float64": 1e-10, "float32": 5e-6}
SETTINGS = list(itertools.product((1, 5, 8, 13), (None, 0, 1, 3, 20), (None, 1, 2, 4, 5)))


def test_every_frame_counts_once() -> None:
    """By itself where it is near; else by the middle one of its block."""
    for frames, window, stride in SETTINGS:
        keys = KeySet(frames, window, stride)
        for query in range(frames):
            near = {frame for frame in range(frames) if window is None or abs(frame - query) <= window}
            counts = {frame: (itself, others) for frame, itself, others in keys.counts(query)}
            assert {frame for frame, (itself, _) in counts.items() if itself} == near
            stood_for: dict[int, int] = {}
            for start in range(0, frames, stride) if stride else ():
                block = list(range(frames))[start : start + (stride or 1)]
                stood_for[block[(len(block) - 1) // 2]] = len(set(block) - near)
            assert {frame: n for frame, (_, n) in counts.items() if n} == {f: n for f, n in stood_for.items() if n}
            weights, seen = keys.log_weights(query), len(near) if stride is None else frames
            assert sum(map(math.exp, weights.values())) == pytest.approx(seen, rel=1e-12)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_ranks_share_the_table_of_the_whole_video(ranks: int) -> None:
    """Each rank has the rows of its frames; what it sees is its own and what the others send."""
    for frames, window, stride in SETTINGS:
        if frames < ranks:
            continue
        keys, emphasis = KeySet(frames, window, stride), (0.5, 0.25)
        layout = ClipLayout(keys, split_sizes(frames, ranks))
        whole = {query: keys.log_weights(query, emphasis) for query in range(frames)}
        for index in range(ranks):
            seen = layout.seen(index)
            assert sorted(sum((layout.sent(peer, index) for peer in range(ranks)), ())) == list(seen)
            assert set(layout.clip(index)) <= set(seen)
            for query, row in zip(layout.clip(index), layout.table(index, emphasis), strict=True):
                assert {f: w for f, w in zip(seen, row, strict=True) if w != -math.inf} == whole[query]
        assert sum(map(layout.num_sent, range(ranks))) == sum(len(layout.seen(i)) for i in range(ranks)) - frames


def test_what_is_far_is_sampled() -> None:
    layout = ClipLayout(KeySet(24, 2, 4), (6, 6, 6, 6))
    assert layout.seen(0) == (0, 1, 2, 3, 4, 5, 6, 7, 9, 13, 17, 21)
    assert layout.sent(2, 0) == (13, 17)
    assert layout.sent(1, 0) == (6, 7, 9)


#: By default one rank and four, more than there are cores, do what differs: no message, and other axes beside clips.
USUAL = {
    1: (("emphasis", "AnimateDiff"), ("everything", "Wan")),
    4: (("CfgParallel x clips", "Mochi"),),
}
#: What the settings send is compared on these, on three ranks.
SENT_LABELS = ("everything", "window 1, stride 3", "window 3, stride 2", "window 2 alone")
SENT = [(3, label, name, "float64") for name in ("AnimateDiff", "Wan") for label in SENT_LABELS]


def is_usual(case: Case) -> bool:
    """Whether the default run takes a case on two ranks.

    It takes all settings on the main models, two of them in both types, and one on each of the others. Models that fold
    their frames are cut by samples and branches as well, one with a ControlNet and one without.
    """
    nproc, label, name, dtype = case
    alone = "everything" if list(VIDEOS).index(name) % 3 == 0 else "window 1, stride 3"
    if nproc != 2 or (dtype == "float32" and label not in ("everything", "window 1, stride 3")):
        return False
    if label in ("CfgParallel", "DataParallel"):
        return dtype == "float64" and name in clip_worker.FOLDED[::2]
    return name in MAIN or (dtype == "float64" and label == alone)


PRODUCT = [
    case
    for nproc in (1, 2, 3, 4)
    for case in clip_worker.product(nproc)
    if covering.FULL or case in SENT or (case[1:3] in USUAL.get(nproc, ()) and case[3] == "float64") or is_usual(case)
]
CASES = sorted({*SENT, *chosen(PRODUCT, prefer=lambda case: (case[3] != "float64", case[0]), beside=SENT)})


@functools.cache
def matrix(nproc: int) -> dict[Case, dict[str, Any]]:
    return launch(clip_worker.matrix, nproc, nproc, [case for case in CASES if case[0] == nproc])


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_equals_the_definition_on_any_number_of_ranks(case: Case) -> None:
    (nproc, label, name, dtype), result = case, matrix(case[0])[case]
    assert distance(result["got"], clip_worker.defined(label, name, dtype)) <= TOLERANCE[dtype]
    drift = distance(result["got"][:1], clip_worker.serial(name, dtype))
    assert (drift > 1e-5) == (clip_worker.knobs_of(label) in clip_worker.WINDOWS.values())
    assert result["same"]
    assert result["told"]
    assert result["clean"]
    assert all(result["sent"]) == (nproc > 1)


def distance(got: list[Tensor], want: list[Tensor]) -> float:
    return max(map(error, got, want))


def test_windows_send_less() -> None:
    for name in ("AnimateDiff", "Wan"):
        sent = {label: sum(matrix(3)[3, label, name, "float64"]["sent"]) for label in SENT_LABELS}
        assert sent["window 1, stride 3"] < sent["window 3, stride 2"] < sent["everything"]
        assert sent["window 2 alone"] < sent["everything"]


PIPE_PRODUCT = [
    case
    for case in itertools.product((2, 4), PIPES, ("everything", "window 1, stride 3"))
    # By default the two settings take turns with two pipelines; tests/pipelines cuts more of them.
    if covering.FULL or case in ((2, "AnimateDiff", "everything"), (2, "UNet3D", "window 1, stride 3"))
]
PIPE_CASES = chosen(PIPE_PRODUCT, prefer=lambda case: case[0])


@functools.cache
def pipelines(nproc: int) -> dict[PipeCase, list[Any]]:
    return launch(clip_worker.pipelines, nproc, nproc, [case for case in PIPE_CASES if case[0] == nproc])


@pytest.mark.parametrize("case", PIPE_CASES, ids=lambda case: "-".join(map(str, case)))
def test_pipelines_give_the_video_of_one_rank(case: PipeCase) -> None:
    rows = pipelines(case[0])[case]
    assert len(rows) == case[0]
    for apart, drift, told, clean in rows:
        assert apart <= 1e-10
        assert (drift <= 1e-10) == (case[2] in clip_worker.EXACT)
        assert told
        assert clean


REFUSED = {
    "too few frames": "1 frames cannot be cut into 2 clips; use at most 1 ranks or 2 frames",
    "too many frames": "13 frames, and its temporal layers have positions for 12; use at most 12 frames",
    "text of samples": "encoder_hidden_states has 2 rows; the 2 x 4 frames of the sample need 8",
    "mask": "attention_mask was given",
    "too few frames of tokens": "1 frames cannot be cut into 2 clips",
    "free noise": "FreeNoise is on",
    "unknown": "MultiheadAttention) is not known to this splitting into clips; use CfgParallel or DataParallel",
    "layers of folded frames": "PatchPipeline on UNetMotionModel: it works on rows of an image, not on tokens",
    "tokens of clips": "does not compose with strategies that cut tokens yet; combine it with CfgParallel",
    "emphasis beside text": "emphasis on frames would drown the text",
    "frames not told": "num_frames was not given, so it is not known which tokens are of which frame",
    "tokens of no frame": "36 tokens are not 4 frames of 2 x 3: there are others among them",
    "causal frames": "only masks of the text's padding, over all frames and the text, can be cut into clips",
    "free noise later": "was replaced since parallelize(), for example by FreeNoise; undo() the plan",
}


@functools.cache
def refused() -> dict[str, str]:
    return launch(clip_worker.refusals, 2, 2)


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name: str) -> None:
    assert refused()[name].startswith("UnsupportedError")
    assert REFUSED[name] in refused()[name]


def test_a_call_that_fails_leaves_nothing_behind() -> None:
    for said, works, clean in launch(clip_worker.interrupted, 2, 2):
        assert said == "RuntimeError: stopped"
        assert works
        assert clean


def test_a_prediction_without_ranks_is_what_ranks_send() -> None:
    nproc = 3 if covering.FULL else 2
    cases = launch(clip_worker.scaled_down, nproc, nproc)
    for name, (told, counted) in cases.items():
        assert told == counted, name
        assert min(told) > 0, name


@pytest.mark.parametrize(
    ("knobs", "told"),
    [
        ({"window": -1}, "window=-1; use an integer of 0 or more, or None"),
        ({"window": 2.5}, "window=2.5"),
        ({"stride": 0}, "stride=0; use a positive integer, or None"),
        ({"stride": True}, "stride=True"),
        ({"local_emphasis": -1}, "local_emphasis=-1"),
        ({"global_emphasis": math.inf}, "global_emphasis=inf"),
        ({"emphasis_from": "late"}, "emphasis_from='late'"),
        ({"degree": 0}, "degree"),
    ],
)
def test_knobs_that_mean_nothing(knobs: dict[str, Any], told: str) -> None:
    with pytest.raises(ArgumentError) as error:
        ClipParallel(**knobs).validate()
    assert told in str(error.value)


def test_a_picture_has_no_clips() -> None:
    """On one rank too: there are no frames to leave out."""
    with pytest.raises(UnsupportedError, match="no frames to cut into clips; use Ulysses"):
        parallelize(FAMILIES["DiT"].build(6), ClipParallel())
    with parallelize(FAMILIES["DiT"].build(6), ClipParallel(window=None)) as plan:
        assert plan.kind == "approximate"


def test_none_can_be_written() -> None:
    assert parse_strategy("clip-parallel:window=none,stride=2") == ClipParallel(window=None, stride=2)
    with pytest.raises(ArgumentError, match="is not a whole number"):
        parse_strategy("clip-parallel:window=wide")
    assert parse_strategy("ulysses:degree=none") == Ulysses()
