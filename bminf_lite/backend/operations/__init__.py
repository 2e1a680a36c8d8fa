"""Every operation, defined once, over NumPy: the reference for other backends.

Each module has a class with one group of operations. :class:`bminf_lite.backend.base.Backend` is all of them, and says
what their numbers are. The formulas that an operation shares with another one, with a test or with ``torch/`` are
functions of the modules in ``bminf_lite/backend/``. On a GPU the module of the same name in
``bminf_lite/backend/cuda/operations/`` overrides them by kernels.

Shapes: ``T`` tokens of a step, of ``B`` sequences; see :class:`~bminf_lite.backend.values.ForwardBatch`.
"""
