"""Rendering of chat templates: programs that come with a model, run in a process whose time and memory are bounded.

The sandbox of Jinja keeps a template from reaching anything but its own values. It bounds neither time nor memory:
nested loops, powers and repeated strings take as much as they are written to. The process reads JSON on stdin, and
writes a line for each conversation to stdout.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections.abc import Mapping, Sequence
from datetime import date
from functools import lru_cache
from typing import Any

from kvtool.core.common.children import limit_process, output_of

Conversation = Sequence[dict[str, str]]
Tools = Sequence[Mapping[str, Any]]
"""Functions that a model may call, as in OpenAI's API."""
SECONDS = 10  # of a processor; a template takes milliseconds
_MEMORY = 2 * 10**9  # bytes of address space
_PROGRAM = "from kvtool.core.model.template import main\nmain(int(sys.argv[1]), int(sys.argv[2]))"
_OWN = "transformers.tokenization_utils_base"
_HOW = {"add_generation_prompt": True, "enable_thinking": False}


class TemplateFailed(Exception):
    """A template that raised an error, or took too much."""


def render(
    tokenizer: Any, conversations: Sequence[Conversation], tools: Tools | None = None
) -> list[str | TemplateFailed]:
    """Render conversations by the tokenizer's chat template, each with the header of the next answer. A template's
    failure is an element of the result. Results are cached for the day, since templates may print the date."""
    method = getattr(tokenizer, "apply_chat_template", None)
    if method is not None and getattr(method, "__module__", "") != _OWN:  # code in the place of a template
        return [_in_place(method, each, tools) for each in conversations]
    try:
        template = tokenizer.chat_template if method is None else tokenizer.get_chat_template()
        names = {**tokenizer.special_tokens_map, **_HOW} | ({"tools": tools} if tools else {})
        job = {"template": template, "names": names, "conversations": conversations}
        request = json.dumps(job, default=str)  # some tokens are objects
    except (ValueError, TypeError) as error:
        return [TemplateFailed(reason_of(error))] * len(conversations)
    output = _answer(request, date.today().isoformat(), SECONDS)
    return [TemplateFailed(row["error"]) if "error" in row else row["text"] for row in output]


def reason_of(error: Exception) -> str:
    return next(iter(str(error).splitlines()), "") or type(error).__name__


def _in_place(method: Any, conversation: Conversation, tools: Tools | None) -> str | TemplateFailed:
    try:
        return str(method([*conversation], tools=tools, tokenize=False, **_HOW))
    except Exception as error:
        return TemplateFailed(reason_of(error))


@lru_cache(maxsize=32)
def _answer(request: str, day: str, seconds: int) -> list[dict[str, str]]:
    output = output_of(_PROGRAM, request.encode("ascii"), seconds, _MEMORY)
    rows = [json.loads(line) for line in output.splitlines() if line.endswith(b"}")]
    lost = {"error": f"it takes over {seconds} s, or {_MEMORY / 1e9:.0f} GB of memory"}
    return rows + [lost] * (len(json.loads(request)["conversations"]) - len(rows))


_LONGEST = 10**6  # characters of a rendered conversation


def main(seconds: int, memory: int) -> None:
    """Render each conversation of a request within so many seconds each, and bytes for all; the process ends when that
    is not enough, with earlier answers written."""
    render = _renderer()
    request = json.load(sys.stdin.buffer)
    answers = os.fdopen(os.dup(1), "w", encoding="ascii")
    os.dup2(2, 1)  # output of libraries is written to stderr, which is not read
    for conversation in request["conversations"]:
        limit_process(memory, seconds)
        answers.write(json.dumps(_rendered(render, request, conversation)) + "\n")
        answers.flush()


def _renderer() -> Any:
    """Import transformers' renderer without the packages around it, which take three quarters of the time, if it can
    be."""
    for name in (packages := ("transformers", "transformers.utils")):
        if spec := importlib.util.find_spec(name):
            sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        from transformers.utils.chat_template_utils import render_jinja_template
    except (ImportError, AttributeError):
        for name in [name for name in sys.modules if name.startswith(packages)]:
            del sys.modules[name]
        from transformers.utils.chat_template_utils import render_jinja_template
    return render_jinja_template


def _rendered(render: Any, request: dict[str, Any], conversation: list[dict[str, str]]) -> dict[str, str]:
    try:
        ((text,), _) = render(conversations=[conversation], chat_template=request["template"], **request["names"])
    except MemoryError:
        return {"error": "it takes too much memory"}
    except Exception as error:
        return {"error": reason_of(error)[:500]}
    return {"text": text} if len(text) <= _LONGEST else {"error": f"it writes more than {_LONGEST:,} characters"}
