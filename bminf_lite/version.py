"""The package's version, stated here alone."""

__version__ = "0.1.0"
