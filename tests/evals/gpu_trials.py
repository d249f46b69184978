"""Stages that end in one of the ways stages end."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import torch

from partsong.evals.gpu.compared import distance
from partsong.evals.gpu.findings import Equipment, Finding, Trial, at_most, stated


def right(equipment: Equipment) -> Iterator[Finding]:
    yield at_most("sum", 1.0, 2.0)
    yield stated("device", equipment.device)


def wrong(equipment: Equipment) -> Iterator[Finding]:
    want = torch.ones(5)
    planted = want.clone()
    planted[3] = float("nan")
    yield at_most("planted", distance([planted], [want]), 1e-3)


def endless(equipment: Equipment) -> Iterator[Finding]:
    threading.Event().wait()
    yield stated("never", 0)


def dying(equipment: Equipment) -> Iterator[Finding]:
    yield stated("before it died", 7)
    os._exit(3)


def raising(equipment: Equipment) -> Iterator[Finding]:
    yield stated("before it raised", 7)
    raise ValueError("bad luck")


def unreachable(equipment: Equipment) -> Iterator[Finding]:
    raise AssertionError("nobody has so many GPUs")


HERE = (
    Trial("right", 200, right),
    Trial("endless", 2, endless),
    Trial("dying", 200, dying),
    Trial("raising", 200, raising),
    Trial("two GPUs", 200, unreachable, gpus=2),
    Trial("wrong", 200, wrong),
)
