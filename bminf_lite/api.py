"""A loaded model: joins the checkpoint, the network on its device, the engine and text. It holds no algorithm."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from . import backend
from .checkpoint.opened_model import open_model
from .engine.config import EngineConfig
from .engine.generation import generate_tokens
from .engine.model_runner import ModelRunner, Network
from .engine.outputs import Piece, Result, make_piece
from .engine.request import Request
from .engine.sampling_params import SamplingOptions, SamplingParams
from .errors import UsageError
from .layers.cache import KVCache
from .layers.finite_check import with_finite_checks
from .placement import checkpoint_requirements, make_engine_config, plan_placement
from .text.chat_template import Message
from .text.checkpoint_files import configured_eos_ids
from .text.infilling import NO_BLANKS, FilledSpan, encode_blanks
from .text.prompts import EncodedPrompt, Prompt, PromptEncoder, dialogue_messages, is_batch
from .text.text_stream import TextStream
from .text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from typing_extensions import Unpack


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

    ``path`` may also be a ``.gguf`` file, whose tensors are dequantized.

    - ``device``: ``auto``, ``cpu``, ``cuda`` or ``cuda:N``.
    - ``memory_limit``: the most GPU memory that the model may use, in bytes or as text such as ``"6GiB"``. Layers that
      do not fit are streamed from host memory; see docs/memory.md. Without effect on a CPU.
    - ``max_batch``: the most sequences that are decoded together.
    - ``kv_cache``: ``fp16`` (fp32 on a CPU), or ``int8``, which takes half the memory.
    - ``context``: tokens that the cache must have room for. The default is the model's context length, or less where
      memory is short. Without effect on a CPU.
    - ``check``: raise an error that names the layer where an activation is NaN or infinite. Slow on a GPU.

    Raises ``CheckpointError``, ``DeviceError``, ``UsageError``, or ``OutOfMemory`` with a size that would fit.
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
            KVCache(ops, cache_shape, 1, 1, 1).close()  # raises now if the backend cannot have such a cache
            plan = plan_placement(ops, opened.spec, lambda: checkpoint_requirements(opened, kv_cache=kv_cache), context)
            weights = opened.weights()
            built_from = with_finite_checks(weights, ops) if check else (weights, ops)
            network = opened.architecture.Model(config, *built_from)
        except BaseException:
            ops.close()
            raise
        engine_config = make_engine_config(config, cache_shape, plan, max_batch)
        return Model(network, engine_config, checkpoint.path, checkpoint.generation_config, eos_ids)


class Model:
    """A model on its device. Close it, or use it as a context manager, to give the device's memory back.

    Several streams of one thread may interleave. ``folder`` holds the tokenizer's files, which are read when text is
    first used; a model without them works with token ids alone. ``generation_config`` holds the defaults of sampling.
    ``eos_ids`` are the tokens that end a completion; None means the tokenizer's.
    """

    def __init__(
        self,
        network: Network,
        engine_config: EngineConfig,
        folder: Path | None = None,
        generation_config: Mapping[str, Any] | None = None,
        eos_ids: frozenset[int] | None = None,
    ):
        self.network = network
        self.engine_config = engine_config
        self.generation_config = generation_config or {}
        self.ops = ops = network.ops
        self._configured_eos_ids = eos_ids
        self._prompts = PromptEncoder(
            folder,
            lambda array: ops.host(ops.adopt(array)),  # does not use self, so that a dropped model is freed at once
            vocab_size=engine_config.vocab_size,
            context_length=engine_config.context_length,
            is_encoder_decoder=engine_config.is_encoder_decoder,
            max_source_length=engine_config.max_source_length,
            decoder_start_length=len(engine_config.decoder_start_token_ids),
        )
        self._closed = False

    @property
    def device(self) -> str:
        """``cpu`` or ``cuda:N``."""
        return self.ops.name

    @property
    def tokenizer(self) -> Tokenizer:
        """The checkpoint's tokenizer; ``CheckpointError`` if its files are missing or malformed."""
        return self._prompts.tokenizer

    @cached_property
    def eos_ids(self) -> frozenset[int]:
        """The tokens that end a completion: the configuration's, else the tokenizer's."""
        if self._configured_eos_ids is not None:
            return self._configured_eos_ids
        return self.tokenizer.eos_ids if self._prompts.has_tokenizer else frozenset()

    def describe(self) -> str:
        """The device in words."""
        return self.ops.describe()

    def memory(self) -> dict[str, int]:
        """GPU memory in bytes: ``used``, ``peak_used``, ``reserved``, ``peak_reserved``, ``limit``; empty on a CPU."""
        return self.ops.memory()

    def close(self) -> None:
        """Give the device's memory back. Afterwards the model and its unfinished streams raise ``UsageError``."""
        if not self._closed:
            self._closed = True
            self._prompts.close()
            self.ops.close()

    def __reduce__(self) -> str:
        raise UsageError("a model cannot be copied, pickled or sent to another process: load its folder again there")

    def __enter__(self) -> Model:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- text -----------------------------------------------------------------------------------------------------

    @overload
    def generate(  # type: ignore[overload-overlap]  # a str is also a sequence of str
        self, prompt: Prompt, *, add_special_tokens: bool = True, **options: Unpack[SamplingOptions]
    ) -> Result: ...
    @overload
    def generate(
        self, prompt: Sequence[Prompt], *, add_special_tokens: bool = True, **options: Unpack[SamplingOptions]
    ) -> list[Result]: ...
    def generate(
        self, prompt: Any, *, add_special_tokens: bool = True, **options: Unpack[SamplingOptions]
    ) -> Result | list[Result]:
        """Complete a prompt or a list of prompts. One prompt gives a result, a list gives a list in the same order.

        A prompt is text, a list of token ids, a list of messages (``{"role": "user", "content": ...}``) to answer, or a
        result of :meth:`encode`. ``options`` are the fields of :class:`SamplingParams`, whose defaults come from the
        checkpoint's ``generation_config.json``; for ``add_special_tokens`` see :meth:`encode`. Prompts of one list draw
        differently with the same seed. Raises ``UsageError`` for invalid arguments, which lists all invalid prompts;
        ``CheckpointError`` for missing or malformed tokenizer files; ``OutOfMemory``, after which the model can still
        be used for fewer or shorter prompts.
        """
        with closing(self.stream(prompt, add_special_tokens=add_special_tokens, **options)) as pieces:
            results = {piece.index: piece.result for piece in pieces if piece.result is not None}
        ordered = [results[i] for i in range(len(results))]
        return ordered if is_batch(prompt) else ordered[0]

    def stream(
        self, prompt: Prompt | Sequence[Prompt], *, add_special_tokens: bool = True, **options: Unpack[SamplingOptions]
    ) -> Generator[Piece, None, None]:
        """Like :meth:`generate`, but yields pieces as the text appears. Arguments are checked before the first piece.

        Closing the stream ends generation and gives its memory back.
        """
        self._require_open()
        params = SamplingParams.from_checkpoint(self.generation_config, **options)
        encoded = self._prompts.encode_all(prompt, add_special_tokens)
        tokenizer = self.tokenizer if params.stop or self._prompts.has_tokenizer else None
        requests = [self._request(i, p, params.with_seed()) for i, p in enumerate(encoded)]
        texts = [TextStream(tokenizer, params.stop, p.token_ids if p.continues else ()) for p in encoded]
        return self._run(requests, texts)

    def encode(self, prompt: Prompt, add_special_tokens: bool = True) -> EncodedPrompt:
        """The tokens of a prompt, checked: at least one, and few enough to leave room for a new token.

        The encoder of an encoder-decoder reads the prompt. ``add_special_tokens`` frames a text as the checkpoint does,
        for example with a begin-of-text token. Raises ``UsageError`` for an invalid prompt, ``CheckpointError`` if text
        needs a tokenizer that is missing.
        """
        return self._prompts.encode(prompt, add_special_tokens)

    def fill_blank(self, text: str, **options: Unpack[SamplingOptions]) -> list[FilledSpan]:
        """The text for each ``<span>`` of ``text``, with its position; for models such as T5 and CPM-2.

        ``options`` are those of :meth:`generate` except ``stop``. Raises ``UsageError`` for a text without ``<span>``
        or with too many, and for a model that was not trained to fill blanks.
        """
        if options.get("stop"):
            raise UsageError("stop texts do not apply to blanks, which end where the next one begins")
        if not self.engine_config.is_encoder_decoder:
            raise UsageError(NO_BLANKS)
        blanked = encode_blanks(self.tokenizer, text)
        return blanked.fillings(self.tokenizer, self.generate(blanked.prompt, **options).token_ids, self.eos_ids)

    def dialogue(self, context: Sequence[str], **options: Unpack[SamplingOptions]) -> Result:
        """Answer the last utterance of a dialogue between two speakers who take turns.

        For a model with a chat template the last utterance is the user's. ``options`` are those of :meth:`generate`.
        Raises ``UsageError`` for a model that has no chat template and is not EVA, and for a ``context`` that is not a
        list of texts.
        """
        return self.generate(dialogue_messages(context), **options)

    def chat(self, messages: Sequence[Message], add_generation_prompt: bool = True, **variables: object) -> str:
        """The text of a conversation by the checkpoint's chat template, including special tokens.

        It ends where an answer begins, or with the last message if not ``add_generation_prompt``. ``variables`` are
        passed to the template: ``tools``, ``enable_thinking``, ... Encode the text without ``add_special_tokens``.
        Raises ``UsageError`` if there is no template, or for messages that it refuses.
        """
        return self._prompts.render(messages, add_generation_prompt, **variables)

    def _request(self, index: int, prompt: EncodedPrompt, params: SamplingParams) -> Request:
        """The engine's form of a prompt: tokens to continue, or a source to encode and the decoder's first tokens."""
        eos_ids = self.eos_ids | prompt.stop_ids
        if not self.engine_config.is_encoder_decoder:
            return Request(index, prompt.token_ids, params, eos_ids)
        start = (*self.engine_config.decoder_start_token_ids, *prompt.target)
        return Request(index, start, params, eos_ids, source_token_ids=prompt.token_ids)

    def _run(self, requests: list[Request], texts: list[TextStream]) -> Generator[Piece, None, None]:
        if not requests:
            return
        self._require_open()
        with closing(generate_tokens(self.network, requests, self.engine_config)) as steps:
            for request in steps:
                stream = texts[request.index]
                # The end-of-sequence token has no text, even if the vocabulary gives it one.
                visible = () if request.ended_by_eos else request.output_token_ids[-1:]
                text, stopped = stream.push(visible, last=request.finish_reason is not None)
                if stopped:
                    request.finish_reason = "stop"
                yield make_piece(request, text, stream.text)
                self._require_open()

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
        """Logits after each token, fp32 ``[tokens, vocab]``.

        The result is a NumPy array, or with ``device`` the backend's own array without a copy to the host. On a GPU
        that is a finished CuPy array, which other libraries may take through DLPack and read on any stream. Keep a
        reference until they have read it, because its memory is reused afterwards. ``token_ids`` may be such an array.

        An encoder-decoder needs the ``source`` that its encoder reads, and ``token_ids`` are the decoder's. Raises
        ``UsageError`` for ids outside the vocabulary, and for too many.
        """
        self._require_open()
        config = self.engine_config
        ids = np.array(self._prompts.validate_token_ids(token_ids), np.int32)
        if not 0 < len(ids) <= config.context_length:
            raise UsageError(f"logits takes 1 to {config.context_length:,} token ids, not {len(ids):,}")
        source_ids = self._prompts.validate_token_ids(() if source is None else source)
        longest = config.max_source_length
        if not (0 < len(source_ids) <= longest if config.is_encoder_decoder else source is None):
            wanted = f"a source of 1 to {longest:,} token ids" if config.is_encoder_decoder else "no source"
            raise UsageError(f"logits of this model need {wanted}, not {'none' if source is None else len(source_ids)}")
        with closing(ModelRunner(self.network, config, 1, len(ids), len(source_ids))) as runner:
            if device:
                (logits,) = runner.logits(ids, source_ids, all_at_once=True)
                return self.ops.complete(logits)
            return np.concatenate([self.ops.host(logits) for logits in runner.logits(ids, source_ids)])
