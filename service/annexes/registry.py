"""The list of annexes. To take one out, delete its folder and its two lines here."""

from __future__ import annotations

from typing import Final

from service.annex import Annex
from service.annexes.access import ACCESS
from service.annexes.alerts import ALERTS
from service.annexes.drills import DRILLS
from service.annexes.nodes import NODES
from service.annexes.ray_dashboard import RAY_DASHBOARD

ANNEXES: Final[tuple[Annex, ...]] = (ACCESS, RAY_DASHBOARD, DRILLS, NODES, ALERTS)
"""Where several fill one place of a page, they follow each other in this order."""
