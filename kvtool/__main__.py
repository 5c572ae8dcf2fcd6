"""`python -m kvtool`."""

from kvtool.cli.app import run

if __name__ == "__main__":
    run()
