"""A question with its conversation, tools and options, in the same words for all dialects; calls in its answer."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, NamedTuple

from kvtool.core.errors import UsageError
from kvtool.core.model.prompt import CALL, CALL_END, RESULT, RESULT_END
from kvtool.core.model.template import Tools
from kvtool.core.query.options import ChunkChoice, QueryOptions
from kvtool.core.query.reply import Request
from kvtool.serve.job import Ask, Call, Turns
from kvtool.serve.requests import Format, Function, KvtoolOptions, Name, Sampling, SentCall, ToolChoice
from kvtool.serve.tools import grammar_of
from kvtool.serve.wire import Refusal


class Message(NamedTuple):
    """A message. `kind`: `call` of one that calls tools, `result` of one with a result. `path`: in the request."""

    role: str
    text: str
    kind: str = ""
    path: str = ""


def call_message(text: str, calls: Sequence[SentCall | Call], path: str = "") -> Message:
    written = [{"name": each.name, "arguments": each.arguments} for each in calls]
    marked = [f"{CALL}\n{json.dumps(each, ensure_ascii=False)}\n{CALL_END}" for each in written]
    return Message("assistant", "\n".join(filter(None, [text, *marked])), "call", path)


def result_message(text: str, path: str) -> Message:
    return Message("user", f"{RESULT}\n{text}\n{RESULT_END}", "result", path)


_AUTO = ToolChoice(type="auto")
_SHOWN = {"name", "description", "parameters"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Chat:
    """A request. `prompt`: of a completion, in place of messages. `options`: those beside `kvtool`.
    `usage`: whether a stream ends with a count of tokens. `model`, `user`: "" if not named."""

    kvtool: KvtoolOptions
    options: Mapping[str, Any]
    messages: Sequence[Message] = ()
    prompt: str | None = None
    system: str = ""
    functions: Sequence[Function] = ()
    choice: ToolChoice = _AUTO
    format: Format | None = None
    format_name: str = "response_format"
    parallel: bool = True
    stop: Sequence[str] = ()
    stream: bool = False
    usage: bool = False
    model: str = ""
    user: str = ""

    def ask(self, defaults: QueryOptions, strict: bool) -> Ask:
        """Return the question. `defaults`, `strict`: the server's. Raises Refusal or UsageError."""
        if self.prompt is None:
            request, system, turns = _conversation(self.messages, self.system)
        else:
            request, system, turns = Request(self.prompt, messages=(("user", self.prompt),)), "", None
        tools, grammar = self._tools()
        options = {**self.kvtool.options(), **self.options, "system": system or defaults.system}
        if grammar and request.prefill:
            raise Refusal(400, "unsupported", "a prefilled answer cannot follow a schema", param="messages")
        if grammar or request.prefill:
            if self.kvtool.cite:
                what = "cite does not apply to an answer that follows a schema or is prefilled"
                raise Refusal(400, "unsupported", what, "leave it out", "kvtool.cite")
            options["cite"] = False
        if grammar:  # a text that is cut off follows none
            options |= {"grammar": grammar, "stop_repeats": False, "min_tokens": 0}
        choice = ChunkChoice(chunks=tuple(self.kvtool.chunks), documents=tuple(self.kvtool.documents))
        if choice.chunks or choice.documents or not self.kvtool.spot:
            request = replace(request, chunks=choice.chunks, documents=choice.documents, messages=())
        return Ask(
            request,
            replace(defaults, **options),
            () if grammar else tuple(self.stop),
            turns,
            must_find=strict if self.kvtool.strict is None else self.kvtool.strict,
            tools=tools,
            parallel=self.parallel,
        )

    def _tools(self) -> tuple[Tools, str]:
        """Return the tools to describe to the model, and the grammar of its answer; "" for a free one."""
        choice, functions = self.choice, self.functions
        mode, names = choice.type, {each.name for each in functions}
        chosen = {each.name for each in choice.tools} if mode == "allowed_tools" else {choice.name}
        is_named = mode in ("allowed_tools", "function")
        if (is_named and not (chosen and chosen <= names)) or ("required" in (mode, choice.mode) and not names):
            hint = "none, auto, required, or the name of one of the tools"
            raise Refusal(400, "unsupported", "tool_choice names no tool of the request", hint, "tool_choice")
        if mode == "allowed_tools":
            functions, mode = [each for each in functions if each.name in chosen], choice.mode
        offered = [] if mode == "none" else [each.model_dump(include=_SHOWN) for each in functions]
        forced = [each for each in offered if mode == "required" or (mode == "function" and each["name"] in chosen)]
        schema = None if forced or self.format is None else self.format.answer_schema
        tools = tuple({"type": "function", "function": each} for each in offered)
        if not forced and schema is None:
            return tools, ""
        return tools, grammar_of(forced or offered, schema, "tool_choice" if forced else self.format_name)


