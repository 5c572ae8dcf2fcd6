"""The questions that wait: clients come to their turns one after another, however much each of them has asked."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from kvtool.serve.job import Client, Job


class Line:
    """Jobs that wait: one of each client at a time, a client's own in the order in which they came.

    A client that comes, or comes again, stands behind all others. Where there is no place left, it is who has most
    waiting that has to give way, so that none keeps the others out; alone, one may take all places. Whoever calls has
    to see to it that one thread does at a time; `len` may be asked at any time.

    Parameters
    ----------
    most : jobs that may wait.
    """

    def __init__(self, most: int) -> None:
        self._most, self._count = most, 0
        self._of: dict[Client, deque[Job]] = {}  # in the order of their turns; none of them is empty

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Job]:
        for jobs in self._of.values():
            yield from jobs

    def add(self, job: Job) -> Job | None:
        """Take a job in.

        Returns
        -------
        Who has no place: the newest job of the client that has most waiting, which may be this one; None: there was
        room.
        """
        own = self._of.setdefault(job.ask.client, deque())
        own.append(job)
        self._count += 1
        if self._count <= self._most:
            return None
        longest = max(self._of.values(), key=len)
        last = longest[-1] if len(longest) > len(own) else job
        self.remove(last)
        return last

    def take(self) -> Job:
        """Take out the job whose turn it is; there has to be one."""
        client = next(iter(self._of))
        job = self._of[client][0]
        self.remove(job)
        if client in self._of:
            self._of[client] = self._of.pop(client)
        return job

    def remove(self, job: Job) -> None:
        """Take out a job that is there."""
        client = job.ask.client
        self._of[client].remove(job)
        self._count -= 1
        if not self._of[client]:
            del self._of[client]
