"""Room between the layers of a pass, in which something short of others is done: a token of an answer, for example.

From one layer to the next a pass keeps its rows in tensors and a cache of its own. What it has beside are hooks on the
model's modules, which every pass of that model comes by: `for_this_pass` keeps them to the pass that they are for.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch  # shared stores use this room, and are pushed and opened without it

_does: ContextVar[Callable[[], None] | None] = ContextVar("does", default=None)
_depth: ContextVar[int] = ContextVar("depth", default=0)


@contextmanager
def between_layers(does: Callable[[], None]) -> Iterator[None]:
    """Call `does` before each layer of all passes inside, in their thread; what it raises ends the pass.

    It may run the model over other caches: the layers of those passes are not interrupted.
    """
    token = _does.set(does)
    try:
        yield
    finally:
        _does.reset(token)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Let nothing be done between the layers of passes inside: they are timed."""
    token = _does.set(None)
    try:
        yield
    finally:
        _does.reset(token)


@contextmanager
def giving_way(layers: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Let a pass inside stop before each of these layers for what is to be done between them."""
    if _does.get() is None:
        yield
        return

    def stop(module: Any, args: tuple[Any, ...]) -> None:
        step_aside()

    handles = [layer.register_forward_pre_hook(for_this_pass(stop)) for layer in layers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def for_this_pass(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Make a hook that sees the pass it is registered for, and none that runs between its layers."""
    pass_ = _this_pass()

    def seen(*given: Any) -> Any:
        return hook(*given) if _this_pass() == pass_ else None

    return seen


def step_aside() -> None:
    """Do what is to be done between layers, if anything is; a pass that waits for something can call it, too."""
    does = _does.get()
    if does is None:
        return
    nothing, deeper = _does.set(None), _depth.set(_depth.get() + 1)
    try:
        does()
    finally:
        _depth.reset(deeper)
        _does.reset(nothing)


def _this_pass() -> tuple[int, int]:
    return threading.get_ident(), _depth.get()
