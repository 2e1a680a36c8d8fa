"""Matrix products: cublasLt, int8 layouts, and the kernels that scale their own sums."""
