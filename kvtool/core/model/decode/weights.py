"""Weights of a decoding step: each product of a model's spec as a matrix, packed, plain, or mapped from its file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from kvtool.core.checkpoint.files import tensor_table, weight_files
from kvtool.core.errors import ModelError
from kvtool.core.kernels.linear.modules import PackedLinear
from kvtool.core.kernels.linear.onednn import ReorderedLinear
from kvtool.core.kernels.linear.qtensor import QuantizedTensor, dense
from kvtool.core.model.decoder import Decoder
from kvtool.core.model.spec import Projection, UnsupportedArchitecture

_PROBED = 8  # rows of a weight that are compared with the file's


@dataclass(frozen=True, slots=True, eq=False)
class Linear:
    """Rows `first` … of a matrix, and a bias float32 `[rows]`."""

    matrix: QuantizedTensor
    first: int
    rows: int
    bias: torch.Tensor | None


Weights = Mapping[Projection, Linear]


def decoding_weights(decoder: Decoder) -> Weights:
    """Return the products of a model's spec as matrices.

    Raises
    ------
    UnsupportedArchitecture : a step has no operation for something that the model computes.
    """
    if decoder.device != "cpu" or decoder.dtype not in (torch.float32, torch.bfloat16):
        raise UnsupportedArchitecture(f"{decoder.dtype} on {decoder.device}")
    spec = decoder.spec
    spec.check_halves()
    if spec.unknown:
        raise UnsupportedArchitecture(spec.unknown)
    for layer in spec.layers:
        layer.gated_mlp()
    for norm in (spec.norm, *(norm for layer in spec.layers for norm in layer.norms)):
        if not norm.is_rms:
            raise UnsupportedArchitecture(f"{type(norm.module).__name__} is no root mean square norm")
    source = WeightSource(decoder)
    return {projection: source.linear(projection) for projection in spec.projections}


class WeightSource:
    """The matrices of a model's linear layers.

    A model that computes in float32, or whose weights oneDNN has reordered, is often a bfloat16 checkpoint. Its weights
    are then read from the file, mapped into memory. That is half the bytes, or the only plain weights there are, and
    takes none of the process's own memory.
    """

    def __init__(self, decoder: Decoder) -> None:
        self._files = _bfloat16_files(decoder.loaded.files)
        self._open: dict[Path, Any] = {}
        self._names = {id(module): name for name, module in decoder.model.named_modules()} if self._files else {}
        head, embedding = decoder.model.get_output_embeddings(), decoder.model.get_input_embeddings()
        if head is not None and head.weight is embedding.weight:
            self._names[id(head)] = self._names.get(id(embedding), "")

    def linear(self, product: Projection) -> Linear:
        """Return a product as rows of a matrix."""
        bias = getattr(product.module, "bias", None)
        if bias is not None:
            bias = bias.detach()[product.first : product.first + product.rows].float().contiguous()
        return Linear(self.matrix(product.module), product.first, product.rows, bias)

    def matrix(self, module: Any) -> QuantizedTensor:
        """Return the weight of a linear layer.

        Raises
        ------
        UnsupportedArchitecture : it is kept in a layout that only other code reads.
        """
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
        raise UnsupportedArchitecture("its weights lie in oneDNN's own layout, and the checkpoint has other ones")

    def _mapped(self, module: Any) -> torch.Tensor | None:
        """Return a module's weight as the file has it, if it has it in bfloat16."""
        name = f"{self._names.get(id(module), '')}.weight"
        path = self._files.get(name)
        if path is None:
            return None
        if path not in self._open:
            self._open[path] = safe_open(path, framework="pt", device="cpu")
        found: torch.Tensor = self._open[path].get_tensor(name)
        return found


def _bfloat16_files(files: Any) -> dict[str, Path]:
    """Find the file of each bfloat16 tensor of a model; none where it has no files."""
    if files is None or not files.folder.name:
        return {}
    try:
        tables = {path: tensor_table(path) for path in weight_files(files.folder)}
    except (ModelError, OSError):
        return {}
    return {name: path for path, table in tables.items() for name, entry in table.items() if entry["dtype"] == "BF16"}


def _is_same(weight: torch.Tensor, mapped: torch.Tensor) -> bool:
    """Return True if a file's weight is the model's, by its shape and, where the model has numbers, by some rows."""
    if weight.shape != mapped.shape or not mapped.is_contiguous():
        return False
    if weight.device.type != "cpu":
        return True  # the first step is compared in any case
    rows = torch.linspace(0, len(weight) - 1, _PROBED, dtype=torch.float32).long()
    return torch.equal(weight[rows].float(), mapped[rows].float())
