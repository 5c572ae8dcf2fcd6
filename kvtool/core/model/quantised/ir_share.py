"""LLVM IR that calls a function of this folder for one share of the rows after the other, until none is left."""

from __future__ import annotations

from kvtool.core.native.ir import Body, Shares

# A job's fields, 8 bytes each: `next` is the first row that nobody has taken yet, `share` how many are taken at a time.
FIELDS = ("next", "share", "last", "columns", "data", "scales", "mins", "x", "out")


def share(function: str) -> str:
    """The function `void share_FUNCTION(ptr job)`: any number of threads may run it with the same job."""
    body = Body()
    have = {name: body.load("i64", "%job", place) for place, name in enumerate(FIELDS[1:], 1)}
    pointers = [body(f"inttoptr i64 {have[name]} to ptr") for name in ("data", "scales", "mins", "x", "out")]
    if function.startswith("unpack"):  # which has no x
        del pointers[3]
    shares = Shares(body, have["share"], have["last"])
    arguments = ", ".join(f"ptr {pointer}" for pointer in pointers)
    body.do(f"call void @{function}({arguments}, i64 {shares.first}, i64 {shares.last}, i64 {have['columns']})")
    shares.close()
    body.do("ret void")
    return f"define void @share_{function}(ptr %job) {{\n{body.text()}\n}}\n"


def declarations() -> str:
    """What a module declares, once, that has any of these functions."""
    return "declare i64 @llvm.smin.i64(i64, i64)\n"
