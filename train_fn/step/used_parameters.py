"""Find the parameters that no micro-batch of a step used, so that the optimizer skips them at every
world size, as plain torch does on one rank."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import nn

from train_fn.step.peers import Peers


class UsedParameters:
    """Note which parameters got a gradient from this rank's micro-batches since the last
    ``drop_unused``.

    The exchange of gradients gives every parameter one, of zero if no rank used it.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], peers: Peers) -> None:
        self._parameters, self._peers = parameters, peers
        self._used: set[int] = set()
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(partial(self._note, number))  # type: ignore[no-untyped-call]
            for number, parameter in enumerate(parameters)
        ]

    def remove_hooks(self) -> None:
        """Note nothing any more."""
        for hook in self._hooks:
            hook.remove()

    def _note(self, number: int, parameter: torch.Tensor) -> None:
        if parameter.grad is not None:  # the hook also runs where a backward gives nothing
            self._used.add(number)

    def __len__(self) -> int:
        return len(self._used)

    def forget(self) -> None:
        """Forget what was used since the last ``drop_unused``."""
        self._used.clear()

    def drop_unused(self) -> None:
        """Remove the gradients of parameters that no rank used. A collective."""
        flags = torch.zeros(len(self._parameters), dtype=torch.int32)
        flags[list(self._used)] = 1
        self.forget()
        flags = flags.to(self._peers.device)
        work = self._peers.start_sum(flags)
        if work is not None:
            work.wait()
        for parameter, uses in zip(
            self._parameters, self._peers.result(flags).tolist(), strict=True
        ):
            if not uses:
                parameter.grad = None
