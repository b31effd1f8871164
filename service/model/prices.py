"""What an hour of a resource costs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class Prices:
    """What an hour costs the operator's users; None is not priced."""

    gpu_hour: float | None
    cpu_hour: float | None
    currency: str

    @property
    def any(self) -> bool:
        return self.gpu_hour is not None or self.cpu_hour is not None


NO_PRICES: Final = Prices(None, None, "")
