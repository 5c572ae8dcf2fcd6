from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

from kvtool.core.common.files import data_dir
from kvtool.core.common.urls import for_people, is_url
from kvtool.core.errors import UntrustedError, UsageError
from kvtool.core.options.option import Options, option

STORE, CHECKED = "Store", "Check"  # headings in the commands' help


@dataclass(frozen=True, kw_only=True)
class StoreOptions(Options):
    store: str = option(
        "",
        "The store: a folder, or the URL of a shared store.",
        group=STORE,
        metavar="PATH|URL",
        unit="path",
        instead="store in the user's data folder",
    )

    require_signature: bool = option(
        False,
        "Take packs and shared stores only if a key of `trust` has signed them.",
        group=STORE,
        flag=None,
        user_only=True,
    )

    @property
    def place(self) -> str | Path:
        """The store's folder or URL. Raises UntrustedError for a URL, which has no signature, if one is required."""
        if is_url(self.store) and self.require_signature:
            raise UntrustedError(
                f"{for_people(self.store)} would be read without its signature, and require_signature is set",
                "`kvtool store pull URL --trust FILE` checks it, and brings it here",
            )
        return self.store if is_url(self.store) else self.folder

    @property
    def folder(self) -> Path:
        """The store's folder. Raises UsageError for a URL."""
        if is_url(self.store):
            raise UsageError(
                "this command works on a local store, not on a URL",
                "`kvtool store pull URL` brings it here, `push` back",
            )
        return Path(self.store) if self.store else default_store()


def default_store() -> Path:
    return data_dir() / "store"


@dataclass(frozen=True, kw_only=True)
class LockOptions(Options):
    lock_wait: float = option(
        10.0, "Maximum wait for another kvtool that writes to the store.", group=STORE, unit="duration", lowest=0
    )


def max_size_option(
    help: str = "Maximum size of the store during this command.",
    instead: str = "the limit of `store prune --budget`",
    group: str = STORE,
) -> int | None:
    return option(None, help, group=group, setting=False, unit="size", lowest=1, instead=instead)


def _check_part(text: str) -> str:
    try:
        value = Fraction(text)
    except (ValueError, ZeroDivisionError):
        return "is not a fraction, such as 1/7"
    return "" if 0 < value <= 1 else "is not between 0 and 1"


@dataclass(frozen=True, kw_only=True)
class VerifyOptions(LockOptions, settings=False, group=CHECKED):
    repair: bool = option(False, "Remove what is damaged; a later question recomputes it.")
    sample: str | None = option(
        None, "Check the KV of only this share of the chunks.", metavar="1/N", check=_check_part
    )
