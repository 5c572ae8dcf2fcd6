"""FLOPs of a prompt, speeds of this machine, and the roofline that they make."""

from __future__ import annotations

import importlib.metadata
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch

from kvtool.core.common.machine import FEATURES, cores, cpu_features, cpu_name, is_fast

if TYPE_CHECKING:
    from kvtool.core.fusion.engine import Fused
    from kvtool.core.fusion.plan import Plan
    from kvtool.core.fusion.selectors.base import Selector
    from kvtool.core.model.decoder import Decoder


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """Numbers in the matrices of one decoder layer.

    Attributes
    ----------
    used : those that one row is multiplied with; fewer than `held` in a mixture of experts.
    """

    used: int
    held: int


@dataclass(frozen=True, slots=True)
class Architecture:
    """The sizes of a model that its FLOPs follow from.

    Attributes
    ----------
    head_channels : query heads * head_dim; if keys are wider than values, or layers differ, their mean.
    lm_head : numbers in the LM head.
    windows : the most keys that a row of each layer sees; None: all before it.
    """

    layers: tuple[LayerWeights, ...]
    head_channels: int
    lm_head: int
    windows: Windows = ()

    @classmethod
    def of(cls, decoder: Decoder) -> Architecture:
        """Read off a model's own modules. Matrices are linear layers, stacks of matrices are experts."""
        share = _expert_share(decoder.config)
        widths = [shape.attended + shape.value_dim for shape in decoder.shapes]
        return cls(
            layers=tuple(_weights(layer, share) for layer in decoder.layers),
            head_channels=decoder.config.num_attention_heads * sum(widths) // (2 * len(decoder.shapes)),
            lm_head=decoder.model.get_output_embeddings().weight.numel(),
            windows=windows_of(decoder),
        )


_CHOSEN = ("num_experts_per_tok", "top_k_experts")
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")


def _expert_share(config: Any) -> float:
    chosen = next(filter(None, (getattr(config, name, None) for name in _CHOSEN)), None)
    experts = next(filter(None, (getattr(config, name, None) for name in _EXPERTS)), None)
    return chosen / experts if chosen and experts else 1.0


def _weights(layer: Any, share: float) -> LayerWeights:
    matrices = [weight for weight in layer.parameters() if weight.ndim >= 2]
    dense = sum(weight.numel() for weight in matrices if weight.ndim == 2)
    experts = sum(weight.numel() for weight in matrices if weight.ndim > 2)
    return LayerWeights(dense + round(experts * share), dense + experts)


@dataclass(frozen=True, slots=True)
class LayerWork:
    """Rows that a layer computes in one pass, and the keys that these rows see, added up."""

    rows: int
    keys: int


Windows = tuple[int | None, ...]  # of layers that keep something; later ones compute one row, which is left out
Work = tuple[LayerWork, ...]  # by layer, the first ones; later layers are not computed


def keys_seen(positions: Sequence[int], window: int | None = None) -> int:
    """Keys that the rows at these prompt positions see, causally and through a window."""
    if window is None:
        return sum(positions) + len(positions)
    return sum(min(position + 1, window) for position in positions)


def windows_of(decoder: Decoder) -> Windows:
    """Return how many positions a row sees at each layer that keeps keys and values; None: all before it."""
    return tuple(kind.window for kind in decoder.kinds if kind.source is None)


def full_work(length: int, windows: Windows) -> Work:
    """Plain prefill of a prompt."""
    return tuple(LayerWork(length, keys_seen(range(length), window)) for window in windows)


def fused_work(fused: Fused, selector: Selector, windows: Windows) -> list[Work]:
    """The passes of a fused prompt: the question's own where the mode asks for one, and the main one.

    Rows are those counted by the engine, layer by layer. Where a mode drops rows from one layer to the next, those of
    the layers between the first and the last choice are taken to see as many keys as the reusable rows on average.
    """
    ranking = selector.ranking_layers(fused.plan, len(fused.tokens.rows))
    fresh = _positions(~fused.plan.mask("hit", "exact"))
    layers = zip(fused.tokens.rows, windows, strict=True)
    main = tuple(_layer_work(rows, fresh, fused, window) for rows, window in layers)
    if not ranking or not selector.uses_cache:
        return [main]
    # It ends with the last layer's queries and keys, which are left out here; a hole is computed to the end.
    whole = len(fused.tokens.rows) if bool(fused.plan.mask("miss").any()) else ranking.stop - 1
    return [tuple(LayerWork(len(fresh), keys_seen(fresh, window)) for window in windows[:whole]), main]


