"""What is worked out for many steps at once is what each step would work out by itself."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tests.unit.train_fn.samples.test_sampler import SAMPLERS
from train_fn.samples.ledger import Count, sample_hashes
from train_fn.samples.sampler import MicroBatch, Sampler
from train_fn.samples.streams import StreamSampler
from train_fn.step.report_sums import _MOST_STEPS, StepPlans, expect

STREAM_SAMPLERS = st.builds(
    lambda num_samples, size, streams: StreamSampler(
        num_samples, size, max(1, size // 4), 7, streams
    ),
    num_samples=st.integers(1, 300),
    size=st.integers(1, 60),
    streams=st.integers(1, 4),
)


def place_of(micro: MicroBatch) -> tuple[int, int, int, list[int]]:
    return micro.epoch, micro.k, micro.number, micro.indices.tolist()


@given(
    st.one_of(SAMPLERS, STREAM_SAMPLERS),
    st.integers(1, 6),
    st.lists(st.integers(0, 300), min_size=1, max_size=4),
)
def test_a_plan_is_the_sampler_s_share_with_its_hashes(
    sampler: Sampler, world_size: int, steps: list[int]
) -> None:
    for rank in range(world_size):
        plans = StepPlans(sampler, rank, world_size)
        for first in steps:
            for step in (first, first + 1, first + _MOST_STEPS):
                epoch, k = divmod(step, sampler.steps_per_epoch)
                plan, share = plans.of(step), sampler.share(epoch, k, rank, world_size)
                assert plan.num_samples == len(sampler.global_batch(epoch, k))
                assert [place_of(micro) for micro in plan.share] == [
                    place_of(micro) for micro in share
                ]
                assert plan.hashes == [
                    sample_hashes([(epoch, step)], [micro.indices])[0] for micro in share
                ]
                num_samples = sum(len(micro.indices) for micro in share)
                assert plan.expected == expect(
                    Count(num_samples, 0, 0, sum(plan.hashes) % 2**64), world_size
                )
