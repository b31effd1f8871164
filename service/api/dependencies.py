"""What routes may depend on: a parameter of one of these types is that part of the service."""

from __future__ import annotations

from typing import Annotated

from service.api.answers import ServiceLinks
from service.api.callers import Door, LogInCodes
from service.api.log_views import LogViews
from service.api.readiness import ReadinessCheck
from service.api.streams import EventFeed, Followers
from service.cluster.cluster_view import ClusterView
from service.cluster.ray_jobs import RayJobs
from service.db.audit import AuditStore
from service.db.checkpoints import CodeArchives
from service.db.engine import Database
from service.db.events import EventStore, SeriesStore
from service.db.node_marks import NodeMarks
from service.db.projects import ProjectStore
from service.db.runs import RunStore
from service.db.tokens import SessionStore, TokenStore
from service.parts import part
from service.settings import Settings
from service.storage_identity import StorageGate
from storage.filesystem import Storage

Archives = Annotated[CodeArchives, part(CodeArchives)]
AuditLog = Annotated[AuditStore, part(AuditStore)]
Cluster = Annotated[ClusterView, part(ClusterView)]
Codes = Annotated[LogInCodes, part(LogInCodes)]
Events = Annotated[EventStore, part(EventStore)]
Feed = Annotated[EventFeed, part(EventFeed)]
TheLinks = Annotated[ServiceLinks, part(ServiceLinks)]
Gate = Annotated[StorageGate, part(StorageGate)]
Logs = Annotated[LogViews, part(LogViews)]
Marks = Annotated[NodeMarks, part(NodeMarks)]
Projects = Annotated[ProjectStore, part(ProjectStore)]
Ray = Annotated[RayJobs, part(RayJobs)]
Ready = Annotated[ReadinessCheck, part(ReadinessCheck)]
Runs = Annotated[RunStore, part(RunStore)]
Series = Annotated[SeriesStore, part(SeriesStore)]
Sessions = Annotated[SessionStore, part(SessionStore)]
TheDatabase = Annotated[Database, part(Database)]
TheDoor = Annotated[Door, part(Door)]
TheSettings = Annotated[Settings, part(Settings)]
TheStorage = Annotated[Storage, part(Storage)]
Streams = Annotated[Followers, part(Followers)]
Tokens = Annotated[TokenStore, part(TokenStore)]
