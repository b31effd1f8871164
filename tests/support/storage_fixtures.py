"""Where storage tests keep their runs: a local directory, and a real S3 server on a loopback
port."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from storage.filesystem import Storage, open_storage
from storage.run_dir import RunDir
from tests.support.storage_places import BUCKET


@pytest.fixture(scope="session")
def s3_endpoint() -> Iterator[str]:
    """``host:port`` of an S3 server with an empty bucket; credentials are in the environment."""
    from moto.server import ThreadedMotoServer

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ACCESS_KEY_ID", "test")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "test")
        patch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
        server.start()
        host, port = server.get_host_and_port()
        from pyarrow import fs

        # The first request has the server import what it needs, which takes longer than others.
        fs.S3FileSystem(
            endpoint_override=f"{host}:{port}",
            scheme="http",
            region="us-east-1",
            allow_bucket_creation=True,
            request_timeout=60,
        ).create_dir(BUCKET)
        yield f"{host}:{port}"
        server.stop()


_prefixes = itertools.count()


@pytest.fixture
def s3_storage(s3_endpoint: str) -> Storage:
    return open_storage(
        f"s3://{BUCKET}/t{next(_prefixes)}?endpoint_override={s3_endpoint}&scheme=http&region=us-east-1"
    )


@pytest.fixture
def local_storage(tmp_path: Path) -> Storage:
    return open_storage(str(tmp_path / "storage"))


@pytest.fixture(params=["local", pytest.param("s3", marks=pytest.mark.slow)])
def any_storage(request: pytest.FixtureRequest) -> Storage:
    storage: Storage = request.getfixturevalue(f"{request.param}_storage")
    return storage


@pytest.fixture
def run_dir(any_storage: Storage) -> RunDir:
    return RunDir(any_storage, "run_a")


@pytest.fixture
def local_dir(local_storage: Storage) -> RunDir:
    return RunDir(local_storage, "run_a")
