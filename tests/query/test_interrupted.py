"""Ctrl-C at any line of a conversation's turn: it is as if that had not been asked, or as if it had been answered."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import kvtool as package
from kvtool.core.model import prompt_cache
from kvtool.core.model.hf import states
from kvtool.core.query import conversation
from kvtool.core.query.conversation import Conversation
from tests.cli.working import CHUNKS, kvtool, write_corpus
from tests.families import save_tiny

FIRST, SECOND, THIRD = "Who built the first mill?", "And the second?", "What does it grind?"
WATCHED = {module.__file__ for module in (conversation, prompt_cache, states)}


class Interrupts:
    """Raises KeyboardInterrupt the first time that a line of what is watched is about to run, one more line each time.

    Attributes
    ----------
    lines : those at which it was raised already.
    """

    def __init__(self) -> None:
        self.lines: set[tuple[str, int]] = set()
        self.raised = False

    def __enter__(self) -> None:
        self.raised, self._before = False, sys.gettrace()
        sys.settrace(self._called)

    def __exit__(self, *error: object) -> None:
        sys.settrace(self._before)

    def _called(self, frame: FrameType, event: str, argument: Any) -> Any:
        return self._line if frame.f_code.co_filename in WATCHED else None

    def _line(self, frame: FrameType, event: str, argument: Any) -> Any:
        place = frame.f_code.co_filename, frame.f_lineno
        if event == "line" and not self.raised and place not in self.lines:
            self.lines.add(place)
            self.raised = True
            raise KeyboardInterrupt
        return self._line


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "qwen3-next"])
def test_ctrl_c_at_any_line(family: str, tmp_path: Path) -> None:
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
        interrupts = Interrupts()
        while True:
            talk = talked(FIRST)
            try:
                with interrupts:
                    talk.ask(SECOND)
            except KeyboardInterrupt:
                pass
            if not interrupts.raised:
                break
            expected = calm[tuple(turn.question for turn in talk.turns)]
            reply = talk.ask(THIRD)
            assert reply.tokens == expected.tokens, interrupts.lines
            assert torch.equal(reply.fused.logits, expected.fused.logits)
    assert len(interrupts.lines) > 40
