"""Trains an EAGLE-3 head for a model, on texts that the model itself writes, and measures what it brings.

The texts go on from the beginnings of pieces of given ones, because a head is to guess what the model writes, not what
others have written. The head's file has the form of the published ones (:mod:`.models._eagle3`), without an embedding:
readers take the model's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from .api import Model, load
from .backend.values import Array, ForwardBatch
from .checkpoint.checksum import FileChecksums
from .checkpoint.manifest import MANIFEST_FILE
from .checkpoint.offline_rotation import ROTATED_STREAM, stream_rotation
from .checkpoint.opened_model import open_model
from .checkpoint.output_folder import check_target, output_folder
from .checkpoint.writer import SafetensorsWriter, TensorDeclaration, write_json
from .engine.speculative import EAGLE3
from .errors import OutOfMemory, UsageError
from .layers.cache import KVCache
from .models import _eagle3 as eagle3
from .models._decoder import Decoder
from .models._eagle3 import LAYER_IDS, Eagle3Config

if TYPE_CHECKING:
    from .torch.draft_training import TrainingOptions, TrainingTexts

HELD_OUT = 10
"""One of as many prompts of each kind of text is held out of training, and measured."""
MOST_HELD_OUT = 48
"""About the most prompts of a kind that are held out."""
READ_LOGITS = 2**28
"""The most logits that a model computes at a time while it reads texts: 1 GiB."""
WRITING_SEQUENCES = 256
"""Sequences of a step that writes texts."""
MEASURED_SEQUENCES = 8
"""Sequences of a step while acceptance is measured: few enough that each gets all its drafts."""
COPIED = (
    "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps",
    "rope_theta", "rope_parameters", "rope_scaling", "vocab_size", "max_position_embeddings",
)  # fmt: skip
"""The keys of a head's configuration that are the model's, where the model has them."""


@dataclass(frozen=True)
class Pieces:
    """The prompts of one kind of text, as token ids: those to train with, and those that are ``held_out``."""

    kind: str
    trained: Sequence[Sequence[int]]
    held_out: Sequence[Sequence[int]]


@dataclass(frozen=True)
class DraftCounts:
    """What a head brought for one kind of text at a temperature: ``accepted`` of ``drafted`` tokens in ``checks``."""

    kind: str
    temperature: float
    checks: int
    drafted: int
    accepted: int

    @property
    def tokens_per_check(self) -> float:
        """Tokens of a check in the mean, the one behind its accepted drafts included."""
        return 1 + self.accepted / self.checks if self.checks else 1.0


def pieces_of(kind: str, documents: Sequence[str | Sequence[Any]], model: Model, length: int, count: int) -> Pieces:
    """Up to ``count`` prompts, spread evenly over ``documents``: beginnings of ``length`` tokens of pieces of texts,
    or conversations, which are prompts as a whole.

    Raises ``UsageError`` if there are fewer than two, and for a conversation that the model cannot read.
    """
    conversations = [document for document in documents if not isinstance(document, str)]
    texts = [np.asarray(model.tokenizer.encode(text), np.int64) for text in documents if isinstance(text, str)]
    tokens = np.concatenate(texts) if texts else np.zeros(0, np.int64)
    fitting = len(tokens) // length
    if fitting + len(conversations) < 2:
        raise UsageError(f"{kind}: has {len(tokens)} tokens, but two pieces of {length} tokens are needed at least")
    chosen = np.linspace(0, len(conversations) - 1, min(count, len(conversations)), dtype=np.int64)
    starts = np.linspace(0, max(len(tokens) - length, 0), min(count - len(chosen), fitting), dtype=np.int64)
    found = [tokens[start : start + length].tolist() for start in starts]
    found += [np.asarray(model.encode(conversations[i]).token_ids).tolist() for i in chosen]
    held_out = range(0, len(found), max(HELD_OUT, len(found) // MOST_HELD_OUT))
    return Pieces(kind, [x for i, x in enumerate(found) if i not in held_out], [found[i] for i in held_out])


def head_config(path: Path, draft_vocab_size: int, layer_ids: Sequence[int] | None) -> dict[str, Any]:
    """The ``config.json`` of a new head for the model in the folder ``path``; ``layer_ids`` count layers by input."""
    with open_model(path) as opened:
        config, own = opened.config, opened.description.config_json
        copied = {key: own[key] for key in COPIED if own.get(key) is not None}
        num_layers = config.num_layers
    found: dict[str, Any] = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "norm_before_residual": True,
        "draft_vocab_size": min(draft_vocab_size, config.vocab_size),
        **copied,
    }
    if layer_ids is None and num_layers < 7:  # the default layers would be equal, or not exist
        layer_ids = sorted({num_layers // 3, 2 * num_layers // 3, num_layers - 1})
    if layer_ids is not None:
        found[LAYER_IDS] = list(layer_ids)
    eagle3.parse(found).layers_of(num_layers)
    return found


def has_rotated_stream(path: Path) -> bool:
    """Whether the residual stream of the model in the folder ``path`` was rotated when it was migrated."""
    with open_model(path) as opened:
        rotated = opened.checkpoint.manifest.get("rotated_offline") or ()
    return any(name.startswith(ROTATED_STREAM) for name in rotated)


def write_texts(
    model: Model, prompts: Sequence[Sequence[int]], new_tokens: int, temperatures: Sequence[float]
) -> list[tuple[int, Sequence[int]]]:
    """Each prompt with what ``model`` writes behind it, and the prompt's length; the ``temperatures`` take turns.

    Raises what :meth:`.Model.generate` does.
    """
    found: list[tuple[int, Sequence[int]]] = []
    for i, temperature in enumerate(temperatures):
        own = [list(prompt) for prompt in prompts[i :: len(temperatures)]]
        results = model.generate(own, max_new_tokens=new_tokens, temperature=temperature, seed=0) if own else []
        found += [(len(x), [*x, *result.token_ids]) for x, result in zip(own, results, strict=True)]
    return found


def read_written(
    model: Model, written: Sequence[tuple[int, Sequence[int]]], config: Eagle3Config, is_rotated: bool
) -> TrainingTexts:
    """What a model computes for texts with prompts of these lengths, on the host.

    If the model ``is_rotated``, its residual stream is turned back.
    """
    from .torch.draft_training import TrainingTexts

    network = cast(Decoder, model.network)
    written = sorted((own for own in written if len(own[1]) > 1), key=lambda own: len(own[1]))
    if not written:
        raise UsageError("the model ends each text at once: nothing to train on")
    lengths, width = [len(tokens) for _, tokens in written], config.target_hidden_size
    layers = config.layers_of(network.config.num_layers)
    texts = TrainingTexts.empty(lengths, [count for count, _ in written], len(layers) * width, width, config.vocab_size)
    reader = _Reader(network, texts, layers, width, is_rotated)
    most, first = max(READ_LOGITS // config.vocab_size, 1), 0
    while first < len(written):
        count = 1
        while first + count < len(written) and (count + 1) * lengths[first + count] <= most:
            count += 1
        try:
            own = [tokens for _, tokens in written[first : first + count]]
            model.engine.call(partial(reader.read, own, int(texts.starts[first])))
        except OutOfMemory:
            if count == 1:
                raise
            most = most // 2
        else:
            first += count
    return texts


class _Reader:
    """Runs a model over texts, and keeps what a head learns from."""

    def __init__(self, network: Decoder, texts: TrainingTexts, layers: Sequence[int], width: int, is_rotated: bool):
        self.network, self.texts, self.layers, self.width = network, texts, layers, width
        self.turn_back = stream_rotation(width)(np.eye(width, dtype=np.float32)).T if is_rotated else None

    def read(self, written: Sequence[Sequence[int]], start: int) -> None:
        """Read texts, which lie at ``start`` one behind another."""
        from .torch.draft_training import likely_tokens, on_host

        ops, texts = self.network.ops, self.texts
        some = slice(start, start + sum(len(tokens) for tokens in written))

        def observe(layer: int, residual: Array) -> None:
            if layer and layer not in self.layers:
                return
            values = on_host(ops.complete(residual), self.turn_back)
            if layer == 0:
                texts.embeddings[texts.tokens[some]] = values
            if layer in self.layers:
                place = self.layers.index(layer) * self.width
                texts.streams[some, place : place + self.width] = values

        longest = max(len(tokens) for tokens in written)
        np.concatenate(written, out=texts.tokens.numpy()[some])
        cache = KVCache.for_sequences(ops, self.network.config.cache_layout, len(written), longest)
        try:
            tables = cache.tables(len(written), longest)
            batch = ForwardBatch.packed(ops.array, written, [0] * len(written), tables)
            logits = ops.complete(self.network(batch, cache, True, observe))
            texts.labels[some], texts.probabilities[some] = likely_tokens(logits)
        finally:
            cache.close()


def write_head(
    folder: Path, config: Mapping[str, Any], tensors: Mapping[str, np.ndarray], tokens: np.ndarray, force: bool = False
) -> None:
    """Write a head's checkpoint: matrices in fp16, ``d2t`` and ``t2d`` for its draft ``tokens``, under public names."""
    named: dict[str, np.ndarray] = {
        name.replace(eagle3.LAYER, "midlayer"): values.astype(np.float16) for name, values in tensors.items()
    }
    named[eagle3.TOKEN_MAP] = (tokens - np.arange(len(tokens))).astype(np.int64)
    named["t2d"] = np.isin(np.arange(config["vocab_size"]), tokens)
    types = {"float16": "F16", "int64": "I64", "bool": "BOOL"}
    declared = {name: TensorDeclaration(types[values.dtype.name], values.shape) for name, values in named.items()}
    with output_folder(folder, force, sum(values.nbytes for values in named.values())) as partial:
        writer = SafetensorsWriter(partial / "model.safetensors", declared, {})
        try:
            for name, values in named.items():
                writer.write(name, np.ascontiguousarray(values))
            writer.complete({})
            writer.sync()
        finally:
            writer.close()
        write_json(partial / "config.json", dict(config))
        written = sorted(path for path in partial.rglob("*") if path.is_file())
        with ThreadPoolExecutor(1, "checksums") as pool:
            files = [asdict(record) for record in FileChecksums(written, partial, pool).records()]
        write_json(partial / MANIFEST_FILE, {"files": files})  # by which a later head may replace this one


