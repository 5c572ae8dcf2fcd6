"""Lint of English: print the sentences that use a word of the ban list, and say what to write instead.

    python samples/tools/words.py [help] [docs] [results] [messages] [docstrings] [tests]

`help` is all that `--help` and `kvtool help` print, `docs` the pages of documentation, README, CONTRIBUTING and
CHANGELOG, `results` the pages of samples/results, `messages` the other strings of the product, `docstrings` its
docstrings and comments, `tests` those of tests/ and samples/. All of them by default.

A word is banned for the sense in which a stranger stumbles over it; its plain uses pass: `room` for a folder of
kvtool/core (`room for` bytes fails), `warm` in code, `stand for`, `apart from`, `who` in a relative clause of a person.
Code, in backticks or indented by four columns, is not read, nor are the phrases of `PLAIN`. `OLD_TERMS` are names that
the glossary has replaced.
"""

from __future__ import annotations

import ast
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

BANNED = {
    r"(?:stand|stands|stood|standing)(?! for\b)": "is, is stored, holds",
    r"goes|went": "name the act: is removed, is written, runs",
    r"(?:giv|mak)(?:e|es|ing) way|gave way|made way": "yields",
    r"tells?|told|telling": "reports, states",
    r"(?:takes?|took|taking) in": "reads, imports",
    r"beside": "next to, besides, in addition to",
    r"behind": "after",
    r"in front": "before",
    r"whoever|(?:those|one|he|she) who": "name the person: a user, a client, a caller",
    r"room (?:for|in|left)|(?:no|make|makes|making|made|find|finds|found|more|little) room": "space, memory",
    r"warm|warmer|warmest|warmth|cold|colder|coldest": "recently used, least used; cached",
    r"lies?|lay|lain": "is, is stored",
    r"apart(?! from)": "separate",
    r"alone": "only, single, without other chunks",
    r"by (?:itself|themselves)": "separately, without help",
    r"there (?:is|are|was|were) none": "none exists",
}
OLD_TERMS = {
    r"forget|forgets|forgetting|forgot|forgotten": "remove",
    r"stretch|stretches": "state checkpoint",
    r"tiers?": "shared store",
    r"hot": "memory cache",
    r"verdicts?": "gate",
    r"quotations?": "loss",
    r"naked|bare chunks?": "lead-in",
}
PLAIN = re.compile(
    r"behind an? (?:\w+ )?proxy|(?:cold|warm)(?: and a (?:cold|warm))? page cache|If they do not tell, say so",
    re.IGNORECASE,
)
_CODE = re.compile(
    r"```.*?```|^(?: {4}|\t)[^\n]*$|`[^`\n]*`|\]\([^)\n]*\)|\[default:[^]]*\]",  # code, targets of links, values
    re.DOTALL | re.MULTILINE,
)
_SENTENCE = re.compile(r"(?<=[.!?:;])\s+|\s*\|\s*|\n\s*\n|\n(?=\s*[-*#|])")
Found = tuple[str, str]  # the words, and their sentence


def offences(text: str, banned: dict[str, str] = BANNED) -> Iterator[Found]:
    """Yield the banned words of a text in Markdown, each with its sentence."""
    pattern = re.compile(rf"\b(?:{'|'.join(banned)})\b", re.IGNORECASE)
    for sentence in _SENTENCE.split(PLAIN.sub("…", _CODE.sub("…", text))):
        for found in pattern.finditer(sentence):
            yield found[0], " ".join(sentence.split())


def advice(word: str, banned: dict[str, str] = BANNED) -> str:
    """Return what to write instead of a banned word."""
    return next(better for pattern, better in banned.items() if re.fullmatch(pattern, word, re.IGNORECASE))


def pages() -> dict[str, str]:
    """Return the text of the documentation by file; what the program generates is in `generated_help`."""
    paths = [*ROOT.glob("*.md"), *(ROOT / "kvtool" / "docs").glob("*.md"), ROOT / "samples" / "README.md"]
    return {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in sorted(paths)}


def results() -> dict[str, str]:
    """Return the text of the pages of measurements by file."""
    paths = sorted((ROOT / "samples" / "results").rglob("*.md"))
    return {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in paths}


def generated_help() -> dict[str, str]:
    """Return the texts of all help: commands, options, reports, and the lists of commands and topics."""
    from kvtool.cli.app import SHOWN, app
    from kvtool.cli.help import TOPICS
    from kvtool.cli.reference import reference
    from kvtool.reports import REPORTS

    overview = [*SHOWN, *(line for rows in SHOWN.values() for line in rows.values()), str(app.info.help)]
    lists = {"kvtool --help": overview, "kvtool help": TOPICS.values(), "kvtool inspect --help": REPORTS.values()}
    return {name: "\n\n".join(lines) for name, lines in lists.items()} | {"help": reference()}


def strings(*folders: str, docs: bool) -> dict[str, str]:
    """Return the sentences of Python files by file: docstrings and comments, or all other strings with a space."""
    texts = {}
    for path in sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py")):
        pieces = [*(_documented(path) if docs else _said(path))]
        texts[path.relative_to(ROOT).as_posix()] = "\n\n".join(pieces)
    return texts


def _documented(path: Path) -> Iterator[str]:
    nodes = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, nodes) and (text := ast.get_docstring(node)):
            yield text
    with path.open("rb") as file:
        yield from (token.string for token in tokenize.tokenize(file.readline) if token.type == tokenize.COMMENT)


def _said(path: Path) -> Iterator[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    silent = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    silent |= {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in silent:
            yield node.value if " " in node.value else ""


SOURCES = {
    "help": generated_help,
    "docs": pages,
    "results": results,
    "messages": lambda: strings("kvtool", docs=False),
    "docstrings": lambda: strings("kvtool", docs=True),
    "tests": lambda: strings("tests", "samples", docs=True),
}


def main() -> None:
    for source in sys.argv[1:] or SOURCES:
        count = 0
        for place, text in SOURCES[source]().items():
            for word, sentence in offences(text):
                count += 1
                print(f"{place}: {word} → {advice(word)}: {sentence}")
        print(f"{source}: {count}")


if __name__ == "__main__":
    main()
