"""Language modelling: its model, data and their arguments."""

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
    """Width of a token's features; must be a multiple of ``num_heads``."""
    context_length: Annotated[int, Field(ge=1, le=1 << 20)] = 128
    """Context length in tokens. The text is packed into sequences of this length, which are the
    samples."""
    dropout: Fraction = 0.0
    """Dropout probability of embeddings, attention and residual branches."""

    @field_validator("width")
    @classmethod
    def _heads_share_the_width(cls, value: int, info: ValidationInfo) -> int:
        num_heads = info.data.get("num_heads")
        if num_heads is not None and value % num_heads:
            raise PydanticCustomError(
                "width_not_divisible",
                "width {width} is not a multiple of num_heads {num_heads}; change one of them",
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
    """Shell pattern of the files to read below a directory, at any depth; ``*`` reads all."""
    level: Literal["byte", "char"] = "byte"
    """Tokens: ``byte`` works with any file; ``char`` uses the characters that occur in the UTF-8
    text."""
    val_fraction: Annotated[float, Field(ge=0, lt=1)] = 0.1
    """Share of the tokens, from the end, held out for validation; 0 does not evaluate."""


class TextFilesSpec(Frozen):
    """Text files, concatenated in the order of their paths with an end-of-text token after each,
    and packed into whole sequences."""

    name: Literal["text_files"]
    args: TextFilesArgs


class LanguageModelingSpec(Frozen):
    """Next-token prediction; reports ``loss`` in nats per token, ``accuracy`` and
    ``bits_per_token`` on the held-out text."""

    name: Literal["language_modeling"]
    model: GptSpec
    data: TextFilesSpec
