"""Folder with the settings and tokenizer of a GGUF file, written once into the user's cache.

The reader of `transformers` ignores much of the metadata. A value that it ignores becomes that of one published model,
and answers are wrong without a word: the base of StarCoder2's positions, the windows of Phi-3, the width of experts,
the heads of Gemma 4's layers, the scaling of RoPE. (Checked with 5.23.)
"""

from __future__ import annotations

import contextlib
import errno
import io
import json
import math
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock

from kvtool.core.checkpoint.files import SOURCE, UNPACK, Once, file_digest, note_origin, read_origin, reading, unnoticed
from kvtool.core.checkpoint.gguf.header import OTHER_MODEL, GgufHeader, TensorInfo, read_header, read_texts
from kvtool.core.common.files import cache_dir, make_folder
from kvtool.core.errors import KvtoolError, ModelError, NoSpaceError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


GPT_OSS, _GEMMA4 = "gpt-oss", "gemma4"
# Names in the file that the reader does not know, and the configuration's names.
_TOLD = {
    "attention.key_length": "head_dim",
    "attention.sliding_window": "sliding_window",
    "attention.layer_norm_epsilon": "norm_eps",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
}
# All values of gpt-oss: the reader of `transformers` fails on this architecture's numbers.
_GPT_OSS = {
    "context_length": "max_position_embeddings",
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "expert_feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.sliding_window": "sliding_window",
    "expert_count": "num_local_experts",
    "expert_used_count": "num_experts_per_tok",
}
_OWN_SCALE = {"gemma2": 46, "gemma3": 62}  # layers of the model that scales by hidden size / heads


def model_config(gguf: Path, header: GgufHeader, outline: Path) -> Any:
    """Build a file's configuration; `outline` is its own, next to which there is no configuration."""
    from transformers import CONFIG_MAPPING

    read = _read(gguf, header, outline)
    kind = CONFIG_MAPPING[read.pop("model_type")]
    stated = _gemma4(header) if header.architecture == _GEMMA4 else _stated(header, kind)
    config = kind(**{"pad_token_id": None, "dtype": "bfloat16"} | read | stated)
    restore_rope(gguf, header, config)
    # No file states the scale of scores of Gemma's models of 27 billion weights: llama.cpp, too, counts their layers.
    if header.value("block_count") == _OWN_SCALE.get(header.architecture, 0):
        config.query_pre_attn_scalar = config.hidden_size // config.num_attention_heads
    return config


def _read(gguf: Path, header: GgufHeader, outline: Path) -> dict[str, Any]:
    import transformers

    if header.architecture == GPT_OSS:
        read = {ours: header.value(theirs) for theirs, ours in _GPT_OSS.items() if header.value(theirs) is not None}
        ids = {f"{name}_token_id": header.metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos")}
        return {"model_type": "gpt_oss", "vocab_size": header.metadata.get("tokenizer.ggml.tokens"), **ids, **read}
    known = _architectures()
    if header.architecture not in known:
        raise ModelError(
            f"{gguf} holds a model of the architecture {header.architecture!r}, whose GGUF files "
            f"transformers {transformers.__version__} does not read; that would need a reader that knows its names and "
            f"layouts, as it does of {', '.join(sorted(known))}",
            OTHER_MODEL,
        )
    read, _ = transformers.PreTrainedConfig.get_config_dict(str(outline.parent), gguf_file=outline.name)
    return {"vocab_size": header.metadata.get("tokenizer.ggml.tokens")} | dict(read)


def _architectures() -> set[str]:
    from gguf.constants import MODEL_ARCH_NAMES
    from transformers import CONFIG_MAPPING
    from transformers.integrations.gguf import GGUF_CONFIG_ARCHS
    from transformers.modeling_gguf_pytorch_utils import GGUF_SUPPORTED_ARCHITECTURES

    spelled = {
        name.replace("-", "").replace("_", "") for name in GGUF_SUPPORTED_ARCHITECTURES if name in CONFIG_MAPPING
    }
    legacy = {name for name in MODEL_ARCH_NAMES.values() if name.replace("-", "").replace("_", "") in spelled}
    return legacy | set(GGUF_CONFIG_ARCHS) | {GPT_OSS, _GEMMA4}


def _stated(header: GgufHeader, kind: Any) -> dict[str, Any]:
    known = kind.__dataclass_fields__
    stated = {ours: header.value(theirs) for theirs, ours in _TOLD.items() if ours in known}
    return {name: value or None for name, value in stated.items() if value is not None}


def _gemma4(header: GgufHeader) -> dict[str, Any]:
    windowed = [bool(one) for one in header.value("attention.sliding_window_pattern")]
    heads, widths = header.value("attention.head_count_kv"), header.value("feed_forward_length")
    full = windowed.index(False)
    experts = {
        "enable_moe_block": True,
        "num_experts": header.value("expert_count"),
        "top_k_experts": header.value("expert_used_count"),
        "moe_intermediate_size": header.value("expert_feed_forward_length"),
    }
    alike = f"blk.{full}.attn_v.weight" not in header.tensors  # keys that are their values, too
    return {
        "layer_types": ["sliding_attention" if one else "full_attention" for one in windowed],
        "head_dim": header.value("attention.key_length_swa"),
        "global_head_dim": header.value("attention.key_length"),
        "num_key_value_heads": heads[windowed.index(True)] if isinstance(heads, list) else heads,
        "num_global_key_value_heads": heads[full] if isinstance(heads, list) else None,
        "attention_k_eq_v": alike,
        "num_kv_shared_layers": header.value("attention.shared_kv_layers") or 0,
        "intermediate_size": widths[0] if isinstance(widths, list) else widths,
        "use_double_wide_mlp": isinstance(widths, list) and widths[-1] != widths[0],
        "hidden_size_per_layer_input": header.value("embedding_length_per_layer_input") or 0,
        "vocab_size_per_layer_input": header.metadata.get("tokenizer.ggml.tokens"),
        "final_logit_softcapping": header.value("final_logit_softcapping"),
        **(experts if header.value("expert_count") else {}),
    }


POSITIONS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
_ORIGINAL = "original_max_position_embeddings"
_LLAMA3_FACTORS = (8.0, 32.0)  # Llama 3.1 and 3.2
_LLAMA3_REST = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, _ORIGINAL: 8192}
_FULL, _SLIDING = "full_attention", "sliding_attention"


