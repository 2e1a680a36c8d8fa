"""An int8 inference engine for language models: migrate a checkpoint, load it, generate text.

    model = bminf_lite.load("path")
    print(model.generate("Once", max_new_tokens=64))

Each name is imported when it is first used, so ``import bminf_lite`` takes a few milliseconds and imports neither NumPy
nor CuPy.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .version import __version__

if TYPE_CHECKING:
    from .api import Model, load
    from .checkpoint.manifest import MigrationReport
    from .checkpoint.verify import verify
    from .engine.core import EngineStats
    from .engine.outputs import Piece, Result
    from .engine.sampling_params import SamplingParams
    from .engine.speculative import SpeculativeConfig
    from .errors import BminfError, CheckpointError, DeviceError, OutOfMemory, UsageError
    from .evaluation.compare import Comparison
    from .evaluation.measure import compare, perplexity
    from .evaluation.perplexity import Perplexity
    from .grammar import Grammar
    from .memory.planner import MemoryPlan
    from .migration.migrate import migrate
    from .placement import plan
    from .server import serve

__all__ = [
    "BminfError",
    "CheckpointError",
    "Comparison",
    "DeviceError",
    "EngineStats",
    "Grammar",
    "MemoryPlan",
    "MigrationReport",
    "Model",
    "OutOfMemory",
    "Perplexity",
    "Piece",
    "Result",
    "SamplingParams",
    "SpeculativeConfig",
    "UsageError",
    "__version__",
    "compare",
    "load",
    "migrate",
    "perplexity",
    "plan",
    "serve",
    "verify",
]

_HOMES = {
    "load": "api",
    "Model": "api",
    "EngineStats": "engine.core",
    "Grammar": "grammar",
    "Piece": "engine.outputs",
    "Result": "engine.outputs",
    "SamplingParams": "engine.sampling_params",
    "SpeculativeConfig": "engine.speculative",
    "migrate": "migration.migrate",
    "MigrationReport": "checkpoint.manifest",
    "verify": "checkpoint.verify",
    "perplexity": "evaluation.measure",
    "compare": "evaluation.measure",
    "Perplexity": "evaluation.perplexity",
    "Comparison": "evaluation.compare",
    "plan": "placement",
    "serve": "server",
    "MemoryPlan": "memory.planner",
    "BminfError": "errors",
    "CheckpointError": "errors",
    "DeviceError": "errors",
    "OutOfMemory": "errors",
    "UsageError": "errors",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
