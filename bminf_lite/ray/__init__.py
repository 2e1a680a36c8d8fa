"""Many machines: batches on the replicas of a Ray cluster, and a deployment for Ray Serve. Needs the extra ``[ray]``.

Ray starts processes, notices which of them end, and knows the cluster's resources; this package does none of it.
"""

from __future__ import annotations

import importlib.util

from ..errors import UsageError


def require_extra(user: str) -> None:
    """Raise ``UsageError`` if the packages of the extra ``[ray]``, which ``user`` needs, are not installed."""
    missing = [name for name in ("ray", "pyarrow") if not importlib.util.find_spec(name)]
    if missing:
        raise UsageError(
            f"{user} needs packages that are not installed ({', '.join(missing)}): pip install 'bminf-lite[ray]'"
        )