def restore_rope(gguf: Path, header: GgufHeader, config: Any) -> None:
    rope = dict(getattr(config, "rope_parameters", None) or {})
    whole = rope.get(_FULL)
    stated = (whole if isinstance(whole, dict) else rope) | _scaling(gguf, header, config)
    if not isinstance(whole, dict):
        config.rope_parameters = stated | _base(header) | _part(header, config)
        if hasattr(config, _ORIGINAL):  # Phi-3's own, which takes precedence over that of its RoPE
            setattr(config, _ORIGINAL, stated.get(_ORIGINAL, config.max_position_embeddings))
        return
    near = rope[_SLIDING] | _base(header, "_swa")
    config.rope_parameters = {_SLIDING: near, _FULL: stated | _base(header)}  # Gemma 3 and 4


def _base(header: GgufHeader, of: str = "") -> dict[str, Any]:
    base = header.value(f"rope.freq_base{of}")
    return {} if base is None else {"rope_theta": float(base)}


def _part(header: GgufHeader, config: Any) -> dict[str, Any]:
    rotated = header.value("rope.dimension_count")
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return {} if rotated in (None, 0, head) else {"partial_rotary_factor": rotated / head}


def _scaling(gguf: Path, header: GgufHeader, config: Any) -> dict[str, Any]:
    if divisors := header.tensors.get(POSITIONS[0]):
        stored = _numbers(gguf, divisors)
        return _proportional(stored) or _llama3(gguf, header, stored)
    kind = header.value("rope.scaling.type")
    if kind == "longrope" or any(name in header.tensors for name in POSITIONS[1:]):
        return _longrope(gguf, header)
    if kind not in ("linear", "yarn"):
        return {}
    scaling = {"rope_type": kind, "factor": float(header.value("rope.scaling.factor") or 1.0)}
    if original := header.value("rope.scaling.original_context_length"):
        scaling[_ORIGINAL] = original
    return scaling


def _longrope(gguf: Path, header: GgufHeader) -> dict[str, Any]:
    """Read both sets of factors, which are tensors, and the reach of the short ones from the metadata (Phi-3, Phi-4).

    Longer prompts are refused as a folder's are (`context_limit`).
    """
    long, short = (header.tensors.get(name) for name in POSITIONS[1:])
    original = header.value("rope.scaling.original_context_length")
    if long is None or short is None or not original:
        needed = "both rope_factors_long and rope_factors_short, and the length that the short ones are for"
        raise ModelError(f"{gguf} uses longrope, and lacks what that takes: {needed}", OTHER_MODEL)
    factors = {"short_factor": _numbers(gguf, short).tolist(), "long_factor": _numbers(gguf, long).tolist()}
    scaling = {"rope_type": "longrope", **factors, _ORIGINAL: original}
    if grown := header.value("rope.scaling.attn_factor"):
        scaling["attention_factor"] = float(grown)
    return scaling