def train_head(
    path: Path,
    folder: Path,
    kinds: Sequence[Pieces],
    model: Model,
    config: Mapping[str, Any],
    options: TrainingOptions,
    new_tokens: int,
    temperatures: Sequence[float],
    device: str,
    force: bool = False,
    report: Callable[[str], None] = lambda line: None,
) -> None:
    """Let ``model``, which lies at ``path``, write texts, train a head on them, and write it to ``folder``.

    The model is closed before the training. ``device`` is torch's. Raises ``UsageError``, ``CheckpointError``, and what
    :meth:`.Model.generate` does.
    """
    from .torch.draft_training import Progress, draft_tokens, train

    check_target(folder, force)  # before the work
    own = Eagle3Config(**{**vars(eagle3.parse(config)), "has_embedding": False})
    own.layers_of(cast(Decoder, model.network).config.num_layers)
    begin = time.monotonic()
    written = write_texts(model, [piece for kind in kinds for piece in kind.trained], new_tokens, temperatures)
    new = sum(len(tokens) - count for count, tokens in written)
    report(f"{len(written):,} texts with {new:,} new tokens, written in {time.monotonic() - begin:.1f} s")
    begin = time.monotonic()
    texts = read_written(model, written, own, has_rotated_stream(path))
    model.close()
    taken = f"read in {time.monotonic() - begin:.1f} s, {texts.nbytes / 1e9:.1f} GB"
    tokens = draft_tokens(texts.labels[texts.learnt, 0].numpy(), own.draft_vocab_size)
    covered = float(np.isin(texts.labels[texts.learnt, 0].numpy(), tokens).mean())
    report(f"{taken}; the head's {len(tokens):,} tokens are {covered:.1%} of the most likely ones")

    def told(now: Progress) -> None:
        right = ", ".join(f"{part:.0%}" for part in now.right)
        report(f"epoch {now.epoch + 1}: loss {now.loss:.3f}, right guesses {right}, after {now.seconds:.0f} s")

    write_head(folder, config, train(texts, own, tokens, options, device, told), tokens, force)


def measure_acceptance(
    path: Path,
    folder: Path,
    kinds: Sequence[Pieces],
    new_tokens: int,
    temperatures: Sequence[float],
    num_drafts: int,
    **options: Any,
) -> list[DraftCounts]:
    """What the head in ``folder`` brings behind the prompts that are held out, for each temperature and kind.

    ``options`` are those of :func:`load`.
    """
    drafts = {"method": EAGLE3, "model": folder, "num_speculative_tokens": num_drafts, "adaptive": False}
    options = {"max_batch": MEASURED_SEQUENCES, **options}
    found = []
    with load(path, speculative=drafts, **options) as model:
        for temperature in temperatures:
            for kind in kinds:
                before = model.stats()
                write_texts(model, kind.held_out, new_tokens, [temperature])
                after = model.stats()
                found.append(
                    DraftCounts(
                        kind.kind,
                        temperature,
                        after.drafts - before.drafts,
                        after.draft_tokens - before.draft_tokens,
                        after.accepted_tokens - before.accepted_tokens,
                    )
                )
    return found
