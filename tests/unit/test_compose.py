"""docker-compose.yml agrees with the compose specification, and with the commands and modules that it names."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from compose_spec import PyCompose

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def text() -> str:
    return (ROOT / "docker-compose.yml").read_text()


def test_file_agrees_with_the_compose_specification(text: str) -> None:
    resolved = yaml.safe_dump(yaml.safe_load(text))  # anchors and merges resolved, as compose itself does first
    compose = PyCompose.from_yaml(resolved)
    compose.validate()
    assert sorted(compose.service_names()) == ["head", "service", "worker"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"networks": ["nowhere"]}, "network `nowhere`"),
        ({"secrets": ["nothing"]}, "secret `nothing`"),
        ({"restrat": "always"}, "restrat"),
        ({"shm_size": "much"}, "unknown unit"),
    ],
)
def test_a_wrong_file_is_noticed(text: str, change: dict[str, object], message: str) -> None:
    broken = yaml.safe_load(text)
    broken["services"]["worker"].update(change)
    with pytest.raises(ValueError, match=message):
        PyCompose.from_yaml(yaml.safe_dump(broken)).validate()


def test_every_volume_is_declared_and_storage_is_shared_by_all(text: str) -> None:
    compose = yaml.safe_load(text)
    mounts = {name: dict(volume.split(":") for volume in service["volumes"]) for name, service in compose["services"].items()}
    assert {volume for mounted in mounts.values() for volume in mounted} == set(compose["volumes"])
    assert {mounted["storage"] for mounted in mounts.values()} == {"/var/lib/everstep/storage"}


def test_only_the_service_is_published_and_only_on_loopback(text: str) -> None:
    services = yaml.safe_load(text)["services"]
    published = {name: service["ports"] for name, service in services.items() if "ports" in service}
    assert published == {"service": ["127.0.0.1:8000:8000"]}


def test_every_part_runs_one_image_and_reads_the_ray_token_from_a_file(text: str) -> None:
    services = yaml.safe_load(text)["services"].values()
    assert len({service["image"] for service in services}) == 1
    assert {service["environment"]["RAY_AUTH_TOKEN_PATH"] for service in services} == {"/run/secrets/ray_token"}


def test_image_ignores_everything_that_the_dockerfile_does_not_copy() -> None:
    copied = {
        source
        for line in (ROOT / "Dockerfile").read_text().splitlines()
        if line.startswith("COPY ") and "--from" not in line
        for source in line.split()[1:-1]
    }
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert copied == allowed
    assert all((ROOT / name).exists() for name in copied)