def _proportional(stored: npt.NDArray[np.float32]) -> dict[str, Any]:
    rotated = int((stored == 1.0).sum())
    if not 0 < rotated < len(stored) or (stored[:rotated] != 1.0).any() or (stored[rotated:] < 1e20).any():
        return {}
    return {"rope_type": "proportional", "partial_rotary_factor": rotated / len(stored)}


def _llama3(gguf: Path, header: GgufHeader, stored: npt.NDArray[np.float32]) -> dict[str, Any]:
    import numpy as np

    base = float(header.value("rope.freq_base") or 10_000.0)
    for factor in _LLAMA3_FACTORS:
        wanted = llama3_divisors(base, len(stored), factor)
        if len(stored) and np.allclose(stored, wanted, rtol=1e-3):
            return {"rope_type": "llama3", "factor": factor, **_LLAMA3_REST}
    needed = "that would need one of Llama 3's scalings, or a file that says which it is"
    raise ModelError(f"{gguf} scales its RoPE frequencies in a way that is not known; {needed}", OTHER_MODEL)


def llama3_divisors(base: float, pairs: int, factor: float) -> list[float]:
    """Compute the divisors of llama.cpp's `rope_freqs`, as `_compute_llama3_parameters` in transformers."""
    low, high = _LLAMA3_REST["low_freq_factor"], _LLAMA3_REST["high_freq_factor"]
    turns = [_LLAMA3_REST[_ORIGINAL] / (2 * math.pi * base ** (i / pairs)) for i in range(pairs)]
    smooth = [min(max((t - low) / (high - low), 0.0), 1.0) for t in turns]
    return [1.0 / ((1.0 - s) / factor + s) for s in smooth]


