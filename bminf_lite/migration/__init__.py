"""A float checkpoint into an int8 one, with calibration and a measure of what it cost."""
