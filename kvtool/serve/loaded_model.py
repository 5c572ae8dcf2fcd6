"""A store's session with its model in memory, which follows the store when it is replaced."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from kvtool.core.cache.layout import read_uuid
from kvtool.core.common.types import Warn
from kvtool.core.errors import KvtoolError, ModelError, StoreFormatError, StoreNotFoundError
from kvtool.core.model.options import ModelOptions
from kvtool.serve.job import Ask

if TYPE_CHECKING:
    from kvtool.core.model.decoder import Decoder
    from kvtool.core.session.session import Session


class LoadedModel:
    """A store's session, with its model in memory. One thread at a time may ask for the session.

    `learn`: adds learned passages to each session that is opened. `spare`: a loaded model for a store that is not open
    yet.
    """

    def __init__(
        self, place: Path | str, model: ModelOptions, memory_cache: int, warn: Warn, learn: Callable[[Session], Session]
    ) -> None:
        self.place = place
        self._model, self._memory_cache, self._warn, self._learn = model, memory_cache, warn, learn
        self._session: Session | None = None
        self.spare: Decoder | None = None

    @property
    def decoder(self) -> Decoder | None:
        return self._session.decoder if self._session is not None else None

    @property
    def missed(self) -> int | None:
        """Number of chunks that questions missed and that are not stored yet; None: no model is loaded."""
        return len(self._session.missed or ()) if self._session is not None else None

    def turn(self) -> AbstractContextManager[None]:
        return nullcontext() if self._session is None else self._session.decoder.turns.turn()

    def session(self) -> Session:
        """Return the session of the current store, which may have replaced the open one."""
        if self._session is not None and not self._is_current(self._session):
            self._open(self.close())
        return self._session or self._open(None)

    def _is_current(self, session: Session) -> bool:
        if isinstance(self.place, Path) and read_uuid(self.place) != session.store.uuid:
            return False
        try:
            session.store.follow()
            session.refresh()
        except (ModelError, StoreFormatError):
            return False
        return True

    def _open(self, decoder: Decoder | None) -> Session:
        from kvtool.core.remote.mirror import open_store
        from kvtool.core.session.identity import store_identity
        from kvtool.core.session.session import Session

        is_start = decoder is None
        store, decoder = open_store(self.place, warn=self._warn), decoder or self.spare
        self.spare = None
        try:
            identity = store_identity(store)
            if decoder is not None and (
                decoder.loaded.fingerprint != identity.fingerprint
                or str(decoder.kv_dtype).removeprefix("torch.") != identity.dtype
            ):
                decoder = None  # it is not the store's
            session = Session.open(
                store, self._model, decoder=decoder, warn=self._warn, memory_cache=self._memory_cache, missed={}
            )
            _ = session.decoder
            try:
                session = self._learn(session)
            except KvtoolError as error:
                if is_start:
                    raise
                self._warn(f"the new store's passages are not learned: {error.message}", error.hint)
        except BaseException:
            store.close()
            raise
        self._session = session
        return session

    def count(self, ask: Ask) -> int:
        """Return the tokens of a question, without passages; in any thread."""
        from kvtool.core.model.prompt import question_tokens, said_tokens, turn_header
        from kvtool.core.query.prompt import parts_for

        if (session := self._session) is None:
            raise ModelError("no model is loaded, so there is no tokenizer", "ingest a document first")
        ask, tokenizer = describe_tools(ask, session), session.tokenizer
        parts = parts_for(session, ask.options.system)
        count = len(parts.prefix) + len(question_tokens(tokenizer, ask.request.question, parts, ask.request.prefill))
        for question, answer in ask.turns or ():
            count += len(question_tokens(tokenizer, question, parts)) + len(said_tokens(tokenizer, answer))
        return count + (len(turn_header(tokenizer)) * len(ask.turns) if ask.turns else 0)

    def exists(self) -> bool:
        if isinstance(self.place, Path):
            try:
                read_uuid(self.place)
            except StoreNotFoundError:
                return False
        return True

    def close(self) -> Decoder | None:
        decoder, session, self._session = self.decoder, self._session, None
        if session is not None:
            session.close()
        return decoder


def describe_tools(ask: Ask, session: Session) -> Ask:
    """Return a question whose instruction describes its tools."""
    if not ask.tools:
        return ask
    from kvtool.core.model.prompt import with_tools

    system = with_tools(session.tokenizer, ask.options.system or session.identity.system, ask.tools)
    said = tuple(message for message in ask.request.messages if message[0] != "system")
    request = replace(ask.request, messages=(("system", system), *said) if said else ())
    return replace(ask, request=request, options=replace(ask.options, system=system), tools=())
