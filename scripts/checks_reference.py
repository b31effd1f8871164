"""Write docs/checks.md: everything that Everstep refuses of a user's code, or warns of.

`python scripts/checks_reference.py` reads the messages in train_fn, and the moments and costs that
the checks there declare, and writes the page. With `--check` it compares instead, and fails where
the page is out of date, or where a message has no moment.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from train_fn.checks.check import Moment

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "checks.md"
ROOM = "train_fn/checks"
HEAD = """\
# What Everstep refuses, when, and at what cost

For anyone who writes a task or a protected loop. After this page you know which mistakes
Everstep finds while it trains, when it looks for them, and what that costs.
`scripts/checks_reference.py` writes this page from the code, so do not edit it.

A run is refused where it would be wrong even if nobody disturbed it, or where a restart is
certain to be. A refusal (`BadTask`, `DataChanged`) ends the run; its text ends with what to do, and
the same error at the same step twice is never retried. A warning is in the log, most also on the
run's page. `…` stands for names, files with their lines, and numbers. No check changes anything.

Not on this page: mistakes in what is given, as an argument, a field of the spec, or what a task
builds. They are found before training, at no cost, and the error says what to write. What a
restart would change in your code is not guessed: [rehearse](rehearse.md) one.
"""
ERRORS = ("BadTask", "DataChanged")
OF_FILES = {
    "train_fn/checkpoints/safetensors_file.py": (Moment.BUILT, "none"),
    "train_fn/checks/fits.py": (Moment.BUILT, "none"),
    "train_fn/checks/returns.py": (Moment.BUILT, "none"),
    "train_fn/elastic/exchange.py": (Moment.LOSS, "none"),
    "train_fn/loop/build.py": (Moment.BUILT, "none"),
    "train_fn/loop/commit.py": (Moment.STEP, "none"),
    "train_fn/loop/epoch_end.py": (Moment.EPOCH_HOOK, "none"),
    "train_fn/loop/evaluate.py": (Moment.EVALUATED, "none"),
    "train_fn/loop/first_pass.py": (Moment.FIRST_PASS, "a look at all buffers"),
    "train_fn/loop/own_step.py": (Moment.LOSS, "none"),
    "train_fn/loop/passes.py": (Moment.FIRST_PASS, "none"),
    "train_fn/loop/replica.py": (Moment.FIRST_PASS, "none"),
    "train_fn/loop/sharded.py": (Moment.BUILT, "none"),
    "train_fn/loop/step.py": (Moment.LOSS, "none"),
    "train_fn/loop/training.py": (Moment.RESTORED, "none"),
    "train_fn/models.py": (Moment.BUILT, "none"),
    "train_fn/own_loop.py": (Moment.LEAVING, "none"),
    "train_fn/protect/adapters/accelerate.py": (Moment.BUILT, "none"),
    "train_fn/protect/adapters/hugging_face.py": (Moment.BUILT, "none"),
    "train_fn/protect/adapters/lightning.py": (Moment.BUILT, "none"),
    "train_fn/protect/adapters/trainer_state.py": (Moment.BUILT, "none"),
    "train_fn/protect/arguments.py": (Moment.BUILT, "none"),
    "train_fn/protect/batches.py": (Moment.STEP, "a digest of the batch"),
    "train_fn/protect/boundary.py": (Moment.STEP, "a comparison of schedulers and extras"),
    "train_fn/protect/data_order.py": (Moment.RESTORED, "none"),
    "train_fn/protect/door.py": (Moment.BUILT, "none"),
    "train_fn/protect/followed.py": (Moment.RESTORED, "up to three batches, read again"),
    "train_fn/protect/loop_state.py": (Moment.RESTORED, "8 samples of the data set"),
    "train_fn/protect/protected.py": (Moment.STEP, "none"),
    "train_fn/protect/training.py": (Moment.BUILT, "none"),
    "train_fn/ray_train/user_function.py": (Moment.BUILT, "none"),
    "train_fn/user_code/function.py": (Moment.BUILT, "none"),
    "train_fn/recovery/error_text.py": (Moment.BUILT, "none"),
    "train_fn/rehearsal/rank.py": (Moment.BUILT, "none"),
    "train_fn/samples/ledger.py": (Moment.STEP, "none"),
    "train_fn/samples/streams.py": (Moment.STEP, "none"),
    "train_fn/session/speed.py": (Moment.BUILT, "none"),
    "train_fn/samples/token_batches.py": (Moment.BUILT, "none"),
    "train_fn/snapshots/restore.py": (Moment.RESTORED, "none"),
    "train_fn/snapshots/pieces.py": (Moment.STEP, "a digest of buffers and extras"),
    "train_fn/snapshots/whole.py": (Moment.RESTORED, "none"),
    "train_fn/state/contents.py": (
        Moment.RESTORED,
        "8 samples of each data set",
    ),
    "train_fn/state/optim.py": (Moment.BUILT, "none"),
    "train_fn/state/sharded.py": (Moment.STEP, "none"),
    "train_fn/state/tensor_tree.py": (Moment.STEP, "none"),
    "train_fn/state/train_state.py": (Moment.RESTORED, "none"),
    "train_fn/step/buffers.py": (Moment.LOSS, "a look at the buffers' versions"),
    "train_fn/step/peers.py": (Moment.LOSS, "none"),
    "train_fn/step/untrained.py": (Moment.LOSS, "a look at the buffers' versions"),
    "train_fn/tasks/builtin.py": (Moment.BUILT, "none"),
    "train_fn/tasks/metrics.py": (Moment.EVALUATED, "none"),
    "train_fn/user_code/modules.py": (Moment.BUILT, "none"),
    "train_fn/user_code/packages.py": (Moment.BUILT, "none"),
    "train_fn/user_code/script.py": (Moment.BUILT, "none"),
}
"""Moment and cost of the messages of a file, but for functions and classes that declare theirs."""


class Said(NamedTuple):
    """A message, with the moment at which it may be said."""

    moment: Moment
    kind: str
    text: str
    cost: str


class Reader(ast.NodeVisitor):
    """Collect the messages of a file."""

    def __init__(self, path: str, names: dict[str, str]) -> None:
        self._path, self._names = path, names
        self._places = [{OF_FILES[path][0]: OF_FILES[path][1]}] if path in OF_FILES else [{}]
        self.found: list[Said] = []
        self.without_moment: list[str] = []

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._within(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self._within(node)

    def _within(self, node: ast.ClassDef | ast.FunctionDef) -> None:
        declared = self._declared(node)
        self._places.append(declared or self._places[-1])
        self.generic_visit(node)
        self._places.pop()

    def _declared(self, node: ast.ClassDef | ast.FunctionDef) -> dict[Moment, str]:
        """Return the moments and costs that a class or a function declares of itself."""
        for mark in node.decorator_list:
            if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "checked":
                cost = self._text(mark.keywords[0].value)
                places = [part for each in mark.args for part in _each(each)]
                return {_moment(each): cost for each in places}
        for part in node.body if isinstance(node, ast.ClassDef) else ():
            if isinstance(part, ast.Assign) and ast.unparse(part.targets[0]) == "costs":
                return dict(self._costs(part.value))
        return {}

    def _costs(self, node: ast.expr) -> Iterator[tuple[Moment, str]]:
        if isinstance(node, ast.Dict):
            for key, value in zip(node.keys, node.values, strict=True):
                if key is None:
                    yield from self._costs(value)
                else:
                    yield _moment(key), self._text(value)
        elif isinstance(node, ast.Call):  # dict.fromkeys(moments, cost)
            moments, cost = node.args
            for each in moments.elts if isinstance(moments, ast.Tuple) else ():
                yield _moment(each), self._text(cost)

    def visit_Call(self, node: ast.Call) -> None:
        name = ast.unparse(node.func).rpartition(".")[2]
        says = "warning" if name in ("warn", "warning") else "refusal"
        if node.args and (name in ERRORS or (says == "warning" and self._is_of_user())):
            self._note(says, node.args[0])
        self.generic_visit(node)

    def visit_Yield(self, node: ast.Yield) -> None:
        if isinstance(node.value, ast.Constant | ast.JoinedStr):
            self._note("warning", node.value)
        self.generic_visit(node)

    def _is_of_user(self) -> bool:
        """Return whether warnings of this file are about a user's code."""
        return self._path.startswith((ROOM, "train_fn/protect")) or self._path in OF_FILES

    def _note(self, kind: str, node: ast.expr) -> None:
        text = re.sub(r"%\w", "…", " ".join(self._text(node).split()))
        if not text.strip("…: ") or text.startswith("drill "):
            return
        if not self._places[-1]:
            self.without_moment.append(f"{self._path}, line {node.lineno}: {text[:60]}")
        for moment, cost in self._places[-1].items():
            self.found.append(Said(moment, kind, text, cost))

    def _text(self, node: ast.expr) -> str:
        """Return a text with its parts that are not known filled by an ellipsis."""
        if isinstance(node, ast.Constant):
            return str(node.value)
        if isinstance(node, ast.JoinedStr):
            return "".join(map(self._text, node.values))
        if isinstance(node, ast.BinOp):
            return self._text(node.left) + self._text(node.right)
        if isinstance(node, ast.FormattedValue):
            return self._text(node.value)
        if isinstance(node, ast.Name):
            return self._names.get(node.id, "…")
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "where":
            method = self._text(node.args[-1])
            return "…" if method == "…" else f"Task.{method}"
        return "…"


