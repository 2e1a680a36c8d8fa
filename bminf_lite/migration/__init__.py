"""A float checkpoint into an int8 one, with calibration and a measurement of its cost."""
