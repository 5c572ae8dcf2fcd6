"""Header of a GGUF file: every count and length is checked against the file before it is used.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Collection
from dataclasses import dataclass, field
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

from kvtool.core.checkpoint.files import reading
from kvtool.core.errors import ModelError

OTHER_MODEL = "use the model's original safetensors, or another model"
_VERSIONS = (2, 3)
_MAX_KEYS = 10_000
_MAX_TENSORS = 200_000
_MAX_KEY_BYTES = 65_535
_MAX_STRING_BYTES = 16 << 20
_MAX_ARRAY = 1_000_000  # a vocabulary or its merges; the largest in use hold about half of it
_MAX_ELEMENTS = 1 << 40
_MAX_DIMS = 4
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_TEXTS = struct.pack("<II", _ARRAY, _STRING)
_LENGTH = struct.Struct("<Q")
_DEFAULT_ALIGNMENT = 32
_SHORT_BYTES = 1 << 14  # of an entry of the metadata: all but the vocabulary's
_FLOAT32 = 0


class _MalformedError(ValueError):
    pass


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor's place: its bytes from the start of the file; `shape` is as written, fastest axis first."""

    name: str
    shape: tuple[int, ...]
    kind: int
    start: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """A parsed header: the tensors, and the metadata with an array of strings as its length."""

    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]
    outline: bytes = b""  # a GGUF file: the metadata without long values, and tensors of the same names, a number each
    texts: dict[str, int] = field(default_factory=dict)  # first byte of each array of strings, by its key

    @property
    def architecture(self) -> str:
        value = self.metadata.get("general.architecture", "")
        return value if isinstance(value, str) else ""

    def value(self, name: str) -> Any:
        """Return a value of the architecture's own section (`llama.block_count` for "block_count"), or None."""
        return self.metadata.get(f"{self.architecture}.{name}")

    @property
    def elements(self) -> int:
        return sum(prod(tensor.shape) for tensor in self.tensors.values())


def read_header(path: Path) -> GgufHeader:
    """Parse and check a GGUF file's header. Memory and time are bounded by the file's own size."""
    try:
        with reading(path), path.open("rb") as file:
            if not path.stat().st_size:
                raise _MalformedError("it is empty")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _Reader(data).header()
    except (_MalformedError, struct.error, UnicodeDecodeError) as error:
        raise ModelError(f"{path} is not a whole GGUF file: {error}", "download it again") from error


def read_texts(path: Path, header: GgufHeader, key: str) -> list[str]:
    """Decode an array of strings, of which the header has the length."""
    texts, at = [], header.texts[key]
    with reading(path), path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        for _ in range(header.metadata[key]):
            start = at + _LENGTH.size
            at = start + _LENGTH.unpack_from(data, at)[0]
            texts.append(data[start:at].decode("utf-8"))
    return texts


