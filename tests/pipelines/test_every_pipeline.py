"""Every pipeline of diffusers under every strategy gives the serial result on every rank, or is refused at once."""

from __future__ import annotations

import functools
import itertools

import diffusers
import pytest

from partsong.parallel.ranks.launch import launch
from tests import covering
from tests.newer_names import older
from tests.pipelines import worker
from tests.pipelines.cases import CASES, FAMILY, LEFT_OUT
from tests.pipelines.worker import Outcome

#: Heads and blocks of some tiny models are two, so they are shared out over two ranks only.
ON_TWO = ("TensorParallel", "LayerPipeline")
PRODUCT = [
    each
    for each in itertools.product((2, 3), covering.dealt(CASES), worker.STRATEGIES)
    if each[2] not in ON_TWO or each[0] == 2
]

#: What only one case tries: windows of different shape, called one after the other, are no branches of guidance.
ALWAYS = [(2, "LTX2DFRPipeline + tiles", "CfgParallel")]
#: A ControlNet that borrows blocks of its denoiser calls them by itself.
ALWAYS += [(2, "ZImageControlNetPipeline", "ShardedWeights")]
#: A generation in parts, pipelines in a pipeline, and an adapter of more levels than its UNet.
ALWAYS += [(2, "SkyReelsV2DiffusionForcingVideoToVideoPipeline", "Ulysses")]
ALWAYS += [
    (2, "StableCascadeCombinedPipeline", "DataParallel"),
    (2, "StableDiffusionAdapterPipeline + light", "SyncPatch"),
]
#: Models whose layers are cut into columns in ways of their own, or whose attention stays whole.
OWN_COLUMNS = (
    *("AnyFlowFARPipeline", "IFPipeline", "KandinskyV22PriorPipeline", "Krea2Pipeline", "LTX2Pipeline + split rotary"),
    *("LuminaPipeline", "MochiPipeline", "MotifVideoPipeline + cross-attention"),
)
ALWAYS += [(2, name, "TensorParallel") for name in OWN_COLUMNS]
if older():
    ALWAYS = [each for each in ALWAYS if each[1] in CASES]


#: The ways to cut that all others are made of: the batch by branches or samples, tokens by two exchanges, and rows by
#: two. A family takes one of each two. All strategies run with ``--full``.
PLAIN = (("CfgParallel", "DataParallel"), ("Ulysses", "Ring"), ("SyncPatch", "DisplacedPatch"))


def _few() -> list[tuple[int, str, str]]:
    """Every way to cut on every family; of three in seven one on its last pipeline, some on three ranks."""
    cases: dict[str, list[str]] = {}
    for name, family in FAMILY.items():
        cases.setdefault(family, []).append(name)
    taken = list(ALWAYS)
    for turn, names in enumerate(cases.values()):
        for way, strategies in enumerate(PLAIN):
            # The last ones of a family have more put on them: adapters, ControlNets, several samples.
            is_last = turn % 7 == 2 * way
            nproc = 3 if is_last and turn // len(PLAIN) % 4 else 2
            taken.append((nproc, names[-1 if is_last else 0], strategies[(turn + way) % 2]))
    return list(dict.fromkeys(taken))


TRIED = PRODUCT if covering.FULL else _few()
#: Cases that share a launch: more would come near the time limit of a test.
TOGETHER = 15


@functools.cache
def _launched(nproc: int, chunk: int) -> dict[worker.Pair, list[Outcome]]:
    names = list(dict.fromkeys(name for n, name, _ in TRIED if n == nproc))[chunk * TOGETHER :][:TOGETHER]
    return launch(worker.outcomes, nproc, nproc, [(name, s) for n, name, s in TRIED if n == nproc and name in names])


def outcomes(nproc: int, name: str) -> dict[worker.Pair, list[Outcome]]:
    names = list(dict.fromkeys(case for n, case, _ in TRIED if n == nproc))
    return _launched(nproc, names.index(name) // TOGETHER)


def test_every_pipeline_has_a_case_or_a_reason() -> None:
    public = {name for name in dir(diffusers) if name.endswith("Pipeline")}
    tried = {case.pipeline for case in CASES.values()}
    assert not tried & LEFT_OUT.keys()
    assert public == tried | LEFT_OUT.keys()


@pytest.mark.parametrize(("nproc", "name", "strategy"), TRIED)
@pytest.mark.slow
def test_is_right_or_refused_at_once(nproc: int, name: str, strategy: str) -> None:
    case, rows = CASES[name], outcomes(nproc, name)[name, strategy]
    assert len(rows) == nproc
    rounds = strategy == "TensorParallel" and name.startswith(worker.SINGLE)
    for row in rows:
        assert row.kind in ("ran", "refused"), row.text
        assert (row.kind == "refused") == (row.expected is not None), row.text
        assert row.expected is None or row.expected in row.text
        assert row.error <= max(case.tolerance, worker.ROUNDED if rounds else 0.0)
        assert row.sent == row.predicted


@pytest.mark.parametrize(("nproc", "name"), dict.fromkeys((nproc, name) for nproc, name, _ in TRIED))
def test_is_itself_again_afterwards(nproc: int, name: str) -> None:
    for row in outcomes(nproc, name)[name, "alone"]:
        assert row.kind == "ran", row.text
        assert row.error == 0
