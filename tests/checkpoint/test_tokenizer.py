"""The tokenizer that is read without transformers is the one that transformers reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from kvtool.core.checkpoint.tokenizer import read_tokenizer
from kvtool.core.model.template import render
from kvtool.core.model.tokens import encode, encode_control
from tests.families import tiny_tokenizer

TEXTS = ("The tide, 조수 1874", "<|user|>\nWho?</s>", " a  b\n\tc ", "", "e\u0301 👩‍👩‍👧 \u200b")
TURNS = [{"role": "user", "content": "Who built the mill?"}]


def saved(folder: Path, chat: bool = True, **settings: Any) -> Path:
    tiny_tokenizer(chat).save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))
    return folder


@pytest.mark.parametrize("chat", [True, False])
def test_equals_that_of_transformers(chat: bool, tmp_path: Path) -> None:
    ours, theirs = read_tokenizer(saved(tmp_path, chat)), PreTrainedTokenizerFast.from_pretrained(tmp_path)
    assert ours is not None
    for text in TEXTS:
        assert encode(ours, text) == encode(theirs, text)
        ids = encode_control(ours, text)
        assert ids == encode_control(theirs, text)
        for skips in (True, False):
            assert ours.decode(ids, skip_special_tokens=skips) == theirs.decode(ids, skip_special_tokens=skips)
    for name in ("bos_token_id", "eos_token_id", "chat_template", "special_tokens_map"):
        assert getattr(ours, name) == getattr(theirs, name)
    assert ours.get_added_vocab() == theirs.get_added_vocab()
    if chat:
        assert render(ours, [TURNS]) == render(theirs, [TURNS])


@pytest.mark.parametrize(
    "settings",
    [
        {"add_bos_token": False},
        {"pad_token": "<pad>"},
        {"additional_special_tokens": ["<image>"]},
        {"extra_special_tokens": {"image_token": "<image>"}},
        {"chat_template": [{"name": "default", "template": "x"}]},
        {"added_tokens_decoder": {"0": {"content": "<s>", "special": True, "lstrip": True}}},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_left_to_transformers_where_it_would_change_something(settings: dict[str, Any], tmp_path: Path) -> None:
    assert read_tokenizer(saved(tmp_path, chat=False, **settings)) is None
