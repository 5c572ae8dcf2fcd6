"""Tokenizer of a GGUF file, in the files that `transformers` loads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kvtool.core.checkpoint.gguf.header import GgufHeader, read_texts

_DIGITS_APART = frozenset({"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone"})


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
