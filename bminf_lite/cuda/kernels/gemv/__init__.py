"""Products of one row, or of a few float rows, with a weight."""
