"""A loaded model: joins the network on its device, the engine and text. It holds no algorithm."""

from __future__ import annotations

import functools
import weakref
from collections.abc import AsyncGenerator, Generator, Iterator, Mapping, Sequence
from contextlib import aclosing, closing
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, cast, overload

import numpy as np

from . import backend
from .adapters import MAX_ADAPTERS, ModelAdapters
from .backend.base import Backend
from .completions import Completion, arun, run
from .engine.adapters import LoadedAdapter
from .engine.config import EngineConfig
from .engine.core import Engine, EngineStats, closed_error
from .engine.model_runner import ModelRunner
from .engine.outputs import Piece, Result
from .engine.pooling import PoolingQueue
from .engine.request import Request
from .engine.sampling_params import SamplingOptions, SamplingParams
from .engine.speculative import AUTO, SpeculativeConfig
from .errors import UsageError, is_whole, require_bool
from .grammar import Grammar, Structure, only_structure
from .grammar.matcher import GrammarCompiler
from .loading import LoadArguments, load_parts
from .models import TextVectors
from .pooling.pooler import Pooler, PoolingModel, checked_texts
from .pooling.scores import Ranked, ranked
from .pooling.texts import Text
from .pooling.yes_no import Judge, Questions, YesNoReranker
from .request_builder import GenerationRequest, RequestBuilder, build_logits_request, decoder_and_source
from .text.chat_template import Message
from .text.infilling import NO_BLANKS, FilledSpan, encode_blanks
from .text.prompts import EncodedPrompt, Prompt, PromptEncoder, dialogue_messages, is_batch
from .text.text_stream import TextStream
from .text.tokenizer import Tokenizer
from .text.tool_calls import Tool

if TYPE_CHECKING:
    from typing_extensions import Unpack


MAX_TEXTS = 4096
"""The most texts that become vectors in one batch."""
FINALIZER_SECONDS = 5.0
"""How long the end of a model that was not closed waits for its engine.

The garbage collector may end it in a thread that holds a lock which the engine needs, such as that of the GPU's memory.
"""


