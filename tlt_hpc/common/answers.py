"""How an answer of the data is written as the text that responses are judged by."""

from __future__ import annotations

import json
from decimal import Decimal
from typing import Any


def answer_text(value: Any) -> str:
    """A text as it is, a list of texts and numbers as JSON of texts, each of which is accepted; else JSON."""
    if isinstance(value, list) and not any(isinstance(each, list | dict) or each is None for each in value):
        return json.dumps([answer_text(each) for each in value])
    if isinstance(value, float) and value.is_integer():  # pandas makes floats of whole numbers if one is missing
        value = int(value)
    return str(value) if isinstance(value, str | Decimal) else json.dumps(value, default=str)
