"""A GGUF file → a model folder, once: dequantised by `transformers`' own reader and kept in the user's cache."""

from __future__ import annotations

import contextlib
import errno
import importlib.util
import io
import math
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from filelock import FileLock

from kvtool.core.common.places import cache_dir
from kvtool.core.errors import KvtoolError, ModelError, NoSpaceError
from kvtool.core.model.digests import file_digest
from kvtool.core.model.files import PACKED, SOURCE, reading
from kvtool.core.model.gguf_header import GgufHeader, read_header
from kvtool.core.model.origin import Origin, complete_origin, forget_packed, lacks_digests, note_origin

_VERSION = 1  # of the conversion: a change makes old folders unused
_LIMITS = {  # what a header may ask for before a model of that size is laid out
    "block_count": 1_000,
    "embedding_length": 1 << 17,
    "feed_forward_length": 1 << 20,
    "attention.head_count": 1 << 12,
    "attention.head_count_kv": 1 << 12,
    "attention.key_length": 1 << 13,
    "rope.dimension_count": 1 << 13,
    "context_length": 1 << 30,
    "vocab_size": 1 << 22,
    "expert_count": 1 << 12,
}
_LLAMA3_FACTORS = (8.0, 32.0)  # Llama 3.1 and 3.2
_LLAMA3_REST = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
_OWN_SCALE = {"gemma2": 46, "gemma3": 62}  # layers of the model that scales by hidden size / heads
_FULL = "full_attention"
_DIGITS_APART = frozenset({"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone"})


def converted(gguf: Path) -> Path:
    """Find the folder with a GGUF file's model in bfloat16 safetensors; it is made on first use.

    The folder is named by the file's SHA-256. Two processes at once are safe: one converts, the other waits for it.

    Raises
    ------
    ModelError : no such file, damaged, hostile, or of an architecture that cannot be used.
    NoSpaceError : the cache has no room for the converted model.
    """
    if not gguf.is_file():
        raise ModelError(f"there is no file {gguf}", "check the path")
    with reading(gguf):
        folder = cache_dir() / "gguf" / f"{file_digest(gguf)[:32]}-v{_VERSION}"
    if (folder / SOURCE).is_file():
        _complete(gguf, folder)
        return folder
    header = read_header(gguf)
    _check_header(gguf, header)
    _check_installed()
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{folder}.lock"):
            if not (folder / SOURCE).is_file():
                _convert_into(gguf, header, folder)
    except OSError as error:
        raise _cannot_write(folder.parent, error) from error
    return folder


def _complete(gguf: Path, folder: Path) -> None:
    """Give a folder of an earlier release what it lacks: packed weights, and the digests of its files.

    One that cannot be written to does without; so does one whose own weights are damaged, which loading them tells.
    """
    if (folder / PACKED).is_file() and not lacks_digests(folder):
        return
    from safetensors import SafetensorError

    with contextlib.suppress(OSError, SafetensorError), FileLock(f"{folder}.lock"):
        if not (folder / PACKED).is_file():
            _pack(gguf, folder)
        complete_origin(folder)


def _pack(gguf: Path, folder: Path) -> None:
    from kvtool.core.model.quantised.folder import pack_folder

    forget_packed(folder)
    pack_folder(folder, gguf, read_header(gguf))


