"""A request of the OpenAI API as a question to the store."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from kvtool.core.errors import UsageError, did_you_mean
from kvtool.core.query.options import ChunkChoice, QueryOptions
from kvtool.core.query.reply import Request
from kvtool.serve.job import Ask, Turns
from kvtool.serve.wire import LONGEST_TEXT, MOST_NAMES, Refusal, taken, texts, within

# What of a question's options a client may set, under `kvtool`: nothing that names a file or a model of this machine.
ALLOWED = (
    *("fusion", "ratio", "link_tokens", "link", "shift", "level", "max_loss", "top_k", "source", "retriever", "order"),
    *("min_score", "stop_repeats", "defer", "defer_first", "defer_threshold", "slo_ms"),
)
_OWN = ("documents", "chunks", *ALLOWED)
# What the API has beside, and the values at which it changes nothing.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "top_p": (1,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "logit_bias": ({},),
    "tools": ([],),
    "functions": ([],),
    "tool_choice": ("none", "auto"),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "echo": (False,),
    "suffix": ("",),
}
# What is about the client and its account alone.
_IGNORED = (
    *("metadata", "store", "service_tier", "parallel_tool_calls", "prompt_cache_key"),
    *("prediction", "verbosity", "reasoning_effort"),
)
_USER = ("user", "safety_identifier")  # whom a client asks for, by its older and its newer name
_KNOWN = (
    *("model", "stream", "stream_options", "max_tokens", "max_completion_tokens", "temperature", "seed", "stop"),
    *_USER,
)
_MOST_STOPS, _LONGEST_STOP = 16, 1000  # characters
_MOST_MESSAGES = 4096
_LONGEST_LIST = 32_768  # characters of an option's values: globs are compiled, at some 30 μs a character


@dataclass(frozen=True, slots=True)
class Wanted:
    """A request, read.

    Attributes
    ----------
    model : that the client names, `user` whom it asks for; "" where it names none.
    usage : whether a stream ends with a count of tokens.
    """

    ask: Ask
    stream: bool
    usage: bool
    model: str
    user: str


def read_chat(value: Mapping[str, Any], options: QueryOptions) -> Wanted:
    """Read a body of `/v1/chat/completions`.

    Parameters
    ----------
    options : what holds where the client says nothing.

    Raises
    ------
    Refusal, UsageError : it asks for nothing, or for what cannot be had.
    """
    system, turns, question = _conversation(taken(value, "messages", list, []))
    return _wanted(value, "messages", question, replace(options, system=system or options.system), turns)


def read_completion(value: Mapping[str, Any], options: QueryOptions) -> Wanted:
    """Read a body of `/v1/completions`; see `read_chat`. Its prompt is the question."""
    prompts = texts(value, "prompt", LONGEST_TEXT)
    if len(prompts) != 1:
        raise Refusal(400, "no_prompt", "prompt has to be one text", "ask once for each", "prompt")
    return _wanted(value, "prompt", prompts[0], options)


def _wanted(
    value: Mapping[str, Any], asked: str, question: str, options: QueryOptions, turns: Turns | None = None
) -> Wanted:
    _check_names(value, asked)
    own = taken(value, "kvtool", dict, {})
    if unknown := [name for name in own if name not in _OWN]:
        hint = did_you_mean(unknown[0], _OWN) or f"known: {', '.join(_OWN)}"
        raise Refusal(400, "unknown_option", f"kvtool has no option {unknown[0]!r}", hint, f"kvtool.{unknown[0]}")
    given = {name: _bounded(own[name], name) for name in ALLOWED if own.get(name) is not None}
    numbers = {
        "max_tokens": taken(value, "max_completion_tokens", int, taken(value, "max_tokens", int)),
        "temperature": taken(value, "temperature", (int, float)),
        "seed": taken(value, "seed", int),
    }
    given |= {name: number for name, number in numbers.items() if number is not None}
    choice = ChunkChoice(chunks=texts(own, "chunks"), documents=texts(own, "documents"))
    stream = taken(value, "stream_options", dict, {})
    stop = texts(value, "stop", _LONGEST_STOP, _MOST_STOPS)
    return Wanted(
        ask=Ask(Request(question, choice.chunks, choice.documents), replace(options, **given), stop, turns),
        stream=taken(value, "stream", bool, False),
        usage=taken(stream, "include_usage", bool, False),
        model=taken(value, "model", str, ""),
        user=next(filter(None, [taken(value, name, str, "") for name in _USER]), ""),
    )


def _bounded(value: Any, name: str) -> Any:
    """Return an option's value, its texts no longer and no more than names may be. Raises Refusal."""
    if isinstance(value, list) and len(value) > MOST_NAMES:
        raise Refusal(400, "too_many", f"{name} has {len(value):,} values", f"at most {MOST_NAMES:,}", name)
    if not isinstance(value, list):
        return within(value, name)
    texts_of_it = [within(each, name) for each in value]
    if (length := sum(len(each) for each in texts_of_it if isinstance(each, str))) > _LONGEST_LIST:
        raise Refusal(400, "too_long", f"{name} has {length:,} characters", f"at most {_LONGEST_LIST:,}", name)
    return texts_of_it


