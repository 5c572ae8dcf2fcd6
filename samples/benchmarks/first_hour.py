"""Build a folder of other people's documents, and measure the answers that settings of `kvtool query` give on it.

    python samples/benchmarks/first_hour.py build OUTDIR   # makes corpus/, batch.jsonl, inflected.json in it
    kvtool ingest OUTDIR/corpus --store STORE --model smollm2
    python samples/benchmarks/first_hour.py measure OUTDIR STORE --runs runs.jsonl -- --fusion full --top-k 2
    python samples/benchmarks/first_hour.py table runs.jsonl

The documents are those that Python and Debian install: READMEs, FAQs, licences, manual pages, docstrings, and the
descriptions of this project's own dependencies, as text, reStructuredText, Markdown, HTML, DOCX and PDF. A document
that this machine lacks is named and left out, with its questions. `measure` appends one line a question to the runs and
skips the questions that the file holds already for the same settings and store.

`inflected.json` has HotpotQA's form, for `recall.py`: the documents in paragraphs of 150 words, and questions
that have their words in other forms than the paragraph that answers them: `changing` for `changes`, `pass-phrases`,
`Lowis` for `Löwis`.
"""

from __future__ import annotations

import argparse
import gzip
import importlib
import importlib.metadata
import json
import pydoc
import re
import shlex
import statistics
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from samples.tools.office.portable import pdf

HERE = Path(__file__).resolve().parent
DEBIAN, STDLIB = Path("/usr/share/doc"), Path(sysconfig.get_path("stdlib"))
QUESTIONS, INFLECTED = HERE / "first_hour.jsonl", HERE / "inflected.jsonl"
WORDS = 150  # of a paragraph
# `--no-*`: words are not broken at the ends of lines, which depends on the width.
MAN = ("man", "--no-hyphenation", "--no-justification", "-P", "cat")


def debian(name: str) -> str:
    """Read a file of /usr/share/doc, as it is or compressed."""
    path = DEBIAN / name
    return path.read_text("utf-8") if path.exists() else gzip.decompress(Path(f"{path}.gz").read_bytes()).decode()


def licence(name: str) -> str:
    return (DEBIAN.parent / "common-licenses" / name).read_text("utf-8")


def manual(page: str) -> str:
    """Render a manual page as plain text of 80 columns."""
    setting = {"MANWIDTH": "80", "LC_ALL": "C.UTF-8", "PATH": "/usr/bin:/bin"}
    done = subprocess.run([*MAN, *page.split(".")[::-1]], capture_output=True, text=True, env=setting, check=False)
    if done.returncode:
        raise FileNotFoundError(done.stderr.strip() or page)
    return re.sub(".\b", "", done.stdout).expandtabs()


def stdlib(name: str) -> str:
    return (STDLIB / name).read_text("utf-8")


def docstring(name: str) -> str:
    """Return a module's docstring, or of `MODULE:NAME` a text that the module holds."""
    module, _, attribute = name.partition(":")
    return str(getattr(importlib.import_module(module), attribute or "__doc__"))


def topic(name: str) -> str:
    """Return one topic of Python's built-in help, which is reStructuredText without its roles."""
    return str(importlib.import_module("pydoc_data.topics").topics[name])


def page(name: str) -> str:
    """Return the HTML page that `pydoc -w` writes of a module, without the link to its file on this machine."""
    module = importlib.import_module(name)
    return re.sub('<a href="file:[^<]*</a>', "", pydoc.html.page(name, pydoc.html.document(module)))


def package(name: str) -> str:
    """Return the description of an installed package."""
    return str(importlib.metadata.metadata(name).get_payload())


def write(path: Path, text: str) -> None:
    """Write a text in the format that the file's name ends in."""
    paragraphs = re.split(r"\n\s*\n", text.strip())
    if path.suffix == ".pdf":
        path.write_bytes(pdf([paragraphs[first : first + 2] for first in range(0, len(paragraphs), 2)]))
    elif path.suffix == ".docx":
        file = importlib.import_module("docx").Document()
        for paragraph in paragraphs:
            file.add_paragraph(paragraph)
        file.save(str(path))
    else:
        path.write_text(text, "utf-8")


