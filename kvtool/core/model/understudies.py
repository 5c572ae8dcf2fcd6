"""Importing `transformers` without the half of its modules that no question uses.

`import transformers.modeling_utils` also runs torch's compiler, its distributed tensors, SciPy's optimisers and the
set-up of clouds, and reads the source of every model three times. None of that code is copied here: while others are
imported, an `Understudy` has the few names of a module that they look up, and it becomes the module when it is asked
for any other, or when what these names refer to is called.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
import threading
import typing
from collections.abc import Callable, Mapping, Sequence
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import FrameType, ModuleType, SimpleNamespace
from typing import Any

_becoming = threading.RLock()


def _as_it_is(function: Any = None, *_: Any, **__: Any) -> Any:
    """Decorate nothing: the marks are for torch's compiler, which nothing that is imported so is given to."""
    return _as_it_is if function is None else function


def _version_only() -> dict[str, Any]:
    from importlib.metadata import version

    return {"__version__": version("transformers")}


class _Later:
    """A module's function or class, looked up when it is called or asked for something."""

    def __init__(self, module: str, name: str) -> None:
        self._module, self._name = module, name

    def _own(self) -> Any:
        return getattr(_become(self._module), self._name)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self._own()(*arguments, **named)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own(), name)


def _later(module: str, *names: str) -> Callable[[], Mapping[str, Any]]:
    return lambda: {name: _Later(module, name) for name in names}


# torch asks where an operation is declared, and `inspect` looks the file up among those of all modules, which it all
# resolves: 0.1 s for five answers that the frame has.


def _place(stacklevel: int) -> str:
    frame = sys._getframe(stacklevel)
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _module_of(frame: FrameType) -> ModuleType | None:
    return sys.modules.get(frame.f_globals["__name__"])


# What each of them is asked for while others are imported.
PLAYED: Mapping[str, Callable[[], Mapping[str, Any]]] = {
    "accelerate": _later("accelerate", "PartialState", "dispatch_model"),
    "accelerate.hooks": _later("accelerate.hooks", "AlignDevicesHook", "add_hook_to_module"),
    "accelerate.utils": _later(
        "accelerate.utils",
        *("extract_model_from_parallel", "get_balanced_memory", "get_max_memory", "infer_auto_device_map", "reduce"),
    ),
    "accelerate.utils.modeling": _later("accelerate.utils.modeling", "clean_device_map", "get_max_layer_size"),
    "torch._dynamo": lambda: dict.fromkeys(("allow_in_graph", "assume_constant_result", "disable"), _as_it_is),
    "transformers": _version_only,
    "transformers.models": dict,
    "transformers.utils.chat_template_utils": _later(
        "transformers.utils.chat_template_utils",
        *("DocstringParsingException", "TypeHintParsingException", "_get_control_token_patterns"),
        *("_get_template_literal_text", "_normalize_chat_messages", "encode_marked_chat", "get_json_schema"),
        *("mark_control_tokens", "render_jinja_template"),
    ),
    "transformers.processing_utils": lambda: {"Unpack": typing.Unpack},
}
# What does not need the code of the package that it is in; for others the package comes first.
_ALONE = ("transformers.", "torch._dynamo._trace_wrapped_higher_order_op")
# What a module has in the place of functions of its own. The first is asked by others at their top what there is; they
# import less where the answer is no.
CHANGED: Mapping[str, Mapping[str, Any]] = {
    "transformers.utils.import_utils": dict.fromkeys(
        ("is_scipy_available", "is_torch_distributed_available"), lambda: False
    ),
    "torch._library.utils": {"get_source": _place},
    "torch.library": {"inspect": SimpleNamespace(**vars(inspect) | {"getmodule": _module_of})},
}


class Understudy(ModuleType):
    """A placeholder for a module whose own code has not run."""

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
        """Run the module's own code, once, after its package's; returns what is then in the module's place: it may have
        put another there."""
        with _becoming:
            _become_package(self.__name__)
            if (loader := vars(self).pop("_loader", None)) is not None:
                loader.exec_module(self)
            return sys.modules[self.__name__]


def _become(name: str) -> ModuleType:
    """Return a module after its own code has run."""
    module = importlib.import_module(name)
    return module.become() if isinstance(module, Understudy) else module


def _become_package(name: str) -> None:
    """Have a module's package run its own code, unless the module does without."""
    package = sys.modules.get(name.rpartition(".")[0])
    if isinstance(package, Understudy) and not name.startswith(_ALONE):
        package.become()


class _Stage:
    """A loader that leaves out what a module's own code does, or runs it and then changes some of its functions."""

    def __init__(self, loader: SourceFileLoader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return Understudy(spec.name) if spec.name in PLAYED else None

    def exec_module(self, module: ModuleType) -> None:
        name = module.__name__
        if name in PLAYED:
            vars(module).update(PLAYED[name](), _loader=self._loader)
        else:
            self._loader.exec_module(module)
            vars(module).update({own: other for own, other in CHANGED[name].items() if own in vars(module)})


class _Casting:
    """The finder that puts understudies in the place of modules."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in CHANGED and name not in PLAYED:
            _become_package(name)
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and isinstance(loader := spec.loader, SourceFileLoader):
            staged: Any = _Stage(loader)
            spec.loader = staged
        return spec


def cast() -> None:
    """Import lightly from now on, in a process that is the command line's own.

    What `transformers` says of itself is another thing then. So nothing is done where it or torch has been imported, or
    in a process that is somebody else's: the Python interface does not call this.
    """
    if not {"torch", "transformers"} & sys.modules.keys():
        sys.meta_path.insert(0, _Casting())
