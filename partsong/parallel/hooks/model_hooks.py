"""Puts hooks on modules by diffusers' own registry, and takes them off without a trace."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import MethodType
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast, runtime_checkable

import torch
from torch import Tensor, nn
from torch._C._dynamo.eval_frame import set_eval_frame

from partsong.errors import UnsupportedError
from partsong.parallel.hooks.arguments import ArgumentNames, AsCalled
from partsong.parallel.hooks.call_hook import CallHook
from partsong.parallel.hooks.kept_objects import allow_copies, keep_whole, refuse_copies
from partsong.parallel.hooks.redirect import Redirect

if TYPE_CHECKING:
    from diffusers.hooks import HookRegistry, ModelHook

__all__ = [
    "Attend", "AttentionHook", "AroundHook", "CalledAs", "HookSet", "InputHook", "OutputHook", "as_called",
    "kept_arguments", "original_forward", "signature_of",
]  # fmt: skip

PREFIX = "partsong."

Hook = TypeVar("Hook")

#: Computes attention from queries, keys and values `[B, H, L, D]`, an optional mask and an optional logit scale.
Attend = Callable[[Tensor, Tensor, Tensor, Tensor | None, float | None], Tensor]


class HookSet:
    """Keeps the hooks that one plan has put on modules, and the attributes it has changed.

    Attributes:
        has_failed: whether they are removed after an error, which other ranks need not have met.
    """

    def __init__(self) -> None:
        self.has_failed = False
        self._changed: list[_Attribute] = []
        self._placed: list[tuple[nn.Module, str]] = []
        self._at_end: list[Callable[[], None]] = []
        # What each hook has put in place of its module's forward: others may wrap it later.
        self._forwards: dict[tuple[nn.Module, str], Any] = {}

    def add(self, module: nn.Module, hook: CallHook, name: str) -> None:
        """Puts a hook on a module.

        Raises:
            UnsupportedError: the module already carries a plan's hook of that name, or the hook refuses it.
        """
        registry = _registry(module)
        if registry.get_hook(PREFIX + name) is not None:
            raise UnsupportedError(
                f"this {type(module).__name__} is under another plan already; call undo() on that plan first"
            )
        hook.check(module)
        registry.register_hook(cast("ModelHook", hook), PREFIX + name)
        self._placed.append((module, PREFIX + name))
        self._forwards[module, PREFIX + name] = vars(module)["forward"]
        refuse_copies(module)

    def put(self, module: nn.Module, name: str, value: Any) -> None:
        """Changes an attribute of a module, such as a weight, until `remove`."""
        self._changed.append(_Attribute(module, name, getattr(module, name), value))
        if isinstance(value, nn.Parameter):
            self._at_end += [guard.remove for guard in keep_whole(module, name, self._changed[-1].before)]
        setattr(module, name, value)

    def refresh(self) -> None:
        """Takes the present values of changed attributes, such as weights that were read since, as the plan's own."""
        self._changed = [replace(each, value=getattr(each.module, each.name)) for each in self._changed]

    def on_remove(self, undo: Callable[[], None]) -> None:
        """Registers a function to call at the end of `remove`, for changes that are neither hooks nor attributes."""
        self._at_end.append(undo)

    def of(self, kind: type[Hook]) -> list[Hook]:
        """Lists the hooks of a class."""
        hooks = (_registry(module).get_hook(name) for module, name in self._placed)
        return [hook for hook in hooks if isinstance(hook, kind)]

    def keep_from(self, module: nn.Module) -> None:
        """Lets calls of another module run without these hooks, where it shares layers with a hooked one."""
        if {hooked for hooked, _ in self._placed}.isdisjoint(module.modules()):
            return

        def run(forward: Callable[..., Any], named: dict[str, Any]) -> Any:
            with self.lifted():
                return forward(**named)

        self.add(module, AroundHook(run, signature_of(module)), "without")

    def remove(self) -> None:
        """Takes every hook off, last first, and leaves other programs' hooks on the modules."""
        for module, name in reversed(self._placed):
            registry = _registry(module)
            if vars(module).get("forward") is self._forwards[module, name]:
                registry.remove_hook(name, recurse=False)
            else:
                _let_pass(registry, name)
            # The registry leaves the class' own forward on the instance, as a bound method.
            if getattr(vars(module).get("forward"), "__func__", None) is type(module).forward:
                vars(module).pop("forward")
        for attribute in reversed(self._changed):
            attribute.restore()
        self._changed.clear()
        for module, _ in self._placed:
            allow_copies(module)
            if (registry := vars(module).get("_diffusers_hook")) is not None and not registry.hooks:
                del vars(module)["_diffusers_hook"]
        self._placed.clear()
        self._forwards.clear()
        while self._at_end:
            self._at_end.pop()()
        self.has_failed = False

    @contextmanager
    def lifted(self) -> Iterator[None]:
        """Lets the modules run as they would without these hooks."""
        hooked: dict[nn.Module, Any] = {module: module.forward for module, _ in self._placed}
        for module, name in reversed(self._placed):
            hook: Any = _registry(module).get_hook(name)
            assert hook is not None, "a hook of this plan was taken off by somebody else"
            vars(module)["forward"] = original_forward(hook)
        for attribute in self._changed:
            attribute.restore()
        try:
            yield
        finally:
            for attribute in self._changed:
                setattr(attribute.module, attribute.name, attribute.value)
            for module, forward in hooked.items():
                vars(module)["forward"] = forward


