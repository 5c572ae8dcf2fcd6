"""Decoder over vLLM's own modules: the rows that a fusion mode recomputes go through the weights that vLLM has loaded.

vLLM's layers take no chosen rows and no cache of ours, so each gets a wrapper with the call of a decoder layer of
`transformers`, which kvtool's passes expect. Norms, projections, RoPE and MLP are vLLM's modules, as they are;
attention is kvtool's.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from kvtool.core.checkpoint.load import Loaded
from kvtool.core.common.machine import Arithmetic
from kvtool.core.errors import ModelError
from kvtool.core.kernels.attention import dispatch
from kvtool.core.kernels.attention.params import KV, AttentionParams
from kvtool.core.model.decoder import Decoder, HeadRows
from kvtool.core.model.kinds import KVShape, LayerKind, Sample
from kvtool.core.model.rope import Rotary
from kvtool.core.model.stack import Turns
from kvtool.vllm.ranks import Ranks

_SAMPLED = (3, 40)  # positions at which a row's keys show how they are rotated
_LAYER = ("self_attn", "mlp", "input_layernorm", "post_attention_layernorm")
_ATTENTION = ("qkv_proj", "rotary_emb", "attn", "o_proj", "num_heads", "num_kv_heads", "head_dim")
_SCALED = ("do_llama_4_scaling", "dual_chunk_attention_config")  # queries or positions of a kind of their own
_SANDWICH = ("pre_feedforward_layernorm", "post_feedforward_layernorm")  # Gemma 2 and 3


class RopeTables(nn.Module):
    """cos and sin of vLLM's RoPEs by name, as `Rotary` asks for them."""

    def __init__(self, ropes: dict[str, Any]) -> None:
        super().__init__()
        self._ropes = ropes

    def forward(self, like: torch.Tensor, position_ids: torch.Tensor, layer_type: str = "") -> KV:
        """Return cos and sin `[1, tokens, rotary_dim]`."""
        rope = self._ropes[layer_type]
        cos, sin = rope.cos_sin_cache[position_ids[0]].to(like.dtype).chunk(2, -1)
        if rope.is_neox_style:
            return cos.repeat(1, 2)[None], sin.repeat(1, 2)[None]
        return cos.repeat_interleave(2, -1)[None], sin.repeat_interleave(2, -1)[None]


