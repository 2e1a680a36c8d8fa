"""The parts that decoders are made of.

- :mod:`.part`: what a part states, and the layer that runs norms around parts;
- :mod:`.norms`: norms of the residual stream;
- :mod:`.attention`, :mod:`.feed_forward`: what a layer consists of;
- :mod:`.ends`: what lies before the first layer and behind the last.

A part is a frozen description. It states its tensors and what migration may do with them, what it keeps of a sequence
in the cache, and what the ranks of a model divide; :meth:`.Part.build` makes what computes it.
"""
