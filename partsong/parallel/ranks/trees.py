"""Sends the first rank's nested tensors to every rank."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten, treespec_dumps, treespec_loads

from partsong.errors import ArgumentError, UnsupportedError
from partsong.parallel.ranks.collectives import broadcast
from partsong.parallel.ranks.mesh import Axis

__all__ = ["broadcast_error", "broadcast_tree"]

#: What may stand beside tensors.
_PLAIN = (bool, int, float, str, type(None))


def broadcast_tree(axis: Axis, tree: Any, device: torch.device, *, name: str) -> tuple[Any, int]:
    """Returns the first rank's tree of tensors, numbers and words on every rank.

    Args:
        axis: the ranks taking part.
        tree: on the first rank lists, tuples and dictionaries of tensors and plain values; elsewhere anything.
        device: where the tensors arrive.
        name: what errors call it.

    Returns:
        The tree, and the bytes that the first rank has sent.

    Raises:
        UnsupportedError: on the first rank, the tree holds something else.
        ArgumentError: on the others in that case, or if the first rank called `broadcast_error` instead.
    """
    content, leaves = None, []
    if axis.index == 0:
        leaves, spec = tree_flatten(tree)
        try:
            content = {"spec": treespec_dumps(spec), "leaves": [_description(leaf, name) for leaf in leaves]}
        except Exception as error:
            broadcast_error(axis, error, device, name=name)
            raise
    content, sent = _broadcast_json(axis, content, device, name)
    if "error" in content:
        raise ArgumentError(f"{name}: the first rank failed: {content['error']}")
    arrived: list[Any] = []
    for place, about in enumerate(content["leaves"]):
        if "value" in about:
            arrived.append(about["value"])
            continue
        kind = getattr(torch, about["dtype"])
        own = leaves[place] if axis.index == 0 else torch.empty(about["shape"], dtype=kind, device=device)
        arrived.append(broadcast(axis, own, name=name))
        sent += own.nbytes * (axis.size - 1)
    return tree_unflatten(arrived, treespec_loads(content["spec"])) if axis.index else tree, sent


def broadcast_error(axis: Axis, error: BaseException, device: torch.device, *, name: str) -> None:
    """Makes the `broadcast_tree` of the other ranks raise an error instead; only the first rank calls it."""
    _broadcast_json(axis, {"error": f"{type(error).__name__}: {error}"}, device, name)


def _description(leaf: Any, name: str) -> dict[str, Any]:
    if isinstance(leaf, Tensor):
        return {"dtype": str(leaf.dtype).removeprefix("torch."), "shape": list(leaf.shape)}
    if isinstance(leaf, _PLAIN):
        return {"value": leaf}
    raise UnsupportedError(f"{name}: tensors, numbers and words can be sent, not a {type(leaf).__name__}")


def _broadcast_json(axis: Axis, value: Any, device: torch.device, name: str) -> tuple[Any, int]:
    """Returns the first rank's value on every rank, and the bytes it has sent."""
    text: Sequence[int] = json.dumps(value).encode() if axis.index == 0 else b""
    length = broadcast(axis, torch.tensor([len(text)], device=device), name=name)
    # The others allocate as many bytes as there are; JSON is never empty.
    data = torch.tensor(list(text), dtype=torch.uint8, device=device) if axis.index == 0 else None
    data = torch.empty(int(length), dtype=torch.uint8, device=device) if data is None else data
    broadcast(axis, data, name=name)
    return json.loads(bytes(data.tolist())), (length.nbytes + data.nbytes) * (axis.size - 1)