def _convert_into(gguf: Path, header: GgufHeader, folder: Path) -> None:
    """Convert beside the final place, rename, then mark the folder as whole."""
    part = folder.with_name(f".{folder.name}.part")
    shutil.rmtree(part, ignore_errors=True)  # of a killed process: the lock is ours
    part.mkdir()
    try:
        with _guarded(gguf), _alone(gguf, part) as alone:
            _convert(gguf, alone, header, part)
        shutil.rmtree(folder, ignore_errors=True)  # one without its mark
        part.rename(folder)
        _mark(gguf, folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _mark(gguf: Path, folder: Path) -> None:
    """Note where a folder is from, in its final place: its files' digests are remembered by where they lie."""
    try:
        note_origin(folder, Origin(gguf.name, file_digest(gguf), _VERSION, {}))
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


@contextlib.contextmanager
def _alone(gguf: Path, folder: Path) -> Iterator[Path]:
    """Link the file into a folder of its own: `transformers` would mix in a config or template that lies beside it."""
    with tempfile.TemporaryDirectory(dir=folder) as place:
        link = Path(place) / "model.gguf"
        try:
            link.symlink_to(gguf.resolve())
        except (OSError, NotImplementedError):  # Windows, unless allowed
            yield gguf
        else:
            yield link


def _convert(gguf: Path, alone: Path, header: GgufHeader, target: Path) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, GgufConfig
    from transformers.tokenization_utils_tokenizers import TokenizersBackend

    from kvtool.core.model.load import quiet
    from kvtool.core.model.quantised.folder import pack_folder
    from kvtool.core.model.support import check_supported

    with quiet(), contextlib.redirect_stderr(io.StringIO()):  # the reader draws a progress bar of its own
        source: dict[str, Any] = {"pretrained_model_name_or_path": str(alone.parent), "gguf_file": alone.name}
        config = AutoConfig.from_pretrained(**source, trust_remote_code=False)
        _restore_scaling(gguf, header, config)
        _restore_attention_scale(header, config)
        check_supported(config)
        _check_size(gguf, header, config)
        # AutoTokenizer would read the whole header once more
        tokenizer = TokenizersBackend.from_pretrained(**source, trust_remote_code=False)
        _split_digits(header, tokenizer)
        _begin_as_told(header, tokenizer)
        model, report = AutoModelForCausalLM.from_pretrained(
            **source,
            config=config,
            trust_remote_code=False,
            dtype=torch.bfloat16,
            quantization_config=GgufConfig(gguf_file=alone.name, dequantize=True),
            output_loading_info=True,
        )
        _check_complete(gguf, header, model, report)
        model.hf_quantizer = None
        if hasattr(model.config, "quantization_config"):
            del model.config.quantization_config
        model.save_pretrained(target)
        tokenizer.save_pretrained(target)
        del model
        pack_folder(target, gguf, header)


def _check_header(gguf: Path, header: GgufHeader) -> None:
    if not header.architecture:
        raise ModelError(f"{gguf} does not say which architecture it holds", "it is not a language model")
    if (parts := header.metadata.get("split.count", 1)) != 1:
        raise ModelError(f"{gguf} is one of {parts} parts", "join them first: llama-gguf-split --merge FIRST OUT")
    if not header.tensors:
        raise ModelError(f"{gguf} holds no tensors", "it is a vocabulary, not a model")
    for name, limit in _LIMITS.items():
        value = header.value(name)
        numbers = value if isinstance(value, list) else [value]
        if any(isinstance(n, bool | str) or (n is not None and not 0 <= n <= limit) for n in numbers):
            raise ModelError(f"{gguf} asks for {header.architecture}.{name} = {value!r}", "download it again")
    if any("ssm_" in name or "shortconv" in name for name in header.tensors):
        raise ModelError(
            f"{gguf} keeps a recurrent state ({header.architecture}), which cannot be cut into chunks",
            "use a model with plain attention",
        )


def _check_installed() -> None:
    missing = [name for name in ("gguf", "accelerate") if importlib.util.find_spec(name) is None]
    if missing:
        raise ModelError(f"GGUF files need {' and '.join(missing)}", f"pip install {' '.join(missing)}")


def _check_size(gguf: Path, header: GgufHeader, config: Any) -> None:
    """Refuse a file whose metadata describe a larger model than its weights are: it would be laid out in memory."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        wanted = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    tied = sum(p.numel() for p in {id(p): p for p in wanted.parameters()}.values())
    if tied > header.elements:
        raise ModelError(
            f"{gguf} holds {header.elements:,} weights, but describes a model of {tied:,}", "download it again"
        )


def _check_complete(gguf: Path, header: GgufHeader, model: Any, report: Any) -> None:
    missing = sorted(report["missing_keys"]) + [str(key) for key in report["mismatched_keys"]]
    if missing:
        raise ModelError(f"{gguf} lacks {len(missing)} of its model's weights, first {missing[0]}", "download it again")
    theirs = sum(name.endswith(".bias") for name in header.tensors)
    ours = sum(name.endswith(".bias") for name, _ in model.named_parameters())
    if theirs > ours:
        raise ModelError(
            f"{gguf} has {theirs} bias vectors where transformers' {header.architecture} has room for {ours}",
            "use the model's original safetensors instead",
        )


def _restore_scaling(gguf: Path, header: GgufHeader, config: Any) -> None:
    """Restore RoPE scaling, which `transformers`' GGUF reader passes over in silence (checked with 5.23)."""
    kind = header.value("rope.scaling.type")
    rope = dict(getattr(config, "rope_parameters", None) or {})
    if "rope_freqs.weight" in header.tensors:
        config.rope_parameters = rope | _llama3_scaling(gguf, header)
    elif any(name.startswith("rope_factors") for name in header.tensors) or kind == "longrope":
        raise ModelError(f"{gguf} uses longrope, whose positions depend on the prompt's length", _OTHER_MODEL)
    elif kind in ("linear", "yarn") and rope.get("rope_type", "default") == "default":
        scaling = {"rope_type": kind, "factor": float(header.value("rope.scaling.factor") or 1.0)}
        if original := header.value("rope.scaling.original_context_length"):
            scaling["original_max_position_embeddings"] = original
        whole = rope.get(_FULL)  # of several RoPEs it is that of the layers that see all (Gemma 3)
        config.rope_parameters = rope | ({_FULL: whole | scaling} if isinstance(whole, dict) else scaling)


def _restore_attention_scale(header: GgufHeader, config: Any) -> None:
    """Restore the scale of scores where the file does not say it: Gemma's models of 27 billion weights have one of
    their own, which llama.cpp knows them by their layers for."""
    if header.value("block_count") == _OWN_SCALE.get(header.architecture, 0):
        config.query_pre_attn_scalar = config.hidden_size // config.num_attention_heads


def _llama3_scaling(gguf: Path, header: GgufHeader) -> dict[str, Any]:
    """Find out which of the published Llama 3 scalings the stored frequency divisors are."""
    import numpy as np

    tensor = header.tensors["rope_freqs.weight"]
    with gguf.open("rb") as file:
        file.seek(tensor.start)
        stored = np.frombuffer(file.read(tensor.nbytes), dtype=np.float32) if tensor.kind == 0 else np.empty(0)
    base = float(header.value("rope.freq_base") or 10_000.0)
    for factor in _LLAMA3_FACTORS:
        wanted = _llama3_divisors(base, len(stored), factor)
        if len(stored) and np.allclose(stored, wanted, rtol=1e-3):
            return {"rope_type": "llama3", "factor": factor, **_LLAMA3_REST}
    raise ModelError(f"{gguf} scales its RoPE frequencies in a way that is not known", _OTHER_MODEL)


def _llama3_divisors(base: float, pairs: int, factor: float) -> list[float]:
    """The divisors of llama.cpp's `rope_freqs`, from `_compute_llama3_parameters` in transformers."""
    low, high = _LLAMA3_REST["low_freq_factor"], _LLAMA3_REST["high_freq_factor"]
    turns = [
        _LLAMA3_REST["original_max_position_embeddings"] / (2 * math.pi * base ** (i / pairs)) for i in range(pairs)
    ]
    smooth = [min(max((t - low) / (high - low), 0.0), 1.0) for t in turns]
    return [1.0 / ((1.0 - s) / factor + s) for s in smooth]


def _split_digits(header: GgufHeader, tokenizer: Any) -> None:
    """Set every digit apart where the pre-tokenizer does, which `transformers`' GGUF reader does not know by name."""
    from tokenizers import pre_tokenizers

    if header.metadata.get("tokenizer.ggml.pre") in _DIGITS_APART:
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )


