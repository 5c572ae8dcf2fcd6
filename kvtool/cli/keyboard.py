"""What is typed while nothing is asked for."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def typed_ahead() -> Iterator[None]:
    """Show nothing of what is typed meanwhile: it would stand in the middle of an answer. The next prompt has it.

    Keys that send signals go on doing so. Where stdin is no terminal that can be told so, nothing is changed.
    """
    try:
        import termios

        keyboard = sys.stdin.fileno()
        before = termios.tcgetattr(keyboard)
    except (ImportError, AttributeError, OSError, ValueError, termios.error):  # Windows; no stdin; a pipe
        yield
        return
    flags = list(before)
    flags[3] &= ~termios.ECHO  # local modes
    termios.tcsetattr(keyboard, termios.TCSANOW, flags)
    try:
        yield
    finally:
        termios.tcsetattr(keyboard, termios.TCSANOW, before)
