"""The stages `nccl` and `meshes`: that NCCL starts and ends here, and that a mesh ends soon after an error."""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch
import torch.distributed as dist

from partsong.errors import PartsongError
from partsong.evals.gpu.findings import Equipment, Finding, at_most, holds, stated
from partsong.parallel import Mesh, launch
from partsong.parallel.ranks.collectives import agree

__all__ = ["meshes", "nccl"]

#: Seconds within which a mesh has to be gone after an error.
GONE = 10.0
#: What ranks send each other.
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.uint8, torch.int64, torch.bool,
          torch.float8_e4m3fn)  # fmt: skip


def nccl(equipment: Equipment) -> Iterator[Finding]:
    """Starts NCCL with one rank, sends itself tensors of every type, and aborts it as a mesh does after an error."""
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    start = time.monotonic()
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=device)
    dist.all_reduce(torch.ones(1, device=device))
    torch.cuda.synchronize()
    yield stated("seconds until the first message has arrived", round(time.monotonic() - start, 2))
    for dtype in DTYPES:
        sent = torch.arange(1000, device=device).remainder(2).float().to(dtype)
        got = torch.zeros_like(sent)
        for work in dist.batch_isend_irecv([dist.P2POp(dist.irecv, got, 0), dist.P2POp(dist.isend, sent, 0)]):
            work.wait()
        same = torch.equal(sent.view(torch.uint8), got.view(torch.uint8))
        yield holds(f"{dtype} arrives", same, "the same" if same else "other bits", "the same")
    start = time.monotonic()
    dist.distributed_c10d._abort_process_group()
    yield at_most("seconds to abort", round(time.monotonic() - start, 2), GONE)


def meshes(equipment: Equipment) -> Iterator[Finding]:
    """Opens and closes meshes in one process after the other, and lets a rank fail inside of one."""
    yield stated("messages go by", launch(_open_and_close, 2, equipment.device))
    start, text = time.monotonic(), "no error"
    launch(_nothing, 2)  # what starting ranks takes
    starting = time.monotonic() - start
    start = time.monotonic()
    try:
        launch(_fail_inside, 2, equipment.device)
    except PartsongError as error:
        text = str(error)
    seconds = time.monotonic() - start - starting
    yield holds("an error inside of a mesh is reported", "inside of a mesh" in text, text, "inside of a mesh")
    yield at_most("seconds until all ranks are gone", round(max(0.0, seconds), 1), GONE)


def _nothing() -> None:
    return None


def _open_and_close(device: str) -> str:
    for turn in range(3):
        with Mesh(ulysses=2, device=device) as mesh:
            table = agree(mesh.axis("ulysses"), [float(mesh.rank), float(turn)])
            backend = dist.get_backend()
            assert table == [[0.0, turn], [1.0, turn]], table
    return backend


def _fail_inside(device: str) -> None:
    with Mesh(ulysses=2, device=device) as mesh:
        axis = mesh.axis("ulysses")
        agree(axis, [0.0])
        if mesh.rank == 1:
            raise ValueError("bad luck inside of a mesh")
        agree(axis, [1.0])  # nobody answers
        torch.zeros(1, device=mesh.device).item()
