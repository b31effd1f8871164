"""The task that a spec names."""

from __future__ import annotations

from everstep.catalog import LanguageModelingSpec
from everstep.spec import RunSpec
from train_fn.tasks.image_classification import ImageClassification
from train_fn.tasks.language_modeling import LanguageModeling
from train_fn.tasks.protocol import Task


def build_task(spec: RunSpec) -> Task:
    """Build it, with its data. Raises DataMissing when the data is not on this node."""
    if isinstance(spec.task, LanguageModelingSpec):
        return LanguageModeling(spec.task)
    return ImageClassification(spec.task)
