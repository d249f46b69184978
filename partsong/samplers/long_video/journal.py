"""Keeps a long video's progress on disk: a run killed at any point can be continued and yields the same frames.

A journal is a folder. ``run.json`` says which video it is. ``block-000007.safetensors`` holds the latents of a block
that is done. A *cut* is everything later blocks need: ``cut-000012-latents.safetensors`` from the first rank, and
``cut-000012-keys-1-of-2.safetensors`` from every rank, by layer, so that any number of ranks can read it. Every file
appears complete or not at all; a cut counts once all its files exist.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from partsong.errors import ArgumentError, OutputError
from partsong.outputs import write_json

if TYPE_CHECKING:
    from partsong.parallel import Strategy
    from partsong.samplers.long_video.video_blocks import VideoBlocks

__all__ = ["Folder", "VideoJournal", "open_journal", "parts_of", "write_cut"]

#: The path of a folder.
Folder = str | os.PathLike[str]
#: Latents of a block, and tensors and plain values that its scheduler remembers.
Progress = tuple[Tensor, dict[str, Tensor], dict[str, Any]]
_KEYS = re.compile(r"cut-(\d+)-keys-(\d+)-of-(\d+)\.safetensors")


class VideoJournal:
    """Reads and writes the folder of one run.

    Args:
        path: the folder; created where it is missing.
        run: plain values that determine the video: equal for a run and for the one that resumes it.
        index: of this rank.
        size: number of ranks.

    Raises:
        ArgumentError: the folder holds another video, or other files.
        OutputError: it cannot be written.
    """

    def __init__(self, path: Folder, run: Mapping[str, Any], index: int, size: int) -> None:
        self.path, self.index, self.size = Path(path), index, size
        asked = json.loads(json.dumps(dict(run), sort_keys=True))
        file = self.path / "run.json"
        if file.is_file():
            try:
                held = json.loads(file.read_text(encoding="utf-8"))
            except (OSError, ValueError) as error:
                raise ArgumentError(f"{file} cannot be read: {error}") from error
            names = sorted(name for name in {*held, *asked} if held.get(name) != asked.get(name))
            if names:
                changes = ", ".join(f"{name}={held.get(name)!r} there, {asked.get(name)!r} asked" for name in names)
                raise ArgumentError(f"{self.path} is the journal of another video ({changes}); give another folder")
        elif self.path.is_dir() and any(self.path.glob("*.safetensors")):
            raise ArgumentError(f"{self.path} holds files but no run.json; give a new folder, or a journal")
        elif index == 0:
            try:
                write_json(file, asked)
            except OSError as error:
                raise OutputError(f"{file} cannot be written: {error.strerror or error}") from error

    def block(self, number: int) -> Tensor:
        """Returns the latents of a block that is done.

        Raises:
            ArgumentError: they are not there.
        """
        tensors = self._read(f"block-{number:06d}")
        if tensors is None:
            raise ArgumentError(f"{self.path} lacks block-{number:06d}.safetensors of a block that was done")
        return tensors["latents"]

    def write_block(self, number: int, latents: Tensor) -> None:
        """Keeps the latents of a block that is done."""
        self._write(f"block-{number:06d}", {"latents": latents})

    def newest_cut(self) -> int | None:
        """Returns the number of the last cut that is complete; None where there is none."""
        ranks: dict[tuple[int, int], set[int]] = {}
        for file in self.path.glob("cut-*-keys-*.safetensors"):
            if match := _KEYS.fullmatch(file.name):
                number, index, size = map(int, match.groups())
                ranks.setdefault((number, size), set()).add(index)
        whole = [n for (n, size), have in ranks.items() if len(have) == size and self._file(f"{_cut(n)}-latents")]
        return max(whole, default=None)

    def write_keys(self, cut: int, tensors: Mapping[str, Tensor]) -> None:
        """Keeps this rank's part of a cut, and drops its parts of cuts that are no longer needed."""
        self._write(f"{_cut(cut)}-keys-{self.index}-of-{self.size}", tensors)
        self._drop_old(f"cut-*-keys-{self.index}-of-*.safetensors")

    def write_latents(self, cut: int, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
        """Keeps the first rank's part of a cut: tensors, and plain values beside them."""
        self._write(f"{_cut(cut)}-latents", tensors, {"values": json.dumps(dict(values))})
        self._drop_old("cut-*-latents.safetensors")

    def _drop_old(self, pattern: str) -> None:
        newest = self.newest_cut()
        for file in self.path.glob(pattern):
            if newest is not None and int(file.name.split("-")[1]) < newest:
                file.unlink(missing_ok=True)

    def keys(self, cut: int) -> dict[str, Tensor]:
        """Returns the keys of a cut, of all ranks that wrote it."""
        keys: dict[str, Tensor] = {}
        for file in self.path.glob(f"{_cut(cut)}-keys-*.safetensors"):
            keys |= self._read(file.stem) or {}
        return keys

    def latents(self, cut: int) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Returns the first rank's part of a cut."""
        name = f"{_cut(cut)}-latents"
        with safe_open(self.path / f"{name}.safetensors", "pt") as file:
            values = json.loads((file.metadata() or {})["values"])
        return self._read(name) or {}, values

    def _file(self, name: str) -> bool:
        return (self.path / f"{name}.safetensors").is_file()

    def _read(self, name: str) -> dict[str, Tensor] | None:
        if not self._file(name):
            return None
        try:
            with safe_open(self.path / f"{name}.safetensors", "pt") as file:
                return {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - it is no dictionary
        except (OSError, SafetensorError) as error:
            raise ArgumentError(f"{self.path / name}.safetensors cannot be read: {error}") from error

    def _write(self, name: str, tensors: Mapping[str, Tensor], metadata: dict[str, str] | None = None) -> None:
        plain = {key: tensor.detach().cpu().contiguous().clone() for key, tensor in tensors.items()}
        temporary = None
        try:
            descriptor, temporary = tempfile.mkstemp(dir=self.path, prefix=".partsong-")
            os.close(descriptor)
            save_file(plain, temporary, metadata)
            os.replace(temporary, self.path / f"{name}.safetensors")
        except (OSError, SafetensorError) as error:
            if temporary is not None:
                Path(temporary).unlink(missing_ok=True)
            raise OutputError(
                f"{self.path / name}.safetensors cannot be written: {getattr(error, 'strerror', None) or error}; is "
                "the disk full? The run can be resumed from what was written before"
            ) from error


def open_journal(path: Folder | None, blocks: VideoBlocks, strategy: Strategy) -> VideoJournal | None:
    """Opens the journal of a run; None where no folder is given.

    Args:
        path: the folder, or None.
        blocks: the video's blocks; their model, the call's arguments and the seeds determine the video.
        strategy: its knobs determine the video too, except the number of ranks.
    """
    if path is None:
        return None
    plan, shares = blocks.plan, ("degree", "pipe_degree", "layers")
    knobs = {name: value for name, value in asdict(strategy).items() if name not in shares}
    run = {
        "strategy": f"{type(strategy).__name__}({knobs})",
        "pipeline": type(plan.target).__name__,
        "model": _digest(_settings(plan.denoisers[0].module).encode()),
        "scheduler": _settings(plan.target.scheduler),
        "sizes": list(blocks.sizes),
        "seeds": list(blocks.drawn),
        **({"prompts": {str(block): text for block, text in blocks.prompts.items()}} if blocks.prompts else {}),
        **{f"argument {name}": _plain(value) for name, value in blocks.arguments.items() if name != "generator"},
    }
    axis = plan.mesh.axis(*strategy.axes)
    return VideoJournal(path, run, axis.index, axis.size)


def write_cut(journal: VideoJournal, cut: int, blocks: Mapping[int, Progress]) -> None:
    """Writes the first rank's part of a cut: for each block its latents, and the state of its scheduler."""
    tensors: dict[str, Tensor] = {}
    values: dict[str, Any] = {}
    for block, (latents, held, plain) in blocks.items():
        tensors[f"{block}/latents"] = latents
        tensors |= {f"{block}/{name}": tensor for name, tensor in held.items()}
        values |= {f"{block}/{name}": value for name, value in plain.items()}
    journal.write_latents(cut, tensors, values)


def parts_of(block: int, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> Progress:
    """Returns latents and scheduler state of one block from a cut."""
    start = f"{block}/"
    held = {name.removeprefix(start): tensor for name, tensor in tensors.items() if name.startswith(start)}
    plain = {name.removeprefix(start): value for name, value in values.items() if name.startswith(start)}
    return held.pop("latents"), held, plain


def _plain(value: Any) -> Any:
    """Returns an argument in a form that JSON can hold: tensors by a digest of their values."""
    if isinstance(value, Tensor):
        return _digest(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value if value is None or isinstance(value, (bool, int, float, str)) else type(value).__name__


def _settings(part: Any) -> str:
    return repr(sorted((name, repr(value)) for name, value in part.config.items() if not name.startswith("_")))


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=12).hexdigest()


def _cut(number: int) -> str:
    return f"cut-{number:06d}"
