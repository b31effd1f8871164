"""The embedded cluster's start on a machine that is busy: tried again, for two minutes at least,
and not for a wrong setting."""

from __future__ import annotations

import pytest

from service.embedded import keeper as patience
from service.embedded.keeper import RETRY_S, start_patiently


class Start:
    """Fails so often, each time after so many seconds of a clock that nothing else moves."""

    def __init__(
        self, failures: int, seconds: float = 20.0, error: Exception | None = None
    ) -> None:
        self.now, self.num_tries, self.cleared, self.said = 0.0, 0, 0, list[str | None]()
        self._failures, self._seconds, self._error = (
            failures,
            seconds,
            error or TimeoutError("the port file did not appear"),
        )
        self.stopping = False

    def run(self) -> str:
        return start_patiently(
            "the head",
            self._start,
            clear=self._clear,
            say=self.said.append,
            pause=self._pause,
            is_stopping=lambda: self.stopping,
            clock=lambda: self.now,
        )

    def _start(self) -> str:
        assert self.cleared == self.num_tries, "what the try before left is gone"
        self.num_tries += 1
        self.now += self._seconds
        if self.num_tries <= self._failures:
            raise self._error
        return "started"

    def _clear(self) -> None:
        self.cleared += 1

    def _pause(self, seconds: float) -> None:
        self.now += seconds


@pytest.mark.parametrize("seconds", [0.1, 15.0, 60.0])
def test_nothing_is_given_up_before_two_minutes(seconds: float) -> None:
    start = Start(failures=10**6, seconds=seconds)
    with pytest.raises(TimeoutError):
        start.run()
    assert 120 <= start.now < patience.GIVE_UP_S + 2 * (seconds + RETRY_S)


@pytest.mark.parametrize(
    "error", [ValueError("not a number"), FileNotFoundError("gcs_server"), PermissionError("/tmp")]
)
def test_what_would_fail_every_time_is_said_at_once(error: Exception) -> None:
    start = Start(failures=10**6, error=error)
    with pytest.raises(type(error)):
        start.run()
    assert start.num_tries == 1
