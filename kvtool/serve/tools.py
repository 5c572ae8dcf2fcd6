"""Grammar of a forced call or an answer that follows a schema, and calls of tools in an answer."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from kvtool.core.errors import UsageError
from kvtool.core.model.constraint import INSTALL, check_grammar, is_installed
from kvtool.core.model.prompt import CALL, CALL_END
from kvtool.core.model.template import Tools
from kvtool.serve.job import Answer, Call
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
