"""The one builder of requests: from a prompt in tokens, and how to complete it, to the requests that the engine runs.

The library, the command line, the server and the benchmarks all state what they want as a :class:`GenerationRequest`,
which is a plain value. A server's HTTP process sends it to the engine's process; the library hands it over directly.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from numbers import Real

from .backend.values import Array
from .engine.adapters import AdapterRegistry, LoadedAdapter
from .engine.request import Request
from .engine.sampling_params import SamplingParams
from .errors import UsageError, is_whole
from .grammar import Grammar
from .grammar.matcher import GrammarCompiler, Matcher
from .text.prompts import EncodedPrompt, PromptLimits
from .text.tokenizer import Tokenizer


@dataclass(frozen=True)
class GenerationRequest:
    """A prompt in tokens, which :class:`.PromptEncoder` has checked, and how to complete it.

    - ``params``: how tokens are chosen; ``n`` completions are drawn. Their ``stop`` strings are found where tokens
      become text, so a server's HTTP process keeps them.
    - ``stop_token_ids``: tokens that end a completion, in addition to the model's end-of-sequence tokens and the
      prompt's ``stop_ids``.
    - ``priority``: requests with a higher one go first. ``deadline``: seconds after which the completions end.
    - ``cache_salt``: only requests with equal ones share cached blocks.
    - ``prompt_logprobs``: report the log-probability of each prompt token but the first, and the ``num_prompt_top``
      most likely tokens at its place.
    - ``grammar``: what the completions must look like.
    - ``is_streamed``: the caller reads the tokens as they come, so prompts must not hold them up.
    - ``ends_by_text``: the caller may end a completion where its text says so, as at a stop string.
    - ``adapter``: the name of the adapter that the model has for these completions, or None.

    Raises ``UsageError`` with all values that are wrong.
    """

    prompt: EncodedPrompt
    params: SamplingParams
    n: int = 1
    stop_token_ids: frozenset[int] = frozenset()
    priority: int = 0
    deadline: float | None = None
    cache_salt: str = ""
    prompt_logprobs: bool = False
    num_prompt_top: int = 1
    grammar: Grammar | None = None
    is_streamed: bool = False
    ends_by_text: bool = False
    adapter: str | None = None

    def __post_init__(self) -> None:
        problems = []
        if is_whole(self.priority):
            object.__setattr__(self, "priority", int(self.priority))  # NumPy's integers may wrap
        else:
            problems.append(f"priority is {self.priority!r}, but must be a whole number")
        if not isinstance(self.cache_salt, str):
            problems.append(f"cache_salt is {self.cache_salt!r}, but must be a text")
        if not isinstance(self.adapter, str | None):
            problems.append(f"adapter is {self.adapter!r}, but must be the name of an adapter, or None")
        if not isinstance(self.prompt_logprobs, bool):
            problems.append(f"prompt_logprobs is {self.prompt_logprobs!r}, but must be True or False")
        is_number = isinstance(self.deadline, Real) and not isinstance(self.deadline, bool)
        if self.deadline is not None and not (is_number and self.deadline > 0):
            problems.append(f"deadline is {self.deadline!r}, but must be seconds, more than 0")
        if problems:
            raise UsageError("; ".join(problems))


class RequestBuilder:
    """Makes the engine's requests for one model.

    ``eos_ids`` end a completion. ``tokenizer`` is called for the first grammar, and may raise ``CheckpointError`` or
    ``UsageError``. Requests name one of ``adapters``.
    """

    def __init__(
        self,
        limits: PromptLimits,
        eos_ids: Collection[int],
        tokenizer: Callable[[], Tokenizer],
        adapters: AdapterRegistry | None = None,
    ):
        self._adapters = AdapterRegistry() if adapters is None else adapters
        self._limits = limits
        self._eos_ids = frozenset(eos_ids)
        self._tokenizer = tokenizer

    @cached_property
    def grammars(self) -> GrammarCompiler:
        """Compiles grammars for this model's vocabulary; ``CheckpointError`` if the tokenizer's files are missing."""
        return GrammarCompiler(self._tokenizer(), self._limits.vocab_size)

    def matchers(self, wanted: GenerationRequest) -> list[Matcher | None]:
        """A matcher at its start for each completion, or None where nothing is prescribed.

        Compiling a grammar takes up to seconds, so a thread that others wait for calls this elsewhere. Raises
        ``UsageError`` for a grammar, or a vocabulary, that cannot be used.
        """
        grammar, eos_ids = wanted.grammar, self._eos_ids_of(wanted)
        return [None if grammar is None else self.grammars.matcher(grammar, eos_ids) for _ in range(wanted.n)]

    def kept_matchers(self, wanted: GenerationRequest) -> list[Matcher | None] | None:
        """As :meth:`matchers`, if the grammar is compiled already; else None, after some microseconds."""
        if wanted.grammar is None or "grammars" not in vars(self):
            return None if wanted.grammar else [None] * wanted.n
        eos_ids = self._eos_ids_of(wanted)
        first = self.grammars.kept_matcher(wanted.grammar, eos_ids)
        if first is None:
            return None
        return [first, *(self.grammars.kept_matcher(wanted.grammar, eos_ids) for _ in range(wanted.n - 1))]

    def build(
        self, *requests: GenerationRequest, first_index: int = 0, matchers: Sequence[Matcher | None] | None = None
    ) -> list[Request]:
        """The engine's requests: one for each completion, with the indices from ``first_index`` on.

        ``matchers`` are the results of :meth:`matchers` where they have been made before. Raises ``UsageError`` for
        parameters that do not fit the model.
        """
        now = time.perf_counter()
        built: list[Request] = []
        for wanted in requests:
            self._check(wanted)
            params, eos_ids = self._ends_of(wanted)
            params = params.with_seed()
            tokens, source = decoder_and_source(wanted.prompt, self._limits)
            adapter = None if wanted.adapter is None else self._adapters.find(wanted.adapter)
            for matcher in self.matchers(wanted) if matchers is None else matchers:
                request = Request(
                    first_index + len(built),
                    tokens,
                    params,
                    eos_ids,
                    source,
                    priority=wanted.priority,
                    deadline=None if wanted.deadline is None else now + float(wanted.deadline),
                    cache_salt=wanted.cache_salt,
                    adapter=adapter,
                    matcher=matcher,
                    prompt_logprobs=wanted.prompt_logprobs,
                    num_prompt_top=wanted.num_prompt_top,
                    is_streamed=wanted.is_streamed,
                )
                built.append(request)
        return built

    def _eos_ids_of(self, wanted: GenerationRequest) -> frozenset[int]:
        return self._eos_ids | wanted.prompt.stop_ids | wanted.stop_token_ids

    def _ends_of(self, wanted: GenerationRequest) -> tuple[SamplingParams, frozenset[int]]:
        """The parameters of a request, and the tokens that end it.

        As in vLLM, ``ignore_eos`` leaves the request's own stop tokens. With a grammar they end it like other ends.
        """
        if wanted.params.ignore_eos and wanted.stop_token_ids and wanted.grammar is None:
            return replace(wanted.params, ignore_eos=False), wanted.stop_token_ids
        return wanted.params, self._eos_ids_of(wanted)

    def _check(self, wanted: GenerationRequest) -> None:
        params, eos_ids = self._ends_of(wanted)
        params.check_model(self._limits.vocab_size, eos_ids)
        if wanted.prompt_logprobs and self._limits.is_encoder_decoder:
            raise UsageError(
                "prompt_logprobs is True, but the prompt of this model is read by an encoder, which predicts none of "
                "its tokens: leave it out"
            )


def build_logits_request(
    token_ids: Sequence[int],
    source_ids: Sequence[int],
    take_logits: Callable[[int, Array], None],
    on_update: Callable[[Request], None],
    start: int = 0,
    in_one_piece: bool = False,
    adapter: LoadedAdapter | None = None,
) -> Request:
    """A request for the logits of tokens from the position ``start`` on, which generates nothing.

    ``take_logits`` is called as :class:`.Request` says, with one piece if ``in_one_piece``.
    """
    return Request(
        0,
        token_ids,
        SamplingParams(seed=0),
        source_token_ids=source_ids,
        adapter=adapter,
        take_logits=take_logits,
        logits_start=start,
        whole_prompt=in_one_piece,
        on_update=on_update,
    )


def decoder_and_source(prompt: EncodedPrompt, limits: PromptLimits) -> tuple[Sequence[int], Sequence[int]]:
    """The tokens of a prompt that the decoder reads, and those that an encoder reads before it."""
    if not limits.is_encoder_decoder:
        return prompt.token_ids, ()
    return (*limits.decoder_start_token_ids, *prompt.target), prompt.token_ids
