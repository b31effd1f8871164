"""A study: Optuna chooses values of a spec, and each trial is a run. Needs Optuna, an extra."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import secrets
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import optuna
from optuna import pruners, samplers
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.exceptions import StorageInternalError
from optuna.trial import Trial, TrialState

from everstep import errors
from everstep.client.client import Client
from everstep.client.runs import RunHandle
from everstep.spec.overrides import set_fields
from everstep.spec.parsing import parse_spec
from everstep.spec.yaml_file import parse_yaml
from everstep.text import words
from everstep.wire import RunStatus

optuna.logging.set_verbosity(optuna.logging.ERROR)
POLL_S = 2.0
MOST_POINTS = 1000
OF_STUDY = ("name", "project", "tags.study", "tags.trial")
SAMPLERS: dict[str, Callable[[int], samplers.BaseSampler]] = {
    "grid": samplers.RandomSampler,  # never asked: the points of a grid wait in the study
    "random": samplers.RandomSampler,
    "tpe": lambda seed: samplers.TPESampler(seed=seed, constant_liar=True),
    "cmaes": lambda seed: samplers.CmaEsSampler(seed=seed, warn_independent_sampling=False),
}
PRUNERS: dict[str, Callable[[int], pruners.BasePruner]] = {
    "none": lambda _: pruners.NopPruner(),
    "asha": lambda steps: pruners.SuccessiveHalvingPruner(min_resource=steps),
    "hyperband": lambda steps: pruners.HyperbandPruner(min_resource=steps),
    "median": lambda steps: pruners.MedianPruner(n_warmup_steps=steps),
}
Choice = CategoricalDistribution | FloatDistribution | IntDistribution
"""What a field may be. Values of a grid are JSON, since Optuna keeps plain ones only."""


def space_of(grid: Sequence[str], ranges: Sequence[str]) -> dict[str, Choice]:
    """Return what each field may be, from the texts of --grid and --range."""
    space: dict[str, Choice] = {}
    for option, text in [*(("grid", each) for each in grid), *(("range", each) for each in ranges)]:
        field, _, given = (part.strip() for part in text.partition("="))
        taken = next((each for each in (*space, *OF_STUDY) if overlap(each, field)), None)
        if taken:
            raise errors.UsageError(f"--{option} {text}: {taken} is set already; leave it out here")
        try:
            space[field] = choice_of(given, f"--{option} {text}", option == "grid")
        except (ValueError, KeyError, TypeError) as exc:
            raise errors.UsageError(
                f"--{option} {text}: is not understood ({exc}); write --grid FIELD=VALUE,VALUE or "
                "--range FIELD=LOW..HIGH, FIELD=log:LOW..HIGH or FIELD=int:LOW..HIGH"
            ) from exc
    return space


def choice_of(given: str, source: str, is_grid: bool) -> Choice:
    """Return what a field may be. Raise ValueError, KeyError, TypeError or UsageError."""
    if is_grid:
        values = [json.dumps(each) for each in parse_yaml(f"[{given}]", source)]
        if not values or len({*values}) < len(values):
            raise ValueError("there is no value, or one of them twice")
        return CategoricalDistribution(values)
    kind, _, span = given.rpartition(":")
    low, _, high = span.partition("..")
    low, high = parse_yaml(low, source), parse_yaml(high, source)
    kinds = (int,) if kind == "int" else (int, float)
    if {type(low), type(high)} - {*kinds} or not -math.inf < low < high < math.inf:
        raise ValueError("there are no two such numbers, the smaller one first")
    if kind == "int":
        return IntDistribution(low, high)
    return FloatDistribution(low, high, log={"": False, "log": True}[kind])


def ends(choice: Choice) -> list[Any]:
    """Return the values of a grid, or the ends of a range."""
    if isinstance(choice, CategoricalDistribution):
        return [json.loads(str(each)) for each in choice.choices]
    return [choice.low, choice.high]


def check(spec: dict[str, Any], space: dict[str, Choice]) -> dict[str, Any]:
    """Return the spec with the first value of each field. Raise UsageError for a value that its
    field does not take, InvalidSpec for other faults of the spec."""
    first = {field: ends(choice)[0] for field, choice in space.items()}
    for field, value in [(each, value) for each in space for value in ends(space[each])]:
        try:
            parse_spec(set_fields(spec, first | {field: value}))
        except errors.InvalidSpec as exc:
            for fault in exc.errors:
                if overlap(".".join(map(str, fault.loc)), field):
                    message = f"{field}={json.dumps(value)}: {fault.msg}"
                    raise errors.UsageError(message) from exc
            raise
    return set_fields(spec, first)


def overlap(path: str, other: str) -> bool:
    """Return whether one path is the other or lies in it."""
    return f"{path}.".startswith(f"{other}.") or f"{other}.".startswith(f"{path}.")


def fit(plan: dict[str, Any], space: dict[str, Choice]) -> None:
    """Raise UsageError for options that do not fit together."""
    lists = [each.choices for each in space.values() if isinstance(each, CategoricalDistribution)]
    most, sampler = min(MOST_POINTS, math.prod(map(len, lists))), plan["sampler"]
    if sampler == "grid" and len(lists) < len(space):
        raise errors.UsageError("--sampler grid: a --range has no grid; use random or tpe")
    if sampler == "grid" and not 1 <= (plan["trials"] or 0) <= most:
        raise errors.UsageError(
            f"--trials {plan['trials']}: a grid of these values has at most {most} trials; "
            "change one of them, or use --sampler random"
        )
    if not plan["trials"]:
        raise errors.UsageError("--trials: is missing; say how many runs to try")
    if sampler == "cmaes" and len(space) - len(lists) < 2:
        raise errors.UsageError("--sampler cmaes: needs two fields with --range; add one")
    if plan["pruner"] in ("asha", "hyperband") and not plan["min_steps"]:
        raise errors.UsageError("--min-steps: is missing; set the steps before the first pruning")


def begun(client: Client, file: Path, plan: dict[str, Any], archive: bytes | None) -> optuna.Study:
    """Check a new study and write its file. Raise UsageError or InvalidSpec before that."""
    name, space = file.stem, space_of(plan["grid"], plan["ranges"])
    if not plan["metric"] or not space:
        what = "--grid or --range" if plan["metric"] else "--metric"
        raise errors.UsageError(f"study {name} is new: add {what}, and a spec")
    if plan["sampler"] == "grid" and plan["trials"] is None:
        plan["trials"] = math.prod(len(ends(choice)) for choice in space.values())
    fit(plan, space)
    first = check(plan["spec"], space)
    if archive is not None:
        client.code.upload_packed(archive, project=first.get("project"))
    resolved = client.runs.validate(first)
    plan["spec"] |= {"project": resolved.project}
    for run in client.runs.list(project=resolved.project, tag={"study": name}):
        raise errors.UsageError(
            f"study {name}: run {run.id} has its tag, but {file} is not here; copy that file from "
            "where the study began, or choose another name"
        )
    if resolved.resume_from is not None and not any(overlap("resume_from", each) for each in space):
        # `latest` is the same checkpoint for all trials
        plan["spec"] |= {"resume_from": resolved.resume_from.model_dump(mode="json")}
    direction = optuna.study.StudyDirection.MAXIMIZE if plan["mode"] == "max" else None
    made = optuna.create_study(storage=_url(file), study_name=name, direction=direction)
    own = {"seed": secrets.randbits(31), "key": secrets.token_hex(8)}
    made.set_user_attr("plan", plan | own)
    return made


def opened(file: Path, changes: dict[str, Any]) -> optuna.Study:
    """Return the study in a file, with changes to its plan. Raise UsageError."""
    try:
        study = optuna.load_study(study_name=None, storage=_url(file))
        plan = study.user_attrs["plan"] | changes
    except Exception as exc:
        raise errors.UsageError(
            f"{file}: is not a study of `everstep sweep` ({exc}); name another, or remove the file"
        ) from exc
    if changes:
        fit(plan, space_of(plan["grid"], plan["ranges"]))
        study.set_user_attr("plan", plan)
    return study


def _url(file: Path) -> str:
    return f"sqlite:///{file}?timeout=60"


class Sweep:
    """A study, and the service that trains its trials. All that it knows lies in the study's file,
    so that another command goes on wherever this one ended."""

    def __init__(self, client: Client, study: optuna.Study, say: Callable[[str], None]) -> None:
        self.client, self.study, self.say = client, study, say
        self.plan: dict[str, Any] = study.user_attrs["plan"]
        self.space = space_of(self.plan["grid"], self.plan["ranges"])
        study.pruner = PRUNERS[self.plan["pruner"]](self.plan["min_steps"])
        if self.plan["sampler"] == "grid":
            points = itertools.product(*(ends(choice) for choice in self.space.values()))
            for point in itertools.islice(points, len(study.trials), None):
                texts = [json.dumps(value) for value in point]
                study.enqueue_trial(dict(zip(self.space, texts, strict=True)))

    def run(self) -> None:
        """Submit and follow trials until all have ended, also while the service is away."""
        said, is_over = "", False
        while not is_over:
            try:
                is_over, said = self.tick(), ""
            except StorageInternalError as exc:
                raise errors.EverstepError(
                    f"the file of study {self.study.study_name} cannot be written: {exc}. Mend "
                    "that, then go on with --study"
                ) from exc
            except errors.EverstepError as exc:
                is_away = isinstance(exc, errors.Unavailable | errors.RateLimited)
                if not is_away and exc.code != "quota_exceeded":
                    raise
                if said != str(exc):
                    said = str(exc)
                    self.say(f"waiting: {said}")
            if not is_over:
                time.sleep(POLL_S)

    def tick(self) -> bool:
        """Follow each trial, begin as many as may be, and return whether all have ended."""
        for trial in self.unended():
            self._follow(trial)
        while len(self.unended()) < self.plan["parallel"] and self._begun() < self.plan["trials"]:
            # a seed for each trial: a command that goes on does not repeat what was drawn
            self.study.sampler = SAMPLERS[self.plan["sampler"]](self.plan["seed"] + self._begun())
            self._follow(self.study.ask())
        return not self.unended()

    def unended(self) -> list[Trial]:
        """Return the trials that have begun and not ended."""
        running = self.study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))
        return [Trial(self.study, each._trial_id) for each in running]

    def _begun(self) -> int:
        trials = self.study.get_trials(deepcopy=False)
        return sum(each.state is not TrialState.WAITING for each in trials)

    def _run_of(self, trial: Trial) -> RunHandle:
        """Return the run of a trial. Submit it if no run carries the trial's tags."""
        if "run" in trial.user_attrs:
            return self.client.runs.get(trial.user_attrs["run"])
        drawn = {field: trial._suggest(field, choice) for field, choice in self.space.items()}
        values = {f: json.loads(v) if isinstance(v, str) else v for f, v in drawn.items()}
        study, spec = self.study.study_name, set_fields(self.plan["spec"], values)
        tags = {"study": study, "trial": str(trial.number)}
        spec |= {
            "name": f"{study}-{trial.number:03d}",
            "tags": tags | (spec.get("tags") or {}) | tags,
        }
        found = self.client.runs.list(project=spec.get("project", "default"), tag=tags)
        key = f"{self.plan['key']}-{trial.number}"
        run = next(found, None) or self.client.runs.create(spec, key)
        trial.set_user_attr("values", values)
        trial.set_user_attr("run", run.id)
        self.say(f"trial {trial.number} is {run.id} with {json.dumps(values)}")
        return run

    def _follow(self, trial: Trial) -> None:
        """Submit a trial that has no run yet. Report its new values; prune it, or end it."""
        metric = self.plan["metric"]
        try:
            run = self._run_of(trial)
            points = run.metrics(metric).get(metric, [])
        except (errors.NotFound, errors.InvalidSpec, errors.Conflict) as exc:
            if exc.code == "quota_exceeded":
                raise
            return self._end(trial, TrialState.FAIL, str(exc))
        has_ended, is_pruned = run.status.terminal, "pruned" in trial.user_attrs
        last = self.study.get_trials(deepcopy=False)[trial.number].last_step
        for step, _, value in points:
            if not is_pruned and (last is None or step > last):
                trial.report(math.nan if value is None else value, step)
                is_pruned = trial.should_prune() and not has_ended
        if is_pruned and not has_ended:
            trial.set_user_attr("pruned", run.step)  # before: a cancelled run says not by whom
            with contextlib.suppress(errors.Conflict):
                run.cancel()
        if not has_ended:
            return None
        finite = [value for _, _, value in points if value is not None]
        if run.status is RunStatus.SUCCEEDED and finite:
            best = max(finite) if self.study.direction.name == "MAXIMIZE" else min(finite)
            return self._end(trial, TrialState.COMPLETE, f"{metric} {words.number(best)}", best)
        if is_pruned:
            return self._end(trial, TrialState.PRUNED, "it was worse than others")
        if run.status is RunStatus.SUCCEEDED and not points:
            self._refuse_metric(run)
        why = run.reason.message if run.reason else f"no value of {metric} is finite"
        return self._end(trial, TrialState.FAIL, f"{run.id} is {run.status}: {why}")

    def _end(self, trial: Trial, state: TrialState, why: str, value: float | None = None) -> None:
        self.study.tell(trial, value, state)
        self.say(f"trial {trial.number} is {state.name}: {why}")

    def _refuse_metric(self, run: RunHandle) -> None:
        """Cancel what trains, and raise UsageError, if a run ended without the metric."""
        for trial in self.unended():
            if "run" in trial.user_attrs:
                with contextlib.suppress(errors.Conflict, errors.NotFound):
                    self._run_of(trial).cancel()
        metric, names = self.plan["metric"], sorted(run.latest_metrics)
        near = words.closest(metric, names)
        raise errors.UsageError(
            f"--metric {metric}: run {run.id} ended and never reported it; its metrics are "
            f"{', '.join(names) or 'none'}. The other runs are cancelled. Begin another study"
            + (f" with --metric {near}" if near else " with one of them")
        )
