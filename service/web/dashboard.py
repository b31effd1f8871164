"""The dashboard: all pages, mounted on the application."""

from __future__ import annotations

from fastapi import FastAPI

from service.web import (
    assets,
    cluster_pages,
    compare_page,
    fork_page,
    log_in_page,
    log_page,
    ray_pages,
    reference,
    run_list,
    run_pages,
)


def install(app: FastAPI) -> None:
    """Add every page. Pages are not part of the API in OpenAPI."""
    for module in (
        assets,
        reference,
        log_in_page,
        run_list,
        compare_page,
        fork_page,
        log_page,
        run_pages,
        cluster_pages,
        ray_pages,
    ):
        app.include_router(module.router)
