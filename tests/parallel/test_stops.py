"""After a failed call ranks go on with the same mesh only if all of them stopped at the same exchange."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from partsong.parallel import Mesh
from partsong.parallel.ranks.launch import launch
from tests.parallel import fault_worker


def test_ranks_that_stopped_alike_go_on() -> None:
    assert launch(fault_worker.go_on_after_a_failure, 2, False) == "[1.0, 1.0]"


def test_a_rank_that_stopped_elsewhere_is_named() -> None:
    said = launch(fault_worker.go_on_after_a_failure, 2, True)
    assert said.startswith("a call failed on rank 0, and not all ranks of axis ring stopped at the same point")


def test_a_timeout_reaches_every_group() -> None:
    assert launch(fault_worker.limits, 4, 7.0) == [7.0, 7.0, 7.0]


@pytest.mark.parametrize(("backend", "ended"), [("gloo", "destroyed"), ("nccl", "aborted")])
def test_an_error_drops_messages_where_waiting_for_them_would_hide_it(
    monkeypatch: pytest.MonkeyPatch, backend: str, ended: str
) -> None:
    seen: list[str] = []
    mesh = Mesh()
    mesh._owns_group = True
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_backend", lambda: backend)
    monkeypatch.setattr(dist, "destroy_process_group", lambda: seen.append("destroyed"))
    monkeypatch.setattr(dist.distributed_c10d, "_abort_process_group", lambda: seen.append("aborted"))
    with pytest.raises(ValueError, match="out of memory"), mesh:
        raise ValueError("out of memory")
    assert seen == [ended]
