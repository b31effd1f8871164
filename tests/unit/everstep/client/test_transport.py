"""Requests: what is tried again and how often, and what every answer and every broken connection
becomes."""

from __future__ import annotations

import email.utils
import inspect
import json
import pickle
from collections.abc import Callable

import httpx
import pytest

from everstep import (
    AuthError,
    Client,
    Conflict,
    CorruptDownload,
    EverstepError,
    FieldError,
    InvalidSpec,
    NotFound,
    RateLimited,
    RunFailed,
    ServiceError,
    Unavailable,
    UsageError,
    WaitTimeout,
)
from everstep import errors as errors_module
from everstep.client.transport import retry_after_s, translate
from everstep.errors import CODES, error_from_answer
from everstep.wire import Run
from tests.support.scripted_http import RUN_ID, FakeTime, run_answer

URL = "http://127.0.0.1:1"
RUN = Run.model_validate(run_answer("FAILED"))
Handler = Callable[[httpx.Request], httpx.Response]


def client(handler: Handler, clock: FakeTime | None = None, token: str | None = "secret") -> Client:
    return Client(
        URL, token, timing=(clock or FakeTime()).timing, transport=httpx.MockTransport(handler)
    )


class Script:
    """Answers or exceptions in order; the last stays. Keeps the requests."""

    def __init__(self, *answers: httpx.Response | Exception) -> None:
        self.answers = list(answers)
        self.requests: list[httpx.Request] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer


def problem(
    status: int,
    code: str,
    detail: str = "detail",
    errors: list[object] | None = None,
    **headers: str,
) -> httpx.Response:
    body = {
        "type": "about:blank",
        "title": "t",
        "status": status,
        "detail": detail,
        "code": code,
        "errors": errors or [],
    }
    return httpx.Response(
        status,
        json=body,
        headers={name.replace("_", "-"): value for name, value in headers.items()},
    )


def ok(**fields: object) -> httpx.Response:
    return httpx.Response(200, json=run_answer(**fields))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "trouble",
    [
        httpx.ConnectError("refused"),
        httpx.ReadError("reset"),
        httpx.ReadTimeout("slow"),
        httpx.RemoteProtocolError("closed"),
        problem(502, "bad_gateway"),
        problem(503, "unavailable"),
        httpx.Response(504, text="<html>"),
        problem(429, "rate_limited"),
    ],
    ids=repr,
)
def test_reading_is_tried_again(trouble: httpx.Response | Exception) -> None:
    clock, script = FakeTime(), Script(trouble, trouble, ok())
    assert client(script, clock).runs.get(RUN_ID).id == RUN_ID
    assert clock.slept == [0.2, 0.4]


def test_trying_ends() -> None:
    clock, script = FakeTime(), Script(httpx.ConnectError("refused"))
    with pytest.raises(
        Unavailable, match=r"cannot reach the service at .*refused.*everstep serve.*EVERSTEP_URL"
    ) as caught:
        client(script, clock).runs.get(RUN_ID)
    assert len(script.requests) == 6 and clock.slept == [0.2, 0.4, 0.8, 1.6, 3.2]
    assert caught.value.code == "unreachable" and isinstance(
        caught.value.__cause__, httpx.ConnectError
    )


def test_a_create_is_repeated_with_its_own_key() -> None:
    script = Script(
        httpx.ReadError("reset"),
        problem(503, "unavailable"),
        httpx.Response(201, json=run_answer()),
    )
    spec = {"name": "a", "task": {}}
    client(script).runs.create(spec)
    keys = [request.headers["Idempotency-Key"] for request in script.requests]
    assert len(keys) == 3 and len(set(keys)) == 1 and keys[0]
    assert [json.loads(request.content) for request in script.requests] == [spec] * 3


def test_each_create_is_a_run_of_its_own_unless_a_key_is_given() -> None:
    script = Script(httpx.Response(201, json=run_answer()))
    runs = client(script).runs
    for key in (None, None, "mine", "mine"):
        runs.create({"name": "a"}, idempotency_key=key)
    first, second, third, fourth = (
        request.headers["Idempotency-Key"] for request in script.requests
    )
    assert first != second and third == fourth == "mine"


@pytest.mark.parametrize("key", ["ключ", "", "a" * 256, "a\nb"])
def test_a_key_that_no_header_can_carry_is_named(key: str) -> None:
    script = Script()
    what = "idempotency_key: must be 1 to 255 printable ASCII"
    with pytest.raises(InvalidSpec, match=what):
        client(script).runs.create({"name": "a"}, idempotency_key=key)
    assert script.requests == []


