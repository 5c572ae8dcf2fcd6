"""Names of the fusion modes, known without importing torch (a test holds them against the registry)."""

from __future__ import annotations

MODES = ("full", "prefix", "reuse", "epic", "blend", "infoflow", "union")
AUTO = "auto"  # no mode of its own: the controller picks one of the others
FUSIONS = (*MODES, AUTO)  # what --fusion takes
