"""The operations of a backend by kernels, a module for each group, as in :mod:`bminf_lite.backend.operations`."""
