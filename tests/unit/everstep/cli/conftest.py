"""A service that the commands find, and a spec to give them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.support.api_service import ApiService


@pytest.fixture
async def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[ApiService]:
    async with ApiService(tmp_path) as service:
        service.announce(monkeypatch)
        yield service


@pytest.fixture
def spec_file(tmp_path: Path) -> Path:
    path = tmp_path / "digits.yaml"
    path.write_text(
        "name: by hand\ntask: {name: image_classification, model: {name: mini_resnet}, data: "
        "{name: digits}}\n"
    )
    return path
