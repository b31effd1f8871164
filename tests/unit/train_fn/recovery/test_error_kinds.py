"""The kind of an error follows from its real class, its bases and its explicit cause."""

from __future__ import annotations

import errno
import inspect
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from ray.exceptions import OutOfMemoryError, RayTaskError

import storage.errors
import train_fn.errors
from everstep.wire import ErrorKind, Verdict
from storage.errors import StorageError, StorageUnavailable
from train_fn.errors import BadTask, DataMissing, StepNotWhole, TrainError
from train_fn.ray_train.rank_reports import with_error
from train_fn.recovery.error_kinds import VERDICT_OF_KIND, kind_of, kind_of_death
from train_fn.recovery.rank_error import StepFailed, describe_error
from train_fn.recovery.verdict import Evidence, RankReport, judge


def classes_of(module: Any, base: type[BaseException]) -> list[type[BaseException]]:
    found = [each for _, each in inspect.getmembers(module, inspect.isclass)]
    return [each for each in found if issubclass(each, base)]


CLASSIFIED: dict[type[BaseException], ErrorKind] = {
    MemoryError: ErrorKind.OUT_OF_MEMORY,
    OutOfMemoryError: ErrorKind.OUT_OF_MEMORY,
    torch.OutOfMemoryError: ErrorKind.DEVICE_MEMORY,
    torch.AcceleratorError: ErrorKind.DEVICE,
    dist.DistError: ErrorKind.COLLECTIVE,
    StorageError: ErrorKind.STORAGE,
    train_fn.errors.PeersGone: ErrorKind.COLLECTIVE,
    train_fn.errors.Replaced: ErrorKind.COLLECTIVE,
    train_fn.errors.CheckpointFailed: ErrorKind.STORAGE,
    train_fn.errors.StorageNotShared: ErrorKind.STORAGE_NOT_SHARED,
    train_fn.errors.StepNotWhole: ErrorKind.EXCHANGE,
    train_fn.errors.StateNotWhole: ErrorKind.EXCHANGE,
    BaseException: ErrorKind.USER,
}
"""Written down once more, by hand: what the table is compared with."""

OF_TORCH = [torch.OutOfMemoryError, torch.AcceleratorError, dist.DistError, dist.DistBackendError]
OF_PYTHON = [MemoryError, OSError, ValueError, KeyError, RuntimeError, ConnectionResetError]
KNOWN = [
    *classes_of(train_fn.errors, TrainError),
    *classes_of(storage.errors, StorageError),
    *OF_TORCH,
    *OF_PYTHON,
    OutOfMemoryError,
]
NAMES = ["Mine", "MemoryError", "StorageFull", "DistBackendError", "ValueError", "PeersGone"]


def made(cls: type[BaseException], *args: object) -> BaseException:
    """An instance, whatever its constructor wants."""
    exc = cls.__new__(cls, *args)
    exc.args = args
    return exc


@given(st.sampled_from(KNOWN), st.lists(st.sampled_from(NAMES), max_size=3))
def test_a_class_is_of_the_kind_of_its_nearest_classified_base(
    base: type[BaseException], names: list[str]
) -> None:
    cls = base
    for name in names:
        cls = type(name, (cls,), {"kind": "hang", "type_name": "MemoryError", "message": "NCCL"})
    expected = next(CLASSIFIED[each] for each in cls.__mro__ if each in CLASSIFIED)
    exc = made(cls, "what was said")
    assert kind_of(exc) is expected
    error = describe_error(exc, 2)
    assert (error.kind, error.type) == (expected, cls.__name__)
    carried = pickle.loads(pickle.dumps(StepFailed(error)))
    assert describe_error(carried, 2) == error, "what was found out is not found out again"
    report = with_error(RankReport(2, "n2", 102), carried)
    if expected is not ErrorKind.COLLECTIVE:
        assert judge(Evidence(1, 0.0, (report,))).verdict is VERDICT_OF_KIND[expected]
    else:
        assert judge(Evidence(1, 0.0, (report,))).verdict is Verdict.UNKNOWN


