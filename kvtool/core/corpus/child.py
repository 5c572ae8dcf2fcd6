"""The process that reads files of hostile-prone formats, one after another, within bounds that the system keeps.

Whatever a file makes its reader do ends with this process at worst: time by an alarm, memory by a limit of the address
space. What it is asked comes as a line of JSON and the file's bytes on stdin, what it has read goes as a line of JSON
to stdout; nothing else is taken from either.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kvtool.core.corpus.readers import UnreadableFile, read_documents


def serve(seconds: int, memory: int) -> None:
    """Read files until stdin ends.

    Parameters
    ----------
    seconds : how long one file may take; the process is ended then, by SIGALRM.
    memory : bytes that the process may have.
    """
    answers = os.fdopen(os.dup(1), "w", encoding="ascii")
    os.dup2(2, 1)  # what a library prints goes where nobody reads it
    _limit(memory)
    while line := sys.stdin.buffer.readline():
        asked = json.loads(line)
        data = sys.stdin.buffer.read(asked["size"])
        if hasattr(signal, "alarm"):
            signal.alarm(seconds)
        answer = json.dumps(_answer(Path(asked["path"]), data, asked["most"]))
        if hasattr(signal, "alarm"):
            signal.alarm(0)  # before it is told: then it is the next file that is read
        answers.write(answer + "\n")
        answers.flush()


def _limit(memory: int) -> None:
    with suppress(ImportError, ValueError, OSError):  # no such limits on Windows
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _answer(path: Path, data: bytes, most: int) -> dict[str, Any]:
    try:
        documents = read_documents(path, data)
        if sum(len(document.text) for document in documents) > most:
            raise UnreadableFile(f"holds more than {most:,} characters of text", "split it")
        return {"documents": [asdict(document) for document in documents]}
    except UnreadableFile as error:
        return error.to_row()
    except MemoryError:
        return {"error": "MemoryError"}
    except RecursionError:
        return {"error": "UnreadableFile", "message": "damaged: parts within parts without end", "hint": ""}
    except Exception as error:  # whatever a library raises over a broken file
        what = f"{type(error).__name__}: {error}".rstrip(": ")[:200]
        return {"error": "UnreadableFile", "message": f"damaged, or not what its name says ({what})", "hint": ""}
