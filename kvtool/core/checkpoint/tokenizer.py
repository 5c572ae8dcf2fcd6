"""Tokenizer of a model's folder, without transformers: its tokenizer.json, special tokens and chat template."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenizers import AddedToken
    from tokenizers import Tokenizer as Backend

_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
_TEMPLATE = "chat_template.jinja"
_UNREAD = ("special_tokens_map.json", "chat_template.json", "additional_chat_templates", "added_tokens.json")
_PATCHED = 100_000  # tokens: transformers corrects larger tokenizers of some families


class Tokenizer:
    """Attributes have the names of those of transformers' tokenizers."""

    def __init__(self, backend: Backend, special_tokens: Mapping[str, str], chat_template: str | None) -> None:
        self.backend_tokenizer, self.special_tokens_map = backend, special_tokens
        self.chat_template = chat_template
        self.added_tokens_decoder: dict[int, AddedToken] = backend.get_added_tokens_decoder()

    @property
    def bos_token_id(self) -> int | None:
        return self._id("bos_token")

    @property
    def eos_token_id(self) -> int | None:
        return self._id("eos_token")

    def _id(self, name: str) -> int | None:
        token = self.special_tokens_map.get(name)
        return None if token is None else self.backend_tokenizer.token_to_id(token)

    def get_added_vocab(self) -> dict[str, int]:
        return {token.content: number for number, token in self.added_tokens_decoder.items()}

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False, **spaces: bool) -> str:
        return self.backend_tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)


def read_tokenizer(folder: Path) -> Tokenizer | None:
    """Read a folder's tokenizer; None: transformers would change something of it."""
    from tokenizers import Tokenizer as Backend

    path = folder / "tokenizer.json"
    if not path.is_file() or any((folder / name).exists() for name in _UNREAD):
        return None
    settings = _settings(folder / "tokenizer_config.json")
    backend = Backend.from_file(str(path))
    special = {name: _content(settings[name]) for name in _NAMED if settings.get(name) is not None}
    template = settings.get("chat_template")
    if (folder / _TEMPLATE).is_file():
        template = (folder / _TEMPLATE).read_text(encoding="utf-8")
    added = {token.content: token for token in backend.get_added_tokens_decoder().values()}
    others = settings.get("extra_special_tokens") or settings.get("additional_special_tokens") or ()
    if not (isinstance(template, str | None) and isinstance(others, list | tuple)):
        return None
    if not {*special.values(), *map(_content, others)} <= {name for name, token in added.items() if token.special}:
        return None
    if not all(_is_same(added, stated) for stated in (settings.get("added_tokens_decoder") or {}).values()):
        return None
    begins = backend.encode("a").ids[:1] == [backend.token_to_id(special.get("bos_token", ""))]
    if begins != bool(settings.get("add_bos_token", begins and backend.post_processor is not None)):
        return None
    spaced = settings.get("clean_up_tokenization_spaces") and type(backend.model).__name__ != "BPE"
    if spaced or (backend.get_vocab_size() > _PATCHED and "mistral" in str(_settings(folder / "config.json"))):
        return None
    backend.no_truncation()
    backend.no_padding()
    return Tokenizer(backend, special, template)


def _settings(path: Path) -> dict[str, Any]:
    settings = json.loads(path.read_bytes()) if path.is_file() else {}
    return settings if isinstance(settings, dict) else {}


def _content(token: Any) -> str:
    return str(token["content"]) if isinstance(token, dict) else str(token)


def _is_same(added: Mapping[str, AddedToken], stated: Mapping[str, Any]) -> bool:
    token = added.get(str(stated.get("content")))
    if token is None:
        return False
    return all(bool(stated.get(flag, getattr(token, flag))) == getattr(token, flag) for flag in _FLAGS)
