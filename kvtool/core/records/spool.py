"""Spool of chunks that vLLM has computed, one file each, in a folder of the store's. Its name is random, and only
`kvtool ingest --engine` makes it: who can only reach vLLM's port has no file written."""

from __future__ import annotations

import os
import re
import secrets
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import torch

from kvtool.core.cache.layout import TEMPORARY, make_folder
from kvtool.core.common.machine import Arithmetic
from kvtool.core.common.types import Ids
from kvtool.core.errors import KvtoolError
from kvtool.core.model.prefill import ChunkKV

START = "start vLLM on this machine, with kvtool's connector and this store (`kvtool help vllm`); what is stored stays"
Computed = tuple[ChunkKV, bytes, Arithmetic]
"""A chunk's keys and values, its tokens' sensitivities, and the arithmetic that computed them."""
_PREFIX, _ERROR = f"{TEMPORARY}spool-", ".error"


@dataclass(frozen=True, slots=True)
class SaveWish:
    """Wish in `kv_transfer_params` to save a request's keys and values to the spool `save`, without the first `after`
    tokens. `other`: the lead-in that sensitivity is measured against; None: it is not measured."""

    save: str
    after: int
    other: Ids | None

    @classmethod
    def of(cls, row: object) -> SaveWish | None:
        """Read a request's wish; None: it has none of this form."""
        if not isinstance(row, Mapping) or row.keys() != {"save", "after", "other"}:
            return None
        save, after, other = row["save"], row["after"], row["other"]
        counts = [after, *(other if isinstance(other, list) else [] if other is None else [None])]
        fits = isinstance(save, str) and re.fullmatch("[0-9a-f]{32}", save)
        return cls(save, after, other) if fits and all(type(count) is int and count >= 0 for count in counts) else None


class Spool:
    """A spool of a store. `name`: of an existing one; "": a new one, and those that earlier runs left are removed."""

    def __init__(self, store: Path, name: str = "") -> None:
        self.name = name or secrets.token_hex(16)
        self.folder = store / f"{_PREFIX}{self.name}"
        if not name:
            for left in store.glob(f"{_PREFIX}*"):
                shutil.rmtree(left, ignore_errors=True)
            make_folder(self.folder)

    def put(self, ids: Ids, computed: Computed) -> None:
        """Write a chunk; a reader sees all of it or nothing."""
        path, (kv, sensitivity, arithmetic) = self._path(ids), computed
        part = path.with_suffix(".part")
        try:
            torch.save([[*kv.keys], [*kv.values], sensitivity.hex(), *arithmetic], part)
        except BaseException:
            part.unlink(missing_ok=True)  # on a full disk the reason needs its place
            raise
        os.replace(part, path)

    def put_error(self, ids: Ids, message: str) -> None:
        self._path(ids).with_suffix(_ERROR).write_text(message, "utf-8")

    def take(self, ids: Ids) -> Computed:
        """Read a chunk, and remove its file. Raises KvtoolError: it was not saved."""
        path = self._path(ids)
        try:
            keys, values, sensitivity, *rest = torch.load(path, weights_only=True)
        except FileNotFoundError:
            error = path.with_suffix(_ERROR)
            message = error.read_text("utf-8") if error.exists() else "it has no connector over this store"
            raise KvtoolError(f"vLLM has computed a chunk, but not saved it: {message}", START) from None
        path.unlink()
        return ChunkKV(keys, values), bytes.fromhex(sensitivity), Arithmetic(*rest)

    def _path(self, ids: Ids) -> Path:
        return self.folder / blake2b(repr(tuple(ids)).encode(), digest_size=16).hexdigest()
