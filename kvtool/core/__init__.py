"""The one package that every command shares: never prints, never reads sys.argv."""
