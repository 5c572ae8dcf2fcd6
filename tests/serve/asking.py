"""Questions to an engine in this process."""

from __future__ import annotations

import queue
from collections.abc import Iterator

from kvtool.core.errors import KvtoolError
from kvtool.serve.engine import Engine
from kvtool.serve.job import Answer, Ask, Event


def stream(engine: Engine, question: Ask) -> Iterator[str | Answer]:
    """Yield the pieces of an answer, at last the complete one. Closing the iterator abandons the answer."""
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    job = engine.submit(question, events.put)
    try:
        while True:
            event = events.get()
            if isinstance(event, KvtoolError):
                raise event
            yield event
            if isinstance(event, Answer):
                return
    finally:
        engine.scheduler.leave(job)


def ask(engine: Engine, question: Ask) -> Answer:
    *_, answer = stream(engine, question)
    assert isinstance(answer, Answer)
    return answer
