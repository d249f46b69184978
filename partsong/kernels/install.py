"""Lets transformers, diffusers and PyTorch call partsong's attention by name, until that is undone."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from types import TracebackType

from partsong.errors import ArgumentError
from partsong.kernels.install_diffusers import install_diffusers
from partsong.kernels.install_torch import install_torch
from partsong.kernels.install_transformers import install_transformers

__all__ = ["Installed", "install"]


class Installed:
    """Remembers what `install` did; a context manager that undoes it at the end of the block.

    Attributes:
        places: the libraries that know partsong's attention, in the order of installation; empty once undone.
    """

    def __init__(self, places: tuple[str, ...], stack: ExitStack) -> None:
        self.places = places
        self._stack = stack

    def undo(self) -> None:
        """Makes the libraries forget partsong's attention, in reverse order; a second time it does nothing.

        Objects that still ask for it by name then raise: call ``model.set_attn_implementation("sdpa")`` on a
        transformers model and ``transformer.reset_attention_backend()`` on a diffusers one.
        """
        self.places = ()
        self._stack.close()

    def __enter__(self) -> Installed:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.undo()


def install(*, transformers: bool = False, diffusers: bool = False, torch_sdpa: bool = False) -> Installed:
    """Registers `partsong.kernels.attention` with other libraries under the name "partsong".

    Nothing uses it until it is asked for by name, except with `torch_sdpa`:

    - transformers: ``model.set_attn_implementation("partsong")``, or ``attn_implementation="partsong"`` when loading;
      padding masks, caches, grouped key heads, attention sinks and position biases are computed; dropout, softcapping
      and attention weights are refused;
    - diffusers: ``transformer.set_attention_backend("partsong")``;
    - torch_sdpa: every ``scaled_dot_product_attention`` of the process that PyTorch gives to its flash kernel (CUDA,
      half precision, no mask), gradients included. What partsong cannot compute goes to the kernel that was there.

    `attention` decides per call which kernel runs, and a model call inside a `force_backend` block obeys that too.

    Args:
        transformers: register with transformers.
        diffusers: register with diffusers.
        torch_sdpa: replace PyTorch's flash kernel.

    Returns:
        A handle with ``.undo()``, also a context manager.

    Raises:
        ArgumentError: nothing to install into, or installed already.
        UnsupportedError: a library is missing or not of a version this was written for, or no CUDA device for
            `torch_sdpa`. Nothing is installed then.

    Source: the registries ``AttentionInterface`` of transformers, ``AttentionBackendName`` of diffusers and
    ``torch.nn.attention.register_flash_attention_impl``.

    Example:
        >>> import torch
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> sizes = dict(vocab_size=16, hidden_size=16, intermediate_size=16, num_hidden_layers=1)
        >>> model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2)).eval()
        >>> ids = torch.arange(8)[None]
        >>> with torch.no_grad(), install(transformers=True):
        ...     model.set_attn_implementation("eager")
        ...     expected = model(ids).logits
        ...     model.set_attn_implementation("partsong")
        ...     bool(torch.allclose(model(ids).logits, expected, atol=1e-5))
        True
    """
    libraries: list[tuple[str, bool, Callable[[], Callable[[], None]]]] = [
        ("transformers", transformers, install_transformers),
        ("diffusers", diffusers, install_diffusers),
        ("torch_sdpa", torch_sdpa, install_torch),
    ]
    steps = {name: step for name, is_asked, step in libraries if is_asked}
    if not steps:
        raise ArgumentError("install into what? pass transformers=True, diffusers=True or torch_sdpa=True")
    with ExitStack() as stack:  # where one library refuses, those before it are undone
        for step in steps.values():
            stack.callback(step())
        return Installed(tuple(steps), stack.pop_all())
