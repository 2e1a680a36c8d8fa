"""Calibration: a model's activations on a text, and the decisions how to quantize each product."""
