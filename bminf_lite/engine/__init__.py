"""Requests in, tokens out: which requests run in a step, their memory, and what a caller gets back. No text here."""
