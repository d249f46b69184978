"""Accelerators of other makers, pretended: which device, library, kernels and memory partsong takes there."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from partsong import accelerator
from partsong.kernels import call, dispatch
from partsong.kernels.backends.triton_attention import precision
from partsong.ledger import Ledger, count
from partsong.parallel.ranks import mesh
from partsong.parallel.ranks.backend import choose, seat_of
from partsong.planner.this_machine import hardware_name


class Module:
    """Stands for torch.xpu or torch.cuda: two devices, each with a generator."""

    def __init__(self, name: str) -> None:
        self.name, self.states = name, {0: torch.tensor([1]), 1: torch.tensor([2])}

    def get_device_name(self, device: torch.device) -> str:
        return self.name

    def get_device_properties(self, device: torch.device) -> Any:
        return SimpleNamespace(total_memory=(device.index + 1) << 34, uuid=f"{self.name}-{device.index}")

    def get_rng_state(self, device: torch.device) -> Tensor:
        return self.states[device.index].clone()

    def set_rng_state(self, state: Tensor, device: torch.device) -> None:
        self.states[device.index] = state.clone()


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Lets this machine have two accelerators of a kind."""

    def has(kind: str, name: str) -> Module:
        module = Module(name)
        monkeypatch.delenv(mesh.DEVICE, raising=False)
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: torch.device(kind))
        monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1 if kind == "mps" else 2)
        monkeypatch.setattr(torch.accelerator, "set_device_index", lambda index: chosen.append(index))
        monkeypatch.setattr(torch, "get_device_module", lambda device=None: module)
        return module

    chosen: list[int] = []
    return has


def test_an_arc_card_takes_its_own_library(pretend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend("xpu", "Intel Arc B580")
    monkeypatch.setenv("LOCAL_RANK", "3")  # four ranks on two cards
    device = mesh._local_device(None, 4)
    assert device == torch.device("xpu", 1)
    monkeypatch.setattr(dist, "is_xccl_available", lambda: True)
    seats = [seat_of(torch.device("xpu", index)) for index in (0, 1)]
    assert choose(seats) == ("xccl", "")
    monkeypatch.setattr(dist, "is_xccl_available", lambda: False)
    assert choose([seat_of(device), seat_of(torch.device("xpu", 0))])[0] == "gloo"


def test_a_mac_computes_one_rank_on_its_gpu_and_several_without(pretend: Any) -> None:
    pretend("mps", "")
    assert mesh._usual_device(1) == "mps"
    assert mesh._local_device(None, 2) == torch.device("cpu")


def test_a_windows_machine_with_a_gpu_but_no_nccl_takes_gloo(pretend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend("cuda", "NVIDIA GeForce RTX 4090")
    monkeypatch.setattr(dist, "is_nccl_available", lambda: False)
    backend, reason = choose([seat_of(torch.device("cuda", index)) for index in (0, 1)])
    assert backend == "gloo"
    assert reason == "torch has no library for messages between cuda devices on rank 0"


def test_machines_are_named_by_their_accelerators(pretend: Any) -> None:
    pretend("xpu", "Intel Arc B580")
    assert accelerator.devices() == [("Intel Arc B580", 1 << 34), ("Intel Arc B580", 2 << 34)]
    assert hardware_name() == "2x-intel-arc-b580"


def test_random_numbers_of_an_accelerator_are_put_back(pretend: Any) -> None:
    module, device = pretend("xpu", "Intel Arc B580"), torch.device("xpu", 1)
    before, host = module.get_rng_state(device), torch.get_rng_state()
    with accelerator.forked_random(device):
        torch.rand(3)
        module.set_rng_state(torch.tensor([7]), device)
    assert torch.equal(module.get_rng_state(device), before)
    assert torch.equal(torch.get_rng_state(), host)
    assert accelerator.random_state(torch.device("cpu")) is None


def test_rocm_tries_flash_first_and_triton_by_name_only(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _names("cuda")[0] == "cudnn"
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert _names("cuda") == ["flash", "efficient", "naive"]
    assert precision(torch.float32) == "ieee"  # its compiler has no products in three parts of TF32
    with dispatch.force_backend("triton"):
        assert _names("cuda") == ["triton"]
    assert _names("xpu") == ["naive"]


def _names(kind: str) -> list[str]:
    """Lists the kernels that a call on a device of this kind tries."""
    asked: Any = SimpleNamespace(mask=None, q=SimpleNamespace(device=torch.device(kind), is_cuda=False))
    return [row.name for row in dispatch._candidates(asked)[0]]


class Event:
    """Stands for an event of a device that is two seconds behind its host."""

    passed = 0.0

    def __init__(self, device: torch.device, enable_timing: bool) -> None:
        self.at = 0.0

    def record(self) -> None:
        Event.passed += 2.0
        self.at = Event.passed

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: Event) -> float:
        return 1e3 * (end.at - self.at)


def test_a_ledger_reads_a_devices_time_two_steps_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "Event", Event)
    file = tmp_path / "ledger.jsonl"

    def lines() -> list[dict[str, Any]]:
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    with Ledger(file) as records:
        for step in range(4):
            clock = accelerator.Stopwatch(torch.device("xpu", 0))
            count(seconds_waiting=clock.stop(), forwards=1)
            records.step()
            assert len(lines()) == max(0, step - 1), "the last two steps wait for the device"
    assert [line["seconds_waiting"] for line in lines()] == [2.0] * 4
    assert records.summary()["seconds_waiting"] == 8.0


def test_a_device_that_failed_is_asked_for_no_times(tmp_path: Path) -> None:
    def gone() -> float:
        raise RuntimeError("unspecified launch failure")

    def fail(file: Path) -> None:
        with Ledger(file) as records:
            count(seconds_waiting=gone, forwards=1)
            records.step()
            count(seconds_waiting=gone)
            raise ValueError("out of memory")

    file = tmp_path / "ledger.jsonl"
    with pytest.raises(ValueError, match="out of memory"):
        fail(file)
    assert [json.loads(line)["forwards"] for line in file.read_text().splitlines()] == [1]


@pytest.mark.parametrize(
    ("device", "hip", "capability", "reason"),
    [
        ("xpu", None, (0, 0), "the tensors are on xpu"),
        ("cuda", "7.0", (9, 4), "it was not tried on ROCm"),
        ("cuda", None, (7, 5), "it needs compute capability 8.0 or newer"),
        ("cuda", None, (8, 6), ""),
    ],
)
def test_triton_computes_on_nvidias_newer_cards(
    monkeypatch: pytest.MonkeyPatch, device: str, hip: str | None, capability: tuple[int, int], reason: str
) -> None:
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(call, "missing_triton", lambda: "")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert call.triton_refusal.__wrapped__(torch.device(device, 0)) == reason