def _layer_work(rows: int, fresh: list[int], fused: Fused, window: int | None) -> LayerWork:
    again = rows - len(fresh)
    last = _positions(fused.recomputed)
    among = last if again == len(last) else _reusable(fused.plan)
    share = again / len(among) if among else 0.0
    return LayerWork(rows, keys_seen(fresh, window) + round(share * keys_seen(among, window)))


def _reusable(plan: Plan) -> list[int]:
    """Positions of cached rows that are not what full prefill gives."""
    return _positions(plan.mask("hit"))


def _positions(mask: Any) -> list[int]:
    found: list[int] = mask.nonzero()[:, 0].tolist()
    return found


def layer_flops(model: Architecture, layer: int, work: LayerWork) -> int:
    """Count the FLOPs of one layer: linear layers, Q @ Kᵀ and P @ V; two for a multiplication with its addition."""
    return 2 * model.layers[layer].used * work.rows + 4 * model.head_channels * work.keys


def flops(model: Architecture, passes: Sequence[Work]) -> int:
    """Count the FLOPs of all passes of a prompt, and of one row of the LM head."""
    linear = sum(layer_flops(model, layer, work) for one in passes for layer, work in enumerate(one))
    return linear + 2 * model.lm_head


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
        """Return the larger one: both overlap at best."""
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


# What a reader compares CPUs by: how wide their products are, and in which formats. As `cpu_features` spells them.
_TELLING = (
    *("sse42", "avx", "avx2", "fma", "avxvnni", "avxneconvert", "avx512f", "avx512vnni", "avx512bf16", "avx512fp16"),
    *("amxint8", "amxbf16", "neon", "asimd", "asimdhp", "asimddp", "i8mm", "bf16", "sve", "sve2", "sme"),
)
# Variables that make a machine do less than it can, or other than by default.
_HOLDING = (
    *("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY", "MKL_ENABLE_INSTRUCTIONS", FEATURES),
    *("KVTOOL_ATTENTION", "KVTOOL_STEPPER"),
)


@dataclass(frozen=True, slots=True)
class Host:
    """The machine that figures were measured on.

    Attributes
    ----------
    cpu : its name, as its maker gives it.
    cpu_features : those of its features that figures depend on.
    torch_kernels : the instruction set of torch's own kernels.
    fast_bfloat16 : whether products in it are faster than in float32.
    threads : of torch.
    held_to : variables that restrict the machine's instruction sets, with their values.
    accelerator : the first CUDA device's name, torch's CUDA version, and triton's version; "" without a device.
    """

    cpu: str
    cpu_features: tuple[str, ...]
    torch: str
    torch_kernels: str
    fast_bfloat16: bool
    threads: int
    cores: int
    held_to: Mapping[str, str]
    accelerator: str = ""

    @classmethod
    def here(cls, threads: int | None = None) -> Host:
        """This machine; `threads`: of what is measured, where these are not torch's own number."""
        found = cpu_features()
        return cls(
            cpu=cpu_name(),
            cpu_features=tuple(name for name in _TELLING if name in found),
            torch=torch.__version__,
            torch_kernels=torch.backends.cpu.get_cpu_capability(),
            fast_bfloat16=is_fast("bfloat16"),
            threads=threads or torch.get_num_threads(),
            cores=cores(),
            held_to={name: os.environ[name] for name in _HOLDING if os.environ.get(name)},
            accelerator=_gpu() if torch.cuda.is_available() else "",
        )

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def line(self) -> str:
        """The machine in words."""
        formats = "bfloat16 and float32" if self.fast_bfloat16 else "float32 only"
        held = " ".join(f"{name}={value}" for name, value in self.held_to.items())
        return (
            f"{self.cpu}, {self.threads} of {self.cores} cores, fast in {formats}; torch {self.torch} with its "
            f"{self.torch_kernels} kernels{f'; held back by {held}' if held else ''} ({' '.join(self.cpu_features)})"
            f"{f'; {self.accelerator}' if self.accelerator else ''}"
        )


def _gpu() -> str:
    try:
        triton = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        triton = "none"
    return f"{torch.cuda.get_device_name()}, CUDA {torch.version.cuda}, triton {triton}"
