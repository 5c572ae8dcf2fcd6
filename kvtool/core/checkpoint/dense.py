"""Dense decoder of a checkpoint: its weights, found by name in safetensors or GGUF files, without transformers.

The modules have the names that transformers gives them, and hold weights; `model` computes with them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeAlias

import torch
from safetensors import safe_open

from kvtool.core.checkpoint.architecture import (
    Architecture,
    Family,
    RopeSettings,
    UnlistedArchitecture,
    read_architecture,
)
from kvtool.core.checkpoint.files import ModelFiles, read_config, tensor_table, weight_files
from kvtool.core.kernels.linear.modules import PackedEmbedding, PackedLinear
from kvtool.core.kernels.linear.qtensor import QuantizedTensor, dense
from kvtool.core.kernels.linear.quantized import unpacked

Weight: TypeAlias = "torch.Tensor | QuantizedTensor"
_EMBEDDING = "model.embed_tokens"
_UNUSED = "rotary_emb.inv_freq"  # in old files
_SPECIAL = ("bos_token_id", "eos_token_id", "pad_token_id")


class RMSNorm(torch.nn.Module):
    """Root mean square norm (Zhang and Sennrich 2019)."""

    def __init__(self, weight: torch.Tensor, epsilon: float, family: Family) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(weight, requires_grad=False)  # as in the checkpoint
        self.epsilon, self.adds_one, self.rounds_first = epsilon, family.adds_one, family.rounds_first


class RotaryEmbedding(torch.nn.Module):
    def __init__(self, ropes: Mapping[str, RopeSettings], in_float32: bool) -> None:
        super().__init__()
        self._in_float32 = in_float32
        for name, rope in ropes.items():
            self.register_buffer(f"frequencies_{name}", rope.frequencies(), persistent=False)

    def forward(
        self, like: torch.Tensor, position_ids: torch.Tensor, name: str = ""
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cos and sin `[1, rows, rotary_dim]` of positions `[1, rows]`, by the RoPE of a name."""
        angles = position_ids[..., None].float() * self.get_buffer(f"frequencies_{name}")
        doubled = torch.cat((angles, angles), dim=-1)
        dtype = torch.float32 if self._in_float32 else like.dtype
        return doubled.cos().to(dtype), doubled.sin().to(dtype)


class DenseModel(torch.nn.Module):
    """Attributes have the names of those of transformers' models."""

    model: Any
    lm_head: Any

    def __init__(self, architecture: Architecture, special_ids: Any, dtype: torch.dtype) -> None:
        super().__init__()
        self.architecture, self.config, self.dtype = architecture, architecture.config, dtype
        self.generation_config = special_ids
        self.model = torch.nn.Module()
        scale = torch.tensor(architecture.embedding, dtype=torch.float32)
        rounds = architecture.family.scales_embeddings  # Gemma rounds the scale to the model's dtype
        self.model.embedding_multiplier = float(scale.to(dtype)) if rounds else architecture.embedding
        self.model.layers = torch.nn.ModuleList(_layer(architecture) for _ in architecture.windows)
        self.model.rotary_emb = RotaryEmbedding(architecture.ropes, architecture.family.rope_in_float32)

    def get_input_embeddings(self) -> Any:
        return self.model.embed_tokens

    def get_output_embeddings(self) -> Any:
        return self.lm_head


def _layer(architecture: Architecture) -> torch.nn.Module:
    layer: Any = torch.nn.Module()
    layer.self_attn, layer.mlp = torch.nn.Module(), torch.nn.Module()
    layer.self_attn.scaling, layer.residual_multiplier = architecture.scale, architecture.residual
    return layer  # type: ignore[no-any-return]


def dense_model(files: ModelFiles, dtype: torch.dtype, *, packed: bool, int8: bool = False) -> DenseModel:
    """Build a model of a listed family; `packed`, `int8`: as of `gguf_model`. Raises UnlistedArchitecture: the family,
    a setting or a weight is not listed."""
    config = read_config(files.folder)
    architecture = read_architecture(config)
    model = DenseModel(architecture, _special_ids(config, files.folder), dtype)
    if files.gguf is None:
        weights = dict(_of_folder(files.folder))
    else:
        from kvtool.core.checkpoint.gguf.dense import read_dense

        weights = dict(read_dense(files.gguf, architecture))
    _Builder(model, weights, packed, int8).build()
    return model.eval()


def _special_ids(config: Mapping[str, Any], folder: Path) -> SimpleNamespace:
    stated, path = dict(config), folder / "generation_config.json"
    if path.is_file():
        stated |= json.loads(path.read_bytes())
    return SimpleNamespace(**{name: stated.get(name) for name in _SPECIAL})


def _of_folder(folder: Path) -> Iterator[tuple[str, Weight]]:
    for path in weight_files(folder):
        names = [name for name in tensor_table(path) if not name.endswith(_UNUSED)]
        with safe_open(path, "pt") as file:
            for name in names:
                yield name, file.get_tensor(name)