def _check_names(value: Mapping[str, Any], asked: str) -> None:
    """Refuse what would change the answer and cannot be had; nothing is left out without a word."""
    for name, given in value.items():
        if given is None or name in (asked, "kvtool", *_KNOWN, *_IGNORED):
            continue
        if name not in _NEUTRAL:
            raise Refusal(400, "unknown_parameter", f"there is no parameter {name!r}", param=name)
        if given not in _NEUTRAL[name]:
            hint = f"leave it out, or give {_NEUTRAL[name][0]!r}"
            raise Refusal(400, "unsupported", f"{name} cannot be set to {_shown(given)}", hint, name)


def _shown(value: Any) -> str:
    """Return a value of a client's as an error shows it."""
    return reprlib.repr(value)


def _conversation(messages: list[Any]) -> tuple[str, Turns, str]:
    """The instruction, the turns before the last question, and that."""
    if len(messages) > _MOST_MESSAGES:
        raise Refusal(
            400, "too_many", f"there are {len(messages):,} messages", f"at most {_MOST_MESSAGES:,}", "messages"
        )
    said = [_message(message, number) for number, message in enumerate(messages)]
    system = "\n\n".join(text for role, text in said if role in ("system", "developer"))
    spoken = [(role, text.strip()) for role, text in said if role in ("user", "assistant")]
    if not spoken or spoken[-1][0] != "user":
        raise Refusal(400, "no_question", "the last message has to be the user's", param="messages")
    if not spoken[-1][1]:
        raise UsageError("the question is empty", "ask something")
    return system, *_turns(spoken)


def _turns(spoken: list[tuple[str, str]]) -> tuple[Turns, str]:
    """Questions with their answers, and the last question. What one side said in several messages is one text; what an
    assistant said before anybody asked stands before the first question."""
    groups = [(role, [text for _, text in group if text]) for role, group in groupby(spoken, lambda one: one[0])]
    if groups[0][0] == "assistant":
        (_, greeting), (_, first), *later = groups
        groups = [("user", [*(f"Assistant: {text}" for text in greeting), *first]), *later]
    texts = ["\n\n".join(group) for _, group in groups]
    return tuple(zip(texts[:-1:2], texts[1::2], strict=True)), texts[-1]


def _message(message: Any, number: int) -> tuple[str, str]:
    where = f"messages.{number}"
    if not isinstance(message, dict):
        raise Refusal(400, "wrong_type", f"{where} is no object", param=where)
    role = message.get("role")
    if role not in ("system", "developer", "user", "assistant"):
        raise Refusal(
            400, "unsupported", f"{where} has the role {_shown(role)}", "user, assistant or system", f"{where}.role"
        )
    content = message.get("content")
    parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
    words = [part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None for part in parts]
    if not all(isinstance(word, str) for word in words):
        raise Refusal(400, "unsupported", f"{where} holds something else than text", param=f"{where}.content")
    return role, within("\n".join(map(str, words)), f"{where}.content", LONGEST_TEXT)
