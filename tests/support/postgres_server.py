"""A PostgreSQL of one's own for tests: Debian's, on a free port, with nothing that outlives its
process."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from sqlalchemy import create_engine, text

from service.db.engine import Database
from tests.support.service_process import free_port

_DEBIAN = Path("/usr/lib/postgresql")
_TEMPLATE = "everstep_template"
START_TIMEOUT_S = 30.0


def binaries() -> Path | None:
    """Where PostgreSQL's programs are; None where it is not installed."""
    found = shutil.which("initdb")
    places = [
        *sorted(_DEBIAN.glob("*/bin"), reverse=True),
        *([Path(found).parent] if found else []),
    ]
    return next((place for place in places if (place / "initdb").exists()), None)


class PostgresServer:
    """One server; each test takes a migrated database of its own from it."""

    def __init__(self, port: int, start: Callable[[], subprocess.Popen[bytes]]) -> None:
        self._port = port
        self._start = start
        self.process = start()
        self._count = 0

    def crash(self) -> None:
        """End it at once, as a crash does: it will have to recover when it is started again."""
        self.process.send_signal(signal.SIGQUIT)
        self.process.wait(60)

    def restart(self) -> None:
        self.process = self._start()

    def drop_connections(self) -> None:
        """Cut every client off, whatever it is in the middle of."""
        self._command(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid() "
            "AND usename = 'everstep'"
        )

    def url(self, database: str) -> str:
        return f"postgresql+psycopg://everstep@127.0.0.1:{self._port}/{database}"

    def prepare(self) -> None:
        """Migrate once what every test's database is a copy of."""
        self._command(f"CREATE DATABASE {_TEMPLATE}")
        database = Database(self.url(_TEMPLATE))
        database.migrate()
        database.close()

    @contextmanager
    def database(self, template: str = _TEMPLATE) -> Iterator[str]:
        """The URL of a new database."""
        self._count += 1
        name = f"test_{self._count}"
        self._command(f"CREATE DATABASE {name} TEMPLATE {template}")
        try:
            yield self.url(name)
        finally:
            self._command(f"DROP DATABASE {name} WITH (FORCE)")

    def _command(self, statement: str) -> None:
        engine = create_engine(self.url("postgres"), isolation_level="AUTOCOMMIT")
        try:
            with engine.connect() as connection:
                connection.execute(text(statement))
        finally:
            engine.dispose()


@contextmanager
def running(programs: Path, *, durable: bool = False) -> Iterator[PostgresServer]:
    """A server while the block lasts; ``durable`` is as PostgreSQL comes, else what tests need not
    wait for is turned off."""
    directory = Path(tempfile.mkdtemp(prefix="everstep-pg-"))
    data = directory / "data"
    # PostgreSQL refuses to run as root.
    account = pwd.getpwnam("postgres") if os.getuid() == 0 else None
    identity = (
        {}
        if account is None
        else {"user": account.pw_uid, "group": account.pw_gid, "extra_groups": []}
    )
    if account is not None:
        os.chown(directory, account.pw_uid, account.pw_gid)
    try:
        subprocess.run(
            [
                programs / "initdb",
                "-D",
                data,
                "-U",
                "everstep",
                "-A",
                "trust",
                "-E",
                "UTF8",
                "--locale=C.UTF-8",
                "--no-sync",
            ],
            check=True,
            cwd=directory,
            stdout=subprocess.DEVNULL,
            **identity,  # type: ignore[arg-type]
        )
        port = free_port()
        options = (
            {}
            if durable
            else {"fsync": "off", "full_page_writes": "off", "synchronous_commit": "off"}
        )
        options["shared_buffers"] = "128MB" if durable else "32MB"
        command = [
            str(programs / "postgres"),
            "-D",
            str(data),
            "-p",
            str(port),
            "-h",
            "127.0.0.1",
            "-k",
            str(directory),
        ]
        command += [word for name, value in options.items() for word in ("-c", f"{name}={value}")]
        log_path = directory / "log"

        def start() -> subprocess.Popen[bytes]:
            with log_path.open("wb") as log:
                process = subprocess.Popen(
                    command, cwd=directory, stdout=log, stderr=log, **identity
                )  # type: ignore[call-overload]
            try:
                _wait_until_up(port, process, log_path)
            except BaseException:
                process.kill()
                raise
            return process  # type: ignore[no-any-return]

        server = PostgresServer(port, start)
        try:
            server.prepare()
            yield server
        finally:
            server.crash()
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _wait_until_up(port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    give_up = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < give_up and process.poll() is None:
        if b"ready to accept connections" in log.read_bytes():
            return
        time.sleep(0.02)
    raise RuntimeError(f"PostgreSQL did not start on port {port}: {log.read_text()[-2000:]}")
