"""Pack → store, by the rules of a pull: what is there already is skipped, every value is checked before it is taken."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path

from kvtool.core.cache.identity import HERE
from kvtool.core.cache.store import Store
from kvtool.core.common.types import Events
from kvtool.core.errors import DamagedError, StoreFormatError, UsageError
from kvtool.core.pack import stretches
from kvtool.core.pack.container import PackReader
from kvtool.core.pack.names import CATALOGUE, HEAD, kv_member
from kvtool.core.pack.tensors import MOST_HEADER, from_safetensors
from kvtool.core.remote import values
from kvtool.core.remote.blobs import ReadInTurn
from kvtool.core.remote.catalogue import Catalogue
from kvtool.core.remote.entries import digest_of
from kvtool.core.remote.head import unseal_head
from kvtool.core.remote.limits import most_bytes
from kvtool.core.remote.pull import adopt
from kvtool.core.remote.signing import Trust
from kvtool.core.remote.transfer_report import TransferReport

_AGAIN = "get the pack again, or export it again"
_SECONDS = 600.0  # for a value to come off the disk


def take(
    path: Path,
    pack: Path,
    *,
    trust: Trust | None = None,
    lock_wait: float = 0.0,
    max_size: int | None = None,
    events: Events | None = None,
) -> TransferReport:
    """Take a pack into a store, which is made where there is none. Run again to resume.

    KV becomes durable in batches, then every document in a transaction of its own. Of a file that both have in two
    versions the one changed last stays, unless the store has it of another origin: then it stays as it is. What of the
    pack is damaged is left out, and in the report.

    Parameters
    ----------
    trust : whom the user trusts; None: nobody, so that the store's own documents and their KV stay as they are.

    Raises
    ------
    UsageError : there is no such file, or it is no pack.
    UntrustedError : a signature is required, and there is none of a trusted key.
    DamagedError : its index, or what it says of its model, is damaged: nothing was written.
    StoreFormatError : the store was made with another model or other settings, or a newer kvtool wrote the pack.
    NoSpaceError, StoreLockedError : what came stays.
    """
    with closing(PackReader(pack)) as reader:
        if not {HEAD, CATALOGUE} & {*reader.names}:  # of a pack one of them may be damaged
            raise UsageError(f"{pack} is an archive, but no pack", "name a file that `kvtool store export` wrote")
        catalogue = _catalogue(reader)
        blobs = PackBlobs(reader, catalogue)
        trust = trust or Trust()
        origin = trust.origin(catalogue.proof, pack.name)
        _check_manifest(blobs, catalogue, pack)
        with Store.create_or_open(path) as store, store.writer(lock_wait, max_size) as writer:
            try:
                report = adopt(
                    store, writer, blobs, catalogue, origin, None, newer=True, timeout=_SECONDS, events=events
                )
                report.signer = trust.signer(catalogue.proof)
                if origin == HERE:  # no signature covers them, and they are parts of own documents' prompts, too
                    stretches.take(store, writer, reader, report)
                return report
            except StoreFormatError as error:  # made with another model or other settings
                hint = f"import {pack.name} into a store of its own: --store FOLDER"
                raise StoreFormatError(f"{error.message} than {pack}", hint) from error


@contextmanager
def _of_the_pack(path: Path) -> Iterator[None]:
    try:
        yield
    except DamagedError as error:
        raise DamagedError(f"the index of {path} is damaged: nothing was taken from it", _AGAIN) from error
    except StoreFormatError as error:
        raise StoreFormatError(f"{path} was written by a newer kvtool", "update kvtool") from error


def _catalogue(reader: PackReader) -> Catalogue:
    with _of_the_pack(reader.path):
        head = unseal_head(reader.get(HEAD, most_bytes(HEAD)) or b"")
        packed = reader.get(CATALOGUE, most_bytes(CATALOGUE)) or b""
        if digest_of(packed) != head.catalogue:
            raise DamagedError("its catalogue is another one")
        return Catalogue.unpack(packed)


def _check_manifest(blobs: PackBlobs, catalogue: Catalogue, pack: Path) -> None:
    """Before a store is made for it."""
    with _of_the_pack(pack):
        name = f"meta/manifest-{catalogue.meta.get('manifest', '')}"
        value = blobs.value(name, most_bytes(name))
        if value is None or not values.is_sound(name, value):
            raise DamagedError("it does not say what it was made with")
        if values.open_meta("manifest", value).get("identity") != catalogue.identity:
            raise DamagedError("it was made with something else than its index says")


class PackBlobs:
    """A pack's members by the names of a tier's blobs, as a pull reads them."""

    def __init__(self, pack: PackReader, catalogue: Catalogue) -> None:
        self.url = str(pack.path)
        self._pack, self._there = pack, catalogue
        self._member = ""  # whose records were read last: a chunk's layers are asked for one after the other
        self._records: Mapping[str, bytes] = {}

    def value(self, name: str, most: int) -> bytes | None:
        """A blob, None where there is none, empty where it is damaged or larger than `most`."""
        if not name.startswith("kv/"):
            return self._pack.get(name, min(most, most_bytes(name)))
        record = self._record(name)
        return b"" if record is not None and len(record) > most else record

    def _record(self, name: str) -> bytes | None:
        _, key, rest, _ = name.split("/")
        level, chunk = rest.rpartition("-")[0], self._there.chunks[key]
        member = kv_member(key, chunk, level)
        if member != self._member:
            self._member, self._records = member, {}
            most = chunk.levels[level].size + min(MOST_HEADER, 2**10 * chunk.layers + 2**12)
            data = self._pack.get(member, most)
            if data is None:
                return None
            try:
                records = from_safetensors(bytes.fromhex(key), level, chunk.layers, data)
            except DamagedError:
                records = []
            stem = name.rpartition("/")[0]
            self._records = {f"{stem}/{layer}": record for layer, record in enumerate(records)}
        elif not self._records and not self._pack.size(member):
            return None
        return self._records.get(name, b"")

    def reader(self) -> ReadInTurn:
        """See Readable."""
        return ReadInTurn(lambda wanted: self.value(wanted.name, wanted.most))
