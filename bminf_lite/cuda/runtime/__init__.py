"""CUDA without a toolkit: libraries, driver, run-time compiler, kernels and graphs, independent of any operation."""
