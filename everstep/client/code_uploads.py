"""Upload user code, as ``client.code``."""

from __future__ import annotations

import os

from everstep.client.transport import Transport
from everstep.code.pack import pack
from everstep.wire import CodeArchive


class Code:
    """Archives of user code, as ``client.code``."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def upload(
        self,
        path: str | os.PathLike[str],
        *,
        project: str | None = None,
        create_project: bool = False,
    ) -> CodeArchive:
        """Upload a directory of code, one ``.py`` file, a zip or a tar.gz. Use the result's
        ``digest`` as ``code.archive`` in a spec.

        >>> archive = client.code.upload("my_project/")               # doctest: +SKIP
        >>> code = {"archive": archive.digest, "task": "my_package.task:MyTask"}  # doctest: +SKIP
        >>> spec = {"name": "mine", "code": code}                     # doctest: +SKIP

        In a directory, files that .gitignore or .everstepignore match are left out. The same files
        always give the same digest and are stored once.

        Args:
            project: runs of this project may use the code; by default the token's project.
            create_project: create the project if it does not exist; otherwise that is an error.

        Raises UsageError for what cannot be packed, InvalidSpec for what the service refuses,
        AuthError, Unavailable.
        """
        return self.upload_packed(pack(path), project=project, create_project=create_project)

    def upload_packed(
        self, data: bytes, *, project: str | None = None, create_project: bool = False
    ) -> CodeArchive:
        """Upload the bytes of an archive, as ``upload``. Safe to retry."""
        files = {"file": ("code", data, "application/octet-stream")}
        params = {"project": project, "create_project": "true" if create_project else None}
        response = self._transport.send(
            "POST", "/v1/code", params=params, files=files, repeatable=True
        )
        return self._transport.parse(response, CodeArchive)
