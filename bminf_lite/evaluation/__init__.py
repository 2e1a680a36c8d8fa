"""What a model predicts, and how far its int8 form is from the original: corpora, perplexity, comparisons, reports."""
