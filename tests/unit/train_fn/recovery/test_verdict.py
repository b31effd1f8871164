"""Verdicts and budgets: pure rules over made-up evidence."""

from __future__ import annotations

import dataclasses
import pickle
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.spec.sections import CheckpointSpec, RecoverySpec
from everstep.wire import ErrorKind, ReasonCode, Verdict
from everstep.wire.events import GPU_FAULTY
from storage.errors import StorageFull
from train_fn.recovery.decision import Decision, decide
from train_fn.recovery.error_kinds import kind_of
from train_fn.recovery.evidence import Evidence, RankReport
from train_fn.recovery.past_failures import PastFailure
from train_fn.recovery.rank_error import RankError, StepFailed, describe_error
from train_fn.recovery.verdict import Judgement, judge

GLOO = (
    "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer "
    "[127.0.0.1]:4242"
)


def error(
    rank: int, kind: ErrorKind, at: float, step: int = 10, message: str = "it broke"
) -> RankError:
    return RankError(rank, kind, "ValueError", message, 'File "task.py", line 3', step, "step", at)


def report(rank: int, **facts: object) -> RankReport:
    return RankReport(rank=rank, node_id=f"n{rank}", pid=100 + rank, **facts)  # type: ignore[arg-type]


def judged(*ranks: RankReport, control_error: str | None = None) -> Judgement:
    return judge(
        Evidence(attempt=1, noticed_at=50.0, ranks=ranks, last_step=12, control_error=control_error)
    )


def weighed(
    judgement: Judgement,
    past: list[PastFailure],
    dispensable: tuple[str, ...] = ("n0", "n1", "n2"),
    **spec: int,
) -> Decision:
    return decide(
        judgement,
        past,
        RecoverySpec(**spec),
        no_progress_limit=20,
        backoff_max_s=30.0,
        dispensable=lambda: dispensable,
    )


def test_survivors_collective_errors_are_never_blamed() -> None:
    result = judged(
        report(0, error=error(0, ErrorKind.COLLECTIVE, 1.0)), report(1, died=True, death="killed")
    )
    assert (result.verdict, result.first_rank, result.node_id) == (Verdict.WORKER_LOST, 1, "n1")
    assert result.exception is None
    assert result.step == 12


def test_a_dead_rank_on_an_unreachable_node_is_a_lost_node() -> None:
    result = judged(
        report(0, died=True),
        report(2, died=True, node_alive=False),
        report(1, error=error(1, ErrorKind.COLLECTIVE, 1.0)),
    )
    assert (result.verdict, result.first_rank) == (Verdict.NODE_LOST, 2)


def test_the_earliest_rank_that_raised_by_itself_is_first() -> None:
    result = judged(
        report(0, error=error(0, ErrorKind.USER, 7.0)),
        report(1, error=error(1, ErrorKind.COLLECTIVE, 1.0)),
        report(2, error=error(2, ErrorKind.USER, 6.0)),
    )
    assert (result.verdict, result.first_rank, result.exception) == (
        Verdict.USER_ERROR,
        2,
        "ValueError: it broke",
    )


def test_what_a_survivor_raises_does_not_hide_a_death() -> None:
    result = judged(
        report(0, error=error(0, ErrorKind.USER, 1.0, message="iterator ended")),
        report(1, died=True),
    )
    assert (result.verdict, result.first_rank) == (Verdict.WORKER_LOST, 1)


@pytest.mark.parametrize(
    ("facts", "verdict"),
    [
        ({"died": True, "death": "Worker exit type: NODE_OUT_OF_MEMORY"}, Verdict.OUT_OF_MEMORY),
        ({"died": True, "preempted": True, "node_alive": False}, Verdict.PREEMPTION),
        ({"died": True, "node_draining": True}, Verdict.PREEMPTION),
        ({"unresponsive": True}, Verdict.HANG),
        ({"error": error(0, ErrorKind.STORAGE, 1.0)}, Verdict.STORAGE),
        ({"error": error(0, ErrorKind.OUT_OF_MEMORY, 1.0)}, Verdict.OUT_OF_MEMORY),
        ({"error": error(0, ErrorKind.COLLECTIVE, 1.0)}, Verdict.UNKNOWN),
    ],
)
def test_each_evidence_has_its_verdict(facts: dict[str, object], verdict: Verdict) -> None:
    assert judged(report(0, **facts)).verdict is verdict


