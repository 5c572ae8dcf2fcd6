"""`kvtool help TOPIC`: the pages of `kvtool/docs`."""

from __future__ import annotations

import difflib
import re
from importlib.resources import files
from typing import Annotated

import typer

from kvtool.cli.commands import new_app
from kvtool.cli.out import Out
from kvtool.core.errors import UsageError

help_app = new_app()

PAGES = {  # by folder of kvtool/docs
    "guide": {
        "concepts": "Start here: chunks, fusion modes, compression levels, sharing.",
        "installation": "Ways to install kvtool, extras, completion, the container.",
        "documents": "Which files are read, how passages are cited, and what is left out.",
        "conversation": "Chat in a terminal or a pipe: keys, commands, cost, follow-up questions.",
        "server": "The HTTP server: APIs, access, limits, faster `kvtool query`.",
        "agents": "MCP: offer the store to chat programs, editors and agents.",
        "evaluation": "Measure which fusion mode and how many passages suit your questions.",
        "cron": "Keep a store up to date from cron or systemd.",
        "upkeep": "List what a store holds, and keep it small: ls, budget, prune, rm, pin, compact.",
        "packs": "Export a store, or a part of it, to one file, and import it.",
        "shared-stores": "Stores that several machines share, in Redis, S3 or a folder.",
        "many-machines": "Ingest one corpus on several machines or GPUs.",
        "vllm": "Serve a store's KV to vLLM: the KV connector.",
        "lmcache": "LMCache's L2 at kvtool's levels: a serde for the KV of vLLM.",
        "gpu": "Running on a GPU: what is supported, and how to measure it.",
        "troubleshooting": "Exit codes, common errors, and what to do about them.",
    },
    "reference": {
        "reference": "Every command and every option.",
        "json": "The fields of --json.",
        "python": "The Python API.",
        "models": "Model families: tested, supported and refused.",
        "plugins": "Readers, embedders, fusion modes and shared stores of other packages.",
        "glossary": "The terms that commands, documentation and code share.",
    },
    "internals": {
        "design": "Structure of the code, and invariants that tests check.",
        "store-format": "The format of the store on disk, byte by byte.",
        "codec": "Compression: how KV is encoded at each level.",
        "consistency": "What a question sees while other processes write to the store.",
        "threat-model": "Security: what is trusted, what is checked, and what is not.",
        "scale": "An estimate for a billion chunks: bytes, requests, cost, limits.",
    },
}
TOPICS = {name: line for pages in PAGES.values() for name, line in pages.items()}
_ALSO_CALLED = {"modes": "concepts", "parameters": "concepts"}
_PAGE_LINK = re.compile(r"\[([^]]+)\]\((?:\.\./[a-z]+/)?([a-z-]+)\.md(?:#[^)]*)?\)")


@help_app.command("help")
def show_help(
    topic: Annotated[
        list[str] | None,
        typer.Argument(
            help="A page; without one all pages are listed.",
            show_default=False,
            autocompletion=lambda: [*TOPICS],
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show a page of the documentation."""
    out = Out("json" if json else "human")
    if not topic:
        out.result({"topics": [{"name": name, "about": line} for name, line in TOPICS.items()]}, lambda: _list(out))
        return
    from kvtool.cli.app import COMMANDS, group_of

    name = " ".join(topic).strip().lower().removesuffix(".md")
    name = _ALSO_CALLED.get(name, name)
    if name not in TOPICS:
        near = difflib.get_close_matches(name, TOPICS, n=1, cutoff=0.6)
        hint = f"did you mean {near[0]!r}?" if near else "`kvtool help` lists them"
        if topic[0] in COMMANDS:
            hint = f"`kvtool {' '.join(topic)} --help` shows a command"
        elif group := group_of(topic[0]):
            hint = f"did you mean `kvtool {group} {topic[0]} --help`?"
        raise UsageError(f"there is no page {' '.join(topic)!r}", hint)
    text = page(name)
    shown = _PAGE_LINK.sub(r"\1 (`kvtool help \2`)", text)
    out.result({"topic": name, "text": text}, lambda: out.markdown(shown))


show_help.examples = ("help concepts", "help cron --json")  # type: ignore[attr-defined]


def page(name: str) -> str:
    folder = next(folder for folder, pages in PAGES.items() if name in pages)
    return files("kvtool").joinpath("docs", folder, f"{name}.md").read_text(encoding="utf-8")


def _list(out: Out) -> None:
    out.table(("page", "about"), list(TOPICS.items()))
    out.print("\n`kvtool help PAGE` shows one; `kvtool COMMAND --help` says what a command takes.")
