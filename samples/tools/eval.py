"""Turn a public evaluation set into a folder of documents and a batch file for `kvtool query --batch`.

    python samples/tools/eval.py {hotpotqa|locomo|musique|squad} INPUT.json OUTDIR [--limit N] [--paragraphs N]

writes `OUTDIR/corpus/*.txt` (one paragraph a file: "Title", an empty line, the text) and `OUTDIR/batch.jsonl`.
HotpotQA, LoCoMo and MuSiQue name the paragraphs of every question ("documents", relative to `OUTDIR/corpus`), so that
no retrieval affects the answer; SQuAD, XQuAD and KorQuAD do not: the tool retrieves.
The same input gives the same files, byte by byte.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import re
import sys
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import islice, zip_longest
from operator import itemgetter
from pathlib import Path
from typing import Any, TypeVar

SLUG_LENGTH = 40  # with the digest and ".txt" well under every file system's limit, and still readable in a listing
USAGE = 2
TURNS, SEGMENTS = 8, 12  # of LoCoMo: turns a paragraph, paragraphs a question

T = TypeVar("T")


class FormatError(Exception):
    """The input is not what its format promises."""


class FolderError(Exception):
    """The output folder holds something else already."""


@dataclass(frozen=True)
class Paragraph:
    title: str
    text: str
    supporting: bool = False

    @property
    def body(self) -> str:
        return f"{self.title}\n\n{self.text}\n" if self.title else f"{self.text}\n"

    @property
    def file_name(self) -> str:
        """A readable start and a digest of the whole: equal documents share a file, unequal ones never do."""
        ascii_title = unicodedata.normalize("NFKD", self.title).encode("ascii", "ignore").decode().lower()
        slug = re.sub(r"[^a-z0-9]+", "-", ascii_title)[:SLUG_LENGTH].strip("-")
        digest = hashlib.blake2b(self.body.encode("utf-8"), digest_size=6).hexdigest()
        return f"{slug or 'document'}-{digest}.txt"


@dataclass(frozen=True)
class Example:
    id: str
    question: str
    answers: tuple[str, ...]
    paragraphs: tuple[Paragraph, ...]
    given: bool  # the paragraphs belong to the question; else they are a part of the corpus to be searched


# --- reading JSON with errors that say where


def expect(value: Any, kind: type[T], what: str) -> T:
    if not isinstance(value, kind):
        raise FormatError(f"{what} should be {kind.__name__}, is {type(value).__name__}")
    return value


def field(row: Any, key: str, kind: type[T], where: str) -> T:
    table = expect(row, dict, where)
    if key not in table:
        raise FormatError(f'{where} has no "{key}"')
    return expect(table[key], kind, f'"{key}" of {where}')


def strings(value: Any, what: str) -> list[str]:
    return [expect(item, str, f"an item of {what}") for item in expect(value, list, what)]


def tidy(text: str) -> str:
    """Surrogates that JSON escapes can smuggle in cannot be written as UTF-8."""
    return text.encode("utf-8", "replace").decode("utf-8").replace("\r\n", "\n").strip()


def title_line(text: str) -> str:
    return " ".join(tidy(text).split())


def distinct(texts: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(t for t in map(tidy, texts) if t))


def load(path: Path) -> Any:
    """Read a file with one JSON value, or one a line (as MuSiQue is published)."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise FormatError(f"cannot read {path}: {error}") from error
    try:
        return json.loads(text)
    except json.JSONDecodeError as whole:
        try:
            return [json.loads(line) for line in text.split("\n") if line.strip()]
        except json.JSONDecodeError:
            raise FormatError(f"{path} is not JSON: {whole}") from whole


# --- HotpotQA


def hotpot_context(value: Any, where: str) -> list[tuple[str, list[str]]]:
    """`[[title, [sentence]]]` as published, or `{"title": [...], "sentences": [[...]]}` as in column-wise dumps."""
    if isinstance(value, dict):
        titles = field(value, "title", list, f"the context of {where}")
        texts = field(value, "sentences", list, f"the context of {where}")
        if len(titles) != len(texts):
            raise FormatError(f"the context of {where} has {len(titles)} titles for {len(texts)} texts")
        pairs: list[Any] = list(zip(titles, texts, strict=True))
    else:
        pairs = expect(value, list, f'"context" of {where}')
    for pair in pairs:
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            raise FormatError(f"the context of {where} is not made of pairs [title, [sentences]]")
    return [(expect(t, str, f"a title of {where}"), strings(s, f"a paragraph of {where}")) for t, s in pairs]


def hotpot_titles(value: Any, where: str) -> set[str]:
    """Titles of the supporting facts: `[[title, sentence]]`, or a dict of columns; hidden in the test set."""
    if isinstance(value, dict):
        return set(strings(value.get("title", []), f"the supporting facts of {where}"))
    what = f"a supporting fact of {where}"
    pairs = [expect(pair, list, what) for pair in expect(value, list, f'"supporting_facts" of {where}')]
    return {expect(pair[0], str, what) for pair in pairs if pair}


