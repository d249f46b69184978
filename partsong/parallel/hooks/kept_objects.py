"""Keeps a user's object whole under a plan: its weights are saved as they were, and copies of hooks are refused."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from partsong.errors import UnsupportedError

__all__ = ["allow_copies", "keep_whole", "refuse_copies", "refuse_loads"]

#: What `copy`, pickle and `torch.save` look for on an object.
_COPYING = ("__deepcopy__", "__reduce_ex__")


def refuse_copies(owner: Any) -> None:
    """Refuses copies and pickles of an object, as the copy would hold hooks that work for the original."""

    def refuse(*_: Any) -> Any:
        raise UnsupportedError(
            f"this {type(owner).__name__} is under a plan, whose hooks cannot be copied or pickled; call undo() first, "
            "and parallelize() the copy"
        )

    vars(owner).update(dict.fromkeys(_COPYING, refuse))


def allow_copies(owner: Any) -> None:
    """Takes back what `refuse_copies` did."""
    for name in _COPYING:
        vars(owner).pop(name, None)


def refuse_loads(module: nn.Module, holds: str = "only this rank's part of its weights") -> Any:
    """Refuses `load_state_dict` on a module that does not hold its weights; returns what takes this back.

    Args:
        module: the module.
        holds: what it has instead, for the error.
    """

    def refuse(*_: Any) -> Any:
        raise UnsupportedError(
            f"this {type(module).__name__} has {holds}; load weights before parallelize(), or call undo() on every "
            "rank first"
        )

    return module.register_load_state_dict_pre_hook(refuse)


def keep_whole(module: nn.Module, name: str, whole: nn.Parameter) -> tuple[Any, Any]:
    """Lets a module save a whole weight in place of the part that a plan has left in it.

    Args:
        module: has a part of the weight from now on.
        name: of the weight.
        whole: the weight as it was.

    Returns:
        What takes this back.
    """

    def save(part: nn.Module, state: dict[str, Tensor], prefix: str, metadata: Any) -> None:
        if (held := state.get(prefix + name)) is None:
            return
        if whole.is_meta:
            raise UnsupportedError(
                f"this rank has read only its part of {prefix}{name}; call undo() on every rank before you save"
            )
        state[prefix + name] = whole.data.to(held.dtype) if type(whole.data) is Tensor else whole.data

    return module.register_state_dict_post_hook(save), refuse_loads(module)
