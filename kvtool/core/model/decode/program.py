"""Decode program of a model: its weights, its operations, the memory that they work on, and the caches of the step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors import safe_open

from kvtool.core.checkpoint.files import tensor_table, weight_files
from kvtool.core.errors import ModelError
from kvtool.core.kernels.decode_ir import BLOCK, HEADROOM, INT8, Code, Heads, Operation, encode, multiply_name, word
from kvtool.core.kernels.linear.modules import PackedLinear, ReorderedLinear
from kvtool.core.kernels.linear.qtensor import QuantizedTensor, dense
from kvtool.core.model.decoder import Decoder
from kvtool.core.model.prompt_cache import PromptCache
from kvtool.core.model.rope import Rotary
from kvtool.core.model.spec import LayerSpec, ModelSpec, NormSpec, Projection, UnsupportedArchitecture
from kvtool.core.native.jit import Function

I64 = npt.NDArray[np.int64]
_PROBED = 8  # rows of a weight that are compared with the file's
_LINE = 16  # floats of a cache line: different threads write to different lines
_POSITIONS = 64  # whose cos and sin are computed together
_MOST_TABLES = 64  # of so many positions each


# ---- weights: each product of a model's spec as a matrix, packed, plain, or mapped from its file -------------------


@dataclass(frozen=True, slots=True, eq=False)
class Linear:
    """Rows `first` … of a matrix, a bias float32 `[rows]`, and the product that they take (`decode_ir.multiply`)."""

    matrix: QuantizedTensor
    first: int
    rows: int
    bias: torch.Tensor | None
    product: str


Weights = Mapping[Projection, Linear]


def decoding_weights(decoder: Decoder) -> Weights:
    """Raises UnsupportedArchitecture: a step has no operation for something that the model computes."""
    if decoder.device != "cpu" or decoder.dtype not in (torch.float32, torch.bfloat16):
        raise UnsupportedArchitecture(f"{decoder.dtype} on {decoder.device}")
    spec = decoder.spec
    spec.check_served()
    if spec.cap is not None or not all(layer.params.is_unshaped for layer in spec.layers):
        raise UnsupportedArchitecture("capped scores or logits, or sinks")
    for layer in spec.layers:
        layer.gated_mlp()
    for norm in (spec.norm, *(norm for layer in spec.layers for norm in layer.norms)):
        if not norm.is_rms:
            raise UnsupportedArchitecture(f"{type(norm.module).__name__} is no root mean square norm")
    source = WeightSource(decoder)
    return {projection: source.linear(projection) for projection in spec.projections}


class WeightSource:
    """The matrices of a model's linear layers. Weights of a bfloat16 checkpoint that is computed in float32, or that
    oneDNN has reordered, are mapped from the file: half the bytes, and none of the process's memory."""

    def __init__(self, decoder: Decoder) -> None:
        self._files = _bfloat16_files(decoder.loaded.files)
        self._open: dict[Path, Any] = {}
        self._names = {id(module): name for name, module in decoder.model.named_modules()} if self._files else {}
        head, embedding = decoder.model.get_output_embeddings(), decoder.model.get_input_embeddings()
        if head is not None and head.weight is embedding.weight:
            self._names[id(head)] = self._names.get(id(embedding), "")

    def linear(self, product: Projection) -> Linear:
        bias = getattr(product.module, "bias", None)
        if bias is not None:
            bias = bias.detach()[product.first : product.first + product.rows].float().contiguous()
        matrix = self.matrix(product.module)
        kind = f"{matrix.kind}{INT8}" if getattr(product.module, "int8_row", False) else matrix.kind
        return Linear(matrix, product.first, product.rows, bias, kind)

    def matrix(self, module: Any) -> QuantizedTensor:
        """Raises UnsupportedArchitecture: the weight is kept in a layout that only other code reads."""
        if isinstance(module, PackedLinear):
            return module.matrix
        if type(module) not in (torch.nn.Linear, ReorderedLinear):
            raise UnsupportedArchitecture(f"{type(module).__name__} is no plain linear layer")
        weight = module.weight
        plain = weight.device.type == "cpu" and weight.dtype in (torch.float32, torch.bfloat16)
        if plain and weight.dtype == torch.bfloat16:
            return dense(weight)
        mapped = self._mapped(module)
        if mapped is not None and _is_same(weight, mapped):
            return dense(mapped)
        if plain:
            return dense(weight)
        raise UnsupportedArchitecture("its weights are in oneDNN's own layout, and the checkpoint has other ones")

    def _mapped(self, module: Any) -> torch.Tensor | None:
        name = f"{self._names.get(id(module), '')}.weight"
        path = self._files.get(name)
        if path is None:
            return None
        if path not in self._open:
            self._open[path] = safe_open(path, framework="pt", device="cpu")
        weight: torch.Tensor = self._open[path].get_tensor(name)
        return weight


