"""``python -m service.process.migrate``: the tables are there, and a fault has a sentence."""

from __future__ import annotations

from pathlib import Path

import pytest
from sqlalchemy import create_engine, inspect

from service.process.migrate import EXIT_CANNOT_MIGRATE, main


def test_the_database_of_the_variable_is_migrated_and_again_without_a_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "url"
    file.write_text(f"sqlite:///{tmp_path}/everstep.db\n")
    monkeypatch.setenv("EVERSTEP_DATABASE_FILE", str(file))
    assert main() == 0 and main() == 0
    engine = create_engine(f"sqlite:///{tmp_path}/everstep.db")
    assert {"runs", "tokens", "alembic_version"} <= set(inspect(engine).get_table_names())
    engine.dispose()


@pytest.mark.parametrize(
    ("url", "words"), [("mysql://db/x", "mysql"), ("postgresql+psycopg://u@127.0.0.1:1/x", "127")]
)
def test_a_database_that_cannot_be_migrated_is_named(
    url: str, words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("EVERSTEP_DATABASE", url)
    assert main() == EXIT_CANNOT_MIGRATE
    said = capsys.readouterr().err
    assert said.startswith("migrate: ") and words in said
