"""Variables that choose how the same is computed: an unknown value is reported before anything is loaded."""

from __future__ import annotations

import pytest

from kvtool.core.common import switches
from kvtool.core.common.switches import ALLOWED, SWITCHES, asked
from kvtool.core.errors import UsageError
from kvtool.core.kernels.attention.dispatch import BACKENDS
from kvtool.core.options.resolve import RESERVED_ENV
from tests.cli.working import kvtool


@pytest.mark.parametrize("variable", SWITCHES)
def test_what_is_allowed_is_taken_and_nothing_else(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for value in ("", *ALLOWED[variable]):
        monkeypatch.setenv(variable, value)
        assert asked(variable) == value
    monkeypatch.setenv(variable, "nativ")
    with pytest.raises(UsageError) as caught:
        asked(variable)
    assert all(name in caught.value.message for name in ALLOWED[variable])
    assert caught.value.hint


def test_the_lists_are_those_of_who_follows_them() -> None:
    assert ALLOWED[switches.ATTENTION] == tuple(backend.name for backend in BACKENDS)
    assert {*SWITCHES} < {*RESERVED_ENV}


@pytest.mark.parametrize("variable", [*SWITCHES, "KVTOOL_CPU_FEATURES", "KVTOOL_DTYPE"])
@pytest.mark.parametrize("command", ["query Who?", "ingest .", "inspect sparsity Who?"])
def test_a_typo_is_said_first(variable: str, command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, "avx521")
    done = kvtool(*command.split(), "--store", "/nowhere").failed(2, variable, "avx521")
    assert done.err.count("hint: ") == 1
