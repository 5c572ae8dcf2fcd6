"""The session of a served store: opened at its first use, followed, and opened anew where another store stands."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from kvtool.core.cache.layout import read_store_file
from kvtool.core.common.types import Warn
from kvtool.core.errors import ModelError, StoreFormatError, StoreNotFoundError
from kvtool.core.model.options import ModelOptions

if TYPE_CHECKING:
    from kvtool.core.model.decoder import Decoder
    from kvtool.core.session.identity import StoreIdentity
    from kvtool.core.session.session import Session


class Resident:
    """Holds a store open, and its model in memory. One thread at a time may ask for the session.

    Parameters
    ----------
    place : the store's folder, or the URL of a shared one.
    memory_cache : bytes of loaded chunks that are kept for further questions.

    Attributes
    ----------
    spare : a model that somebody has loaded, for a store that is not open yet.
    """

    def __init__(self, place: Path | str, model: ModelOptions, memory_cache: int, warn: Warn) -> None:
        self.place = place
        self._model, self._memory_cache, self._warn = model, memory_cache, warn
        self._session: Session | None = None
        self.spare: Decoder | None = None

    @property
    def decoder(self) -> Decoder | None:
        """The model, if it is loaded."""
        return self._session.decoder if self._session is not None else None

    def turn(self) -> AbstractContextManager[None]:
        """The model's turn, for whoever runs it; nothing to wait for where it is not loaded."""
        return nullcontext() if self._session is None else self._session.decoder.turns.turn()

    def session(self) -> Session:
        """The session of the store that stands there now.

        Raises
        ------
        StoreNotFoundError : there is none, or nothing was ever ingested into it.
        ModelError : its model cannot be loaded.
        """
        if self._session is not None and not self._still_stands(self._session):
            self._open(self._let_go())
        return self._session or self._open(None)

    def _still_stands(self, session: Session) -> bool:
        if isinstance(self.place, Path) and read_store_file(self.place).uuid != session.store.uuid:
            return False
        try:
            session.store.follow()
            session.refresh()
        except (ModelError, StoreFormatError):
            return False
        return True

    def _open(self, decoder: Decoder | None) -> Session:
        """Open the store with its model; `decoder`: a loaded one, which may be the same."""
        from kvtool.core.remote.mirror import open_store
        from kvtool.core.session.identity import store_identity
        from kvtool.core.session.session import Session

        store, decoder = open_store(self.place, warn=self._warn), decoder or self.spare
        self.spare = None
        try:
            identity = store_identity(store)
            if decoder is not None and not _is_of(decoder, identity):
                decoder = None
            session = Session(store, self._model, decoder=decoder, warn=self._warn)
            session.cache_chunks(self._memory_cache)
            session.recent_chunks = None  # what is held is read faster, and does not decide what is found
        except BaseException:
            store.close()
            raise
        self._session = session
        return session

    def _let_go(self) -> Decoder | None:
        session, self._session = self._session, None
        if session is None:
            return None
        session.store.close()
        return session.decoder

    def exists(self) -> bool:
        """Return True if there is a store to answer from."""
        if not isinstance(self.place, Path):
            return True
        try:
            read_store_file(self.place)
        except StoreNotFoundError:
            return False
        return True

    def close(self) -> None:
        """Let go of the store and the model."""
        self._let_go()


def _is_of(decoder: Decoder, identity: StoreIdentity) -> bool:
    """Return True if a loaded model is the one that a store was made with."""
    kept = str(decoder.kv_dtype).removeprefix("torch.")
    return (decoder.loaded.fingerprint, kept) == (identity.fingerprint, identity.dtype)
