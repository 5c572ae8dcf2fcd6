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
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from filelock import FileLock

from kvtool.core.checkpoint.files import SOURCE, UNPACK, Once, file_digest, note_origin, read_origin, reading, unnoticed
from kvtool.core.checkpoint.gguf.header import OTHER_MODEL, GgufHeader, read_header, read_texts
from kvtool.core.common.files import cache_dir, make_folder
from kvtool.core.errors import KvtoolError, ModelError, NoSpaceError

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
    from kvtool.core.checkpoint.gguf.config import model_config
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
