"""Roots of storage and data: what an operator allows, and what a spec is answered that goes
beyond."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from everstep.errors import InvalidSpec
from everstep.spec.parsing import parse_spec
from service.process.app import opened
from service.settings import CannotStart, Settings
from service.submission_rules.allowed import ANYWHERE, StorageRoots
from storage.errors import InvalidStorage, StorageUnavailable
from storage.filesystem import Storage, open_storage
from tests.support.api_service import ApiService, spec


def images(root: str | None, weights_path: str | None = None) -> dict[str, Any]:
    data = {"name": "image_folder", "args": {"root": root}} if root else {"name": "fashion_mnist"}
    model = {"name": "resnet18", "args": {"weights_path": weights_path}}
    return spec(task={"name": "image_classification", "model": model, "data": data})


@pytest.mark.parametrize(
    "place", ["/data", "/data/", "/data/a/b", "s3://bucket/team/x?region=eu-west-1"]
)
def test_what_lies_below_a_root(place: str) -> None:
    assert StorageRoots(["file:///data", "s3://bucket/team"]).admits(place)


@pytest.mark.parametrize(
    "place",
    [
        "/database",
        "/",
        "data/a",
        "~/data",
        "/data/../etc",
        "s3://bucket/teams",
        "s3://bucket",
        "s3://other/team/x",
        "gs://bucket/team",
    ],
)
def test_what_does_not(place: str) -> None:
    assert not StorageRoots(["/data", "s3://bucket/team"]).admits(place)
    assert ANYWHERE.admits(place)


def test_a_root_that_is_no_place() -> None:
    with pytest.raises(InvalidStorage, match="credentials"):
        StorageRoots(["s3://key:secret@bucket"])


def test_every_path_of_a_spec_is_looked_at_and_named() -> None:
    roots = StorageRoots(["/data", "/models"])
    roots.check_data(parse_spec(images("/data/imagenet", "/models/resnet18.pt")))
    roots.check_data(parse_spec(spec()))
    with pytest.raises(InvalidSpec) as caught:
        roots.check_data(parse_spec(images(None, "/etc/shadow")))
    assert [".".join(map(str, each.loc)) for each in caught.value.errors] == [
        "task.model.args.weights_path",
        "task.data.args.root",
    ]
    assert (
        "'/etc/shadow' lies below none of the roots that the operator allows: /data, /models"
        in str(caught.value)
    )
    text = {
        "name": "language_modeling",
        "model": {"name": "gpt"},
        "data": {"name": "text_files", "args": {"path": "/etc"}},
    }
    with pytest.raises(InvalidSpec, match=r"task\.data\.args\.path"):
        roots.check_data(parse_spec(spec(task=text)))


async def test_the_service_answers_422(tmp_path: Path) -> None:
    async with ApiService(tmp_path) as api:
        api.set(storage_roots=("/data",))
        answer = await api.http.post("/v1/runs", json=images("/srv/images"))
        assert (answer.status_code, answer.json()["code"]) == (422, "invalid_spec")
        [fault] = answer.json()["errors"]
        assert fault["loc"] == ["task", "data", "args", "root"] and "allows: /data" in fault["msg"]
        assert (await api.http.post("/v1/runs", json=images("/data/images"))).status_code == 201


def test_the_service_s_own_storage_lies_below_a_root_with_links_followed(tmp_path: Path) -> None:
    allowed, elsewhere = tmp_path / "allowed", tmp_path / "elsewhere"
    for directory in (allowed, elsewhere):
        directory.mkdir()
    (allowed / "link").symlink_to(elsewhere)
    (tmp_path / "alias").symlink_to(allowed)
    roots = StorageRoots([str(tmp_path / "alias")])
    assert roots.problem_of_storage(open_storage(str(allowed / "runs"))) is None
    assert "lies below none" in str(
        roots.problem_of_storage(open_storage(str(allowed / "link" / "runs")))
    )
    settings = Settings(
        home=tmp_path, storage_uri=str(elsewhere), storage_roots=(str(allowed), "s3://bucket")
    )
    with pytest.raises(
        CannotStart,
        match=r"--storage .*elsewhere lies below none of .*allowed, s3://bucket; choose",
    ):
        opened(settings)


@pytest.mark.parametrize(
    ("uri", "is_told"),
    [("gs://bucket/runs", True), ("s3://bucket/runs", False), ("/srv/runs", False)],
)
def test_a_storage_that_cannot_create_exclusively_is_told_of_at_the_start(
    uri: str, is_told: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def away(_: Storage) -> None:
        raise StorageUnavailable("no network here")

    monkeypatch.setattr(Storage, "probe", away)
    with capture_logs() as lines, pytest.raises(CannotStart, match="no network here"):
        opened(Settings(home=tmp_path, storage_uri=uri))
    warnings = [line for line in lines if "only where there is none" in line["event"]]
    assert bool(warnings) is is_told
    assert [line["storage"] for line in warnings] == [uri] * is_told


def test_roots_come_from_arguments_or_the_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("EVERSTEP_HOME", str(tmp_path))
    monkeypatch.setenv("EVERSTEP_STORAGE_ROOTS", "/data, s3://bucket/x,")
    assert Settings.of_process(os.environ).storage_roots == ("/data", "s3://bucket/x")
    monkeypatch.delenv("EVERSTEP_STORAGE_ROOTS")
    assert Settings.of_process(os.environ).storage_roots == ()
