"""The tool's numbers on this machine, beside plain `transformers` in the same run."""
