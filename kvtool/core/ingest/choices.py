"""Identity of the store that an ingest writes: the existing one, changed by the options of this run."""

from __future__ import annotations

from dataclasses import fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from kvtool.core.cache.identity import HERE
from kvtool.core.cache.store import Store
from kvtool.core.checkpoint.files import ModelFiles, Once, unnoticed
from kvtool.core.checkpoint.hub import model_fingerprint
from kvtool.core.corpus.split import SplitSettings
from kvtool.core.errors import UsageError
from kvtool.core.ingest.options import IngestOptions, is_lead_in_file
from kvtool.core.model.options import DEFAULT_MODEL, DEFAULT_SYSTEM
from kvtool.core.session.identity import LeadInIds, StoreIdentity, check_same_model, resolve_named

_NO_LEAD_IN = "none"


class Choices:
    """Choice of the model, the prompt's fixed parts, the lead-in and the split.

    `once` is entered while a model is downloaded or unpacked. `known` is the store's identity before this run.
    """

    def __init__(self, store: Store | None, options: IngestOptions, once: Once = unnoticed) -> None:
        self._options, self._once = options, once
        self.known = StoreIdentity.from_manifest(store.manifest()) if store is not None else None
        self.made_by = store.made_by() if store is not None else HERE

    @cached_property
    def files(self) -> ModelFiles:
        stored = self.known.model if self.known else DEFAULT_MODEL
        return resolve_named(self._options.model, stored, self.made_by, self._options.offline, self._once)

    @cached_property
    def tokenizer(self) -> Any:
        from kvtool.core.checkpoint.load import load_tokenizer

        return load_tokenizer(self.files)

    @cached_property
    def identity(self) -> StoreIdentity:
        """The store's identity with the changes of the options, or a new one. Raises ModelError or UsageError."""
        if self.known is not None and self.made_by.is_foreign:
            return self._agreed(self.known)
        split = self._options.splitting or (self.known.split if self.known else SplitSettings())
        if self.known is None:
            return self._new_identity(split)
        check_same_model(self.files, self.known)
        if self._options.store_dtype not in (None, kept := self.known.dtype):
            what = f"the store keeps {kept}, not {self._options.store_dtype}"
            raise UsageError(what, "leave --store-dtype out, or use another --store")
        asked = self._options.lead_in
        reads_file = asked is not None and is_lead_in_file(asked)  # whose text may have changed
        if self._lead_in() == (self.known.lead_in.mode, self.known.system) and not reads_file:
            return replace(self.known, split=split)
        return self._new_identity(split)

    def _agreed(self, known: StoreIdentity) -> StoreIdentity:
        """Return the identity of a new store, if a foreign store has the same.

        A foreign instruction would precede the user's own documents in every prompt, and a foreign lead-in every
        chunk; and token ids need not be those of the text that is shown.
        """
        check_same_model(self.files, known)
        wanted = Choices(None, replace(self._options, model=self.files.ref), self._once).identity
        differs = [name.name for name in fields(wanted) if getattr(wanted, name.name) != getattr(known, name.name)]
        if differs := [name for name in differs if name != "model"]:
            raise UsageError(
                f"the store was made by {self.made_by.name}, with another {', '.join(differs)} than yours would be",
                "ingest into another --store, or name the same with --lead-in, --chunk-tokens, --split and --system",
            )
        return wanted

    def _lead_in(self) -> tuple[str, str]:
        known = self.known
        mode = self._options.lead_in or (known.lead_in.mode if known else "warm")
        if is_lead_in_file(mode):
            mode = str(Path(mode).expanduser().absolute())
        return mode, self._options.system or (known.system if known else DEFAULT_SYSTEM)

    def _new_identity(self, split: SplitSettings) -> StoreIdentity:
        from kvtool.core.checkpoint.load import kept_format, supported_config
        from kvtool.core.checkpoint.support import keeps_states
        from kvtool.core.model.prompt import PromptParts, lead_in_ids, prompt_parts

        # An unsupported model is refused before a store is made for it.
        keeps = self.known.keeps_states if self.known else keeps_states(supported_config(self.files))
        mode, system = self._lead_in()
        if keeps:
            mode = self._lead_in_of_states(mode)
        dtype = self.known.dtype if self.known else kept_format(self._options.store_dtype or "auto", self.files)
        if self.known and system == self.known.system:  # a template that states the date states another one today
            parts = PromptParts(self.known.prefix, self.known.answer_header)
        else:
            parts = prompt_parts(self.tokenizer, system)
        fingerprint, ids = model_fingerprint(self.files, dtype, self._once), lead_in_ids(mode, self.tokenizer, parts)
        return StoreIdentity(
            model=self.files.ref,
            fingerprint=fingerprint,
            dtype=dtype,
            prefix=parts.prefix,
            answer_header=parts.answer_header,
            lead_in=LeadInIds(mode, ids),
            split=split,
            system=system,
            keeps_states=keeps,
        )

    def _lead_in_of_states(self, mode: str) -> str:
        kept = self.known.lead_in.mode if self.known else _NO_LEAD_IN
        if self._options.lead_in is not None and mode != kept:
            raise UsageError(
                f"{self.files.ref} keeps a recurrent state, so no chunk is computed before a question: it takes no "
                f"lead-in {mode}",
                "leave --lead-in out",
            )
        return kept
