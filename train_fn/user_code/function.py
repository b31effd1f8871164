"""Run a user's function or script as a rank, from its beginning to its end.

Here it has a process of its own and no Ray, as nothing of it imports Ray: its steps are those of
``es.protect``. ``train_fn/ray_train/user_function.py`` runs one that calls Ray's API.
"""

from __future__ import annotations

import ast
import dataclasses
import gc
import inspect
import logging
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, chdir, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch.multiprocessing

from everstep.code import module_path, script_path
from everstep.spec.code import CodeSpec
from everstep.spec.run_spec import RunSpec
from everstep.wire.events import OWN_FILES, REPORTS, EventKind
from storage.errors import StorageError
from storage.filesystem import Storage
from storage.run_control import Stop
from storage.run_dir import RunDir
from train_fn import own_loop
from train_fn.context import WorkerContext
from train_fn.errors import BadTask, few, forget_frames
from train_fn.node.device import keep_if_broken
from train_fn.own_loop import Left, LoopProtection, StopAgreed
from train_fn.recovery.evidence import StepFailed, describe_error
from train_fn.step.nccl import group_backend
from train_fn.step.peers import end_process_group
from train_fn.user_code.modules import (
    DOOR,
    CodeOnNode,
    add_to_path,
    declare_missing_ops,
    files_on_node,
    imports,
    load_named,
    mentions,
    place_of,
)
from train_fn.user_code.packages import add_packages, bring_packages
from train_fn.user_code.script_run import Interrupted, ScriptRun, close_store, prepare_script

GUARANTEE = (
    "A train_fn resumes from the newest checkpoint that it reported. Later steps are repeated, and "
    "its own loader decides which samples they use."
)
DATASETS_GUARANTEE = (
    " Its Ray Data sets are built anew in every attempt: the epoch begins again, so samples of it "
    "may be used twice, unless the function kept its place and skips to it."
)
SCRIPT_GUARANTEE = (
    "A script goes on from the checkpoints that it writes itself: what it did since the last of "
    "them is done again, and which samples it sees is up to its own loader."
)
NEVER_REPORTS = (
    "no file of the archive names ray.train.report or everstep.train: this function has no steps, "
    "metrics or checkpoints, and begins anew after a failure. Report at least once an epoch"
)
SPAWNED = (
    "this script starts ranks of its own by torch.multiprocessing.{name}, but Everstep has started "
    "one process for each rank, as torchrun does. Call your function directly, with "
    'int(os.environ["RANK"]) and int(os.environ["WORLD_SIZE"])'
)
WITHOUT_RAY = (
    "no file of the archive imports Ray, so its ranks run without it. If a package that you call "
    "reports to Ray Train, write `import ray.train` into the file that calls it"
)

logger = logging.getLogger(__name__)


def calls_ray(storage: Storage, spec: RunSpec) -> bool:
    """Return whether a user's function may call Ray's API: its files import Ray, or it lies in a
    package of which only its name is known, or they cannot be read. Who reads them next tells."""
    if spec.code is None or not spec.runs_own_function:
        return False
    if spec.code.datasets is not None:
        return True
    try:
        code = files_on_node(storage, spec.code.archive)
    except StorageError:
        return True
    return _entry_path(spec.code, code.names) is None or imports(code.directory, code.names, "ray")


def _entry_path(code: CodeSpec, names: Collection[str]) -> str | None:
    """Return the file of the script, or of the function's module; None if it is not among
    ``names``."""
    if code.train_fn is not None:
        return module_path(names, code.train_fn.partition(":")[0])
    return script_path(names, str(code.script))


def build_once(spec: RunSpec, run_dir: RunDir, device: torch.device) -> str | None:
    """Import what the code imports before it does anything else, in a process from which its ranks
    are forked. Libraries may take longer than all else of a restart. Return why ranks must not
    begin with what that has left; None if they may.
    """
    assert spec.code is not None
    own = set[str]()
    before = set(sys.modules)
    try:
        if spec.runtime_env is not None:
            add_packages(spec.runtime_env.pip)
        code = files_on_node(run_dir.storage, spec.code.archive)
        path = _entry_path(spec.code, code.names)
        own = _parts_of(code.names)
        if path is None or any(f"{each}/__init__.py" in code.names for each in Path(path).parents):
            return None  # what a package does in __init__.py comes first
        declare_missing_ops()  # for torchvision
        with chdir(code.directory):  # a library may look for its settings there
            for module, wanted in first_imports((code.directory / path).read_bytes(), code.names):
                __import__(module, fromlist=wanted)
    except Exception as exc:  # the ranks tell it
        return f"an import failed ({type(exc).__name__}: {exc})"
    taken = sorted(own & (set(sys.modules) - before))
    return f"libraries have modules of the archive's names: {few(taken)}" if taken else None


