"""A loaded model: text in, text out. Joins the tokenizer, which knows no tensors, to the loop, which knows no text."""

from __future__ import annotations

import secrets
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, cast, overload

import numpy as np

from . import backend
from .backend.base import Backend
from .backend.values import Array, ForwardBatch
from .checkpoint.opened_model import open_model
from .engine.outputs import Piece, Result, Timings
from .engine.sampling_params import SamplingParams
from .engine.scheduler import EncoderDecoder, EngineConfig, Network, Request, Scheduler
from .errors import CheckpointError, UsageError, listed
from .layers.cache import KVCache, SourceCache
from .layers.finite_check import with_finite_checks
from .placement import checkpoint_requirements, make_engine_config, plan_placement
from .text.chat_template import ChatTemplate, check_messages
from .text.infilling import NO_BLANKS, FilledSpan, encode_blanks
from .text.prompts import EncodedPrompt, Message, Prompt, is_batch, is_conversation, validate_token_ids
from .text.text_stream import TextStream
from .text.tokenizer import Tokenizer


def load(
    path: str | Path,
    device: str = "auto",
    memory_limit: int | str | None = None,
    max_batch: int = 16,
    kv_cache: str = "fp16",
    context: int | None = None,
    check: bool = False,
) -> Model:
    """Load a checkpoint folder: one that ``migrate`` wrote, another W8A8 checkpoint, or an unquantized source.

    ``device`` is ``auto``, ``cpu``, ``cuda`` or ``cuda:N``. ``memory_limit`` bounds the GPU memory that the model and
    everything it does may take (bytes, or a text such as ``"6GiB"``): what does not fit is streamed from host memory,
    as docs/memory.md says. ``context`` is how many tokens the cache is to have room for beside the weights; by default
    as many as the model takes, or fewer where memory is short. On a CPU neither matters. ``kv_cache`` is ``fp16`` (fp32
    on a CPU) or ``int8``, which takes half the memory; ``max_batch`` bounds the sequences that are decoded together.
    With ``check`` a NaN or an infinity in an activation is an error that names the layer; on a GPU, that is slow.
    Raises ``CheckpointError``, ``DeviceError``, ``OutOfMemory``, which says what would fit, or ``UsageError``.
    """
    for name, value in {"max_batch": max_batch, "context": 1 if context is None else context}.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise UsageError(f"{name} is {value!r}, but must be a whole number, 1 or more")
    if kv_cache not in ("fp16", "int8"):
        raise UsageError(f"kv_cache is {kv_cache!r}, not fp16 or int8")
    with open_model(path) as opened:
        checkpoint, config = opened.checkpoint, opened.config
        eos_ids = configured_eos_ids(checkpoint.generation_config, checkpoint.config, config.vocab_size)
        ops = backend.create(device, memory_limit)
        try:
            cache_shape = replace(config.cache_shape, int8=kv_cache == "int8")
            KVCache(ops, cache_shape, 1, 1, 1).close()  # refused now, if ever
            plan = plan_placement(ops, opened.spec, lambda: checkpoint_requirements(opened, kv_cache=kv_cache), context)
            weights = opened.weights()
            built_from = with_finite_checks(weights, ops) if check else (weights, ops)
            network = opened.architecture.Model(config, *built_from)
        except BaseException:
            ops.close()
            raise
        limits = make_engine_config(config, cache_shape, plan, max_batch)
        return Model(network, limits, checkpoint.path, checkpoint.generation_config, eos_ids)