def hotpotqa(data: Any) -> Iterator[Example]:
    for number, row in enumerate(expect(data, list, "a HotpotQA file"), 1):
        where = f"question {number}"
        key = "_id" if "_id" in expect(row, dict, where) else "id"
        if "context" not in row:
            raise FormatError(f'{where} has no "context"')
        facts = hotpot_titles(row.get("supporting_facts", []), where)
        yield Example(
            field(row, key, str, where),
            tidy(field(row, "question", str, where)),
            distinct([field(row, "answer", str, where)]),
            tuple(
                # some dumps begin a sentence with its space, some do not
                Paragraph(title_line(title), " ".join(filter(None, map(tidy, sentences))), title in facts)
                for title, sentences in hotpot_context(row["context"], where)
            ),
            given=True,
        )


# --- MuSiQue


def musique_paragraph(row: Any, where: str) -> Paragraph:
    title = title_line(field(row, "title", str, where))
    return Paragraph(title, tidy(field(row, "paragraph_text", str, where)), bool(row.get("is_supporting", False)))


def musique(data: Any) -> Iterator[Example]:
    for number, row in enumerate(expect(data, list, "a MuSiQue file"), 1):
        where = f"question {number}"
        if not expect(row, dict, where).get("answerable", True):
            continue  # the paragraphs do not hold its answer: a score against it would mean nothing
        aliases = strings(row.get("answer_aliases", []), f'"answer_aliases" of {where}')
        paragraphs = field(row, "paragraphs", list, where)
        yield Example(
            field(row, "id", str, where),
            tidy(field(row, "question", str, where)),
            distinct([field(row, "answer", str, where), *aliases]),
            tuple(musique_paragraph(p, f"a paragraph of {where}") for p in paragraphs),
            given=True,
        )


# --- LoCoMo


def locomo_segments(conversation: Any, where: str) -> list[tuple[Paragraph, set[str]]]:
    """Eight turns of a session a paragraph, under the session's date; with each, the names of its turns."""
    segments = []
    for number in range(1, len(expect(conversation, dict, where))):
        turns = expect(conversation.get(f"session_{number}", []), list, f"session {number} of {where}")
        date = title_line(str(conversation.get(f"session_{number}_date_time", "")))
        for start in range(0, len(turns), TURNS):
            part = turns[start : start + TURNS]
            said = [f"{field(t, 'speaker', str, where)}: {title_line(field(t, 'text', str, where))}" for t in part]
            segments.append((Paragraph(date, "\n".join(said)), {field(t, "dia_id", str, where) for t in part}))
    return segments


def locomo_questions(row: Any, where: str) -> Iterator[Example]:
    """Questions with an answer, each with its evidence among twelve segments of its conversation, in their order."""
    segments = locomo_segments(field(row, "conversation", dict, where), f"the conversation of {where}")
    for number, asked in enumerate(field(row, "qa", list, where), 1):
        question = tidy(field(asked, "question", str, f"question {number} of {where}"))
        evidence = set(strings(asked.get("evidence", []), f'"evidence" of {question!r}'))
        gold = [i for i, (_, turns) in enumerate(segments) if turns & evidence]
        answers = distinct([str(asked["answer"])]) if "answer" in asked else ()
        if not answers or not gold or len(gold) > SEGMENTS:
            continue  # category 5 has no answer; some evidence names no turn
        name = f"{field(row, 'sample_id', str, where)}-{number}"
        others = sorted(set(range(len(segments))) - set(gold))
        drawn = random.Random(name).sample(others, min(SEGMENTS - len(gold), len(others)))
        kept = (replace(segments[i][0], supporting=i in gold) for i in sorted([*gold, *drawn]))
        yield Example(name, question, answers, tuple(kept), given=True)


def locomo(data: Any) -> Iterator[Example]:
    """Read conversations in turn, a question of each, so that the first N questions are of all of them."""
    rows = enumerate(expect(data, list, "a LoCoMo file"), 1)
    for turn in zip_longest(*(locomo_questions(row, f"conversation {number}") for number, row in rows)):
        yield from filter(None, turn)


# --- SQuAD, XQuAD, KorQuAD


def squad_answers(row: Any, where: str) -> tuple[str, ...]:
    answers = field(row, "answers", list, where)
    return distinct(field(a, "text", str, f"an answer of {where}") for a in answers)


def squad(data: Any) -> Iterator[Example]:
    for article in field(data, "data", list, "a SQuAD file"):
        title = title_line(str(expect(article, dict, "an article").get("title", "")).replace("_", " "))
        for block in field(article, "paragraphs", list, f"the article {title!r}"):
            where = f"a paragraph of {title!r}"
            paragraph = Paragraph(title, tidy(field(block, "context", str, where)), supporting=True)
            for row in field(block, "qas", list, where):
                question = tidy(field(row, "question", str, f"a question of {title!r}"))
                answers = squad_answers(row, f"the question {question!r}")
                if answers:  # SQuAD 2 has questions without one
                    yield Example(str(row.get("id", "")), question, answers, (paragraph,), given=False)


