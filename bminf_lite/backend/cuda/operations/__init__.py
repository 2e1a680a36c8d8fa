"""The operations by kernels, a module for each group.

The module of the same name in :mod:`bminf_lite.backend.operations` defines each operation: shapes, dtypes and formula
stand there. Other methods here are parts of these operations.
"""
