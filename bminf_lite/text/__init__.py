"""Text to tokens and back: tokenizers, prompts, chat templates, stop strings. Nothing here knows models or devices."""
