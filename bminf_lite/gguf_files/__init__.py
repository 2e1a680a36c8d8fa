"""GGUF files (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md), as llama.cpp's converter writes them.

A GGUF file holds a model's tensors, its configuration and its tokenizer. :mod:`.header` reads everything but the
tensors, with the package ``gguf``. :mod:`.config` turns the configuration into a ``config.json``, :mod:`.tensors` names
the tensors as Hugging Face does, and :mod:`.tokenizer` makes a ``tokenizer.json``. What differs between architectures
is in the table of :mod:`.architectures`.
"""