def load(
    path: str | Path,
    device: str = "auto",
    memory_limit: int | str | None = None,
    max_batch: int | None = None,
    kv_cache: str = "fp16",
    context: int | None = None,
    check: bool = False,
    prefix_cache: bool = True,
    max_queue: int = EngineConfig.max_queue,
    max_num_batched_tokens: int = EngineConfig.max_num_batched_tokens,
    speculative: str | Mapping[str, Any] | SpeculativeConfig | None = AUTO,
    adapters: Mapping[str, str | Path] | None = None,
    max_adapters: int = MAX_ADAPTERS,
    max_adapter_rank: int | None = None,
    gpus: int = 1,
    embeddings: bool = False,
) -> Model:
    """Load a checkpoint folder: one that ``migrate`` wrote, another W8A8 checkpoint, or an unquantized source.

    ``path`` may also be a ``.gguf`` file, or a folder in a format of others (GPTQ, AWQ, FP8, MXFP4), whose tensors are
    dequantized.

    - ``device``: ``auto``, ``cpu``, ``cuda`` or ``cuda:N``.
    - ``memory_limit``: the most GPU memory that the model may use, in bytes or as text such as ``"6GiB"``. Layers that
      do not fit are streamed from host memory; see docs/memory.md. Without effect on a CPU.
    - ``max_batch``: the most sequences that a step computes, up to 65,536; the default follows from the memory.
    - ``kv_cache``: ``fp16`` (fp32 on a CPU), or ``int8``, which takes half the memory.
    - ``context``: tokens that the cache must have room for. The default is the model's context length, or less where
      memory is short. Without effect on a CPU.
    - ``check``: raise an error that names the layer where an activation is NaN or infinite. Slow on a GPU.
    - ``prefix_cache``: keep the keys and values of finished requests, and reuse them for prompts that begin alike.
      Results are the same without it.
    - ``max_queue``: the most requests that may wait; one more is an error.
    - ``max_num_batched_tokens``: the most tokens of a step, up to 65,536, or fewer where memory is short; a longer
      prompt takes several steps. With more, prompts are a few percent faster, and a request waits longer for the step
      before it; see docs/scheduling.md. A model that makes vectors of texts has 8,192 by default, on a GPU up to 65,536
      if it is small, and one whose tokens see those behind them has as many as its longest text at least.
    - ``speculative``: where guesses of a request's next tokens come from, which a step checks all at once: ``"ngram"``,
      ``"suffix"``, ``"mtp"`` for a layer of the checkpoint, a mapping with the fields of
      :class:`~bminf_lite.engine.speculative.SpeculativeConfig`, such as
      ``{"model": "path", "num_speculative_tokens": 4}`` for a draft model or ``{"method": "eagle3", "model": "path"}``
      for an EAGLE-3 head, or an instance; None or ``"none"`` for no guesses. ``"auto"`` takes n-grams on a GPU, where
      results have the same bits with them, for models without experts, and else none (docs/guides/speculative.md). A
      draft model, a head and a layer take memory of their own, and a context is at most as long as that of a draft
      model.
    - ``adapters``: LoRA adapters for single requests, as a mapping from names to folders that PEFT saved
      (docs/guides/adapters.md). It may be empty: then :meth:`Model.load_adapter` adds some later. None for a model that
      takes none.
    - ``max_adapters``: adapters that the requests of a step may have beside each other, up to 1,024; only these take
      memory on the device. Without effect without ``adapters``.
    - ``max_adapter_rank``: the largest rank of an adapter, up to 512; the default is that of the given ``adapters``, or
      16 if they have less.
    - ``gpus``: among how many GPUs the model is divided, from the one that ``device`` names on, ``memory_limit`` each;
      docs/guides/several_gpus.md. With ``device="cpu"`` threads compute the parts, which helps to test.
    - ``embeddings``: :meth:`Model.embed` works beside generation, for a decoder: a text's vector is that of its last
      token. Without effect on a model that makes vectors alone.

    Raises ``CheckpointError``, ``DeviceError``, ``UsageError``, or ``OutOfMemory`` with a size that would fit.
    """
    options = LoadArguments(
        device, memory_limit, max_batch, kv_cache, context, check, prefix_cache, max_queue, max_num_batched_tokens,
        speculative, adapters, max_adapters, max_adapter_rank, gpus, embeddings,
    )  # fmt: skip
    return Model(*load_parts(path, options))


class RequestOptions(SamplingOptions, total=False):
    """The keyword arguments of generation: the fields of :class:`SamplingParams`, and how a request is served.

    - ``add_special_tokens``: frame a text as the checkpoint does; see :meth:`Model.encode`. True by default.
    - ``split_special_tokens``: a text is text, also where it spells a control token; see :meth:`Model.encode`.
    - ``priority``: requests with a higher number start first; 0 by default.
    - ``deadline``: seconds after which the request ends with what it has, and the finish reason ``deadline``.
    - ``cache_salt``: a text; only requests with equal ones reuse each other's keys and values.
    - ``adapter``: the name of an adapter that the model has; None for the model without one.
    - ``prompt_logprobs``: report the log-probability of each token of the prompt. The prompt is then computed whole.

    At most one of these says what the completion must look like (docs/structured_output.md). They need the package
    llguidance, which the extra ``grammar`` installs.

    - ``json_object``: with True, a JSON object.
    - ``json_schema``: JSON that this schema accepts; a dict or a text. Of a pydantic model, ``model_json_schema()``.
    - ``regex``: a text that this regular expression matches as a whole.
    - ``choice``: one of these texts.
    - ``grammar``: a text of this context-free grammar, in the notation of Lark or GBNF, or a
      :class:`~bminf_lite.grammar.Grammar` of any kind.
    """

    add_special_tokens: bool
    split_special_tokens: bool
    priority: int
    deadline: float | None
    cache_salt: str
    adapter: str | None
    prompt_logprobs: bool
    json_object: bool
    json_schema: Mapping[str, Any] | str | None
    regex: str | None
    choice: Sequence[str] | None
    grammar: str | Grammar | None