class Model:
    """A model on its device. Close it, or use it as a context manager, to give the device's memory back.

    Several streams may be under way at the same time, in one thread. ``folder`` is where the tokenizer's files are:
    they are read when text first needs them, and a model without them takes and gives token ids. ``generation_config``
    holds the defaults of sampling; ``eos_ids`` are the tokens that end a completion, None for the tokenizer's.
    """

    def __init__(
        self,
        network: Network,
        limits: EngineConfig,
        folder: Path | None = None,
        generation_config: Mapping[str, Any] | None = None,
        eos_ids: frozenset[int] | None = None,
    ):
        self.network = network
        self.limits = limits
        self.folder = folder
        self.generation_config = generation_config or {}
        self.ops: Backend = network.ops
        self._configured_eos_ids = eos_ids
        self._tokenizer: Tokenizer | None = None
        self._template: ChatTemplate | None = None
        self._closed = False

    @property
    def device(self) -> str:
        """``cpu`` or ``cuda:N``."""
        return self.ops.name

    @property
    def tokenizer(self) -> Tokenizer:
        """The checkpoint's tokenizer; ``CheckpointError`` if its files are missing or wrong."""
        if self._tokenizer is None:
            if self.folder is None:
                raise UsageError("this model was made without a tokenizer: give prompts as lists of token ids")
            self._tokenizer = Tokenizer.load(self.folder, self.limits.vocab_size)
        return self._tokenizer

    @cached_property
    def eos_ids(self) -> frozenset[int]:
        """The tokens that end a completion: the configuration's, else the tokenizer's."""
        if self._configured_eos_ids is not None:
            return self._configured_eos_ids
        return self.tokenizer.eos_ids if self._has_tokenizer else frozenset()

    def describe(self) -> str:
        """The device in words."""
        return self.ops.describe()

    def memory(self) -> dict[str, int]:
        """GPU memory in bytes: ``used``, ``peak_used``, ``reserved``, ``peak_reserved``, ``limit``; empty on a CPU."""
        return self.ops.memory()

    def close(self) -> None:
        """Give the device's memory back; the model, and streams that are under way, cannot be used afterwards."""
        if not self._closed:
            self._closed = True
            self._template = None
            self.ops.close()

    def __reduce__(self) -> str:
        raise UsageError("a model cannot be copied, pickled or sent to another process: load its folder again there")

    def __enter__(self) -> Model:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- text -----------------------------------------------------------------------------------------------------

    @overload
    def generate(self, prompt: str | EncodedPrompt, **options: Any) -> Result: ...
    @overload
    def generate(self, prompt: Sequence[int] | Sequence[Message], **options: Any) -> Result: ...
    @overload
    def generate(self, prompt: Sequence[Prompt], **options: Any) -> list[Result]: ...
    def generate(self, prompt: Any, **options: Any) -> Result | list[Result]:
        """Complete a prompt, or a list of prompts: a :data:`Prompt` gives a result, a list gives a list in its order.

        A prompt is text, a list of token ids, a list of messages (``{"role": "user", "content": ...}``) to answer, or
        what :meth:`encode` returned. ``options`` are those of :class:`SamplingParams` (defaults from the checkpoint's
        ``generation_config.json``) and ``add_special_tokens``, see :meth:`encode`. Prompts of one list draw
        differently with the same seed. Raises ``UsageError`` for wrong arguments, all wrong prompts at once;
        ``CheckpointError`` for wrong tokenizer files; ``OutOfMemory``, after which fewer or shorter prompts may fit.
        """
        with closing(self.stream(prompt, **options)) as pieces:
            results = {piece.index: piece.result for piece in pieces if piece.result is not None}
        ordered = [results[i] for i in range(len(results))]
        return ordered if is_batch(prompt) else ordered[0]

    def stream(self, prompt: Any, *, add_special_tokens: bool = True, **options: Any) -> Generator[Piece, None, None]:
        """Like :meth:`generate`, piece by piece as the text appears. Arguments are checked before the first piece.

        Closing the stream ends generation and gives its memory back.
        """
        self._require_open()
        params = SamplingParams.from_checkpoint(self.generation_config, **options)
        encoded = self._encode_all(list(prompt) if is_batch(prompt) else [prompt], add_special_tokens, is_batch(prompt))
        tokenizer = self.tokenizer if params.stop or self._has_tokenizer else None
        requests = [self._request(i, p, with_seed(params)) for i, p in enumerate(encoded)]
        texts = [TextStream(tokenizer, params.stop, p.token_ids if p.continues else ()) for p in encoded]
        return self._run(requests, texts)

    def encode(self, prompt: Any, add_special_tokens: bool = True) -> EncodedPrompt:
        """A prompt's tokens, checked: one at least, and so many that a new one fits the model's context.

        To an encoder-decoder the prompt is what its encoder reads, and must fit that.

        ``add_special_tokens`` lets the tokenizer frame a text as the checkpoint does (begin-of-text before it). Raises
        ``UsageError`` for a wrong prompt, ``CheckpointError`` if text needs a tokenizer and there is none.
        """
        ids: Sequence[int]
        target: tuple[int, ...] = ()
        continues = not self.limits.max_source_length
        stop_ids: frozenset[int] = frozenset()
        if isinstance(prompt, EncodedPrompt):
            ids, continues, target, stop_ids = prompt.token_ids, prompt.continues, prompt.target, prompt.stop_ids
        elif isinstance(prompt, str):
            ids = self.tokenizer.encode(prompt, add_special_tokens)
            target = self.tokenizer.target_ids if add_special_tokens else ()
        elif is_conversation(prompt):
            ids, continues = self._encode_conversation(prompt), False
        else:
            ids = prompt
        ids = self._validate_token_ids(ids)
        if not ids:
            raise UsageError("the prompt is empty: give at least one token")
        if self.limits.max_source_length:
            return self._validate_source(EncodedPrompt(ids, continues, self._validate_token_ids(target), stop_ids))
        context = self.limits.context_length
        if len(ids) >= context:
            raise UsageError(
                f"the prompt has {len(ids):,} tokens, but the model's context is {context:,} and a new token must fit: "
                f"shorten the prompt by {len(ids) - context + 1:,}"
            )
        return EncodedPrompt(ids, continues, stop_ids=stop_ids)

    def fill_blank(self, text: str, **options: Any) -> list[FilledSpan]:
        """What belongs in place of each ``<span>`` of ``text``, with its position; for T5, CPM-2 and their kin.

        ``options`` are those of :meth:`generate` but ``stop``. Raises ``UsageError`` for a text without ``<span>`` or
        with too many, and for a model that was not trained for it.
        """
        if not isinstance(text, str):
            raise UsageError(f"a text with blanks must be text, but is {type(text).__name__}")
        if options.get("stop"):
            raise UsageError("stop texts do not apply to blanks, which end where the next one begins")
        if not self.limits.max_source_length:
            raise UsageError(NO_BLANKS)
        blanked = encode_blanks(self.tokenizer, text)
        tokens = self.generate(blanked.prompt, **options).token_ids
        return blanked.fillings(self.tokenizer, tokens, self.eos_ids)

    def dialogue(self, context: Sequence[str], **options: Any) -> Result:
        """Answer the last utterance of a dialogue whose two speakers take turns. ``options`` as in :meth:`generate`.

        For a model with a chat template the last utterance is the user's. Raises ``UsageError`` for another model but
        EVA, and for what is no list of texts.
        """
        if isinstance(context, str) or not context or not all(isinstance(turn, str) for turn in context):
            raise UsageError("a dialogue is a list of utterances, one at least, each a text")
        roles = ["user", "assistant"] * len(context)
        messages = [{"role": role, "content": turn} for role, turn in zip(roles, reversed(context), strict=False)]
        return self.generate(messages[::-1], **options)

    def chat(self, messages: Sequence[Message], add_generation_prompt: bool = True, **variables: Any) -> str:
        """The text of a conversation by the checkpoint's chat template, special tokens included.

        It ends where an answer begins, or without ``add_generation_prompt`` with the last message. ``variables`` are
        passed to the template (``tools``, ``enable_thinking``, ...). Encode the text without ``add_special_tokens``.
        Raises ``UsageError`` if there is no template, or for messages that it refuses.
        """
        if self._template is None:
            tokenizer = self.tokenizer
            if tokenizer.chat_template is None:
                raise UsageError("this checkpoint has no chat template: give a plain prompt instead of messages")
            self._template = ChatTemplate(tokenizer.chat_template, tokenizer.bos_token, tokenizer.eos_token)
        return self._template.render(messages, add_generation_prompt, **variables)

    def _encode_conversation(self, messages: Sequence[Message]) -> list[int]:
        """A conversation in tokens, by a tokenizer that knows how or by the chat template."""
        check_messages(messages)
        turns = self.tokenizer.encode_turns([m.get("content", "") for m in messages], self.limits.max_source_length)
        return self.tokenizer.encode(self.chat(messages), add_special_tokens=False) if turns is None else turns

    def _validate_token_ids(self, token_ids: Any) -> tuple[int, ...]:
        offers = hasattr(token_ids, "__dlpack__") or hasattr(token_ids, "__cuda_array_interface__")
        if offers and not isinstance(token_ids, np.ndarray):
            token_ids = self.ops.host(self.ops.adopt(token_ids))
        return validate_token_ids(token_ids, self.limits.vocab_size)

    def _encode_all(self, prompts: list[Any], add_special_tokens: bool, numbered: bool) -> list[EncodedPrompt]:
        encoded, problems = [], []
        for i, prompt in enumerate(prompts):
            try:
                encoded.append(self.encode(prompt, add_special_tokens))
            except UsageError as error:  # noqa: PERF203, the others' problems are wanted too
                problems.append(f"prompt {i}: {error}" if numbered else str(error))
        if problems:
            raise UsageError(problems[0] if len(problems) == 1 else listed(f"{len(prompts)} prompts", problems))
        return encoded

    def _validate_source(self, prompt: EncodedPrompt) -> EncodedPrompt:
        """``prompt`` if an encoder-decoder can take it."""
        longest, context = self.limits.max_source_length, self.limits.context_length
        if len(prompt.token_ids) > longest:
            raise UsageError(
                f"the prompt has {len(prompt.token_ids):,} tokens, but the model's encoder reads {longest:,} at most: "
                f"shorten the prompt by {len(prompt.token_ids) - longest:,}"
            )
        if len(prompt.target) + len(self.limits.decoder_start_token_ids) >= context:
            raise UsageError(f"the target has {len(prompt.target):,} tokens, but the decoder's context is {context:,}")
        return prompt

    def _request(self, index: int, prompt: EncodedPrompt, params: SamplingParams) -> Request:
        """What the loop is asked to do for a prompt: to continue it, or to read it and decode."""
        if not self.limits.max_source_length:
            return Request(index, prompt.token_ids, params, self.eos_ids | prompt.stop_ids)
        start = (*self.limits.decoder_start_token_ids, *prompt.target)
        return Request(index, start, params, self.eos_ids | prompt.stop_ids, prompt.token_ids)

    def _run(self, requests: list[Request], texts: list[TextStream]) -> Generator[Piece, None, None]:
        if not requests:
            return
        self._require_open()
        with closing(Scheduler(self.network, requests, self.limits)) as scheduler:
            for request in scheduler:
                yield next_piece(request, texts[request.index])
                self._require_open()

    @property
    def _has_tokenizer(self) -> bool:
        return self._tokenizer is not None or (self.folder is not None and Tokenizer.exists(self.folder))

    def _require_open(self) -> None:
        if self._closed:
            raise UsageError("the model is closed: load it again")

    # -- tensors --------------------------------------------------------------------------------------------------

    def logits(
        self,
        token_ids: Sequence[int] | np.ndarray,
        device: bool = False,
        source: Sequence[int] | np.ndarray | None = None,
    ) -> Any:
        """Logits after each token: fp32 ``[tokens, vocab]``.

        A NumPy array, or with ``device`` the backend's own array, not copied to the host: on a GPU a CuPy array that is
        complete, so other libraries may take it through DLPack and read it on any stream. Its memory is used again as
        soon as nobody holds it, so hold it until they have read it. ``token_ids`` may be such an array too.

        An encoder-decoder needs the ``source`` that its encoder reads, and ``token_ids`` are then the decoder's. Raises
        ``UsageError`` for ids outside of the vocabulary or the context.
        """
        self._require_open()
        ids = np.array(self._validate_token_ids(token_ids), np.int32)
        if not 0 < len(ids) <= self.limits.context_length:
            raise UsageError(f"logits takes 1 to {self.limits.context_length:,} token ids, not {len(ids):,}")
        chunk = self.limits.max_num_batched_tokens
        with closing(KVCache(self.ops, self.limits.cache_shape, 1, len(ids), self.limits.context_length)) as cache:
            self._read_source(source, cache)
            if device:
                return self.ops.complete(self._logits(ids, 0, cache))
            chunks = (self._logits(ids[i : i + chunk], i, cache) for i in range(0, len(ids), chunk))
            return np.concatenate([self.ops.host(logits) for logits in chunks])

    def _read_source(self, source: Sequence[int] | np.ndarray | None, cache: KVCache) -> None:
        """Encode what an encoder-decoder's logits depend on beside the decoder's tokens."""
        longest = self.limits.max_source_length
        ids = np.array(self._validate_token_ids(() if source is None else source), np.int32)
        if not (0 < len(ids) <= longest if longest else source is None):
            wanted = f"a source of 1 to {longest:,} token ids" if longest else "no source"
            raise UsageError(f"logits of this model need {wanted}, not {'none' if source is None else len(ids)}")
        if longest:
            cache.source = SourceCache(self.ops, self.limits.cache_shape, 1, len(ids), longest)
            cache.source.set_lengths({0: len(ids)})
            cast(EncoderDecoder, self.network).encode_to_cache(ForwardBatch.packed(self.ops.array, [ids]), cache.source)

    def _logits(self, ids: np.ndarray, past: int, cache: KVCache) -> Array:
        return self.network(ForwardBatch.packed(self.ops.array, [ids], [past]), cache, all_logits=True)