@pytest.mark.parametrize(("is_unproven", "first"), [(False, 1), (True, None)])
def test_a_hang_says_why_it_was_taken_for_one_whether_or_not_anybody_is_blamed(
    is_unproven: bool, first: int | None
) -> None:
    why = "no sign of life for 12.8 s; set recovery.hang_timeout_s to more"
    result = judged(
        report(0, error=error(0, ErrorKind.COLLECTIVE, 1.0)),
        report(1, unresponsive=True, is_unproven=is_unproven, hang=why),
    )
    assert (result.verdict, result.first_rank, result.exception) == (Verdict.HANG, first, why)


def test_who_stays_behind_when_all_others_left_is_what_they_waited_for() -> None:
    result = judged(
        report(0, error=error(0, ErrorKind.COLLECTIVE, 1.0)), report(1, still_running=True)
    )
    assert (result.verdict, result.first_rank) == (Verdict.HANG, 1)


def test_who_stays_behind_inside_a_collective_waits_as_the_others_did() -> None:
    """A line between two hosts is cut: each rank hears of it in its own time, and nobody is
    stuck."""
    result = judged(
        report(0, error=error(0, ErrorKind.COLLECTIVE, 1.0)),
        report(1, still_running=True, held_up=True),
    )
    assert (result.verdict, result.first_rank) == (Verdict.UNKNOWN, None)
    assert [line["state"] for line in result.detail["ranks"]] == ["collateral", "held up"]


def test_an_error_of_the_controller_alone_is_the_control_planes() -> None:
    assert judged(control_error="RuntimeError: snapshot").verdict is Verdict.CONTROL_PLANE


@given(
    st.lists(st.sampled_from(["died", "user", "collective", "left"]), min_size=1, max_size=6),
    st.randoms(),
)
def test_a_rank_is_blamed_only_on_evidence_of_its_own(kinds: list[str], rng: object) -> None:
    facts: dict[str, dict[str, object]] = {"died": {"died": True}, "left": {}}
    ranks = [
        report(rank, **facts[kind])
        if kind in facts
        else report(rank, error=error(rank, ErrorKind(kind), float(-rank)))
        for rank, kind in enumerate(kinds)
    ]
    first = judged(*ranks).first_rank
    blamable = "died" if "died" in kinds else "user"
    assert (first is None) == (blamable not in kinds)
    assert first is None or kinds[first] == blamable


def user_judgement(step: int, signature: str = "a") -> Judgement:
    return Judgement(Verdict.USER_ERROR, 0, "n0", step, "ValueError: bad", signature)


def test_the_same_user_error_at_the_same_step_twice_stops_whatever_the_budget() -> None:
    past = [PastFailure(Verdict.USER_ERROR, 7, "a")]
    stop = weighed(user_judgement(7), past, max_user_errors=9)
    assert (stop.restart, stop.reason) == (False, ReasonCode.USER_ERROR)
    assert weighed(user_judgement(8), past, max_user_errors=9).restart
    assert weighed(user_judgement(7, "b"), past, max_user_errors=9).restart


def test_user_errors_have_a_budget_of_their_own() -> None:
    lost = PastFailure(Verdict.WORKER_LOST, 3)
    assert weighed(user_judgement(7), [lost] * 50).restart
    assert not weighed(user_judgement(7), [PastFailure(Verdict.USER_ERROR, 3, "x")]).restart
    assert not weighed(user_judgement(7), [], max_user_errors=0).restart


def lost_judgement(step: int | None) -> Judgement:
    return Judgement(Verdict.NODE_LOST, 1, "n1", step, None, None)


