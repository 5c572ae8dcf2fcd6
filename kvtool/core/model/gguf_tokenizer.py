"""The tokenizer of a GGUF file, as `transformers` reads it, and what it passes over."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvtool.core.model.gguf_header import GgufHeader

_DIGITS_APART = frozenset({"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone"})


def read_tokenizer(header: GgufHeader, alone: Path) -> Any:
    """Read the fast tokenizer of a file that lies in a folder of its own."""
    from transformers.tokenization_utils_tokenizers import TokenizersBackend

    # AutoTokenizer would read the whole header once more
    tokenizer = TokenizersBackend.from_pretrained(str(alone.parent), gguf_file=alone.name, trust_remote_code=False)
    split_digits(header, tokenizer)
    begin_as_told(header, tokenizer)
    return tokenizer


def split_digits(header: GgufHeader, tokenizer: Any) -> None:
    """Set every digit apart where the pre-tokenizer does, which `transformers`' GGUF reader does not know by name."""
    from tokenizers import pre_tokenizers

    if header.metadata.get("tokenizer.ggml.pre") in _DIGITS_APART:
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )


def begin_as_told(header: GgufHeader, tokenizer: Any) -> None:
    """Begin texts with BOS where the file says so, which `transformers`' GGUF reader passed over before 5.23."""
    if header.metadata.get("tokenizer.ggml.add_bos_token") is True and not tokenizer.add_bos_token:
        tokenizer.add_bos_token = True
