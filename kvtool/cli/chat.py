"""`kvtool chat`: questions that see each other, in a terminal or line by line from a pipe."""

from __future__ import annotations

import importlib
from dataclasses import replace
from pathlib import Path

from kvtool.cli.chat_lines import Lines, lines_for
from kvtool.cli.chat_turns import Chat
from kvtool.cli.commands import new_app
from kvtool.cli.options import ManyValues, Run, open_any_store, open_session, takes
from kvtool.core.cache.options import LockOptions, StoreOptions
from kvtool.core.common.collecting import paused_collection
from kvtool.core.errors import EXIT_FAILED, EXIT_PARTIAL
from kvtool.core.model.options import ModelOptions
from kvtool.core.query.options import QueryOptions
from kvtool.core.remote.options import RemoteOptions

app = new_app()


@app.command(cls=ManyValues)
@takes(
    QueryOptions.some(
        *("max_tokens", "system", "stop_repeats", "temperature", "seed", "force", "top_k", "min_score", "only"),
        *("retriever", "embedder", "order", "fusion", "ratio", "link_tokens", "link", "shift", "level"),
        *("keep_states", "max_loss", "load_timeout"),
    ),
    StoreOptions,
    RemoteOptions,
    ModelOptions,
    LockOptions,
    examples=("chat", "chat --fusion epic --top-k 3"),
)
def chat(run: Run) -> int | None:
    """Hold a conversation over the ingested documents."""
    return hold(run)


def hold(run: Run) -> int | None:
    """Answer what is asked until nothing more is; returns an exit code."""
    # what is for a single question, and may stand in a configuration file
    options = replace(run.get(QueryOptions), defer=False, slo_ms=None, audit=0.0, explain=False)
    with open_any_store(run) as store:
        with paused_collection():
            importlib.import_module("kvtool.core.query.answer")  # torch and transformers come with it
            from kvtool.core.query.conversation import Conversation
            from kvtool.core.session.identity import store_identity

            options.check_of(store_identity(store))
            session = open_session(run, store)
        lines = lines_for(run.out)
        chat = Chat(run.out, session, Conversation.over(session, options), aloud=lines.is_terminal)
        _talk(chat, lines, run.get(StoreOptions).place)
    if chat.failed and not lines.is_terminal:
        return EXIT_PARTIAL if chat.answered else EXIT_FAILED
    return None


def _talk(chat: Chat, lines: Lines, place: Path | str) -> None:
    chat.greet(place)
    while (line := lines.next()) is not None:
        if not chat.take(line):
            return
