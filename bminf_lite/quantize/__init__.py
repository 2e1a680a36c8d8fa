"""What int8 needs to know about a model's activations: calibration, and the decisions that are made from it."""
