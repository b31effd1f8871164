"""The keeper, on a machine on which Ray's GCS server does not come up at the first try, as under
heavy load."""

from __future__ import annotations

import sys
from typing import Any

from ray._private.node import Node

from service.embedded import keeper

_start_gcs_server = Node.start_gcs_server
_tries: list[Node] = []


def _fails_at_first(self: Node, *arguments: Any) -> None:
    """The server's process is there, and is not waited for: what Ray raises when its port file does
    not appear."""
    _tries.append(self)
    _start_gcs_server(self, *arguments)
    if len(_tries) == 1:
        raise TimeoutError("Timed out waiting for the port file of the GCS server")


Node.start_gcs_server = _fails_at_first

if __name__ == "__main__":
    sys.exit(keeper.main())
