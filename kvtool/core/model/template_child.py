"""Rendering of chat templates, in a process of its own (`model/template.py`): JSON on stdin, a line each to stdout."""

from __future__ import annotations

import json
import os
import sys
import time
from contextlib import suppress
from typing import Any

_LONGEST = 10**6  # characters of a rendered conversation


def main(seconds: int, memory: int) -> None:
    """Render each conversation of a request. Each may take so many seconds of a processor, all of them so much memory.

    The process is ended where that is not enough; what was answered before stands.
    """
    from transformers.utils.chat_template_utils import render_jinja_template

    asked = json.load(sys.stdin.buffer)
    answers = os.fdopen(os.dup(1), "w", encoding="ascii")
    os.dup2(2, 1)  # what a library prints goes where nobody reads it
    for conversation in asked["conversations"]:
        _limit(seconds, memory)
        answers.write(json.dumps(_answer(render_jinja_template, asked, conversation)) + "\n")
        answers.flush()


def _answer(render: Any, asked: dict[str, Any], conversation: list[dict[str, str]]) -> dict[str, str]:
    from kvtool.core.model.template import reason_of

    try:
        ((text,), _) = render(conversations=[conversation], chat_template=asked["template"], **asked["names"])
    except MemoryError:
        return {"error": "it takes too much memory"}
    except Exception as error:
        return {"error": reason_of(error)[:500]}
    return {"text": text} if len(text) <= _LONGEST else {"error": f"it writes more than {_LONGEST:,} characters"}


def _limit(seconds: int, memory: int) -> None:
    with suppress(ImportError, ValueError, OSError):  # no such limits on Windows
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        _, most = resource.getrlimit(resource.RLIMIT_CPU)
        resource.setrlimit(resource.RLIMIT_CPU, (int(time.process_time()) + 1 + seconds, most))