def test_progress_gives_the_system_budget_back() -> None:
    past = [PastFailure(Verdict.WORKER_LOST, step) for step in range(500)]
    assert weighed(lost_judgement(500), past, max_system_failures=1).restart
    assert not weighed(lost_judgement(500), [], max_system_failures=0).restart
    stop = weighed(lost_judgement(499), past, max_system_failures=1)
    assert (stop.restart, stop.reason) == (False, ReasonCode.SYSTEM_FAILURES_EXHAUSTED)


def test_a_script_that_reports_nothing_makes_progress_by_running_for_long() -> None:
    def lost(worked_s: float) -> Judgement:
        return replace(lost_judgement(None), detail={"worked_s": worked_s})

    short = [PastFailure(Verdict.NODE_LOST, None, worked_s=2.0)] * 40
    assert weighed(lost(2.0), short).reason is ReasonCode.NO_PROGRESS
    assert weighed(lost(301.0), short).restart
    after_long = [*short, PastFailure(Verdict.NODE_LOST, None, worked_s=301.0)]
    assert weighed(lost(2.0), after_long).restart
    assert weighed(lost(2.0), after_long).backoff_s == 0
    errors = [PastFailure(Verdict.USER_ERROR, None, "a", worked_s=301.0)]
    judgement = replace(user_judgement(1), step=None, detail={"worked_s": 301.0})
    assert weighed(judgement, errors, max_user_errors=2).restart
    stop = weighed(replace(judgement, detail={"worked_s": 2.0}), [replace(errors[0], worked_s=2.0)])
    assert str(stop.message).startswith("the same error of a script that had run for 2.0 s twice: ")
    assert not weighed(
        replace(judgement, detail={"worked_s": 1.0}), short[:0], max_user_errors=0
    ).restart


def test_failures_without_progress_back_off_and_then_stop() -> None:
    pauses = []
    past: list[PastFailure] = []
    for _ in range(19):
        decision = weighed(lost_judgement(5), past)
        assert decision.restart
        pauses.append(decision.backoff_s)
        past.append(PastFailure(Verdict.NODE_LOST, 5))
    assert pauses[:2] == [0.0, 0.0]
    assert pauses == sorted(pauses)
    assert max(pauses) == 30.0
    stop = weighed(lost_judgement(None), past)
    assert (stop.restart, stop.reason) == (False, ReasonCode.NO_PROGRESS)


def test_preemptions_are_never_refused() -> None:
    judgement = Judgement(Verdict.PREEMPTION, 1, "n1", 5, None, None)
    assert weighed(
        judgement, [PastFailure(Verdict.PREEMPTION, 5)] * 200, max_system_failures=0
    ).restart


def test_trouble_of_the_control_plane_fails_no_run_and_is_not_charged_to_it() -> None:
    judgement = Judgement(Verdict.CONTROL_PLANE, None, None, 5, "the driver was lost", None)
    past = [PastFailure(Verdict.CONTROL_PLANE, 5)] * 200
    decision = weighed(judgement, past, max_system_failures=0)
    assert (decision.restart, decision.budget, decision.backoff_s) == (True, "control_plane", 30.0)
    assert weighed(judgement, past[:1]).backoff_s == 0.0
    assert weighed(lost_judgement(5), past).backoff_s == 0.0, "a lost node is the first of its kind"


def storage_judgement(step: int | None = 5, kind: ErrorKind = ErrorKind.STORAGE) -> Judgement:
    message = "CorruptFile: line 3 is not an event"
    signature = "CorruptFile|line # is not an event|"
    return Judgement(Verdict.STORAGE, 0, "n0", step, message, signature, kind)


