"""A model's program: which operation follows which, on what memory, and where its threads wait."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from kvtool.core.kernels.decode_ir import Code, Heads, multiply_name
from kvtool.core.kernels.decode_program import Operation
from kvtool.core.model.spec import LayerSpec, ModelSpec, NormSpec
from kvtool.core.model.stepping.kept import Linear

_LINE = 16  # floats of a cache line: what different threads write lies in lines of their own


@dataclass(frozen=True, slots=True)
class Place:
    """Some float32 numbers at an address.

    Attributes
    ----------
    stride : bytes to those of the next thread, 0 if all share them.
    pitch : numbers to those of the next sequence, 0 if all share them.
    """

    address: int
    stride: int = 0
    pitch: int = 0

    def __add__(self, numbers: int) -> Place:
        return replace(self, address=self.address + 4 * numbers)

    def of(self, sequence: int) -> Place:
        """Those of one of the sequences."""
        return self + sequence * self.pitch


class Buffers:
    """The memory of tokens, one of each sequence, on their way through a model, for at most `threads` threads.

    Attributes
    ----------
    embedded : float32 `[sequences, hidden]`: where a step begins. `found`: `[sequences, vocabulary]`, where it ends.
    hidden : the residual stream. `normed`: what a norm made of it, each thread's own.
    heads : queries, keys and values as they come out of their products. `head_norms`: normed, each thread's own.
    queries : rotated and scaled. `attended`: what attention gives.
    gate, up : of the MLP. `output`: of attention or MLP.
    """

    def __init__(self, spec: ModelSpec[Linear], threads: int, sequences: int) -> None:
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


def code_of(spec: ModelSpec[Linear], cache: str) -> Code:
    """What a model's code is made for; `cache`: "float32" or "bfloat16"."""
    linears = [spec.head, *(linear for layer in spec.layers for linear in layer.linears)]
    rotaries = frozenset(layer.rotary for layer in spec.layers)
    normed = any(layer.normed_by_head for layer in spec.layers)
    heads = Heads(spec.head_dim, spec.heads // spec.kv_heads, normed, cache)
    return Code(heads, frozenset(linear.matrix.kind for linear in linears), rotaries, spec.activation)


def build_program(spec: ModelSpec[Linear], buffers: Buffers, height: int) -> list[Operation]:
    """Build the program from the embeddings in `hidden` to `logits`.

    Keys, values and the memory of attention change with the caches: their addresses are 0 here.

    Parameters
    ----------
    height : how many sequences a row of weights is multiplied with at a time.
    """
    layout = _Layout(spec, buffers, height)
    for layer in spec.layers:
        layout.attention(layer)
        layout.mlp(layer)
    layout.logits()
    return layout.program


class _Layout:
    """A program that grows at its end."""

    def __init__(self, spec: ModelSpec[Linear], buffers: Buffers, height: int) -> None:
        self._spec, self._buffers, self._height = spec, buffers, height
        self.program: list[Operation] = []

    def attention(self, layer: LayerSpec[Linear]) -> None:
        """Norm, queries, keys and values, attention, output."""
        buffers = self._buffers
        entry, out = self._entry(layer.before[0]), buffers.heads
        for linear in (layer.query, layer.key, layer.value):
            self._product(linear, entry, out)
            out += linear.rows
        self._wait()
        self._place_heads(layer)
        self._wait()
        self._attend()
        self._product(layer.out, buffers.attended, buffers.output)
        self._add(layer, layer.after[0])

    def mlp(self, layer: LayerSpec[Linear]) -> None:
        """Norm, gate and up, down."""
        buffers, mlp = self._buffers, layer.gated_mlp()
        entry = self._entry(layer.before[1])
        self._product(mlp.gate, entry, buffers.gate)
        self._product(mlp.up, entry, buffers.up)
        for one in self._sequences:
            x, y = buffers.up.of(one), buffers.gate.of(one)
            self._append("gate", {"x": x.address, "y": y.address, "count": mlp.gate.rows})
        self._wait()
        self._product(mlp.down, buffers.gate, buffers.output)
        self._add(layer, layer.after[1])

    def logits(self) -> None:
        """The last norm and the LM head."""
        spec, buffers = self._spec, self._buffers
        self._norm(spec.norm, buffers.hidden, buffers.normed)
        self._product(spec.head, buffers.normed, buffers.logits)
        if spec.logits != 1.0:
            self._blend(buffers.logits, buffers.logits, spec.head.rows, spec.logits, 0.0)

    def _entry(self, norm: NormSpec | None) -> Place:
        """Where attention or an MLP finds its input."""
        if norm is None:
            return self._buffers.hidden
        self._norm(norm, self._buffers.hidden, self._buffers.normed)
        return self._buffers.normed

    @property
    def _sequences(self) -> range:
        return range(self._buffers.sequences)

    def _place_heads(self, layer: LayerSpec[Linear]) -> None:
        """Queries and keys, normed and rotated; keys and values into the caches."""
        buffers, norms = self._buffers, layer.head_norms
        queries, keys = buffers.heads, buffers.heads + layer.query.rows
        values = keys + layer.key.rows
        if norms is not None and not layer.normed_by_head:
            own = buffers.head_norms
            self._norm(norms[0], queries, own)
            self._norm(norms[1], keys, own + layer.query.rows)
            queries, keys = own, own + layer.query.rows
        for one in self._sequences:
            self._heads(layer, queries.of(one), keys.of(one), values.of(one), buffers.queries.of(one))

    def _heads(self, layer: LayerSpec[Linear], queries: Place, keys: Place, values: Place, out: Place) -> None:
        """Those of one sequence."""
        spec, norms = self._spec, layer.head_norms
        weights = [norm.weight.data_ptr() if layer.normed_by_head else 0 for norm in norms or ()] or [0, 0]
        epsilon = norms[0].epsilon if norms is not None else 0.0
        query = {
            **{"x": queries.address, "x_stride": queries.stride, "weight": weights[0], "epsilon": epsilon},
            **{"y": out.address, "heads": spec.heads, "scale": layer.scale, **_ANGLES},
        }
        key = {
            **{"x": keys.address, "x_stride": keys.stride, "weight": weights[1], "epsilon": epsilon},
            **{"values": values.address, "heads": spec.kv_heads, "row": 0, **_CACHE, **_ANGLES},
        }
        self._append("queries", query, f"queries_{layer.rotary}")
        self._append("keys", key, f"keys_{layer.rotary}")

    def _attend(self) -> None:
        spec, buffers = self._spec, self._buffers
        for one in self._sequences:
            x = buffers.queries.of(one)
            self._append("attend", {"x": x.address, "heads": spec.kv_heads, **_PARTS, **_CACHE})
        self._wait()
        for one in self._sequences:
            y = buffers.attended.of(one)
            self._append("combine", {"y": y.address, "heads": spec.heads, **_PARTS})
        self._wait()

    def _norm(self, norm: NormSpec, inputs: Place, outputs: Place) -> None:
        for one in self._sequences:
            x, y = inputs.of(one), outputs.of(one)
            values = {
                **{"x": x.address, "x_stride": x.stride, "y": y.address, "y_stride": y.stride},
                **{"weight": norm.weight.data_ptr(), "count": norm.weight.numel(), "epsilon": norm.epsilon},
            }
            self._append("norm", values)

    def _product(self, linear: Linear, x: Place, y: Place) -> None:
        """Products into the numbers from `y` on, and their bias."""
        matrix = linear.matrix
        out = y + -linear.first  # the code counts from the matrix's first row
        values = {
            **{name: getattr(matrix, name).data_ptr() for name in ("data", "scales", "group_mins")},
            **{"x": x.address, "x_stride": x.stride, "y": out.address},
            **{"first": linear.first, "rows": linear.rows, "columns": matrix.columns},
            **{"inputs": self._buffers.sequences, "x_pitch": x.pitch, "y_pitch": y.pitch},
        }
        self._append("product", values, multiply_name(matrix.kind, self._height))
        if linear.bias is not None:
            self._blend(Place(linear.bias.data_ptr()), y, linear.rows, 1.0, 1.0)

    def _blend(self, inputs: Place, outputs: Place, count: int, a: float, b: float) -> None:
        for one in self._sequences:
            x, y = inputs.of(one), outputs.of(one)
            values = {"x": x.address, "x_stride": x.stride, "y": y.address, "count": count, "a": a, "b": b}
            self._append("axpby", values)

    def _add(self, layer: LayerSpec[Linear], norm: NormSpec | None) -> None:
        """The output of attention or an MLP, onto the residual stream."""
        buffers, source = self._buffers, self._buffers.output
        if norm is not None:
            self._wait()
            source = buffers.normed
            self._norm(norm, buffers.output, source)
        self._blend(source, buffers.hidden, self._spec.hidden, 1.0, layer.residual)
        self._wait()

    def _append(self, kind: str, values: Mapping[str, int | float], code: str = "") -> None:
        self.program.append(Operation(code or kind, kind, values))

    def _wait(self) -> None:
        """All threads wait for each other behind what stands last."""
        self.program[-1] = replace(self.program[-1], barrier=True)


_PARTS: Mapping[str, int] = {"parts": 0, "blocks": 0, "seen": 0}
_ANGLES: Mapping[str, int] = {"cos": 0, "sin": 0}
_CACHE: Mapping[str, int] = {"key_cache": 0, "value_cache": 0, "capacity": 0}
