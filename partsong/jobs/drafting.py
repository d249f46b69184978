"""Prepares a job of ``partsong text`` whose drafts come from a rank of their own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from partsong.errors import ArgumentError
from partsong.jobs.folder_source import find_text_model
from partsong.jobs.texts import LoadedText, TextJob, prepare_text
from partsong.kernels.speculation.drafter import DrafterKnobs
from partsong.parallel import Mesh
from partsong.parallel.ranks.launch import portable
from partsong.parallel.ranks.objects import share_object
from partsong.reasoning.local.speculation.draft_server import serve_drafts
from partsong.reasoning.local.speculation.saguaro import Saguaro

__all__ = ["check_drafting_rank", "drafter_apart", "prepare_with_drafts"]


def drafter_apart(drafters: Sequence[DrafterKnobs]) -> Saguaro | None:
    """Returns the drafter that has a rank of its own; None where there is none."""
    return next((each for each in drafters if isinstance(each, Saguaro)), None)


def check_drafting_rank(drafters: Sequence[DrafterKnobs], nproc: int, strategies: Sequence[str]) -> None:
    """Checks what a drafter on a rank of its own needs, before there are ranks.

    Raises:
        ArgumentError: there are several, other ranks than two, a strategy, or no such second model.
        UnsupportedError: the family of the second model is not recognised.
    """
    several = [each for each in drafters if isinstance(each, Saguaro)]
    if not several:
        return
    if len(several) > 1:
        raise ArgumentError(f"--speculate saguaro was given {len(several)} times, and one rank drafts; give it once")
    if nproc != 2:
        raise ArgumentError(
            f"--speculate saguaro drafts on the second of two ranks, and there are {nproc}; give --nproc 2"
        )
    if strategies:
        raise ArgumentError(
            f"--strategy {' '.join(strategies)} shares the model out, and with --speculate saguaro the first rank has "
            "all of it; leave one of them out"
        )
    find_text_model(str(several[0].model))


def prepare_with_drafts(job: TextJob, mesh: Mesh) -> LoadedText | None:
    """Loads the job on the first rank, and lets the second one draft until the first is done.

    Args:
        job: with a `Saguaro` among its drafters.
        mesh: two ranks along ``pipe``.

    Returns:
        On the first rank what `prepare_text` returns; None on the second, once the texts are there.

    Raises:
        PartsongError: as `prepare_text`, on both ranks.
    """
    drafter = drafter_apart(job.speculate)
    assert drafter is not None, "others need no rank"
    here = replace(drafter, mesh=mesh)
    loaded, refused = None, None
    if mesh.is_main:
        own = replace(job, threads=job.threads or 1, device=job.device or str(mesh.device))
        try:
            loaded = prepare_text(own, drafters=tuple(here if each is drafter else each for each in job.speculate))
        except Exception as error:  # noqa: BLE001 - the other rank waits for whatever comes
            refused = portable(error)
    refused = share_object(mesh.on_host("pipe"), refused, name="what the model is refused with")
    if refused is not None:
        raise refused
    if not mesh.is_main:
        torch.set_num_threads(job.threads or 1)
        for _ in range(1 + job.compare):  # which begins with a text to warm up
            serve_drafts(here)
    return loaded
