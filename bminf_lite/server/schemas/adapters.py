"""The bodies of ``/v1/load_lora_adapter`` and ``/v1/unload_lora_adapter``, which are vLLM's."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from ..settings import MAX_NAME
from .base import Body

Name = Annotated[str, Field(min_length=1, max_length=MAX_NAME)]


class LoadAdapterBody(Body):
    """``lora_path`` is a folder on the server's machine. ``load_inplace`` replaces an adapter of the same name."""

    lora_name: Name
    lora_path: Annotated[str, Field(min_length=1)]
    load_inplace: bool | None = None


class UnloadAdapterBody(Body):
    """The adapter's name."""

    lora_name: Name
