"""Constrained decoding: a grammar rules out tokens before one is chosen, by llguidance (extra `structured`)."""

from __future__ import annotations

import re
import sys
import threading
import time
from functools import lru_cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np

from kvtool.core.common.children import limit_process, output_of
from kvtool.core.errors import UsageError

if TYPE_CHECKING:
    import torch

_SPELLED = re.compile(r'^(\w+): "(<[\w/|]+>)"$', re.MULTILINE)
_SECONDS, _MEMORY = 1, 2 * 10**9  # of a processor, and bytes of address space
_STACK = 1 << 20  # bytes, no more than a thread of the server has on any system
_PROGRAM = "from kvtool.core.model.constraint import main\nmain(int(sys.argv[1]), int(sys.argv[2]))"
INSTALL = "pip install 'kvtool[structured]'"


def is_installed() -> bool:
    return find_spec("llguidance") is not None


def check_grammar(grammar: str) -> None:
    if reason := _reason_against(grammar):
        raise UsageError(f"the answer cannot be held to this schema: {reason}", "simplify the schema")


@lru_cache(maxsize=256)
def _reason_against(grammar: str) -> str:
    """Return why a grammar cannot be used, or "". It is compiled in a separate process first: llguidance bounds neither
    its time nor its stack."""
    output = output_of(_PROGRAM, grammar.encode("utf-8", "replace"), _SECONDS, _MEMORY)
    lost = f"it takes over {_SECONDS} s, {_MEMORY / 1e9:.0f} GB of memory, or too many levels of references"
    return output.decode().removesuffix("\n") if output.endswith(b"\n") else lost


def main(seconds: int, memory: int) -> None:
    from llguidance import LLMatcher, LLTokenizer

    limit_process(memory, seconds)

    def compile_grammar() -> None:
        started = time.process_time()
        matcher = LLMatcher(LLTokenizer("byte"), LLMatcher.grammar_from_lark(sys.stdin.buffer.read().decode()))
        matcher.compute_bitmask()
        reason = matcher.get_error().splitlines()[0] if matcher.is_error() else ""
        if time.process_time() - started <= seconds:
            sys.stdout.buffer.write(reason.encode() + b"\n")
            sys.stdout.buffer.flush()

    threading.stack_size(_STACK)
    thread = threading.Thread(target=compile_grammar)
    thread.start()
    thread.join()


class Constraint:
    """A grammar in llguidance's Lark, which includes JSON schemas, over the tokens of one answer."""

    def __init__(self, grammar: str, tokenizer: Any) -> None:
        if not is_installed():
            raise UsageError("a grammar needs llguidance, which is not installed", INSTALL)
        self._grammar, self._tokenizer = grammar, tokenizer
        self._matcher: Any = None

    def begin(self) -> None:
        self._matcher = None

    def masked(self, logits: torch.Tensor) -> torch.Tensor:
        import torch

        if self._matcher is None:
            from llguidance import LLMatcher

            vocabulary = _vocabulary(self._tokenizer, len(logits))
            self._matcher = LLMatcher(vocabulary, LLMatcher.grammar_from_lark(self._of(vocabulary)))
            self._check()
        bits = self._matcher.compute_bitmask()
        self._check()
        is_possible = np.unpackbits(np.frombuffer(bits, np.uint8), count=len(logits), bitorder="little").astype(bool)
        return logits.masked_fill(torch.from_numpy(~is_possible).to(logits.device), float("-inf"))

    def take(self, token: int) -> None:
        self._matcher.consume_token(token)
        self._check()

    def _of(self, vocabulary: Any) -> str:
        """Return the grammar with the model's control tokens: a rule of one such token's spelling is the token."""

        def rule(match: re.Match[str]) -> str:
            token = self._tokenizer.get_added_vocab().get(match[2])
            is_control = token is not None and vocabulary.is_special_token(token)
            return f"{match[1]}: {match[2]}" if is_control else match[0]

        return _SPELLED.sub(rule, self._grammar)

    def _check(self) -> None:
        if self._matcher.is_error():
            reason = self._matcher.get_error().splitlines()[0]
            raise UsageError(f"the answer cannot be held to this schema: {reason}", "simplify the schema")


@lru_cache(maxsize=2)
def _vocabulary(tokenizer: Any, size: int) -> Any:
    from llguidance.hf import from_tokenizer

    try:
        return from_tokenizer(tokenizer, n_vocab=size)
    except ValueError as error:
        raise UsageError(f"this model's answers cannot be held to a schema: {error}", "ask without one") from error
