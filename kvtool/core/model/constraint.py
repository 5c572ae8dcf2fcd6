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
_STACK, _STEPS = 1 << 20, 300  # bytes, no more than any thread of the server has; letters of a trial answer
_PROGRAM = "from kvtool.core.model.constraint import main\nmain(int(sys.argv[1]), int(sys.argv[2]))"
INSTALL = "pip install 'kvtool[structured]'"


def is_installed() -> bool:
    return find_spec("llguidance") is not None


def check_grammar(grammar: str, matcher: Any = None) -> None:
    if reason := _reason_against(grammar) if matcher is None else _error_of(matcher):
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
        text = b""  # of a short answer, which finds out parts that have no value
        while len(text) < _STEPS:
            mask = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), count=256, bitorder="little")
            if matcher.is_error() or not mask.any():
                break
            ends = b'"' if text.count(b'"') % 2 else b'}]"'  # of a string, or of any other value
            text += bytes([next((each for each in ends if mask[each]), int(mask.argmax()))])
            matcher.consume_token(text[-1])
        if time.process_time() - started <= seconds:
            sys.stdout.buffer.write(_error_of(matcher).encode() + b"\n")
            sys.stdout.buffer.flush()

    threading.stack_size(_STACK)
    thread = threading.Thread(target=compile_grammar)
    thread.start()
    thread.join()


def _error_of(matcher: Any) -> str:
    text = str(matcher.get_error()).splitlines()[0] if matcher.is_error() else ""
    return "a part of it has no value, or no finite one" if re.search("NoExtension|Too many items", text) else text


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
        bits = self._matcher.compute_bitmask()
        check_grammar(self._grammar, self._matcher)
        is_possible = np.unpackbits(np.frombuffer(bits, np.uint8), count=len(logits), bitorder="little").astype(bool)
        return logits.masked_fill(torch.from_numpy(~is_possible).to(logits.device), float("-inf"))

    def take(self, token: int) -> None:
        self._matcher.consume_token(token)
        check_grammar(self._grammar, self._matcher)

    def _of(self, vocabulary: Any) -> str:
        """Return the grammar with the model's control tokens: a rule of one such token's spelling is the token."""

        def rule(match: re.Match[str]) -> str:
            token = self._tokenizer.get_added_vocab().get(match[2])
            is_control = token is not None and vocabulary.is_special_token(token)
            return f"{match[1]}: {match[2]}" if is_control else match[0]

        return _SPELLED.sub(rule, self._grammar)


@lru_cache(maxsize=2)
def _vocabulary(tokenizer: Any, size: int) -> Any:
    from llguidance import LLTokenizer

    try:
        whole = tokenizer.backend_tokenizer.to_str()
        return LLTokenizer(whole, n_vocab=size, eos_token=tokenizer.eos_token_id)
    except ValueError as error:
        raise UsageError(f"this model's answers cannot be held to a schema: {error}", "ask without one") from error
