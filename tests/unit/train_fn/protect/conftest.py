"""Lightning imports torchvision, which has no compiled operators on a machine whose torch is
another build."""

from __future__ import annotations

from train_fn.user_code.modules import declare_missing_ops

declare_missing_ops()
