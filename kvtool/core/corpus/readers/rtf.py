"""Rich text (`.rtf`): its paragraphs, by the library striprtf."""

from __future__ import annotations

from kvtool.core.corpus.readers.document import Document, UnreadableFile, numbered, opened

ENDINGS = (".rtf",)
LIBRARY = "striprtf"


def read(source: str, data: bytes) -> list[Document]:
    """Read one document, its paragraphs numbered.

    Raises
    ------
    UnreadableFile : it is no rich text, or says nothing.
    MissingPackage : the library is not installed.
    """
    if not data.lstrip().startswith(b"{\\rtf"):
        raise UnreadableFile("damaged: not the rich text that its name says")
    with opened("rich text", LIBRARY):
        from striprtf.striprtf import rtf_to_text

        text = rtf_to_text(data.decode("latin-1"), errors="replace")  # type: ignore[no-untyped-call]
    return [numbered(source, "text", "¶", text.split("\n"))]
