"""What follows a failure: restart, wait, pause or end, by the budgets and rules of a run."""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from everstep.spec.sections import CheckpointSpec, RecoverySpec
from everstep.wire import ErrorKind, ReasonCode, Verdict
from everstep.wire.events import GPU_FAULTY
from tests.unit.train_fn.recovery.test_verdict import error, judged, report
from train_fn.recovery import decision
from train_fn.recovery.decision import Decision, PastFailure, decide
from train_fn.recovery.evidence import Evidence, RankError
from train_fn.recovery.verdict import ALL_DIED, Judgement, judge


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
        backoff_max_s=30.0,
        dispensable=lambda: dispensable,
    )


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


def test_a_node_on_which_one_rank_alone_cannot_build_is_left_out() -> None:
    """A second error of that kind at one step would end the run."""

    def failed(phase: str, *by: int) -> Judgement:
        missing = RankError(0, ErrorKind.USER, "OSError", "no /data", "", 40, phase, 1.0)
        reports = [report(rank, error=missing if rank in by else None) for rank in range(2)]
        return judge(Evidence(attempt=2, noticed_at=50.0, ranks=tuple(reports)))

    assert weighed(failed("start", 1), []).leave_out == "n1"
    assert weighed(failed("start", 1), [], dispensable=("n0",)).leave_out is None
    for found in (failed("start", 0, 1), failed("step", 1)):
        assert (weighed(found, []).restart, weighed(found, []).leave_out) == (True, None)


def lost_judgement(step: int | None) -> Judgement:
    return Judgement(Verdict.NODE_LOST, 1, "n1", step, None, None)


def test_progress_gives_the_system_budget_back() -> None:
    past = [PastFailure(Verdict.WORKER_LOST, step) for step in range(500)]
    assert weighed(lost_judgement(500), past, max_system_failures=1).restart
    assert not weighed(lost_judgement(500), [], max_system_failures=0).restart
    stop = weighed(lost_judgement(499), past, max_system_failures=1)
    assert (stop.restart, stop.reason) == (False, ReasonCode.SYSTEM_FAILURES_EXHAUSTED)
    lost = [10_000, *(50 * number + (60 if number % 2 else 120) for number in range(100))]
    made_again = [PastFailure(Verdict.WORKER_LOST, step) for step in lost]
    assert weighed(lost_judgement(5060), made_again).restart, "each second one got further"


def test_a_script_that_reports_nothing_makes_progress_by_running_for_long() -> None:
    def lost(worked_s: float) -> Judgement:
        return replace(lost_judgement(None), detail={"worked_s": worked_s})

    short = [PastFailure(Verdict.NODE_LOST, None, worked_s=2.0)] * 40
    assert weighed(lost(2.0), short).reason is ReasonCode.SYSTEM_FAILURES_EXHAUSTED
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
    for _ in range(20):
        decision = weighed(lost_judgement(5), past)
        assert decision.restart
        pauses.append(decision.backoff_s)
        past.append(PastFailure(Verdict.NODE_LOST, 5))
    assert pauses == sorted(pauses) and (pauses[1], max(pauses)) == (0.0, 30.0)
    assert weighed(lost_judgement(None), past).reason is ReasonCode.SYSTEM_FAILURES_EXHAUSTED
    assert weighed(lost_judgement(None), past, max_system_failures=30).restart


