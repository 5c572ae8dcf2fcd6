"""Two users of one machine: one can neither read, change nor replace the files of the other.

The tests make two users of the system and so need root; elsewhere they are skipped.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from kvtool.core.cache.layout import TEMPORARY, atomic_write
from kvtool.core.cache.store import Store
from kvtool.core.checkpoint.files import file_digest
from kvtool.core.evaluate.measures import keep_audit
from kvtool.core.remote.catalogue_io import CatalogueCache
from kvtool.core.retrieval.index import index_of
from kvtool.serve import unix_socket
from tests.chaos.children import in_child
from tests.evaluate.test_audits import made
from tests.stores import make_store

pytestmark = pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() != 0 or shutil.which("useradd") is None,
    reason="two users are made, which only root can",
)
NAMES = ("kvtool-test-a", "kvtool-test-b")


class User(NamedTuple):
    """A user of the system; `home` is its own folder, `common` is open to all; `python` is one that it may run."""

    name: str
    uid: int
    gid: int
    home: Path
    common: Path
    python: str

    def does(self, work: Callable[[], Any]) -> Any:
        """Do something as this user, in a process of its own; what is raised there is raised here by name."""

        def work_as_user() -> str:
            os.setgroups([])
            os.setgid(self.gid)
            os.setuid(self.uid)
            os.umask(0o022)
            os.environ |= {"HOME": str(self.home), "KVTOOL_HOME": str(self.home / "kvtool")}
            return repr(work())

        ended = in_child(work_as_user)
        if ended.trouble:
            error = ended.trouble.strip().rpartition("\n")[2]
            raise PermissionError(error) if "Permission" in error else RuntimeError(error)
        return ended.value

    def runs(self, *words: object, folder: Path | None = None, **variables: str) -> subprocess.CompletedProcess[str]:
        environment = {
            "PATH": os.environ["PATH"],
            "HOME": str(self.home),
            "KVTOOL_HOME": str(self.home / "kvtool"),
            "PYTHONPATH": os.pathsep.join(str(Path(place).resolve()) for place in sys.path if place),
            "HF_HUB_OFFLINE": "1",
            **variables,
        }
        return subprocess.run(
            [self.python, "-m", "kvtool", *map(str, words)],
            user=self.uid, group=self.gid, extra_groups=[], umask=0o022, cwd=folder or self.home, env=environment,
            capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip


def _is_run(user: User) -> bool:
    with contextlib.suppress(OSError):
        return user.runs("--version").returncode == 0
    return False


@pytest.fixture(scope="module")
def users() -> Iterator[tuple[User, User]]:
    """Two of them, with homes that others may enter, and a folder like /tmp."""
    with tempfile.TemporaryDirectory(prefix="kvtool-users-", dir="/var/tmp") as place:
        top = Path(place)
        top.chmod(0o755)
        common = top / "common"
        common.mkdir()
        common.chmod(0o1777)
        made = []
        try:
            for name in NAMES:
                subprocess.run(["useradd", "--no-create-home", "--shell", "/bin/false", name], check=False)
                entry = pwd.getpwnam(name)
                home = top / name
                home.mkdir()
                os.chown(home, entry.pw_uid, entry.pw_gid)
                home.chmod(0o755)
                made.append(User(name, entry.pw_uid, entry.pw_gid, home, common, ""))
            # The system's, too: only root can run one below root's home.
            known = (sys.executable, f"/usr/bin/python{sys.version_info.major}.{sys.version_info.minor}")
            pythons = [python for python in known if _is_run(made[0]._replace(python=python))]
            if not pythons:
                pytest.skip("other users cannot read this Python, and there is no other one of its version")
            yield made[0]._replace(python=pythons[0]), made[1]._replace(python=pythons[0])
        finally:
            for name in NAMES:
                subprocess.run(["userdel", name], check=False, capture_output=True)


@pytest.fixture
def kept(users: tuple[User, User]) -> Path:
    first = users[0]
    folder = first.home / "kept"
    shutil.rmtree(folder, ignore_errors=True)
    first.does(lambda: _fill(folder))
    return folder


def _fill(folder: Path) -> None:
    folder.mkdir()
    make_store(folder / "store")
    with Store.open(folder / "store") as store:
        store.write_side("gate/verdict.json", {"passed": True})
        keep_audit(store, "model", made(question="what nobody else shall read"))
        index_of(store)
    CatalogueCache("file:///nowhere").put("ab" * 16, b"a copy of a catalogue")
    file_digest(Path(__file__))


def _others(path: Path, uid: int) -> list[str]:
    """What another user could read, write, or list below a folder."""
    found = []
    for each in (path, *path.rglob("*")):
        status = each.lstat()
        rights = stat.S_IMODE(status.st_mode) & 0o077
        assert status.st_uid == uid, each
        if rights and not stat.S_ISLNK(status.st_mode):
            found.append(f"{oct(rights)} {each}")
    return found


@pytest.mark.slow
def test_files_are_closed_to_other_users(users: tuple[User, User], kept: Path) -> None:
    """Only their user can read files, under a umask that would let others read them, too."""
    first, second = users
    assert _others(kept / "store", first.uid) == []
    assert [one for one in _others(first.home / "kvtool", first.uid) if not one.startswith("0o55 ")] == []
    (data,) = (kept / "store").rglob("data.mdb")
    with pytest.raises(PermissionError):
        second.does(lambda: os.listdir(kept / "store"))
    for path in (kept / "store" / "store.json", data):
        for ask in (Path.read_bytes, Path.touch, os.unlink):
            with pytest.raises(PermissionError):
                second.does(lambda ask=ask, path=path: ask(path))  # type: ignore[misc]
    done = second.runs("store", "ls", "--store", kept / "store")
    assert done.returncode not in (0, 3)
    assert "Permission denied" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_store_opened_to_others_is_read_and_not_written(users: tuple[User, User], kept: Path) -> None:
    """Its owner has opened it on purpose: the other user reads it, and nothing of it changes."""
    first, second = users
    for path in (kept / "store", *(kept / "store").rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    before = {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in (kept / "store").rglob("*")}
    done = second.runs("store", "ls", "--store", kept / "store")
    assert done.returncode in (0, 1), done.stderr
    if done.returncode:
        assert "hint: " in done.stderr
    else:
        assert "f0" in done.stdout
    refused = second.runs("store", "rm", "f0", "--store", kept / "store", "--yes")
    assert refused.returncode not in (0, 3)
    assert "Traceback" not in refused.stderr
    assert {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in (kept / "store").rglob("*")} == before
    with Store.open(kept / "store") as store:
        assert store.sources() == ["f0", "f1"]
    assert first.runs("store", "ls", "--store", kept / "store").returncode == 0


def test_links_at_temporary_names_are_not_followed(users: tuple[User, User]) -> None:
    """In a folder where everybody writes, links under foreseeable names lead nowhere."""
    first, second = users
    folder, prize = first.common / "shared", first.home / "prize"
    prize.write_text("untouched")
    prize.chmod(0o666)
    os.chown(prize, first.uid, first.gid)
    second.does(lambda: (folder.mkdir(), folder.chmod(0o1777)))

    def plant() -> None:
        for number in range(0, 40_000, 7):
            (folder / f"{TEMPORARY}{number}").symlink_to(prize)

    second.does(plant)
    first.does(lambda: [atomic_write(folder / f"file{number}", b"mine") for number in range(3)])
    own = sorted(path.name for path in folder.iterdir() if path.lstat().st_uid == first.uid)
    assert own == ["file0", "file1", "file2"]
    assert prize.read_text() == "untouched"


@pytest.mark.slow
@pytest.mark.parametrize("planted", ["symlink", "fifo", "folder", "file"])
def test_planted_store_path_is_refused(users: tuple[User, User], planted: str) -> None:
    """It is refused; nothing hangs, and nothing of the first user is written."""
    first, second = users
    place, prize = first.common / f"planted-{planted}", first.home / "documents"
    first.does(lambda: (prize.mkdir(exist_ok=True), (prize / "notes.md").write_text("mine")))
    plant: dict[str, Callable[[], object]] = {
        "symlink": lambda: place.symlink_to(prize),
        "fifo": lambda: os.mkfifo(place, 0o666),
        "folder": lambda: (place.mkdir(), (place / "store.json").symlink_to(prize / "notes.md"), place.chmod(0o777)),
        "file": lambda: (place.write_text("x"), place.chmod(0o666)),
    }
    second.does(plant[planted])
    for words in (("store", "ls"), ("verify",)):
        done = first.runs(*words, "--store", place)
        assert done.returncode not in (0, 3), done.stdout
        assert "Traceback" not in done.stderr
    assert {path.name for path in prize.iterdir()} == {"notes.md"}
    assert (prize / "notes.md").read_text() == "mine"


def test_settings_file_of_another_user_starts_no_program(users: tuple[User, User]) -> None:
    """A working folder may be anybody's: it may name a store, and `kvtool config` says so; it runs nothing."""
    first, second = users
    folder = first.common / "work"
    second.does(
        lambda: (folder.mkdir(), (folder / "kvtool.toml").write_text("[readers]\ntxt = 'touch /tmp/owned {}'\n"))
    )
    done = first.runs("config", "show", folder=folder)
    assert done.returncode == 2
    assert "is not taken from a working folder" in done.stderr
    second.does(lambda: ((folder / "kvtool.toml").unlink(), os.mkfifo(folder / "kvtool.toml", 0o666)))
    done = first.runs("config", "show", folder=folder)  # nobody writes to it: to read it would be to wait for ever
    assert done.returncode == 2
    assert "kvtool.toml" in done.stderr


