"""What a reader of a page sees, and a failure to show."""

from __future__ import annotations

import re
from html import unescape
from typing import Any

from everstep.wire.events import EventKind
from tests.support.api_service import Journal

HOSTILE = "\"><script>alert(1)</script><img src=x onerror=alert(2)>'{{7*7}}"


def text_of(html: str) -> str:
    """What a reader sees."""
    return re.sub(r"\s+", " ", unescape(re.sub(r"<[^>]*>", " ", html)))


def fail(journal: Journal, **data: Any) -> Any:
    fields = {
        "verdict": "node_lost",
        "first_rank": 1,
        "node_id": "node-2",
        "step": 5,
        "exception": None,
        "evidence": {},
    }
    fields |= {
        "action": "restarted",
        "budget": "system",
        "steps_lost": 0,
        "detect_s": 1.5,
        "recovery_s": None,
    }
    fields |= {"world_size_before": 2, "world_size_after": 1}
    return journal.event(EventKind.FAILURE, **fields | data)