@dataclass(frozen=True, slots=True)
class _Attribute:
    """Remembers a changed attribute of a module: its old and its new value."""

    module: nn.Module
    name: str
    before: Any
    value: Any

    def restore(self) -> None:
        """Restores the old value, on the module's present device and in its present type."""
        now = getattr(self.module, self.name)
        # Weights that were read in shares have nothing to move: the loader reads the rest.
        if isinstance(self.before, Tensor) and isinstance(now, Tensor) and not self.before.is_meta:
            if type(self.before.data) is Tensor:
                self.before.data = self.before.data.to(now.device, now.dtype)
            elif self.before.device != now.device:  # quantised: its type stays, and its values are not a plain tensor
                setattr(self.module, self.name, nn.Parameter(self.before.data.to(now.device), requires_grad=False))
                return
        setattr(self.module, self.name, self.before)


def _registry(module: nn.Module) -> HookRegistry:
    from diffusers.hooks import HookRegistry  # takes seconds, and processes that only start ranks do not need it

    return HookRegistry.check_if_exists_or_initialize(module)


def _let_pass(registry: HookRegistry, name: str) -> None:
    """Removes a hook from a chain of wrapped calls, without changing the rest of the chain."""
    if name not in registry.hooks:
        return  # restoring the module's forward has removed it already
    place = registry._hook_order.index(name)
    reference = registry._fn_refs[place]
    reference.pre_forward = lambda module, *args, **kwargs: (args, kwargs)
    reference.post_forward = lambda module, output: output
    if reference.original_forward is not None:
        reference.forward = reference.original_forward
    del registry.hooks[name], registry._hook_order[place], registry._fn_refs[place]


class InputHook(CallHook):
    """Changes a module's arguments, by name."""

    uncompiled = "pre_forward"

    def __init__(self, change: Callable[[dict[str, Any]], None], signature: inspect.Signature) -> None:
        super().__init__()
        self.change, self.names = change, ArgumentNames(signature)

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Passes the arguments to `change` by name, and then on the way they came."""
        named = self.names.of(args, kwargs)
        self.change(named)
        return self.names.passed(named, self.names.positions(args))


class OutputHook(CallHook):
    """Changes a module's output."""

    uncompiled = "post_forward"

    def __init__(self, change: Callable[[Any], Any]) -> None:
        super().__init__()
        self.change = change

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Passes the output to `change`."""
        return self.change(output)


class AroundHook(CallHook):
    """Replaces a module's call by ``run(forward, arguments)``, with the arguments by name.

    `forward` takes them by name too, and passes those by position that came by position.
    """

    uncompiled, compiles_inside = "new_forward", True

    def __init__(self, run: Callable[[AsCalled, dict[str, Any]], Any], signature: inspect.Signature) -> None:
        super().__init__()
        self.run, self.names = run, ArgumentNames(signature)

    def new_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Names the arguments and passes the call on; of a compiled call only the module's own part is compiled."""
        compiler, original = set_eval_frame(None), original_forward(self)
        if compiler is not None:
            original = functools.partial(_compiled_by, compiler, original)
        try:
            forward = AsCalled(original, self.names, self.names.positions(args))
            return self.run(forward, self.names.of(args, kwargs))
        finally:
            set_eval_frame(compiler)


