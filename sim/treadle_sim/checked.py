"""Types for what files may hold, and which field of a file is wrong."""

import re
from typing import Annotated

from pydantic import Field, ValidationError

Name = Annotated[str, Field(min_length=1)]
Count = Annotated[int, Field(strict=True, ge=0)]
PositiveCount = Annotated[int, Field(strict=True, ge=1)]
FiniteNumber = Annotated[float, Field(strict=True, allow_inf_nan=False)]


def describe_first(error: ValidationError) -> tuple[str, str]:
    """The path of the first wrong field, as in `steps[2].obs_tokens`, and what is wrong with its value."""
    problem = error.errors(include_url=False)[0]
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in problem["loc"]).removeprefix(".")
    if problem["type"] == "missing":
        return path, "is missing"
    if problem["type"] in ("dataclass_type", "model_type"):
        return path, "must be a JSON object"
    expected = re.sub(r"^(Value error, |\w+ should (?=be|have))", "", problem["msg"])
    return path, f"{expected if expected.startswith('must') else f'must {expected}'}, is {problem['input']!r}"
