"""What every section is made of: strictness, the types of its keys, and the error that ends a command."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from tlt_hpc.errors import UserError as UserError

PositiveInt = Annotated[int, Field(ge=1, lt=2**63)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
StrategyName = Annotated[str, Field(min_length=1)]
Count = Annotated[int, Field(ge=0)]
Decay = Annotated[float, Field(ge=0.0, lt=1.0)]
Positive = Annotated[float, Field(gt=0.0)]
NonNegative = Annotated[float, Field(ge=0.0)]


class ConfigError(UserError):
    """A user's mistake in the configuration; its text is one line with the remedy."""


class Section(BaseModel):
    """Frozen, strict about unknown keys, no NaN or infinity."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, strict=True)