def test_trouble_of_the_storage_waits_longer_each_time_and_fails_no_run() -> None:
    past: list[PastFailure] = []
    pauses = []
    for _ in range(200):
        decision = weighed(storage_judgement(), past, max_system_failures=0)
        assert (decision.restart, decision.budget, decision.reason) == (True, "storage", None)
        assert "wait for the storage" in decision.action
        pauses.append(decision.backoff_s)
        past.append(PastFailure(Verdict.STORAGE, 5))
    assert pauses == sorted(pauses) and pauses[0] == 0.0 and pauses[-1] == 30.0
    assert weighed(lost_judgement(5), past).backoff_s == 0.0, "a lost node is the first of its kind"


def test_trouble_of_the_storage_pauses_a_run_that_chose_so() -> None:
    spec = CheckpointSpec(on_failed_saves="pause", max_failed_saves=3)

    def after(num_failures: int) -> Decision:
        past = [PastFailure(Verdict.STORAGE, 5)] * num_failures
        return decide(
            storage_judgement(),
            past,
            RecoverySpec(),
            no_progress_limit=20,
            backoff_max_s=30.0,
            checkpoint=spec,
        )

    assert after(1).restart
    paused = after(2)
    assert (paused.restart, paused.pause, paused.reason) == (
        False,
        True,
        ReasonCode.STORAGE_UNAVAILABLE,
    )
    assert (
        paused.message is not None
        and "resume" in paused.message
        and "line 3 is not an event" in paused.message
    )


def test_a_node_that_loses_its_mount_ends_no_run_that_has_trained() -> None:
    unshared = ErrorKind.STORAGE_NOT_SHARED
    assert weighed(storage_judgement(7, unshared), []).restart
    assert not weighed(storage_judgement(0, unshared), []).restart


@pytest.mark.parametrize(
    ("exc", "kind"),
    [
        (RuntimeError(GLOO), ErrorKind.COLLECTIVE),
        (RuntimeError("Application timeout caused pair closure"), ErrorKind.COLLECTIVE),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), ErrorKind.USER),
        (ConnectionResetError("Connection reset by peer"), ErrorKind.USER),
        (
            RuntimeError("DataLoader worker (pid 4711) is killed by signal: Killed. "),
            ErrorKind.LOADER_LOST,
        ),
        (
            RuntimeError("DataLoader worker (pid(s) 4711, 4712) exited unexpectedly"),
            ErrorKind.LOADER_LOST,
        ),
        (MemoryError(), ErrorKind.OUT_OF_MEMORY),
        (StorageFull("no space"), ErrorKind.STORAGE),
        (FloatingPointError("nan"), ErrorKind.USER),
        (KeyboardInterrupt(), ErrorKind.USER),
    ],
)
def test_exceptions_are_told_apart(exc: BaseException, kind: ErrorKind) -> None:
    assert kind_of(exc) is kind


def test_what_the_loop_raises_anew_stands_for_its_cause() -> None:
    cause = describe_error(RuntimeError(GLOO), 3)
    raised = StepFailed(dataclasses.replace(cause, step=41, phase="backward", snapshot_step=41))
    described = describe_error(raised, 3)
    assert (described.kind, described.type, described.step, described.phase) == (
        ErrorKind.COLLECTIVE,
        "RuntimeError",
        41,
        "backward",
    )
    assert described.collateral
    full = StepFailed(describe_error(StorageFull("x"), 0))
    assert describe_error(full, 0).kind is ErrorKind.STORAGE


def test_a_signature_survives_addresses_and_numbers_but_not_another_place() -> None:
    def at(message: str, line: int) -> str:
        return RankError(
            0, ErrorKind.USER, "E", message, f'File "t.py", line {line}', 1, None, 0.0
        ).signature

    assert at("<obj at 0x7f1> is 3 long", 5) == at("<obj at 0x9ab2> is 41 long", 5)
    assert at("bad", 5) != at("bad", 6)


def test_a_rank_failure_survives_pickling() -> None:
    failure = StepFailed(error(2, ErrorKind.USER, 1.5))
    again = pickle.loads(pickle.dumps(failure))
    assert again.error == failure.error
    assert str(again) == str(failure)


