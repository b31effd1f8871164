"""The kind of an error follows from its real class, its bases and its explicit cause."""

from __future__ import annotations

import builtins
import errno
import inspect
import pickle
import resource
from collections.abc import Callable
from pathlib import Path
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
from storage.code import unpack
from storage.errors import StorageError, StorageUnavailable, mapped
from tests.support.code_archives import tar_gz
from train_fn.errors import BadTask, DataMissing, StepNotWhole, TrainError
from train_fn.ray_train.group.end import with_error
from train_fn.recovery.evidence import (
    VERDICT_OF_KIND,
    Evidence,
    RankError,
    RankReport,
    StepFailed,
    describe_error,
    kind_of,
    kind_of_death,
)
from train_fn.recovery.verdict import judge


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
    train_fn.errors.EndedItself: ErrorKind.EXITED,
    train_fn.errors.NumericsChanged: ErrorKind.DEVICE,
    train_fn.errors.RanksApart: ErrorKind.CORRUPTION,
    train_fn.errors.Miscomputed: ErrorKind.CORRUPTION,
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


OF_THE_OS = [OSError, PermissionError, type("Mine", (OSError,), {})]


@given(st.sampled_from(OF_THE_OS), st.sampled_from(sorted(errno.errorcode)))
def test_an_error_of_the_os_is_the_user_s_unless_storage_code_raised_it(
    cls: type[OSError], number: int
) -> None:
    is_used_up = number in (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
    exc = cls(number, "why")
    assert kind_of(exc) is ErrorKind.USER
    inside = raised_in(exc, ("storage.files.local", "local.py", "write"))
    assert kind_of(inside) is (ErrorKind.USER if is_used_up else ErrorKind.STORAGE)
    beside = raised_in(cls(number, "why"), ("storage_of_mine.files", "local.py", "write"))
    assert kind_of(beside) is ErrorKind.USER


@pytest.mark.parametrize(
    "exc",
    [
        OSError(errno.EMFILE, "Too many open files"),
        OSError(errno.ENFILE, "Too many open files in system"),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
        OSError("Caught OSError in DataLoader worker process 0.\n[Errno 24] Too many open files"),
        RuntimeError("received 0 items of ancdata"),
        RuntimeError(
            "unable to open shared memory object </t> in read-write mode: Too many open files (24)"
        ),
    ],
)
def test_what_a_process_has_used_up_is_its_own_whoever_met_it_first(exc: Exception) -> None:
    lost = StorageUnavailable("the journal cannot be written")
    lost.__cause__ = exc
    for met in (exc, lost):
        error = describe_error(met, 0)
        assert judge(Evidence(1, 0.0, (RankReport(0, "n0", 1, error=error),))).verdict is (
            Verdict.USER_ERROR
        )
        most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        assert f" of {most} files open" in error.message and "ulimit -n" in error.message
    assert kind_of(StorageUnavailable("the server says: Too many open files")) is ErrorKind.STORAGE


def raised_in(exc: BaseException, *places: tuple[str, str, str]) -> BaseException:
    """Return ``exc`` raised through functions, each given as module, file and name."""

    def innermost() -> None:
        raise exc

    inner = innermost
    for module, file, name in reversed(places):
        scope: dict[str, Any] = {"__name__": module, "inner": inner}
        exec(compile(f"def {name}(): inner()", file, "exec"), scope)
        inner = scope[name]
    with pytest.raises(type(exc)) as caught:
        inner()
    return caught.value


def full_disk(write: Callable[[], object]) -> RankError:
    with pytest.raises((OSError, StorageError)) as caught:
        write()
    return describe_error(caught.value, 0)


def test_a_full_disk_under_everstep_s_storage_is_the_storage_s(tmp_path: Path) -> None:
    def write() -> None:
        with mapped("write", "checkpoints/a"), Path("/dev/full").open("wb", buffering=0) as file:
            file.write(b"x")

    full = full_disk(write)
    assert (full.kind, full.type) == (ErrorKind.STORAGE, "StorageFull")
    (tmp_path / "a file").touch()
    archive = tar_gz({"mine/task.py": ""})
    not_ours = full_disk(lambda: unpack(archive, tmp_path / "a file"))
    assert issubclass(getattr(builtins, not_ours.type), OSError), "storage code did not map it"
    assert not_ours.kind is ErrorKind.STORAGE
    for each in (full, not_ours):
        assert VERDICT_OF_KIND[each.kind] is Verdict.STORAGE
        assert "let your code write" not in each.message


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


OF_A_GPU: list[tuple[BaseException, ErrorKind]] = [
    (torch.AcceleratorError("CUDA error: an illegal memory access"), ErrorKind.DEVICE),
    (torch.AcceleratorError("CUDA error: out of memory\nCUDA kernel"), ErrorKind.DEVICE_MEMORY),
    (torch.AcceleratorError("CUDA error: device-side assert triggered"), ErrorKind.USER),
    (RuntimeError("CUDA error: device-side assert triggered"), ErrorKind.USER),
    (RuntimeError("CUDA error: uncorrectable ECC error encountered"), ErrorKind.DEVICE),
    (
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`"),
        ErrorKind.DEVICE_MEMORY,
    ),
    (
        RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm`"),
        ErrorKind.DEVICE,
    ),
    (RuntimeError("CUDA error: CUBLAS_STATUS_INVALID_VALUE when calling"), ErrorKind.USER),
    (RuntimeError("CUDA error: CUBLAS_STATUS_NOT_SUPPORTED when calling"), ErrorKind.USER),
    (RuntimeError("cublasLt: CUBLAS_STATUS_EXECUTION_FAILED"), ErrorKind.DEVICE),
    (RuntimeError("HIP error: an illegal memory access was encountered"), ErrorKind.DEVICE),
    (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), ErrorKind.DEVICE_MEMORY),
    (RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"), ErrorKind.DEVICE),
    (RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR"), ErrorKind.DEVICE),
    (RuntimeError("cuDNN error: CUDNN_STATUS_MAPPING_ERROR"), ErrorKind.DEVICE),
    (RuntimeError("cuDNN error: CUDNN_STATUS_NOT_INITIALIZED"), ErrorKind.DEVICE),
    (RuntimeError("cuDNN error: CUDNN_STATUS_BAD_PARAM"), ErrorKind.USER),
    (RuntimeError("NCCL Error 2: unhandled system error"), ErrorKind.COLLECTIVE),
    (RuntimeError("NCCL communicator was aborted on rank 1"), ErrorKind.COLLECTIVE),
    (RuntimeError("Some NCCL operations have failed or timed out."), ErrorKind.COLLECTIVE),
    (type("Mine", (RuntimeError,), {})("CUDA error: in a user's words"), ErrorKind.USER),
    (dist.DistBackendError("NCCL error in: ProcessGroupNCCL.cpp:1"), ErrorKind.COLLECTIVE),
    (ValueError("CUDA error: told by a user"), ErrorKind.USER),
]


def too_much_of_the_host() -> BaseException:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(10**14)
    return caught.value


HALF_READ = [ConnectionResetError, FileNotFoundError, EOFError]
LOADER = ("torch.utils.data.dataloader", "/x/torch/utils/data/dataloader.py", "_try_get_data")
PIPE = ("multiprocessing.connection", "/x/multiprocessing/connection.py", "recv")

EXAMPLES: list[tuple[BaseException, ErrorKind]] = [
    *OF_A_GPU,
    *((made(cls), kind) for cls, kind in CLASSIFIED.items()),
    (OSError(errno.ENOMEM, "Cannot allocate memory"), ErrorKind.USER),
    (too_much_of_the_host(), ErrorKind.OUT_OF_MEMORY),
    (RuntimeError("[x] DefaultCPUAllocator: not enough memory: you"), ErrorKind.OUT_OF_MEMORY),
    (raised_in(OSError(errno.ENOSPC, "full"), ("storage.claims", "c.py", "f")), ErrorKind.STORAGE),
    (RuntimeError("[../third_party/gloo/gloo/transport/tcp/pair.cc:1] x"), ErrorKind.COLLECTIVE),
    (RuntimeError("DataLoader worker (pid 7) is killed by signal: 9"), ErrorKind.LOADER_LOST),
    *((raised_in(each("gone"), LOADER, PIPE), ErrorKind.LOADER_LOST) for each in HALF_READ),
    *((raised_in(each("gone"), PIPE), ErrorKind.USER) for each in HALF_READ),
]


@pytest.mark.parametrize(("exc", "kind"), EXAMPLES)
def test_an_example_of_each_row(exc: BaseException, kind: ErrorKind) -> None:
    assert kind_of(exc) is kind


def test_an_error_that_cannot_say_its_message_is_classified() -> None:
    class Mute:
        def __str__(self) -> str:
            raise LookupError

    assert kind_of(RuntimeError(Mute())) is ErrorKind.USER


def test_every_kind_but_the_collateral_one_has_a_verdict() -> None:
    assert set(ErrorKind) - set(VERDICT_OF_KIND) == {ErrorKind.COLLECTIVE}


def test_what_ray_wraps_is_of_its_cause_s_kind() -> None:
    cause = type("Mine", (MemoryError,), {})("too much")
    wrapped = RayTaskError("f", "Traceback …/gloo/…", cause).as_instanceof_cause()
    report = with_error(RankReport(0, "n0", 100), wrapped)
    assert report.error is not None
    own = type("Mine", (ValueError,), {"cause": None})("what a user's class has of that name")
    assert with_error(RankReport(0, "n0", 100), own).error is not None
    assert (report.error.kind, report.error.type) == (ErrorKind.OUT_OF_MEMORY, "Mine")


def test_only_ray_s_account_of_a_death_is_read_by_its_words() -> None:
    message = "The actor died.\nWorker exit type: NODE_OUT_OF_MEMORY"
    assert kind_of_death(message) is ErrorKind.OUT_OF_MEMORY
    assert kind_of_death("Worker exit type: SYSTEM_ERROR") is None and kind_of_death(None) is None
