"""Answers as the OpenAI API has them: whole, or piece by piece as server-sent events."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from kvtool.core.errors import KvtoolError
from kvtool.serve.job import Answer
from kvtool.serve.wire import failure

DONE = "data: [DONE]\n\n"
WAITING = ": waiting\n\n"  # a comment: it keeps a connection alive, and tells whether it is


def sse(value: Any) -> str:
    """Format an event of a stream."""
    return f"data: {json.dumps(value, ensure_ascii=False)}\n\n"


def about(answer: Answer) -> dict[str, Any]:
    """Return what a response adds to an answer's text: sources, tokens, times, and why something was missed."""
    facts = {name: value for name, value in answer.facts.items() if name not in ("question", "answer")}
    facts["sources"] = list(answer.places)
    waits = {"queue": round(answer.queue_ms, 3), "others": round(answer.others_ms, 3)}
    facts["timing_ms"] = facts["timing_ms"] | waits
    facts["warnings"] = [{"message": text, "hint": hint} for text, hint in answer.warnings]
    return facts


def usage(answer: Answer) -> dict[str, Any]:
    """Count the tokens; `cached_tokens` are those whose keys and values were resident, or read unchanged."""
    tokens = answer.facts["tokens"]
    return {
        "prompt_tokens": tokens["prompt"],
        "completion_tokens": tokens["generated"],
        "total_tokens": tokens["prompt"] + tokens["generated"],
        "prompt_tokens_details": {"cached_tokens": tokens["reused"] + answer.facts.get("turn", {}).get("kept", 0)},
    }


@dataclass(slots=True)
class Telling:
    """A response of `/v1/chat/completions` (`chat`) or `/v1/completions`."""

    chat: bool
    model: str
    with_usage: bool = False
    id: str = field(default_factory=lambda: secrets.token_hex(12))
    created: int = field(default_factory=lambda: int(time.time()))
    _held: str = ""  # white space that may turn out to end the answer
    _begun: bool = False

    def whole(self, answer: Answer) -> dict[str, Any]:
        """The object of an answer that is not streamed."""
        said = {"message": {"role": "assistant", "content": answer.text}} if self.chat else {"text": answer.text}
        choice = {"index": 0, **said, "finish_reason": answer.finish, "logprobs": None}
        kind = "chat.completion" if self.chat else "text_completion"
        return {**self._head(kind), "choices": [choice], "usage": usage(answer), "kvtool": about(answer)}

    def beginning(self) -> Iterator[str]:
        """The event before the first piece."""
        if self.chat:
            yield sse(self._chunk({"role": "assistant", "content": ""}))

    def piece(self, text: str) -> Iterator[str]:
        """The events of a piece of text; white space around the answer is left out, as it is in a whole one."""
        text = self._held + text
        text = text if self._begun else text.lstrip()
        shown = text.rstrip()
        self._held = text[len(shown) :]
        if shown:
            self._begun = True
            yield sse(self._chunk({"content": shown} if self.chat else shown))

    def end(self, answer: Answer) -> Iterator[str]:
        """The events behind the last piece."""
        last = self._chunk({} if self.chat else "", answer.finish)
        yield sse({**last, "kvtool": about(answer)})
        if self.with_usage:
            yield sse({**last, "choices": [], "usage": usage(answer)})
        yield DONE

    @staticmethod
    def broken(error: KvtoolError) -> Iterator[str]:
        """The events that end a stream whose answer cannot go on."""
        yield sse({"error": failure(error)})
        yield DONE

    def _head(self, kind: str) -> dict[str, Any]:
        name = f"chatcmpl-{self.id}" if self.chat else f"cmpl-{self.id}"
        return {"id": name, "object": kind, "created": self.created, "model": self.model}

    def _chunk(self, said: dict[str, Any] | str, finish: str | None = None) -> dict[str, Any]:
        part = {"delta": said} if self.chat else {"text": said}
        choice = {"index": 0, **part, "finish_reason": finish, "logprobs": None}
        kind = "chat.completion.chunk" if self.chat else "text_completion"
        return {**self._head(kind), "choices": [choice]}
