"""Errors of the OS and of pyarrow all become ours, and ours travel between processes."""

from __future__ import annotations

import errno
import pickle

import pyarrow
import pytest

from storage import errors
from storage.errors import StorageError, from_foreign, mapped

EXAMPLES: list[StorageError] = [
    errors.CorruptCheckpoint("step-000000050.s001.a001", "model.pt", "10 bytes", "9 bytes"),
    errors.CheckpointExists("step-000000050.s001.a001"),
    errors.CheckpointReplaced("step-000000050.s001.a001"),
    *(cls("words") for cls in StorageError.__subclasses__() if cls.__init__ is Exception.__init__),
]


@pytest.mark.parametrize("number", sorted(errno.errorcode))
def test_every_error_of_the_os_is_mapped(number: int) -> None:
    with (
        pytest.raises(StorageError, match="cannot read /some/file: ") as caught,
        mapped("read", "/some/file"),
    ):
        raise OSError(number, "words", "/some/file")
    assert isinstance(caught.value.__cause__, OSError)


@pytest.mark.parametrize(
    ("exc", "ours"),
    [
        (OSError(errno.ENOSPC, "full"), errors.StorageFull),
        (PermissionError(errno.EACCES, "no"), errors.StorageDenied),
        (FileNotFoundError(errno.ENOENT, "no"), errors.StorageNotFound),
        (FileNotFoundError("pyarrow gives no number"), errors.StorageNotFound),
        (OSError(errno.EIO, "bad sector"), errors.StorageUnreadable),
        (OSError("AWS Error ACCESS_DENIED during PutObject"), errors.StorageDenied),
        (OSError("AWS Error NO_SUCH_BUCKET during CreateMultipartUpload"), errors.StorageNotFound),
        (
            OSError(
                "UNAVAILABLE: Could not create a OAuth2 access token to authenticate the request"
            ),
            errors.StorageDenied,
        ),
        (OSError("AWS Error NETWORK_CONNECTION"), errors.StorageUnavailable),
        (pyarrow.ArrowInvalid("odd"), errors.StorageUnavailable),
        (pyarrow.ArrowException("odd"), errors.StorageUnavailable),
    ],
)
def test_kinds(exc: Exception, ours: type[StorageError]) -> None:
    assert type(from_foreign(exc, "read", "x")) is ours


def test_bugs_stay_what_they_are() -> None:
    with pytest.raises(ZeroDivisionError), mapped("read", "x"):
        _ = 1 / 0
    corrupt = errors.CorruptFile("ours")
    with pytest.raises(errors.CorruptFile) as caught, mapped("read", "x"):
        raise corrupt
    assert caught.value is corrupt


@pytest.mark.parametrize("error", EXAMPLES, ids=lambda error: type(error).__name__)
def test_errors_survive_pickling(error: StorageError) -> None:
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again), vars(again)) == (type(error), str(error), vars(error))


def test_the_examples_are_all_of_them() -> None:
    assert {type(error) for error in EXAMPLES} == set(StorageError.__subclasses__())
