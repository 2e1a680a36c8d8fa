"""Grammars: what a completion must look like, as a plain value, and the masks of tokens that follow from it."""

from .value import Grammar, Structure, only_structure, validate

__all__ = ["Grammar", "Structure", "only_structure", "validate"]
