"""Mixtures of experts: routers, pairs of tokens and experts, and products with the experts' weights."""