Reader = Callable[[str], str]
DOCUMENTS: Mapping[str, tuple[Reader, str]] = {
    "bash-intro.txt": (debian, "bash/INTRO"),
    "bash-restricted.txt": (debian, "bash/RBASH"),
    "base-files-faq.txt": (debian, "base-files/README"),
    "mail-spool.txt": (debian, "base-files/README.FHS"),
    "xz-faq.txt": (debian, "xz-utils/faq.txt"),
    "xz-history.txt": (debian, "xz-utils/history.txt"),
    "procps-faq.txt": (debian, "procps/FAQ"),
    "procps-bugs.md": (debian, "procps/bugs.md"),
    "gzip-readme.txt": (debian, "gzip/README"),
    "git-readme.md": (debian, "git/README.md"),
    "openssh-readme.txt": (debian, "openssh-client/README"),
    "openssh-overview.txt": (debian, "openssh-client/OVERVIEW"),
    "perl-readme.txt": (debian, "perl/README.Debian"),
    "tar-authors.txt": (debian, "tar/AUTHORS"),
    "tmux-readme.txt": (debian, "tmux/README"),
    "zlib-copyright.txt": (debian, "zlib1g/copyright"),
    "licence-artistic.txt": (licence, "Artistic"),
    "licence-bsd.txt": (licence, "BSD"),
    "licence-lgpl-3.txt": (licence, "LGPL-3"),
    "man-chage.txt": (manual, "chage.1"),
    "man-deb-version.txt": (manual, "deb-version.7"),
    "man-fstab.txt": (manual, "fstab.5"),
    "man-gitignore.txt": (manual, "gitignore.5"),
    "man-hosts.txt": (manual, "hosts.5"),
    "man-nice.txt": (manual, "nice.1"),
    "man-passwd-file.txt": (manual, "passwd.5"),
    "man-shuf.txt": (manual, "shuf.1"),
    "man-tee.txt": (manual, "tee.1"),
    "man-timeout.txt": (manual, "timeout.1"),
    "python-licence.txt": (stdlib, "LICENSE.txt"),
    "idle-credits.txt": (stdlib, "idlelib/CREDITS.txt"),
    "idle-history.txt": (stdlib, "idlelib/HISTORY.txt"),
    "python-assert.rst": (topic, "assert"),
    "python-booleans.rst": (topic, "booleans"),
    "python-integers.rst": (topic, "integers"),
    "python-textwrap.html": (page, "textwrap"),
    "python-uuid.txt": (docstring, "uuid"),
    "python-shelve.docx": (docstring, "shelve"),
    "python-heaps.pdf": (docstring, "heapq:__about__"),
    "package-h11.rst": (package, "h11"),
    "package-mpmath.rst": (package, "mpmath"),
}


def build(out: Path) -> None:
    """Write the documents, and a batch file of the questions that they answer."""
    corpus, size = out / "corpus", 0
    corpus.mkdir(parents=True, exist_ok=True)
    for name, (read, source) in DOCUMENTS.items():
        try:
            text = read(source)
        except (OSError, ImportError, AttributeError, KeyError) as error:
            print(f"left out: {name}: {error}", file=sys.stderr)
            continue
        size += len(text.encode())
        write(corpus / name, text)
    there = {path.name for path in corpus.iterdir()}
    asked = [row for row in map(json.loads, QUESTIONS.read_text("utf-8").splitlines()) if {*row["sources"]} <= there]
    (out / "batch.jsonl").write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in asked), "utf-8")
    (out / "inflected.json").write_text(json.dumps(inflected(corpus), ensure_ascii=False), "utf-8")
    print(f"{len(there)} documents, {size} bytes of text, {len(asked)} questions in {out}", file=sys.stderr)


def inflected(corpus: Path) -> list[dict[str, Any]]:
    """Ask for the paragraph that has an answer; the first question brings all paragraphs along."""
    cut: dict[str, list[str]] = {}
    for path in sorted(corpus.iterdir()):
        if path.suffix not in (".pdf", ".docx"):
            words = path.read_text("utf-8").split()
            cut[path.name] = [" ".join(words[at : at + WORDS]) for at in range(0, len(words), WORDS)]
    rows: list[dict[str, Any]] = []
    for row in rows_of(INFLECTED):
        own = [number for number, text in enumerate(cut.get(row["source"], ())) if row["answer"] in text]
        if own:  # it may stand across two paragraphs, in another version of the document
            name = f"{row['source']} {own[0]}"
            paragraphs = [[name, [cut[row["source"]][own[0]]]]]
            if not rows:
                paragraphs = [
                    [f"{source} {at}", [text]] for source, texts in cut.items() for at, text in enumerate(texts)
                ]
            rows.append({"_id": row["id"], "question": row["question"], "answer": row["answer"]})
            rows[-1] |= {"context": paragraphs, "supporting_facts": [[name, 0]]}
        elif row["source"] in cut:
            print(f"left out: {row['id']}: no paragraph holds its answer", file=sys.stderr)
    return rows


