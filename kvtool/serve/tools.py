"""Tools that a model may call, and schemas that an answer has to follow, in the form of OpenAI's chat."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from kvtool.core.errors import UsageError
from kvtool.core.model.constraint import INSTALL, check_grammar, is_installed
from kvtool.core.model.prompt import CALL, CALL_END, RESULT, RESULT_END
from kvtool.core.model.template import Tools
from kvtool.serve.job import Answer, Call
from kvtool.serve.wire import LONGEST_TEXT, Refusal, check_names, check_shape, taken, within

_MOST, _LONGEST = 128, 1 << 16  # tools, and characters of their JSON or of a schema
_NAME = re.compile(r"[\w.-]{1,64}", re.ASCII)
_EMPTY = {"type": "object", "properties": {}, "additionalProperties": False}
_LIST, _PYTHON = "[TOOL_CALLS]", "<|python_tag|>"  # of Mistral, and of Llama
# As json.dumps writes it, so that an answer comes back as the same tokens.
_SHAPE = {"x-guidance": {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}}


# ---- requests ----


def read_tools(value: Mapping[str, Any]) -> tuple[Tools, str]:
    """Return the tools that the model is told of, and its answer's grammar; "" if it has none. Raises Refusal."""
    tools = [_tool(tool, f"tools.{number}") for number, tool in enumerate(taken(value, "tools", list, []))]
    if len(tools) > _MOST:
        raise Refusal(400, "too_many", f"there are {len(tools)} tools", f"at most {_MOST}", "tools")
    _bounded(tools, "tools")
    choice, names = value.get("tool_choice"), [tool["function"]["name"] for tool in tools]
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        allowed = taken(choice, "allowed_tools", dict, choice, where="tool_choice.")  # Responses has its members at top
        where = "tool_choice." if allowed is choice else "tool_choice.allowed_tools."
        named = taken(allowed, "tools", list, where=where) or [{}]
        chosen = [_chosen(each if isinstance(each, dict) else {}, names) for each in named]
        tools = [tool for tool in tools if [tool["function"]["name"]] in chosen]
        choice = taken(allowed, "mode", str, "auto", where=where)
    must = _chosen(choice, [tool["function"]["name"] for tool in tools])
    schema = _schema(value.get("response_format"))
    if choice == "none":
        tools = []
    if must is None and schema is None:
        return tools, ""
    what = "response_format" if must is None else "tool_choice"
    if not is_installed():
        raise Refusal(400, "unsupported", f"{what} needs llguidance, which the server lacks", INSTALL, what)
    forms = [tool["function"] for tool in tools if must is None or tool["function"]["name"] in must]
    forms = [{**form, "parameters": closed({**form["parameters"], "type": "object"})} for form in forms]
    grammar = _grammar(forms, closed(schema) if must is None else None)
    try:
        check_grammar(grammar)
    except UsageError as error:
        raise Refusal(400, "unsupported", f"{what}: {error.message}", error.hint, what) from error
    return tools, grammar


def _tool(tool: Any, where: str) -> dict[str, Any]:
    if not isinstance(tool, dict) or tool.get("type") != "function" or not isinstance(tool.get("function"), dict):
        raise Refusal(400, "unsupported", f"{where} is no function", "tools of the type function only", where)
    own, path = tool["function"], f"{where}.function."
    check_names(own, ("name", "description", "parameters", "strict"), where=path)
    name = taken(own, "name", str, "", where=path)
    if not _NAME.fullmatch(name):
        raise Refusal(400, "wrong_name", f"{where} has the name {name!r}", "letters, digits, _, . and -", where)
    about, parameters = taken(own, "description", str, "", _LONGEST, path), taken(own, "parameters", dict, where=path)
    kinds = (parameters or _EMPTY).get("type", "object")
    if "object" not in (kinds if isinstance(kinds, list) else [kinds]):
        path = f"{path}parameters"
        raise Refusal(400, "unsupported", f"{path} is not of an object", "a schema of the type object", path)
    described = {"name": name, "description": about, "parameters": parameters or _EMPTY}
    return {"type": "function", "function": described}


