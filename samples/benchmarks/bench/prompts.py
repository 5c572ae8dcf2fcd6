"""Prompts of a wanted length over stored chunks: a store's own, or random ones prefilled into a temporary store."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from kvtool.core.cache.entries import ChunkInfo
from kvtool.core.cache.identity import chunk_id, ids_digest
from kvtool.core.cache.layout import REPAIR
from kvtool.core.cache.store import Store
from kvtool.core.cache.writer import Writer
from kvtool.core.codec.base import channels_of, shape_of_layer, wide_sides
from kvtool.core.codec.fit import default_groups, fit_profile
from kvtool.core.codec.levels import level_of
from kvtool.core.codec.profile import Profile
from kvtool.core.common.files import cache_dir, make_folder
from kvtool.core.common.types import Ids
from kvtool.core.errors import DamagedError, KvtoolError, UsageError
from kvtool.core.fusion.plan import Candidate, Plan, build_plan, with_stored_rows
from kvtool.core.ingest.storer import batch_tokens
from kvtool.core.model.decoder import Decoder
from kvtool.core.model.prefill import ChunkKV, LeadIn, PrefillItem, prefill_chunks
from kvtool.core.records.encode import encode_layers
from kvtool.core.records.read import exact_level
from kvtool.core.session.identity import StoreIdentity

if TYPE_CHECKING:
    from kvtool.core.cache.entries import ChunkInfo


@dataclass(frozen=True, slots=True)
class Stored:
    """A piece of a prompt and where its records are."""

    chunk_id: bytes
    ids: Ids
    level: str


@dataclass(frozen=True, slots=True)
class BenchPrompt:
    """Prefix, chunks and question.

    Attributes
    ----------
    wanted : the context that was asked for.
    prefix : None: the model has none.
    holds_all : there are no more chunks than these.
    """

    wanted: int
    prefix: Stored | None
    chunks: tuple[Stored, ...]
    question: Ids
    holds_all: bool = False

    @property
    def length(self) -> int:
        """The number of its tokens."""
        return sum(len(piece.ids) for piece in self.pieces) + len(self.question)

    @property
    def pieces(self) -> tuple[Stored, ...]:
        """Return the stored pieces of the prompt."""
        return self.chunks if self.prefix is None else (self.prefix, *self.chunks)

    def shortest(self) -> BenchPrompt:
        """Return the prompt with only its first chunk."""
        return BenchPrompt(self.wanted, self.prefix, self.chunks[:1], self.question)

    def plan(self, store: Store) -> Plan:
        """Look up the pieces and build the plan, as a query does. Raises DamagedError if a piece is not whole."""
        empty = Candidate((), lead_in=ids_digest([]), reason="empty")
        prefix = empty if self.prefix is None else _candidate(store, self.prefix)
        return build_plan(
            prefix, with_stored_rows(store, [_candidate(store, chunk) for chunk in self.chunks]), self.question
        )


def _candidate(store: Store, piece: Stored) -> Candidate:
    info = store.chunk_info(piece.chunk_id)
    if info is None or info.token_ids != piece.ids or piece.level not in store.levels(piece.chunk_id):
        raise DamagedError(f"chunk {piece.chunk_id.hex()[:12]} is not whole at level {piece.level}", REPAIR)
    return Candidate(piece.ids, piece.chunk_id, info.lead_in, piece.level, sensitivity=info.sensitivity)


def stored_prompts(
    store: Store, identity: StoreIdentity, level: str, contexts: Sequence[int], question_tokens: int
) -> list[BenchPrompt]:
    """Prompts of a store's own chunks, document by document, each once, as many as fit.

    The question is made of words of the first chunk and the store's own answer header.

    Raises
    ------
    KvtoolError : no chunk is stored at this level.
    UsageError : a context that not even one chunk fits in.
    """
    chunks = _chunks(store, level)
    if not chunks:
        held = sorted(store.stats()["levels"])
        hint = f"its levels: {', '.join(held)}" if held else "run `kvtool ingest PATH` first"
        raise KvtoolError(f"the store holds no chunk at level {level}", hint)
    header = identity.answer_header[-question_tokens:]
    question = chunks[0].ids[: max(0, question_tokens - len(header))] + header
    own = exact_level(store, identity.prefix_id) if identity.prefix else None
    if identity.prefix and own is None:
        raise DamagedError("the store has lost the record of its prompts' beginning", REPAIR)
    prefix = Stored(identity.prefix_id, identity.prefix, own) if own else None
    return [_fitting(BenchPrompt(context, prefix, tuple(chunks), question)) for context in contexts]


def _chunks(store: Store, level: str) -> list[Stored]:
    wanted = dict.fromkeys(ref.chunk_id for document in store.documents() for ref in document.chunks)
    found: list[tuple[bytes, ChunkInfo | None]] = [(chunk, store.chunk_info(chunk)) for chunk in wanted]
    return [Stored(chunk, info.token_ids, level) for chunk, info in found if info and level in store.levels(chunk)]


def _fitting(prompt: BenchPrompt) -> BenchPrompt:
    """Cut a prompt to as many of its first chunks as its context holds."""
    room = prompt.wanted - len(prompt.question) - (len(prompt.prefix.ids) if prompt.prefix else 0)
    count = 0
    for chunk in prompt.chunks:
        room -= len(chunk.ids)
        if room < 0:
            break
        count += 1
    if not count:
        raise UsageError(f"a context of {prompt.wanted} tokens is too short for a chunk", "take a longer --context")
    chunks = prompt.chunks[:count]
    return BenchPrompt(prompt.wanted, prompt.prefix, chunks, prompt.question, count == len(prompt.chunks))


PREFIX_TOKENS, LEAD_IN_TOKENS = 32, 128  # of the prompt's beginning; of that and the passage before the chunks
_FIT_TOKENS = 2048
# Of the finest level, in standard deviations of a layer's side: level 1 then takes 3.8 bits of white noise and level 2
# takes 2.2, what they take of real models' KV (samples/results/codec.md).
_STEP = 0.3


@dataclass(frozen=True, slots=True)
class Sizes:
    """The lengths of the prompts: `contexts` in tokens, question and chunks included; the last chunk is cut to fit."""

    contexts: tuple[int, ...]
    chunk_tokens: int
    question_tokens: int


@contextmanager
def scratch_store(
    decoder: Decoder,
    level: str,
    sizes: Sizes,
    seed: int,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Iterator[tuple[Store, list[BenchPrompt]]]:
    """Make a store that holds all chunks of these prompts at `level`, and the prompts.

    The prefix is stored without a lead-in. The chunks are prefilled after one, so that none is exact in its prompt. A
    lossy level gets a profile that is fitted to the chunks' own KV, with equal weight for every error.

    Parameters
    ----------
    progress : called with the tokens that have been prefilled, and with all.

    Raises
    ------
    UsageError : a context too short for a chunk.
    NoSpaceError : the disk is full.
    """
    text = random_text(decoder.config.vocab_size, sizes, seed)
    prompts = [prompt_of(decoder, text, level, context) for context in sizes.contexts]
    with scratch_folder() as folder, filled_store(folder / "store", decoder, text, prompts, seed, progress) as store:
        yield store, prompts


@contextmanager
def filled_store(
    folder: Path,
    decoder: Decoder,
    text: BenchText,
    prompts: Sequence[BenchPrompt],
    seed: int,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Iterator[Store]:
    """A new store in a folder that holds all chunks of these prompts; see `scratch_store`."""
    with Store.create_or_open(folder) as store:
        with store.writer() as writer:
            _Filler(decoder, writer, text.lead_in, seed, progress).fill(prompts)
        yield store


@dataclass(frozen=True, slots=True)
class BenchText:
    """Token ids that prompts are cut from; a shorter prompt is the beginning of a longer one.

    Attributes
    ----------
    lead_in : prefilled before each chunk; a prompt begins with its first `PREFIX_TOKENS`.
    """

    lead_in: Ids
    question: Ids
    body: Ids
    chunk_tokens: int

    @property
    def prefix(self) -> Ids:
        """Return the tokens that a prompt begins with."""
        return self.lead_in[:PREFIX_TOKENS]

    def chunks(self, context: int) -> list[Ids]:
        """Chunks that fill a prompt."""
        room = context - len(self.prefix) - len(self.question)
        if room < 1:
            least = len(self.prefix) + len(self.question) + 1
            raise UsageError(f"a context of {context} tokens is too short for a chunk", f"take at least {least}")
        body, size = self.body[:room], self.chunk_tokens
        return [body[start : start + size] for start in range(0, room, size)]


def random_text(vocabulary: int, sizes: Sizes, seed: int) -> BenchText:
    """Make a text of random tokens."""
    draw = torch.Generator().manual_seed(seed)

    def tokens(count: int) -> Ids:
        return tuple(torch.randint(vocabulary, (count,), generator=draw).tolist())

    lead_in, question = tokens(LEAD_IN_TOKENS), tokens(sizes.question_tokens)
    return BenchText(lead_in, question, tokens(max(sizes.contexts)), sizes.chunk_tokens)


def prompt_of(decoder: Decoder, text: BenchText, level: str, context: int) -> BenchPrompt:
    """Build the prompt of `context` tokens. Raises UsageError if no chunk fits."""
    # The prefix has no lead-in; it is kept exactly, whatever the level (ingest/storer.py).
    prefix = _stored(decoder, text.prefix, (), level_of(level).of_prefix)
    chunks = [_stored(decoder, ids, text.lead_in, level) for ids in text.chunks(context)]
    return BenchPrompt(context, prefix, tuple(chunks), text.question)


def _stored(decoder: Decoder, ids: Ids, lead_in: Ids, level: str) -> Stored:
    fingerprint = decoder.loaded.fingerprint
    named = chunk_id(namespace="bench", model_fingerprint=fingerprint, lead_in=ids_digest(lead_in), token_ids=ids)
    return Stored(named, ids, level)


class _Filler:
    """Prefills and writes."""

    def __init__(
        self, decoder: Decoder, writer: Writer, lead_in: Ids, seed: int, progress: Callable[[int, int], None]
    ) -> None:
        self._decoder, self._writer, self._lead_in = decoder, writer, lead_in
        self._progress = progress
        self._draw = torch.Generator().manual_seed(seed)
        self._profile: Profile | None = None

    def fill(self, prompts: Sequence[BenchPrompt]) -> None:
        """Write the prefix and every chunk once."""
        for prefix in {prompt.prefix for prompt in prompts} - {None}:
            assert prefix is not None
            self._write([prefix], LeadIn(self._decoder, ()), ())
        lead_in = LeadIn(self._decoder, self._lead_in)
        wanted = list(dict.fromkeys(chunk for prompt in prompts for chunk in prompt.chunks))
        done, total = 0, sum(len(chunk.ids) for chunk in wanted)
        for batch in batches(wanted, batch_tokens(self._decoder.device)):
            self._progress(done, total)
            self._write(batch, lead_in, self._lead_in)
            done += sum(len(chunk.ids) for chunk in batch)

    def _write(self, batch: Sequence[Stored], lead_in: LeadIn, before: Ids) -> None:
        kvs = prefill_chunks(self._decoder, lead_in, [PrefillItem(piece.ids) for piece in batch])
        if level_of(batch[0].level).nested and self._profile is None:
            self._profile = fit_to(kvs)
            self._writer.put_profile(self._profile.digest, self._profile.data, {"profile": self._profile.digest.hex()})
        for piece, kv in zip(batch, kvs, strict=True):
            info = ChunkInfo(piece.ids, ids_digest(before), len(kv.keys), self._sensitivity(piece))
            records = encode_layers(piece.chunk_id, kv, piece.level, self._profile)
            self._writer.put_chunk(piece.chunk_id, info, piece.level, records)

    def _sensitivity(self, piece: Stored) -> bytes:
        """Any numbers: which rows are chosen by them does not matter here."""
        return torch.rand(len(piece.ids), generator=self._draw).half().numpy().astype("<f2").tobytes()


def batches(wanted: Sequence[Stored], tokens: int) -> Iterator[list[Stored]]:
    """Chunks in order; a batch holds at most `tokens` tokens, or one longer chunk."""
    batch: list[Stored] = []
    for piece in wanted:
        if batch and sum(len(one.ids) for one in (*batch, piece)) > tokens:
            yield batch
            batch = []
        batch.append(piece)
    if batch:
        yield batch


def fit_to(kvs: Sequence[ChunkKV]) -> Profile:
    """A profile of these chunks' own KV, the sensitivity being the identity in units of each side's spread."""
    shapes = [shape_of_layer(kv) for kv in kvs[0].layers]
    layers, channels = len(shapes), channels_of(shapes)

    def sides(layer: int) -> torch.Tensor:
        return torch.cat([wide_sides(kv.layers[layer], channels) for kv in kvs], 1)[:, :_FIT_TOKENS].float()

    # [2, layers], without the channels' means, which cost no bits
    variances = torch.stack([sides(layer).var(1, correction=0).mean(1) for layer in range(layers)], 1)
    matters = torch.eye(channels) / variances.clamp_min(1e-12)[:, :, None, None]
    tokens = sum(kv.tokens for kv in kvs)
    about = {"chunks": len(kvs), "tokens": min(tokens, _FIT_TOKENS), "sensitivity": "identity"}
    return fit_profile(sides, matters, default_groups(shapes), about, step=_STEP)


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """A folder that is gone afterwards, in $TMPDIR where that is set, else in kvtool's cache: /tmp may be no disk."""
    parent = None if os.environ.get("TMPDIR") else cache_dir()
    if parent is not None:
        make_folder(parent)
    with tempfile.TemporaryDirectory(prefix="kvtool-bench-", dir=parent) as folder:
        yield Path(folder)
