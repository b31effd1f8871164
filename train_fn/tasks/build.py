"""The task that a spec names."""

from __future__ import annotations

from everstep.spec.run_spec import RunSpec
from everstep.spec.text_task import LanguageModelingSpec
from train_fn.tasks.image_classification import ImageClassification
from train_fn.tasks.language_modeling import LanguageModeling
from train_fn.tasks.own import build_own_task
from train_fn.tasks.protocol import Task


def build_task(spec: RunSpec) -> Task:
    """Build it, with its data. Code of the user's is on the path already.

    Raises DataMissing when the data is not on this node, BadTask for code that holds no task.
    """
    if spec.code is not None:
        return build_own_task(spec.code)
    assert spec.task is not None
    if isinstance(spec.task, LanguageModelingSpec):
        return LanguageModeling(spec.task)
    return ImageClassification(spec.task)
