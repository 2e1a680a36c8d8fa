"""Attention over the key-value cache: decode, prefill, and the preparation of heads."""
