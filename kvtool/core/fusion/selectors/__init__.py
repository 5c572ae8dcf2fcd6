"""The registry of fusion modes: a new one is a file here and a line below."""

from __future__ import annotations

from kvtool.core.fusion.selectors.base import Selector
from kvtool.core.fusion.selectors.blend import Blend
from kvtool.core.fusion.selectors.epic import Epic
from kvtool.core.fusion.selectors.full import Full
from kvtool.core.fusion.selectors.infoflow import Infoflow
from kvtool.core.fusion.selectors.prefix import Prefix
from kvtool.core.fusion.selectors.reuse import Reuse
from kvtool.core.fusion.selectors.union import Union

SELECTORS: dict[str, type[Selector]] = {kind.name: kind for kind in (Full, Prefix, Reuse, Epic, Blend, Infoflow, Union)}

__all__ = ["SELECTORS", "Blend", "Epic", "Full", "Infoflow", "Prefix", "Reuse", "Selector", "Union"]
