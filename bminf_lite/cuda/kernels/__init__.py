"""The kernels, a folder per family: CUDA C++ beside the Python that launches it."""
