"""How long a new process waits for its first decoded record."""

from __future__ import annotations

import statistics
import subprocess

from kvtool.core.common.children import python

# From before llvmlite is imported: its import, LLVM's start, the kernel's compilation, the lookup tables, one stream of
# 16 x 256 symbols to bfloat16. Not in it: the start of Python, numpy.
_PROGRAM = """
import time
import numpy as np
from kvtool.core.codec.rans import coder, reference
set = reference.TableSet(np.full((32, 256), 8, np.uint16))
symbols = np.random.default_rng(0).integers(0, 256, (16, 256), np.uint8)
ids = (np.arange(256) % 32).astype(np.uint16)
stream = reference.encode(symbols, ids, set)
set = reference.TableSet(set.frequencies)
out = np.empty((16, 256), np.uint16)
started = time.perf_counter()
of = reference.in_order(ids, set)
coder.decode(coder.Decoding([stream], of, [0], [16], out, "bfloat16"))
print((time.perf_counter() - started) * 1e3)
"""
INCLUDES = (
    "import of llvmlite, start of LLVM, compilation, lookup tables, one stream; without the start of Python, numpy"
)


def first_call_ms(repeat: int) -> float:
    """Milliseconds until the first stream is decoded, the median of new processes after one that is not counted."""
    return statistics.median([_once() for _ in range(repeat + 1)][1:])


def _once() -> float:
    done = subprocess.run(python(_PROGRAM), capture_output=True, text=True, timeout=300, check=True)
    return float(done.stdout)
