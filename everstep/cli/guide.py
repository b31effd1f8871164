"""What `--help` shows: the commands in groups, a newcomer's first, and an example of each."""

from __future__ import annotations

from typing import Any

import typer.core

GROUPS = {
    "Begin here": "demo serve init submit watch runs logs why download",
    "Train": "validate catalog run rehearse sweep sweeps pause resume cancel note delete",
    "Watch": "show metrics events compare open tensorboard",
    "Explain": "stacks stragglers goodput profile drill replay",
    "Data and checkpoints": "samples checkpoints verify",
    "Cluster": "cluster doctor cordon uncordon drain node-watcher",
    "Team": "login logout context project token session alerts audit",
    "Service": "storage backup restore",
}
"""Commands by group, in the order in which they are shown."""

EXAMPLES = {
    "demo": "",
    "serve": "--nodes 3 --port 9000",
    "init": "task my-task",
    "init task": "my-task",
    "init schema": "",
    "submit": "examples/digits.yaml --watch",
    "watch": "run_1anv6ek143hk",
    "runs": "--status RUNNING --sort -metrics.val_accuracy",
    "logs": "run_1anv6ek143hk --follow",
    "why": "run_1anv6ek143hk",
    "download": "run_1anv6ek143hk latest model",
    "validate": "examples/digits.yaml --set train.epochs=3",
    "catalog": "",
    "run": "examples/digits.yaml --local",
    "rehearse": "--code my_code --script train.py --steps 12",
    "sweep": "examples/digits.yaml --metric val_accuracy --grid optimizer.lr=0.01,0.003",
    "sweep submit": "examples/digits.yaml --metric val_accuracy --grid optimizer.lr=0.01,0.003",
    "sweep show": "sweep_1anv6ek143hk",
    "sweep watch": "sweep_1anv6ek143hk",
    "sweep cancel": "sweep_1anv6ek143hk",
    "sweep delete": "sweep_1anv6ek143hk",
    "sweeps": "",
    "pause": "run_1anv6ek143hk",
    "resume": "run_1anv6ek143hk",
    "cancel": "run_1anv6ek143hk",
    "note": "run_1anv6ek143hk 'diverges with warmup below 100'",
    "delete": "run_1anv6ek143hk",
    "show": "run_1anv6ek143hk",
    "metrics": "run_1anv6ek143hk",
    "events": "run_1anv6ek143hk",
    "compare": "run_1anv6ek143hk run_1anv6ek2mp4t",
    "open": "run_1anv6ek143hk",
    "tensorboard": "run_1anv6ek143hk",
    "stragglers": "run_1anv6ek143hk",
    "goodput": "run_1anv6ek143hk",
    "profile": "run_1anv6ek143hk --rank 1",
    "stacks": "run_1anv6ek143hk",
    "drill": "run_1anv6ek143hk kill_worker --rank 1",
    "replay": "run_1anv6ek143hk --from 400 --to 450",
    "samples": "run_1anv6ek143hk",
    "checkpoints": "run_1anv6ek143hk",
    "verify": "run_1anv6ek143hk latest",
    "cluster": "",
    "doctor": "",
    "cordon": "53e5fe4c",
    "uncordon": "53e5fe4c",
    "drain": "53e5fe4c",
    "node-watcher": "",
    "login": "https://everstep.example.org",
    "logout": "",
    "context": "",
    "project": "create vision",
    "project create": "vision",
    "project list": "",
    "project delete": "vision",
    "token": "list",
    "token create": "ci --role submitter --project vision",
    "token list": "",
    "token revoke": "ci",
    "session": "list",
    "session list": "",
    "session revoke": "ses_1anv6ek143hk",
    "alerts": "list",
    "alerts add": "night-watch --when failed --to slack --target https://hooks.example.org/T1",
    "alerts list": "",
    "alerts test": "alr_1anv6ek143hk",
    "alerts deliveries": "alr_1anv6ek143hk",
    "alerts retry": "alr_1anv6ek143hk dlv_1anv6ek2mp4t",
    "alerts delete": "alr_1anv6ek143hk",
    "audit": "",
    "storage": "show",
    "storage show": "",
    "storage adopt": "",
    "backup": "/backup/2026-06-01",
    "restore": "/backup/2026-06-01",
}
"""What follows ``everstep COMMAND`` in the example at the end of its help."""

_display_type = typer.core.TyperOption.display_type


def _type_of_values(self: Any, ctx: Any) -> str | None:
    """Return the type to show of an option, None for a flag: it takes no value."""
    return None if self.is_flag else _display_type(self, ctx)


typer.core.TyperOption.display_type = _type_of_values  # type: ignore[method-assign, assignment]


class Guide(typer.core.TyperGroup):
    """The program's commands in their groups, each with its first sentence and an example."""

    def __init__(self, **attrs: Any) -> None:
        super().__init__(**attrs)
        place = {}
        for group, names in GROUPS.items():
            for name in names.split():
                place[name] = self.commands.pop(name)
                place[name].rich_help_panel = group  # type: ignore[attr-defined]
        assert not self.commands, f"put these into a group: {', '.join(self.commands)}"
        self.commands = place
        _furnish(self.commands, "")


def _furnish(commands: dict[str, Any], before: str) -> None:
    """Give commands and those below them the first sentence of their help for lists, and an
    example."""
    for name, command in commands.items():
        path = f"{before}{name}"
        sentence = " ".join((command.help or "").split()).split(". ")[0].removesuffix(".")
        command.short_help = command.short_help or sentence
        command.epilog = f"Example: everstep {path} {EXAMPLES[path]}".rstrip()
        _furnish(getattr(command, "commands", {}), f"{path} ")
