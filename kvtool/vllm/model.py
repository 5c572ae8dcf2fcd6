"""Decoder over vLLM's own modules: the rows that a fusion mode recomputes go through the weights that vLLM has loaded.

Norms, projections, RoPE and MLP are vLLM's modules, as they are; the loop over the layers, the cache and attention are
kvtool's.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from kvtool.core.checkpoint.load import Loaded
from kvtool.core.common.machine import Arithmetic
from kvtool.core.errors import ModelError
from kvtool.core.kernels.attention import dispatch
from kvtool.core.kernels.attention.params import KV, AttentionParams
from kvtool.core.kernels.rope import CosSin
from kvtool.core.model.decoder import Decoder
from kvtool.core.model.forward import Ends, Forward, Heads
from kvtool.core.model.prompt_cache import BufferLayer, KVShape, LayerKind, Sample
from kvtool.core.model.rope import HALVES, PAIRS, Rotary
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


@dataclass(frozen=True, slots=True, eq=False)
class VllmLayer:
    """A layer of vLLM's, as a pass computes it. Its projection rotates heads, too."""

    own: Any
    number: int
    ranks: Ranks
    params: AttentionParams
    is_sandwich: bool

    @classmethod
    def of(cls, own: Any, number: int, ranks: Ranks) -> VllmLayer:
        attention: Any = own.self_attn.attn
        impl = attention.impl
        params = AttentionParams(float(impl.scale), attention.sliding_window, impl.logits_soft_cap or None)
        return cls(own, number, ranks, params, all(hasattr(own, name) for name in _SANDWICH))

    def project(self, hidden: torch.Tensor, positions: torch.Tensor, exact: bool) -> Heads:
        sides = self.rotated(self.own.input_layernorm(hidden), positions)
        return Heads(*(side[0].transpose(0, 1).flatten(1) for side in sides))

    def rotated(self, normed: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, ...]:
        sides: tuple[torch.Tensor, ...] = self.ranks.call("project", self.number, normed, positions)
        return sides

    def rotate(self, heads: Heads, angles: CosSin | None) -> Heads:
        dim = self.own.self_attn.head_dim
        return Heads(*(side.view(len(side), -1, dim).transpose(0, 1)[None] for side in heads))

    def write(self, heads: Heads, angles: CosSin | None, places: torch.Tensor, buffer: BufferLayer) -> torch.Tensor:
        queries, keys, values = self.rotate(heads, angles)
        buffer.scatter(places, keys, values)
        return queries

    def finish(self, attended: torch.Tensor, hidden: torch.Tensor, exact: bool) -> torch.Tensor:
        own: Any = self.own
        heads = attended.view(len(attended), -1, self.own.self_attn.head_dim)
        output: torch.Tensor = self.ranks.call("output", self.number, heads)
        if self.is_sandwich:
            hidden = hidden + own.post_attention_layernorm(output)
            more = own.post_feedforward_layernorm(self._mlp(own.pre_feedforward_layernorm(hidden)))
        else:
            hidden = hidden + output
            more = self._mlp(own.post_attention_layernorm(hidden))
        out: torch.Tensor = hidden + more
        return out

    def _mlp(self, hidden: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.ranks.call("mlp", self.number, hidden)
        return out


def ends_of(model: Any, ranks: Ranks) -> Ends:
    def logits(hidden: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = ranks.call("logits", model.model.norm(hidden).contiguous())
        return out.float()

    return Ends(partial(ranks.call, "embed"), logits)


class RowModel(nn.Module):
    """The parts of vLLM's model that `DecoderStack` asks for."""

    def __init__(self, own: Any, dtype: torch.dtype) -> None:
        super().__init__()
        self.own, self.dtype = own, dtype
        ropes = {id(layer.self_attn.rotary_emb): layer.self_attn.rotary_emb for layer in own.model.layers}
        names = [""] if len(ropes) == 1 else [str(number) for number in range(len(ropes))]
        self.rope_names = dict(zip(ropes, names, strict=True))
        self.rotary_emb = RopeTables(dict(zip(names, ropes.values(), strict=True)))

    def get_input_embeddings(self) -> Any:
        return self.own.model.embed_tokens


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
        self.ranks = ranks or Ranks(model)
        self.model = self.base = RowModel(model, dtype)
        layers = [VllmLayer.of(own, number, self.ranks) for number, own in enumerate(model.model.layers)]
        self.layers = list(model.model.layers)
        self.loaded = VllmLoaded(self.model, None, None, device, str(kv_dtype).removeprefix("torch."), "", 0.0)  # type: ignore[arg-type]
        self.turns, self.keeps_states, self.device, self.context = Turns(), False, device, context
        self.dtype, self.kv_dtype, self.state_forms = dtype, kv_dtype, {}
        dispatch.prepare(dtype, device)
        self.kinds = tuple(map(self._kind, layers))
        self.shapes = tuple(kind.shape for kind in self.kinds)
        samples = {
            layer: self._sample(layers[layer])
            for layer in {kind: number for number, kind in enumerate(self.kinds)}.values()
        }
        layout = HALVES if all(layer.own.self_attn.rotary_emb.is_neox_style for layer in layers) else PAIRS
        self._rotary = Rotary(self.base, self.kinds, layout, samples, dtype, device)
        self._forward_pass = Forward(
            self.rotary, self.pause, layers, ends_of(model, self.ranks), why="vLLM's own layers"
        )

    @property
    def forward(self) -> Forward:
        return self._forward_pass

    def _kind(self, layer: VllmLayer) -> LayerKind:
        own, params = layer.own.self_attn, layer.params
        return LayerKind(
            rotation=self.base.rope_names[id(own.rotary_emb)],
            window=params.window,
            softcap=params.softcap,
            sinks=False,
            tempered=False,
            shape=KVShape(self.ranks.kv_heads(own), own.head_dim, own.head_dim),
        )

    @torch.inference_mode()
    def _sample(self, layer: VllmLayer) -> Sample:
        at = (*_SAMPLED, max(self.context - 1, *_SAMPLED))
        embedding = self.ranks.call("embed", torch.tensor([0], device=self.device))
        hidden = embedding.new_ones(len(at), embedding.shape[-1]).cumsum(-1).sin()
        keys = layer.rotated(hidden, torch.tensor(at, device=self.device))[1]
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