def first_imports(source: bytes, names: Collection[str]) -> Iterator[tuple[str, list[str]]]:
    """Yield the modules that a file imports before its first other statement, and what it takes
    from each. A name that one of the archive's files may have (``names``) ends them: such a module
    may do anything, as set variables of the environment that the next library reads."""
    own = _parts_of(names)
    for node in ast.parse(source).body:
        if isinstance(node, ast.Import):
            found = [(alias.name, list[str]()) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module is not None and not node.level:
            found = [(node.module, [alias.name for alias in node.names])]
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            continue  # a docstring
        else:
            return
        if any(module.partition(".")[0] in own for module, _ in found):
            return
        yield from found


def _parts_of(names: Collection[str]) -> set[str]:
    return {part for name in names for part in name.replace(".", "/").split("/")}


class FunctionReports:
    """What the journal is told of a function that reports no steps by itself.

    Args:
        ctx: the rank's place in its attempt.
        checkpoint: the newest one that it has reported; None for none.
        step: its number of reports by then.
        rejected: reported checkpoints from which it must not go on, with what each lacks.
    """

    def __init__(
        self,
        ctx: WorkerContext,
        checkpoint: str | None = None,
        step: int = 0,
        rejected: Mapping[str, str] | None = None,
    ) -> None:
        is_script = ctx.spec.runs_script
        if is_script and checkpoint is None:
            step = ctx.steps_before
        self.step = step
        self._ctx = ctx
        self.has_reported = False
        """Whether this attempt has made a report, at which it can stop."""
        self._restored: dict[str, Any] | None = None
        """Where the function goes on, until that is reported."""
        if ctx.world_rank == 0:
            beginning = OWN_FILES if is_script and ctx.attempt > 1 else "fresh"
            source = beginning if checkpoint is None else "checkpoint"
            found = {"step": step, "epoch": 0, "source": source, "checkpoint": checkpoint}
            found |= {} if source == OWN_FILES else {"unit": REPORTS}
            problems = (rejected or {}).items()
            found["rejected"] = [{"name": name, "problem": each} for name, each in problems]
            self._restored = found

    def begin(self, *, may_protect: bool, warnings: Sequence[str] = ()) -> None:
        """Report that the function begins, and where it continues, with ``warnings`` about it.

        A protected loop continues from its own state, which this event would contradict. So a
        function that may protect one sends it no earlier than its first report.
        """
        if not may_protect:
            self.report_restored()
        if self._ctx.world_rank == 0:
            facts = _facts(self._ctx) | ({"warnings": list(warnings)} if warnings else {})
            self._ctx.journal.emit(EventKind.TRAINING_STARTED, facts)

    def report_restored(self) -> None:
        """Report where the function continues, unless that is done, or a protected loop did."""
        restored, self._restored = self._restored, None
        if protection() is not None:
            return
        if own_loop.present is not None:
            own_loop.present.has_begun = True
        if restored is not None:
            self._ctx.journal.emit(EventKind.RESTORED, restored)

    def close(self, *, failed: bool) -> None:
        """End what follows the function."""
        if not failed:
            self.report_restored()


def train(ctx: WorkerContext) -> Stop | None:
    """Run the function to its end in a process without Ray (``run``)."""
    # Else all ranks of the node would draw the zygote's numbers, and in every attempt.
    torch.default_generator.seed()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    try:
        return run(ctx, FunctionReports, lambda code: nullcontext())
    except StepFailed as failed:
        error = failed.error
        if "/ray/train/" not in error.traceback:
            raise
        told = dataclasses.replace(error, message=f"{error.message}. {WITHOUT_RAY}")
        raise StepFailed(told, failed.snapshot_problem) from None


def run(
    ctx: WorkerContext,
    begin: Callable[[WorkerContext], FunctionReports],
    refusing: Callable[[CodeOnNode], AbstractContextManager[None]],
) -> Stop | None:
    """Run the function to its end. Return the stop on which the ranks agreed meanwhile, or None.

    Raise StepFailed for every error. By then the rank has released its peers.

    Args:
        begin: says where it goes on.
        refusing: refuses calls of the code that would hang, while it runs.
    """
    present = own_loop.present = own_loop.OwnLoop(ctx)
    progress, error = None, None
    try:
        script, code = _prepare(ctx)
        progress = begin(ctx)
        with refusing(code), _no_spawned_ranks(is_script=script is not None):
            _run(present, progress, script, code)
    except BaseException as exc:
        error = exc
    try:
        return _end(present, progress, error)
    finally:
        own_loop.present = None


def _prepare(ctx: WorkerContext) -> tuple[ScriptRun | None, CodeOnNode]:
    """Bring the code to this node. Return the script if it is one, and the code's files."""
    bring_packages(ctx)
    script = prepare_script(ctx) if ctx.spec.runs_script else None
    if script is None:
        add_to_path(ctx.run_dir.storage, code_of(ctx).archive)
    return script, files_on_node(ctx.run_dir.storage, code_of(ctx).archive)


def _run(
    present: own_loop.OwnLoop, progress: FunctionReports, script: ScriptRun | None, code: CodeOnNode
) -> None:
    may_protect = imports(code.directory, code.names, DOOR)
    if script is None:
        _call(present.ctx, progress, code, may_protect=may_protect)
    else:
        progress.begin(may_protect=may_protect)
        script.run(present, takes_stops=lambda: progress.has_reported or protection() is not None)


def _end(
    present: own_loop.OwnLoop, progress: FunctionReports | None, error: BaseException | None
) -> Stop | None:
    """End the rank's part in the attempt. Return the stop, or None if the function finished. Raise
    StepFailed.

    Not called by a handler of ``error``: a context would keep alive the function's frames, and with
    them the process group.

    Args:
        error: what the function raised.
    """
    failure = present.failure(error)
    if progress is not None:
        progress.close(failed=failure is not None)
    if failure is not None:
        raise _leave(present.ctx, failure, error, progress.step if progress is not None else None)
    if error is not None and not isinstance(error, StopAgreed | Interrupted):
        logger.warning("the code raised after the ranks agreed to %s", present.stop, exc_info=error)
        forget_frames(error)
    return present.stop


def _call(
    ctx: WorkerContext, progress: FunctionReports, code: CodeOnNode, *, may_protect: bool
) -> None:
    """Call the function as Ray Train does: with its config, or without arguments if it takes none.

    Raise BadTask if it cannot be called like this.
    """
    entry, config = code_of(ctx).train_fn, dict(code_of(ctx).config)
    assert entry is not None
    function = load_named(entry)
    if not callable(function):
        raise BadTask(
            f"{entry} is a {type(function).__name__}, not a function. Set code.train_fn to a "
            "function with one argument, its config"
        )
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    parameters = inspect.signature(function).parameters.values()
    num_required = sum(
        each.default is each.empty and each.kind not in variadic for each in parameters
    )
    if num_required > 1:
        raise BadTask(
            f"{entry}{place_of(function)} needs {num_required} arguments, but a train_fn is called "
            "with its config only. Give the other arguments defaults"
        )
    if config and not num_required:
        raise BadTask(
            f"{entry}{place_of(function)} needs no argument, so Ray Train calls it without "
            "code.config; let it take one, or remove code.config"
        )
    logger.info("calling %s", entry)
    may_protect = may_protect or DOOR in sys.modules  # an installed package may use it
    may_report = may_protect or mentions(code.directory, code.names, b"report")
    progress.begin(may_protect=may_protect, warnings=() if may_report else (NEVER_REPORTS,))
    function(*([config] if num_required else []))


def _leave(
    ctx: WorkerContext,
    failure: BaseException | Left,
    raised: BaseException | None,
    step: int | None,
) -> StepFailed:
    """Release the peers, and return the error. Only the neighbours of a dead rank notice its death
    by themselves. A protected loop has done so, and left its state."""
    error = None if isinstance(failure, Left) else describe_error(failure, ctx.world_rank)
    if raised is not None and not keep_if_broken(ctx.device, raised):
        forget_frames(raised)
    if isinstance(failure, Left):
        return StepFailed(failure.error, failure.problem)
    assert error is not None
    gc.collect()
    end_process_group()
    close_store()
    is_script = ctx.spec.runs_script
    step = None if is_script and not step else step  # without reports no step is known
    error = dataclasses.replace(error, step=step, phase="script" if is_script else "train_fn")
    return StepFailed(error, "the user's own loop keeps its state in its own checkpoints")


def code_of(ctx: WorkerContext) -> CodeSpec:
    """Return the section ``code`` of the run."""
    assert ctx.spec.code is not None
    return ctx.spec.code


def protection() -> LoopProtection | None:
    """Return what protects the function's loop; None if it is not protected, or not yet."""
    return own_loop.present.protection if own_loop.present is not None else None


def _facts(ctx: WorkerContext) -> dict[str, Any]:
    """Return the data of ``training_started``. Unlike Everstep's loop, a function does not reveal
    its number of steps or parameters."""
    datasets = DATASETS_GUARANTEE if code_of(ctx).datasets is not None else ""
    unknown = dict.fromkeys(
        ("total_steps", "steps_per_epoch", "num_samples", "num_parameters", "micro_batch_size")
    )
    return {
        **unknown,
        "snapshots": "none",
        "guarantee": SCRIPT_GUARANTEE if ctx.spec.runs_script else GUARANTEE + datasets,
        "device": str(ctx.device),
        "backend": group_backend(ctx.device),
    }


@contextmanager
def _no_spawned_ranks(*, is_script: bool) -> Iterator[None]:
    """Raise BadTask inside the block where a script spawns processes, which would be ranks."""
    names = ("spawn", "start_processes") if is_script else ()
    before = {name: getattr(torch.multiprocessing, name) for name in names}
    for name in names:
        setattr(torch.multiprocessing, name, refuse(SPAWNED.format(name=name)))
    try:
        yield
    finally:
        for name, function in before.items():
            setattr(torch.multiprocessing, name, function)


def refuse(message: str) -> Any:
    """Return a function that raises BadTask."""

    def refused(*_: Any, **__: Any) -> Any:
        raise BadTask(message)

    return refused
