"""Kimi K2 (https://arxiv.org/abs/2507.20534): DeepSeek-V3 under a name of its own."""

from __future__ import annotations

from .deepseek_v3 import KEYS as KEYS
from .deepseek_v3 import architecture as architecture
from .deepseek_v3 import parse as parse
