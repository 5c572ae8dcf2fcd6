"""The one package that every command shares: never prints, never reads sys.argv."""

__version__ = "0.1.0"
