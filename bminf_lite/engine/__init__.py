"""Generation in tokens: requests, the steps that run them, their memory, and the results. Text is not known here.

To read it, begin with :mod:`.request`, then :mod:`.block_manager`, :mod:`.scheduler`, :mod:`.model_runner`, and
:mod:`.core`, the loop that joins them. docs/scheduling.md explains the whole.
"""
