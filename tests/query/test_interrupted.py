"""Ctrl-C at any line of an answer: nothing that was stored is lost, and a conversation's turn was asked or was not."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

import pytest
import torch

import kvtool as package
from kvtool.core.model import prompt_cache
from kvtool.core.model.hf import states
from kvtool.core.query import answer, conversation, fuse_prompt
from kvtool.core.query.conversation import Conversation
from kvtool.core.query.options import QueryOptions
from kvtool.core.query.reply import Request
from kvtool.core.session.session import Session
from tests.cli.working import CHUNKS, LAYERS, QUESTION, chunks_of, drop_records, kvtool, payloads, write_corpus
from tests.families import save_tiny

FIRST, SECOND, THIRD = "Who built the first mill?", "And the second?", "What does it grind?"


class Interrupts:
    """Raises KeyboardInterrupt the first time that a line of the modules is about to run, one more line each time.

    Attributes
    ----------
    lines : those at which it was raised already.
    """

    def __init__(self, *modules: ModuleType) -> None:
        self._files = {module.__file__ for module in modules}
        self.lines: set[tuple[str, int]] = set()

    def interrupted(self, work: Callable[[], object]) -> bool:
        """Do the work up to the next line; return False if there is none."""
        count, before = len(self.lines), sys.gettrace()
        sys.settrace(self._called)
        try:
            work()
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(before)
        return len(self.lines) > count

    def _called(self, frame: FrameType, event: str, argument: Any) -> Any:
        return self._line if frame.f_code.co_filename in self._files else None

    def _line(self, frame: FrameType, event: str, argument: Any) -> Any:
        place = frame.f_code.co_filename, frame.f_lineno
        if event == "line" and place not in self.lines:
            self.lines.add(place)
            sys.settrace(None)
            raise KeyboardInterrupt
        return self._line


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("family", ["llama", "qwen3-next"])
def test_ctrl_c_at_any_line_of_a_turn(family: str, tmp_path: Path) -> None:
    folder = save_tiny(family, tmp_path / "model")
    write_corpus(tmp_path / "corpus", 2)
    kvtool("ingest", tmp_path / "corpus", "--model", folder, "--store", tmp_path / "store", *CHUNKS).fine()
    with package.open(tmp_path / "store") as cache:

        def talked(*questions: str) -> Conversation:
            talk = cache.conversation(max_tokens=4, top_k=1)
            for question in questions:
                talk.ask(question)
            return talk

        talked(FIRST, SECOND)  # what is kept of a prompt is rounded to the store's format: all others go on from it
        calm = {turns: talked(*turns).ask(THIRD) for turns in ((FIRST,), (FIRST, SECOND))}
        interrupts = Interrupts(answer, conversation, fuse_prompt, fuse_prompt, prompt_cache, states)
        talk = talked(FIRST)
        while interrupts.interrupted(partial(talk.ask, SECOND)):
            expected = calm[tuple(turn.question for turn in talk.turns)]
            reply = talk.ask(THIRD)
            assert reply.tokens == expected.tokens, interrupts.lines
            assert torch.equal(reply.fused.logits, expected.fused.logits)
            talk = talked(FIRST)
    assert len(interrupts.lines) > 100


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("more", [{"defer": True, "defer_threshold": 2.0}, {"verify": True}], ids=str)
def test_ctrl_c_at_any_line_of_an_answer(more: dict[str, Any], store: Path, session: Session) -> None:
    """One of its chunks has no records: it is computed, and stored after the answer."""
    request, options = Request(QUESTION, documents=("mill2.md",)), QueryOptions(max_tokens=4, **more)

    def ask() -> answer.Reply:
        return answer.answer(session, request, options)

    calm, before, chunk = ask(), payloads(store), chunks_of(store, "mill2.md")[2]
    interrupts = Interrupts(answer, fuse_prompt)
    lost = {(chunk, layer) for layer in range(LAYERS)}
    while True:
        drop_records(store, chunk)
        if not interrupts.interrupted(ask):
            break
        stored = payloads(store)
        assert stored.items() <= before.items()
        assert before.keys() - stored.keys() in (set(), lost), interrupts.lines
        reply = ask()
        assert payloads(store) == before
        if stored == before:  # else the chunk was computed in place, after those before it
            assert (reply.answer, reply.tokens) == (calm.answer, calm.tokens)
    assert len(interrupts.lines) > 80
