"""How many of the words that Docling expects of its test documents the readers find, format by format.

    git clone https://github.com/docling-project/docling
    python samples/benchmarks/reading.py docling
    python samples/benchmarks/reading.py docling --by kreuzberg --missing

`--by` names another extractor, which has to be installed: kreuzberg, office_oxide, mammoth, docx2python, pdftotext.
"""

from __future__ import annotations

import argparse
import html
import re
import subprocess
import sys
import time
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from kvtool.core.corpus.readers import read_documents

FOLDERS = "docx doc xlsx xls pptx ppt odf html pdf csv md epub latex".split()


def by_kvtool(path: Path) -> str:
    return "\n".join(document.text for document in read_documents(path, path.read_bytes()))


EXTRACTORS: dict[str, Callable[[Path], str]] = {
    "kvtool": by_kvtool,
    "kreuzberg": lambda path: str(import_module("kreuzberg").extract_file_sync(str(path)).content),
    "office_oxide": lambda path: str(import_module("office_oxide").to_markdown(str(path))),
    "mammoth": lambda path: str(import_module("mammoth").extract_raw_text(path.open("rb")).value),
    "docx2python": lambda path: str(import_module("docx2python").docx2python(str(path)).text),
    "pdftotext": lambda path: subprocess.run(
        ["pdftotext", "-layout", str(path), "-"], capture_output=True
    ).stdout.decode("utf-8", "replace"),
}


@dataclass
class Row:
    """Counts of a format."""

    files: int = 0
    failed: int = 0
    found: int = 0
    words: int = 0
    seconds: float = 0.0


def words_of(text: str) -> Counter[str]:
    """Count the words of a text without comments, addresses of links and pictures."""
    text = re.sub(r"<!--.*?-->|data:image/[^)\s]*", " ", text, flags=re.DOTALL)
    text = html.unescape(re.sub(r"\]\([^)]*\)", "]", text)).replace("\\_", "_")
    return Counter(re.findall(r"[^\W_]+", unicodedata.normalize("NFKC", text).lower()))


def main() -> None:
    """Print a row for each format."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("docling", type=Path)
    parser.add_argument("--by", choices=EXTRACTORS, default="kvtool")
    parser.add_argument("--missing", action="store_true", help="also print missing words of each file")
    given = parser.parse_args()
    rows: dict[str, Row] = defaultdict(Row)
    for folder in (given.docling / "tests" / "data" / name for name in FOLDERS):
        for path in sorted((folder / "sources").glob("*.*")):
            expected = [folder / "groundtruth" / f"{name}.md" for name in (path.name, path.stem)]
            if wanted := next((words_of(one.read_text("utf-8", "replace")) for one in expected if one.exists()), None):
                row, begun = rows[path.suffix.lower()], time.perf_counter()
                row.files += 1
                try:
                    found = words_of(EXTRACTORS[given.by](path))
                except Exception as error:
                    print(f"{path.name}: {type(error).__name__}: {error}", file=sys.stderr)
                    row.failed, found = row.failed + 1, Counter()
                row.seconds += time.perf_counter() - begun
                row.found += (wanted & found).total()
                row.words += wanted.total()
                if given.missing and wanted - found:
                    print(f"{path.name}: {' '.join([*(wanted - found)][:20])}", file=sys.stderr)
    print("format  recall  words  files  failed  seconds")
    for ending, row in rows.items():
        share = row.found / max(1, row.words)
        print(f"{ending:7} {share:.3f}  {row.words:6}  {row.files:5}  {row.failed:6}  {row.seconds:7.1f}")


if __name__ == "__main__":
    main()
