"""Whether a commit has the room it needs: on the disk, and within the store's size budget, in bytes of files."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from kvtool.core.cache import environment as tables
from kvtool.core.cache import keys, space
from kvtool.core.cache.environment import Environment
from kvtool.core.cache.gate import Transaction

if TYPE_CHECKING:
    from kvtool.core.cache.store import Store

_SLACK = 256 * 1024  # tree pages that a transaction rewrites
_INDEX_SHARE = 6  # bytes of the retrieval index for a byte of a document as it is stored, both copies of a merge

Apply = Callable[[Transaction], None]


class Room:
    """One writer's room.

    Parameters
    ----------
    max_size : the budget of this command; None: the store's own, read when it is first needed: repair must work
        without it.
    """

    def __init__(self, store: Store, max_size: int | None) -> None:
        self._store = store
        self._budget = None if max_size is None else space.Budget(max_size, given=True)
        self._known = max_size is not None
        self._unindexed = 0  # bytes that the retrieval index will take for what was committed

    def forget_budget(self) -> None:
        """The store has another one now; that of the command stays."""
        self._known = self._budget is not None and self._budget.given

    def write(self, environment: Environment, apply: Apply, need: int, texts: int) -> None:
        """Commit what `apply` puts.

        Parameters
        ----------
        need : about how many bytes it takes; 0: it makes room, and is always done.
        texts : bytes of documents among them, which the retrieval index will hold, too.

        Raises
        ------
        NoSpaceError : there is no room; the store is as it was before.
        """
        if need:
            space.check_disk(environment.generation, need + _SLACK, free_bytes(environment))
        budget = self._own_budget() if need else None
        if budget is None:
            environment.write(apply, need + _SLACK)
        else:
            self._write_within(budget, environment, apply, need, texts)
        self._unindexed += _INDEX_SHARE * texts

    def _own_budget(self) -> space.Budget | None:
        if not self._known:
            size = self._store.budget()
            self._budget, self._known = None if size is None else space.Budget(size), True
        return self._budget

    def _write_within(
        self, budget: space.Budget, environment: Environment, apply: Apply, need: int, texts: int
    ) -> None:
        """A commit after which the folder's files are within the budget, the index of its texts included."""
        used, now = space.folder_bytes(self._store.path), environment.allocated_bytes()
        most = budget.size - (used - environment.file_bytes())
        wanted = most - self._unindexed - _INDEX_SHARE * texts
        if now + need + _SLACK <= wanted:
            environment.write(apply, need + _SLACK)
            return
        refusal = budget.refuse(used, need, free_bytes(environment))
        if now > most + _SLACK:  # removing, too, rewrites tree pages: what has just met the budget may go on
            raise refusal
        try:
            with environment.limited(max(wanted, now)):
                _write_limited(environment, apply, need)
        except tables.FileFullError as error:
            raise refusal from error


def _write_limited(environment: Environment, apply: Apply, need: int) -> None:
    """What the last transaction has freed can be taken by the one after the next: then once more."""
    try:
        environment.write(apply, need + _SLACK)
    except tables.FileFullError:
        if free_bytes(environment) < need:
            raise
        environment.write(_turn, _SLACK)
        environment.write(apply, need + _SLACK)


def _turn(transaction: Transaction) -> None:
    """Changes nothing."""
    key = tables.META + keys.STORE_KEY
    value = transaction.get(key)
    if value is not None:
        transaction.put(key, bytes(value))


def free_bytes(environment: Environment) -> int:
    """Of pages inside the data file that nothing uses."""
    with environment.read() as snapshot:
        return max(0, environment.allocated_bytes() - snapshot.live_bytes())
