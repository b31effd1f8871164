"""The locks with hashes: they say what constraints.txt says, for each platform, and name what they
leave out."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PIN = re.compile(r"([a-z0-9-]+)==(\S+) \\\n    --hash=sha256:[0-9a-f]{64}\n")
LOCKS = sorted((ROOT / "locks").glob("*.txt"))


def pins_of(lock: Path) -> dict[str, str]:
    body = "".join(
        line for line in lock.read_text().splitlines(keepends=True) if not line.startswith("#")
    )
    assert PIN.sub("", body) == "", "nothing but pins, each with a hash: no index, no option"
    return dict(PIN.findall(body))


def constraints() -> dict[str, str]:
    pins = [line.split("==") for line in (ROOT / "constraints.txt").read_text().split()]
    return {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in pins}


@pytest.mark.parametrize("lock", LOCKS, ids=lambda lock: lock.stem)
def test_a_lock_pins_what_the_constraints_pin(lock: Path) -> None:
    pins, wanted = pins_of(lock), constraints()
    pins.pop("setuptools")  # constraints.txt leaves Python's own packaging tools to the environment
    assert len(pins) > 100 and pins.items() <= wanted.items()
    assert {"torch", "everstep"}.isdisjoint(
        pins
    ) and "Left out, and so without a hash: everstep and torch" in lock.read_text()


def test_a_lock_has_each_package_that_a_service_needs() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["server"]]
    names = {re.sub(r"[-_.]+", "-", re.split(r"[\[><=]", line)[0]).lower() for line in wanted}
    for lock in LOCKS:
        assert names - set(pins_of(lock)) == {"torch"}, f"make lock writes {lock.name} anew"


def test_every_platform_has_the_same_packages() -> None:
    assert [lock.name for lock in LOCKS] == [
        f"server-linux-x86_64-cp{python}.txt" for python in (311, 312, 313, 314)
    ]
    assert len({tuple(pins_of(lock)) for lock in LOCKS}) == 1


def test_no_package_makes_each_import_of_ray_compile_a_grammar() -> None:
    """jsonschema, which Ray imports, imports rfc3987-syntax where it is installed: a second of CPU
    in each of some twenty processes of a cluster."""
    assert "rfc3987-syntax" not in constraints()
