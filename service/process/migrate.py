"""``python -m service.process.migrate``: bring the database up to date, and end.

Every service does so at its start. A deployment may do it once, before a new version's first
replica. The replicas of the version before it go on with the new tables.
"""

from __future__ import annotations

import os
import sys

from everstep.options.model import SettingsError
from everstep.options.serve import ServeOptions
from everstep.spec.plain_text import printable_lines
from service.db.engine import Database, DatabaseError

EXIT_CANNOT_MIGRATE = 2


def main() -> int:
    """Migrate the database that EVERSTEP_DATABASE or EVERSTEP_DATABASE_FILE names."""
    try:
        database = Database(ServeOptions.read(os.environ).database_url)
        try:
            database.migrate()
        finally:
            database.close()
    except (SettingsError, DatabaseError) as exc:
        print(f"migrate: {printable_lines(str(exc))}", file=sys.stderr)
        return EXIT_CANNOT_MIGRATE
    return 0


if __name__ == "__main__":
    sys.exit(main())
