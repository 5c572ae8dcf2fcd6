"""PowerPoint files: presentations, slide shows and templates, of today's formats and of the one before 2007; the shapes
of texts, slides and sheets: their text, tables, diagrams and charts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from xml.etree.ElementTree import Element

from kvtool.core.corpus.readers.containers import checked, embedded, is_old, parsed
from kvtool.core.corpus.readers.document import Document, UnreadableFile, hidden_note, numbered, opened, unread_note
from kvtool.core.corpus.readers.drawings import paragraphs, shape_texts
from kvtool.core.corpus.readers.ir import blocks, comment
from kvtool.core.corpus.readers.openxml import Package


def read(source: str, data: bytes) -> list[Document]:
    if is_old(data):
        return [numbered(source, "markdown", "slide", _old_slides(data))]
    texts: list[str] = []
    hidden, damaged = [], []
    with opened("presentation", "xlfmt"), checked(data) as archive:
        package = Package(archive)
        main = package.main("ppt/presentation.xml")
        deck, links = parsed(archive, main), package.links(main)
        parts = [package.part(link.name) for link in links.values() if link.kind in ("commentAuthors", "authors")]
        authors = {each.get("id", ""): each.get("name", "") for part in parts if part is not None for each in part}
        for number, each in enumerate(deck.iterfind("{*}sldIdLst/{*}sldId"), 1):  # which has an id of its own, too
            keys = (value for key, value in each.items() if key.endswith("}id"))
            part = next((links[key].name for key in keys if key in links), "")
            slide = package.part(part)
            texts.append("" if slide is None else "\n".join(_lines(package, part, slide, authors)))
            if slide is None or package.damaged:
                damaged.append(f"damaged slide {number}: not all of it is read")
                package.damaged.clear()
            if slide is not None and slide.get("show") in ("0", "false") and texts[-1].strip():
                hidden.append(number)
        notes = unread_note({"embedded files": embedded(archive)})
    if damaged and not any(map(str.strip, texts)):
        raise UnreadableFile("damaged: none of its slides can be read")
    return [numbered(source, "markdown", "slide", texts, (*hidden_note("slide", hidden), *damaged, *notes))]


def _lines(package: Package, part: str, slide: Element, authors: Mapping[str, str]) -> Iterator[str]:
    links, shapes = package.links(part), [*slide.iterfind("cSld/spTree/*")]
    title = next((each for each in shapes if _placeholder(each, "idx", "0") == "0"), None)
    if title is not None and (words := " ".join(" ".join(shape_texts(package, links, [title])).split())):
        yield f"# {words}\n"
    yield from shape_texts(package, links, (each for each in shapes if each is not title))
    for link in sorted(links.values(), reverse=True):
        other = package.part(link.name) if link.kind in ("notesSlide", "comments") else None
        for each in () if other is None else other.iter():
            if each.tag == "sp" and _placeholder(each, "type", "obj") == "body":
                yield from shape_texts(package, {}, [each])
            elif each.tag in ("cm", "reply"):
                body = each.find("txBody")
                text = (each.findtext("text") or "") if body is None else paragraphs(body)
                yield comment(text, authors.get(each.get("authorId", ""), "unknown"))


def _placeholder(shape: Element, name: str, default: str) -> str | None:
    found = shape.find("nvSpPr/nvPr/ph")
    return None if found is None else found.get(name, default)


def _old_slides(data: bytes) -> Iterator[str]:
    with opened("presentation", "office-oxide"):
        from office_oxide import Document as Office

        for slide in Office.from_bytes(data, "ppt").to_ir()["sections"]:
            if slide.get("title") == "Slide Master" and all(each["type"] != "heading" for each in slide["elements"]):
                continue  # no slide has such a title without its heading
            lines = [*filter(str.strip, blocks(slide["elements"])), *blocks(slide.get("speaker_notes") or ())]
            yield "\n".join(f"{text}\n" if text.startswith("# ") else text for text in lines)