@given(
    st.sampled_from([OSError, PermissionError, type("Mine", (OSError,), {})]),
    st.sampled_from(sorted(errno.errorcode)),
)
def test_an_error_of_the_os_is_of_the_kind_of_its_number(cls: type[OSError], number: int) -> None:
    disk = {errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EBADMSG, errno.EUCLEAN, errno.ESTALE}
    expected = ErrorKind.STORAGE if number in disk else ErrorKind.USER
    if number == errno.ENOMEM:
        expected = ErrorKind.OUT_OF_MEMORY
    assert kind_of(cls(number, "why")) is expected


def raised_from(exc: BaseException, cause: BaseException | None) -> BaseException:
    exc.__cause__ = cause
    return exc


def test_an_explicit_cause_decides_where_the_class_says_nothing() -> None:
    away = StorageUnavailable("no route to host")
    assert kind_of(raised_from(BadTask("no import"), away)) is ErrorKind.STORAGE
    twice = raised_from(ValueError("b"), raised_from(KeyError("a"), MemoryError()))
    assert kind_of(twice) is ErrorKind.OUT_OF_MEMORY
    assert kind_of(raised_from(away, MemoryError())) is ErrorKind.STORAGE, "the nearest counts"
    missing = raised_from(DataMissing("no such set"), FileNotFoundError(errno.ENOENT, "no file"))
    assert kind_of(missing) is ErrorKind.USER
    circle = ValueError("a")
    assert kind_of(raised_from(circle, raised_from(ValueError("b"), circle))) is ErrorKind.USER
    assert kind_of(ExceptionGroup("two", [StepNotWhole(3, "half"), ValueError()])) is (
        ErrorKind.EXCHANGE
    )


def test_an_error_in_a_handler_is_not_what_was_handled() -> None:
    with pytest.raises(NameError) as caught:
        try:
            raise StorageUnavailable("away")
        except StorageError:
            undefined  # type: ignore[name-defined]  # noqa: B018, F821
    assert caught.value.__context__ is not None
    assert kind_of(caught.value) is ErrorKind.USER


@pytest.mark.parametrize(
    ("exc", "kind"),
    [
        (torch.AcceleratorError("CUDA error: an illegal memory access"), ErrorKind.DEVICE),
        (torch.AcceleratorError("CUDA error: out of memory\nCUDA kernel"), ErrorKind.DEVICE_MEMORY),
        (torch.AcceleratorError("CUDA error: device-side assert triggered"), ErrorKind.USER),
        (RuntimeError("CUDA error: uncorrectable ECC error encountered"), ErrorKind.DEVICE),
        (
            RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`"),
            ErrorKind.DEVICE_MEMORY,
        ),
        (
            RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm`"),
            ErrorKind.DEVICE,
        ),
        (RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"), ErrorKind.DEVICE),
        (RuntimeError("cuDNN error: CUDNN_STATUS_BAD_PARAM"), ErrorKind.USER),
        (RuntimeError("NCCL Error 2: unhandled system error"), ErrorKind.COLLECTIVE),
        (dist.DistBackendError("NCCL error in: ProcessGroupNCCL.cpp:1"), ErrorKind.COLLECTIVE),
        (ValueError("CUDA error: told by a user"), ErrorKind.USER),
    ],
)
def test_faults_of_a_gpu_spend_no_budget_of_the_user(exc: BaseException, kind: ErrorKind) -> None:
    assert kind_of(exc) is kind
    assert (VERDICT_OF_KIND.get(kind) is Verdict.USER_ERROR) == (kind is ErrorKind.USER)


def test_every_kind_but_the_collateral_one_has_a_verdict() -> None:
    assert set(ErrorKind) - set(VERDICT_OF_KIND) == {ErrorKind.COLLECTIVE}


def test_what_ray_wraps_is_of_its_cause_s_kind() -> None:
    cause = type("Mine", (MemoryError,), {})("too much")
    wrapped = RayTaskError("f", "Traceback …/gloo/…", cause).as_instanceof_cause()
    report = with_error(RankReport(0, "n0", 100), wrapped)
    assert report.error is not None
    assert (report.error.kind, report.error.type) == (ErrorKind.OUT_OF_MEMORY, "Mine")


def test_only_ray_s_account_of_a_death_is_read_by_its_words() -> None:
    told = "The actor died.\nWorker exit type: NODE_OUT_OF_MEMORY"
    assert kind_of_death(told) is ErrorKind.OUT_OF_MEMORY
    assert kind_of_death("Worker exit type: SYSTEM_ERROR") is None and kind_of_death(None) is None
