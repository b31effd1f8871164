"""LoopState: the state of a user's own loop, in the form of ``TrainState``."""

from __future__ import annotations

import copy
import hashlib
import logging
import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from train_fn.checks.ranks import require_same_samples
from train_fn.errors import BadTask, DataChanged, few
from train_fn.protect.arguments import LoopParts
from train_fn.protect.batches import Batches, LastBatch
from train_fn.protect.changes import MovingTensors, PartCopies, WeightsMark
from train_fn.samples.sampler import Sampler
from train_fn.state.optim import load_optimizer, match_layout, unpacked, with_strides
from train_fn.state.pieces import WEIGHT, weights_in
from train_fn.state.run_state import RunState
from train_fn.state.sharded import (
    EXTRA,
    apart,
    load_weights,
    rows_in,
    whole_extra,
    whole_optimizer,
)
from train_fn.state.sound_state import require_sound
from train_fn.state.tensor_tree import of_own_types, tree_digest
from train_fn.state.train_state import READ_BACK
from train_fn.step.fingerprints import local
from train_fn.step.peers import Peers
from train_fn.step.untrained import require_loaded

logger = logging.getLogger(__name__)

UNTRAINED = "the untrained "
"""Begins the names of buffers and the like in ``digests``."""
FINGERPRINT = "own loop"
"""Begins the fingerprint of every state of a user's own loop."""