def _compiled_by(compiler: Any, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Calls a function where nothing is compiled, and lets the compiler see it alone."""
    set_eval_frame(compiler)
    try:
        return function(*args, **kwargs)
    finally:
        set_eval_frame(None)


#: Processors whose further calls attend to an image prompt, which every rank has whole.
_READS_IMAGE_PROMPTS = ("FluxIPAdapterAttnProcessor",)


#: What processors from before torch 2.0, and those of xformers, compute attention by.
_OTHER_OPERATORS = frozenset(("get_attention_scores", "memory_efficient_attention"))


class AttentionHook(CallHook):
    """Sends the one scaled-dot-product attention inside a module's forward to `attend`.

    Works for every attention processor that calls ``torch.nn.functional.scaled_dot_product_attention``, as diffusers'
    native ones do. Processors that are known to call something else are refused when the hook is put on, others at
    their first call, and so are causal attention and dropout.

    Args:
        attend: is called with queries, keys, values, mask and scale in place of the operator.
        name: the module's name, for messages.
        once: refuses more than one call of the operator in a forward; otherwise each one goes to `attend`.
        may_skip: allows a forward without a call of the operator.
        leaves: takes the operator's arguments, and says which calls stay as they are: their tokens are on every rank.
    """

    uncompiled = "new_forward"

    def __init__(
        self,
        attend: Attend,
        name: str,
        *,
        once: bool = True,
        may_skip: bool = False,
        leaves: Callable[..., bool] | None = None,
    ) -> None:
        super().__init__()
        self.attend, self.name, self.once, self.may_skip = attend, name, once, may_skip
        self.leaves = leaves
        self._made: int | None = None

    def check(self, module: nn.Module) -> None:
        """Refuses a processor that is known to compute attention without the operator."""
        kind = type(getattr(module, "processor", None))
        if _OTHER_OPERATORS.intersection(getattr(getattr(kind.__call__, "__code__", None), "co_names", ())):
            raise UnsupportedError(
                f"{self.name} ({kind.__name__}) does not compute attention by scaled_dot_product_attention, so it "
                f"cannot be cut; set the processor of torch 2.0 first, which diffusers calls {kind.__name__}2_0"
            )

    def new_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Runs the module with its attention redirected."""
        redirect = self._redirect(module)
        with redirect.watching():
            output = original_forward(self)(*args, **kwargs)
        if (redirect.calls > 1 and self.once) or (redirect.calls == 0 and not self.may_skip):
            raise UnsupportedError(
                f"{self.name} ({_processor(module)}) made {redirect.calls} scaled_dot_product_attention calls where "
                "one is expected; use the model's default processor and the native attention backend"
            )
        self._made = redirect.calls
        return output

    def pause_at_attention(self) -> None:
        """Lets compiled code run up to the operator and on from it; see `compiled_operator`."""
        pausing = MethodType(_compiled_inside(), self)
        self.fn_ref.forward = functools.partial(pausing, self.fn_ref.forward.args[0])

    def compiled_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Runs the module with its attention redirected, and lets it be compiled once it has run as it is."""
        if self._made is None:
            return self.new_forward(module, *args, **kwargs)
        redirect = self._redirect(module)
        with redirect.compiled():
            output = original_forward(self)(*args, **kwargs)
        if redirect.calls != self._made:
            raise UnsupportedError(
                f"{self.name} ({_processor(module)}) made {redirect.calls} scaled_dot_product_attention calls by that "
                f"name, and {self._made} before it was compiled; leave out capture()"
            )
        return output

    def _redirect(self, module: nn.Module) -> Redirect:
        return Redirect(self._attend, self.leaves, _processor(module) in _READS_IMAGE_PROMPTS)

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        if is_causal or dropout_p:
            raise UnsupportedError(f"{self.name}: causal attention and dropout are not supported over ranks")
        if query.ndim == 3:  # heads are in the batch
            mask = attn_mask.unsqueeze(1) if attn_mask is not None and attn_mask.ndim == 3 else attn_mask
            return self.attend(query[:, None], key[:, None], value[:, None], mask, scale)[:, 0]
        if query.ndim != 4:
            raise UnsupportedError(f"{self.name}: attention over {query.ndim} dimensions; use queries [B, H, L, D]")
        return self.attend(query, key, value, attn_mask, scale)


def _processor(module: nn.Module) -> str:
    return type(getattr(module, "processor", module)).__name__


@functools.cache
def _compiled_inside() -> Callable[..., Any]:
    disable: Any = torch.compiler.disable
    return disable(AttentionHook.compiled_forward, recursive=False)


@runtime_checkable
class CalledAs(Protocol):
    """Describes a module that is called like another one."""

    @property
    def forward_signature(self) -> inspect.Signature:
        """Returns the signature of the other one's forward."""
        ...


def signature_of(module: nn.Module) -> inspect.Signature:
    """Returns the signature of the forward of a module's class: the object's own may be wrapped."""
    if isinstance(module, CalledAs):
        return module.forward_signature
    signature = inspect.signature(type(module).forward)
    return signature.replace(parameters=list(signature.parameters.values())[1:])


def as_called(module: nn.Module, positions: Sequence[str]) -> AsCalled:
    """Returns a call of a module with arguments by name, which passes those in `positions` by position."""
    return AsCalled(module, ArgumentNames(signature_of(module)), positions)


def kept_arguments(named: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a call's arguments with copies of the dictionaries of layer arguments.

    Pipelines change these from call to call, and models remove entries after reading them, such as an image prompt.
    """
    return {
        name: dict(value) if name.endswith("_kwargs") and isinstance(value, dict) else value
        for name, value in named.items()
    }


def original_forward(hook: CallHook) -> Callable[..., Any]:
    """Returns the forward that a module had before the hook was put on it."""
    reference: Any = hook.fn_ref
    return reference.original_forward or reference.forward