class _Builder:
    """Makes a model's modules of its weights, which are taken out of a dictionary."""

    def __init__(self, model: DenseModel, weights: dict[str, Weight], packed: bool, int8: bool) -> None:
        self._model, self._weights, self._packed, self._int8 = model, weights, packed, int8
        self._shape = model.architecture

    def build(self) -> None:
        base, shape = self._model.model, self._shape
        base.embed_tokens = self._embedding((shape.vocabulary, shape.hidden))
        for number, layer in enumerate(base.layers):
            self._fill(layer, f"model.layers.{number}.")
        base.norm = self._norm("model.norm")
        if shape.is_tied:
            self._model.lm_head = self._tied(base.embed_tokens)
        else:
            self._model.lm_head = self._linear("lm_head", shape.vocabulary, shape.hidden)
        if self._weights:
            raise UnlistedArchitecture(f"there is a weight {min(self._weights)}")

    def _fill(self, layer: Any, path: str) -> None:
        shape, attention, mlp = self._shape, layer.self_attn, layer.mlp
        query, key = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        if f"{path}self_attn.qkv_proj.weight" in self._weights:
            attention.qkv_proj = self._linear(f"{path}self_attn.qkv_proj", query + 2 * key, shape.hidden)
        else:
            for name, rows in (("q_proj", query), ("k_proj", key), ("v_proj", key)):
                attention.add_module(name, self._linear(f"{path}self_attn.{name}", rows, shape.hidden))
        attention.o_proj = self._linear(f"{path}self_attn.o_proj", shape.hidden, query)
        is_fused = f"{path}mlp.gate_up_proj.weight" in self._weights
        for name in ("gate_up_proj",) if is_fused else ("gate_proj", "up_proj"):
            mlp.add_module(name, self._linear(f"{path}mlp.{name}", None, shape.hidden))
        mlp.down_proj = self._linear(f"{path}mlp.down_proj", shape.hidden, None)
        for name in shape.family.norms:
            layer.add_module(name, self._norm(path + name))
        if shape.family.head_norms:
            for name in ("q_norm", "k_norm"):
                attention.add_module(name, self._norm(f"{path}self_attn.{name}"))

    def _take(self, name: str, *sizes: int | None) -> Weight:
        weight = self._weights.pop(name, None)
        if weight is None:
            raise UnlistedArchitecture(f"there is no weight {name}")
        shape = (weight.rows, weight.columns) if isinstance(weight, QuantizedTensor) else tuple(weight.shape)
        if len(shape) != len(sizes) or any(
            size not in (None, actual) for size, actual in zip(sizes, shape, strict=True)
        ):
            raise UnlistedArchitecture(f"the weight {name} has the shape {list(shape)}")
        return weight

    def _numbers(self, weight: Weight) -> torch.Tensor:
        if isinstance(weight, QuantizedTensor):
            weight = unpacked(weight, torch.bfloat16)
        return weight.to(self._model.dtype)

    def _matrix(self, weight: Weight) -> QuantizedTensor | None:
        """Return what is multiplied as it is in the file; None: a tensor of the model's dtype is."""
        if not self._packed or isinstance(weight, QuantizedTensor):
            return weight if self._packed and isinstance(weight, QuantizedTensor) else None
        stays = weight.dtype == torch.bfloat16 and self._model.dtype == torch.float32
        return dense(weight) if stays else None

    def _norm(self, path: str) -> RMSNorm:
        family = self._shape.family
        return RMSNorm(self._numbers(self._take(f"{path}.weight", None)), self._shape.epsilon, family)

    def _linear(self, path: str, rows: int | None, columns: int | None) -> torch.nn.Module:
        weight, bias = self._take(f"{path}.weight", rows, columns), None
        if f"{path}.bias" in self._weights:
            bias = self._numbers(self._take(f"{path}.bias", rows))
        if (matrix := self._matrix(weight)) is not None:
            return PackedLinear(matrix, bias, self._model.dtype, self._int8)
        return _plain(torch.nn.Parameter(self._numbers(weight), requires_grad=False), bias)

    def _embedding(self, shape: tuple[int, int]) -> torch.nn.Module:
        weight = self._take(f"{_EMBEDDING}.weight", *shape)
        if (matrix := self._matrix(weight)) is not None:
            return PackedEmbedding(matrix, None, self._model.dtype)
        return torch.nn.Embedding(*shape, _weight=self._numbers(weight)).requires_grad_(False)

    def _tied(self, embedding: Any) -> torch.nn.Module:
        if isinstance(embedding, PackedEmbedding):
            return PackedLinear(embedding.matrix, None, self._model.dtype, self._int8)
        return _plain(embedding.weight, None)


def _plain(weight: torch.nn.Parameter, bias: torch.Tensor | None) -> torch.nn.Linear:
    rows, columns = weight.shape
    linear = torch.nn.Linear(columns, rows, bias=False, device="meta")
    linear.weight = weight
    linear.bias = None if bias is None else torch.nn.Parameter(bias, requires_grad=False)  # type: ignore[assignment]
    return linear
