"""Measures the predictions of a model and the error of its int8 form: corpora, perplexity, comparisons, reports."""
