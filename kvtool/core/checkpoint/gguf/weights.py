"""Weights of a GGUF file, unpacked into a model: by `transformers`' reader, and here what that reader leaves out.

The reader skips a tensor that it has no name for without a word, so every tensor of a file is accounted for here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from kvtool.core.checkpoint.gguf.config import GPT_OSS, POSITIONS
from kvtool.core.checkpoint.gguf.header import GgufHeader, TensorInfo
from kvtool.core.errors import ModelError

_EXPERTS = re.compile(r"\.ffn_(gate|up|down)_exps\.weight$")  # which the reader splits, or joins
_GEMMA4_ROUTER = {".ffn_gate_inp.scale": ".router.scale", ".ffn_down_exps.scale": ".router.per_expert_scale"}
_KEPT_BY_OTHERS = re.compile(r"\.attn_(k|v|k_norm|v_norm)\.weight$")
_GATES = ".ffn_gate_exps.weight"
_REPORTED = "CONVERSION"  # ends the reader's report, which it logs, where weights were not joined
_BLOCK = re.compile(r"^blk\.(\d+)\.")


def load_weights(gguf: Path, header: GgufHeader, config: Any, alone: Path) -> Any:
    """Build a file's model in bfloat16; in the folder of `alone` there are no other files."""
    import torch

    wanted = _laid_out(gguf, header, config)
    if header.architecture == GPT_OSS:
        return _filled(gguf, wanted, weights_of(header, _reader_of(gguf)))
    known = _known(header, wanted)
    passed_over = {} if known is None else _passed_over(gguf, header, config, known)
    model, report = _read(gguf, header, config, alone, torch.bfloat16 if known else torch.float32)
    if left := sorted(report.get("unexpected_keys", ())):
        raise _left_over(gguf, header, left)
    missing = sorted(set(report["missing_keys"]) - set(passed_over.values()))
    _refuse_missing(gguf, missing + [str(key) for key in report["mismatched_keys"]])
    read = _reader_of(gguf)
    state = model.to(torch.bfloat16).state_dict()
    for theirs, ours in passed_over.items():
        state[ours].copy_(_tensor(read(header.tensors[theirs])).view_as(state[ours]))
    return model


