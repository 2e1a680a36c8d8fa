"""Many machines: batches on the replicas of a Ray cluster, and a deployment for Ray Serve. Needs the extra ``[ray]``.

Ray starts processes, notices which of them end, and knows the cluster's resources; this package does none of it.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

from ..errors import UsageError

if TYPE_CHECKING:
    from .deployment import Deployment, QueuedTokens, app

__all__ = ["Deployment", "QueuedTokens", "app"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    require_extra("Ray Serve")
    return getattr(importlib.import_module(".deployment", __name__), name)


def require_extra(user: str) -> None:
    """Raise ``UsageError`` if the packages of the extra ``[ray]``, which ``user`` needs, are not installed."""
    missing = [name for name in ("ray", "pyarrow") if not importlib.util.find_spec(name)]
    if missing:
        raise UsageError(
            f"{user} needs packages that are not installed ({', '.join(missing)}): pip install 'bminf-lite[ray]'"
        )
