"""Variables that choose how the same is computed: what each may say."""

from __future__ import annotations

import os

from kvtool.core.common.machine import cpu_features
from kvtool.core.errors import UsageError, did_you_mean

ATTENTION, STEPPER = SWITCHES = ("KVTOOL_ATTENTION", "KVTOOL_STEPPER")
ALLOWED: dict[str, tuple[str, ...]] = {
    ATTENTION: ("triton", "flash", "sdpa", "eager"),  # those of `kernels/attention/dispatch.py`
    STEPPER: ("native", "torch"),
}


def asked(variable: str) -> str:
    """Return the value of one of SWITCHES; "" if it is not set. Raises UsageError."""
    value = os.environ.get(variable, "")
    if value and value not in ALLOWED[variable]:
        hint = did_you_mean(value, ALLOWED[variable]) or f"unset {variable}, and the fastest is taken"
        raise UsageError(f"{variable}={value!r} is none of {', '.join(ALLOWED[variable])}", hint)
    return value


def check_switches() -> None:
    for variable in SWITCHES:
        asked(variable)
    cpu_features()
