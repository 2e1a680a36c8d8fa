"""Measuring the engine: tokens per second, where a step's time goes, single kernels, and the limits of the device.

A benchmark runs the model's own steps with random tokens, on a checkpoint or on random weights of a given shape, and
checks what comes out. It knows no architecture. What differs between devices (clocks, the limits of the hardware, how
single kernels are launched) is an :class:`~bminf_lite.bench.instruments.Profiler`, and only :mod:`.cuda` of this
package names a GPU.
"""
