"""Ed25519 signatures of catalogues of packs and shared stores, and the keys that the user trusts.

A signature covers the catalogue, and the catalogue names a digest of every value: of descriptions and profiles by their
names, of KV by `Level.seal`. Keys are files as `ssh-keygen -t ed25519` or OpenSSL write them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvtool.core.cache.identity import HERE, Origin
from kvtool.core.common.plugins import extra_line
from kvtool.core.errors import DamagedError, KvtoolError, UntrustedError, UsageError
from kvtool.core.remote.catalogue import Proof

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

_MOST_KEY_FILE = 2**16
_OPEN = "`ssh-keygen -p -N '' -f KEY` removes the passphrase, best of a copy"
_MAKE = "`ssh-keygen -t ed25519 -N '' -f KEY` makes KEY to sign with, and KEY.pub for users who trust it"
UNSIGNED = "ask its owner to sign it: `store export --sign KEY`, `store push --sign KEY`"


@dataclass(frozen=True, slots=True)
class SigningKey:
    private: Ed25519PrivateKey
    name: str

    @property
    def public(self) -> bytes:
        return self.private.public_key().public_bytes_raw()

    def sign(self, digest: bytes) -> Proof:
        proof = Proof(self.name, self.public, b"", digest)
        return replace(proof, signature=self.private.sign(proof.message))

    def has_signed(self, proof: Proof | None) -> bool:
        return proof is not None and proof.key == self.public and is_valid(proof)


@dataclass(frozen=True, slots=True)
class Trust:
    """The public keys that the user trusts. `required`: refuse what none of them has signed. `mine`: whatever is named
    now was made by the user."""

    keys: frozenset[bytes] = frozenset()
    required: bool = False
    mine: bool = False

    @classmethod
    def of(cls, files: Sequence[str], required: bool = False, mine: bool = False) -> Trust:
        return cls(frozenset(key for file in files for key in public_keys(Path(file))), required, mine)

    def origin(self, proof: Proof | None, place: str) -> Origin:
        """Decide what the values of a catalogue from a place count as. Raises UntrustedError without a required
        signature, DamagedError if the signature is not of this catalogue: one of them was changed."""
        trusted = proof is not None and proof.key in self.keys
        if proof is not None and (trusted or self.keys or self.required) and not is_valid(proof):
            raise DamagedError(f"the signature of {place} does not fit its contents", "get it again from its signer")
        if self.required and not trusted:
            if proof is None:
                by, hint = "is not signed", UNSIGNED
            else:
                by = f"is signed by {proof.signer}, whom you do not trust"
                hint = "name that public key with --trust FILE"
            raise UntrustedError(f"{place} {by}, and require_signature is set", hint)
        if trusted and proof is not None:
            return Origin.signed(proof.signer)
        return HERE if self.mine else Origin.untrusted(place)

    def signer(self, proof: Proof | None) -> str | None:
        """Return who has signed something, "" for nobody; None: no key is trusted, so the signature was not checked."""
        if not self.keys:
            return None
        return "" if proof is None else proof.signer


def is_valid(proof: Proof) -> bool:
    ed25519, _ = _library()
    try:
        key: Ed25519PublicKey = ed25519.Ed25519PublicKey.from_public_bytes(proof.key)
        key.verify(proof.signature, proof.message)
    except Exception:  # of the library's own kinds; whatever it is, it is no valid signature
        return False
    return True


def seal_of(records: Sequence[bytes]) -> str:
    """Return the digest of a level's records, 32 bytes in hex: unlike their checksums, it cannot be forged."""
    state = hashlib.blake2b(digest_size=32)
    for record in records:
        state.update(record)
    return state.hexdigest()


# ---- key files ---------------------------------------------------------------------------------------------------


def signing_key(path: Path) -> SigningKey:
    (ed25519, library), data = _library(), _key_file(path)
    load = library.load_ssh_private_key if b"OPENSSH" in data else library.load_pem_private_key
    try:
        private = load(data, password=None)
    except TypeError as error:
        raise UsageError(f"the key {path} has a passphrase, which kvtool does not ask for", _OPEN) from error
    except Exception as error:
        raise UsageError(f"{path} holds no private key", _hint(path, "--sign takes the private key")) from error
    if not isinstance(private, ed25519.Ed25519PrivateKey):
        raise UsageError(f"the key {path} is not an Ed25519 key", _MAKE)
    return SigningKey(private, _comment(path))


def _comment(path: Path) -> str:
    try:
        words = path.with_name(path.name + ".pub").read_text("utf-8").split(maxsplit=2)
        name = words[2].strip() if len(words) == 3 else path.name
    except (OSError, ValueError):
        name = path.name
    return "".join(character for character in name if character.isprintable())[:100]


def public_keys(path: Path) -> list[bytes]:
    data, (_, library) = _key_file(path), _library()
    if b"-----BEGIN" in data:
        return [_public(path, library.load_pem_public_key, data)]
    lines = [line for line in data.splitlines() if line.strip() and not line.lstrip().startswith(b"#")]
    if not lines:
        raise UsageError(f"{path} holds no public key", _MAKE)
    return [_public(path, library.load_ssh_public_key, line) for line in lines]


def _public(path: Path, load: Any, data: bytes) -> bytes:
    try:
        key = load(data)
    except Exception as error:
        hint = _hint(path, "--trust takes a public key")
        raise UsageError(f"{path} holds something else than public keys", hint) from error
    if not isinstance(key, _library()[0].Ed25519PublicKey):
        raise UsageError(f"{path} holds a key that is not Ed25519", _MAKE)
    return bytes(key.public_bytes_raw())


def _hint(path: Path, wanted: str) -> str:
    other = path.with_suffix("") if path.suffix == ".pub" else path.with_name(path.name + ".pub")
    return f"{wanted}: {other}" if other.is_file() else _MAKE


def _key_file(path: Path) -> bytes:
    try:
        if not path.is_file():
            raise UsageError(f"there is no key file at {path}", _MAKE)
        with path.open("rb") as file:
            return file.read(_MOST_KEY_FILE)
    except OSError as error:
        raise UsageError(f"the key file {path} cannot be read: {error.strerror}", "check who owns it") from error


def _library() -> tuple[Any, Any]:
    try:
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError as error:
        raise KvtoolError("signatures need the package cryptography", extra_line("sign")) from error
    return ed25519, serialization
