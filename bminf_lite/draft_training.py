"""Trains an EAGLE-3 head for a model, on texts that the model itself writes, and measures what it brings.

The texts go on from the beginnings of pieces of given ones, because a head is to guess what the model writes, not what
others have written. The head's file has the form of the published ones (:mod:`.models._eagle3`), without an embedding:
readers take the model's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
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
from .errors import UsageError
from .layers.cache import KVCache
from .models import _eagle3 as eagle3
from .models._decoder import Decoder
from .models._eagle3 import LAYER_IDS, Eagle3Config

if TYPE_CHECKING:
    from .torch.draft_head import TrainingOptions, TrainingText

HELD_OUT = 10
"""One of as many pieces of each kind of text is held out of training, and measured."""
COPIED = (
    "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps",
    "rope_theta", "rope_parameters", "rope_scaling", "vocab_size", "max_position_embeddings",
)  # fmt: skip
"""The keys of a head's configuration that are the model's, where the model has them."""


@dataclass(frozen=True)
class Pieces:
    """The beginnings of texts of one kind, as token ids: those to train with, and those that are ``held_out``."""

    kind: str
    trained: Sequence[Sequence[int]]
    held_out: Sequence[Sequence[int]]


@dataclass(frozen=True)
class DraftCounts:
    """What a head brought for one kind of text: ``accepted`` of ``drafted`` tokens in ``checks``."""

    kind: str
    checks: int
    drafted: int
    accepted: int

    @property
    def tokens_per_check(self) -> float:
        """Tokens of a check in the mean, the one behind its accepted drafts included."""
        return 1 + self.accepted / self.checks if self.checks else 1.0


def pieces_of(kind: str, texts: Sequence[str], model: Model, length: int, count: int) -> Pieces:
    """Up to ``count`` beginnings of ``length`` tokens, spread evenly over ``texts``.

    Raises ``UsageError`` if there are fewer than two.
    """
    tokens = np.concatenate([np.asarray(model.tokenizer.encode(text), np.int64) for text in texts])
    starts = np.linspace(0, max(len(tokens) - length, 0), min(count, len(tokens) // length), dtype=np.int64)
    found = [tokens[start : start + length].tolist() for start in starts]
    if len(found) < 2:
        raise UsageError(f"{kind}: has {len(tokens)} tokens, but two pieces of {length} tokens are needed at least")
    return Pieces(kind, [x for i, x in enumerate(found) if i % HELD_OUT], found[::HELD_OUT])


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
        "draft_vocab_size": min(draft_vocab_size, config.vocab_size),
        **copied,
    }
    if layer_ids is None and num_layers < 7:  # the default layers would be equal, or not exist
        layer_ids = sorted({num_layers // 3, 2 * num_layers // 3, num_layers - 1})
    if layer_ids is not None:
        found[LAYER_IDS] = list(layer_ids)
    eagle3.parse(found).layers_of(num_layers)
    return found


def read_text(model: Model, tokens: Sequence[int], layers: Sequence[int], turn_back: np.ndarray | None) -> TrainingText:
    """What a model computes for a text; ``turn_back`` fp32 ``[features, features]`` undoes the stream's rotation."""
    from .torch.draft_head import TrainingText

    network = cast(Decoder, model.network)
    ops, layout = network.ops, network.config.cache_layout
    found: dict[int, np.ndarray] = {}

    def observe(layer: int, residual: Array) -> None:
        if layer == 0 or layer in layers:
            values = np.array(ops.host(residual), np.float32)
            found[layer] = values if turn_back is None else values @ turn_back

    def work() -> np.ndarray:
        cache = KVCache.for_sequences(ops, layout, 1, len(tokens))
        try:
            batch = ForwardBatch.packed(ops.array, [tokens], [0], cache.tables(1, len(tokens)))
            best: np.ndarray = np.argmax(ops.host(network(batch, cache, True, observe)), axis=1)
            return best
        finally:
            cache.close()

    labels = model.engine.call(work)
    streams = np.stack([found[layer] for layer in layers]).astype(np.float16)
    return TrainingText(found[0], streams, labels.astype(np.int64))


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
    temperature: float,
    device: str,
    force: bool = False,
    report: Callable[[str], None] = lambda line: None,
) -> None:
    """Let ``model``, which lies at ``path``, write texts, train a head on them, and write it to ``folder``.

    ``device`` is torch's. Raises ``UsageError``, ``CheckpointError``, and what :meth:`.Model.generate` does.
    """
    from .torch.draft_head import draft_tokens, train

    check_target(folder, force)  # before the work
    parsed = eagle3.parse(config)
    layers = parsed.layers_of(cast(Decoder, model.network).config.num_layers)
    with open_model(path) as opened:
        is_rotated = any(x.startswith(ROTATED_STREAM) for x in opened.checkpoint.manifest.get("rotated_offline") or ())
    turn_back = stream_rotation(parsed.target_hidden_size)(np.eye(parsed.target_hidden_size, dtype=np.float32)).T
    written = _written(model, [piece for kind in kinds for piece in kind.trained], new_tokens, temperature)
    texts = [read_text(model, text, layers, turn_back if is_rotated else None) for text in written]
    report(f"{len(texts)} texts of {sum(len(text.labels) for text in texts):,} tokens")
    tokens = draft_tokens([text.labels for text in texts], parsed.draft_vocab_size)
    own = Eagle3Config(**{**vars(parsed), "has_embedding": False})

    def told(epoch: int, loss: float) -> None:
        report(f"epoch {epoch + 1} of {options.epochs}: loss {loss:.3f}")

    write_head(folder, config, train(texts, own, tokens, options, device, told), tokens, force)


def _written(
    model: Model, pieces: Sequence[Sequence[int]], new_tokens: int, temperature: float
) -> Iterator[Sequence[int]]:
    """The pieces, each with what the model writes behind it."""
    found = model.generate(
        [list(piece) for piece in pieces], max_new_tokens=new_tokens, temperature=temperature, seed=0
    )
    for piece, result in zip(pieces, found, strict=True):
        yield [*piece, *result.token_ids]


def measure_acceptance(
    path: Path,
    folder: Path,
    kinds: Sequence[Pieces],
    new_tokens: int,
    temperature: float,
    num_drafts: int,
    **options: Any,
) -> list[DraftCounts]:
    """What the head in ``folder`` brings behind the pieces that are held out; ``options`` are those of :func:`load`."""
    drafts = {"method": EAGLE3, "model": folder, "num_speculative_tokens": num_drafts, "adaptive": False}
    found = []
    with load(path, speculative=drafts, **options) as model:
        for kind in kinds:
            before = model.stats()
            for _ in _written(model, kind.held_out, new_tokens, temperature):
                pass
            after = model.stats()
            found.append(
                DraftCounts(
                    kind.kind,
                    after.drafts - before.drafts,
                    after.draft_tokens - before.draft_tokens,
                    after.accepted_tokens - before.accepted_tokens,
                )
            )
    return found