# ---- the socket of a server --------------------------------------------------------------------------------------


def test_socket_of_another_user_is_not_used(users: tuple[User, User]) -> None:
    """A process that listens at the path would receive the questions."""
    first, second = users
    path = first.common / "store.sock"
    listening = socket.socket(socket.AF_UNIX)
    try:
        listening.bind(str(path))
        listening.listen()
        os.chown(path, second.uid, second.gid)
        path.chmod(0o666)
        assert first.does(lambda: unix_socket.connect(path)) == "None"
        with pytest.raises(RuntimeError):  # nor is it taken away
            first.does(lambda: unix_socket.listen(path))
        os.chown(path, first.uid, first.gid)  # as if it had been changed for another one when it had been looked at
        assert first.does(lambda: unix_socket.connect(path)) == "None"
    finally:
        listening.close()
        path.unlink(missing_ok=True)


def test_server_socket_is_closed_to_other_users(users: tuple[User, User]) -> None:
    """Not even while it is being made; another user cannot take it away where the folder is sticky."""
    first, second = users
    path = first.common / "own.sock"

    def serve() -> None:
        bound = unix_socket.listen(path)
        assert bound is not None
        assert stat.S_IMODE(path.stat().st_mode) == 0o600

        found = unix_socket.connect(path)
        assert found is not None
        found.close()

    first.does(serve)
    with pytest.raises(PermissionError):
        second.does(lambda: socket.socket(socket.AF_UNIX).connect(str(path)))
    with pytest.raises(PermissionError):
        second.does(path.unlink)