def _conversation(messages: Sequence[Message], system: str) -> tuple[Request, str, Turns]:
    """Find the question, the beginning of its answer, the instruction, with `system` first, and the turns."""
    for before, message in zip([Message("", ""), *messages], messages, strict=False):
        if message.kind == "result" and not before.kind:
            what = f"{message.path} is a tool result without a preceding tool call"
            raise Refusal(400, "unsupported", what, "send the message with the call, too", message.path)
    end = len(messages)
    while end and messages[end - 1].role in ("assistant", "system") and not messages[end - 1].kind:
        end -= 1
    prefill = [each.text.rstrip() for each in messages[end:] if each.role == "assistant"]
    instruction = [Message("system", system)] if system else []
    ordered = [*instruction, *messages[:end], *(each for each in messages[end:] if each.role == "system")]
    dialogue = [(each.role, each.text.strip()) for each in ordered if each.role != "system"]
    if not dialogue or dialogue[-1][0] != "user":
        what = "messages ends with a call that has no result" if dialogue else "messages has no message of the user"
        raise Refusal(400, "no_question", what, param="messages")
    if not dialogue[-1][1]:
        raise UsageError("the question is empty", "ask something")
    turns, question = _turns(dialogue)
    texts = tuple((each.role, each.text) for each in ordered)
    request = Request(question, messages=texts, prefill="\n\n".join(filter(None, prefill)))
    return request, "\n\n".join(text for role, text in texts if role == "system"), turns


def _turns(dialogue: list[tuple[str, str]]) -> tuple[Turns, str]:
    """Join successive messages of one role; a greeting of the assistant becomes part of the first question."""
    groups = [(role, [text for _, text in group if text]) for role, group in groupby(dialogue, lambda one: one[0])]
    if groups[0][0] == "assistant":
        (_, greeting), (_, first), *later = groups
        groups = [("user", [*(f"Assistant: {text}" for text in greeting), *first]), *later]
    joined = ["\n\n".join(group) for _, group in groups]
    return tuple(zip(joined[:-1:2], joined[1::2], strict=True)), joined[-1]


# ---- requests with the fields of a question at the top ----


class Question(Sampling):
    """Fields of a question at the top of a request, except in Ollama's API."""

    model: Name = ""
    stream: bool = False
    kvtool: KvtoolOptions = KvtoolOptions()

    @classmethod
    def read_chat(cls, value: Mapping[str, Any]) -> Chat:
        return cls.read(value).chat()

    def chat(self, **more: Any) -> Chat:
        """Return the request in the words of all dialects."""
        more = {"options": self.sampling()} | more
        return Chat(kvtool=self.kvtool, stream=self.stream, model=self.model, **more)


class OpenAIQuestion(Question):
    """Fields of all questions of OpenAI's APIs."""

    user: Name = ""
    safety_identifier: Name = ""  # the newer name of `user`
    parallel_tool_calls: bool = True

    def chat(self, **more: Any) -> Chat:
        user = self.user or self.safety_identifier
        return super().chat(user=user, parallel=self.parallel_tool_calls, **more)