def test_an_action_that_may_have_happened_is_not_repeated() -> None:
    run = client(Script(ok())).runs.get(RUN_ID)
    for trouble in (
        httpx.ReadError("reset"),
        httpx.ReadTimeout("slow"),
        problem(502, "bad_gateway"),
    ):
        script = Script(ok(), trouble)
        run = client(script).runs.get(RUN_ID)
        with pytest.raises(Unavailable):
            run.cancel()
        assert len(script.requests) == 2


def test_an_action_that_surely_did_not_happen_is_repeated() -> None:
    script = Script(
        ok(), httpx.ConnectError("refused"), problem(503, "unavailable"), ok(status="STOPPING")
    )
    run = client(script).runs.get(RUN_ID)
    assert run.cancel().status == "STOPPING"
    assert [request.method for request in script.requests] == ["GET", "POST", "POST", "POST"]


@pytest.mark.parametrize(
    ("stated", "waited"),
    [("7", 7.0), ("0", 0.0), (" 3", 3.0), ("soon", 0.2), ("-1", 0.2), ("1.5", 0.2)],
)
def test_retry_after_is_honoured(stated: str, waited: float) -> None:
    clock, script = FakeTime(), Script(problem(429, "rate_limited", Retry_After=stated), ok())
    client(script, clock).runs.get(RUN_ID)
    assert clock.slept == [waited]


def test_retry_after_may_be_a_date() -> None:
    assert retry_after_s(email.utils.formatdate(1000, usegmt=True), now=990.0) == 10.0
    assert retry_after_s(email.utils.formatdate(1000, usegmt=True), now=2000.0) == 0.0


def test_a_service_that_wants_an_hour_is_not_waited_for() -> None:
    clock, script = (
        FakeTime(),
        Script(problem(429, "rate_limited", "come back later", Retry_After="3600")),
    )
    with pytest.raises(RateLimited, match="come back later"):
        client(script, clock).runs.get(RUN_ID)
    assert clock.slept == [] and len(script.requests) == 1


@pytest.mark.parametrize("status", [400, 401, 403, 404, 409, 413, 422, 500])
def test_other_answers_are_not_tried_again(status: int) -> None:
    script = Script(problem(status, "whatever"))
    with pytest.raises(EverstepError):
        client(script).runs.get(RUN_ID)
    assert len(script.requests) == 1


@pytest.mark.parametrize("code", CODES)
def test_every_code_is_the_error_of_the_table(code: str) -> None:
    status, kind = CODES[code]
    script = Script(problem(status, code, "why it is so"))
    with pytest.raises(kind, match="why it is so") as caught:
        Client(URL, "t", max_tries=1, transport=httpx.MockTransport(script)).runs.get(RUN_ID)
    assert (
        type(caught.value) is kind and caught.value.code == code and caught.value.status == status
    )


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (401, AuthError),
        (403, AuthError),
        (404, NotFound),
        (409, Conflict),
        (418, ServiceError),
        (422, InvalidSpec),
        (429, RateLimited),
        (500, ServiceError),
        (502, Unavailable),
        (503, Unavailable),
        (504, Unavailable),
    ],
)
def test_a_code_of_a_newer_service_goes_by_its_status(
    status: int, kind: type[EverstepError]
) -> None:
    error = error_from_answer(status, "brand_new", "words")
    assert (
        type(error) is kind
        and error.code == "brand_new"
        and error.status == status
        and "words" in str(error)
    )


def test_every_fault_of_a_spec_arrives() -> None:
    faults = [{"loc": ["train", "epochs"], "msg": "too few"}, {"loc": ["env", "A"], "msg": "no"}]
    script = Script(problem(422, "invalid_spec", "the spec has 2 faults", faults))
    with pytest.raises(InvalidSpec) as caught:
        client(script).runs.create({"name": "a"})
    assert caught.value.errors == (
        FieldError(("train", "epochs"), "too few"),
        FieldError(("env", "A"), "no"),
    )
    assert "train.epochs: too few" in str(caught.value)


@pytest.mark.parametrize(
    "value",
    [float("nan"), float("inf"), object(), {1}, b"x"],
    ids=["nan", "inf", "object", "set", "bytes"],
)
def test_what_json_cannot_say_is_refused_before_it_is_sent(value: object) -> None:
    script = Script(ok())
    spec = {"name": "a", "task": {}, "optimizer": {"name": "sgd", "lr": value}}
    with pytest.raises(InvalidSpec, match=r"optimizer\.lr"):
        client(script).runs.create(spec)
    assert script.requests == []


