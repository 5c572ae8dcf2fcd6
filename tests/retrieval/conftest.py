"""Two tiny embedding models, one of each kind, whose vectors are known."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from kvtool.core.cache.store import Store
from tests.retrieval.making import store_of

WORDS = ["[UNK]", "[PAD]", "mill", "grinder", "river", "stream", "bread", "loaf"]
# Two words that mean the same share a direction.
MEANINGS = np.array([[0.1] * 4, [0.0] * 4, *np.repeat(np.eye(4)[:3], 2, axis=0)], np.float32)


def tokenizer(words: Sequence[str] = WORDS) -> Tokenizer:
    made = Tokenizer(WordLevel({word: at for at, word in enumerate(words)}, unk_token="[UNK]"))
    made.pre_tokenizer = Whitespace()
    return made


@pytest.fixture
def store(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Store]:
    with store_of(tmp_path / "store", request.module.TEXTS) as opened:
        yield opened


@pytest.fixture(scope="session")
def static_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One of model2vec: a text's vector is the mean of its words'."""
    from model2vec import StaticModel

    path = tmp_path_factory.mktemp("static")
    StaticModel(MEANINGS, tokenizer()).save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def sentence_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One of sentence-transformers: a tiny BERT of random weights, and the mean over tokens."""
    import torch
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    path = tmp_path_factory.mktemp("sentence")
    torch.manual_seed(0)
    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    BertModel(BertConfig(vocab_size=len(WORDS), max_position_embeddings=32, **small)).save_pretrained(path / "bert")
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer(), unk_token="[UNK]", pad_token="[PAD]")
    fast.save_pretrained(path / "bert")
    SentenceTransformer(modules=[Transformer(str(path / "bert")), Pooling(16)]).save(str(path / "model"))
    return path / "model"
