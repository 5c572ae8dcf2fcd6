"""Weights of a GGUF file under the names of `transformers`, in its shapes and its order of rows.

llama.cpp's converter renames, reorders and changes tensors. What undoes that for an architecture is in `transformers`:
a `TensorProcessor`, or, of its newer reader, a list of conversions. Every tensor of a file is accounted for here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
from transformers.integrations.gguf import get_gguf_conversion_mapping, is_gguf_arch_supported
from transformers.integrations.gguf.gguf_conversion_mapping import PermuteRows
from transformers.modeling_gguf_pytorch_utils import (
    TENSOR_PROCESSORS,
    GGUFTensor,
    TensorProcessor,
    get_gguf_hf_weights_map,
)

from kvtool.core.checkpoint.gguf.dense import Numbers, kind_of, numbers_of, quantized
from kvtool.core.checkpoint.gguf.folder import GPT_OSS, POSITIONS
from kvtool.core.checkpoint.gguf.header import GgufHeader, TensorInfo
from kvtool.core.errors import ModelError
from kvtool.core.kernels.linear.qtensor import READERS, QuantizedTensor, take_rows
from kvtool.core.kernels.linear.quantized import unpacked

_ROUTERS = {".ffn_gate_inp.scale": ".router.scale", ".ffn_down_exps.scale": ".router.per_expert_scale"}  # of Gemma 4
_SHARED = re.compile(r"^blk\.(\d+)\.attn_(k|v|k_norm|v_norm)\.weight$")
_PREDICTION = "mtp."  # begins the names of a block that `transformers` has no module for


@dataclass(frozen=True, slots=True)
class Weight:
    """A weight's tensors in a file, and what makes their numbers (float32, slowest axis first) the weight's."""

    sources: tuple[TensorInfo, ...]
    undo: Callable[[Sequence[Numbers]], Numbers]
    keeps_columns: bool = True  # only whole rows are moved, if anything is


def weights_of(gguf: Path, header: GgufHeader, model: Any) -> dict[str, Weight]:
    """Map each weight of a model to its tensors. Raises ModelError: tensors are left over, or missing."""
    state, tied = model.state_dict(), model.all_tied_weights_keys or {}
    size = sum(weight.numel() for name, weight in model.named_parameters() if name not in tied)
    if size > header.elements:
        raise ModelError(
            f"{gguf} holds {header.elements:,} weights, but describes a model of {size:,}", "download it again"
        )
    find = _converted if is_gguf_arch_supported(header.architecture) else _processed
    weights = find(header, model)
    used = {source.name for weight in weights.values() for source in weight.sources}
    if left := [name for name in header.tensors if name not in used and not _is_unused(name, model.config)]:
        raise ModelError(
            f"{gguf} holds {len(left)} tensors for which transformers' model of {header.architecture} files has no "
            f"room, first {left[0]}",
            "use the model's original safetensors instead",
        )
    missing = [name for name in state if name not in weights and tied.get(name) not in weights]
    sizes = {name: sum(prod(source.shape) for source in weight.sources) for name, weight in weights.items()}
    _refuse_missing(gguf, missing + [name for name, size in sizes.items() if size != state[name].numel()])
    return weights


def _is_unused(name: str, config: Any) -> bool:
    shared = _SHARED.match(name)
    own_layers = config.num_hidden_layers - (getattr(config, "num_kv_shared_layers", 0) or 0)
    return name in POSITIONS or bool(shared and int(shared[1]) >= own_layers)


def _refuse_missing(gguf: Path, names: list[str]) -> None:
    if names:
        raise ModelError(f"{gguf} lacks {len(names)} of its model's weights, first {names[0]}", "download it again")


# ---- names, and what undoes llama.cpp's changes ---------------------------------------------------------------------


class _GptOssProcessor(TensorProcessor):
    """Experts of gpt-oss, which `transformers` does not find.

    llama.cpp keeps gate and up separate, a row an output; the model keeps them interleaved, a column an output.
    """

    _PARAMETER = re.compile(r"model\.layers\.(\d+)\.mlp\.experts\.(gate_up|down)_proj(_bias)?")
    _TENSOR = re.compile(r"blk\.\d+\.ffn_(gate|up|down)_exps\.(weight|bias)")

    def perform_fallback_tensor_mapping(
        self, gguf_to_hf_name_map: dict[str, str], suffix: str, qual_name: str, hf_name: str
    ) -> None:
        if match := self._PARAMETER.fullmatch(hf_name):
            for part in match[2].split("_"):
                gguf_to_hf_name_map[f"blk.{match[1]}.ffn_{part}_exps.{'bias' if match[3] else 'weight'}"] = hf_name

    def process(self, weights: Numbers, name: str, **kwargs: Any) -> GGUFTensor:
        match = self._TENSOR.fullmatch(name)
        if match is None:
            return GGUFTensor(weights, name, {})
        columns = weights.swapaxes(1, 2) if match[2] == "weight" else weights
        if match[1] == "down":
            return GGUFTensor(columns, name, {})
        tensors, parameter = kwargs["parsed_parameters"]["tensors"], kwargs["tensor_key_mapping"][name]
        if parameter not in tensors:
            tensors[parameter] = np.empty((*columns.shape[:-1], 2 * columns.shape[-1]), np.float32)
        tensors[parameter][..., match[1] == "up" :: 2] = columns
        return GGUFTensor(weights, None, {})


def _processed(header: GgufHeader, model: Any) -> dict[str, Weight]:
    kinds = {**TENSOR_PROCESSORS, GPT_OSS: _GptOssProcessor}
    processor = kinds.get(header.architecture, TensorProcessor)(config=model.config.to_dict())
    # Without its children: their weights are among the model's, and a map of each child's takes seconds.
    childless = SimpleNamespace(config=model.config, state_dict=model.state_dict, named_children=tuple)
    names = get_gguf_hf_weights_map(childless, processor)
    sources: dict[str, list[TensorInfo]] = {}
    for theirs, tensor in header.tensors.items():
        name = names.get(theirs) or names.get(theirs.removesuffix(".weight")) or _router_name(theirs)
        if name is not None:
            sources.setdefault(name, []).append(tensor)
    return {
        name: Weight(tuple(tensors), partial(_process, processor, names, name, [tensor.name for tensor in tensors]))
        for name, tensors in sources.items()
    }


def _router_name(tensor: str) -> str | None:
    layer = tensor.split(".")[1] if tensor.startswith("blk.") else ""
    return next((f"model.layers.{layer}{name}" for ending, name in _ROUTERS.items() if tensor.endswith(ending)), None)


def _process(
    processor: TensorProcessor, names: Mapping[str, str], name: str, sources: list[str], numbers: Sequence[Numbers]
) -> Numbers:
    tensors: dict[str, Any] = {}  # those of several sources, which the processor puts together
    for source, values in zip(sources, numbers, strict=True):
        tensor = processor.process(
            weights=values, name=source, tensor_key_mapping=names, parsed_parameters={"tensors": tensors}
        )
        if tensor.name is not None:
            tensors[name] = tensor.weights
    return np.asarray(tensors[name])


def _converted(header: GgufHeader, model: Any) -> dict[str, Weight]:
    state = model.state_dict()
    changes = get_gguf_conversion_mapping(header.architecture, model.config)
    renamings = [change for change in changes if isinstance(change, WeightRenaming)]
    converters = [change for change in changes if isinstance(change, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    found: dict[str, dict[str, TensorInfo]] = {}
    for tensor in header.tensors.values():
        name, pattern = rename_source_key(tensor.name, renamings, converters)
        if name in state or name.startswith(_PREDICTION):
            found.setdefault(name, {})[pattern or ""] = tensor
    weights = {}
    for name, tensors in found.items():
        converter = by_pattern.get(next(iter(tensors)))
        keeps = converter is None or all(isinstance(operation, PermuteRows) for operation in converter.operations)
        weights[name] = Weight(tuple(tensors.values()), partial(_convert, converter, list(tensors)), keeps)
    return weights


def _convert(converter: WeightConverter | None, patterns: list[str], numbers: Sequence[Numbers]) -> Numbers:
    tensors: dict[str, Any] = {
        pattern: [torch.from_numpy(values)] for pattern, values in zip(patterns, numbers, strict=True)
    }
    if converter is not None:
        sources, targets = converter.source_patterns, converter.target_patterns
        for operation in converter.operations:
            tensors = operation.convert(tensors, source_patterns=sources, target_patterns=targets)
    (tensor,) = tensors.values()
    return np.asarray(tensor[0] if isinstance(tensor, list) else tensor)


# ---- numbers -------------------------------------------------------------------------------------------------------


def read_weights(
    gguf: Path, header: GgufHeader, model: Any, packed: Container[str]
) -> Iterator[tuple[str, QuantizedTensor | torch.Tensor]]:
    """Read every weight of a model by its name: as in the file if it is one of `packed` and of a kind that is kept so,
    else bfloat16. Raises ModelError: the file is damaged."""
    shapes = {name: weight.shape for name, weight in model.state_dict().items()}
    weights = {name: weight for name, weight in weights_of(gguf, header, model).items() if name in shapes}

    def read(name: str) -> QuantizedTensor | torch.Tensor:
        return _matrix(gguf, weights[name], shapes[name]) or _dense(gguf, name, weights[name], shapes[name])

    with ThreadPoolExecutor(torch.get_num_threads()) as threads:
        for name, weight in zip(weights, threads.map(read, weights), strict=True):
            if isinstance(weight, QuantizedTensor) and name not in packed:
                yield name, unpacked(weight, torch.bfloat16)
            else:
                yield name, weight


def _matrix(gguf: Path, weight: Weight, shape: Sequence[int]) -> QuantizedTensor | None:
    """Read a weight that is a matrix of the file with its rows reordered; None: it is another, or stays unpacked."""
    source = weight.sources[0]
    fits = weight.keeps_columns and len(shape) == 2 and tuple(shape) == source.shape[::-1]
    if not fits or kind_of(source) not in READERS:
        return None
    numbers = np.arange(shape[0])
    rows = weight.undo([numbers[:, None]])
    if rows.shape != (shape[0], 1) or not np.array_equal(np.sort(rows[:, 0]), numbers):
        return None
    matrix = quantized(gguf, source)
    return matrix if np.array_equal(rows[:, 0], numbers) else take_rows(matrix, torch.from_numpy(rows[:, 0].copy()))


def _dense(gguf: Path, name: str, weight: Weight, shape: Sequence[int]) -> torch.Tensor:
    numbers = torch.from_numpy(
        np.ascontiguousarray(weight.undo([numbers_of(gguf, tensor) for tensor in weight.sources]))
    )
    if [size for size in numbers.shape if size > 1] != [size for size in shape if size > 1]:
        _refuse_missing(gguf, [name])
    return numbers.reshape(shape).bfloat16()
