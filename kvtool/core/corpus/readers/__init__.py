"""Files → documents: a registry from file ending to reader. A new reader is a module with `read` and a row of
`_FORMATS`. Readers that are not bounded take time linear in the file's length (`tests/corpus/test_linear.py`)."""

from __future__ import annotations

import os
from functools import cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path, PurePath
from typing import NamedTuple, cast

from kvtool.core.common.plugins import Plugin, PluginError, found
from kvtool.core.corpus.readers.containers import GZIP, gunzip, without_gz
from kvtool.core.corpus.readers.document import Document, UnreadableFile
from kvtool.core.corpus.readers.encoding import Reader


class _Format(NamedTuple):
    """Lower-case `endings`, or names of files without one, with spaces between them. `reader`: its module, imported
    when it is needed, and a function other than `read`. `is_bounded`: a separate process reads the file."""

    reader: str
    endings: str
    is_bounded: bool = True
    library: str = ""


_IMAGES = frozenset(
    ".png .jpg .jpeg .gif .bmp .tif .tiff .webp .avif .heic .ico .psd .xcf .cr2 .nef .dng .jp2 .jxl".split()
)
_ARCHIVES = frozenset(
    ".zip .tar .tgz .gz .bz2 .xz .zst .lz4 .lzma .7z .rar .cab .iso .dmg "
    ".jar .war .whl .egg .deb .rpm .apk .msi .pkg .snap .crx .xpi".split()
)
_FOREIGN = (
    *(*_IMAGES, *_ARCHIVES),
    *".ps .eps .djvu .xps .mobi .azw .azw3 .chm .pages .wpd .hwp .hwpx .xlsb .numbers".split(),
    *".vsd .msg .oft .pst .ost".split(),
    *".mp3 .wav .flac .ogg .oga .opus .m4a .aac .wma .mid .midi .aiff".split(),
    *".mp4 .m4v .mkv .webm .avi .mov .wmv .flv .mpg .mpeg .3gp".split(),
    *".exe .dll .so .dylib .class .pyc .pyo .wasm .ttf .otf .woff .woff2 .eot".split(),
    *".db .sqlite .sqlite3 .mdb .accdb .parquet .feather .arrow .orc .avro .h5".split(),
    *".npy .npz .pt .pth .ckpt .pkl .pickle .joblib .safetensors .gguf .onnx".split(),
)
_TEXT = (
    ".txt .text .log .rst .rest .adoc .asciidoc .org .bib .nfo .me .1st .po .pot .pod .textile .wiki .tex .ltx .latex "
    ".srt .vtt .man .mdoc .roff .troff .nroff "
    "readme license licence copying authors changelog changes news notice todo install contributing"
)
_MARKDOWN = ".md .markdown .mdown .mkd .mkdn .mdx .rmd .qmd"
_CODE = (
    ".py .pyi .pyx .ipy .rb .pl .pm .php .lua .tcl .r .jl .c .h .cc .cpp .cxx .hh .hpp .hxx .inl .cu .cuh .m .mm "
    ".java .kt .kts .scala .groovy .gradle .clj .cljs .edn .js .mjs .cjs .jsx .ts .mts .cts .tsx .vue .svelte .astro "
    ".go .rs .swift .zig .nim .d .dart .cs .fs .fsx .vb .pas .hs .lhs .ml .mli .elm .ex .exs .erl .hrl .lisp .el .scm "
    ".rkt .v .sv .vhd .vhdl .f .f90 .f95 .for .asm .s .sol .sh .bash .zsh .fish .ps1 .bat .cmd .awk .sed .vim .sql "
    ".css .scss .sass .less .toml .ini .cfg .conf .proto .thrift .graphql .tf .hcl .nix .cmake .mk .bzl .dockerfile "
    ".diff .patch makefile dockerfile rakefile gemfile justfile vagrantfile jenkinsfile"
)
_OPENDOCUMENT = ".odt .ott .fodt .ods .ots .fods .odp .otp .fodp .odg .otg .fodg .odf"
_XML = ".xml .xsd .xsl .xslt .rss .atom .plist .opml .kml .gpx .dita .tei .fb2 .xlf .tmx .resx .wsdl .rdf .svg"
_CONTAINERS = (".zip", ".eml", ".mbox", ".emlx")
_SEVERAL = (*_CONTAINERS, ".jsonl", ".ndjson", ".jsonlines")  # files that may hold several documents
REVISION = "3"  # of all readers and of the tables of chunks; another one reads every file again
_MOST_HERE = 1 << 20  # bytes of a text that is read in this process, by readers that take linear time


def is_known(path: PurePath) -> bool:
    return ending_of(without_gz(path)) in _BY_ENDING or plugin_of(path) is not None


