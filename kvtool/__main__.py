"""The process of the command line: `kvtool`, and `python -m kvtool`."""

import sys


def run() -> None:
    """Run kvtool. A Ctrl-C while its code is still being read is an interruption like any other."""
    try:
        from kvtool.cli.app import run as started
    except KeyboardInterrupt:
        sys.stderr.write("error: interrupted\n")
        sys.exit(130)
    started()


if __name__ == "__main__":
    run()