def test_a_gpu_too_small_twice_at_one_step_stops_the_run_and_shows_who_held_its_memory() -> None:
    def too_small(step: int, amount: str) -> Judgement:
        message = f"CUDA out of memory. Tried to allocate {amount}"
        found = RankError(
            0,
            ErrorKind.DEVICE_MEMORY,
            "OutOfMemoryError",
            message,
            "",
            step,
            "step",
            1.0,
            memory="cuda:0: 79.2 GiB",
        )
        return judged(report(0, error=found))

    first = too_small(10, "2.00 GiB")
    assert first.detail["memory"] == "cuda:0: 79.2 GiB"
    assert weighed(first, []).restart
    past = [PastFailure(first.verdict, first.step, first.signature)]
    assert weighed(too_small(11, "2.00 GiB"), past).restart
    decision = weighed(too_small(10, "1.50 GiB"), past)
    assert (decision.restart, decision.reason) == (False, ReasonCode.USER_ERROR)
    assert "lower train.micro_batch_size" in str(decision.message)
    of_the_host = judged(report(0, died=True, death="Worker exit type: NODE_OUT_OF_MEMORY"))
    assert weighed(of_the_host, [PastFailure(of_the_host.verdict, of_the_host.step, None)]).restart


@pytest.mark.parametrize("phase", ["start", "restore"])
def test_a_gpu_that_a_dead_rank_still_fills_is_not_too_small(phase: str) -> None:
    def at_the_start() -> Judgement:
        found = RankError(
            0, ErrorKind.DEVICE_MEMORY, "OutOfMemoryError", "CUDA out of memory", "", None, phase, 1
        )
        return judge(Evidence(attempt=2, noticed_at=50.0, ranks=(report(0, error=found),)))

    died = PastFailure(Verdict.WORKER_LOST, 40)
    found, past = at_the_start(), [died]
    for _ in range(3):
        assert weighed(at_the_start(), past).restart
        past.append(past_of(found))
    assert weighed(at_the_start(), [*past, died]).restart, "another rank has died since"
    decision = weighed(at_the_start(), past)
    assert (decision.restart, decision.reason) == (False, ReasonCode.USER_ERROR)


def test_a_hang_without_evidence_of_who_hangs_names_nobody() -> None:
    """All ranks of a group on GPUs sit in one call: an innocent node must not be counted out."""
    given_up = report(2, unresponsive=True, is_unproven=True, hang="no sign of life for 60 s")
    result = judged(report(0, still_running=True, held_up=True), given_up)
    assert (result.verdict, result.first_rank, result.node_id) == (Verdict.HANG, None, None)
    assert result.exception == "no sign of life for 60 s", "what the limit was is told all the same"
    proven = report(1, unresponsive=True)
    result = judged(proven, given_up)
    assert (result.verdict, result.first_rank, result.node_id) == (Verdict.HANG, 1, "n1")


def of_the_device(node: str, step: int = 10, faults: str = "") -> Judgement:
    message = f"CUDA error: an illegal memory access was encountered{faults}"
    found = RankError(
        1, ErrorKind.DEVICE, "AcceleratorError", message, "", step, "step", 1.0, device={"xids": []}
    )
    return judged(dataclasses.replace(report(1, error=found), node_id=node))


def past_of(judgement: Judgement) -> PastFailure:
    return PastFailure(judgement.verdict, judgement.step, judgement.signature, judgement.node_id)


def test_an_error_of_the_device_is_the_hardware_s_until_it_follows_the_run() -> None:
    first = of_the_device("n1")
    assert (first.verdict, first.first_rank, first.node_id) == (Verdict.HARDWARE, 1, "n1")
    assert first.detail["device"] == {"xids": []}
    decision = weighed(first, [])
    assert (decision.restart, decision.budget) == (True, "system_failures")
    assert (decision.action, decision.leave_out) == ("restart at once elsewhere", "n1")
    needed = weighed(first, [], ("n0", "n2"))
    assert (needed.restart, needed.leave_out) == (True, None), "it would wait for n1 for a minute"
    assert needed.action == "restart at once on what is alive"
    on_the_same = weighed(of_the_device("n1"), [past_of(first)])
    at_another_step = weighed(of_the_device("n2", step=11), [past_of(first)])
    assert on_the_same.restart and at_another_step.restart
    followed = weighed(of_the_device("n2"), [past_of(first)])
    assert (followed.restart, followed.reason) == (False, ReasonCode.USER_ERROR)
    assert "on two nodes" in str(followed.message)