def plugin_of(path: PurePath) -> Plugin | None:
    return _PLUGINS.get(path.suffix.lower().removeprefix("."))


def library_of(path: PurePath) -> str:
    known = _BY_ENDING.get(ending_of(without_gz(path)))
    if known is None or not known.library:
        return ""
    try:
        return f"{known.library} {version(known.library)}"
    except PackageNotFoundError:
        return f"no {known.library}"


def missing_inside(path: PurePath) -> list[str]:
    is_container = ending_of(without_gz(path)) in (*_CONTAINERS, ".mhtml", ".mht")
    found = {library_of(PurePath(f"a{ending}")) for ending in _BY_ENDING} if is_container else set[str]()
    return sorted(library for library in found if library.startswith("no "))


def is_bounded(path: PurePath, size: int) -> bool:
    known = _BY_ENDING.get(ending_of(path))
    by_name = path.suffix.lower() == GZIP or (known is not None and known.is_bounded) or plugin_of(path) is not None
    return by_name or size > _MOST_HERE


def is_foreign(path: PurePath) -> bool:
    return without_gz(path).suffix.lower() in _FOREIGN and not is_known(path)


def kind_of(path: PurePath) -> str:
    """Name a file that no reader takes: `image`, `archive`, another foreign ending, else `binary`."""
    ending = path.suffix.lower()
    if not is_foreign(path) and ending != ".zip":
        return "binary"
    return "image" if ending in _IMAGES else "archive" if ending in _ARCHIVES else ending


def read_documents(path: Path, data: bytes) -> list[Document]:
    """Read the documents of one file, in this process and without bounds. Raises UnreadableFile."""
    return read_as(path, source_of(path), data)


def read_as(path: PurePath, source: str, data: bytes) -> list[Document]:
    plugin = plugin_of(path)
    if plugin is None:
        name = without_gz(path)
        data = data if name == path else gunzip(data)
        known = _BY_ENDING.get(ending_of(name))
        return _reader(known.reader if known else "text.read_unknown")(source, data)
    try:
        read: Reader = plugin.load()
        return read(source, data)
    except PluginError as error:
        raise UnreadableFile(error.message, error.hint) from error


@cache
def _reader(name: str) -> Reader:
    module, _, function = name.partition(".")
    return cast(Reader, getattr(import_module(f"{__name__}.{module}"), function or "read"))


def ending_of(path: PurePath) -> str:
    return path.suffix.lower() or path.name.lower()


def file_of(source: str) -> str:
    """The file of a document: one of several is called `file.jsonl#id`, or `file.zip#name`."""
    marks = (at for at, character in enumerate(source) if character == "#")  # a name in an archive may have some
    files = (source[:at] for at in marks)
    return next((file for file in files if ending_of(without_gz(PurePath(file))) in _SEVERAL), source)


def source_of(path: Path) -> str:
    return Path(os.path.abspath(path)).as_posix()


_FORMATS = (
    _Format("text", _TEXT, is_bounded=False),
    _Format("text.read_markdown", _MARKDOWN, is_bounded=False),
    _Format("text.read_code", _CODE, is_bounded=False),
    _Format("text.read_table", ".csv .tsv .tab .psv", is_bounded=False),
    _Format("text.read_json", ".json .json5 .geojson .jsonld .yaml .yml .properties", is_bounded=False),
    _Format("text.read_xml", _XML, is_bounded=False),
    _Format("text.read_calendar", ".ics .ifb .vcf", is_bounded=False),
    _Format("jsonl", ".jsonl .ndjson .jsonlines", is_bounded=False),
    _Format("pdf", ".pdf", library="pypdfium2"),
    _Format("word", ".docx .docm .dotx .dotm .doc .dot", library="office-oxide"),
    _Format("slides", ".pptx .pptm .ppsx .ppsm .potx .potm .ppt .pps", library="office-oxide"),
    _Format("sheets", ".xlsx .xlsm .xltx .xltm .xls .xlt", library="xlrd"),
    _Format("opendocument", _OPENDOCUMENT),
    _Format("rtf", ".rtf"),
    _Format("html.read_epub", ".epub"),
    _Format("mail", ".eml .mbox .emlx"),
    _Format("jsonl.read_notebook", ".ipynb"),
    _Format("html", ".html .htm .xhtml .shtml"),
    _Format("mail.read_page", ".mhtml .mht"),
    _Format("archive", ".zip"),
)
_BY_ENDING = {ending: each for each in _FORMATS for ending in each.endings.split()}
_PLUGINS = found("readers", names={ending.removeprefix(".") for ending in _BY_ENDING})