READERS: dict[str, Callable[[Any], Iterator[Example]]] = {
    "hotpotqa": hotpotqa,
    "locomo": locomo,
    "musique": musique,
    "squad": squad,
}


# --- writing


def spread(examples: Iterable[Example]) -> list[Example]:
    """Questions that share a paragraph one after the other: the first of every paragraph, then the second of every one.

    A small part of a SQuAD file would otherwise be one or two paragraphs, and retrieval among two finds everything.
    """
    seen: Counter[Paragraph] = Counter()
    ranked: list[tuple[int, Example]] = []
    for example in examples:
        ranked.append((0 if example.given else seen[example.paragraphs[0]], example))
        seen.update(example.paragraphs)
    return [example for _, example in sorted(ranked, key=itemgetter(0))]


def keep(paragraphs: tuple[Paragraph, ...], count: int | None) -> tuple[Paragraph, ...]:
    """All supporting paragraphs and the first distractors up to `count`, in the given order."""
    if count is None:
        return paragraphs
    room = max(0, count - sum(p.supporting for p in paragraphs))
    distractors = [i for i, p in enumerate(paragraphs) if not p.supporting][:room]
    return tuple(p for i, p in enumerate(paragraphs) if p.supporting or i in distractors)


def batch_line(example: Example, paragraphs: tuple[Paragraph, ...]) -> str:
    line: dict[str, Any] = {"id": example.id, "question": example.question, "answers": list(example.answers)}
    if example.given:
        line["documents"] = list(dict.fromkeys(p.file_name for p in paragraphs))
    return tidy(json.dumps(line, ensure_ascii=False)) + "\n"


def check_folder(corpus: Path, files: Iterable[str]) -> None:
    """Documents left by another run would be ingested and retrieved too; deleting them is not ours to decide."""
    if not corpus.is_dir():
        return
    strangers = sorted({p.name for p in corpus.iterdir()} - set(files))
    if strangers:
        raise FolderError(f"{corpus} already holds {len(strangers)} other files, {strangers[0]} among them")


def write(examples: Iterable[Example], out: Path, paragraphs: int | None) -> tuple[int, int]:
    """Numbers of questions and of documents written."""
    bodies: dict[str, str] = {}
    lines: list[str] = []
    for example in examples:
        kept = tuple(p for p in keep(example.paragraphs, paragraphs) if p.text)
        bodies.update((p.file_name, p.body) for p in kept)
        lines.append(batch_line(example, kept))
    if not lines:
        raise FormatError("the input holds no question with an answer")
    corpus = out / "corpus"
    check_folder(corpus, bodies)
    corpus.mkdir(parents=True, exist_ok=True)
    for name, body in bodies.items():
        (corpus / name).write_text(body, encoding="utf-8", newline="\n")
    (out / "batch.jsonl").write_text("".join(lines), encoding="utf-8", newline="\n")
    return len(lines), len(bodies)


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="eval.py", description="Evaluation set in, documents and batch file out.")
    parser.add_argument("format", choices=sorted(READERS), help="squad: also XQuAD and KorQuAD")
    parser.add_argument("input", type=Path, metavar="INPUT.json")
    parser.add_argument("outdir", type=Path, metavar="OUTDIR", help="gets corpus/ and batch.jsonl")
    parser.add_argument(
        "--limit",
        type=positive,
        metavar="N",
        help="N questions and their paragraphs only: the first ones (squad: first one of every paragraph, and so on)",
    )
    parser.add_argument(
        "--paragraphs",
        type=positive,
        metavar="N",
        help="a question keeps its supporting paragraphs and distractors up to N in all (default: all)",
    )
    args = parser.parse_args(argv)
    if args.format == "squad" and args.paragraphs is not None:
        parser.error("--paragraphs: a SQuAD question has no paragraphs to choose from")
    return args


def fail(code: int, what: object, hint: str) -> int:
    print(f"error: {what}\nhint: {hint}", file=sys.stderr)
    return code


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    try:
        examples = READERS[args.format](load(args.input))
        chosen = islice(spread(examples), args.limit) if args.limit else examples
        questions, documents = write(chosen, args.outdir, args.paragraphs)
    except FormatError as error:
        return fail(USAGE, error, f"is {args.input} a {args.format} file? The formats: {', '.join(sorted(READERS))}")
    except FolderError as error:
        return fail(USAGE, error, "take an empty OUTDIR, or remove that folder first")
    except OSError as error:
        return fail(1, f"cannot write: {error}", "check the path, its permissions and the space left")
    print(f"{questions} questions, {documents} documents in {args.outdir}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