@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_whatever_fails_a_run_without_a_new_step_ends(
    data: st.DataObject, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may lose steps and make them again, but gets no further than step 3."""
    monkeypatch.setattr(decision, "OUTSIDE_LIMIT", 30)
    verdicts = data.draw(st.lists(st.sampled_from(Verdict), min_size=1, max_size=4, unique=True))
    failures = st.tuples(
        st.sampled_from(verdicts),
        st.one_of(st.none(), st.integers(0, 3)),
        st.sampled_from([None, *ErrorKind]),
        st.sampled_from(["a", "b", ALL_DIED, None]),
    )
    again = data.draw(st.lists(failures, min_size=1, max_size=8))
    past: list[PastFailure] = []
    for verdict, step, kind, signature in itertools.islice(itertools.cycle(again), 1500):
        failed = Judgement(verdict, 0, "n0", step, "why", signature, kind)
        followed = weighed(failed, past, max_user_errors=5)
        if not followed.restart:
            assert followed.reason is not None and followed.message
            return
        past.append(PastFailure(verdict, step, signature, "n0"))
    raise AssertionError(f"{len(past)} restarts without a new step")


@pytest.mark.parametrize("verdict", Verdict)
def test_each_verdict_has_its_limit(verdict: Verdict) -> None:
    past: list[PastFailure] = []
    while weighed(failed := Judgement(verdict, 0, "n0", 5, "why", "a"), past).restart:
        past.append(PastFailure(verdict, 5, "a", "n0"))
        assert len(past) < 2000
    outside = (Verdict.STORAGE, Verdict.CONTROL_PLANE, Verdict.PREEMPTION)
    if verdict is Verdict.USER_ERROR:
        assert len(past) == 1, "the same error twice"
    else:
        assert len(past) + 1 == (1000 if verdict in outside else 21)
        assert weighed(replace(failed, step=6), past).restart, "it has moved on"
    assert weighed(failed, past).pause is (verdict is Verdict.STORAGE)


def storage_judgement(step: int | None = 5, kind: ErrorKind = ErrorKind.STORAGE) -> Judgement:
    message = "CorruptFile: line 3 is not an event"
    signature = "CorruptFile|line # is not an event|"
    return Judgement(Verdict.STORAGE, 0, "n0", step, message, signature, kind)


def test_trouble_of_the_storage_pauses_a_run_that_chose_so() -> None:
    spec = CheckpointSpec(on_failed_saves="pause", max_failed_saves=3)

    def after(num_failures: int) -> Decision:
        past = [PastFailure(Verdict.STORAGE, 5)] * num_failures
        return decide(
            storage_judgement(),
            past,
            RecoverySpec(),
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


def test_two_nodes_with_faulty_gpus_are_not_the_program_s_fault() -> None:
    faults = f"; {GPU_FAULTY}Xid 79: the GPU has fallen off the bus"
    first, second = of_the_device("n1", faults=faults), of_the_device("n2", faults=faults)
    assert weighed(second, [past_of(first)]).restart


ALL = PastFailure(Verdict.WORKER_LOST, 20, ALL_DIED)
ONE = PastFailure(Verdict.WORKER_LOST, 20)
EARLIER = replace(ALL, step=18)


@pytest.mark.parametrize(
    ("past", "ends"),
    [
        ([ALL] * 4, False),
        ([ALL] * 5, True),
        ([EARLIER, EARLIER, EARLIER, ALL, ALL], True),  # what the dead had not reported yet
        ([ALL, ALL, ALL, ALL, EARLIER], False),
        ([ALL, ALL, ONE, ALL, ALL], False),
        ([ONE] * 9, False),
        ([EARLIER] * 9, False),  # it has moved on
    ],
)
def test_a_run_whose_ranks_all_die_at_one_step_again_and_again_ends(
    past: list[PastFailure], ends: bool
) -> None:
    both = judged(report(0, died=True), report(1, died=True))
    decision = weighed(replace(both, step=20), past)
    assert decision.restart is not ends
    if ends:
        assert decision.reason is ReasonCode.NO_PROGRESS
        assert "times in a row without an error, the last 3 times at step 20" in str(
            decision.message
        )
    elif past[-1].signature == ALL_DIED:
        assert "times in a row, so their code may be the cause" in decision.action


def test_code_that_ends_its_process_twice_at_one_step_ends_the_run_and_else_goes_on() -> None:
    first = judged(report(1, error=error(1, ErrorKind.EXITED, 1.0, 20)))
    assert (first.verdict, first.first_rank) == (Verdict.WORKER_LOST, 1)
    decision = weighed(first, [])
    assert (decision.restart, decision.budget) == (True, "system_failures")
    assert weighed(first, [replace(past_of(first), step=19)]).restart, "a watchdog of the user's"
    stopped = weighed(first, [past_of(first)])
    assert (stopped.restart, stopped.reason) == (False, ReasonCode.USER_ERROR)
    assert "at step 20 twice" in str(stopped.message)
