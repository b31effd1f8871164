"""Routes of the storage that the database belongs to; for administrators."""

from __future__ import annotations

from typing import Final

from fastapi import APIRouter

from everstep.wire.storage_status import StorageAdoption, StorageStatus
from service.api.auth import Administrator
from service.api.context import Context
from service.api.openapi import problem_answers
from service.storage_identity.adoption import adopt_storage, storage_status

router: Final = APIRouter(prefix="/v1/storage", tags=["administration"])


@router.get(
    "", summary="The storage, and whether it matches the database", responses=problem_answers(403)
)
async def get_storage(context: Context, _caller: Administrator) -> StorageStatus:
    """Compares the storage with the database: its id, and the newest submission of each run that
    has not ended."""
    return await context.storage_call(
        storage_status, context.storage, context.runs, context.storage_gate
    )


@router.post(
    "/adopt",
    summary="Adopt the present storage",
    operation_id="adopt_storage",
    responses=problem_answers(403),
)
async def adopt(context: Context, _caller: Administrator) -> StorageAdoption:
    """For a storage that was replaced on purpose, or a database that is older than its storage.
    Runs that have not ended continue from the data in this storage: submissions that the database
    does not know are read, and data that the storage lacks is lost."""
    return await context.storage_call(
        adopt_storage, context.storage, context.runs, context.storage_gate
    )
