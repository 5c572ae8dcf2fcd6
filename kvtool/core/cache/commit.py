"""Commit of a writer: weighed against the disk and the store's size budget, in bytes of files, then made durable.

Nothing is computed inside a write transaction: rows come encoded and compared with what is stored.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import TYPE_CHECKING

from kvtool.core.cache import keys, space, tables
from kvtool.core.cache.environment import PAGE_BYTES, Environment, FileFullError
from kvtool.core.cache.gate import Transaction
from kvtool.core.cache.rows import Doomed, Row, meta_row
from kvtool.core.errors import DamagedError

if TYPE_CHECKING:
    from kvtool.core.cache.reader import StoreReader

_ROW_SLACK = 256  # key, node and its share of the tree
_SLACK = 256 * 1024  # tree pages that a transaction rewrites
_INDEX_SHARE = 6  # bytes of the retrieval index for a byte of a document as it is stored, both copies of a merge
_OF_CHUNKS = (tables.CHUNKS, tables.LEVELS, tables.RECORDS)
_LIGHT = (tables.META, tables.USED, tables.WARM, tables.ADDED, tables.ORIGINS)  # which need no room worth weighing
_UNSEEN_TABLES = (tables.USED, tables.WARM, tables.ADDED, tables.STRETCHES)  # which no answer hangs on
_UNSEEN_KEYS = (keys.BUDGET_KEY, keys.PINS_KEY, keys.COLLECTED_KEY, keys.UNFINISHED_KEY)
Apply = Callable[[Transaction], None]


class Commits:
    """The commits of one writer.

    Parameters
    ----------
    max_size : the budget of this command; None: the store's own, read when it is first needed: repair must work
        without it.

    Attributes
    ----------
    keeps_reserve : whether the disk's reserve has to stay free.
    """

    def __init__(self, store: StoreReader, max_size: int | None) -> None:
        self._store = store
        self._budget = None if max_size is None else space.Budget(max_size, given=True)
        self._known = max_size is not None
        self.keeps_reserve = True
        self._unindexed = 0  # bytes that the retrieval index will take for what was committed

    def forget_budget(self) -> None:
        """Read the store's budget again: it has another one now. That of the command stays."""
        self._known = self._budget is not None and self._budget.given

    def commit(
        self, rows: Sequence[Row], doomed: Sequence[Doomed] = (), weighed: bool = True, thins: bool | None = None
    ) -> None:
        """Put and delete rows in one durable transaction.

        Parameters
        ----------
        weighed : False: it makes room, which must work on a full disk and over the budget.
        thins : whether documents have less of their chunks than was known of them before; None: where something of a
            chunk is deleted.

        Raises
        ------
        NoSpaceError : there is no room; the store is as it was before.
        """
        heavy = [row for row in rows if weighed and row[0] not in _LIGHT]
        need = sum(_pages(len(value)) for _, _, value in heavy)
        texts = sum(len(value) for table, _, value in heavy if table == tables.DOCUMENTS)
        environment = self._store.environment
        thinned = any(table in _OF_CHUNKS for table, _ in doomed) if thins is None else thins
        rows = [*rows, *self._revision_rows({*doomed, *((table, key) for table, key, _ in rows)}, thinned)]
        rows, doomed = sorted(rows, key=itemgetter(0, 1)), sorted(doomed)  # a page is then met once, not once a key
        with environment.read() as snapshot:  # of a damaged page LMDB dies, or writes into pages that are in use
            snapshot.touch([*doomed, *((table, key) for table, key, _ in rows)])

        def apply(transaction: Transaction) -> None:
            for table, key in doomed:
                transaction.delete(table + key)
            for table, key, value in rows:
                transaction.put(table + key, value)

        if need:
            spare = space.reserve() if self.keeps_reserve else 0
            space.check_disk(environment.generation, need + _SLACK, environment.free_bytes(), spare)
        budget = self._own_budget() if need else None
        if budget is None:
            environment.write(apply, need + _SLACK)
        else:
            self._write_within(budget, environment, apply, need, texts)
        self._unindexed += _INDEX_SHARE * texts

    # ---- counters ------------------------------------------------------------------------------------------------

    def _revision_rows(self, touched: set[Doomed], thinned: bool) -> list[Row]:
        """The counters after a commit that touches these tables and keys, and perhaps drops something of chunks; none
        where no answer hangs on it."""
        if all(table in _UNSEEN_TABLES or key in _UNSEEN_KEYS for table, key in touched):
            return []
        new, documents, dropped = self._next_revision()
        if any(table in (tables.FILES, tables.DOCUMENTS) for table, _ in touched):
            documents = new
        if thinned:
            dropped = new
        revision = (tables.META, keys.REVISION_KEY, keys.seal_number(keys.REVISION_KEY, new))
        counted = {"documents": documents, "dropped": dropped, "revision": new}
        return [revision, meta_row(keys.DOCUMENTS_KEY, counted)]

    def _next_revision(self) -> tuple[int, int, int]:
        """The number of the next revision, and of those at which documents changed and chunks lost something last."""
        try:
            return self._store.revision() + 1, self._store.documents_revision(), self._store.dropped_revision()
        except DamagedError:  # any number that no index has been keyed by
            return time.time_ns(), time.time_ns(), time.time_ns()

    # ---- room ----------------------------------------------------------------------------------------------------

    def require_room(self) -> None:
        """Refuse at once what is sure not to fit: the store is at its budget already, its free pages not counted.

        Raises
        ------
        NoSpaceError : as the commit would.
        """
        budget = self._own_budget()
        if budget is None:
            return
        used, free = space.folder_bytes(self._store.path), self._store.environment.free_bytes()
        if used - free >= budget.size:
            raise budget.refuse(used, 1, free)

    def _own_budget(self) -> space.Budget | None:
        if not self._known:
            size = self._store.budget()
            self._budget, self._known = None if size is None else space.Budget(size), True
        return self._budget

    def _write_within(
        self, budget: space.Budget, environment: Environment, apply: Apply, need: int, texts: int
    ) -> None:
        """Commit what leaves the folder's files within the budget, the index of its texts included."""
        used, now = space.folder_bytes(self._store.path), environment.allocated_bytes()
        most = budget.size - (used - environment.file_bytes())
        wanted = most - self._unindexed - _INDEX_SHARE * texts
        if now + need + _SLACK <= wanted:
            environment.write(apply, need + _SLACK)
            return
        refusal = budget.refuse(used, need, environment.free_bytes())
        if now > most + _SLACK:  # removing, too, rewrites tree pages: what has just met the budget may go on
            raise refusal
        try:
            with environment.limited(max(wanted, now)):
                _write_limited(environment, apply, need)
        except FileFullError as error:
            raise refusal from error


def _write_limited(environment: Environment, apply: Apply, need: int) -> None:
    """Write, and once more after an empty transaction: pages freed by the last transaction are usable one later."""
    try:
        environment.write(apply, need + _SLACK)
    except FileFullError:
        if environment.free_bytes() < need:
            raise
        environment.write(_turn, _SLACK)
        environment.write(apply, need + _SLACK)


def _turn(transaction: Transaction) -> None:
    """Change nothing."""
    key = tables.META + keys.STORE_KEY
    value = transaction.get(key)
    if value is not None:
        transaction.put(key, bytes(value))


def _pages(size: int) -> int:
    """Bytes that a value takes: whole pages from a half page on, with a 16-byte page header."""
    if size < PAGE_BYTES // 2:
        return size + _ROW_SLACK
    return -(-(size + 16) // PAGE_BYTES) * PAGE_BYTES + _ROW_SLACK
