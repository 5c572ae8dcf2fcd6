"""LLVM IR that calls a function of this folder for one share of the rows after the other, until none is left."""

from __future__ import annotations

from kvtool.core.native.builder import FunctionBuilder, WorkQueue
from kvtool.core.native.job import Job

# `next` is the first row that nobody has taken yet, `share` how many are taken at a time.
JOB = Job(
    **{"next": "i64", "share": "i64", "last": "i64", "columns": "i64"},
    **dict.fromkeys(("data", "scales", "mins", "x", "out"), "ptr"),
)


def share(function: FunctionBuilder) -> FunctionBuilder:
    """The function `void share_FUNCTION(ptr job)`: any number of threads may run it with the same job."""
    k = FunctionBuilder(f"share_{function.name}", function.isa, "ptr job")
    job = JOB.load(k, k.args.job)
    with WorkQueue(k, k.args.job, job.share, job.last) as queue:
        own = {"first": queue.first, "last": queue.last}
        k.do(function.name, *(own[name] if name in own else job[name] for name in function.args.names))
    return k
