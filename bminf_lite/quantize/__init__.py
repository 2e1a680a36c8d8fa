"""Calibration: a model runs on a text, and its activations decide how each product is quantized."""