def contains(answer: str, parts: Sequence[Sequence[str]]) -> bool:
    """Return whether an answer has a spelling of every part of what was asked for, as whole words."""
    said = " ".join(answer.casefold().split())
    spelled = ([re.escape(one.casefold()) for one in part] for part in parts)
    return all(re.search(rf"(?<!\w)({'|'.join(part)})(?!\w)", said) for part in spelled)


def measure(out: Path, store: Path, runs: Path, name: str, flags: Sequence[str]) -> None:
    """Ask what the runs lack under this name, and append one line for each answer."""
    name = name or shlex.join(flags) or "defaults"
    done = {row["id"] for row in rows_of(runs) if row["name"] == name and row["store"] == str(store)}
    asked = {row["id"]: row for row in rows_of(out / "batch.jsonl") if row["id"] not in done}
    if not asked:
        return
    with tempfile.NamedTemporaryFile("w", suffix=".jsonl", encoding="utf-8") as batch, runs.open("a") as file:
        batch.write("".join(json.dumps({key: row[key] for key in ("id", "question")}) + "\n" for row in asked.values()))
        batch.flush()
        command = [sys.executable, "-m", "kvtool", "query", "--batch", batch.name, "--store", str(store), "--json"]
        with subprocess.Popen([*command, *flags], stdout=subprocess.PIPE, text=True, encoding="utf-8") as process:
            assert process.stdout is not None
            for reply in map(json.loads, process.stdout):
                if reply.get("id") in asked:
                    file.write(
                        json.dumps({"name": name, "store": str(store)} | judged(asked[reply["id"]], reply)) + "\n"
                    )
                    file.flush()
    if process.returncode not in (0, 3):
        raise SystemExit(process.returncode)


def judged(asked: Mapping[str, Any], reply: Mapping[str, Any]) -> dict[str, Any]:
    """Reduce a reply to what the table needs; a question that failed has found and said nothing."""
    found = {Path(chunk["source"]).name for chunk in reply.get("chunks", ())}
    timing = reply.get("timing_ms")
    return {
        "id": asked["id"],
        "answer": reply.get("answer", ""),
        "contains": contains(reply.get("answer", ""), asked["parts"]),
        "recall": len(found & {*asked["sources"]}) / len(asked["sources"]),
        "chunks": len(reply.get("chunks", ())),
        "ttft_ms": timing and timing["ttft"],
        "end_ms": timing and timing["ttft"] + timing["generate"],
    }


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()] if path.exists() else []


def table(runs: Path) -> None:
    """Print a line for each setting of each store: means, and medians of the times."""
    settings: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in rows_of(runs):
        settings.setdefault((row["store"], row["name"]), []).append(row)
    print(
        "| store | setting | questions | contains | recall | chunks | first token, s | end, s |\n" + "| --- " * 8 + "|"
    )
    for (store, name), rows in settings.items():
        means = [f"{statistics.fmean(row[key] for row in rows):.3f}" for key in ("contains", "recall", "chunks")]
        times = [[row[key] for row in rows if row[key] is not None] for key in ("ttft_ms", "end_ms")]
        medians = [f"{statistics.median(each) / 1e3:.2f}" if each else "" for each in times]
        print(f"| {' | '.join((Path(store).name, name, str(len(rows)), *means, *medians))} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    does = parser.add_subparsers(dest="does", required=True)
    does.add_parser("build").add_argument("out", type=Path, metavar="OUTDIR")
    asking = does.add_parser("measure")
    asking.add_argument("out", type=Path, metavar="OUTDIR")
    asking.add_argument("store", type=Path, metavar="STORE")
    asking.add_argument("--runs", type=Path, required=True, help="JSON lines that are added to")
    asking.add_argument("--name", default="", help="of the setting (default: its flags)")
    asking.usage = "%(prog)s OUTDIR STORE --runs RUNS [--name NAME] [-- FLAGS of `kvtool query`]"
    does.add_parser("table").add_argument("runs", type=Path)
    at = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    given, flags = parser.parse_args(sys.argv[1:at]), sys.argv[at + 1 :]
    if given.does == "build":
        build(given.out)
    elif given.does == "measure":
        measure(given.out, given.store, given.runs, given.name, flags)
    else:
        table(given.runs)


if __name__ == "__main__":
    main()
