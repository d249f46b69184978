"""Under a plan a model is saved whole and cast, or refuses it in one line; nothing runs whole on every rank unsaid."""

from __future__ import annotations

from partsong.parallel.ranks.launch import launch
from tests.parallel import kept_objects_worker as worker

#: What is refused under every plan, and only where ranks have parts of the weights, with words of the reason.
COPIES = {"deepcopy": "cannot be copied", "deepcopy of a layer": "cannot be copied", "pickle": "cannot be copied"}
PARTS = "has only this rank's part of its weights"
SAVING = dict.fromkeys(
    ("state_dict", "state_dict of a layer", "state_dict of a part", "save_pretrained"), "each rank has a share"
)
REFUSED: dict[str, dict[str, str]] = {
    "TensorParallel": {**COPIES, "load_state_dict": PARTS},
    "ShardedWeights": {**COPIES, "load_state_dict": PARTS, **SAVING},
    "OffloadWeights": {**COPIES, "load_state_dict": "has its blocks' weights in the host's memory"},
    "Ulysses": COPIES,
}


def test_each_act_is_done_whole_or_refused() -> None:
    for plan, ranks in launch(worker.acts, 2, 2).items():
        for rank in ranks:
            for act in rank.keys() & worker.ACTS.keys():
                assert REFUSED[plan].get(act, "as it was") in rank[act], (plan, act)
                assert "\n" not in rank[act]
            assert rank["under"] <= 1e-10
            assert max(rank["cast"], rank["undone"]) <= 1e-5


def test_a_hook_that_sees_a_part_is_named_once() -> None:
    for none, *said in launch(worker.own_hooks, 2, 2):
        assert none == "0"
        assert len(said) == 1
        assert "keep_tokens on transformer_blocks.1" in said[0]


def test_what_would_run_whole_on_every_rank_is_refused() -> None:
    for said in launch(worker.replaced, 2, 2):
        assert "the transformer of this StableDiffusion3Pipeline was replaced" in said["replaced"]
        assert not said["back"]
        assert "cannot be copied" in said["deepcopy"]
        assert "this plan was undone" in said["entered"]
        assert "this plan was undone" in said["generate"]
        assert not said["copied"]
