"""PowerPoint files: presentations, slide shows and templates, of today's formats and of the one before 2007."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from xml.etree.ElementTree import Element

from kvtool.core.corpus.readers.containers import checked, embedded, is_old, parsed
from kvtool.core.corpus.readers.document import Document, UnreadableFile, hidden_note, numbered, opened, unread_note
from kvtool.core.corpus.readers.ir import blocks
from kvtool.core.corpus.readers.ooxml import kind_of, link, links_of, paragraphs, shape_texts


def read(source: str, data: bytes) -> list[Document]:
    """Return one document, its slides marked, each with its notes and comments. Notes name hidden and damaged slides.

    Raises
    ------
    UnreadableFile
        If it is damaged, protected by a password, or unpacks to too much.
    """
    if is_old(data):
        return [numbered(source, "markdown", "slide", _old_slides(data))]
    texts: list[str] = []
    hidden, damaged = [], []
    with opened("presentation", "xlfmt"), checked(data) as archive:
        main = dict(links_of(archive, "").values()).get("officeDocument", "ppt/presentation.xml")
        links = links_of(archive, main)
        authors = _authors(archive, dict(links.values()))
        for number, each in enumerate(parsed(archive, main).iterfind("{*}sldIdLst/{*}sldId"), 1):
            part = link(each, links)
            try:
                slide = parsed(archive, part)
            except UnreadableFile:
                damaged.append(f"damaged slide {number}: not read")
                texts.append("")
                continue
            texts.append("\n".join(_lines(archive, part, slide, authors)))
            if slide.get("show") in ("0", "false") and texts[-1].strip():
                hidden.append(number)
        notes = unread_note({"embedded files": embedded(archive)})
    if damaged and not any(map(str.strip, texts)):
        raise UnreadableFile("damaged: none of its slides can be read")
    return [numbered(source, "markdown", "slide", texts, (*hidden_note("slide", hidden), *damaged, *notes))]


def _authors(archive: zipfile.ZipFile, parts: Mapping[str, str]) -> dict[str, str]:
    """Return the names of those who comment, by their ids."""
    names = {}
    for kind in ("commentAuthors", "authors"):
        with suppress(UnreadableFile):
            names.update({each.get("id", ""): each.get("name", "") for each in parsed(archive, parts.get(kind, ""))})
    return names


def _lines(archive: zipfile.ZipFile, part: str, slide: Element, authors: Mapping[str, str]) -> Iterator[str]:
    """Yield a slide's title, its other shapes in their order, its notes and its comments."""
    links, shapes = links_of(archive, part), slide.find("{*}cSld/{*}spTree")
    if shapes is not None:
        title = next((each for each in shapes.iterfind("{*}sp") if _placeholder(each, "idx", "0") == "0"), None)
        if title is not None and (words := " ".join(" ".join(shape_texts(archive, links, [title])).split())):
            yield f"# {words}\n"
        yield from shape_texts(archive, links, [each for each in shapes if each is not title])
    for kind, other in sorted(links.values(), reverse=True):
        with suppress(UnreadableFile):
            if kind == "notesSlide":
                bodies = parsed(archive, other).iterfind("{*}cSld/{*}spTree/{*}sp")
                yield from shape_texts(archive, {}, [each for each in bodies if _placeholder(each, "type") == "body"])
            elif kind == "comments":
                yield from _comments(parsed(archive, other), authors)


def _placeholder(shape: Element, name: str, default: str = "obj") -> str | None:
    """Return an attribute of the placeholder that a shape fills, or None if it fills none."""
    found = shape.find("{*}nvSpPr/{*}nvPr/{*}ph")
    return None if found is None else found.get(name, default)


def _comments(comments: Element, authors: Mapping[str, str]) -> Iterator[str]:
    for each in comments.iter():
        if kind_of(each) in ("cm", "reply"):
            body = each.find("{*}txBody")
            said = (each.findtext("{*}text") or "") if body is None else paragraphs(body)
            yield f"[comment by {authors.get(each.get('authorId', ''), 'unknown')}: {' '.join(said.split())}]"


def _old_slides(data: bytes) -> Iterator[str]:
    with opened("presentation", "office-oxide"):
        from office_oxide import Document as Office

        for slide in Office.from_bytes(data, "ppt").to_ir()["sections"]:
            if slide.get("title") == "Slide Master" and all(each["type"] != "heading" for each in slide["elements"]):
                continue  # no slide has such a title without its heading
            lines = [*filter(str.strip, blocks(slide["elements"])), *blocks(slide.get("speaker_notes") or ())]
            yield "\n".join(f"{text}\n" if text.startswith("# ") else text for text in lines)
