"""An OpenAI-compatible HTTP server over the engine.

The engine's process owns the model; HTTP processes tokenize, detokenize and speak HTTP. They exchange the messages of
:mod:`.protocol` over sockets. :mod:`.client` is the one seam between HTTP code and engine: the same for the command,
for :func:`serve` and for :func:`application`. Needs the extra ``[serve]``.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

from ..errors import UsageError

if TYPE_CHECKING:
    from .launcher import serve
    from .limits import Limits
    from .mounted import application

__all__ = ["Limits", "application", "serve"]

_HOMES = {"serve": "launcher", "application": "mounted", "Limits": "limits"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    require_extra()
    return getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)


def require_extra(user: str = "a server") -> None:
    """Raise ``UsageError`` if the packages of the extra ``[serve]``, which ``user`` needs, are not installed."""
    missing = [name for name in ("msgspec", "starlette", "uvicorn", "uvloop") if not importlib.util.find_spec(name)]
    if missing:
        raise UsageError(
            f"{user} needs packages that are not installed ({', '.join(missing)}): pip install 'bminf-lite[serve]'"
        )
