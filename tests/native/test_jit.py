"""Machine code is made once on a machine, and never taken from where somebody else could have put it."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from unittest.mock import Mock

import pytest

from kvtool.core.common.files import cache_dir
from kvtool.core.native import jit
from kvtool.core.native.isa import ISAS, runnable
from kvtool.core.native.jit import compiled, keep_code, kept_code, key_of
from tests.spying import calls_of

KEY = key_of("a", "b")


def source(number: int) -> str:
    return f"define i64 @run() {{\n  ret i64 {number}\n}}\n"


def answer(number: int) -> int:
    (function,) = compiled(source(number), ISAS[runnable()[0]], "run")
    found: int = ctypes.CFUNCTYPE(ctypes.c_int64)(function.address)()
    return found


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    return calls_of(monkeypatch, jit, "keep_code", lambda key, code: key)


def files() -> list[Path]:
    return sorted((cache_dir() / "native").iterdir())


def test_code_is_made_once(made: list[str]) -> None:
    assert [answer(41), answer(41), answer(42)] == [41, 41, 42]
    assert len(made) == 2
    assert [path.name for path in files()] == sorted(made)


def test_another_instruction_set_has_code_of_its_own(made: list[str]) -> None:
    for name in runnable():
        compiled(source(7), ISAS[name], "run")
    assert len(set(made)) == len(runnable())


@pytest.mark.parametrize("where", [0, 31, 32, -1])
def test_damaged_code_is_made_anew(where: int, made: list[str]) -> None:
    assert answer(5) == 5
    (path,) = files()
    whole = bytearray(path.read_bytes())
    whole[where] ^= 1
    path.write_bytes(whole)
    assert answer(5) == 5
    assert len(made) == 2
    path.write_bytes(b"")
    assert answer(5) == 5
    assert len(made) == 3


def test_code_of_another_name_is_not_taken() -> None:
    keep_code(KEY, b"code")
    (path,) = files()
    other = key_of("ab")
    path.rename(path.with_name(other))
    assert kept_code(other) is None


def test_names_tell_their_parts_apart() -> None:
    assert len({key_of("a", "b"), key_of("ab"), key_of("", "ab"), key_of("a", "b", "")}) == 4


@pytest.mark.parametrize("mode", [0o770, 0o702])
def test_a_folder_that_others_can_write_to_is_left_alone(mode: int) -> None:
    keep_code(KEY, b"code")
    assert kept_code(KEY) == b"code"
    folder = cache_dir() / "native"
    folder.chmod(mode)
    assert kept_code(KEY) is None
    keep_code(key_of("c"), b"more")
    assert len(files()) == 1


def test_what_belongs_to_somebody_else_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    keep_code(KEY, b"code")
    monkeypatch.setattr(jit.os, "geteuid", lambda: os.getuid() + 1)
    assert kept_code(KEY) is None


def test_links_are_not_followed(tmp_path: Path) -> None:
    keep_code(KEY, b"code")
    (path,) = files()
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    assert kept_code(KEY) is None
    folder = cache_dir() / "native"
    path.unlink()
    (tmp_path / "elsewhere").rename(path)
    folder.rename(tmp_path / "folder")
    folder.symlink_to(tmp_path / "folder")
    assert kept_code(KEY) is None


def test_only_the_user_can_read_it() -> None:
    keep_code(KEY, b"code")
    assert (cache_dir() / "native").stat().st_mode & 0o777 == 0o700
    assert files()[0].stat().st_mode & 0o777 == 0o600


def test_a_cache_that_cannot_be_written_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jit, "replace_file", Mock(side_effect=OSError(28, "no space left")))
    keep_code(KEY, b"code")
    assert kept_code(KEY) is None


def test_too_much_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jit, "_MOST_BYTES", 40)
    keep_code(KEY, bytes(9))
    assert kept_code(KEY) is None


def test_the_oldest_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jit, "_MOST_FILES", 4)
    keys = [key_of(str(number)) for number in range(6)]
    for age, key in enumerate(keys):
        keep_code(key, b"code")
        os.utime(cache_dir() / "native" / key, (age, age))
    assert [key for key in keys if kept_code(key)] == keys[2:]


def test_a_folder_in_the_cache_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jit, "_MOST_FILES", 2)
    keep_code(KEY, b"code")
    inside = cache_dir() / "native" / "folder"
    inside.mkdir()
    os.utime(inside, (1, 1))
    for number in range(4):
        keep_code(key_of(str(number)), b"code")
    assert kept_code(key_of("3"))


def test_a_pipe_is_not_waited_for() -> None:
    keep_code(KEY, b"code")
    (path,) = files()
    path.unlink()
    os.mkfifo(path)
    assert kept_code(KEY) is None
