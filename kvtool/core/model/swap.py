"""Module swap: a module of a model gets a class that computes the same in another way; its name and parts stay."""

from __future__ import annotations

import functools
from typing import Any

import torch

_BY = "_swapped_by"


class Swapped(torch.nn.Module):
    """Base of the classes that are put in place of a module's own, whose forward is `super().forward`.

    A copy of the module, in this process or by pickle in another, is of its own class: machine code stays here.

    Attributes
    ----------
    _swapped_by : what it computes with.
    """

    _swapped_by: Any

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        kept = {name: value for name, value in vars(self).items() if name != _BY}
        return _new, (own_class(self),), kept


def _new(kind: type[torch.nn.Module]) -> torch.nn.Module:
    return kind.__new__(kind)


def swap(module: torch.nn.Module, kind: type[Swapped], by: object) -> None:
    """Let a module compute as `kind` does, with `by`; one that does so already gets the new `by`."""
    swapped: Any = module
    classes: Any = kind, own_class(module)
    swapped.__class__ = _class_of(*classes)
    vars(module)[_BY] = by


def swapped_by(module: torch.nn.Module) -> Any:
    """Return what a module was given to compute with; None: it is of its own class."""
    return vars(module).get(_BY)


def own_class(module: torch.nn.Module) -> type[torch.nn.Module]:
    """Return the class that a module was built as."""
    kind = type(module)
    return kind.__bases__[1] if issubclass(kind, Swapped) else kind


@functools.cache
def _class_of(kind: Any, own: Any) -> type[torch.nn.Module]:
    """Make the class of both, which goes by its own one's name and signature: those are asked for."""

    @functools.wraps(own.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return kind.forward(self, *args, **kwargs)

    space = {"forward": forward, "__module__": own.__module__, "__qualname__": own.__qualname__}
    return type(own.__name__, (kind, own), space)
