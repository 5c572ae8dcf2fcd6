"""What a walk leaves out by default: what ignore files name, hidden names, lock files, and what looks like a secret."""

from __future__ import annotations

import re
import warnings
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathspec import GitIgnoreSpec

FILES = (".gitignore", ".kvtoolignore")  # in each folder; of two that speak of a name the later one counts
_MOST_BYTES = 1 << 20  # of an ignore file
_OWN = frozenset((".git", *FILES))  # hidden names that nobody has to be told of

_SECRETS = (
    *(".env", ".env.*", "*.env", ".netrc", "_netrc", ".pgpass", ".htpasswd", ".npmrc", ".pypirc", ".git-credentials"),
    *("*.pem", "*.key", "*.p12", "*.pfx", "*.jks", "*.keystore", "*.kdbx", "*.ppk", "*.tfstate"),
    *("id_rsa", "id_dsa", "id_ecdsa", "id_ed25519", "id_*_sk", "credentials", "credentials.*", "secrets.*"),
    *("client_secret*.json", "service-account*.json", "service_account*.json"),
)
_LOCKS = (
    *("package-lock.json", "npm-shrinkwrap.json", "pnpm-lock.yaml", "yarn.lock", "poetry.lock", "uv.lock", "*.lock"),
    *("go.sum", "packages.lock.json", "gradle.lockfile", "conda-lock.yml", "~$*"),
)


def is_secret(name: str) -> bool:
    """Whether a file's name says that it holds keys or passwords."""
    return any(fnmatchcase(name.lower(), glob) for glob in _SECRETS)


def is_lock(name: str) -> bool:
    """Whether a file is written by a package manager, or by an office program while it has another open."""
    return any(fnmatchcase(name.lower(), glob) for glob in _LOCKS)


def is_hidden(name: str) -> bool:
    """Whether a name is hidden."""
    return name.startswith(".")


def is_open(path: Path, root: Path) -> bool:
    """Whether others than the user may name a path of a folder that is open to them: nothing hidden, no secret, and
    nothing that ignore files leave out. Both are real paths."""
    if not path.is_relative_to(root):
        return False
    if any(map(is_hidden, path.relative_to(root).parts)) or (is_secret(path.name) and not path.is_dir()):
        return False
    return not _is_left_out(path, root)


def _is_left_out(path: Path, root: Path) -> bool:
    """Whether an ignore file names a path below a folder, or a folder on the way to it."""
    rules, steps = Rules.above(root), [path, *path.parents]
    for folder, each in pairwise(reversed(steps[: steps.index(root) + 1])):
        rules = rules.below(folder)
        if rules.names(each, each.is_dir()):
            return True
    return False


def is_own(name: str) -> bool:
    """Whether a hidden name is that of an ignore file, or of what git keeps."""
    return name in _OWN


@dataclass(frozen=True, slots=True)
class Rules:
    """The ignore files that hold in a folder, each with the folder that it stands in, the nearest last."""

    each: tuple[tuple[str, GitIgnoreSpec], ...] = ()

    @classmethod
    def above(cls, root: Path) -> Rules:
        """Those above a folder that was named, up to the top of its git repository; none where it is no part of one, or
        where they leave out the folder itself: it was asked for."""
        parents = [*root.parents]
        top = next((number for number, parent in enumerate(parents) if (parent / ".git").exists()), None)
        if top is None or (root / ".git").exists():
            return cls()
        rules = cls()
        for parent in reversed(parents[: top + 1]):
            rules = rules.below(parent)
        return cls() if any(rules.names(each, True) for each in (*parents[:top], root)) else rules

    def below(self, folder: Path) -> Rules:
        """These and the ignore files of a folder."""
        more = [
            (folder.as_posix().rstrip("/") + "/", spec) for name in FILES if (spec := _read(folder / name)) is not None
        ]
        return Rules((*self.each, *more)) if more else self

    def names(self, path: Path, is_folder: bool) -> bool:
        """Whether a file or a folder is left out."""
        for base, spec in reversed(self.each):
            if not (name := path.as_posix()).startswith(base):
                continue
            verdict = spec.check_file(name.removeprefix(base) + "/" * is_folder).include
            if verdict is not None:
                return verdict
        return False


def _read(path: Path) -> GitIgnoreSpec | None:
    """An ignore file, its lines that are no patterns left aside; None where there is none, or it cannot be read."""
    try:
        if not path.is_file():  # to open a FIFO is to wait for who writes to it
            return None
        with path.open("rb") as file:
            lines = file.read(_MOST_BYTES).decode("utf-8-sig", "replace").splitlines()
    except OSError:
        return None
    from pathspec import GitIgnoreSpec

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of patterns such as [[a], which mean what git means
        return GitIgnoreSpec.from_lines(line for line in lines if _is_pattern(line))


@cache
def _is_pattern(line: str) -> bool:
    from pathspec import GitIgnoreSpec

    try:
        GitIgnoreSpec.from_lines([line])
    except (ValueError, re.error):  # a range that runs backwards is compiled as it stands
        return False
    return True
