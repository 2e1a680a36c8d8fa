"""CUDA without a toolkit: libraries, driver, run-time compiler, kernels and graphs. It knows no operation."""
