"""A loaded model: text in, text out. Joins the tokenizer, which knows no tensors, to the loop, which knows no text."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, overload

import numpy as np

from .. import backend, models
from ..backend.base import Backend
from ..backend.values import Array, Step
from ..checkpoint.reader import open_checkpoint
from ..errors import BminfError, UsageError
from ..layers.cache import KVCache
from .chat import ChatTemplate
from .detokenizer import Detokenizer
from .generation import Generation, Limits, Network, Request
from .result import Piece, Result, Timings
from .sampling import SamplingParams
from .stop import StopMatcher
from .tokenizer import Tokenizer

Prompt = str | Sequence[int]


def load(
    path: str | Path, device: str = "auto", memory_limit: int | str | None = None, max_batch: int = 16
) -> Model:
    """Load a checkpoint folder: one that ``migrate`` wrote, another W8A8 checkpoint, or an unquantized source.

    ``device`` is ``auto``, ``cpu``, ``cuda`` or ``cuda:N``; ``memory_limit`` bounds the GPU memory that the model and
    everything it does may take (bytes, or a text such as ``"6GiB"``); ``max_batch`` bounds the sequences that are
    decoded together. Raises ``CheckpointError``, ``DeviceError``, ``OutOfMemory`` or ``UsageError``.
    """
    if max_batch < 1:
        raise UsageError(f"max_batch is {max_batch}; it must be 1 or more")
    with open_checkpoint(path) as checkpoint:
        architecture = models.find(checkpoint.config)
        config = architecture.parse(checkpoint.config)
        spec = architecture.spec(config)
        checkpoint.validate(spec)
        has_tokenizer = (checkpoint.path / "tokenizer.json").is_file()
        tokenizer = Tokenizer.load(checkpoint.path, config.vocab_size) if has_tokenizer else None
        ops = backend.create(device, memory_limit)
        try:
            network = architecture.Model(config, checkpoint.weights(spec), ops)
        except BaseException:
            ops.close()
            raise
        limits = Limits(config.context_length, config.vocab_size, config.cache_shape, max_batch)
        return Model(network, config, limits, tokenizer, checkpoint.generation_config, ops)


class Model:
    """A model on its device. Close it, or use it as a context manager, to give the device's memory back."""

    def __init__(
        self,
        network: Network,
        config: Any,
        limits: Limits,
        tokenizer: Tokenizer | None,
        generation_config: dict[str, Any],
        ops: Backend,
    ):
        self.network = network
        self.config = config
        self.limits = limits
        self.generation_config = generation_config
        self.ops = ops
        self._tokenizer = tokenizer

    @property
    def device(self) -> str:
        """``cpu`` or ``cuda:N``."""
        return self.ops.name

    @property
    def tokenizer(self) -> Tokenizer:
        """The checkpoint's tokenizer; ``UsageError`` if it has none, and only token ids work."""
        if self._tokenizer is None:
            raise UsageError("the checkpoint has no tokenizer.json: give prompts as lists of token ids")
        return self._tokenizer

    def describe(self) -> str:
        """The device in words."""
        return self.ops.describe()

    def close(self) -> None:
        """Give the device's memory back; the model cannot be used afterwards."""
        self.ops.close()

    def __enter__(self) -> Model:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- text -----------------------------------------------------------------------------------------------------

    @overload
    def generate(self, prompt: str, **options: Any) -> Result: ...
    @overload
    def generate(self, prompt: Sequence[int], **options: Any) -> Result: ...
    @overload
    def generate(self, prompt: Sequence[str] | Sequence[Sequence[int]], **options: Any) -> list[Result]: ...
    def generate(self, prompt: Any, **options: Any) -> Result | list[Result]:
        """Complete a prompt (text or token ids), or a list of prompts; a list in gives a list out, in its order.

        ``options`` are those of :class:`SamplingParams` (defaults from the checkpoint's ``generation_config.json``)
        and ``add_special_tokens`` (True): whether the tokenizer may put its begin-of-text token before the prompt.
        """
        results = {p.index: p.result for p in self.stream(prompt, **options) if p.result is not None}
        ordered = [results[i] for i in range(len(results))]
        return ordered if is_batch(prompt) else ordered[0]

    def stream(self, prompt: Any, *, add_special_tokens: bool = True, **options: Any) -> Iterator[Piece]:
        """Like :meth:`generate`, piece by piece as the text appears. Arguments are checked before the first piece."""
        params = SamplingParams.from_checkpoint(self.generation_config, **options)
        prompts = list(prompt) if is_batch(prompt) else [prompt]
        requests = [self._request(i, p, params, add_special_tokens) for i, p in enumerate(prompts)]
        return self._run(requests, wants_text=any(isinstance(p, str) for p in prompts) or bool(params.stop))

    def chat(self, messages: Sequence[dict[str, Any]]) -> str:
        """The prompt for a conversation, by the checkpoint's chat template; encode it without special tokens.

        Each message has a ``role`` and a ``content``.
        """
        source = self.tokenizer.chat_template
        if source is None:
            raise UsageError("this checkpoint has no chat template: give a plain prompt instead of messages")
        template = ChatTemplate(source, self.tokenizer.bos_token, self.tokenizer.eos_token)
        return template.render(list(messages), add_generation_prompt=True)

    def _request(self, index: int, prompt: Prompt, params: SamplingParams, add_special_tokens: bool) -> Request:
        ids = self.tokenizer.encode(prompt, add_special_tokens) if isinstance(prompt, str) else list(prompt)
        name = f"prompt {index}"
        if not ids:
            raise UsageError(f"{name} is empty: give at least one token")
        self._check_ids(ids, name)
        if len(ids) >= self.limits.context_length:
            raise UsageError(
                f"{name} has {len(ids):,} tokens, but the model's context is {self.limits.context_length:,} and a new "
                f"token must fit: shorten the prompt by {len(ids) - self.limits.context_length + 1:,}"
            )
        seed = secrets.randbits(64) if params.seed is None else params.seed
        return Request(index, ids, replace(params, seed=seed), self._eos_ids())

    def _check_ids(self, ids: Sequence[int], name: str) -> None:
        bad = [i for i in ids if not 0 <= i < self.limits.vocab_size]
        if bad:
            raise UsageError(f"{name} has token id {bad[0]}, but the vocabulary is 0..{self.limits.vocab_size - 1}")

    def _eos_ids(self) -> frozenset[int]:
        configured = self.generation_config.get("eos_token_id")
        if configured is None:
            return frozenset(self._tokenizer.eos_ids if self._tokenizer else ())
        return frozenset(configured if isinstance(configured, list) else [configured])

    def _run(self, requests: list[Request], wants_text: bool) -> Iterator[Piece]:
        texts = [TextStream(self.tokenizer if wants_text else self._tokenizer, r) for r in requests]
        for request in Generation(self.network, requests, self.limits):
            yield texts[request.index].take()

    # -- tensors --------------------------------------------------------------------------------------------------

    def logits(self, token_ids: Sequence[int], device: bool = False) -> Any:
        """Logits after each token: fp32 ``[tokens, vocab]``.

        A NumPy array, or with ``device`` the backend's own array, not copied to the host (a CuPy array on a GPU, which
        other libraries take through DLPack).
        """
        ids = np.asarray(token_ids, np.int32)
        if ids.ndim != 1 or not 0 < len(ids) <= self.limits.context_length:
            raise UsageError(
                f"logits needs a list of 1 to {self.limits.context_length:,} token ids, "
                f"not an array of shape {ids.shape}"
            )
        self._check_ids(ids.tolist(), "token_ids")
        cache = KVCache(self.ops, self.limits.cache_shape, 1, len(ids), self.limits.context_length)
        if device:
            return self._logits(ids, 0, cache)
        starts = range(0, len(ids), self.limits.chunk)
        chunks = (self._logits(ids[i : i + self.limits.chunk], i, cache) for i in starts)
        return np.concatenate([self.ops.host(logits) for logits in chunks])

    def _logits(self, ids: np.ndarray, past: int, cache: KVCache) -> Array:
        def array(*values: int) -> Array:
            return self.ops.array(np.array(values, np.int32))

        count = len(ids)
        step = Step(self.ops.array(ids), array(0, count), array(past), array(0), 1, count, past + count)
        return self.network(step, cache, all_logits=True)