class RowAttention(nn.Module):
    def __init__(self, own: Any, layer: int, ranks: Ranks) -> None:
        super().__init__()
        impl = own.attn.impl
        self.own, self._layer, self.ranks = own, layer, ranks
        self.params = AttentionParams(float(impl.scale), own.attn.sliding_window, impl.logits_soft_cap or None)

    def project(self, hidden: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        query, key, value = self.ranks.call("project", self._layer, hidden, positions)
        return query, key, value

    def forward(self, hidden: torch.Tensor, positions: torch.Tensor, rows: Any, cache: Any) -> torch.Tensor:
        query, key, value = self.project(hidden, positions)
        key, value = cache.update(key, value, self._layer)
        seen = rows.attend(self._layer, query, key, value, self.params)
        out: torch.Tensor = self.ranks.call("output", self._layer, seen[0].transpose(0, 1))
        return out


class RowLayer(nn.Module):
    def __init__(self, own: Any, layer: int, ranks: Ranks) -> None:
        super().__init__()
        self.own, self._layer, self.self_attn = own, layer, RowAttention(own.self_attn, layer, ranks)
        self._is_sandwich = all(hasattr(own, name) for name in _SANDWICH)

    def forward(
        self, hidden_states: torch.Tensor, *, position_ids: torch.Tensor, past_key_values: Any, rows: Any, **_: Any
    ) -> torch.Tensor:
        own, hidden = self.own, hidden_states[0]
        attended = self.self_attn(own.input_layernorm(hidden), position_ids[0], rows, past_key_values)
        if self._is_sandwich:
            hidden = hidden + own.post_attention_layernorm(attended)
            more = own.post_feedforward_layernorm(self._mlp(own.pre_feedforward_layernorm(hidden)))
        else:
            hidden = hidden + attended
            more = self._mlp(own.post_attention_layernorm(hidden))
        out: torch.Tensor = (hidden + more)[None]
        return out

    def _mlp(self, hidden: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.self_attn.ranks.call("mlp", self._layer, hidden)
        return out


class RowBase(nn.Module):
    def __init__(self, own: Any, ranks: Ranks) -> None:
        super().__init__()
        self.own, self._ranks = own, ranks
        self.layers: Any = nn.ModuleList(RowLayer(layer, number, ranks) for number, layer in enumerate(own.layers))
        ropes = {id(layer.self_attn.rotary_emb): layer.self_attn.rotary_emb for layer in own.layers}
        names = [""] if len(ropes) == 1 else [str(number) for number in range(len(ropes))]
        self.rope_names = dict(zip(ropes, names, strict=True))
        self.rotary_emb = RopeTables(dict(zip(names, ropes.values(), strict=True)))

    def forward(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, past_key_values: Any, rows: Any, **_: Any
    ) -> torch.Tensor:
        hidden = self._ranks.call("embed", input_ids[0])[None]
        for layer in self.layers:
            hidden = layer(
                hidden, position_embeddings=(), position_ids=position_ids, past_key_values=past_key_values, rows=rows
            )
        normed: torch.Tensor = self.own.norm(hidden[0])[None]
        return normed


class RowModel(nn.Module):
    def __init__(self, own: Any, dtype: torch.dtype, ranks: Ranks) -> None:
        super().__init__()
        self.own, self.base, self.dtype, self.ranks = own, RowBase(own.model, ranks), dtype, ranks

    def get_input_embeddings(self) -> Any:
        return self.own.model.embed_tokens

    def forward(self, logits_to_keep: int, **given: Any) -> SimpleNamespace:
        hidden = self.base(**given)[0, -logits_to_keep:]
        return SimpleNamespace(logits=self.ranks.call("logits", hidden.contiguous())[None])


@dataclass(frozen=True)
class VllmLoaded(Loaded):
    """A model that vLLM has loaded. It has an arithmetic of its own and no fingerprint: the gate measures it."""

    @property
    def arithmetic(self) -> Arithmetic:
        return Arithmetic(str(self.model.dtype).removeprefix("torch."), f"vllm-{self.device.partition(':')[0]}")


class VllmDecoder(Decoder):
    """A decoder over a model that vLLM has loaded, with so many `blocks` in its cache; None: not checked."""

    def __init__(
        self,
        model: Any,
        dtype: torch.dtype,
        kv_dtype: torch.dtype,
        context: int,
        ranks: Ranks | None = None,
        blocks: int | None = None,
    ) -> None:
        check_model(model, blocks)
        device = str(next(model.parameters()).device)
        self.model = RowModel(model, dtype, ranks or Ranks(model))
        self.base, self.layers = self.model.base, list(self.model.base.layers)
        attentions: list[RowAttention] = [layer.self_attn for layer in self.model.base.layers]
        self.loaded = VllmLoaded(self.model, None, None, device, str(kv_dtype).removeprefix("torch."), "", 0.0)  # type: ignore[arg-type]
        self.turns, self.keeps_states, self.device, self.context = Turns(), False, device, context
        self.dtype, self.kv_dtype = dtype, kv_dtype
        self.unfused, self._fused, self._head, self.state_forms = "vLLM's own layers", None, HeadRows(), {}
        dispatch.prepare(dtype, device)
        self.kinds = tuple(map(self._kind, attentions))
        self.shapes = tuple(kind.shape for kind in self.kinds)
        samples = {
            layer: self._sample(attentions[layer])
            for layer in {kind: number for number, kind in enumerate(self.kinds)}.values()
        }
        self._rotary = Rotary(self.base, attentions, self.kinds, samples, dtype, device)

    def _kind(self, attention: RowAttention) -> LayerKind:
        own, params = attention.own, attention.params
        return LayerKind(
            rotation=self.base.rope_names[id(own.rotary_emb)],
            window=params.window,
            softcap=params.softcap,
            sinks=False,
            tempered=False,
            shape=KVShape(self.model.ranks.kv_heads(own), own.head_dim, own.head_dim),
        )

    @torch.inference_mode()
    def _sample(self, attention: RowAttention) -> Sample:
        at = (*_SAMPLED, max(self.context - 1, *_SAMPLED))
        embedding = self.model.ranks.call("embed", torch.tensor([0], device=self.device))
        hidden = embedding.new_ones(len(at), embedding.shape[-1]).cumsum(-1).sin()
        keys = attention.project(hidden, torch.tensor(at, device=self.device))[1]
        return Sample(at, keys[0].float())


def check_model(model: Any, blocks: int | None = None) -> None:
    name = type(model).__name__
    hint = "known are Llama, Mistral, Qwen 2 and 3, Gemma 2 and 3, and what is built as they are"
    layers = getattr(getattr(model, "model", None), "layers", None)
    if layers is None or not hasattr(model, "compute_logits"):
        raise ModelError(f"{name} of vLLM has no stack of decoder layers", hint)
    for layer in layers:
        own: Any = getattr(layer, "self_attn", None)
        lacking = [part for part in _LAYER if not hasattr(layer, part)]
        lacking += [part for part in _ATTENTION if not hasattr(own, part)]
        if lacking:
            raise ModelError(f"{type(layer).__name__} of vLLM has no {lacking[0]}, which rows go through", hint)
        odd = [part for part in _SCALED if getattr(own, part, None)]
        odd += [part for part in ("sinks", "alibi_slopes") if getattr(own.attn.impl, part, None) is not None]
        odd += ["experts"] if hasattr(layer.mlp, "experts") else []  # they may wait for the experts of other engines
        odd += ["kv_sharing_target_layer_name"] if getattr(own.attn, "kv_sharing_target_layer_name", None) else []
        if odd or not hasattr(own.rotary_emb, "cos_sin_cache"):
            raise ModelError(f"{type(own).__name__} of vLLM has {(*odd, 'another RoPE')[0]}, which is not known", hint)
        shape = [*own.attn.kv_cache.shape]
        if blocks is not None and shape[0] != blocks:  # a block's number would be that of another one, or of none
            what = (
                f"{type(own.attn.impl).__name__} of vLLM has a cache {shape}, whose first axis is not {blocks} blocks"
            )
            raise ModelError(what, "leave --block-size out, or name another --attention-backend")
