"""How a node file is read: every field is known, and of its type."""

import pydantic


class Document(pydantic.BaseModel):
    """A part of a node file."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True, strict=True)