def next_piece(request: Request, stream: TextStream) -> Piece:
    """The piece for the tokens that a request got since its last piece; a complete stop string ends the request."""
    new, request.num_delivered = request.output_token_ids[request.num_delivered :], len(request.output_token_ids)
    # The end-of-text token has no text, whatever the vocabulary says.
    text, stopped = stream.push(new[:-1] if request.ended_by_eos else new, last=request.finish_reason is not None)
    if stopped:
        request.finish_reason = "stop"
    if request.finish_reason is None:
        return Piece(request.index, text, new)
    timings = Timings(
        prompt_tokens=len(request.input_token_ids),
        new_tokens=len(request.output_token_ids),
        prompt_seconds=request.first_token_time - request.start_time,
        decode_seconds=request.last_token_time - request.first_token_time,
    )
    logprobs = list(request.logprobs) if request.params.logprobs else None
    result = Result(
        stream.text,
        list(request.output_token_ids),
        request.finish_reason,
        len(request.input_token_ids),
        timings,
        logprobs,
    )
    return Piece(request.index, text, new, request.finish_reason, result)


def configured_eos_ids(
    generation_config: Mapping[str, Any], config: Mapping[str, Any], vocab_size: int
) -> frozenset[int] | None:
    """The ``eos_token_id`` (an id or a list) of ``generation_config.json``, else of ``config.json``, else None.

    Raises ``CheckpointError`` for what is no id of the vocabulary.
    """
    for name, values in (("generation_config.json", generation_config), ("config.json", config)):
        value = values.get("eos_token_id")
        if value is None:
            continue
        ids = value if isinstance(value, list) else [value]
        wrong = [i for i in ids if not isinstance(i, int) or isinstance(i, bool) or not 0 <= i < vocab_size]
        if wrong:
            raise CheckpointError(
                f"{name}: eos_token_id is {value!r}, but must be a token id from 0 to {vocab_size - 1}, or a list"
            )
        return frozenset(ids)
    return None


def with_seed(params: SamplingParams) -> SamplingParams:
    """``params`` with a seed: a random one if there is none."""
    return params if params.seed is not None else replace(params, seed=secrets.randbits(64))
