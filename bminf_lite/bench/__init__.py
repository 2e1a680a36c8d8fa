"""Measuring speed: tokens per second of a model, the parts of one step, single kernels, and the device's limits.

A benchmark runs a model's own forward passes on random tokens, and checks their results. It contains nothing that is
specific to an architecture. Each module of the first list imports only those above it:

- :mod:`.model`: the model that is measured, from a checkpoint or with random weights of a shape
- :mod:`.calls`: observes the backend's operations, and counts the bytes and operations of products
- :mod:`.cases`: the single kernels that are timed, and the plain formulas that they are compared with
- :mod:`.profiler`: measures a device: time, memory peaks, limits, the parts of a step; this one is the CPU's
- :mod:`.cuda`: the profiler of an NVIDIA GPU, the only module here that imports CuPy
- :mod:`.session`: sequences of random tokens that are prefilled and decoded
- :mod:`.runner`: runs the measurements: workloads, one traced step, kernels
- :mod:`.report` and :mod:`.plot`: the results as tables, JSON, CSV and drawings

Beside them, :mod:`.serving` times requests that go through the engine, and :mod:`.product_times` finds the time of one
product for a migration with a budget.
"""
