"""What is asked of the ranks of a run: drills, profiles, stacks; and replays of its steps."""

from __future__ import annotations

from typing import Final

from service.annex import Annex
from service.annexes.drills import pages, replays, routes

DRILLS: Final = Annex(
    "drills",
    routers=(routes.router, routes.profiles_router, routes.stacks_router, replays.router),
    pages=(pages.router,),
    package="service.annexes.drills",
    slots={
        "run_figures": "run_replays.html",
        "run_controls": "run_controls.html",
        "run_reports": "run_reports.html",
    },
    run_values=pages.run_values,
    spec_checks={"replay": replays.check_replay},
)
