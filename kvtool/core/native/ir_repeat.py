"""Loops that may run not at all, and loops along numbers whose count no register divides."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvtool.core.native.ir import Body, Loop

Carried = Sequence[tuple[str, str]]  # type and first value, each
# What is done with `width` numbers from an index on: takes the carried values, gives those of the next round.
Step = Callable[[int, str, Sequence[str]], Sequence[str]]


class Repeat:
    """A `Loop` that may run no round; then the carried values stay what they were."""

    def __init__(self, body: Body, count: str, carried: Carried = ()) -> None:
        self._body, self._carried, self._before, self._after = body, carried, body.block, body.new_block()
        some = body.new_block()
        body.do(f"br i1 {body(f'icmp ne i64 {count}, 0')}, label %{some}, label %{self._after}")
        body.enter(some)
        self._loop = Loop(body, count, carried)
        self.index, self.values = self._loop.index, self._loop.values

    def close(self, values: Sequence[str] = ()) -> list[str]:
        """End the loop; returns the carried values after it."""
        body = self._body
        left = self._loop.close(values)
        end = body.block
        body.do(f"br label %{self._after}")
        body.enter(self._after)
        return [
            body(f"phi {kind} [{first}, %{self._before}], [{value}, %{end}]")
            for (kind, first), value in zip(self._carried, left, strict=True)
        ]


def along(
    body: Body, count: str, width: int, step: Step, wide: Carried = (), single: Carried = ()
) -> tuple[list[str], list[str]]:
    """Go along `count` numbers, `width` (a power of two) at a time, then one by one.

    Parameters
    ----------
    wide, single : what the steps of `width` and those of one number carry.
    """
    whole = Repeat(body, body(f"udiv i64 {count}, {width}"), wide)
    after = whole.close(step(width, body(f"mul i64 {whole.index}, {width}"), whole.values))
    rest = body(f"and i64 {count}, {width - 1}")
    ones = Repeat(body, rest, single)
    first = body(f"sub i64 {count}, {rest}")
    return after, ones.close(step(1, body(f"add i64 {first}, {ones.index}"), ones.values))
