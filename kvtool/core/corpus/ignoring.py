"""Default exclusions of a walk: names in ignore files, hidden names, lock files, and probable secrets."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvtool.core.common.files import read_regular

if TYPE_CHECKING:
    from pathspec import GitIgnoreSpec

FILES = (".gitignore", ".kvtoolignore")  # in each folder; of two that speak of a name the later one counts
_MOST_BYTES = 1 << 20  # of an ignore file
_LONGEST_LINE = 4096  # characters, as paths have it: patterns are compiled in quadratic time
_STAR, _FOLDERS, _FOLDERS_FIRST = "[^/]*", "(?:/.+)?", "^(?:.+/)?"  # what pathspec makes of `*`, `/**/` and `**/`
OWN = (".git", *FILES)  # hidden names that are not reported

_SECRETS = (
    *(".env", ".env.*", "*.env", ".netrc", "_netrc", ".pgpass", ".htpasswd", ".npmrc", ".pypirc", ".git-credentials"),
    *("*.pem", "*.key", "*.p12", "*.pfx", "*.jks", "*.keystore", "*.kdbx", "*.ppk", "*.tfstate"),
    *("id_rsa", "id_dsa", "id_ecdsa", "id_ed25519", "id_*_sk", "credentials", "credentials.*", "secrets.*"),
    *("*.gpg", "*.pgp", "*.age", "*.ovpn", "*.token", "*.htpasswd", "*.kubeconfig", "kubeconfig"),
    *("token", "secret", "secrets", "passwords", "passwords.*", "shadow", "shadow-", "gshadow", "gshadow-"),
    *("client_secret*.json", "service-account*.json", "service_account*.json"),
)
_LOCKS = (
    *("package-lock.json", "npm-shrinkwrap.json", "pnpm-lock.yaml", "yarn.lock", "poetry.lock", "uv.lock", "*.lock"),
    *("go.sum", "packages.lock.json", "gradle.lockfile", "conda-lock.yml", "~$*"),
    *("*~", "*.bak", "*.orig", "*.rej", "*.swp", "*.tmp"),
)


def is_secret(name: str) -> bool:
    name = name.lower().removesuffix(".gz")
    return any(fnmatchcase(name, glob) for glob in _SECRETS)


def is_lock(name: str) -> bool:
    """Whether a package manager wrote the file, or an office program or editor as a copy of another one."""
    return any(fnmatchcase(name.lower(), glob) for glob in _LOCKS)


def is_hidden(name: str) -> bool:
    return name.startswith(".")


@dataclass(frozen=True, slots=True)
class Rules:
    """The ignore files that apply in a folder, each with its own folder, the nearest last."""

    each: tuple[tuple[str, GitIgnoreSpec], ...] = ()

    @classmethod
    def above(cls, root: Path) -> Rules:
        """Read the rules above a named folder, up to the top of its git repository. No rules apply outside of a
        repository, or if they exclude the folder itself: it was asked for."""
        parents = [*root.parents]
        top = next((number for number, parent in enumerate(parents) if (parent / ".git").exists()), None)
        if top is None or (root / ".git").exists():
            return cls()
        rules = cls()
        for parent in reversed(parents[: top + 1]):
            rules = rules.below(parent)
        return cls() if any(rules.names(each, True) for each in (*parents[:top], root)) else rules

    def below(self, folder: Path) -> Rules:
        base, specs = folder.as_posix().rstrip("/") + "/", (_read(folder / name) for name in FILES)
        more = [(base, spec) for spec in specs if spec is not None]
        return Rules((*self.each, *more)) if more else self

    def names(self, path: Path, is_folder: bool) -> bool:
        for base, spec in reversed(self.each):
            if not (name := path.as_posix()).startswith(base):
                continue
            verdict = spec.check_file(name.removeprefix(base) + "/" * is_folder).include
            if verdict is not None:
                return verdict
        return False


class Roots:
    """Folders that others than the user may read, without hidden files, secrets, and what an ignore file excludes. On a
    file system that ignores case, a path has to be spelled as its folders list it: a rule for `drafts/` would not match
    `Drafts/`."""

    def __init__(self, folders: Iterable[Path]) -> None:
        self._folders = frozenset(folders)
        self._find_rules = cache(self._rules_in)
        self._list_names = cache(_list_names)
        self._ignores_case = cache(_is_folded)

    def show(self, path: Path) -> bool:
        return any(self._shows(root, path) for root in (path, *path.parents) if root in self._folders)

    def _shows(self, root: Path, path: Path) -> bool:
        folder = root
        for name in path.relative_to(root).parts:
            inner = folder / name
            is_folder = inner.is_dir()
            if is_hidden(name) or (is_secret(name) and not is_folder):
                return False
            if self._find_rules(root, folder).names(inner, is_folder):
                return False
            if self._ignores_case(root) and os.path.lexists(inner) and name not in self._list_names(folder):
                return False
            folder = inner
        return True

    def _rules_in(self, root: Path, folder: Path) -> Rules:
        above = Rules.above(root) if folder == root else self._find_rules(root, folder.parent)
        return above.below(folder)


def _list_names(folder: Path) -> frozenset[str]:
    with suppress(OSError):
        return frozenset(os.listdir(folder))
    return frozenset()


def _is_folded(folder: Path) -> bool:
    try:
        return os.path.samefile(folder, str(folder).swapcase())
    except OSError:
        return False


def _read(path: Path) -> GitIgnoreSpec | None:
    try:
        lines = read_regular(path, _MOST_BYTES).decode("utf-8-sig", "replace").splitlines()
    except OSError:
        return None
    from pathspec import GitIgnoreSpec

    patterns: list[Any] = []
    with warnings.catch_warnings():  # `re` warns of `[[`, which is any other character to git
        warnings.simplefilter("ignore", FutureWarning)
        for line in (line for line in lines if len(line) <= _LONGEST_LINE):
            with suppress(ValueError, re.error):  # a range that runs backwards is compiled unchanged
                patterns += GitIgnoreSpec.from_lines([line]).patterns
        for pattern in patterns:
            if pattern.regex is not None:
                pattern.regex = re.compile(_linear(pattern.regex.pattern))
    return GitIgnoreSpec(patterns)


def _linear(regex: str) -> str:
    """Rewrite the regular expression of a pattern so that it takes time linear in a path: `*a*a*b` and `a/**/a/**/b`
    try every way to share a path among their stars, but each star except the last may take the shortest without
    loss."""
    first, *others = (_with_short_stars(part) for part in regex.split(_FOLDERS))
    if not others:
        return first
    *middle, last = others
    if first.startswith(_FOLDERS_FIRST):
        first = f"^(?>(?:.+?/)??{first.removeprefix(_FOLDERS_FIRST)}(?=/))"
    return first + "".join(f"(?>(?:/.+?)??{part}(?=/))" for part in middle) + _FOLDERS + last


def _with_short_stars(part: str) -> str:
    first, *others = part.split(_STAR)
    if not others:
        return first
    *middle, last = others
    return first + "".join(f"(?>[^/]*?{piece})" for piece in middle) + _STAR + last
