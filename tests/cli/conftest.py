import io
from collections.abc import Callable
from typing import Any

import pytest

from kvtool.cli.out import Out


@pytest.fixture(params=[(), ("--json",)], ids=["human", "json"])
def form(request: pytest.FixtureRequest) -> Any:
    """Errors look alike in both forms, plus an object on stdout in the second (`Done.failed`)."""
    return request.param


class Terminal(io.TextIOWrapper):
    """A stream with an encoding, that says whether it is a terminal."""

    def __init__(self, encoding: str = "utf-8", tty: bool = False) -> None:
        super().__init__(io.BytesIO(), encoding=encoding, newline="\n", write_through=True)
        self.tty = tty

    def isatty(self) -> bool:
        return self.tty

    @property
    def text(self) -> str:
        return self.buffer.getvalue().decode(self.encoding)  # type: ignore[attr-defined]


Make = Callable[..., tuple[Out, Terminal, Terminal]]


@pytest.fixture
def make() -> Make:
    def build(mode: Any = "human", verbosity: int = 0, encoding: str = "utf-8", tty: bool = False) -> Any:
        stdout, stderr = Terminal(encoding, tty), Terminal(encoding, tty)
        return Out(mode, verbosity, stdout, stderr), stdout, stderr

    return build
