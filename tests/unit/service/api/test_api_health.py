"""Health, catalog, cluster, figures and the OpenAPI document."""

from __future__ import annotations

import shutil
from pathlib import Path

from jsonschema import Draft202012Validator

from everstep.spec.tasks import Catalog
from everstep.wire import Readiness
from tests.support.api_service import ApiService, spec


async def test_ready(api: ApiService) -> None:
    assert await api.get("/healthz") == {"status": "alive"}
    ready = Readiness.model_validate(await api.get("/readyz"))
    assert (ready.status, ready.database, ready.storage, ready.ray, ready.reconciler_lag_s) == (
        "ready",
        "up",
        "up",
        "up",
        0.25,
    )


async def test_ray_away_is_told_but_does_not_make_it_unready(api: ApiService) -> None:
    api.cluster.available = False
    api.lag_s = None
    ready = Readiness.model_validate(await api.get("/readyz"))
    assert (ready.status, ready.ray, ready.reconciler_lag_s) == ("ready", "down", None)


async def test_storage_away_makes_it_unready(api: ApiService, tmp_path: Path) -> None:
    shutil.rmtree(tmp_path / "storage")
    (tmp_path / "storage").write_text("a file where a directory should be")
    answer = await api.http.get("/readyz")
    ready = Readiness.model_validate(answer.json())
    assert (answer.status_code, ready.status, ready.database, ready.storage) == (
        503,
        "unavailable",
        "up",
        "down",
    )
    assert (await api.get("/healthz")) == {"status": "alive"}
    assert (await api.http.post("/v1/runs", json=spec())).status_code == 201, (
        "a run is acknowledged without storage"
    )


async def test_database_away_makes_it_unready(api: ApiService, tmp_path: Path) -> None:
    api.database.close()
    for name in ("everstep.db", "everstep.db-wal", "everstep.db-shm"):
        (tmp_path / name).unlink(missing_ok=True)
    (tmp_path / "everstep.db").mkdir()
    answer = await api.http.get("/readyz")
    assert (answer.status_code, answer.json()["database"], answer.json()["storage"]) == (
        503,
        "down",
        "up",
    )


async def test_the_catalog_describes_what_a_spec_takes(api: ApiService) -> None:
    catalog = Catalog.model_validate_json((await api.http.get("/v1/catalog")).content)
    assert {entry.name for entry in catalog.data} == {
        "digits",
        "fashion_mnist",
        "cifar10",
        "image_folder",
        "text_files",
    }
    assert {"mini_resnet", "resnet18"} <= {entry.name for entry in catalog.models}
    for entry in (
        *catalog.tasks,
        *catalog.models,
        *catalog.data,
        *catalog.optimizers,
        *catalog.schedules,
    ):
        Draft202012Validator.check_schema(entry.args_schema)
        assert entry.description


async def test_figures_for_prometheus(api: ApiService) -> None:
    run_id = await api.create()
    await api.get(f"/v1/runs/{run_id}")
    await api.http.get("/v1/runs/run_000000000000")
    await api.http.get("/v1/unknown/path")
    text = (await api.http.get("/metrics")).text
    assert 'everstep_runs{status="QUEUED"} 1.0' in text
    assert "everstep_reconciler_lag_seconds 0.25" in text
    assert (
        'everstep_api_request_seconds_count{method="POST",route="/v1/runs",status="201"} 1.0'
        in text
    )
    assert (
        'everstep_api_request_seconds_count{method="GET",route="/v1/runs/{run_id}",status="404"} '
        "1.0"
    ) in text
    assert run_id not in text and "unknown" not in text, "what clients send must not become labels"
