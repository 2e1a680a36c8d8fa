"""One prompt on its way through the engine."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ..backend.values import Array
from ..grammar.matcher import Matcher
from .adapters import LoadedAdapter
from .block_manager import SequenceBlocks
from .sampling_params import SamplingParams


@dataclass(eq=False)
class Request:
    """A prompt, its sampling parameters, and the tokens generated so far.

    A caller sets:

    - ``prompt_token_ids``, which are kept as an int32 array.
    - ``params``, which must have a seed; ``index`` makes requests with equal seeds draw differently.
    - ``source_token_ids``: what the encoder of an encoder-decoder reads; its decoder starts with ``prompt_token_ids``.
    - ``priority``: requests with a higher one go first. ``deadline``: the request ends when ``time.perf_counter()``
      reaches it.
    - ``cache_salt``: requests with different salts share no cached blocks.
    - ``adapter``: what changes the model's matrices for this request; requests with different ones share no cached
      blocks. None for the model itself.
    - ``matcher``: the grammar that the completion must match, in its initial state and shared with no other request. An
      end-of-sequence token then always ends the request; ``ignore_eos`` and ``min_tokens`` forbid it only while the
      grammar allows another token.
    - ``prompt_logprobs``: compute the log-probability of each prompt token but the first, and at its place the
      ``num_prompt_top`` (1 to 20) most likely tokens with theirs.
    - ``take_logits``: called by the engine's thread with a position and the logits of the prompt from there on, fp32
      ``[n, vocab]`` of the backend, instead of generating. The pieces come in order from the position ``logits_start``
      on, and begin anew if the request is preempted. ``whole_prompt`` makes one piece of them.
    - ``is_streamed``: its tokens are read as they come, so the time between them matters.
    - ``on_update``: called by the engine's thread after each new token and when the request ends. An exception in it
      ends the request.

    The engine sets the rest. A request has ended when ``finish_reason`` is set: ``stop``, ``length`` (all of
    ``max_new_tokens``), ``context`` (the model's context is full), ``deadline``, ``cancelled``, or ``error`` with the
    exception in ``error``. Times are those of ``time.perf_counter``.

    While it runs, the request has a ``row`` of the sampler, and the ``lora_id`` of its adapter's slot, 0 without
    one. ``num_known_tokens`` are those of the prompt and the generated ones that the host knows;
    ``num_pending_tokens`` are chosen by launched steps that the host has not fetched, each at least one token;
    those that check drafts may bring ``num_unchecked_drafts`` more. ``draft_tokens`` are those of the last one, as
    far as the host knows them. In ``num_drafts`` checks of ``num_draft_tokens`` drafts ``num_accepted_tokens`` were
    accepted. ``num_computed_tokens`` are in the cache, or a launched step puts them there; ``num_cached_tokens``
    were there when the request started. ``max_length`` bounds the tokens of prompt and completion together.
    ``output_tokens`` and ``logprobs`` are arrays, because the garbage collector visits each item of a list.
    """

    index: int
    prompt_token_ids: Sequence[int]
    params: SamplingParams
    eos_ids: frozenset[int] = frozenset()
    source_token_ids: Sequence[int] = ()
    priority: int = 0
    deadline: float | None = None
    cache_salt: str = ""
    adapter: LoadedAdapter | None = None
    matcher: Matcher | None = None
    prompt_logprobs: bool = False
    num_prompt_top: int = 1
    take_logits: Callable[[int, Array], None] | None = None
    logits_start: int = 0
    whole_prompt: bool = False
    is_streamed: bool = False
    on_update: Callable[[Request], None] = lambda request: None

    output_tokens: array[int] = field(default_factory=lambda: array("i"))
    logprobs: array[float] = field(default_factory=lambda: array("d"))
    top_logprobs: list[list[tuple[int, float]]] = field(default_factory=list)
    prompt_token_logprobs: list[float | None] = field(default_factory=list)
    prompt_top_logprobs: list[list[tuple[int, float]] | None] = field(default_factory=list)
    finish_reason: str | None = None
    error: BaseException | None = None
    blocks: SequenceBlocks | None = None
    row: int = 0
    lora_id: int = 0
    arrival: int = -1
    max_length: int = 0
    num_known_tokens: int = 0
    num_computed_tokens: int = 0
    num_pending_tokens: int = 0
    num_unchecked_drafts: int = 0
    draft_tokens: Sequence[int] = ()
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    arrival_time: float = field(default_factory=time.perf_counter)
    start_time: float = 0.0
    first_token_time: float = 0.0
    last_token_time: float = 0.0

    def __post_init__(self) -> None:
        if not isinstance(self.prompt_token_ids, array):
            self.prompt_token_ids = array("i", self.prompt_token_ids)
        self.num_known_tokens = len(self.prompt_token_ids)
        if self.prompt_logprobs:
            self.prompt_token_logprobs = [None] * len(self.prompt_token_ids)
            self.prompt_top_logprobs = [None] * len(self.prompt_token_ids)

    @property
    def output_token_ids(self) -> list[int]:
        """The generated tokens that the host knows, as a new list."""
        return self.output_tokens.tolist()

    @property
    def order(self) -> tuple[int, int]:
        """Requests are served in this order: by priority, then by arrival."""
        return -self.priority, self.arrival

    @property
    def num_tokens(self) -> int:
        """All tokens, pending ones included."""
        return self.num_known_tokens + self.num_pending_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        """Tokens that are not in the cache and that no launched step computes."""
        return self.num_known_tokens + self.num_pending_tokens - self.num_computed_tokens

    @property
    def max_cached_tokens(self) -> int:
        """The number of tokens before the first whose logits are needed: only these may come from the cache."""
        if self.prompt_logprobs:
            return 0
        return self.num_tokens - 1 if self.take_logits is None else self.logits_start

    @property
    def may_end_early(self) -> bool:
        """Whether a token may end the completion before ``max_length``."""
        may_stop = bool(self.params.stop) or self.matcher is not None
        return may_stop or bool(self.eos_ids and not self.params.ignore_eos)

    @property
    def ended_by_eos(self) -> bool:
        """Whether the last token is an end-of-sequence token that ends the completion."""
        ignored = self.params.ignore_eos and self.matcher is None
        return bool(self.output_tokens) and self.output_tokens[-1] in self.eos_ids and not ignored

    def holds_back_end(self, num_drafts: int) -> bool:
        """Whether an end-of-sequence token may come behind some drafts only if the grammar allows nothing else."""
        return self.params.ignore_eos or len(self.output_tokens) + num_drafts < self.params.min_tokens

    def token_ids(self, start: int, stop: int) -> Sequence[int]:
        """The known tokens at positions ``start`` to ``stop``."""
        length = len(self.prompt_token_ids)
        if stop <= length:
            return self.prompt_token_ids[start:stop]
        if start >= length:
            return self.output_tokens[start - length : stop - length]
        return array("i", self.prompt_token_ids[start:]) + self.output_tokens[: stop - length]

    def limit_length(self, context_length: int) -> int:
        """Set and return ``max_length`` for a model of this context."""
        length = len(self.prompt_token_ids)
        self.max_length = length if self.take_logits else min(length + self.params.max_new_tokens, context_length)
        return self.max_length

    def append_token(self, token: int, logprob: float, top_logprobs: Sequence[tuple[int, float]] = ()) -> None:
        """Record a generated token; sets ``finish_reason`` if it is the last.

        Raises ``UsageError`` if the grammar takes no more tokens, and records nothing.
        """
        if self.matcher is not None:
            self.matcher.accept(token)
        self.last_token_time = time.perf_counter()
        self.first_token_time = self.first_token_time or self.last_token_time
        self.output_tokens.append(token)
        self.num_known_tokens += 1
        self.logprobs.append(logprob)
        if self.params.logprobs:
            self.top_logprobs.append(list(top_logprobs))
        if self.ended_by_eos:
            self.finish_reason = "stop"
        elif len(self.output_tokens) >= self.params.max_new_tokens:
            self.finish_reason = "length"
        elif self.num_known_tokens >= self.max_length:
            self.finish_reason = "context"