class _Reader:
    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._size = len(data)
        self._at = 0

    def header(self) -> GgufHeader:
        if self._take(4) != b"GGUF":
            raise _MalformedError("it does not begin with GGUF")
        version = self._number("I")
        if version not in _VERSIONS:
            raise _MalformedError(f"version {version} is not one of {_VERSIONS}")
        tensor_count = self._count("Q", _MAX_TENSORS, 24, "tensors")
        key_count = self._count("Q", _MAX_KEYS, 13, "keys")
        metadata: dict[str, Any] = {}
        texts = {}
        short = []
        for _ in range(key_count):
            start, key = self._at, self._string(_MAX_KEY_BYTES)
            if key in metadata:
                raise _MalformedError(f"the key {key[:80]!r} comes twice")
            if self._data[self._at : self._at + len(_TEXTS)] == _TEXTS:
                texts[key] = self._at + len(_TEXTS) + _LENGTH.size
            metadata[key] = self._value()
            if self._at - start <= _SHORT_BYTES:
                short.append(self._data[start : self._at])
        alignment = _alignment(metadata)
        tensors = self._tensors(tensor_count, alignment)
        return GgufHeader(metadata, tensors, _outline(short, tensors, alignment), texts)

    def _take(self, length: int) -> bytes:
        end = self._at + length
        if end > self._size:
            raise _MalformedError(f"cut short at byte {self._size}, where {end - self._size} more are announced")
        piece = self._data[self._at : end]
        self._at = end
        return piece

    def _number(self, code: str) -> Any:
        return struct.unpack(f"<{code}", self._take(struct.calcsize(f"<{code}")))[0]

    def _count(self, code: str, limit: int, bytes_each: int, what: str) -> int:
        count: int = self._number(code)
        if count > limit or count * bytes_each > self._size - self._at:
            raise _MalformedError(f"{count} {what} are announced, which do not fit")
        return count

    def _string(self, limit: int) -> str:
        length: int = self._number("Q")
        if length > limit:
            raise _MalformedError(f"a text of {length} bytes is announced at byte {self._at - 8}")
        return self._take(length).decode("utf-8")

    def _value(self) -> Any:
        kind: int = self._number("I")
        if kind in _SCALARS:
            return self._number(_SCALARS[kind])
        if kind == _STRING:
            return self._string(_MAX_STRING_BYTES)
        if kind == _ARRAY:
            return self._array()
        raise _MalformedError(f"a value of unknown type {kind} at byte {self._at - 4}")

    def _array(self) -> Any:
        kind: int = self._number("I")
        if kind == _STRING:
            count = self._count("Q", _MAX_ARRAY, 8, "texts")
            self._pass_texts(count)
            return count
        if kind not in _SCALARS:
            raise _MalformedError(f"an array of unknown type {kind} at byte {self._at - 4}")
        width = struct.calcsize(f"<{_SCALARS[kind]}")
        count = self._count("Q", _MAX_ARRAY, width, "numbers")
        return list(struct.unpack(f"<{count}{_SCALARS[kind]}", self._take(count * width)))

    def _pass_texts(self, count: int) -> None:
        """Pass a vocabulary: hundreds of thousands of texts, which only `read_texts` decodes."""
        data, at, size, unpack = self._data, self._at, self._size, _LENGTH.unpack_from
        for _ in range(count):
            length = unpack(data, at)[0]
            at += 8 + length
            if length > _MAX_STRING_BYTES or at > size:
                raise _MalformedError(f"cut short: a text of {length} bytes is announced at byte {at - 8 - length}")
        self._at = at

    def _tensors(self, count: int, alignment: int) -> dict[str, TensorInfo]:
        table = [self._entry() for _ in range(count)]
        start = -(-self._at // alignment) * alignment
        tensors = {}
        for name, shape, kind, offset in table:
            if name in tensors:
                raise _MalformedError(f"the tensor {name!r} comes twice")
            nbytes = _tensor_bytes(name, shape, kind)
            if offset % alignment or start + offset + nbytes > self._size:
                raise _MalformedError(f"cut short: the tensor {name!r} is outside the file")
            tensors[name] = TensorInfo(name, shape, kind, start + offset, nbytes)
        _refuse_overlap(list(tensors.values()))
        return tensors

    def _entry(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string(256)
        dims: int = self._number("I")
        if not 1 <= dims <= _MAX_DIMS:
            raise _MalformedError(f"the tensor {name!r} has {dims} axes")
        shape = tuple(self._number("Q") for _ in range(dims))
        if prod(shape) > _MAX_ELEMENTS or 0 in shape:
            raise _MalformedError(f"the tensor {name!r} has the shape {shape}")
        return name, shape, self._number("I"), self._number("Q")


def _outline(entries: list[bytes], names: Collection[str], alignment: int) -> bytes:
    texts = [name.encode() for name in names]
    table = [struct.pack("<Q", len(text)) + text + struct.pack("<IQIQ", 1, 1, _FLOAT32, 0) for text in texts]
    counts = struct.pack("<IQQ", max(_VERSIONS), len(texts), len(entries))
    return b"".join([b"GGUF", counts, *entries, *table, bytes(alignment + 4)])


def _alignment(metadata: dict[str, Any]) -> int:
    value = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
    if not isinstance(value, int) or not 0 < value <= 1 << 20 or value & (value - 1):
        raise _MalformedError(f"an alignment of {value!r}")
    return value


def _tensor_bytes(name: str, shape: tuple[int, ...], kind: int) -> int:
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    try:
        block, width = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
    except (ValueError, KeyError):
        raise _MalformedError(f"the tensor {name!r} has the unknown type {kind}") from None
    if shape[0] % block:
        raise _MalformedError(f"the rows of {name!r} are not whole blocks of {block}")
    return prod(shape) // block * width


def _refuse_overlap(tensors: list[TensorInfo]) -> None:
    """Refuse tensors that share bytes: a small file could unfold into a large model."""
    ordered = sorted(tensors, key=lambda tensor: tensor.start)
    for first, second in pairwise(ordered):
        if first.start + first.nbytes > second.start:
            raise _MalformedError(f"the tensors {first.name!r} and {second.name!r} overlap")
