"""Preemption of a forward pass between its layers, for short work of others: a token of an answer, for example.

From one layer to the next a pass keeps its rows in tensors and a cache of its own. Hooks on the model's modules are
called by every pass of that model: `pass_hooks` restricts them to the pass that they are for.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch  # shared stores use this module, and are pushed and opened without it

_pending: ContextVar[Callable[[], None] | None] = ContextVar("pending", default=None)
_depth: ContextVar[int] = ContextVar("depth", default=0)


@contextmanager
def between_layers(work: Callable[[], None] | None) -> Iterator[None]:
    """Call `work` before each layer of all passes inside, in their thread; its errors end the pass. It may run the
    model over other caches, without being interrupted itself."""
    token = _pending.set(work)
    try:
        yield
    finally:
        _pending.reset(token)


@contextmanager
def preemptible(layers: Sequence[torch.nn.Module]) -> Iterator[None]:
    if _pending.get() is None:
        yield
        return

    def stop(*_: Any) -> None:
        run_pending()

    with pass_hooks((layer, stop) for layer in layers):
        yield


@contextmanager
def pass_hooks(hooks: Iterable[tuple[torch.nn.Module, Callable[..., Any]]]) -> Iterator[None]:
    """Call each hook with (module, args, kwargs) before its layer, in the pass inside only. What a hook returns
    replaces args and kwargs; None: they stay."""
    pass_ = _this_pass()

    def only_here(hook: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *given: hook(*given) if _this_pass() == pass_ else None

    handles = [layer.register_forward_pre_hook(only_here(hook), with_kwargs=True) for layer, hook in hooks]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def run_pending() -> None:
    work = _pending.get()
    if work is None:
        return
    nothing, deeper = _pending.set(None), _depth.set(_depth.get() + 1)
    try:
        work()
    finally:
        _depth.reset(deeper)
        _pending.reset(nothing)


def _this_pass() -> tuple[int, int]:
    return threading.get_ident(), _depth.get()
