"""Ray's dashboard under this service's log-in."""

from __future__ import annotations

from typing import Final

from service.annex import Annex
from service.annexes.ray_dashboard import pages
from service.annexes.ray_dashboard.relay import RayDashboard
from service.cluster.ray_jobs import RayJobs
from service.parts import ServiceParts


def opened(parts: ServiceParts) -> RayDashboard:
    """Return the way to Ray's dashboard."""
    return RayDashboard(parts[RayJobs].endpoint)


RAY_DASHBOARD: Final = Annex(
    "ray_dashboard",
    pages=(pages.router,),
    package="service.annexes.ray_dashboard",
    slots={
        "run_links": "ray_job_link.html",
        "cluster_figures": "ray_dashboard_link.html",
    },
    relays_ray=True,
    opened=opened,
)