def _begin_as_told(header: GgufHeader, tokenizer: Any) -> None:
    """Begin texts with BOS where the file says so, which `transformers`' GGUF reader passed over before 5.23."""
    if header.metadata.get("tokenizer.ggml.add_bos_token") is True and not tokenizer.add_bos_token:
        tokenizer.add_bos_token = True


_OTHER_MODEL = "use the model's original safetensors, or another model"


@contextlib.contextmanager
def _guarded(gguf: Path) -> Iterator[None]:
    """Turn whatever the reader trips over into an error about the file, which came from elsewhere."""
    try:
        yield
    except KvtoolError:
        raise
    except MemoryError as error:
        raise KvtoolError(
            f"not enough memory to convert {gguf}", "close other programs or use a smaller model"
        ) from error
    except Exception as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # the disk's fault
        if number := re.search(r"\(os error (\d+)\)", str(error)):  # as well, in safetensors' words
            raise OSError(int(number[1]), os.strerror(int(number[1]))) from error
        what = str(error).splitlines()[0][:300] if str(error) else type(error).__name__
        raise ModelError(f"{gguf} could not be converted: {what}", _OTHER_MODEL) from error


def _cannot_write(folder: Path, error: OSError) -> KvtoolError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return NoSpaceError(f"no space left in {folder}", "free some space, or set KVTOOL_CACHE to another disk")
    return KvtoolError(f"cannot write the converted model into {folder}: {error}", "set KVTOOL_CACHE to another folder")
