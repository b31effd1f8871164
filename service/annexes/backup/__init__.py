"""Copy a service's database and storage, and restore them: `everstep backup`.

It is a program of its own (`python -m service.annexes.backup`): the service serves nothing of it.
"""

from __future__ import annotations

from typing import Final

from service.annex import Annex

BACKUP: Final = Annex("backup")
