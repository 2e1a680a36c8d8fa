"""Kernels over rows: norms, softmax, quantization, activations, embeddings."""
