"""Kernels in which several GPUs take part."""