def _chosen(choice: Any, names: Sequence[str]) -> list[str] | None:
    """Return the names of the tools of which one has to be called; None: the model decides."""
    if choice in (None, "auto", "none"):
        return None
    own = choice.get("function", choice) if isinstance(choice, dict) and choice.get("type") == "function" else None
    named = [name for name in names if choice == "required" or (isinstance(own, dict) and own.get("name") == name)]
    if not named:
        hint = "none, auto, required, or the name of one of the tools"
        raise Refusal(400, "unsupported", "tool_choice names no tool of the request", hint, "tool_choice")
    return named


def _schema(form: Any) -> dict[str, Any] | None:
    where = "response_format"
    if form is None or form == {"type": "text"}:
        return None
    kind = form.get("type") if isinstance(form, dict) else None
    own = form.get("json_schema", form) if kind in ("json_object", "json_schema") else None
    schema = own.get("schema", {"type": "object"} if kind == "json_object" else None) if isinstance(own, dict) else None
    if not isinstance(schema, dict):
        raise Refusal(400, "unsupported", f"{where} has another form", "text, json_object or json_schema", where)
    _bounded(schema, where)
    return dict(schema)


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


def _bounded(value: Any, name: str) -> None:
    if (length := len(json.dumps(value, ensure_ascii=False))) > _LONGEST:
        raise Refusal(400, "too_long", f"{name} has {length:,} characters of JSON", f"at most {_LONGEST:,}", name)


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


def call_message(message: Mapping[str, Any], where: str) -> str | None:
    """Return the text of a message that calls tools, or has the result of one; None for any other."""
    if message.get("role") == "tool":
        text = text_of(message.get("content"), f"{where}.content")
        return f"{RESULT}\n{within(text, where, LONGEST_TEXT)}\n{RESULT_END}"
    if not (calls := message.get("tool_calls")):
        return None
    said = text_of(message.get("content") or "", f"{where}.content")
    written = [_written(call) for call in calls] if isinstance(calls, list) else [None]
    if message.get("role") != "assistant" or None in written:
        path = f"{where}.tool_calls"
        raise Refusal(400, "wrong_type", f"{path} has an invalid call", "a function's name and arguments", path)
    return within("\n".join(filter(None, [said, *written])), where, LONGEST_TEXT)


# Kinds of content by the types that the dialects have for its parts.
_KINDS_OF = {"image": "images", "audio": "audio", "file": "files", "document": "files", "video": "video"}


def text_of(content: Any, where: str) -> str:
    words = []
    for part in content if isinstance(content, list) else [{"type": "text", "text": content}]:
        text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
        if not isinstance(text, str):
            kind = str(part.get("type")) if isinstance(part, dict) else ""
            what = next((each for word, each in _KINDS_OF.items() if word in kind), "")
            said = f"{where}: {what} are not supported" if what else f"{where} holds something else than text"
            raise Refusal(400, "unsupported", said, "send text only", where)
        words.append(text)
    return "\n".join(words)


def _written(call: Any) -> str | None:
    own = call.get("function") if isinstance(call, dict) else None
    if not isinstance(own, dict) or (found := _call(own, is_sent=True)) is None:
        return None
    return f'{CALL}\n{{"name": {json.dumps(found.name)}, "arguments": {found.json}}}\n{CALL_END}'


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
        found = [_parsed(text) for text in (_CALLED.findall(answer.text) if mark else [bare])]
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


def _call(own: Mapping[str, Any], is_sent: bool = False) -> Call | None:
    """Return a call, whose arguments are an object, or its JSON, which may be invalid if it `is_sent`; else None."""
    given = own.get("arguments", own.get("parameters"))
    try:
        arguments = _parsed(given) if isinstance(given, str) else given
    except ValueError:
        arguments = {} if is_sent else None
    name = own.get("name")
    return Call(name, arguments) if isinstance(name, str) and isinstance(arguments, dict) else None


def _parsed(text: str) -> Any:
    check_shape(text)
    value = json.loads(text)
    json.dumps(value, ensure_ascii=False, allow_nan=False).encode()  # raises for half a pair of surrogates, too
    return value


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
