"""One NVIDIA GPU as a backend: :class:`CudaBackend` and its parts."""

from .backend import CudaBackend

__all__ = ["CudaBackend"]
