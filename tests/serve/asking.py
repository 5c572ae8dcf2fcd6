"""Questions to an engine in this process."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from typing import Any

from kvtool.core.errors import KvtoolError
from kvtool.core.query.options import QueryOptions
from kvtool.serve.anthropic import MessagesBody
from kvtool.serve.engine import Engine
from kvtool.serve.job import Answer, Ask, Event
from kvtool.serve.openai import ChatBody


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


def ask_of_chat(body: dict[str, Any], options: QueryOptions | None = None) -> Ask:
    """The question of a body of `/v1/chat/completions`."""
    return ChatBody.read_chat(body).ask(options or QueryOptions(), False)


def ask_of_message(body: dict[str, Any]) -> Ask:
    """The question of a body of `/v1/messages`."""
    return MessagesBody.read_chat(body).ask(QueryOptions(), False)
