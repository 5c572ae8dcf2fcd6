"""File search of an ingest: a deterministic, loop-free walk over the named paths."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath

from kvtool.core.common.text import as_on_disk
from kvtool.core.corpus.ignoring import OWN, Roots, Rules, is_hidden, is_lock, is_secret
from kvtool.core.corpus.options import Shard
from kvtool.core.corpus.readers import kind_of
from kvtool.core.corpus.reading import Reading
from kvtool.core.errors import UsageError

_TYPES = {stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device"}
_NOT_SHOWN = "not open to clients: hidden, a secret, or named by an ignore file"


@dataclass(frozen=True, slots=True)
class FoundFile:
    """A file to read. A `Path` as its name would take several times as much memory. `guessed`: its name does not show
    whether it is text."""

    name: str
    size: int
    mtime_ns: int
    ctime_ns: int
    guessed: bool = False

    @property
    def path(self) -> Path:
        return Path(self.name)


@dataclass(frozen=True, slots=True)
class Failure:
    """A file that could not be read. `known`: in an earlier run, and it is unchanged."""

    path: str
    error: str
    known: bool = False


class Skip(StrEnum):
    EMPTY = "empty"  # nothing in it
    LINK = "link"  # broken, a loop, or out of the folder
    UNSUPPORTED = "unsupported"  # no reader for what it is
    IGNORED = "ignored"  # named by .gitignore or .kvtoolignore
    HIDDEN = "hidden"  # its name begins with a dot
    LOCK = "lock"  # written by a package manager, or an editor's copy of another
    SECRET = "secret"  # its name says that it holds keys or passwords
    UNINSTALLED = "uninstalled"  # what reads it is not installed
    SPECIAL = "special"  # a FIFO, a socket, a device
    GONE = "gone"  # there when the folder was listed, and not any more


@dataclass(frozen=True, slots=True)
class Skipped:
    path: str
    kind: Skip
    reason: str

    @property
    def what(self) -> str:
        return kind_of(PurePosixPath(self.path)) if self.kind is Skip.UNSUPPORTED else self.kind.value


@dataclass(frozen=True, slots=True)
class Walked:
    """Result, sorted by path. Paths that are `missing` existed once; `bare` folders have no file to read."""

    files: list[FoundFile]
    failures: list[Failure] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)
    missing: list[Path] = field(default_factory=list)
    bare: list[Path] = field(default_factory=list)

    def part(self, shard: Shard) -> Walked:
        return replace(
            self,
            files=[file for file in self.files if shard.holds(file.name)],
            failures=[failure for failure in self.failures if shard.holds(failure.path)],
            skipped=[skipped for skipped in self.skipped if shard.holds(skipped.path)],
        )


def find_files(
    paths: Sequence[Path],
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    remembered: Callable[[Path], bool] = lambda path: False,
    leave_out: Sequence[Path] = (),
    reading: Reading | None = None,
    ignore: bool = True,
    roots: Sequence[Path] = (),
) -> Walked:
    """Find the files below `paths`, sorted, each real file once. In a folder, links to folders are not followed, and
    links to files only inside of it. A file there is `guessed` if no reader knows its name and no `include` pattern
    spells out its ending. `remembered` tells whether a path that does not exist was there once. With `roots`, only what
    they show to others is read. Raises UsageError for a path that does not exist."""
    if not paths:
        raise UsageError("no files or folders given", "name at least one file or folder to read")
    left_out = {os.path.realpath(path) for path in leave_out}
    search = _Search(tuple(include), tuple(exclude), remembered, left_out, reading or Reading(), ignore)
    search.roots = Roots(Path(os.path.realpath(root)) for root in roots) if roots else None
    for path in paths:
        search.take(path)
    return search.result()


def places(path: Path) -> tuple[Path, ...]:
    path = as_on_disk(path)
    return _absolute(path), Path(os.path.realpath(path))


@dataclass(slots=True)
class _Search:
    include: tuple[str, ...]
    exclude: tuple[str, ...]
    remembered: Callable[[Path], bool]
    left_out: set[str]  # real paths
    reading: Reading
    ignore: bool
    roots: Roots | None = None
    # real path → the way it was reached; a file that is no link wins over a link to it
    found: dict[str, FoundFile] = field(default_factory=dict)
    failures: dict[str, Failure] = field(default_factory=dict)
    skipped: dict[str, Skipped] = field(default_factory=dict)
    missing: list[Path] = field(default_factory=list)
    bare: list[Path] = field(default_factory=list)

    def take(self, given: Path) -> None:
        path = _absolute(as_on_disk(given))
        try:
            status = path.stat()
        except (FileNotFoundError, NotADirectoryError) as error:
            if not self.remembered(given):
                raise UsageError(f"no such file or folder: {given}", "check the spelling of the path") from error
            self.missing.append(given)
            return
        except OSError as error:
            raise UsageError(f"cannot look at {given}: {_reason(error)}", "check links and permissions") from error
        except ValueError as error:
            raise UsageError(f"not a path: {given!r}", "a path cannot contain NUL") from error
        if not self._is_shown(path):
            self._skip(path, Skip.IGNORED, _NOT_SHOWN)
        elif stat.S_ISDIR(status.st_mode):
            self._take_folder(path)
        else:
            self._take_file(path, status)

    def result(self) -> Walked:
        return Walked(
            sorted(self.found.values(), key=lambda file: file.name),
            sorted(self.failures.values(), key=lambda failure: failure.path),
            sorted(self.skipped.values(), key=lambda skipped: skipped.path),
            self.missing,
            self.bare,
        )

    def _take_folder(self, folder: Path) -> None:
        root = folder.resolve()
        taken = 0
        spelled = {PurePosixPath(glob).suffix for glob in self.include} - {""}
        for path in self._walk(root):
            try:
                is_guessed = not self.reading.takes(path) and path.suffix not in spelled
                taken += self._take_file(path, path.stat(), is_guessed)
            except FileNotFoundError:
                self._skip(path, Skip.GONE, "gone since the folder was listed")
            except OSError as error:
                self._fail(path, _reason(error))
        if not taken and str(root) not in self.failures:
            self.bare.append(root)

    def _take_file(self, path: Path, status: os.stat_result, guessed: bool = False) -> bool:
        if not stat.S_ISREG(status.st_mode):
            what = _TYPES.get(stat.S_IFMT(status.st_mode), "a special file")
            self._skip(path, Skip.SPECIAL, f"{what}, not a file")
            return False
        if self.reading.refuses(path):
            self._skip(path, Skip.UNSUPPORTED, _not_text(path))
            return False
        file = FoundFile(str(path), status.st_size, status.st_mtime_ns, status.st_ctime_ns, guessed)
        real = os.path.realpath(path)
        if real in self.left_out:
            return False
        known = self.found.get(real)
        if known is None or (file.name != real, file.name) < (known.name != real, known.name):
            self.found[file.name if file.name == real else real] = file  # mostly one string serves as both
        return True

    def _walk(self, root: Path) -> Iterator[Path]:
        todo = [(root, Rules.above(root) if self.ignore else Rules())]
        while todo:
            folder, rules = todo.pop()
            try:
                with os.scandir(folder) as listing:
                    entries = sorted(listing, key=lambda entry: entry.name)
            except OSError as error:
                self._fail(folder, _reason(error))
                continue
            rules = rules.below(folder) if self.ignore else rules
            for entry in entries:
                path = folder / entry.name
                below = path.relative_to(root).as_posix()
                if _matches(below, self.exclude) or self._left_out(entry, path, rules):
                    continue
                if entry.is_dir(follow_symlinks=False):
                    todo.append((path, rules))
                elif self._wanted(entry, path, below, root):
                    yield path

    def _left_out(self, entry: os.DirEntry[str], path: Path, rules: Rules) -> bool:
        name, is_folder = entry.name, entry.is_dir(follow_symlinks=False)
        target = os.path.realpath(path) if entry.is_symlink() else name
        if not is_folder and (is_secret(name) or is_secret(os.path.basename(target))):
            self._skip(path, Skip.SECRET, "may hold keys or passwords: name it to have it read")
        elif is_hidden(name):
            if name not in OWN:
                self._skip(path, Skip.HIDDEN, "hidden: name it to have it read")
        elif self.ignore and rules.names(path, is_folder):
            self._skip(path, Skip.IGNORED, "named by an ignore file (--no-ignore takes it)")
        elif self.ignore and not is_folder and is_lock(name):
            self._skip(path, Skip.LOCK, "a lock file, or a copy that an editor left (--no-ignore takes it)")
        elif not self._is_shown(path):
            self._skip(path, Skip.IGNORED, _NOT_SHOWN)
        else:
            return False
        return True

    def _is_shown(self, path: Path) -> bool:
        return self.roots is None or self.roots.show(Path(os.path.realpath(path)))

    def _wanted(self, entry: os.DirEntry[str], path: Path, below: str, root: Path) -> bool:
        is_link, is_included = entry.is_symlink(), not self.include or _matches(below, self.include)
        if not is_link and not entry.is_file(follow_symlinks=False):
            return is_included
        try:
            is_folder = is_link and stat.S_ISDIR(path.stat().st_mode)
        except OSError as error:
            if is_included:
                self._skip(path, Skip.LINK, _reason(error))
            return False
        if not is_folder and not is_included:
            return False
        if not is_folder and self.reading.refuses(path):
            self._skip(path, Skip.UNSUPPORTED, _not_text(path))
        elif is_link and not Path(os.path.realpath(path)).is_relative_to(root):
            self._skip(path, Skip.LINK, "a link that leads out of the folder is not followed")
        else:
            return not is_folder  # a folder inside is walked under its own name
        return False

    def _fail(self, path: Path, error: str) -> None:
        self.failures.setdefault(str(path), Failure(str(path), error))

    def _skip(self, path: Path, kind: Skip, reason: str) -> None:
        self.skipped.setdefault(str(path), Skipped(str(path), kind, reason))


def _absolute(path: Path) -> Path:
    """Make a path absolute: links in the folder part are resolved, the last name is kept."""
    if path.name in ("", ".."):
        return Path(os.path.realpath(path))
    return Path(os.path.realpath(path.parent)) / path.name


def _matches(below: str, patterns: tuple[str, ...]) -> bool:
    name = below.rpartition("/")[2]
    globs = [pattern.rstrip("/").removeprefix("./") for pattern in patterns]
    return any(fnmatchcase(below, glob) or fnmatchcase(name, glob) for glob in globs)


def _not_text(path: Path) -> str:
    why = {
        "image": "images are not read, with any model: text only",
        "archive": "archives are not read: unpack it, and name the folder",
    }
    return why.get(kind_of(path), f"{path.suffix} files are not read: convert it to text first")


def _reason(error: OSError) -> str:
    if error.errno == errno.ELOOP:
        return "a link that leads to itself"
    if error.errno == errno.ENOENT:
        return "a broken link, or the file has gone"
    return (error.strerror or type(error).__name__).lower()
