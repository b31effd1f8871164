"""Language modelling in a spec: its model, its data and their arguments."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator
from pydantic_core import PydanticCustomError
from pydantic_core.core_schema import ValidationInfo

from everstep.spec.field_types import Fraction, Frozen, NodePath


class GptArgs(Frozen):
    num_layers: Annotated[int, Field(ge=1, le=256)] = 4
    """Transformer blocks."""
    num_heads: Annotated[int, Field(ge=1, le=256)] = 4
    """Attention heads of each block."""
    width: Annotated[int, Field(ge=1, le=65_536)] = 128
    """Features of a token; divides by ``num_heads``."""
    context_length: Annotated[int, Field(ge=1, le=1 << 20)] = 128
    """Tokens that the model looks back on; the text is packed into sequences of this length, which
    are the samples."""
    dropout: Fraction = 0.0
    """Dropout probability of embeddings, attention and residual branches."""

    @field_validator("width")
    @classmethod
    def _heads_share_the_width(cls, value: int, info: ValidationInfo) -> int:
        num_heads = info.data.get("num_heads")
        if num_heads is not None and value % num_heads:
            raise PydanticCustomError(
                "width_not_divisible",
                "width {width} does not divide by num_heads {num_heads}; make it a multiple",
                {"width": value, "num_heads": num_heads},
            )
        return value


class GptSpec(Frozen):
    """A small GPT: pre-normalised transformer blocks with causal attention, learned positions, tied
    embeddings."""

    name: Literal["gpt"]
    args: GptArgs = GptArgs()


class TextFilesArgs(Frozen):
    path: Annotated[str, Field(min_length=1), NodePath()]
    """A text file, or a directory of them, on every node."""
    pattern: Annotated[str, Field(min_length=1)] = "*.txt"
    """Shell pattern of the files that are read below a directory, at any depth; ``*`` reads all."""
    level: Literal["byte", "char"] = "byte"
    """Tokens: ``byte`` reads any file, ``char`` the characters of UTF-8 text that occur in it."""
    val_fraction: Annotated[float, Field(ge=0, lt=1)] = 0.1
    """Share of the tokens held out for validation, from the end; 0 evaluates nothing."""


class TextFilesSpec(Frozen):
    """Text files one after another in the order of their paths, each with an end-of-text token,
    packed into whole sequences."""

    name: Literal["text_files"]
    args: TextFilesArgs


class LanguageModelingSpec(Frozen):
    """Next-token prediction; reports ``loss`` in nats a token, ``accuracy`` and ``bits_per_token``
    on the text that is held out."""

    name: Literal["language_modeling"]
    model: GptSpec
    data: TextFilesSpec
