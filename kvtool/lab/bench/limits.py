"""What this machine could do at best: peak of the matrix products, bandwidths, and the roofline they make."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch

from kvtool.lab.bench.flops import Architecture, LayerWork, Work, layer_flops

if TYPE_CHECKING:
    from kvtool.core.model.decoder import Decoder

_ROWS = {"cpu": 1024, "cuda": 8192}  # of the matrix product: enough for its peak
_COPIED = 2**28  # bytes: more than any cache holds
_TIMES = 5
_LEAST_SECONDS = 0.02  # that one sample of a measurement takes


@dataclass(frozen=True, slots=True)
class Machine:
    """Measured speeds, the best of several samples, a second.

    Attributes
    ----------
    gemm_flop_per_s : of the product of many rows with the model's own largest matrix, in the model's dtype.
    weights_bytes_per_s : of weights read from memory, by products of one row with that matrix of each layer in turn.
    memcpy_bytes_per_s : copied in main memory, by torch with all its threads.
    upload_bytes_per_s : from main memory, pinned, to the device; None where both are one.
    """

    gemm_flop_per_s: float
    weights_bytes_per_s: float
    memcpy_bytes_per_s: float
    upload_bytes_per_s: float | None

    @property
    def reading(self) -> float:
        """Bytes of weights a second, by the better of two ways: a copy reads as many as it writes."""
        return max(self.weights_bytes_per_s, 0.0 if self.upload_bytes_per_s else self.memcpy_bytes_per_s)

    @property
    def loading(self) -> float:
        """Bytes of records a second: each is copied once, and uploaded where the device has memory of its own."""
        return min(filter(None, (self.memcpy_bytes_per_s, self.upload_bytes_per_s)))

    def best(self, other: Machine) -> Machine:
        """The higher speed of each: a busy moment of the machine is not its limit."""
        return Machine(
            max(self.gemm_flop_per_s, other.gemm_flop_per_s),
            max(self.weights_bytes_per_s, other.weights_bytes_per_s),
            max(self.memcpy_bytes_per_s, other.memcpy_bytes_per_s),
            max(filter(None, (self.upload_bytes_per_s, other.upload_bytes_per_s)), default=None),
        )

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def synchronize(device: str) -> None:
    """Wait until the device has done all that it was given."""
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)


@torch.inference_mode()
def measure_machine(decoder: Decoder) -> Machine:
    """Measure the speeds on this model's device with its own weights."""
    device = decoder.device
    largest = [_largest(layer) for layer in decoder.layers]
    return Machine(
        gemm_flop_per_s=_gemm(largest[0], device),
        weights_bytes_per_s=_streamed(largest, device),
        memcpy_bytes_per_s=_copied("cpu", "cpu"),
        upload_bytes_per_s=_copied("cpu", device) if device.startswith("cuda") else None,
    )


def _largest(layer: torch.nn.Module) -> torch.nn.Linear:
    """The layer's largest product: one of the MLP's, where that is no stack of experts."""
    products = [linear for linear in layer.modules() if isinstance(linear, torch.nn.Linear)]
    return max(products, key=_numbers)


def _numbers(product: torch.nn.Linear) -> int:
    return product.in_features * product.out_features


def _gemm(product: torch.nn.Linear, device: str) -> float:
    rows = _ROWS.get(device.split(":")[0], _ROWS["cpu"])
    many = torch.full((1, rows, product.in_features), 0.5, dtype=product.weight.dtype, device=device)
    return 2 * rows * _numbers(product) / _fastest(lambda: product(many), device)


def _streamed(products: Sequence[torch.nn.Linear], device: str) -> float:
    size = sum(_numbers(linear) * linear.weight.element_size() for linear in products)
    row = {
        linear.in_features: torch.full((1, 1, linear.in_features), 0.5, dtype=linear.weight.dtype, device=device)
        for linear in products
    }
    return size / _fastest(lambda: [linear(row[linear.in_features]) for linear in products], device)


def copied_bytes_per_s() -> float:
    """Measure how many bytes a second torch copies in main memory."""
    return _copied("cpu", "cpu")


def _copied(source: str, target: str) -> float:
    source_bytes = torch.zeros(_COPIED, dtype=torch.uint8, device=source)
    if source != target:
        source_bytes = source_bytes.pin_memory()
    other = torch.ones(_COPIED, dtype=torch.uint8, device=target)
    return _COPIED / _fastest(lambda: other.copy_(source_bytes), target)


def _fastest(work: Callable[[], object], device: str) -> float:
    """Seconds of one run, the least of several samples after one that is not counted."""
    often = max(1, int(_LEAST_SECONDS / max(_seconds(work, device, 1), 1e-9)))
    return min(_seconds(work, device, often) for _ in range(_TIMES)) / often


def _seconds(work: Callable[[], object], device: str, often: int) -> float:
    synchronize(device)
    started = time.perf_counter()
    for _ in range(often):
        work()
    synchronize(device)
    return time.perf_counter() - started


@dataclass(frozen=True, slots=True)
class Limit:
    """Milliseconds below which this machine cannot answer, by what the mode computes and by what it loads."""

    compute_ms: float
    load_ms: float

    @property
    def ms(self) -> float:
        """Both run beside each other at best."""
        return max(self.compute_ms, self.load_ms)


def limit_of(
    machine: Machine, model: Architecture, weight_bytes: int, passes: Sequence[Work], bytes_read: int
) -> Limit:
    """The roofline of a prompt.

    Parameters
    ----------
    weights_bytes_per_s : of one number.
    bytes_read : of records.
    """
    seconds = sum(
        _layer_seconds(machine, model, weight_bytes, layer, work) for rows in passes for layer, work in enumerate(rows)
    )
    seconds += max(2 * model.lm_head / machine.gemm_flop_per_s, weight_bytes * model.lm_head / machine.reading)
    return Limit(seconds * 1e3, bytes_read / machine.loading * 1e3)


def _layer_seconds(machine: Machine, model: Architecture, weight_bytes: int, layer: int, work: LayerWork) -> float:
    """The slower of its products and of the reading of its weights."""
    weights = model.layers[layer]
    touched = min(weights.held, weights.used * work.rows) * weight_bytes
    return max(layer_flops(model, layer, work) / machine.gemm_flop_per_s, touched / machine.reading)