def _numbers(gguf: Path, tensor: TensorInfo) -> npt.NDArray[np.float32]:
    import numpy as np

    return np.fromfile(gguf, np.float32, tensor.nbytes // 4 if tensor.kind == 0 else 0, offset=tensor.start)


_VERSION = 1  # of what is written: a change makes old folders, and stores, unused
_LIMITS = {  # what a header may ask for
    1_000: "block_count",
    1 << 13: "attention.head_count attention.head_count_kv attention.key_length attention.key_length_swa "
    "rope.dimension_count expert_count expert_used_count",
    1 << 20: "embedding_length feed_forward_length expert_feed_forward_length expert_shared_feed_forward_length "
    "embedding_length_per_layer_input",
    1 << 22: "vocab_size",
    1 << 30: "context_length",
}
_DIGITS_APART = frozenset({"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone"})


def prepare_folder(gguf: Path, once: Once = unnoticed) -> Path:
    """Find the folder with a GGUF file's settings and tokenizer; it is written on first use.

    The folder is named by the file's SHA-256. Two processes at once are safe: one writes, the other waits for it.
    """
    if not gguf.is_file():
        raise ModelError(f"there is no file {gguf}", "check the path")
    with reading(gguf):
        folder = cache_dir() / "gguf" / f"{file_digest(gguf, once)[:32]}-v{_VERSION}"
    if _is_whole(folder):
        return folder
    header = read_header(gguf)
    _check_header(gguf, header)
    try:
        make_folder(folder.parent)
        with once(UNPACK), FileLock(f"{folder}.lock", mode=0o600):
            if not _is_whole(folder):
                _write_folder(gguf, header, folder)
    except OSError as error:
        raise _cannot_write(folder.parent, error) from error
    return folder


def _is_whole(folder: Path) -> bool:
    return (folder / SOURCE).is_file() and "config.json" in read_origin(folder).files


def _write_folder(gguf: Path, header: GgufHeader, folder: Path) -> None:
    part = folder.with_name(f".{folder.name}.part")
    shutil.rmtree(part, ignore_errors=True)  # of a killed process: the lock is ours
    make_folder(part)
    try:
        with _guarded(gguf):
            _write_files(gguf, header, part)
        shutil.rmtree(folder, ignore_errors=True)  # an incomplete one
        part.rename(folder)
        note_origin(folder, gguf, _VERSION)  # in its final place: digests of files are remembered by their paths
    finally:
        shutil.rmtree(part, ignore_errors=True)
        if not (folder / SOURCE).is_file():
            shutil.rmtree(folder, ignore_errors=True)


def _write_files(gguf: Path, header: GgufHeader, target: Path) -> None:
    pass
    from kvtool.core.checkpoint.support import check_extent, check_supported
    from kvtool.core.common.collecting import paused_collection, quiet

    # `transformers` would mix in settings that are stored next to the file.
    with quiet(), contextlib.redirect_stderr(io.StringIO()), tempfile.TemporaryDirectory(dir=target) as place:
        outline = Path(place) / "outline.gguf"
        outline.write_bytes(header.outline)
        config = model_config(gguf, header, outline)
    check_supported(config)
    check_extent(gguf, config, [{"shape": tensor.shape, "dtype": "F32"} for tensor in header.tensors.values()])
    config.save_pretrained(target)
    with paused_collection():
        write_tokenizer(gguf, header, target)


def _check_header(gguf: Path, header: GgufHeader) -> None:
    if not header.architecture:
        raise ModelError(f"{gguf} does not say which architecture it holds", "it is not a language model")
    if (parts := header.metadata.get("split.count", 1)) != 1:
        raise ModelError(f"{gguf} is one of {parts} parts", "join them first: llama-gguf-split --merge FIRST OUT")
    if not header.tensors:
        raise ModelError(f"{gguf} holds no tensors", "it is a vocabulary, not a model")
    for name, limit in ((name, limit) for limit, names in _LIMITS.items() for name in names.split()):
        value = header.value(name)
        numbers = value if isinstance(value, list) else [value]
        if any(isinstance(n, bool | str) or (n is not None and not 0 <= n <= limit) for n in numbers):
            raise ModelError(f"{gguf} asks for {header.architecture}.{name} = {value!r}", "download it again")


@contextlib.contextmanager
def _guarded(gguf: Path) -> Iterator[None]:
    try:
        yield
    except KvtoolError:
        raise
    except Exception as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # the disk's fault
        what = str(error).splitlines()[0][:300] if str(error) else type(error).__name__
        needed = "that would need a file as llama.cpp's converter writes it"
        raise ModelError(f"{gguf} could not be read: {what}; {needed}", OTHER_MODEL) from error


def _cannot_write(folder: Path, error: OSError) -> KvtoolError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return NoSpaceError(f"no space left in {folder}", "free some space, or set KVTOOL_CACHE to another disk")
    return KvtoolError(f"cannot write a model's settings to {folder}: {error}", "set KVTOOL_CACHE to another folder")


# ---- the tokenizer -----------------------------------------------------------------------------------------------


def write_tokenizer(gguf: Path, header: GgufHeader, folder: Path) -> None:
    """Write tokenizer.json, which is parsed at each start and so has no indentation, and tokenizer_config.json."""
    from transformers.integrations.gguf import GGUF_TOKENIZER_MAPPING, convert_gguf_tokenizer

    # The reader of `transformers` takes seconds for these texts.
    metadata = header.metadata | {key: read_texts(gguf, header, key) for key in header.texts}
    described, settings = (
        {name: metadata[f"tokenizer.{key}"] for key, name in names.items() if f"tokenizer.{key}" in metadata}
        for names in (GGUF_TOKENIZER_MAPPING["tokenizer"], GGUF_TOKENIZER_MAPPING["tokenizer_config"])
    )
    tokenizer, _ = convert_gguf_tokenizer(header.architecture, described)
    split_digits(header, tokenizer)
    _add_ends(described, settings, tokenizer)
    (folder / "tokenizer.json").write_text(tokenizer.to_str(), encoding="utf-8")
    saved = {f"{name}_token": token for name in ("bos", "eos", "unk", "pad") for token, _ in _special(described, name)}
    if template := settings.get("chat_template"):
        saved["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(saved), encoding="utf-8")


def _special(described: dict[str, Any], name: str) -> list[tuple[str, int]]:
    number = described.get(f"{name}_token_id")
    return [] if number is None else [(described["tokens"][number], number)]


def _add_ends(described: dict[str, Any], settings: dict[str, Any], tokenizer: Any) -> None:
    """Let a text begin with BOS and end with EOS if the file asks for it, as the reader of `transformers` does."""
    from tokenizers import processors

    kind = described["tokenizer_type"]
    stated = {"add_bos_token": True} if kind == "llama" else {}
    stated |= settings | ({"add_bos_token": False} if kind == "gemma4" else {})
    bos, eos = (_special(described, name) if stated.get(f"add_{name}_token") else [] for name in ("bos", "eos"))
    if stated.keys() & {"add_bos_token", "add_eos_token"}:
        first, second = (
            [*(f"{token}:{place}" for token, _ in bos), f"${text}:{place}", *(f"{token}:{place}" for token, _ in eos)]
            for place, text in enumerate("AB")
        )
        tokenizer.post_processor = processors.TemplateProcessing(first, [*first, *second], [*bos, *eos])


def split_digits(header: GgufHeader, tokenizer: Any) -> None:
    """Split every digit off where the pre-tokenizer does, which `transformers`' GGUF reader does not know by name."""
    from tokenizers import pre_tokenizers

    if header.metadata.get("tokenizer.ggml.pre") in _DIGITS_APART:
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
