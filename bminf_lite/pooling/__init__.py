"""Texts to vectors, scores and labels: what lies around a model that reads whole texts."""
