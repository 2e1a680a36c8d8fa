"""XLM-RoBERTa (https://arxiv.org/abs/1911.02116), the base of BGE-M3 and multilingual E5: RoBERTa in 100 languages."""

from __future__ import annotations

from . import roberta
from ._architecture import encoder_architecture

architecture = encoder_architecture(roberta.parse)