_STRUCTURES = {
    "json_object": "json_object",
    "json_schema": "json_schema",
    "regex": "regex",
    "choice": "choice",
    "grammar": "lark",
}
"""The options that say what a completion must look like, with the kinds of grammars that they stand for."""
_NO_PROMPT = EncodedPrompt(())


class Model:
    """A model on its device. Close it, or use it as a context manager, to give the device's memory back.

    It may be used by any number of threads and asyncio tasks: all requests share the steps of one loop, which runs in a
    thread of its own and owns the device (docs/scheduling.md).

    ``network`` has a part for each rank where the model is divided. It is gone after closing. ``folder`` holds the
    tokenizer's files, which are read when text is first used; a model without them works with token ids alone.
    ``generation_config`` holds the defaults of sampling. ``eos_ids`` are the tokens that end a completion; None means
    the tokenizer's. ``adapters`` are those of the networks' devices.
    """

    def __init__(
        self,
        network: Any,
        engine_config: EngineConfig,
        folder: Path | None = None,
        generation_config: Mapping[str, Any] | None = None,
        eos_ids: frozenset[int] | None = None,
        adapters: ModelAdapters | None = None,
        pooling: PoolingModel | None = None,
    ):
        networks = list(network) if isinstance(network, Sequence) else [network]
        self.network = networks[0]
        self._adapters = adapters
        self.folder = folder
        self.engine_config = engine_config
        self.generation_config = generation_config or {}
        ops: Backend = self.network.ops
        self.ops = ops
        self._backends = [network.ops for network in networks]
        self._configured_eos_ids = eos_ids

        def text_network() -> TextVectors:
            return TextVectors.of_decoder(networks[0]) if engine_config.generates else networks[0]

        sizes = engine_config.max_num_batched_tokens, MAX_TEXTS, engine_config.max_captured_text_tokens
        self._engine = engine = Engine(
            engine_config,
            lambda blocks: ModelRunner(networks, engine_config, blocks),
            ops.make_current,
            make_pooling=None if pooling is None else lambda: PoolingQueue(text_network(), *sizes),
        )
        if adapters is not None:
            adapters.between_steps = engine.call
        self._finalizer = weakref.finalize(self, engine.close, timeout=FINALIZER_SECONDS)

        def to_host(array: Any) -> np.ndarray:  # without self, which is freed when dropped
            adopted = ops.adopt(array)
            return engine.call(lambda: ops.host(adopted()))

        self._prompts = prompts = PromptEncoder(folder, engine_config, to_host)
        self.pooler = (
            None if pooling is None else Pooler(pooling, lambda: prompts.tokenizer, engine.pool, sizes[0], folder)
        )
        """Embeds and classifies texts; None for a model that does not."""

    @property
    def device(self) -> str:
        """``cpu`` or ``cuda:N``."""
        return self.ops.name

    @property
    def engine(self) -> Engine:
        """The loop that runs the requests, for a server."""
        return self._engine

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

    @cached_property
    def requests(self) -> RequestBuilder:
        """Makes the engine's requests, for a server or a benchmark that submits them itself."""
        prompts = self._prompts  # without self, which is freed when dropped
        adapters = None if self._adapters is None else self._adapters.registry
        return RequestBuilder(self.engine_config, self.eos_ids, lambda: prompts.tokenizer, adapters)

    @property
    def adapters(self) -> dict[str, str]:
        """The names of the model's adapters, and the folders that they came from."""
        return {} if self._adapters is None else {a.name: a.source for a in self._adapters.registry}

    def load_adapter(self, name: str, folder: str | Path, replace: bool = False) -> None:
        """Add the adapter in a folder that PEFT saved, for requests that come later.

        With ``replace`` it takes the place of one with the same name, which serves its requests to their ends. Raises
        ``CheckpointError`` for a folder that cannot be used, and ``UsageError`` for a model that was loaded without
        ``adapters``, for a rank that the model has no room for, and for a name that is in use.
        """
        self._require_open()
        require_bool("replace", replace)
        self._with_adapters.load(name, folder, replace)

    def unload_adapter(self, name: str) -> None:
        """Remove an adapter. Requests that have it go on to their ends. Raises ``UsageError`` if there is none."""
        self._require_open()
        self._with_adapters.registry.remove(name)

    @property
    def adapter_store(self) -> ModelAdapters | None:
        """What loads and holds the model's adapters, for a server; None without room for them."""
        return self._adapters

    @property
    def _with_adapters(self) -> ModelAdapters:
        if self._adapters is None:
            raise UsageError("the model was loaded without room for adapters: load it with adapters={}")
        return self._adapters

    @property
    def grammars(self) -> GrammarCompiler:
        """Compiles grammars for this model's vocabulary; ``CheckpointError`` if the tokenizer's files are missing."""
        return self.requests.grammars

    def describe(self) -> str:
        """The device in words."""
        return self.ops.describe()

    def __repr__(self) -> str:
        config = self.engine_config
        name = "a model without a folder" if self.folder is None else str(self.folder)
        layers = f"{config.num_layers} layers"
        kind = "encoder-decoder, " if config.is_encoder_decoder else ""
        if self.pooler is not None and not config.generates:
            layers = f"vectors of {self.pooler.model.dimensions:,} elements"
        vocab, context = f"{config.vocab_size:,} tokens in the vocabulary", f"context of {config.context_length:,}"
        facts = f"{kind}{layers}, {vocab}, {context}"
        return f"<bminf_lite.Model {name}: {facts}, {f'on {self.device}' if self._finalizer.alive else 'closed'}>"

    def memory(self) -> dict[str, int]:
        """GPU memory in bytes: ``used``, ``peak_used``, ``reserved``, ``peak_reserved``, ``limit``; empty on a CPU."""
        return self.ops.memory()

    def expert_cache(self) -> dict[str, int]:
        """What the cache of experts has done since loading, for a mixture whose experts do not all fit the GPU.

        The GPU has room for ``slots`` of all ``experts``. ``hits`` and ``misses`` count the experts that the layers of
        steps needed and that were there or not, and ``copied_bytes`` are the bytes of the misses. Of a model on several
        GPUs they are those of the first. Empty if all experts are on the device. Between two steps, if the model
        generates.
        """
        return self._engine.call(self.ops.expert_cache)

    def warm_up(self) -> None:
        """Take all memory of the key-value cache and prepare the steps now, so that no request waits for that.

        For servers. Raises ``OutOfMemory`` if the memory is not there.
        """
        self._engine.warm_up()

    def stats(self) -> EngineStats:
        """What the engine does now: waiting and running requests, blocks of the cache, and counts since loading."""
        return self._engine.stats()

    def close(self) -> None:
        """Give the device's memory back. Afterwards the model and its unfinished streams raise ``UsageError``.

        It may be called while other threads generate: their calls raise the same error.
        """
        self._prompts.close()
        self._finalizer.detach()
        self._engine.close(functools.partial(backend.close_ranks, self._backends))
        self.__dict__.pop("network", None)  # on a CPU the weights are NumPy arrays, freed with the last reference

    def __reduce__(self) -> str:
        raise UsageError("a model cannot be copied, pickled or sent to another process: load its folder again there")

    def __enter__(self) -> Model:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- text -----------------------------------------------------------------------------------------------------

    @overload
    def generate(  # type: ignore[overload-overlap]  # a str is also a sequence of str
        self, prompt: Prompt, params: SamplingParams | None = None, **options: Unpack[RequestOptions]
    ) -> Result: ...
    @overload
    def generate(
        self, prompt: Sequence[Prompt], params: SamplingParams | None = None, **options: Unpack[RequestOptions]
    ) -> list[Result]: ...
    def generate(
        self, prompt: Any, params: SamplingParams | None = None, **options: Unpack[RequestOptions]
    ) -> Result | list[Result]:
        """Complete a prompt or a list of prompts. One prompt gives a result, a list gives a list in the same order.

        A prompt is text, a list of token ids, a list of messages (``{"role": "user", "content": ...}``) to answer, or a
        result of :meth:`encode`. ``options`` are those of :class:`RequestOptions`; defaults of sampling come from
        ``params`` if given, else from the checkpoint's ``generation_config.json``. Prompts of one list draw differently
        with the same seed. Raises ``UsageError`` for invalid arguments, which lists all invalid prompts, for a prompt
        that could never fit in the cache and for too many waiting requests; ``CheckpointError`` for missing or
        malformed tokenizer files; ``OutOfMemory``, after which the model can still be used.
        """
        completions = self._completions(prompt, params, options)
        with closing(run(self._engine, completions, _needs_text_at_once(completions))) as pieces:
            return _results(prompt, [piece for piece in pieces if piece.result is not None])

    def stream(
        self,
        prompt: Prompt | Sequence[Prompt],
        params: SamplingParams | None = None,
        **options: Unpack[RequestOptions],
    ) -> Generator[Piece, None, None]:
        """Like :meth:`generate`, but yields pieces as the text appears. The call itself checks the arguments.

        Closing the stream ends generation; the memory of its requests is free at the next step.
        """
        return self._pieces(self._completions(prompt, params, options, is_streamed=True))

    @overload
    async def agenerate(  # type: ignore[overload-overlap]
        self, prompt: Prompt, params: SamplingParams | None = None, **options: Unpack[RequestOptions]
    ) -> Result: ...
    @overload
    async def agenerate(
        self, prompt: Sequence[Prompt], params: SamplingParams | None = None, **options: Unpack[RequestOptions]
    ) -> list[Result]: ...
    async def agenerate(
        self, prompt: Any, params: SamplingParams | None = None, **options: Unpack[RequestOptions]
    ) -> Result | list[Result]:
        """:meth:`generate` for asyncio. Cancelling the task cancels its requests."""
        completions = self._completions(prompt, params, options)
        async with aclosing(arun(self._engine, completions, _needs_text_at_once(completions))) as pieces:
            return _results(prompt, [piece async for piece in pieces if piece.result is not None])

    def astream(
        self,
        prompt: Prompt | Sequence[Prompt],
        params: SamplingParams | None = None,
        **options: Unpack[RequestOptions],
    ) -> AsyncGenerator[Piece, None]:
        """:meth:`stream` for asyncio: ``async for piece in model.astream(prompt)``."""
        return self._apieces(self._completions(prompt, params, options, is_streamed=True))

    def encode(
        self, prompt: Prompt, add_special_tokens: bool = True, split_special_tokens: bool = False
    ) -> EncodedPrompt:
        """The tokens of a prompt, checked: at least one, and few enough to leave room for a new token.

        The encoder of an encoder-decoder reads the prompt. ``add_special_tokens`` frames a text as the checkpoint does,
        for example with a begin-of-text token. A text such as ``<|im_end|>`` is a control token wherever it stands,
        unless ``split_special_tokens``: then it is text in a text, and in messages of users and tools. Raises
        ``UsageError`` for an invalid prompt, ``CheckpointError`` if text needs a tokenizer that is missing.
        """
        require_bool("add_special_tokens", add_special_tokens)
        require_bool("split_special_tokens", split_special_tokens)
        return self._prompts.encode(prompt, add_special_tokens, split_special_tokens)

    def fill_blank(self, text: str, **options: Unpack[SamplingOptions]) -> list[FilledSpan]:
        """The text for each ``<span>`` of ``text``, with its position; for models such as T5 and CPM-2.

        ``options`` are those of :meth:`generate` except ``stop``. Raises ``UsageError`` for a text without ``<span>``
        or with too many, and for a model that was not trained to fill blanks.
        """
        if options.get("stop"):
            raise UsageError("stop texts do not apply to blanks, which end where the next one begins")
        if not self.engine_config.is_encoder_decoder:
            raise UsageError(NO_BLANKS)
        if isinstance(text, str):
            self._prompts.check_length(text)
        blanked = encode_blanks(self.tokenizer, text)
        return blanked.fillings(self.tokenizer, self.generate(blanked.prompt, **options).token_ids, self.eos_ids)

    def dialogue(self, context: Sequence[str], **options: Unpack[SamplingOptions]) -> Result:
        """Answer the last utterance of a dialogue between two speakers who take turns.

        For a model with a chat template the last utterance is the user's. ``options`` are those of :meth:`generate`.
        Raises ``UsageError`` for a model that has no chat template and is not EVA, and for a ``context`` that is not a
        list of texts.
        """
        return self.generate(dialogue_messages(context), **options)

    def chat(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        *,
        tools: Sequence[Tool] | None = None,
        **variables: Any,
    ) -> str:
        """A conversation as text, written by the checkpoint's chat template, special tokens included.

        It ends where an answer begins, or with the last message if not ``add_generation_prompt``. ``tools`` are
        functions in OpenAI's form; a template that knows no tools gets a system message that describes them.
        ``variables`` are passed to the template: ``enable_thinking``, ... Encode the text without
        ``add_special_tokens``. Raises ``UsageError`` if there is no template, or for messages that it refuses.
        """
        return self._prompts.render(messages, add_generation_prompt, tools=tools, **variables)

    def embed(
        self,
        texts: Text | Sequence[Text],
        *,
        prompt_name: str | None = None,
        prompt: str | None = None,
        normalize: bool | None = None,
        dimensions: int | None = None,
        truncate: bool = True,
        pooling: str | None = None,
    ) -> np.ndarray:
        """Vectors of texts, fp32 ``[texts, dimensions]``; of one text fp32 ``[dimensions]``.

        A text may be a list of token ids, which are taken as they are. The folder's files say how vectors are made:
        the pooling, linear layers behind it, a normalization and prompts, as sentence-transformers reads them.

        - ``prompt_name``: the name of one of the model's prompts, which is put before each text, such as ``"query"``.
          ``prompt`` is such a text itself.
        - ``normalize``: give vectors length 1, or not; by default what the folder says.
        - ``dimensions``: keep the first elements alone, for models that were trained for it (Matryoshka).
        - ``truncate``: cut off what exceeds the model's length. Otherwise such a text is an error.
        - ``pooling``: what one vector is made of those of a text's tokens, instead of what the folder says: ``cls``
          (the first token's), ``lasttoken``, ``mean``, ``max``, ``weightedmean`` or ``mean_sqrt_len_tokens``.

        Raises ``UsageError`` for a model that makes no vectors, and for invalid arguments, which lists all invalid
        texts.
        """
        return self._pooler().embed(texts, prompt_name, prompt, normalize, dimensions, truncate, pooling)

    def embed_slices(self, texts: Sequence[Text], **options: Any) -> Iterator[np.ndarray]:
        """As :meth:`embed` for a list, in order: fp32 ``[n, dimensions]`` of some texts at a time, for long lists."""
        return self._pooler().embedded(texts, **options)

    def rerank(
        self,
        query: str,
        texts: Sequence[str],
        *,
        top_n: int | None = None,
        instruction: str | None = None,
        truncate: bool = True,
    ) -> list[Ranked]:
        """The texts by falling relevance for ``query``: the place, the score and the text of each, ``top_n`` at most.

        A reranker (a cross encoder) reads the query with each text. Of a model that embeds, the score is the cosine of
        both vectors, with the prompts that it has for queries and documents. A model that generates text is asked
        whether the text meets the ``instruction`` for the query, as Qwen3-Reranker was trained: the score is the
        probability of "yes" beside "no". Others have no ``instruction``.
        """
        self._require_open()
        if self.pooler is None or self.engine_config.generates:
            texts = checked_texts(query, texts, top_n)
            require_bool("truncate", truncate)
            asked = YesNoReranker(Questions(self._prompts), Judge(self._engine, self.ops))
            return ranked(asked.scores(query, texts, instruction, truncate), texts, top_n)
        if instruction is not None:
            raise UsageError("instruction is for models that generate text, such as Qwen3-Reranker; leave it out")
        return self.pooler.rerank(query, texts, top_n, truncate)

    def classify(self, texts: Any, *, truncate: bool = True) -> Any:
        """The label of each text, with the scores of all labels; of a list a list, of one text one.

        A text may be a pair, ``("premise", "hypothesis")``. A model that classifies tokens gives a list of
        :class:`~bminf_lite.pooling.scores.TokenLabel` for a text. Raises ``UsageError`` for a model without a head.
        """
        return self._pooler().classify(texts, truncate)

    def _pooler(self) -> Pooler:
        self._require_open()
        if self.pooler is None:
            raise UsageError(
                "this model generates text, and makes no vectors of texts: load an embedding model, or this one with "
                "embeddings=True"
            )
        return self.pooler

    def _require_generating(self) -> None:
        self._require_open()
        if not self.engine_config.generates:
            raise UsageError("this model makes vectors of texts, and generates none: call embed, rerank or classify")

    def _pieces(self, completions: list[Completion]) -> Generator[Piece, None, None]:
        """The pieces of requests. The generator keeps the model, which would close its engine if it were dropped."""
        with closing(run(self._engine, completions, every_token=True)) as pieces:
            yield from pieces

    async def _apieces(self, completions: list[Completion]) -> AsyncGenerator[Piece, None]:
        async with aclosing(arun(self._engine, completions, every_token=True)) as pieces:
            async for piece in pieces:
                yield piece

    def _completions(
        self, prompt: Any, params: SamplingParams | None, options: RequestOptions, is_streamed: bool = False
    ) -> list[Completion]:
        """The requests of a call with the texts that they will have. All arguments are checked."""
        self._require_generating()
        given = cast(dict[str, Any], dict(options))
        add_special_tokens = given.pop("add_special_tokens", True)
        require_bool("add_special_tokens", add_special_tokens)
        split_special_tokens = given.pop("split_special_tokens", False)
        require_bool("split_special_tokens", split_special_tokens)
        served = {
            name: given.pop(name)
            for name in ("priority", "deadline", "cache_salt", "adapter", "prompt_logprobs")
            if name in given
        }
        grammar = _grammar(given)
        if params is None:
            params = SamplingParams.from_checkpoint(self.generation_config, **given)
        else:
            params = SamplingParams.merged(params, **given)
        params = params.with_seed()  # one for all: their indices make them draw differently
        wanted = GenerationRequest(_NO_PROMPT, params, grammar=grammar, is_streamed=is_streamed, **served)
        prompts = self._prompts.encode_all(prompt, add_special_tokens, split_special_tokens)
        tokenizer = self.tokenizer if params.stop or self._prompts.has_tokenizer else None
        requests = self.requests.build(*(replace(wanted, prompt=p) for p in prompts))
        before = [p.before_text(grammar is not None) for p in prompts]
        texts = (TextStream(tokenizer, params.stop, own, min_tokens=params.min_tokens) for own in before)
        return list(map(Completion, requests, texts))

    def _require_open(self) -> None:
        if not self._finalizer.alive:
            raise closed_error()

    # -- tensors --------------------------------------------------------------------------------------------------

    def logits(
        self,
        token_ids: Sequence[int] | np.ndarray | EncodedPrompt,
        device: bool = False,
        source: Sequence[int] | np.ndarray | None = None,
        start: int = 0,
        adapter: str | None = None,
    ) -> Any:
        """Logits after each token from the position ``start`` on, fp32 ``[tokens - start, vocab]``.

        Keys and values of the tokens before ``start`` may come from the cache of earlier requests. So logits of a few
        drafted tokens behind a long prompt cost little.

        The result is a NumPy array, or with ``device`` the backend's own array without a copy to the host. On a GPU
        that is a finished CuPy array, which other libraries may take through DLPack and read on any stream. Keep a
        reference until they have read it, because its memory is reused afterwards. ``token_ids`` may be such an array.

        An encoder-decoder needs the ``source`` that its encoder reads, and ``token_ids`` are the decoder's. The result
        of :meth:`encode` stands for both. ``adapter`` is the name of one of the model's adapters. Raises ``UsageError``
        for ids outside the vocabulary, and for too many.
        """
        self._require_generating()
        config = self.engine_config
        if isinstance(token_ids, EncodedPrompt):
            if source is not None:
                raise UsageError("logits takes either an encoded prompt, which has its source, or a source")
            token_ids, read = decoder_and_source(token_ids, config)
            source = read if config.is_encoder_decoder else None
        ids = self._prompts.validate_token_ids(token_ids)
        if not 0 < len(ids) <= config.context_length:
            raise UsageError(f"logits takes 1 to {config.context_length:,} token ids, not {len(ids):,}")
        if not is_whole(start) or not 0 <= start < len(ids):
            raise UsageError(
                f"start is {start!r}, but must be the position of one of the {len(ids):,} tokens: 0 to {len(ids) - 1:,}"
            )
        require_bool("device", device)
        source_ids = self._prompts.validate_token_ids(() if source is None else source)
        longest = config.max_source_length
        if not (0 < len(source_ids) <= longest if config.is_encoder_decoder else source is None):
            wanted = f"a source of 1 to {longest:,} token ids" if config.is_encoder_decoder else "no source"
            raise UsageError(f"logits of this model need {wanted}, not {'none' if source is None else len(source_ids)}")
        chosen = None if adapter is None else self._with_adapters.registry.find(adapter)
        return self._logits(ids, source_ids, device, start, chosen)

    def _logits(
        self,
        token_ids: Sequence[int],
        source_ids: Sequence[int],
        device: bool,
        start: int,
        adapter: LoadedAdapter | None = None,
    ) -> Any:
        """The logits of checked tokens. They are computed like a prompt, beside other requests."""
        ops = self.ops
        pieces: dict[int, Any] = {}
        errors: list[BaseException] = []
        ended: SimpleQueue[Request] = SimpleQueue()

        def take(position: int, logits: Any) -> None:
            if position == start:
                pieces.clear()
            try:
                pieces[position] = ops.complete(logits) if device else ops.host(logits)
            except BaseException as error:
                errors.append(error)

        request = build_logits_request(token_ids, source_ids, take, ended.put, start, device, adapter)
        try:
            self._engine.submit([request])
            ended.get()
        finally:
            self._engine.cancel([request])
        for error in (request.error, *errors):
            if error is not None:
                raise error
        return pieces[start] if device else np.concatenate(list(pieces.values()))


def _needs_text_at_once(completions: Sequence[Completion]) -> bool:
    """Whether each token's text is needed when the token comes, because a stop string may end the request."""
    return any(c.request.params.stop for c in completions)


def _results(prompt: Any, last_pieces: Sequence[Piece]) -> Result | list[Result]:
    """The results in the order of the prompts; one result for one prompt."""
    results = {piece.index: piece.result for piece in last_pieces if piece.result is not None}
    ordered = [results[i] for i in range(len(results))]
    return ordered if is_batch(prompt) else ordered[0]


def _grammar(options: dict[str, Any]) -> Grammar | None:
    """Take what the completion must look like from the options of a call. Raises ``UsageError`` for two of them."""
    given = {name: options.pop(name, None) for name in _STRUCTURES}
    structure = only_structure(
        [
            Structure(name, _STRUCTURES[name], value)
            for name, value in given.items()
            if value is not None and (name, value) != ("json_object", False)
        ]
    )
    return None if structure is None else structure.grammar()
