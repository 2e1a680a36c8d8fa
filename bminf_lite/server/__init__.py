"""An OpenAI-compatible HTTP server over the engine.

The engine's process owns the model; HTTP processes tokenize, detokenize and speak HTTP. They exchange the messages of
:mod:`.protocol` over sockets. :mod:`.client` is the one seam between HTTP code and engine: the same for the command,
for :func:`bminf_lite.serve` and for :func:`bminf_lite.server.application`. Needs the extra ``[serve]``.
"""
