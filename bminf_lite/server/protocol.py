"""The messages between an HTTP process and the engine's process, and how they are framed on a stream socket.

A message is a msgspec struct as MessagePack, behind its length in 4 bytes, little endian. Each completion has an
``id``, which is unique on its connection; the ``n`` completions of a request have consecutive ids. Everything that one
step brings for a connection travels in one :class:`StepOutputs`.
"""

from __future__ import annotations

from array import array
from typing import Any

import msgspec

from ..engine.core import EngineStats
from ..request_builder import GenerationRequest
from ..text.text_stream import TokenScores

MAX_MESSAGE_BYTES = 1 << 28
_LENGTH_BYTES = 4


# -- from an HTTP process to the engine -------------------------------------------------------------------------------


class Submit(msgspec.Struct, array_like=True, tag="submit"):
    """Run a request, whose completions have the ids ``first_id`` to ``first_id + n - 1``.

    They draw as the sequences ``first_index`` to ``first_index + n - 1``, so that equal seeds draw differently.
    Grammars of one ``client`` take turns with those of others.
    """

    first_id: int
    first_index: int
    request: GenerationRequest
    client: str = ""


class Cancel(msgspec.Struct, array_like=True, tag="cancel"):
    """End these completions. Their blocks are free at the next step; no more outputs come."""

    ids: list[int]


class Pool(msgspec.Struct, array_like=True, tag="pool"):
    """Make vectors of whole texts, or a classifier's numbers of them, and answer with :class:`Pooled` of this ``id``.

    ``texts`` are token ids; ``token_types`` is empty, or has those of each text, or None for zeros. ``num_skipped`` is
    empty, or says how many of the first tokens of each text take no part in the pooling. ``dimensions`` and
    ``normalize`` are those of :meth:`.PoolingSettings.finish`.
    """

    id: int
    texts: list[list[int]]
    token_types: list[list[int] | None]
    num_skipped: list[int] = []
    dimensions: int | None = None
    normalize: bool | None = None


class Ask(msgspec.Struct, array_like=True, tag="ask"):
    """Compute the logits of the tokens ``answers`` behind each of some prompts. Answered by :class:`Pooled`."""

    id: int
    prompts: list[list[int]]
    answers: list[int]


class CancelPool(msgspec.Struct, array_like=True, tag="cancel pool"):
    """The client of the :class:`Pool` or the :class:`Ask` of this ``id`` has left: its answer is not sent."""

    id: int


class StatsWanted(msgspec.Struct, array_like=True, tag="stats?"):
    """Answer with :class:`Stats` of the same number."""

    number: int


class Observed(msgspec.Struct, array_like=True, tag="observed"):
    """What this HTTP process has newly counted of its requests: :attr:`.Observations.values`."""

    values: list[float]


class ChangeAdapter(msgspec.Struct, array_like=True, tag="adapter"):
    """Load the adapter in a ``folder`` under a name, or unload it if that is None.

    With ``replace``, it takes the place of one with the same name. Answered by :class:`AdapterChanged` of the same
    number.
    """

    number: int
    name: str
    folder: str | None = None
    replace: bool = False


ToEngine = Submit | Cancel | Pool | Ask | CancelPool | StatsWanted | Observed | ChangeAdapter


# -- from the engine to an HTTP process -------------------------------------------------------------------------------


class PoolingInfo(msgspec.Struct, array_like=True, frozen=True):
    """What HTTP code has to know of a model that makes vectors of texts: of :class:`.PoolingSettings`, and the labels.

    ``longest`` are the tokens that the model reads of a text. ``labels`` are empty for a model that embeds.
    """

    dimensions: int
    longest: int
    max_length: int | None
    lower_case: bool
    include_prompt: bool
    prompts: dict[str, str]
    default_prompt: str | None
    labels: list[str]
    function: str
    relevance: str
    classifies_tokens: bool


class ModelInfo(msgspec.Struct, array_like=True, frozen=True, tag="model"):
    """The first message of a connection: what HTTP code has to know of the model. Lengths in tokens.

    ``folder`` holds the tokenizer's files; None if the model was made without. ``takes_adapters``: the model has room
    for some.
    """

    folder: str | None
    vocab_size: int
    context_length: int
    is_encoder_decoder: bool
    max_source_length: int
    decoder_start_token_ids: list[int]
    eos_ids: list[int]
    generation_config: dict[str, Any]
    takes_adapters: bool = False
    generates: bool = True
    pooling: PoolingInfo | None = None

    @property
    def max_model_len(self) -> int:
        """The tokens of a prompt and its completion at most, or those that a model without completions reads."""
        if self.generates or self.pooling is None:
            return self.context_length
        return min(self.pooling.longest, self.pooling.max_length or self.pooling.longest)


class ServedAdapter(msgspec.Struct, array_like=True, frozen=True):
    """An adapter's name, and the folder that it came from."""

    name: str
    folder: str