@pytest.mark.parametrize(
    "answer",
    [
        httpx.Response(200, text="<html>Jenkins</html>"),
        httpx.Response(200, json={"id": 1}),
        httpx.Response(200, json=[]),
        httpx.Response(200, content=b"\xff\xfe"),
        httpx.Response(302, headers={"Location": "/login"}),
        httpx.Response(404, text="nginx"),
        httpx.Response(500, text=""),
    ],
    ids=repr,
)
def test_an_answer_that_is_not_everstep_s_is_called_so(answer: httpx.Response) -> None:
    with pytest.raises(
        ServiceError,
        match=r"GET http://127\.0\.0\.1:1/v1/runs/.* not from this version of Everstep"
        r".*EVERSTEP_URL",
    ):
        client(Script(answer)).runs.get(RUN_ID)


def test_a_list_that_never_ends_is_left() -> None:
    script = Script(httpx.Response(200, json={"items": [], "next_cursor": "again"}))
    with pytest.raises(ServiceError, match=r"does not advance \(cursor 'again' repeated\)"):
        list(client(script).runs.list())
    assert len(script.requests) == 2


def test_lists_are_fetched_as_they_are_read_and_filtered_by_the_service() -> None:
    pages = [
        httpx.Response(200, json={"items": [run_answer()] * 2, "next_cursor": cursor})
        for cursor in ("c 1", None)
    ]
    script = Script(*pages)
    found = client(script).runs.list(status="RUNNING", project="p", name="n", tag={"team": "a&b"})
    next(found)
    assert len(script.requests) == 1
    assert len(list(found)) == 3
    first, second = (dict(request.url.params) for request in script.requests)
    assert first == {
        "status": "RUNNING",
        "project": "p",
        "name": "n",
        "tag": "team=a&b",
        "limit": "200",
    }
    assert second["cursor"] == "c 1"


def test_run_ids_cannot_lead_elsewhere() -> None:
    script = Script(problem(404, "not_found"))
    with pytest.raises(NotFound):
        client(script).runs.get("../tokens?x=1#")
    assert script.requests[0].url.raw_path == b"/v1/runs/..%2Ftokens%3Fx%3D1%23"


def test_the_token_is_sent_and_never_shown() -> None:
    script = Script(problem(401, "unauthorized", "no valid token"))
    with pytest.raises(AuthError) as caught:
        client(script).runs.get(RUN_ID)
    assert script.requests[0].headers["Authorization"] == "Bearer secret"
    assert "secret" not in str(caught.value) and "the token given to the client" in str(
        caught.value
    )


def test_readiness_is_an_answer_also_where_it_is_no() -> None:
    body = {
        "status": "unavailable",
        "database": "down",
        "storage": "up",
        "ray": "up",
        "reconciler_lag_s": None,
    }
    script = Script(httpx.Response(503, json=body, headers={"Retry-After": "2"}))
    assert client(script).ready().database == "down"
    assert len(script.requests) == 1


def foreign_errors() -> list[type[Exception]]:
    bases = (httpx.HTTPError, httpx.StreamError, httpx.InvalidURL)
    return [
        kind for _, kind in inspect.getmembers(httpx, inspect.isclass) if issubclass(kind, bases)
    ]


@pytest.mark.parametrize("kind", foreign_errors())
def test_no_error_of_httpx_is_unmapped(kind: type[Exception]) -> None:
    special: dict[str, Exception] = {
        "HTTPStatusError": httpx.HTTPStatusError(
            "no", request=httpx.Request("GET", URL), response=httpx.Response(500)
        ),
        "StreamConsumed": httpx.StreamConsumed(),
        "ResponseNotRead": httpx.ResponseNotRead(),
        "RequestNotRead": httpx.RequestNotRead(),
        "StreamClosed": httpx.StreamClosed(),
    }
    error = translate(special[kind.__name__] if kind.__name__ in special else kind("why"), URL)
    assert isinstance(error, (Unavailable, ServiceError, UsageError)) and URL in str(error)


def our_errors() -> list[EverstepError]:
    made: list[EverstepError] = [
        InvalidSpec((FieldError(("a", 0), "no"),), "words"),
        RunFailed(RUN, None),
        WaitTimeout("late"),
        CorruptDownload("torn"),
    ]
    kinds = [
        kind
        for _, kind in inspect.getmembers(errors_module, inspect.isclass)
        if issubclass(kind, EverstepError)
    ]
    return made + [
        kind("words", code="c", status=499)
        for kind in kinds
        if kind not in (InvalidSpec, RunFailed)
    ]


@pytest.mark.parametrize("error", our_errors(), ids=lambda error: type(error).__name__)
def test_errors_survive_pickling(error: EverstepError) -> None:
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error) and str(copy) == str(error) and vars(copy) == vars(error)