def _each(node: ast.expr) -> list[ast.expr]:
    """Return the arguments that one argument stands for: of a starred tuple, its parts."""
    return node.value.elts if isinstance(node, ast.Starred) else [node]  # type: ignore[attr-defined]


def _moment(node: ast.expr) -> Moment:
    return Moment[ast.unparse(node).rpartition(".")[2]]


def constants(tree: ast.Module) -> dict[str, str]:
    """Return the texts that a module names."""
    return {
        node.targets[0].id: node.value.value
        for node in tree.body
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Name)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    }


def messages() -> tuple[list[Said], list[str]]:
    """Return every message, and those without a moment."""
    trees = {
        path.relative_to(ROOT).as_posix(): ast.parse(path.read_text())
        for path in sorted((ROOT / "train_fn").rglob("*.py"))
    }
    public = {
        name: text
        for tree in trees.values()
        for name, text in constants(tree).items()
        if not name.startswith("_")
    }
    found, without = list[Said](), list[str]()
    for path, tree in trees.items():
        reader = Reader(path, {**public, **constants(tree)})
        reader.visit(tree)
        found += reader.found
        without += reader.without_moment
    return found, without


def row(said: Said) -> str:
    """Return the line of a message: what is wrong. The message itself says what to do."""
    what, end, _ = said.text.partition(". ")
    if not end:
        what = said.text.rpartition("; ")[0] or said.text
    return f"- {'(warning) ' if said.kind == 'warning' else ''}{what.replace('*', chr(92) + '*')}"


