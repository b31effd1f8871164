"""Send the facts that all ranks need about a step in the all-reduce of its gradients, without an
extra collective.

A rank's numbers are the gradient of a parameter that nothing else uses. DDP sums them with the
first bucket that the backward pass fills. ``totals_encoding`` says how they are encoded, and
``step_totals`` what the sums mean.
"""

from __future__ import annotations

import math
import struct

import numpy as np
import torch
from torch import nn

from storage.run_control import Stop
from train_fn.samples.ledger import Count
from train_fn.step.peers import Peers
from train_fn.step.step_totals import StepTotals, decode_facts, step_mark
from train_fn.step.totals_encoding import (
    MAX_EXACT_WEIGHT,
    NOTHING_EXPECTED,
    NUM_OF_HEADER,
    NUM_OF_RANK,
    NUM_SUMMED,
    SUMMED_FORMAT,
    WEIGHT_BYTES,
    Expected,
    encode_fields,
    encode_header,
    expect,
)

_SUMMED = struct.Struct(SUMMED_FORMAT)


class Carrier:
    """Collect a rank's facts about a step, and have DDP sum them over ranks.

    They are the gradient of ``numbers``: a parameter of the module that DDP wraps, but of no model
    and no optimizer. A step calls ``begin``, ``add`` for each micro-batch, ``backward`` with the
    last, and ``take``.

    Between a model's passes the caches are cold. One torch call, or touching five objects not used
    since the last step, then costs as much as everything here. So there are few of both.
    """

    def __init__(self, peers: Peers) -> None:
        self._peers = peers
        num_used = NUM_SUMMED + NUM_OF_RANK * peers.world_size
        num_numbers = num_used + num_used % 2
        """An even number: the gradients behind it in DDP's bucket begin at whole words."""
        self.numbers = nn.Parameter(
            torch.zeros(num_numbers, dtype=torch.float32, device=peers.device)
        )
        self._outgoing = np.zeros(num_numbers, np.float32)
        """The slots of other ranks stay zero."""
        self._outgoing_tensor = torch.from_numpy(self._outgoing)
        padding = 4 * (num_numbers - num_used)
        self._received = struct.Struct(
            f"{SUMMED_FORMAT}{NUM_OF_RANK * peers.world_size}f{padding}x"
        )
        self.begin(0)

    def begin(self, step: int, expected: Expected = NOTHING_EXPECTED, fingerprint: int = 0) -> None:
        """Begin the step after ``step`` steps done.

        Args:
            expected: describes the samples that this rank's loader should yield.
            fingerprint: ``Fingerprints.header`` of the step before, which must be the same on all
                ranks.
        """
        self._step, self._expected, self._fingerprint = step, expected, fingerprint
        self._loss, self._weight = 0.0, 0.0
        self._on_device: list[tuple[torch.Tensor, torch.Tensor | float]] = []
        """Losses and weights that are still on the device."""

    def add(
        self, loss_sum: torch.Tensor, weight: torch.Tensor | float, difference: Count | None = None
    ) -> None:
        """Add one micro-batch. ``difference`` is the correction from expected to loaded samples;
        None if they are equal."""
        if self._peers.on_cpu:
            self._loss += loss_sum.item()
            self._weight += float(weight)
        else:
            self._on_device.append((loss_sum.detach(), weight))
        if difference is not None:
            self._expected = expect(self._expected.samples + difference, self._peers.world_size)

    def backward(
        self,
        loss: torch.Tensor,
        stop: Stop | None = None,
        checkpoint_step: int = 0,
        *,
        save: bool = False,
        has_news: bool = False,
        own_s: float = 0.0,
    ) -> None:
        """Run ``loss.backward()``, and send the collected facts in its all-reduce.

        Args:
            stop: the user's request to cancel or pause that this rank has received.
            checkpoint_step: step of a newly committed checkpoint to report; 0 for none.
            save: whether to save the state after this step.
            has_news: whether this rank saw a tensor change that the ranks have not agreed on.
            own_s: seconds of this rank's own work in the step before.
        """
        torch.autograd.backward(
            (loss, self.numbers),
            (None, self.gradient(stop, checkpoint_step, save, own_s, has_news)),
        )

    def gradient(
        self,
        stop: Stop | None = None,
        checkpoint_step: int = 0,
        save: bool = False,
        own_s: float = 0.0,
        has_news: bool = False,
    ) -> torch.Tensor:
        """Return the numbers that ``backward`` sends, in a tensor that the next call overwrites.
        Nothing here waits for a CUDA device."""
        world_size, rank = self._peers.world_size, self._peers.rank
        loss, weight, (samples, encoded_hash) = self._loss, self._weight, self._expected
        nonfinite = not math.isfinite(loss)
        whole = math.floor(weight) if 0 <= weight < MAX_EXACT_WEIGHT else 0
        counts = (samples.num_samples, samples.num_unexpected, samples.num_missing)
        requests = (checkpoint_step, stop == "cancel", stop == "pause", save, has_news)
        fields = encode_fields((whole, nonfinite, *counts, *requests), world_size)
        fractions = (
            world_size * loss,
            world_size * nonfinite * (rank + 1),
            world_size * (weight - whole),
        )
        _SUMMED.pack_into(self._outgoing.data, 0, *fractions, fields, encoded_hash)
        self._outgoing[NUM_SUMMED + rank] = world_size * step_mark(self._step)
        self._outgoing[NUM_SUMMED + world_size + rank] = world_size * own_s
        begin = NUM_SUMMED + 2 * world_size + NUM_OF_HEADER * rank
        self._outgoing[begin : begin + NUM_OF_HEADER] = encode_header(self._fingerprint, world_size)
        if not self._on_device:
            return self._outgoing_tensor
        of_losses = self._numbers_on_device()
        rest = self._outgoing_tensor[len(of_losses) :].to(self._peers.device, non_blocking=True)
        return torch.cat([of_losses * world_size, rest])

    def take(self) -> StepTotals:
        """Return the totals over all ranks. Call this after ``backward`` has returned. It waits
        until the device has finished."""
        sums, self.numbers.grad = self.numbers.grad, None
        assert sums is not None
        return self.totals_of(self._peers.result(sums).numpy().tobytes())

    def totals_of(self, sums: bytes) -> StepTotals:
        """Decode the sums of all ranks' numbers: as many float32 values as ``numbers`` has."""
        loss, nonfinite_ranks, fraction, fields, hash_sums, *of_ranks = self._received.unpack(sums)
        facts, world_size = decode_facts(fields), self._peers.world_size
        marks, own_s = of_ranks[:world_size], of_ranks[world_size : 2 * world_size]
        headers = of_ranks[2 * world_size :]
        return StepTotals(
            loss,
            fraction + facts.weight,
            facts,
            hash_sums,
            tuple(marks),
            tuple(own_s),
            nonfinite_ranks,
            tuple(headers),
        )

    def _numbers_on_device(self) -> torch.Tensor:
        """Compute on the device the numbers that depend on losses and weights there: the fractions,
        the weight's bytes, and whether the loss is not finite."""
        device = self._peers.device
        losses, weights = zip(*self._on_device, strict=True)
        loss = torch.stack(losses).sum(dtype=torch.float64)
        known = sum(float(weight) for weight in weights if not isinstance(weight, torch.Tensor))
        tensors = [
            weight.detach().double().to(device)
            for weight in weights
            if isinstance(weight, torch.Tensor)
        ]
        weight = torch.stack(
            [torch.full((), known, dtype=torch.float64, device=device), *tensors]
        ).sum()
        nonfinite = torch.logical_not(torch.isfinite(loss)).double()
        whole = torch.where(
            (weight >= 0) & (weight < MAX_EXACT_WEIGHT), weight.floor(), torch.zeros_like(weight)
        )
        sizes = torch.pow(256.0, torch.arange(WEIGHT_BYTES, dtype=torch.float64, device=device))
        bytes_of_weight = (whole / sizes).floor().remainder(256.0)
        fractions = torch.stack([loss, nonfinite * (self._peers.rank + 1), weight - whole])
        return torch.cat([fractions, bytes_of_weight, nonfinite[None]]).float()
