"""A GPU that is not there: tensors that say they are on CUDA, computed on the CPU, late.

Tensors on "the device" and on the CPU are separate, as with a GPU: an operation over both is an error, also for an
index, and what must wait for the device (a number read from it, a copy back) is noted with the line that asked. So a
pass over it shows every tensor made on the wrong side, every wait and every missing event, with the right numbers.
Integers are computed at once as well, since shapes hang on them: a race shows in the numbers that are not.
"""

from __future__ import annotations

import contextlib
import importlib.util
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from tests.pretended import streams
from tests.pretended.streams import CUDA, Log

_aten = torch.ops.aten
_WAITS = {
    _aten._local_scalar_dense.default,
    _aten.nonzero.default,
    _aten.equal.default,
    _aten.masked_select.default,
    _aten._unique2.default,
    _aten.repeat_interleave.Tensor,
}
_PINNED: set[int] = set()  # addresses of memory that a copy reads when it runs, not when it is asked for


class OnDevice(torch.Tensor):
    """A tensor that says it is on a GPU, around the one on the CPU that it is."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> OnDevice:
        # A shape without memory, as torch's own fake tensors are: nothing then asks for a driver.
        with _disable_current_modes(), torch.inference_mode(False):
            like = torch.empty_strided(inner.shape, inner.stride(), dtype=inner.dtype, device="meta")
            make: Any = torch.Tensor._make_subclass  # type: ignore[attr-defined]
            made: OnDevice = make(cls, like, False, dispatch_device=True, device_for_backend_keys=CUDA)
        made.inner = inner
        return made

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return CUDA

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True

    def data_ptr(self) -> int:
        return self.inner.data_ptr()

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(
        cls, operation: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _dispatch(operation, args, kwargs or {})

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"OnDevice({self.inner!r})"


def _dispatch(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if operation is torch.ops.prim.device.default:
        return torch.device("meta" if isinstance(args[0], OnDevice) else "cpu")  # the answer to torch's own C++
    if operation.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd):
        with _Made():  # it is made of others
            return operation.decompose(*args, **kwargs)
    there = [value for value in tree_leaves((args, kwargs)) if isinstance(value, OnDevice)]
    if operation is _aten.copy_.default:
        return _copied(args[0], args[1], non_blocking=bool(args[2:] and args[2]))
    wanted = kwargs.get("device")
    kind = torch.device(wanted).type if wanted is not None else None
    if operation is _aten._to_copy.default and (there or kind == "cuda"):
        return _to(args[0], kwargs, kind)
    # torch's C++ believes the device to be `meta`, and makes such numbers there.
    ours = bool(there) or operation is _aten.scalar_tensor.default
    to_device = kind == "cuda" or (bool(there) and kind is None) or (ours and kind == "meta")
    if not there and not to_device:
        return _on_cpu(operation, args, kwargs)
    if there or not operation.name().endswith("_like"):  # which takes a shape only
        _refuse_mixing(operation, args, kwargs)
    if wanted is not None:
        kwargs = {**kwargs, "device": torch.device("cpu")}
    if operation in _WAITS or _has_mask(operation, args):
        streams.log.note(operation)
        streams.current().run()
        return _wrapped(operation(*_inner(args), **_inner(kwargs)))
    return _later(_histogram if operation is _aten.histc.default else operation, args, kwargs)


class _Histogram:
    """Of whole numbers, which the CPU does not make one of."""

    _schema = _aten.histc.default._schema

    def __call__(self, numbers: torch.Tensor, *bounds: Any) -> torch.Tensor:
        return torch.histc(numbers.float(), *bounds).to(numbers.dtype)


_histogram = _Histogram()


def _on_cpu(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    pinned = kwargs.pop("pin_memory", None)
    out = operation(*args, **kwargs)
    if pinned:
        _PINNED.add(out.untyped_storage().data_ptr())
    return out


def _refuse_mixing(operation: Any, args: Any, kwargs: Any) -> None:
    tensors = [value for value in tree_leaves((args, kwargs)) if isinstance(value, torch.Tensor)]
    strays = [tensor.shape for tensor in tensors if not isinstance(tensor, OnDevice) and tensor.ndim > 0]
    if strays:
        raise RuntimeError(f"{operation}: expected all tensors on one device, found {strays} on cpu")


def _has_mask(operation: Any, args: tuple[Any, ...]) -> bool:
    """Whether how many are true decides the shape."""
    if operation not in (_aten.index.Tensor, _aten.index_put_.default):
        return False
    return any(isinstance(index, torch.Tensor) and index.dtype == torch.bool for index in args[1])


def _later(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Put an operation into the current stream; what it will give has its shape at once, and no numbers."""
    inner_args, inner_kwargs = _inner(args), _inner(kwargs)
    if operation._schema.is_mutable:
        changed = _changed(operation, args, kwargs)
        whole = not any(value.is_floating_point() for value in tree_leaves(changed))
        if whole:  # shapes and places hang on them: no later than now, though a GPU would not wait
            if streams.capturing() is None:
                streams.current().run()
            operation(*inner_args, **inner_kwargs)
        if not whole or streams.capturing() is not None:
            streams.current().put(lambda: operation(*inner_args, **inner_kwargs))
        return changed
    with streams.turn:
        out = operation(*inner_args, **inner_kwargs)
        known = {
            _storage(value) for value in tree_leaves((inner_args, inner_kwargs)) if isinstance(value, torch.Tensor)
        }
        made = [value for value in tree_leaves(out) if isinstance(value, torch.Tensor) and _storage(value) not in known]
        if made:
            for value in made:
                _poison(value)
            streams.current().put(lambda: _redo(operation, inner_args, inner_kwargs, made))
        return _wrapped(out)


