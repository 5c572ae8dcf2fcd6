"""A process of its own for one measurement, and what it answers. No torch."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping
from typing import Any

from kvtool.core.common.children import python
from kvtool.core.errors import DamagedError, KvtoolError, ModelError, NoSpaceError, UsageError

_PROGRAM = "from kvtool.lab.bench.peers.child import main; main()"
_KINDS = {kind.exit_code: kind for kind in (UsageError, ModelError, NoSpaceError, DamagedError)}
_SAID = 500  # characters of what a dead process said last
# How many threads the libraries in the processes make, where nobody tells them otherwise.
_POOLS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


def answer_of(job: str, told: Mapping[str, Any], threads: int) -> dict[str, Any]:
    """Run a job of `child.py`, and read its answer.

    Raises
    ------
    KvtoolError : what it was refused with, or that it died.
    """
    environment = os.environ | dict.fromkeys(_POOLS, str(threads))
    done = subprocess.run(
        python(_PROGRAM, job, json.dumps(told)), capture_output=True, text=True, env=environment, check=False
    )
    try:
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError) as error:
        said = (done.stderr.strip().splitlines() or ["it said nothing"])[-1][:_SAID]
        hint = "the system ended it: free some memory" if done.returncode < 0 else "what was measured stays in --resume"
        raise KvtoolError(f"the process to {job} ended with {done.returncode}: {said}", hint) from error
    if refusal := found.get("error"):
        kind = _KINDS.get(refusal["exit_code"], KvtoolError)
        raise kind(refusal["message"], refusal["hint"])
    return found
