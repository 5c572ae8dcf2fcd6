"""Checking a store in a child process: LMDB itself can die of a damaged index, and take its process with it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import asdict
from fractions import Fraction
from pathlib import Path

from kvtool.core.cache.damage import Damage, find_damage, of_store
from kvtool.core.cache.store import Store
from kvtool.core.common.children import python
from kvtool.core.errors import DamagedError, KvtoolError


def verify(store: Store, sample: Fraction | None = None) -> list[Damage]:
    """Check every digest and every reference of a store.

    Parameters
    ----------
    sample : check the KV of only this part of the chunks (the same part every time).
    """
    part = sample if sample is not None else Fraction(1)
    if not 0 < part <= 1:
        raise ValueError("a sample is a part of the whole, such as 1/7")
    command = python(_CHILD, os.fspath(store.path), str(part))
    ended = subprocess.run(command, capture_output=True, check=False, stdin=subprocess.DEVNULL)
    damages = [Damage(**json.loads(line)) for line in ended.stdout.decode().splitlines() if line.startswith("{")]
    if ended.returncode == 0:
        return damages
    if ended.returncode < 0:
        how = signal.Signals(-ended.returncode).name
        return [*damages, of_store(f"the index is damaged: walking it ended in {how}")]
    raise KvtoolError(f"verify failed: {ended.stderr.decode(errors='replace').strip()[-500:]}")


_CHILD = """
from kvtool.core.cache.verify import verify_here
verify_here(sys.argv[1], sys.argv[2])
"""


def verify_here(path: str, sample: str) -> None:
    """Body of the child: one JSON line on stdout for each damage. Nothing is printed by anybody else."""
    try:
        with Store.open(Path(path)) as store:
            for damage in find_damage(store, Fraction(sample)):
                sys.stdout.write(json.dumps(asdict(damage)) + "\n")
                sys.stdout.flush()
    except DamagedError as error:
        sys.stdout.write(json.dumps(asdict(of_store(error.message))) + "\n")
