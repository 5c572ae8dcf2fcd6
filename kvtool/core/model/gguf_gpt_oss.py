"""The weights of a GGUF file of gpt-oss, whose experts `transformers`' reader does not find.

llama.cpp keeps gate and up apart, a row an output; the model keeps them side by side in turn, a column an output.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from kvtool.core.errors import ModelError
from kvtool.core.model.gguf_header import GgufHeader, TensorInfo

_Numbers = np.ndarray[Any, Any]
_WHOLE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_IN_LAYERS = {
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate_inp": "mlp.router",
}
_PAIR = {"ffn_gate_exps": "ffn_up_exps"}
_NAME = re.compile(r"^blk\.(\d+)\.(\w+)\.(weight|bias)$")


def weights_of(header: GgufHeader, read: Callable[[TensorInfo], _Numbers]) -> Iterator[tuple[str, _Numbers]]:
    """Each weight of the model by its own name; a pair of tensors is read at a time.

    Raises
    ------
    ModelError : a tensor that the model has no room for.
    """
    for name, tensor in header.tensors.items():
        if match := _NAME.match(name):
            layer, what, kind = match.groups()
            if what not in _PAIR.values():
                yield f"model.layers.{layer}.{_ours(what, kind, name)}", _numbers(header, name, what, kind, read)
        else:
            whole, _, kind = name.rpartition(".")
            if whole not in _WHOLE:
                raise _unknown(name)
            yield f"{_WHOLE[whole]}.{kind}", read(tensor)


def _ours(what: str, kind: str, name: str) -> str:
    if what in _IN_LAYERS:
        return f"{_IN_LAYERS[what]}.{kind}"
    of = "" if kind == "weight" else "_bias"
    ours = {
        "attn_sinks": "self_attn.sinks",
        "ffn_gate_exps": f"mlp.experts.gate_up_proj{of}",
        "ffn_down_exps": f"mlp.experts.down_proj{of}",
    }
    if what not in ours:
        raise _unknown(name)
    return ours[what]


def _numbers(header: GgufHeader, name: str, what: str, kind: str, read: Callable[[TensorInfo], _Numbers]) -> _Numbers:
    numbers = read(header.tensors[name])
    if what in _PAIR:
        other = name.replace(what, _PAIR[what])
        if other not in header.tensors:
            raise ModelError(f"the GGUF file lacks the tensor {other}", "download it again")
        pair = np.stack([numbers, read(header.tensors[other])], axis=2)  # [experts, outputs, 2, inputs]
        numbers = pair.reshape(len(pair), -1, *pair.shape[3:])
    return numbers.swapaxes(1, 2) if what.endswith("_exps") and kind == "weight" else numbers


def _unknown(name: str) -> ModelError:
    return ModelError(f"the GGUF file holds a tensor that gpt-oss has no room for: {name}", "download it again")
