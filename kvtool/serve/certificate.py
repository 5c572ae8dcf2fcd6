"""Certificate of an https server, checked before a model is loaded."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import NoReturn

from kvtool.core.errors import UsageError


def load_certificate(chain: Path, key: Path) -> ssl.SSLContext:
    """Load a certificate chain and its private key, in PEM files. Raises UsageError."""

    def encrypted() -> NoReturn:
        raise UsageError(f"the key in {key} is encrypted", f"`openssl pkey -in {key} -out FILE` decrypts it")

    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(chain, key, password=encrypted)
    except OSError as error:  # also of OpenSSL
        why = getattr(error, "reason", None) or error.strerror or str(error)
        raise UsageError(
            f"the certificate in {chain} with the key in {key} cannot be used: {why.lower().replace('_', ' ')}",
            "give PEM files that this user can read, and the key that the certificate was issued for",
        ) from error
    return context
