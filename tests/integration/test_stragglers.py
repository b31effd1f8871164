"""A rank that is slowed by 50 ms a step is named, with its node, by ranks that really train."""

from __future__ import annotations

from pathlib import Path

import pytest

from everstep.wire.events import EventKind
from tests.integration.ranks import Job, make_run_dir, train_to_end
from tests.integration.test_exactness import make_spec
from tests.integration.test_exactness_precision import TRAINEES


@pytest.mark.alone
def test_a_slow_rank_is_named_with_its_node(tmp_path: Path) -> None:
    spec = make_spec(epochs=40, global_batch_size=30, micro_batch_size=10, eval_every_epochs=40)
    found = train_to_end(
        Job(make_run_dir(tmp_path), spec, 3, setup=f"{TRAINEES}:slow_second_rank"), tmp_path
    )
    stragglers = found.of_kind(EventKind.STRAGGLER)
    assert [(data["rank"], data["node_id"], data["slow"]) for data in stragglers] == [
        (1, "node1", True)
    ]
    assert (
        stragglers[0]["own_s"] > 0.05 and stragglers[0]["own_s"] > stragglers[0]["peers_s"] + 0.04
    )
    ranks = found.of_kind(EventKind.RANK_TIMES)[-1]["ranks"]
    waits = [rank["wait_s"] for rank in ranks]
    assert waits[1] == min(waits) and all(wait > 0.04 for wait in (waits[0], waits[2])), (
        "the others wait for it"
    )