class TextStream:
    """Turns one request's tokens into text, and ends the request at a stop string."""

    def __init__(self, tokenizer: Tokenizer | None, request: Request):
        self.request = request
        self.detokenizer = Detokenizer(tokenizer) if tokenizer else None
        self.matcher = StopMatcher(request.params.stop)
        self.seen = 0
        self.text = ""

    def take(self) -> Piece:
        """The piece for the tokens that have come since the last call."""
        request = self.request
        new, self.seen = request.tokens[self.seen :], len(request.tokens)
        text, stopped = self._feed(new)
        if stopped:
            request.finish_reason = "stop"
        elif request.finish_reason and self.detokenizer:
            text += self._finish()
        self.text += text
        result = self._result() if request.finish_reason else None
        return Piece(request.index, text, new, request.finish_reason, result)

    def _feed(self, tokens: list[int]) -> tuple[str, bool]:
        if self.detokenizer is None:
            return "", False
        return self.matcher.push("".join(map(self.detokenizer.push, tokens)))

    def _finish(self) -> str:
        assert self.detokenizer is not None
        text, stopped = self.matcher.push(self.detokenizer.flush())
        if stopped:
            self.request.finish_reason = "stop"
            return text
        return text + self.matcher.flush()

    def _result(self) -> Result:
        request = self.request
        if request.finish_reason is None:
            raise BminfError("the request has not finished")
        timings = Timings(
            len(request.prompt),
            len(request.tokens),
            request.first_token - request.started,
            request.last_token - request.first_token,
        )
        return Result(
            self.text,
            list(request.tokens),
            request.finish_reason,
            len(request.prompt),
            timings,
            list(request.logprobs) if request.params.logprobs else None,
        )


def is_batch(prompt: Any) -> bool:
    """Whether ``prompt`` is several prompts: a list of texts or of lists, not a text or a list of token ids."""
    return not isinstance(prompt, str) and len(prompt) > 0 and not isinstance(prompt[0], (int, np.integer))
