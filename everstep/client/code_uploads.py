"""Uploading code of one's own, as ``client.code``."""

from __future__ import annotations

import os

from everstep.client.transport import Transport
from everstep.code.pack import pack
from everstep.wire import CodeArchive


class Code:
    """The service's archives of users' code, as ``client.code``."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def upload(
        self,
        path: str | os.PathLike[str],
        *,
        project: str | None = None,
        create_project: bool = False,
    ) -> CodeArchive:
        """Upload a directory of code, one ``.py`` file, or a zip or tar.gz; its ``digest`` is
        ``code.archive`` of a spec.

        >>> archive = client.code.upload("my_project/")               # doctest: +SKIP
        >>> code = {"archive": archive.digest, "task": "my_package.task:MyTask"}  # doctest: +SKIP
        >>> spec = {"name": "mine", "code": code}                     # doctest: +SKIP

        Of a directory, what its .gitignore and .everstepignore files name is left out. The same
        files give the same digest, and are stored once, however often they are uploaded. Runs of
        ``project`` may use them: by default the token's own. One that does not exist is a fault
        unless ``create_project`` makes it.

        Raises UsageError for what cannot be uploaded, InvalidSpec for what the service refuses,
        AuthError, Unavailable.
        """
        return self.upload_packed(pack(path), project=project, create_project=create_project)

    def upload_packed(
        self, data: bytes, *, project: str | None = None, create_project: bool = False
    ) -> CodeArchive:
        """Upload an archive's bytes, as ``upload`` does; trying it again is harmless."""
        files = {"file": ("code", data, "application/octet-stream")}
        params = {"project": project, "create_project": "true" if create_project else None}
        response = self._transport.send(
            "POST", "/v1/code", params=params, files=files, repeatable=True
        )
        return self._transport.parse(response, CodeArchive)
