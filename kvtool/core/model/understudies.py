"""Importing `transformers` without the half of its modules that no question uses.

`import transformers.modeling_utils` also runs torch's compiler, its distributed tensors and SciPy's optimisers, and
reads the source of every model three times. None of that code is copied or changed here: while others are imported, an
`Understudy` has the few names of a module that they look up, and it becomes the module when it is asked for any other.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import threading
import typing
from collections.abc import Callable, Mapping, Sequence
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import ModuleType
from typing import Any

_becoming = threading.RLock()


def _as_it_is(function: Any = None, *_: Any, **__: Any) -> Any:
    """Decorate nothing: the marks are for torch's compiler, which nothing that is imported so is given to."""
    return _as_it_is if function is None else function


def _told_its_version() -> dict[str, Any]:
    from importlib.metadata import version

    return {"__version__": version("transformers")}


# What each of them is asked for while others are imported.
PLAYED: Mapping[str, Callable[[], Mapping[str, Any]]] = {
    "torch._dynamo": lambda: dict.fromkeys(("allow_in_graph", "assume_constant_result", "disable"), _as_it_is),
    "transformers": _told_its_version,
    "transformers.models": dict,
    "transformers.processing_utils": lambda: {"Unpack": typing.Unpack},
}
# What does without the code of the package that it stands in; for others the package comes first.
_ALONE = ("transformers.", "torch._dynamo._trace_wrapped_higher_order_op")
# Others ask this module at their top what there is, and import less where the answer is no.
_ASKED = "transformers.utils.import_utils"
_DENIED = ("is_scipy_available", "is_torch_distributed_available")


class Understudy(ModuleType):
    """Stands in for a module whose own code has not run."""

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("__"):
            inner = f"{self.__name__}.{name}"
            if hasattr(self, "__path__") and inner.startswith(_ALONE) and importlib.util.find_spec(inner) is not None:
                return importlib.import_module(inner)
            module = self.become()
            if module is not self or name in vars(self):
                return getattr(module, name)
        raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")

    def become(self) -> ModuleType:
        """Run the module's own code, once; returns what stands in the module's place then: it may have put another."""
        with _becoming:
            if (loader := vars(self).pop("_loader", None)) is not None:
                loader.exec_module(self)
            return sys.modules[self.__name__]


class _Stage:
    """A loader that leaves out what a module's own code does."""

    def __init__(self, loader: SourceFileLoader, known: Mapping[str, Any]) -> None:
        self._loader, self._known = loader, known

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return Understudy(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        vars(module).update(self._known, _loader=self._loader)


class _Denying:
    """A loader that runs a module, and then has it say that some things are not there."""

    def __init__(self, loader: SourceFileLoader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        vars(module).update({name: lambda: False for name in _DENIED if name in vars(module)})


class _Casting:
    """The finder that puts understudies in the place of modules."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        package = sys.modules.get(name.rpartition(".")[0])
        if isinstance(package, Understudy) and not name.startswith(_ALONE):
            package.become()
        if name != _ASKED and name not in PLAYED:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and isinstance(loader := spec.loader, SourceFileLoader):
            staged: Any = _Denying(loader) if name == _ASKED else _Stage(loader, PLAYED[name]())
            spec.loader = staged
        return spec


def cast() -> None:
    """Import lightly from now on, in a process that is the command line's own.

    What `transformers` says of itself is another thing then. So nothing is done where it or torch has been imported, or
    in a process that is somebody else's: the Python interface does not call this.
    """
    if not {"torch", "transformers"} & sys.modules.keys():
        sys.meta_path.insert(0, _Casting())
