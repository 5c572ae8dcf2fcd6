"""What the prompts are made of. No torch."""

from __future__ import annotations

from importlib import resources


def text() -> str:
    """kvtool's own documentation: text of many kinds that comes with every copy of it."""
    pages = (page for page in resources.files("kvtool").joinpath("docs").iterdir() if page.name.endswith(".md"))
    return "\n\n".join(page.read_text(encoding="utf-8") for page in sorted(pages, key=lambda page: page.name))