class LoopState(RunState):
    """Hold the live objects of a user's loop, and counters.

    ``model`` in its ``state_dict`` holds the weights of all models, ``optimizer`` each optimizer's
    state by name, ``task`` what else the loop gave.
    """

    def __init__(self, parts: LoopParts) -> None:
        super().__init__()
        self.parts = parts
        self.piece = parts.piece
        self.rows = rows_in(parts.models, parts.others) if parts.piece is not None else {}
        self.seed = torch.initial_seed() & (1 << 63) - 1
        """Seeds the random numbers of every step. It is that of ``torch.manual_seed`` when the run
        began."""
        self._began_with = given_by(parts, self.seed)
        self.unlike: list[str] = []
        """What the restored run was begun with, and is given otherwise now."""
        self.why_alike: str | None = None
        """Why only the loop that began the run may go on with it; None if any may."""
        self.data: Batches | None = None
        self._known_data: str | None = None
        """Fingerprint of the data that the restored state was trained on."""
        self._restored_epoch = (0, 0)
        self._contents: str | None = None
        self._last_batch: LastBatch | None = None
        self.epoch_began = 0
        """Steps done when the present epoch began, as far as a loader says."""
        self._trained = {
            prefix + name
            for prefix, model in parts.models.items()
            for name, value in model.named_parameters(remove_duplicate=False)
            if value.requires_grad
        }
        held = {id(value) for value in parts.optimized()}
        self.moving = MovingTensors(
            parts.models, [each for each in parts.parameters() if id(each) in held]
        )
        self._copies = PartCopies(parts)
        self._names = self._weights().keys()
        self._weights_mark = WeightsMark(
            local(value) for value in parts.parameters() if value.requires_grad or id(value) in held
        )

    # -- what the data says

    @property
    def sampler(self) -> Sampler | None:
        """Return the order of the samples; None without Everstep's loader."""
        return self.data.sampler if self.data is not None else None

    @property
    def epoch(self) -> int:
        return self._place()[0]

    @property
    def ends_epoch(self) -> bool:
        """Return whether the newest step was the last one of an epoch, as far as a loader says."""
        return self.ends_epoch_in(0)

    def ends_epoch_in(self, steps: int) -> bool:
        """Return whether an epoch ends so many steps after the newest one."""
        if self.sampler is not None:
            return (self.step + steps) % self.sampler.steps_per_epoch == 0
        loaders = (self.parts.others[name] for name in self.parts.loaders)
        return any(e.ends_epoch_in(steps) for e in loaders if hasattr(e, "ends_epoch_in"))

    @property
    def batch_mark(self) -> int:
        """Return a digest of the newest batch of a loader of the loop's own; 0 if none is known."""
        loaders = (self.parts.others[name] for name in self.parts.loaders)
        return next((mark for each in loaders if (mark := getattr(each, "mark", 0))), 0)

    @property
    def own_draws(self) -> tuple[str, ...]:
        """Return a digest of the generators that samplers own, for each loader of the loop's
        own."""
        loaders = (self.parts.others[name] for name in self.parts.loaders)
        return tuple(getattr(each, "own_draws", "") for each in loaders)

    @property
    def is_closing(self) -> bool:
        """Return whether an epoch has ended that was not closed yet."""
        return self.sampler is not None and self.closed_epochs < self.epoch

    def attach(self, data: Batches, peers: Peers) -> None:
        """Let the state follow this data. A collective the first time. Raises DataChanged if it was
        trained on other data, or ranks have other data."""
        if self.step and self._known_data != data.fingerprint:
            raise DataChanged(
                f"the data of es.loader changed since step {self.step}: it was "
                f"{self._known_data or 'a loader of your own'}, now it is {data.fingerprint}. Put "
                "the data back as it was, or start a new run"
            )
        is_new = self.data is not data
        self.data, self._known_data = data, data.fingerprint
        if is_new:
            contents = data.contents()
            require_same_samples(peers, contents, "the data of es.loader", "Where you make it, ")
            if self._last_batch is not None and (self.why_alike or not self.ends_epoch):
                self._last_batch.require_same(data, contents, self.step, peers)
            self._contents = contents.dump()

    def _place(self) -> tuple[int, int]:
        """Return epoch and global batch within it; (0, step) where no epoch is known."""
        if self.sampler is not None:
            return divmod(self.step, self.sampler.steps_per_epoch)
        return self._restored_epoch if self._known_data is not None else (0, self.step)

    # -- commits

    def note_batch(self, rank: int, world_size: int) -> None:
        """Note the batch of the newest step, from Everstep's loader."""
        if self.data is not None and self.data.taken is not None:
            self._last_batch = LastBatch(rank, world_size, self.data.taken)

    @property
    def seeds_at(self) -> int:
        """Return the step that seeds the code before the first batch. So code at the top of an
        epoch draws after a restart what it drew before."""
        has_epochs = self._known_data is not None or any(
            hasattr(self.parts.others[name], "ends_epoch_in") for name in self.parts.loaders
        )
        return self.epoch_began if has_epochs else self.step

    def note_parts(self, *, of_step: bool = True) -> None:
        """Copy what may change before the next optimizer step, or note its version."""
        self.moving.commit(of_step=of_step)
        self._weights_mark.note()
        self._copies.note()

    def note_unseen(self) -> None:
        """Copy again what may have changed without a trace, where looking would cost more."""
        if self.moving.is_on_gpu:
            self.moving.commit(of_step=False)

    def changed(self) -> list[str]:
        """Return the names of what differs from what was noted, as far as that is seen. Loaders are
        left out, since they read ahead."""
        return [
            *self._copies.changed(),
            *self._copies.changed_options(),
            *(["the trained weights"] if self._weights_mark.seems_changed() else []),
            *(["buffers or untrained weights"] if self.moving.has_changed() else []),
        ]

    def weights_have_changed(self) -> bool:
        """Return whether trained weights are others than at the last commit, as far as is seen."""
        return self._weights_mark.has_changed()

    def changed_parts(self, among: Collection[str]) -> list[str]:
        """Return which of these schedulers and extras differ from what was noted."""
        return self._copies.changed(among)

    def close_epoch(self) -> dict[str, Any]:
        """Return the facts about the epoch that ended, and begin the next one."""
        closed = {"epoch": self.closed_epochs, **self.ledger.close_epoch()}
        self.closed_epochs += 1
        return closed

    def last_committed(self) -> dict[str, Any] | list[str]:
        """Return the state of the last commit while no optimizer has stepped since; or the names of
        what has changed without a copy."""
        torn = self._copies.torn() + self.moving.put_back()
        if self._weights_mark.has_changed():
            torn.append("the trained weights")
        if torn:
            return torn
        noted = self._copies
        return self._state_dict(
            {**self._weights(), **noted.extra},
            noted.states(),
            noted.of_optimizer,
            noted.frozen(noted=True),
        )

    def digests(self) -> dict[str, str]:
        """Return a digest of each part, which must be the same on all ranks at a commit."""
        parts, weights = self.parts, self._weights()
        trained = self._trained & weights.keys()
        kept_apart = {*self._trained, *(name.removeprefix(WEIGHT) for name in self.rows)}
        rest = {name: value for name, value in weights.items() if name not in kept_apart}
        return {
            "the trained weights": tree_digest({name: weights[name] for name in sorted(trained)}),
            **{
                f"the state of the optimizer{name and ' ' + name}": tree_digest(
                    optimizer.state_dict()["state"], f"optimizer{name and '/' + name}/state"
                )
                for name, optimizer in parts.optimizers.items()
            },
            **{UNTRAINED + name: tree_digest(value) for name, value in rest.items()},
            **{name: tree_digest(part.state_dict()) for name, part in parts.others.items()},
        }

    def is_of_rank(self, name: str) -> bool:
        """Return whether a part of these may differ between ranks: loaders, and what is sharded."""
        is_cut = any(each.startswith(f"{EXTRA}{name}/") for each in self.rows)
        is_common = (name in self.parts.others and not is_cut) or name.startswith(UNTRAINED)
        return name in self.parts.loaders or (self.piece is not None and not is_common)

    # -- the face of TrainState

    def state_dict(self) -> dict[str, Any]:
        """Return the present state, between two steps. Raises BadTask for a model that has other
        tensors than when the loop began, which it could not load."""
        optimizers, weights = self.parts.optimizers, self._weights()
        if other := sorted(weights.keys() ^ self._names):
            raise BadTask(
                f"es.protect(model=…): {few(other)} was added to the model, or taken away, since "
                "`with state:`, and no restart could load it. Register it where the model is made"
            )
        return self._state_dict(
            weights,
            self._copies.live(),
            lambda name: optimizers[name].state_dict(),
            self._copies.frozen(noted=False),
        )

    def _state_dict(
        self,
        weights: dict[str, Any],
        states: Mapping[str, Any],
        of_optimizer: Callable[[str], dict[str, Any]],
        frozen: list[str],
    ) -> dict[str, Any]:
        _, k = self._place()
        loaders = {name: state for name, state in states.items() if name in self.parts.loaders}
        state = {
            **self.counters(k),
            "fingerprint": f"{FINGERPRINT}: {self._known_data}",
            "contents": self._contents,
            "model": weights,
            "unsaved": self.moving.unsaved(),
            "task": {
                "seed": self.seed,
                "parts": {name: state for name, state in states.items() if name not in loaders},
            },
            "loaders": loaders,
            "optimizer": {
                name: with_strides(of_optimizer(name), optimizer)
                if self.piece is None
                else of_optimizer(name)
                for name, optimizer in self.parts.optimizers.items()
            },
            "scaler": {},
            "ema": None,
            "bookmarks": None,
            "own_loop": {
                "data": self._known_data,
                "frozen": frozen,
                "epoch_began": self.epoch_began,
                "began_with": self._began_with,
                "batch": self._last_batch.dump() if self._last_batch is not None else None,
            },
        }
        return state if self.piece is None else apart(state, self.piece)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state. ``state`` is copied and not changed.

        Raises BadTask if it is not of the objects that ``es.protect`` was given.
        """
        self._check(state)
        self.complete = False
        shards = state.get("shards") or {}
        for prefix, model in self.parts.models.items():
            own = (each for each in state["model"].items() if each[0].startswith(prefix))
            plain = {name.removeprefix(prefix): value for name, value in own}
            if self.piece is None:
                model.load_state_dict(plain)
                require_loaded(model, plain, "es.protect(model=…)")
            else:
                load_weights(model, prefix, plain, shards)
        for name, optimizer in self.parts.optimizers.items():
            # Optimizer.load_state_dict keeps references to the tensors that it is given.
            saved = unpacked(copy.deepcopy(state["optimizer"][name]))
            if self.piece is not None:
                saved = whole_optimizer(name, optimizer, saved, shards)
            load_optimizer(optimizer, saved)
            match_layout(optimizer, saved.get("strides"))
        kept = {**state["task"]["parts"], **state["loaders"]}
        is_begun = state["step"] > 0
        for name, part in self.parts.others.items():
            if is_begun or name not in self.parts.loaders:
                saved = copy.deepcopy(kept[name])
                if self.piece is not None:
                    saved = whole_extra(name, part, saved, shards)
                part.load_state_dict(of_own_types(saved, part.state_dict()))
                now = part.state_dict()
                is_whole = self.piece is None and name not in self.parts.loaders
                if is_whole and tree_digest(now) != tree_digest(of_own_types(kept[name], now)):
                    logger.warning(READ_BACK, f"es.protect: {name}")
        self.moving.load_unsaved(state["unsaved"])
        self.moving.renew()
        self.seed = state["task"]["seed"]
        self.load_counters(state)
        self._known_data = state["own_loop"]["data"]
        self._last_batch = LastBatch.loaded(state["own_loop"].get("batch"), state.get("contents"))
        self._contents = state.get("contents")
        self.epoch_began = state["own_loop"].get("epoch_began", self.step)
        self._began_with = state["own_loop"].get("began_with", {})
        self._restored_epoch = (state["epoch"], state["k"])
        if (frozen := state["own_loop"].get("frozen")) is not None:
            self._copies.freeze(frozen)
        self._copies.begin()
        self.note_parts()
        self.complete = True

    def require_sound(self, state: Mapping[str, Any]) -> None:
        """Raise StateNotWhole or NonFiniteWeights for a state that must not be kept."""
        require_sound({**state, "model": weights_in(state)}, self.sampler, self._trained)

    def _check(self, state: Mapping[str, Any]) -> None:
        if "own_loop" not in state:
            raise BadTask(
                "the state to resume is one of a task, not of a loop of your own; start a new run"
            )
        if (self.piece is None) == bool(state.get("piece")):
            was, now = ("", "not ") if self.piece is None else ("not ", "")
            raise BadTask(
                f"the model of the state to resume was {was}sharded, and this one is {now}sharded; "
                "build it as before, or start a new run"
            )
        began, given = state["own_loop"].get("began_with", {}), self._began_with
        self.unlike = [name for name in began if began[name] != given.get(name, began[name])]
        if self.why_alike and state["step"] and self.unlike:
            raise BadTask(
                f"es.protect: {self.why_alike} at step {state['step']}, and began with another "
                f"{few(self.unlike)}. Pass run_id=… for another training, one for each fold or "
                "phase, or fresh=True to begin this one anew"
            )
        kept = {**state["task"]["parts"], **state["loaders"]}
        for what, saved, own in (
            ("optimizer", state["optimizer"], self.parts.optimizers),
            ("scheduler or extra", kept, self.parts.others),
        ):
            if saved.keys() != own.keys():
                raise BadTask(
                    f"es.protect({what}=…) was given {sorted(own)}, but the state of step "
                    f"{state['step']} holds {sorted(saved)}; give the same, or start a new run"
                )

    def _weights(self) -> dict[str, Any]:
        return {
            prefix + name: value
            for prefix, model in self.parts.models.items()
            for name, value in model.state_dict().items()
        }


_DRAWN_SEED = 1 << 32
"""Larger seeds are not given by people: torch draws one where nothing has set it."""
_SCHEDULED = dict.fromkeys(("params", "initial_lr", "betas", "momentum"))
"""What a scheduler changes in a group of an optimizer, and its weights."""


def given_by(parts: LoopParts, seed: int) -> dict[str, str]:
    """Return digests of what tells trainings of one script apart: models, optimizers, and the seed
    of rank 0. They are the same for objects that have been trained."""
    options = [
        (name, type(each), each.defaults, sorted({**group, **_SCHEDULED, "lr": rate}.items()))
        for name, each in parts.optimizers.items()
        for group in each.param_groups
        for rate in (group.get("initial_lr", group.get("lr")),)
    ]
    given: dict[str, Any] = {"model": parts.models, "optimizer or its options": options}
    if seed < _DRAWN_SEED and (not dist.is_initialized() or dist.get_rank() == 0):
        given["seed"] = seed
    texts = {name: re.sub(" at 0x[0-9a-f]+", "", repr(value)) for name, value in given.items()}
    return {name: hashlib.sha256(text.encode()).hexdigest()[:16] for name, text in texts.items()}


# ---------------------------------------------------------------- metrics

# The metrics that a loop gives to ``state.step``: checked, and the same on every rank.

Values = dict[str, float | None]

MOST_VALUES = 16
"""Metrics of a step that rank 0 sends to the others."""


def numbers_of(metrics: Mapping[str, Any]) -> Values:
    """Return metrics as numbers; one that is not finite is None. Raises BadTask."""
    values: Values = {}
    for name, value in metrics.items():
        try:
            number = float(value.detach() if isinstance(value, torch.Tensor) else value)
        except (TypeError, ValueError, RuntimeError):
            raise BadTask(
                f"state.step({name}=…) is a {type(value).__name__}; pass a number, or a tensor of "
                "one element"
            ) from None
        values[name] = number if math.isfinite(number) else None
    return values


def sent(values: Values) -> tuple[int, tuple[float, ...]]:
    """Return a hash of the names, and the first values, as rank 0 sends them."""
    names = sorted(values)[:MOST_VALUES]
    numbers = (values[name] for name in names)
    return names_hash(names), tuple(math.nan if each is None else each for each in numbers)


def received(own: Values, hashed: int, numbers: Sequence[float]) -> Values:
    """Return rank 0's values under the names that this rank gave; its own if those differ."""
    names = sorted(own)[:MOST_VALUES]
    if names_hash(names) != hashed:
        return own
    theirs = zip(names, numbers, strict=False)
    return {name: value if math.isfinite(value) else None for name, value in theirs}


def names_hash(names: Sequence[str]) -> int:
    digest = hashlib.sha256("\n".join(names).encode()).digest()
    return int.from_bytes(digest[:7], "little")
