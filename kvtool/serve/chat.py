"""A question with its conversation, tools and options, in the same words for all dialects; calls in its answer."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, NamedTuple

from kvtool.core.errors import UsageError
from kvtool.core.model.constraint import INSTALL, check_grammar, is_installed
from kvtool.core.model.prompt import CALL, CALL_END, RESULT, RESULT_END
from kvtool.core.model.template import Tools
from kvtool.core.query.options import ChunkChoice, QueryOptions
from kvtool.core.query.reply import Request
from kvtool.serve.job import Answer, Ask, Call, Turns
from kvtool.serve.requests import Format, Function, KvtoolOptions, Name, Sampling, SentCall, ToolChoice
from kvtool.serve.wire import Refusal, parsed_json

_LIST, _PYTHON = "[TOOL_CALLS]", "<|python_tag|>"  # of Mistral, and of Llama
# As json.dumps writes it, so that an answer comes back as the same tokens.
_SHAPE = {"x-guidance": {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}}


# ---- grammars ----


def grammar_of(functions: Sequence[Mapping[str, Any]], schema: dict[str, Any] | None, param: str) -> str:
    """Return the grammar of a call of one of the functions, or of an answer of the schema. `param`: what asks for it.
    Raises Refusal."""
    if not is_installed():
        raise Refusal(400, "unsupported", f"{param} needs llguidance, which the server lacks", INSTALL, param)
    forms = [{**each, "parameters": closed({**each["parameters"], "type": "object"})} for each in functions]
    grammar = _grammar(forms, closed(schema))
    try:
        check_grammar(grammar)
    except UsageError as error:
        raise Refusal(400, "unsupported", f"{param}: {error.message}", error.hint, param) from error
    return grammar


# Keywords whose value is a schema, or a list of them, and those whose value has schemas by name. Rules that are merged
# with others of the same object cannot be closed one by one.
_SCHEMAS = ("items", "prefixItems", "additionalProperties", "anyOf", "oneOf", "contains")
_BY_NAME = ("properties", "patternProperties", "$defs", "definitions")
_MERGING = ("allOf", "not", "if", "dependentSchemas", "unevaluatedProperties", "propertyNames")


def closed(schema: Any) -> Any:
    """Return a schema whose objects have only the members that they name: small models invent others for ever."""
    try:
        return _closed(schema)
    except ValueError:
        return schema


def _closed(part: Any) -> Any:
    if isinstance(part, list):
        return [_closed(each) for each in part]
    if not isinstance(part, dict):
        return part
    named = {"properties", "patternProperties"} & part.keys()
    if any(word in part for word in _MERGING) or (named and {"anyOf", "oneOf", "$ref"} & part.keys()):
        raise ValueError("its rules are merged")
    own = {}
    for word, each in part.items():
        if word in _BY_NAME and isinstance(each, dict):
            own[word] = {name: _closed(schema) for name, schema in each.items()}
        else:
            own[word] = _closed(each) if word in _SCHEMAS else each
    return {**own, "additionalProperties": own.get("additionalProperties", False)} if named else own


def _grammar(functions: Sequence[Mapping[str, Any]], schema: dict[str, Any] | None) -> str:
    rules, ways = [f'open: "{CALL}"', f'close: "{CALL_END}"'] if functions else [], []
    for number, function in enumerate(functions):
        begin = f'\n{{"name": {json.dumps(function["name"])}, "arguments": '
        rules.append(f'call{number}: open {json.dumps(begin)} args{number} "}}\\n" close')
        rules.append(f"args{number}: %json {json.dumps({**function['parameters'], **_SHAPE})}")
        ways.append(f"call{number}")
    if schema is not None:
        rules.append(f"said: %json {json.dumps({**schema, **_SHAPE})}")
        ways.append("said")
    return "\n".join([f"start: {' | '.join(ways)}", *rules])


# ---- answers ----

_FENCED = re.compile(r"```(?:json)?\n(.*)\n```", re.DOTALL)
_CALLED = re.compile(f"{CALL}(.*?)(?:{CALL_END}|$)", re.DOTALL)


def with_calls(answer: Answer, tools: Tools, parallel: bool = True, forced: bool = False) -> Answer:
    """Return an answer with the calls of these tools that its text has.

    Known are `<tool_call>` with JSON (Hermes, Qwen), `[TOOL_CALLS]` (Mistral), and JSON alone (Llama), also fenced.
    """
    said, mark, rest = answer.text.partition(CALL)
    if forced and answer.finish == "length" and CALL.startswith(answer.text.strip()):
        return replace(answer, text="")
    if mark and answer.finish == "length" and not rest.rstrip().endswith(CALL_END):
        return _cut_off(answer, tools, parallel, forced)
    fenced = _FENCED.fullmatch(answer.text.strip())
    bare = fenced[1] if fenced else answer.text.strip().removeprefix(_LIST).removeprefix(_PYTHON)
    try:
        found = [parsed_json(text) for text in (_CALLED.findall(answer.text) if mark else [bare])]
    except ValueError:
        begun = _BEGUN.fullmatch(rest.strip().removesuffix(CALL_END).rstrip().removesuffix("}"))
        if forced and begun:
            return replace(answer, text="", calls=(Call(begun[1], {}, partial=begun[2]),))
        return answer
    if not mark and isinstance(found[0], list):
        found = found[0]
    calls = [_call(one) if isinstance(one, dict) else None for one in found]
    names = [tool["function"]["name"] for tool in tools]
    if not calls or any(call is None or call.name not in names for call in calls):
        return answer
    kept = tuple(filter(None, calls))[: None if parallel else 1]
    return replace(answer, text=said.strip() if mark else "", calls=kept)


_BEGUN = re.compile(r'\s*\{\s*"name":\s*"([^"]*)",\s*"arguments":\s*(.*)', re.DOTALL)


def _cut_off(answer: Answer, tools: Tools, parallel: bool, forced: bool) -> Answer:
    """The last call has the arguments so far, or is dropped if its name is not whole."""
    said, *whole, last = answer.text.split(CALL)
    try:
        _, end = json.JSONDecoder().raw_decode(last.strip())
        whole, last = [*whole, last.strip()[:end]], ""
    except (ValueError, RecursionError):
        pass
    text = "".join(f"{CALL}{each.partition(CALL_END)[0]}{CALL_END}" for each in whole)
    calls = with_calls(replace(answer, text=text, finish="stop"), tools, forced=forced).calls
    begun = _BEGUN.fullmatch(last)
    if begun is not None and any(tool["function"]["name"] == begun[1] for tool in tools):
        calls = (*calls, Call(begun[1], {}, partial=begun[2]))
    return replace(answer, text=said.strip(), calls=calls[: None if parallel else 1])


def _call(own: Mapping[str, Any]) -> Call | None:
    given = own.get("arguments", own.get("parameters"))
    try:
        arguments = parsed_json(given) if isinstance(given, str) else given
    except ValueError:
        return None
    name = own.get("name")
    return Call(name, arguments) if isinstance(name, str) and isinstance(arguments, dict) else None


class Hold:
    """Text that a stream does not show until its end, since it may be a call."""

    def __init__(self, tools: Tools) -> None:
        self._holds, self._text, self._shown = bool(tools), "", 0

    def piece(self, text: str) -> str:
        if not self._holds:
            return text
        self._text += text
        begun = self._text.lstrip()
        if not begun or begun[0] in "[{`" or _PYTHON.startswith(begun[: len(_PYTHON)]):
            return ""
        end = self._text.find(CALL)
        if end < 0:
            end = len(self._text) - max(n for n in range(len(CALL)) if self._text.endswith(CALL[:n]))
        shown = self._text[self._shown : end]
        self._shown = max(end, self._shown)
        return shown

    def rest(self) -> str:
        return self._text[self._shown :]


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
