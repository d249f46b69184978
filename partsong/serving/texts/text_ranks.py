"""Serves a model that decides tokens in any order from several ranks, of which the first one talks to the server."""

from __future__ import annotations

import logging
import socket
import tempfile
import threading
from pathlib import Path
from typing import Any

from partsong.errors import ArgumentError, PartsongError
from partsong.parallel.ranks.launch import launch
from partsong.serving.texts.wire import TextSpec

__all__ = ["serve_over_ranks"]

_LOG = logging.getLogger(__name__)
#: Seconds that a rank waits for another one in an exchange.
_TIMEOUT = 600.0


def serve_over_ranks(spec: TextSpec, end: socket.socket) -> None:
    """Starts the ranks and hands the wire over to the first one; returns when they have ended.

    Args:
        spec: what they serve.
        end: this end of the wire to the server.

    Raises:
        ArgumentError: this system cannot hand a socket to another process.
    """
    if not hasattr(socket, "AF_UNIX"):
        raise ArgumentError("several ranks need Unix sockets, which this system does not have; leave --text-nproc out")
    with tempfile.TemporaryDirectory(prefix="partsong-") as folder, socket.socket(socket.AF_UNIX) as listener:
        path = str(Path(folder, "wire"))
        listener.bind(path)
        listener.listen(1)
        threading.Thread(target=_hand_over, args=(listener, end), daemon=True).start()
        try:
            launch(_serve_rank, spec.nproc, spec, path)
        except PartsongError:  # the server has heard why, or sees that nobody answers any more
            _LOG.exception("the ranks of %s ended", spec.name)


def _hand_over(listener: socket.socket, end: socket.socket) -> None:
    first, _ = listener.accept()
    with first, end:
        socket.send_fds(first, [b"w"], [end.fileno()])


def _serve_rank(spec: TextSpec, path: str) -> None:
    """Answers the server on the first rank; takes the same steps on the others."""
    from partsong.jobs.folder_source import find_text_model
    from partsong.parallel import Mesh, mesh_for
    from partsong.samplers.registry import parse_strategy
    from partsong.samplers.text import decode_steps
    from partsong.serving.texts.answering import serve_opened
    from partsong.serving.texts.diffusion import DiffusionTexts
    from partsong.serving.texts.rank_turns import RankTurns

    strategies = (parse_strategy(spec.share or "tensor-parallel"),)
    with Mesh(**mesh_for(strategies, spec.nproc), device=spec.device, timeout=_TIMEOUT) as mesh:
        turns, opened = RankTurns(mesh), list[DiffusionTexts]()

        def open_model() -> DiffusionTexts:
            texts = DiffusionTexts(find_text_model(spec.model, spec.adapter), spec, strategies, mesh, turns)
            opened.append(texts)
            return texts

        if mesh.is_main:
            serve_opened(_taken_over(path), open_model)
            for texts in opened:
                texts.close()
        else:
            model: Any = open_model().model
            turns.follow(lambda begins: decode_steps(model, [begins[0]], **begins[1]))


def _taken_over(path: str) -> socket.socket:
    with socket.socket(socket.AF_UNIX) as line:
        line.connect(path)
        _, descriptors, _, _ = socket.recv_fds(line, 1, 1)
    return socket.socket(fileno=descriptors[0])