def _bfloat16_files(files: Any) -> dict[str, Path]:
    if files is None or not files.folder.name:
        return {}
    try:
        tables = {path: tensor_table(path) for path in weight_files(files.folder)}
    except (ModelError, OSError):
        return {}
    return {name: path for path, table in tables.items() for name, entry in table.items() if entry["dtype"] == "BF16"}


def _is_same(weight: torch.Tensor, mapped: torch.Tensor) -> bool:
    if weight.shape != mapped.shape or not mapped.is_contiguous():
        return False
    if weight.device.type != "cpu":
        return True  # the first step is compared in any case
    rows = torch.linspace(0, len(weight) - 1, _PROBED, dtype=torch.float32).long()
    return torch.equal(weight[rows].float(), mapped[rows].float())


# ---- operations and memory ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Place:
    address: int
    stride: int = 0  # bytes to those of the next thread, 0 if all share them
    pitch: int = 0  # numbers to those of the next sequence, 0 if all share them

    def __add__(self, numbers: int) -> Place:
        return replace(self, address=self.address + 4 * numbers)

    def of(self, sequence: int) -> Place:
        return self + sequence * self.pitch


class Buffers:
    """Activations of one token of each sequence, for at most `threads` threads. A step begins in `embedded`, float32
    `[sequences, hidden]`, and ends in `found`, `[sequences, vocabulary]`. `hidden` is the residual stream, `output`
    that of attention or MLP."""

    def __init__(self, spec: ModelSpec, threads: int, sequences: int) -> None:
        self._tensors: list[torch.Tensor] = []
        self._threads, self.sequences = threads, sequences
        queries = spec.heads * spec.head_dim
        inner = max(layer.gated_mlp().gate.rows for layer in spec.layers)
        self.hidden = self._shared(spec.hidden)
        self.embedded = self._tensors[-1][:, : spec.hidden]
        self.logits = self._shared(spec.head.rows)
        self.found = self._tensors[-1][:, : spec.head.rows]
        self.normed = self._own(spec.hidden)
        self.heads = self._shared(queries + 2 * spec.kv_heads * spec.head_dim)
        self.head_norms = self._own(queries + spec.kv_heads * spec.head_dim)
        self.queries = self._shared(queries)
        self.attended = self._shared(queries)
        self.gate = self._shared(inner)
        self.up = self._shared(inner)
        self.output = self._shared(spec.hidden)

    def _shared(self, count: int) -> Place:
        pitch = -(-count // _LINE) * _LINE
        self._tensors.append(torch.zeros(self.sequences, pitch, dtype=torch.float32))
        return Place(self._tensors[-1].data_ptr(), 0, pitch)

    def _own(self, count: int) -> Place:
        pitch = -(-count // _LINE) * _LINE
        self._tensors.append(torch.zeros(self._threads, self.sequences, pitch, dtype=torch.float32))
        return Place(self._tensors[-1].data_ptr(), 4 * self.sequences * pitch, pitch)


def code_of(spec: ModelSpec, weights: Weights, cache: str) -> Code:
    rotaries = frozenset(layer.rotary for layer in spec.layers)
    normed = any(layer.normed_by_head for layer in spec.layers)
    heads = Heads(spec.head_dim, spec.heads // spec.kv_heads, normed, cache)
    return Code(heads, frozenset(linear.product for linear in weights.values()), rotaries, spec.activation)


def build_program(spec: ModelSpec, weights: Weights, buffers: Buffers, height: int) -> list[Operation]:
    """Build the program from the embeddings in `hidden` to `logits`. Addresses that change with the caches are 0 here.
    `height`: how many sequences a row of weights is multiplied with at a time."""
    layout = _Layout(spec, weights, buffers, height)
    for layer in spec.layers:
        layout.attention(layer)
        layout.mlp(layer)
    layout.logits()
    return layout.program


class _Layout:
    def __init__(self, spec: ModelSpec, weights: Weights, buffers: Buffers, height: int) -> None:
        self._spec, self._weights, self._buffers, self._height = spec, weights, buffers, height
        self.program: list[Operation] = []

    def attention(self, layer: LayerSpec) -> None:
        buffers = self._buffers
        entry, out = self._entry(layer.before[0]), buffers.heads
        for projection in (layer.query, layer.key, layer.value):
            self._product(projection, entry, out)
            out += projection.rows
        self._wait()
        self._place_heads(layer)
        self._wait()
        self._attend()
        self._product(layer.out, buffers.attended, buffers.output)
        self._add(layer, layer.after[0])

    def mlp(self, layer: LayerSpec) -> None:
        buffers, mlp = self._buffers, layer.gated_mlp()
        entry = self._entry(layer.before[1])
        self._product(mlp.gate, entry, buffers.gate)
        self._product(mlp.up, entry, buffers.up)
        for sequence in self._sequences:
            x, y = buffers.up.of(sequence), buffers.gate.of(sequence)
            self._append("gate", {"x": x.address, "y": y.address, "count": mlp.gate.rows})
        self._wait()
        self._product(mlp.down, buffers.gate, buffers.output)
        self._add(layer, layer.after[1])

    def logits(self) -> None:
        spec, buffers = self._spec, self._buffers
        self._norm(spec.norm, buffers.hidden, buffers.normed)
        self._product(spec.head, buffers.normed, buffers.logits)
        if spec.logits != 1.0:
            self._axpby(buffers.logits, buffers.logits, spec.head.rows, spec.logits, 0.0)

    def _entry(self, norm: NormSpec | None) -> Place:
        if norm is None:
            return self._buffers.hidden
        self._norm(norm, self._buffers.hidden, self._buffers.normed)
        return self._buffers.normed

    @property
    def _sequences(self) -> range:
        return range(self._buffers.sequences)

    def _place_heads(self, layer: LayerSpec) -> None:
        buffers, norms = self._buffers, layer.head_norms
        queries, keys = buffers.heads, buffers.heads + layer.query.rows
        values = keys + layer.key.rows
        if norms is not None and not layer.normed_by_head:
            head_buffer = buffers.head_norms
            self._norm(norms[0], queries, head_buffer)
            self._norm(norms[1], keys, head_buffer + layer.query.rows)
            queries, keys = head_buffer, head_buffer + layer.query.rows
        for sequence in self._sequences:
            self._heads(
                layer, queries.of(sequence), keys.of(sequence), values.of(sequence), buffers.queries.of(sequence)
            )

    def _heads(self, layer: LayerSpec, queries: Place, keys: Place, values: Place, out: Place) -> None:
        spec, norms = self._spec, layer.head_norms
        weights = [norm.weight.data_ptr() if layer.normed_by_head else 0 for norm in norms or ()] or [0, 0]
        epsilon = norms[0].epsilon if norms is not None else 0.0
        query = {
            **{"x": queries.address, "x_stride": queries.stride, "weight": weights[0], "epsilon": epsilon},
            **{"y": out.address, "heads": spec.heads, "scale": layer.params.scale, **_ANGLES},
        }
        key = {
            **{"x": keys.address, "x_stride": keys.stride, "weight": weights[1], "epsilon": epsilon},
            **{"values": values.address, "heads": spec.kv_heads, "row": 0, **_CACHE, **_ANGLES},
        }
        self._append("queries", query, f"queries_{layer.rotary}")
        self._append("keys", key, f"keys_{layer.rotary}")

    def _attend(self) -> None:
        spec, buffers = self._spec, self._buffers
        for sequence in self._sequences:
            x = buffers.queries.of(sequence)
            self._append("attend", {"x": x.address, "heads": spec.kv_heads, **_PARTS, **_CACHE})
        self._wait()
        for sequence in self._sequences:
            y = buffers.attended.of(sequence)
            self._append("combine", {"y": y.address, "heads": spec.heads, **_PARTS})
        self._wait()

    def _norm(self, norm: NormSpec, inputs: Place, outputs: Place) -> None:
        for sequence in self._sequences:
            x, y = inputs.of(sequence), outputs.of(sequence)
            values = {
                **{"x": x.address, "x_stride": x.stride, "y": y.address, "y_stride": y.stride},
                **{"weight": norm.weight.data_ptr(), "count": norm.weight.numel(), "epsilon": norm.epsilon},
            }
            self._append("norm", values)

    def _product(self, projection: Projection, x: Place, y: Place) -> None:
        linear = self._weights[projection]
        matrix = linear.matrix
        out = y + -linear.first  # the code counts from the matrix's first row
        values = {
            **{name: getattr(matrix, name).data_ptr() for name in ("data", "scales", "group_mins")},
            **{"x": x.address, "x_stride": x.stride, "y": out.address},
            **{"first": linear.first, "rows": linear.rows, "columns": matrix.columns},
            **{"inputs": self._buffers.sequences, "x_pitch": x.pitch, "y_pitch": y.pitch},
        }
        self._append("product", values, multiply_name(linear.product, self._height))
        if linear.bias is not None:
            self._axpby(Place(linear.bias.data_ptr()), y, linear.rows, 1.0, 1.0)

    def _axpby(self, inputs: Place, outputs: Place, count: int, a: float, b: float) -> None:
        for sequence in self._sequences:
            x, y = inputs.of(sequence), outputs.of(sequence)
            values = {"x": x.address, "x_stride": x.stride, "y": y.address, "count": count, "a": a, "b": b}
            self._append("axpby", values)

    def _add(self, layer: LayerSpec, norm: NormSpec | None) -> None:
        buffers, source = self._buffers, self._buffers.output
        if norm is not None:
            self._wait()
            source = buffers.normed
            self._norm(norm, buffers.output, source)
        self._axpby(source, buffers.hidden, self._spec.hidden, 1.0, layer.residual)
        self._wait()

    def _append(self, kind: str, values: Mapping[str, int | float], code: str = "") -> None:
        self.program.append(Operation(code or kind, kind, values))

    def _wait(self) -> None:
        self.program[-1] = replace(self.program[-1], barrier=True)


_PARTS: Mapping[str, int] = {"parts": 0, "blocks": 0, "seen": 0}
_ANGLES: Mapping[str, int] = {"cos": 0, "sin": 0}
_CACHE: Mapping[str, int] = {"key_cache": 0, "value_cache": 0, "capacity": 0}


class Step:
    """Computes a token of each of `sequences` sequences; `height` of them take a row of weights at a time."""

    def __init__(
        self,
        spec: ModelSpec,
        weights: Weights,
        functions: Mapping[str, Function],
        height: int,
        threads: int,
        sequences: int,
    ) -> None:
        self.buffers = Buffers(spec, threads, sequences)
        operations = build_program(spec, weights, self.buffers, height)
        self.program = encode(operations, functions)
        kinds = sorted({operation.kind for operation in operations})
        self.uses = {kind: [i for i, operation in enumerate(operations) if operation.kind == kind] for kind in kinds}
        self._spec = spec
        self._parts = torch.empty(0, dtype=torch.float32)

    def bind(self, caches: Sequence[PromptCache], filled: Sequence[int], windows: Sequence[int | None]) -> None:
        """Write the addresses of keys, values and attention's sums. Each sequence's token sees the last rows of
        `filled`, its own included, that each layer's window takes; None: all."""
        lengths = np.array(filled)
        capacities = np.array([cache.buffers[0].keys.shape[2] for cache in caches])
        seen = np.array([np.minimum(lengths, window or lengths) for window in windows])
        keys, values = (_addresses(caches, side) for side in ("keys", "values"))
        row = self._spec.head_dim * caches[0].buffers[0].keys.itemsize  # a window begins so many rows further on
        for kind, before in (("keys", np.zeros_like(seen)), ("attend", (lengths - seen) * row)):
            self._write(kind, "key_cache", keys + before)
            self._write(kind, "value_cache", values + before)
            self._write(kind, "capacity", capacities)
        self._write("keys", "row", lengths - 1)
        blocks = -(-capacities // BLOCK)
        parts = self._memory(self._spec.heads * blocks * (HEADROOM + self._spec.head_dim))
        for kind in ("attend", "combine"):
            self._write(kind, "seen", seen)
            self._write(kind, "parts", parts)
            self._write(kind, "blocks", blocks)

    def place(self, angles: Sequence[Mapping[str | None, tuple[int, int]]], rotations: Sequence[str | None]) -> None:
        for number, side in enumerate(("cos", "sin")):
            addresses = np.array([[of[rotation][number] for of in angles] for rotation in rotations])
            for operation in ("queries", "keys"):
                self._write(operation, side, addresses)

    def _memory(self, sizes: I64) -> I64:
        if self._parts.numel() < sizes.sum():
            self._parts = torch.empty(int(sizes.sum()), dtype=torch.float32)
        return self._parts.data_ptr() + 4 * (np.cumsum(sizes) - sizes)

    def _write(self, kind: str, field: str, values: npt.NDArray[Any]) -> None:
        shape = len(self._spec.layers), values.shape[-1]
        self.program[self.uses[kind], word(kind, field)] = np.broadcast_to(values, shape).ravel()


def _addresses(caches: Sequence[PromptCache], side: str) -> I64:
    return np.array([[getattr(buffer, side).data_ptr() for buffer in cache.buffers] for cache in caches]).T


class CosSinCache:
    def __init__(self, rotary: Rotary) -> None:
        self._rotary = rotary
        self._table = lru_cache(_MOST_TABLES)(self._computed)

    def _computed(self, start: int) -> dict[str, torch.Tensor]:
        angles = self._rotary.table(torch.arange(start, start + _POSITIONS)).by_name
        return {name: torch.stack([cos_sin.cos[0], cos_sin.sin[0]]).contiguous() for name, cos_sin in angles.items()}

    def at(self, position: int) -> dict[str | None, tuple[int, int]]:
        """Return a position's cos and sin by rotation, as addresses for one step; 0 where nothing is rotated."""
        start = position // _POSITIONS * _POSITIONS
        addresses: dict[str | None, tuple[int, int]] = {None: (0, 0)}
        for name, (cos, sin) in self._table(start).items():
            addresses[name] = cos[position - start].data_ptr(), sin[position - start].data_ptr()
        return addresses
