"""Prompt segments: lead-in or prefix, chunks, question. Each is tokenised on its own, never again as joined text."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, TypeVar

from kvtool.core.common.types import Ids
from kvtool.core.errors import ModelError, UsageError
from kvtool.core.model.options import DEFAULT_SYSTEM
from kvtool.core.model.template import TemplateFailed, Tools, render
from kvtool.core.model.tokens import encode, encode_batch, encode_control, holds_control

Cut = TypeVar("Cut")
Message = tuple[str, str]
"""A role and a text."""
_SEPARATOR, _ASKS = "\n\n", "Question:"
CALL, CALL_END = "<tool_call>", "</tool_call>"  # the form of Hermes and Qwen, which most open models follow
RESULT, RESULT_END = "<tool_response>", "</tool_response>"
_MARK = re.compile(f"({CALL}|{CALL_END})")
_SYSTEM, _PASSAGES, _QUESTION = "kvtoolSystemText", "kvtoolPassagesText", "kvtoolQuestionText"
_ANSWER, _NEXT = "kvtoolAnswerText", "kvtoolNextText"
_MESSAGE = re.compile(r"kvtoolMessage(\d+)Text")
_TURN, _TURNS_AT_ONCE = ("assistant", "user"), 8


@dataclass(frozen=True, slots=True)
class PromptParts:
    prefix: Ids  # BOS, instruction, the user turn's header
    answer_header: Ids  # the user turn's end, the assistant turn's header


def prompt_parts(tokenizer: Any, system: str = DEFAULT_SYSTEM) -> PromptParts:
    """Cut the model's own chat template at the places of chunks and question."""
    before, between, after = "", _SEPARATOR, "\nAnswer:"  # of a base model
    if tokenizer.chat_template:
        before, between, after = _first_cut(tokenizer, (), _cut, "it does not show the user's text exactly once")
    return PromptParts(
        prefix=_one_bos(tokenizer, _prefix_ids(tokenizer, before, system, between)),
        answer_header=tuple(encode_control(tokenizer, after)),
    )


def chunk_tokens(tokenizer: Any, texts: Sequence[str]) -> list[Ids]:
    return [tuple(ids) for ids in encode_batch(tokenizer, [text.strip() + _SEPARATOR for text in texts])]


def question_tokens(tokenizer: Any, question: str, parts: PromptParts, prefill: str = "") -> Ids:
    """Tokenise the last segment: the question as ordinary text, the answer's header, and the answer's beginning."""
    text = question.strip()
    text = text if text.startswith(RESULT) else f"{_ASKS} {text}"
    return (*encode(tokenizer, text), *parts.answer_header, *said_tokens(tokenizer, prefill))


def with_tools(tokenizer: Any, system: str, tools: Tools) -> str:
    """Describe tools in an instruction, as the model's chat template does if it can, else in Hermes's form."""
    if tokenizer.chat_template:
        messages = [{"role": "system", "content": _SYSTEM}, {"role": "user", "content": _QUESTION}]
        (plain,), (told,) = render(tokenizer, [messages]), render(tokenizer, [messages], tools)
        if not isinstance(plain, TemplateFailed) and not isinstance(told, TemplateFailed):
            before, _, after = plain.partition(_SYSTEM)
            text = told.removeprefix(before).removesuffix(after)
            is_inside = len(before) + len(text) + len(after) == len(told) and text.count(_SYSTEM) == 1
            if after and is_inside and text != _SYSTEM and not holds_control(tokenizer, _MARK.sub("", text)):
                return text.replace(_SYSTEM, system)
    lines = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    form = f'{CALL}\n{{"name": <function-name>, "arguments": <args-json-object>}}\n{CALL_END}'
    return (
        f"{system}\n\n# Tools\n\nYou may call functions to answer. They are:\n<tools>\n{lines}\n</tools>\n\n"
        f"To call one, write a JSON object with its name and arguments:\n{form}"
    )


def message_tokens(tokenizer: Any, messages: Sequence[Message]) -> Ids | None:
    """Tokenise a client's messages by the model's chat template, with the header of the next answer. None: there is no
    template, or it does not show each message once and in order."""
    if not tokenizer.chat_template:
        return None
    ways = [[(role, content.strip()) for role, content in messages]]
    if [role for role, _ in messages[:2]] == ["system", "user"]:
        (_, system), (role, first), *later = ways[0]
        ways.append([(role, system + _SEPARATOR + first), *later])
    for way in ways:
        control = _around(tokenizer, [role for role, _ in way])
        if control is None:
            continue
        pieces = [piece for (_, content), before in zip(way, control, strict=False) for piece in (before, content)]
        pieces.append(control[-1])
        if not any(holds_control(tokenizer, content) for _, content in way):
            return _one_bos(tokenizer, encode_control(tokenizer, "".join(pieces)))
        ways_of = [encode_control] * len(pieces)
        ways_of[1::2] = [encode if role == "user" else said_tokens for role, _ in way]
        ids = [tokenise(tokenizer, piece) for tokenise, piece in zip(ways_of, pieces, strict=True)]
        return _one_bos(tokenizer, [token for piece in ids for token in piece])
    return None


def _around(tokenizer: Any, roles: Sequence[str]) -> list[str] | None:
    """Return what a template writes before each message, and after the last; None unless it shows each once, in order.
    The next two turns are rendered as well, since rendering starts a process."""
    head, turns = len(roles), 0
    while head > 2 and tuple(roles[head - 2 : head]) == _TURN:
        head, turns = head - 2, turns + 1
    first = turns - turns % _TURNS_AT_ONCE
    longer = [[*roles[:head], *_TURN * (first + more)] for more in range(_TURNS_AT_ONCE)]
    conversations = [
        [{"role": role, "content": f"kvtoolMessage{number}Text"} for number, role in enumerate(each)] for each in longer
    ]
    text = render(tokenizer, conversations)[turns - first]
    if isinstance(text, TemplateFailed):
        return None
    pieces = _MESSAGE.split(text)
    return pieces[::2] if pieces[1::2] == [str(number) for number in range(len(roles))] else None


