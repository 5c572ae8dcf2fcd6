"""The keywords of the Python API, typed for editors; a test holds them against what the rooms declare."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TypedDict


class OpenArguments(TypedDict, total=False):
    """See `ModelOptions`."""

    device: str
    dtype: str
    offline: bool


class IngestArguments(TypedDict, total=False):
    """See `IngestOptions`."""

    roots: str | Path | Iterable[str | Path]
    include: str | Iterable[str]
    exclude: str | Iterable[str]
    ignore: bool
    sync: bool
    shard: str | None
    readers: str | Iterable[str] | Mapping[str, object]
    encoding: str | None
    read_timeout: float | str
    read_memory: int | str
    retry: bool
    strict: bool
    dry_run: bool
    continue_on_error: bool
    log: str | Path | None
    split: str | None
    chunk_tokens: int | None
    min_chunk_tokens: int | None
    max_chunk_tokens: int | None
    level: str
    store_dtype: str | None
    lead_in: str | None
    system: str | None
    embedder: str | None
    max_size: int | str | None
    ray: str | None
    ray_workers: int
    engine: str | None
    engine_check: bool
    lock_wait: float | str


class QueryArguments(TypedDict, total=False):
    """See `QueryOptions`."""

    max_tokens: int
    system: str | None
    temperature: float
    seed: int
    verify: bool
    logit_bias: str | Iterable[str]
    top_logprobs: int | None
    grammar: str
    cite: bool
    clamp: bool
    force: bool
    top_k: int
    source: str | Iterable[str]
    retriever: str
    embedder: str | None
    fusion: str | None
    ratio: float | str
    link_tokens: int
    link: str
    shift: bool
    level: str
    audit: float | str
    explain: bool
    token_ids: bool
    defer: bool
    slo_ms: float | None
    set: str | Iterable[str] | Mapping[str, object]


class CompressArguments(TypedDict, total=False):
    """See `CompressOptions`."""

    keep: float | str | None
    max_loss: float | None
    questions: int
    chunks: str | Iterable[str]
    keep_raw: bool | None
    yes: bool
    fit: bool
    fit_prompts: int
    profile: str | Path | None
    max_size: int | str | None
    lock_wait: float | str


class PushArguments(TypedDict, total=False):
    """See `PushOptions`."""

    delete: bool
    verify: bool
    dry_run: bool
    yes: bool
    sign: str | Path | None
    remote_timeout: float | str


class PullArguments(TypedDict, total=False):
    """See `PullOptions`."""

    levels: str | Iterable[str]
    delete: bool
    dry_run: bool
    yes: bool
    max_size: int | str | None
    trust: str | Iterable[str]
    mine: bool
    lock_wait: float | str
    remote_timeout: float | str


class ExportArguments(TypedDict, total=False):
    """See `ExportOptions`."""

    only: str | Iterable[str]
    levels: str | Iterable[str]
    force: bool
    sign: str | Path | None


class ImportArguments(TypedDict, total=False):
    """See `ImportOptions`."""

    max_size: int | str | None
    trust: str | Iterable[str]
    mine: bool
    lock_wait: float | str


class ForgetArguments(TypedDict, total=False):
    """See `ForgetOptions`."""

    dry_run: bool
    yes: bool
    lock_wait: float | str


class PruneArguments(TypedDict, total=False):
    """See `PruneOptions`."""

    max_size: int | str | None
    max_age: float | str | None
    unused: float | str | None
    cold: float | str | None
    compact: bool
    lock_wait: float | str
    dry_run: bool
    yes: bool


class LockArguments(TypedDict, total=False):
    """See `LockOptions`."""

    lock_wait: float | str
