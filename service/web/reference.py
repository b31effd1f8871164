"""The API reference: Swagger UI from local files, so that it works without internet access and
under our content policy."""

from __future__ import annotations

from typing import Final

from fastapi import APIRouter, Request, Response

from service.web.rendering import PageRoute, page

router: Final = APIRouter(route_class=PageRoute, include_in_schema=False)


@router.get("/docs")
async def get_reference(request: Request) -> Response:
    return page(request, "reference.html", None)