def stop_texts(tokenizer: Any) -> tuple[str, ...]:
    """Return the texts that end an answer: for a base model, which knows no turns, the next question that it asks."""
    return () if tokenizer.chat_template else (f"\n{_ASKS}",)


def turn_header(tokenizer: Any) -> Ids:
    """Tokenise what separates an answer from the user's next turn: the assistant turn's end, the user turn's header."""
    between = _SEPARATOR
    if tokenizer.chat_template:
        turns = ({"role": "assistant", "content": _ANSWER}, {"role": "user", "content": _NEXT})
        between = _first_cut(tokenizer, turns, _cut_turn, "it does not show two turns one after the other")
    return tuple(encode_control(tokenizer, between))


def lead_in_passage(tokenizer: Any) -> Ids:
    """Tokenise kvtool's neutral passage, formatted like a chunk. One gives most of what warming gives, and every
    further row costs attention at ingest."""
    text = (files("kvtool.core.model") / "passages" / "en1.txt").read_text(encoding="utf-8")
    return chunk_tokens(tokenizer, [text])[0]


def _first_cut(tokenizer: Any, turns: Sequence[dict[str, str]], cut: Callable[[str], Cut | None], reason: str) -> Cut:
    """Render a prompt and what follows it, with the instruction separate or in the user's turn, until it can be cut."""
    user = _PASSAGES + _QUESTION
    apart = [{"role": "system", "content": _SYSTEM}, {"role": "user", "content": user}]
    folded = [{"role": "user", "content": _SYSTEM + _SEPARATOR + user}]  # for templates that know no system role
    for text in render(tokenizer, [[*messages, *turns] for messages in (apart, folded)]):
        if isinstance(text, TemplateFailed):
            reason = str(text)
        elif (pieces := cut(text)) is not None:
            return pieces
    raise ModelError(
        f"the model's chat template cannot be used: {reason}", "use another model, or repair its chat template"
    )


def _cut_turn(text: str) -> str | None:
    """Return the text between an answer and a next question; None: the template moves the instruction there."""
    if any(text.count(word) != 1 for word in (_ANSWER, _NEXT)):
        return None
    before, _, after = text.partition(_ANSWER)
    between, mark, _ = after.partition(_NEXT)
    return between if mark and _SYSTEM in before and _QUESTION in before else None


def _cut(text: str) -> tuple[str, str, str] | None:
    """Return what is before and after the instruction, and after the question; None unless each occurs once."""
    if any(text.count(word) != 1 for word in (_SYSTEM, _PASSAGES + _QUESTION)):
        return None
    head, after = text.split(_PASSAGES + _QUESTION)
    if _SYSTEM not in head:
        return None
    before, between = head.split(_SYSTEM)
    return before, between, after


def _prefix_ids(tokenizer: Any, before: str, system: str, between: str) -> list[int]:
    """Tokenise in one run, as the template's author meant it, unless the instruction spells a control token."""
    if not holds_control(tokenizer, _MARK.sub("", system)):
        return encode_control(tokenizer, before + system + between)
    return [*encode_control(tokenizer, before), *said_tokens(tokenizer, system), *encode_control(tokenizer, between)]


def said_tokens(tokenizer: Any, text: str) -> list[int]:
    """Tokenise an instruction or an answer: ordinary text, but for the marks around calls of tools."""
    pieces = [(encode_control if _MARK.fullmatch(piece) else encode, piece) for piece in _MARK.split(text) if piece]
    return [token for tokenise, piece in pieces for token in tokenise(tokenizer, piece)]


def _one_bos(tokenizer: Any, ids: list[int]) -> Ids:
    """Begin ids with one BOS: it is added where the template leaves it out, and dropped where it comes twice."""
    bos = tokenizer.bos_token_id
    if bos is None:
        return tuple(ids)
    start = 0
    while ids[start : start + 1] == [bos]:
        start += 1
    is_added = start or tokenizer.backend_tokenizer.encode("a").ids[:1] == [bos]
    return (bos, *ids[start:]) if is_added else tuple(ids)


def lead_in_ids(mode: str, tokenizer: Any, parts: PromptParts) -> Ids:
    """Return the ids that every chunk is prefilled after (`kvtool help concepts`; `sink:N` is EPIC's LegoLink-0)."""
    if mode == "warm":
        return parts.prefix + lead_in_passage(tokenizer)
    if mode in ("prefix", "neighbour"):
        return parts.prefix
    if mode == "none":
        return ()
    if mode == "bos" or mode.startswith("sink:"):
        return (_bos(tokenizer),) * (1 if mode == "bos" else int(mode.removeprefix("sink:")))
    return parts.prefix + _from_file(Path(mode), tokenizer)


def _bos(tokenizer: Any) -> int:
    for token in (tokenizer.bos_token_id, tokenizer.eos_token_id):
        if token is not None:
            return int(token)
    raise UsageError("the tokenizer has no BOS token to lead in with", "use --lead-in warm or prefix")


def _from_file(path: Path, tokenizer: Any) -> Ids:
    try:
        text = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"the lead-in {str(path)!r} cannot be read: {error}", "give a UTF-8 text file") from error
    if not text:
        raise UsageError(f"the lead-in {str(path)!r} is empty", "give a text file with a paragraph or two")
    return chunk_tokens(tokenizer, [text])[0]