def groups(found: list[Said]) -> dict[Moment, dict[str, set[str]]]:
    """Return the lines by the first moment at which they may be said, and by costs and moments
    after it. What can be said only before training, of what was built, is left out."""
    moments = defaultdict[str, set[Moment]](set)
    costs = dict[str, str]()
    for said in found:
        moments[row(said)].add(said.moment)
        costs[row(said)] = said.cost
    by_moment = {moment: defaultdict[str, set[str]](set) for moment in Moment}
    for line, at in moments.items():
        first, *others = (moment for moment in Moment if moment in at)
        if first is not Moment.BUILT or others:
            later = "".join(f"; again {each.partition(': ')[2]}" for each in others)
            by_moment[first][f"Cost: {costs[line]}{later}."].add(line)
    return {moment: dict(lines) for moment, lines in by_moment.items() if lines}


def page(found: list[Said]) -> str:
    """Return the page."""
    parts = [HEAD]
    for moment, by_cost in groups(found).items():
        parts.append(f"\n## {moment[0].upper()}{moment[1:]}")
        for cost, lines in sorted(by_cost.items()):
            parts += [f"\n{cost}\n", *sorted(lines)]
    return "\n".join(parts) + "\n"


def main() -> None:
    found, without = messages()
    if without:
        raise SystemExit(
            "messages without a moment; mark the function by @checked, or add its file to "
            "OF_FILES in scripts/checks_reference.py:\n" + "\n".join(without)
        )
    text = page(found)
    if "--check" not in sys.argv:
        PAGE.write_text(text)
    elif not PAGE.exists() or PAGE.read_text() != text:
        raise SystemExit(
            "docs/checks.md is not what the checks of train_fn say; run "
            "`python scripts/checks_reference.py`"
        )


if __name__ == "__main__":
    main()
