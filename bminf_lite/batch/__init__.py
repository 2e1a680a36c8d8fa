"""Batches: each row of a file becomes a request, and its answer a row of the output, in blocks that are resumable.

A row is answered as the server would answer it (:mod:`bminf_lite.server.direct`), on the local machine or by the actors
of :mod:`bminf_lite.ray`, by a process beside that of the model (:mod:`.row_process`). Needs the extra ``[serve]``.
"""