def _redo(operation: Any, args: Any, kwargs: Any, made: list[torch.Tensor]) -> None:
    again = [value for value in tree_leaves(operation(*args, **kwargs)) if isinstance(value, torch.Tensor)]
    for target, source in zip(made, again, strict=True):
        target.copy_(source)


def _changed(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What an operation in place returns: the tensors that it writes."""
    named = dict(zip((argument.name for argument in operation._schema.arguments), args, strict=False)) | kwargs
    written = [
        named[argument.name]
        for argument in operation._schema.arguments
        if argument.alias_info is not None and argument.alias_info.is_write and argument.name in named
    ]
    return written[0] if len(written) == 1 else tuple(written)


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _poison(tensor: torch.Tensor) -> None:
    if tensor.is_floating_point() and tensor.numel():
        tensor.fill_(torch.nan)


def _copied(target: torch.Tensor, source: torch.Tensor, non_blocking: bool) -> torch.Tensor:
    """Do `target.copy_(source)`: wait for a copy back to the CPU, unless it is to pinned memory."""
    to, at = isinstance(target, OnDevice), isinstance(source, OnDevice)
    into, of = _inner(target), _inner(source)
    if not to and not at:
        into.copy_(of)
    elif not to and not (non_blocking and _storage(into) in _PINNED):
        streams.log.note("copy back")
        streams.current().run()
        into.copy_(of)
    else:
        if not at and of.ndim and (not non_blocking or streams.capturing() is not None):  # torch waits for the stream
            streams.log.note("copy there")
            streams.current().run()
        if not at and _storage(of) not in _PINNED:
            of = of.clone()  # read before the call returns
        streams.current().put(lambda: into.copy_(of))
    return target


def _to(source: torch.Tensor, kwargs: dict[str, Any], kind: str | None) -> torch.Tensor:
    """`source.to(...)`, which always makes a new tensor here."""
    dtype = kwargs.get("dtype") or source.dtype
    made = torch.empty_like(_inner(source), dtype=dtype)
    _poison(made)
    target = made if kind == "cpu" else OnDevice(made)
    if not made.is_floating_point() and kind != "cpu":
        made.copy_(_inner(source))  # also at once: shapes hang on it
    return _copied(target, source, bool(kwargs.get("non_blocking")))


def _inner(value: Any) -> Any:
    return tree_map(lambda one: one.inner if isinstance(one, OnDevice) else one, value)


def _wrapped(value: Any) -> Any:
    return tree_map(lambda one: OnDevice(one) if isinstance(one, torch.Tensor) else one, value)


class _Made(TorchDispatchMode):
    """Catches what makes tensors on the device out of nothing."""

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _dispatch(operation, args, kwargs or {})


class _Named(TorchFunctionMode):
    """Names the device by its number, which a torch without CUDA cannot ask for; lets `torch.tensor` cross in sight."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tuple(map(_numbered, args)), {name: _numbered(value) for name, value in (kwargs or {}).items()}
        if function in (torch.tensor, torch.as_tensor) and kwargs.get("device") is not None:
            device = kwargs.pop("device")
            return function(*args, **kwargs).to(device)
        if function is F.scaled_dot_product_attention:
            return _attention(*args, **kwargs)
        return function(*args, **kwargs)


def _numbered(value: Any) -> Any:
    if isinstance(value, str) and value == "cuda":
        return CUDA
    return CUDA if isinstance(value, torch.device) and value.type == "cuda" else value


def _attention(query: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Without what torch's C++ would make on the way, on a device of its choice."""
    if not isinstance(query, OnDevice):
        return F.scaled_dot_product_attention(query, *args, **kwargs)
    _refuse_mixing("scaled_dot_product_attention", (query, *args), kwargs)
    inner_args, inner_kwargs = _inner((query, *args)), _inner(kwargs)
    value = inner_kwargs["value"] if "value" in inner_kwargs else inner_args[2]
    made = query.inner.new_full((*query.shape[:-1], value.shape[-1]), torch.nan)

    def attend() -> None:
        with torch.inference_mode():
            made.copy_(F.scaled_dot_product_attention(*inner_args, **inner_kwargs))

    streams.current().put(attend)
    return OnDevice(made)


@contextlib.contextmanager
def _modes() -> Iterator[None]:
    with _Made(), _Named():
        yield


_PROPERTIES = SimpleNamespace(name="a pretended GPU", multi_processor_count=4, total_memory=10**9)
_CUDA: dict[str, Any] = {
    "_lazy_init": lambda: None,
    "Stream": streams.new,
    "Event": streams.Event,
    "CUDAGraph": streams.Graph,
    "stream": streams.on,
    "current_stream": streams.current,
    "synchronize": streams.finish,
    "current_device": lambda: 0,
    "device_count": lambda: 1,
    "is_available": lambda: True,
    "get_device_capability": lambda device=None: (9, 0),
    "get_device_name": lambda device=None: "a pretended GPU",
    "get_device_properties": lambda device=None: _PROPERTIES,
    "empty_cache": lambda: None,
    "memory_allocated": lambda device=None: 0,
    "max_memory_allocated": lambda device=None: 0,
    "reset_peak_memory_stats": lambda device=None: None,
}


def _pinned(tensor: torch.Tensor, *ignored: Any) -> torch.Tensor:
    copy = tensor.clone()
    _PINNED.add(_storage(copy))
    return copy


def _without_triton(find: Any) -> Any:
    """Its kernels would ask for addresses: what they compute is tested in their own interpreter."""
    return lambda name, *rest: None if name == "triton" else find(name, *rest)


@contextlib.contextmanager
def pretended() -> Iterator[Log]:
    """Inside, the device `cuda` is there, for every thread begun inside, too."""
    streams.forget()
    run = threading.Thread.run

    def with_modes(thread: threading.Thread) -> None:
        with _modes():
            run(thread)

    changes: list[Any] = [mock.patch.object(torch.cuda, name, value) for name, value in _CUDA.items()]
    changes.append(mock.patch.object(threading.Thread, "run", with_modes))
    changes.append(mock.patch.object(torch.Tensor, "pin_memory", _pinned))
    changes.append(mock.patch.object(importlib.util, "find_spec", _without_triton(importlib.util.find_spec)))
    with contextlib.ExitStack() as stack:
        for change in changes:
            stack.enter_context(change)
        torch.__future__.set_overwrite_module_params_on_conversion(True)
        stack.callback(torch.__future__.set_overwrite_module_params_on_conversion, False)
        stack.enter_context(_modes())
        yield streams.log
