"""Keeps a user's object whole under a plan: its weights are saved as they were, and copies of hooks are refused."""

from __future__ import annotations

from typing import Any, NoReturn

from torch import Tensor, nn

from partsong.errors import UnsupportedError

__all__ = ["allow_copies", "keep_whole", "refuse_copies", "refuse_loads"]

#: What `copy.deepcopy`, pickle and `torch.save` look for on an object.
_COPYING = ("__deepcopy__", "__reduce_ex__")


class _Original:
    """Stands in the state of an object under a plan, and cannot be pickled."""

    def __init__(self, owner: Any) -> None:
        self.name = type(owner).__name__

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise UnsupportedError(
            f"this {self.name} is under a plan, whose hooks cannot be copied or pickled; call undo() first, and "
            "parallelize() the copy"
        )


def refuse_copies(owner: Any) -> None:
    """Refuses deep copies and pickles of an object, whose hooks would be copied too and work for the original.

    Shallow copies, which share its parts, stay possible.
    """
    original = _Original(owner)

    def reduce(protocol: Any) -> Any:
        make, given, state, *rest = type(owner).__reduce_ex__(owner, protocol)
        # Pickle comes to the first value first; `copy.copy` only takes it along.
        state = {"_under_plan": original, **{name: value for name, value in state.items() if name not in _COPYING}}
        return make, given, state, *rest

    vars(owner).update({"__deepcopy__": original.__reduce_ex__, "__reduce_ex__": reduce})


def allow_copies(owner: Any) -> None:
    """Takes back what `refuse_copies` did."""
    for name in _COPYING:
        vars(owner).pop(name, None)


def refuse_loads(module: nn.Module) -> Any:
    """Refuses `load_state_dict` on a module with parts of weights; returns what takes this back."""

    def refuse(*_: Any) -> Any:
        raise UnsupportedError(
            f"this {type(module).__name__} has only this rank's part of its weights; load weights before "
            "parallelize(), or call undo() on every rank first"
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