def _laid_out(gguf: Path, header: GgufHeader, config: Any) -> Any:
    """Build the model without numbers. Raises ModelError: it would take more memory than the file's weights."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        wanted = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, trust_remote_code=False)
    tied = sum(p.numel() for p in {id(p): p for p in wanted.parameters()}.values())
    if tied > header.elements:
        raise ModelError(
            f"{gguf} holds {header.elements:,} weights, but describes a model of {tied:,}", "download it again"
        )
    return wanted


def _read(gguf: Path, header: GgufHeader, config: Any, alone: Path, dtype: Any) -> tuple[Any, Mapping[str, Any]]:
    """Let `transformers` read. The newer of its two readers unpacks in the dtype itself: bfloat16 would lose bits."""
    from transformers import AutoModelForCausalLM, GgufConfig

    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            str(alone.parent),
            gguf_file=alone.name,
            config=config,
            trust_remote_code=False,
            dtype=dtype,
            quantization_config=GgufConfig(gguf_file=alone.name, dequantize=True),
            output_loading_info=True,
        )
    except RuntimeError as error:
        if _REPORTED in str(error):
            raise _apart(gguf, header) from error
        raise
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    return model, report


def _apart(gguf: Path, header: GgufHeader) -> ModelError:
    """Explain that the reader could not join tensors into one weight: it needs them packed alike."""
    mixed = [
        gate
        for gate, tensor in header.tensors.items()
        if gate.endswith(_GATES) and (up := header.tensors.get(gate.replace("gate", "up"))) and up.kind != tensor.kind
    ]
    if not mixed:
        return ModelError(
            f"transformers' reader cannot put the tensors of {gguf} together; that would need a reader that unpacks "
            "each by itself",
            "use the model's original safetensors instead",
        )
    return ModelError(
        f"{gguf} packs the two halves of an expert's MLP otherwise in {len(mixed)} layers, first {mixed[0]}, and "
        f"transformers' reader of {header.architecture} files makes one weight of them; that would need a reader that "
        "unpacks each separately",
        "use a file that packs both alike, or the model's original safetensors",
    )


def _known(header: GgufHeader, wanted: Any) -> dict[str, str] | None:
    """Map tensors to the weights of `transformers`; None: its reader reports tensors without a name itself."""
    from transformers.integrations.gguf import is_gguf_arch_supported
    from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor, get_gguf_hf_weights_map

    if is_gguf_arch_supported(header.architecture):
        return None
    known: dict[str, str] = get_gguf_hf_weights_map(
        wanted, TENSOR_PROCESSORS.get(header.architecture, TensorProcessor)()
    )
    return known


def _passed_over(gguf: Path, header: GgufHeader, config: Any, known: Mapping[str, str]) -> dict[str, str]:
    """Map the tensors that the reader would leave out to their weights.

    A weight whose name in `transformers` does not end in ".weight" is one of them (the scalar of Gemma 4's layers).
    """
    from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS

    stacks = hasattr(TENSOR_PROCESSORS.get(header.architecture), "GGUF_MOE_WEIGHTS_PATTERN")
    found: dict[str, str] = {}
    left = []
    for name in header.tensors:
        if name in known or name in POSITIONS or _unused(name, config):
            continue
        ours = known.get(name.removesuffix(".weight")) or _router(name)
        if ours is None:
            left.append(name)
        elif not (stacks and _EXPERTS.search(name)):
            found[name] = ours
    if left:
        raise _left_over(gguf, header, left)
    return found


def _unused(name: str, config: Any) -> bool:
    block = _BLOCK.match(name)
    shared = getattr(config, "num_kv_shared_layers", 0) or 0
    return bool(block and _KEPT_BY_OTHERS.search(name) and int(block[1]) >= config.num_hidden_layers - shared)


def _router(name: str) -> str | None:
    for theirs, ours in _GEMMA4_ROUTER.items():
        if name.endswith(theirs):
            return f"model.layers.{name.split('.')[1]}{ours}"
    return None


def _left_over(gguf: Path, header: GgufHeader, names: list[str]) -> ModelError:
    return ModelError(
        f"{gguf} holds {len(names)} tensors for which transformers' model of {header.architecture} files has no room, "
        f"first {names[0]}",
        "use the model's original safetensors instead",
    )


def _refuse_missing(gguf: Path, names: list[str]) -> None:
    if names:
        raise ModelError(f"{gguf} lacks {len(names)} of its model's weights, first {names[0]}", "download it again")


def _reader_of(gguf: Path) -> Callable[[TensorInfo], np.ndarray[Any, Any]]:
    """Make a function that unpacks a tensor of a file: float32, slowest axis first."""
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize

    def read(tensor: TensorInfo) -> np.ndarray[Any, Any]:
        kind = GGMLQuantizationType(tensor.kind)
        data = np.fromfile(gguf, np.uint8, tensor.nbytes, offset=tensor.start)
        return dequantize(data, kind).reshape(tensor.shape[::-1])

    return read


def _tensor(numbers: np.ndarray[Any, Any]) -> Any:
    import torch

    return torch.from_numpy(np.ascontiguousarray(numbers, dtype=np.float32))


def _filled(gguf: Path, wanted: Any, weights: Iterator[tuple[str, np.ndarray[Any, Any]]]) -> Any:
    state = {name: _tensor(numbers).to(wanted.dtype) for name, numbers in weights}
    _refuse_missing(gguf, sorted(wanted.state_dict().keys() - state.keys()))
    wanted.load_state_dict(state, strict=True, assign=True)
    return wanted


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
_PARAMETERS = {  # of no module of their own
    "attn_sinks.weight": "self_attn.sinks",
    "ffn_gate_exps.weight": "mlp.experts.gate_up_proj",
    "ffn_gate_exps.bias": "mlp.experts.gate_up_proj_bias",
    "ffn_down_exps.weight": "mlp.experts.down_proj",
    "ffn_down_exps.bias": "mlp.experts.down_proj_bias",
}
_PAIR = {"ffn_gate_exps": "ffn_up_exps"}
_NAME = re.compile(r"^blk\.(\d+)\.(\w+)\.(weight|bias)$")


def weights_of(header: GgufHeader, read: Callable[[TensorInfo], _Numbers]) -> Iterator[tuple[str, _Numbers]]:
    """Read each weight of a gpt-oss model, whose experts the reader of `transformers` does not find, by its own name.

    llama.cpp keeps gate and up separate, a row an output; the model keeps them interleaved, a column an output.
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
    if f"{what}.{kind}" not in _PARAMETERS:
        raise _unknown(name)
    return _PARAMETERS[f"{what}.{kind}"]


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
    return ModelError(f"the GGUF file holds a tensor that gpt-oss does not have: {name}", "download it again")
