"""Tokens are kept as hashes, expire, and are revoked at once."""

from __future__ import annotations

from pathlib import Path

import pytest
from sqlalchemy import text

from service.api.auth import (
    LOCAL_TOKEN_ID,
    METRICS_TOKEN_ID,
    ensure_local_token,
    ensure_metrics_token,
)
from service.db.engine import Database
from service.db.tokens import TokenStore

pytest_plugins = ["tests.support.database_fixtures"]


def test_a_token_is_found_by_its_secret_only(database: Database, tmp_path: Path) -> None:
    tokens = TokenStore(database)
    row, secret = tokens.create("ci", "submitter", "vision")
    assert tokens.find(secret) == row
    assert (row.role, row.project) == ("submitter", "vision")
    for wrong in ("", secret[:-1], secret + "x", row.sha256, row.id):
        assert tokens.find(wrong) is None
    with database.read() as connection:
        dump = str(connection.execute(text("SELECT * FROM tokens")).all())
    assert secret not in dump
    assert len(secret) == 47 and tokens.create("ci", "submitter", "vision")[1] != secret


def test_the_local_token_is_made_once_and_kept(database: Database, tmp_path: Path) -> None:
    tokens, path = TokenStore(database), tmp_path / "home" / "token"
    ensure_local_token(tokens, path)
    secret = path.read_text().strip()
    found = tokens.find(secret)
    assert found is not None and (found.id, found.role, found.project) == (
        LOCAL_TOKEN_ID,
        "admin",
        None,
    )
    assert path.stat().st_mode & 0o777 == 0o600
    path.chmod(0o644)
    ensure_local_token(tokens, path)
    assert path.read_text().strip() == secret
    assert path.stat().st_mode & 0o777 == 0o600
    assert [entry.name for entry in path.parent.iterdir()] == ["token"]


@pytest.mark.parametrize("content", [None, "", "evs_of-another-database", "\udcff"])
def test_a_missing_or_foreign_local_token_is_replaced(
    database: Database, tmp_path: Path, content: str | None
) -> None:
    tokens, path = TokenStore(database), tmp_path / "token"
    ensure_local_token(tokens, path)
    old = path.read_text().strip()
    if content is None:
        path.unlink()
    else:
        path.write_bytes(content.encode(errors="surrogateescape"))
    ensure_local_token(tokens, path)
    assert tokens.find(path.read_text().strip()) is not None
    assert tokens.find(old) is None, "the lost token must not stay valid"


def test_a_secret_for_metrics_is_a_viewers_token_until_another_takes_its_place(
    database: Database,
) -> None:
    tokens = TokenStore(database)
    for secret in ("a" * 40, "a" * 40, "b" * 40):
        ensure_metrics_token(tokens, secret)
        found = tokens.find(secret)
        assert found is not None and (found.id, found.role, found.project) == (
            METRICS_TOKEN_ID,
            "viewer",
            None,
        )
    assert tokens.find("a" * 40) is None