class Adapters(msgspec.Struct, array_like=True, tag="adapters"):
    """All adapters of the model: behind the first message, and whenever they change."""

    adapters: list[ServedAdapter]


class AdapterChanged(msgspec.Struct, array_like=True, tag="changed"):
    """The answer to :class:`ChangeAdapter`: what was wrong, or None."""

    number: int
    problem: str | None


class Ready(msgspec.Struct, array_like=True, tag="ready"):
    """The engine is warm, and its requests do not wait for memory or captures."""


class Admitted(msgspec.Struct, array_like=True, tag="admitted"):
    """The request whose first completion is ``first_id`` waits in the engine's queue or runs."""

    first_id: int


class Refused(msgspec.Struct, array_like=True, tag="refused"):
    """The request whose first completion is ``first_id`` does not run. ``queue_full``: it may be sent again later."""

    first_id: int
    message: str
    queue_full: bool


class CompletionOutput(msgspec.Struct, array_like=True):
    """What is new of a completion, where it is more than one token: log-probabilities, an end, or several tokens.

    The lists of log-probabilities are as long as ``token_ids``. ``prompt_logprobs`` and ``cached_tokens`` come once,
    with the first output; so does ``queue_seconds``, for which the request waited to start.
    """

    id: int
    token_ids: list[int]
    finish_reason: str | None = None
    logprobs: list[float] | None = None
    top_logprobs: list[list[tuple[int, float]]] | None = None
    prompt_logprobs: list[TokenScores | None] | None = None
    cached_tokens: int = 0
    error: str | None = None
    queue_seconds: float = 0.0


class StepOutputs(msgspec.Struct, array_like=True, tag="outputs"):
    """What a step, or several, brought for the completions of a connection.

    ``token_ids[i]`` is the next token of the completion ``ids[i]``; ``outputs`` are those completions that have more.
    """

    ids: list[int]
    token_ids: list[int]
    outputs: list[CompletionOutput]


class Pooled(msgspec.Struct, array_like=True, tag="pooled"):
    """The answer to a :class:`Pool` or an :class:`Ask`: ``rows`` are fp32 ``[n, width]``; or an ``error``."""

    id: int
    rows: bytes
    width: int
    error: str | None = None
    queue_full: bool = False


class Stats(msgspec.Struct, array_like=True, tag="stats"):
    """The answer to :class:`StatsWanted`. ``observed`` adds up what all HTTP processes have counted."""

    number: int
    stats: EngineStats
    observed: list[float]


class Failed(msgspec.Struct, array_like=True, tag="failed"):
    """The engine cannot go on; its process is about to exit."""

    message: str


class ShutDown(msgspec.Struct, array_like=True, tag="shutdown"):
    """Take no more connections, let running requests finish for ``seconds``, then end the rest and the process."""

    seconds: float


FromEngine = (
    ModelInfo
    | Adapters
    | AdapterChanged
    | Ready
    | Admitted
    | Refused
    | StepOutputs
    | Pooled
    | Stats
    | Failed
    | ShutDown
)


# -- framing ----------------------------------------------------------------------------------------------------------


def _plain(value: Any) -> list[int]:
    """A prompt's packed token ids as a list."""
    if isinstance(value, array):
        return value.tolist()
    raise NotImplementedError(f"a message cannot hold {type(value).__name__}")


_encoder = msgspec.msgpack.Encoder(enc_hook=_plain)


def frame(message: msgspec.Struct) -> bytes:
    """A message as it goes over a socket."""
    buffer = bytearray(_LENGTH_BYTES)
    _encoder.encode_into(message, buffer, _LENGTH_BYTES)
    buffer[:_LENGTH_BYTES] = (len(buffer) - _LENGTH_BYTES).to_bytes(_LENGTH_BYTES, "little")
    return bytes(buffer)


class FrameReader:
    """Cuts a stream of bytes into messages of a type. Raises ``msgspec.MsgspecError`` for what is none."""

    def __init__(self, message_type: Any):
        self._decoder = msgspec.msgpack.Decoder(message_type)
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Any]:
        """The messages that ``data`` completes."""
        self._buffer += data
        messages, start = [], 0
        with memoryview(self._buffer) as view:
            while len(view) - start >= _LENGTH_BYTES:
                length = int.from_bytes(view[start : start + _LENGTH_BYTES], "little")
                if length > MAX_MESSAGE_BYTES:
                    raise msgspec.DecodeError(f"a message of {length:,} bytes, but {MAX_MESSAGE_BYTES:,} are allowed")
                stop = start + _LENGTH_BYTES + length
                if len(view) < stop:
                    break
                messages.append(self._decoder.decode(view[start + _LENGTH_BYTES : stop]))
                start = stop
        if start:
            del self._buffer[:start]
        return messages
