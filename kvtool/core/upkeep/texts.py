"""Text verification: compare the texts of a store's documents with the token ids of their chunks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from kvtool.core.cache import tables
from kvtool.core.cache.integrity import Damage, in_sample
from kvtool.core.errors import DamagedError
from kvtool.core.model.options import ModelOptions
from kvtool.core.model.prompt import chunk_tokens
from kvtool.core.session.identity import model_files, store_identity

if TYPE_CHECKING:
    from kvtool.core.cache.entries import DocumentEntry
    from kvtool.core.cache.store import Store


def stored_tokenizer(store: Store) -> Any:
    """Load the tokenizer of a store's model without using the network. Raises ModelError."""
    from kvtool.core.checkpoint.load import load_tokenizer

    return load_tokenizer(model_files(store_identity(store), ModelOptions(offline=True), store.made_by()))


def compare_texts(store: Store, tokenizer: Any, sample: Fraction = Fraction(1)) -> tuple[int, list[Damage]]:
    compared, damaged = 0, list[Damage]()
    for source in store.sources():
        key = tables.name_key(source)
        if not in_sample(key, sample):
            continue
        with suppress(DamagedError):  # a damaged document, which other checks report
            document = store.document(source)
            if document is None:
                continue
            compared += 1
            reason = next(_differences(store, document, tokenizer), None)
            if reason is not None:
                damaged.append(Damage(reason, "documents", key.hex()))
    return compared, damaged


def _differences(store: Store, document: DocumentEntry, tokenizer: Any) -> Iterator[str]:
    texts = [document.text[ref.start : ref.end] for ref in document.chunks]
    for number, (ref, ids) in enumerate(zip(document.chunks, chunk_tokens(tokenizer, texts), strict=True), 1):
        with suppress(DamagedError):
            info = store.chunk_info(ref.chunk_id)
            if info is not None and info.token_ids != ids:
                yield f"chunk {number} is of another text than the document's"