def apart(node_id: str | None, step: int = 100) -> Judgement:
    """Return the judgement of ranks that went apart."""
    of_one = of_the_device("n1", step=step)
    return dataclasses.replace(of_one, verdict=Verdict.SILENT_CORRUPTION, node_id=node_id)


def audited(node_id: str | None, step: int = 100) -> Judgement:
    """Return the judgement of an audit."""
    return dataclasses.replace(apart(node_id, step), signature="Miscomputed|an audit|audit.py:9")


def test_two_audits_that_cannot_be_decided_end_the_run() -> None:
    first, second = audited(None), audited(None, step=9000)
    assert weighed(first, []).restart
    decision = weighed(second, [past_of(first)])
    assert (decision.restart, decision.reason) == (False, ReasonCode.USER_ERROR)
    assert "two audits could not be decided" in str(decision.message)


@pytest.mark.parametrize(
    ("before", "now", "ends"),
    [
        (apart("n1"), apart("n2"), True),
        (apart(None), apart(None), True),
        (apart("n1"), apart(None, step=164), True),
        (apart("n1"), apart("n1"), False),
        (apart("n1"), apart("n2", step=165), False),
        (of_the_device("n1", step=100), apart("n2"), False),
        (audited("n1"), audited(None, step=9000), False),
        (audited("n1"), audited("n1", step=9000), False),
        (apart(None), audited(None, step=9000), False),
    ],
)
def test_ranks_that_go_apart_again_at_the_same_step_do_so_by_the_task(
    before: Judgement, now: Judgement, ends: bool
) -> None:
    assert weighed(before, []).restart
    decision = weighed(now, [past_of(before)])
    assert decision.restart is not ends
    if ends:
        assert decision.reason is ReasonCode.USER_ERROR
        assert "went apart twice" in str(decision.message)


def test_only_the_same_error_of_a_device_is_one_that_follows_the_run() -> None:
    first, second = past_of(of_the_device("n1")), of_the_device("n2")
    assert weighed(second, [dataclasses.replace(first, signature="another")]).restart
    assert weighed(second, [dataclasses.replace(first, verdict=Verdict.WORKER_LOST)]).restart
    assert weighed(dataclasses.replace(second, verdict=Verdict.UNKNOWN), [first]).restart
    assert not weighed(second, [first]).restart


def test_two_nodes_with_faulty_gpus_are_not_the_program_s_fault() -> None:
    faults = f"; {GPU_FAULTY}Xid 79: the GPU has fallen off the bus"
    first, second = of_the_device("n1", faults=faults), of_the_device("n2", faults=faults)
    assert weighed(second, [past_of(first)]).restart


def test_a_failure_before_it_is_known_where_the_run_is_takes_no_progress_back() -> None:
    past = [PastFailure(Verdict.WORKER_LOST, 100 * number) for number in range(1, 20)]
    early = Judgement(Verdict.NODE_LOST, 0, "n0", None, None, None)
    assert weighed(early, past).restart and weighed(early, past).backoff_s == 0
    again = [*past, *[PastFailure(Verdict.NODE_LOST, None)] * 18]
    stopped = weighed(early, again)
    assert not stopped.restart and stopped.reason is ReasonCode.NO_PROGRESS, (
        "but the same again and again is no progress"
    )
    before_restore = dataclasses.replace(error(0, ErrorKind.STORAGE, 1.0), step=None)
    assert judged(report(0, error=before_restore)).step == 12, "what the journal knows"
