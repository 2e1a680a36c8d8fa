"""Text to tokens and back: tokenizers, prompts, chat templates, stop strings. Imports neither models nor devices."""
