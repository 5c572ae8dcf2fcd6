"""Markdown, as it is; its headings guide the splitter."""

from __future__ import annotations

from kvtool.core.corpus.readers.document import Document
from kvtool.core.corpus.readers.encoding import of_text

ENDINGS = (".md", ".markdown", ".mdown", ".mkd", ".mkdn", ".mdx", ".rmd", ".qmd")


@of_text()
def read(source: str, text: str) -> list[Document]:
    """Return one document, the text as it is."""
    return [Document(source, text, "markdown")]
