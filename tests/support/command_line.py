"""The command line as a user types it, and runs that it shows."""

from __future__ import annotations

import asyncio
from typing import Any

import typer
from typer.testing import CliRunner, Result

from everstep.cli.main import app
from everstep.options.serve import FLAGS
from everstep.wire.events import EventKind
from tests.support.api_service import ApiService
from tests.support.page_text import fail


def run_cli(*arguments: str, stdin: str | None = None) -> Result:
    return CliRunner().invoke(
        app, [str(argument) for argument in arguments], input=stdin, catch_exceptions=False
    )


def serve_flags(*arguments: str) -> dict[str, Any]:
    """The flags that ``everstep serve`` is given in these arguments."""
    command = typer.main.get_command(app).commands["serve"]  # type: ignore[attr-defined]
    found = command.make_context("serve", list(arguments)).params
    return {name: value for name, value in found.items() if name in FLAGS and value}


async def everstep(*arguments: object, stdin: str | None = None) -> Result:
    return await asyncio.to_thread(run_cli, *map(str, arguments), stdin=stdin)


async def finish(
    api: ApiService, outcome: str = "succeeded", reason: dict[str, str] | None = None, **fields: Any
) -> str:
    """A run with a history: steps, an evaluation, a failure, an end."""
    run_id, journal = await api.running(**fields)
    events = [
        journal.steps(2, loss=0.25),
        journal.event(EventKind.EVALUATED, step=2, epoch=0, metrics={"accuracy": 0.97}),
        fail(
            journal,
            verdict="worker_lost",
            node_id="node-2-long-id",
            step=7,
            exception="Traceback\nActorDiedError: killed by signal 9",
            action="restarted from step 7",
            detect_s=0.2,
            recovery_s=1.25,
        ),
        journal.event(EventKind.FINISHED, outcome=outcome, reason=reason, step=2),
    ]
    api.apply(run_id, events)
    return run_id
