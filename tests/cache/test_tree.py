"""Our own reading of LMDB's pages against LMDB's: the same keys and values, whatever was put and deleted before."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import lmdb
import pytest

from kvtool.core.cache.pages import meta_of
from kvtool.core.cache.tree import DataFile, Tree, damaged_pages
from kvtool.core.errors import DamagedError
from tests.chaos.injury import live_regions

PAGE = 4096


def workload(env: lmdb.Environment, dice: random.Random, rounds: int) -> Iterator[lmdb.Transaction]:
    """Read transactions, each after a commit of puts, overwrites and deletes of small and large values."""
    names: list[bytes] = []
    for _ in range(rounds):
        with env.begin(write=True) as transaction:
            for _ in range(dice.randrange(1, 400)):
                name = b"%c" % dice.choice(b"mfr") + dice.randbytes(dice.choice((1, 20, 30, 200)))
                size = dice.choice((0, 1, 30, 90, 500, 2017, 2018, 2019, 2100, 4080, 4081, 9000))
                transaction.put(name, dice.randbytes(size))
                names.append(name)
            start = dice.randrange(len(names))
            for name in names[start : start + dice.randrange(600)]:
                transaction.delete(name)
            for name in dice.sample(names, min(50, len(names))):
                if transaction.get(name) is not None:
                    transaction.put(name, dice.randbytes(dice.choice((3, 40, 3000, 8200))))
        with env.begin(buffers=True) as transaction:
            yield transaction


@pytest.mark.parametrize("seed", range(4))
def test_the_same_as_lmdb(seed: int, tmp_path: Path) -> None:
    env = lmdb.open(str(tmp_path), map_size=2**28, lib_version=0, sync=False)
    file, dice = DataFile(tmp_path / "data.mdb"), random.Random(seed)
    for transaction in workload(env, dice, 12):
        tree = file.tree(transaction.id(), PAGE)
        assert tree is not None
        there = {bytes(key): bytes(value) for key, value in transaction.cursor()}
        assert {key: bytes(tree.get(key) or b"") for key, _ in tree.items(b"")} == there
        assert {key: bytes(value) for key, value in tree.values(b"")} == there
        assert [*tree.items(b"f")] == [(key, len(there[key])) for key in sorted(there) if key.startswith(b"f")]
        for key in (b"", b"a", b"\xff" * 30, *(dice.randbytes(5) for _ in range(20))):
            assert (tree.get(key) is not None) == (tree.find(key) is not None) == (key in there)
            tree.touch(key)
        key = max(there, key=lambda one: len(there[one]))
        assert bytes(tree.get(key, 10) or b"") == there[key][:10]
        assert list(damaged_pages(tree)) == []
        assert list(tree.free_pages(full=False)) == []


def test_a_transaction_of_before(tmp_path: Path) -> None:
    """Read what an older reader holds as it was; once its meta page is gone that is reported, and LMDB begins anew."""
    env = lmdb.open(str(tmp_path), map_size=2**24, lib_version=0)
    file = DataFile(tmp_path / "data.mdb")
    with env.begin(write=True) as transaction:
        transaction.put(b"a", b"1")
    with env.begin() as old:
        tree = file.tree(old.id(), PAGE)
        for number in (b"2", b"3", b"4"):
            with env.begin(write=True) as transaction:
                transaction.put(b"a", number)
        assert tree is not None
        assert bytes(tree.get(b"a") or b"") == b"1"
        file._tree = None
        assert file.tree(old.id(), PAGE) is None


@pytest.mark.slow
def test_any_bit_of_a_page_of_the_tree(tmp_path: Path) -> None:
    """Flip bits of keys, sizes, pointers and headers: each is found. (LMDB dies of some of these.)"""
    env = lmdb.open(str(tmp_path), map_size=2**24, lib_version=0)
    sizes = {b"z%020d" % number: number % 7 * 500 for number in range(60)}
    with env.begin(write=True) as transaction:
        for key, size in sizes.items():
            transaction.put(key, bytes(size))
    whole = (tmp_path / "data.mdb").read_bytes()
    regions = [one for one in live_regions(tmp_path / "data.mdb") if one.kind in ("tree page", "page header")]
    dice = random.Random(1)
    for _ in range(1500):
        region = dice.choice(regions)
        at = dice.randrange(region.start, region.stop)
        changed = bytearray(whole)
        changed[at] ^= 1 << dice.randrange(8)
        assert at % PAGE in (8, 9) or _found(tmp_path / "changed", changed, sizes), (at % PAGE, region)  # never set


def _found(path: Path, changed: bytearray, sizes: dict[bytes, int]) -> bool:
    path.write_bytes(changed)
    file = DataFile(path)
    try:
        metas = [meta_of(file.read(at, PAGE)) for at in (0, PAGE)]
        tree = Tree(file, max(metas, key=lambda meta: meta.transaction))
        values = {key: tree.get(key) for key in sizes}
        return any(value is None or len(value) != sizes[key] for key, value in values.items()) or any(
            damaged_pages(tree)
        )
    except DamagedError:
        return True
    finally:
        file.close()
