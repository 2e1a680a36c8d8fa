"""Attention over the key-value cache: decode, prefill, and what prepares their heads."""
