"""Plain text, as it is."""

from __future__ import annotations

from kvtool.core.corpus.readers.document import Document
from kvtool.core.corpus.readers.encoding import of_text

ENDINGS = (
    *(".txt", ".text", ".log", ".rst", ".rest", ".adoc", ".asciidoc", ".org", ".bib"),
    *(".csv", ".tsv", ".nfo", ".me", ".1st", ".po", ".pot", ".pod", ".textile", ".wiki"),
    *("readme", "license", "licence", "copying", "authors", "changelog", "changes", "news"),
    *("notice", "todo", "install", "contributing"),
)


@of_text()
def read(source: str, text: str) -> list[Document]:
    """Return one document, the text as it is."""
    return [Document(source, text, "text")]
