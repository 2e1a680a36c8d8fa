"""Vectors of tiny encoders equal transformers' (tests/goldens/encoders), whatever other texts are in the batch."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from tiny_models import GOLDENS, RandomWeights, digest, reading_architecture
from tolerances import assert_close

from bminf_lite import models
from bminf_lite.backend.base import Backend
from bminf_lite.backend.values import ForwardBatch
from bminf_lite.models._encoder import Encoder
from bminf_lite.models.spec import Role


@dataclass(frozen=True)
class Case:
    """A configuration, the texts in tokens, and transformers' results for all of them, fp32 ``[n, features]``."""

    name: str
    config: dict[str, Any]
    seed: int
    weights: str
    texts: tuple[np.ndarray, ...]
    results: np.ndarray

    def __str__(self) -> str:
        return self.name

    def network(self, backend: Backend, kind: str = "float") -> Encoder:
        """The model, ``float`` or in ``w8a8`` or ``w8a16``."""
        architecture = reading_architecture(self.config)
        weights = RandomWeights(self.config, self.seed, kind != "float", kind == "w8a8", architecture=architecture)
        network = architecture.Model(architecture.parse(self.config), weights, backend)
        assert isinstance(network, Encoder)
        return network


@functools.cache
def cases() -> tuple[Case, ...]:
    """The committed cases."""
    found = json.loads((GOLDENS / "encoders.json").read_text())
    with np.load(GOLDENS / "encoders.npz") as file:
        arrays = dict(file)
    return tuple(
        Case(
            name,
            case["config"],
            case["seed"],
            case["weights"],
            tuple(np.array(text, np.int32) for text in case["texts"]),
            arrays[name],
        )
        for name, case in found.items()
    )


def vectors(network: Encoder, *texts: np.ndarray) -> np.ndarray:
    """The vectors of all tokens of packed texts, or a classifier's numbers of texts or tokens."""
    ops = network.ops
    tables = network.tables([len(text) for text in texts])
    batch = ForwardBatch.packed(ops.array, texts, block_tables=tables)
    classifier = network.classifier
    with ops.step(batch):
        found = network(batch)
        if classifier is None or classifier.pooling is None:
            rows = np.array(ops.host(found), np.float32)
            return rows if classifier is None else classifier(rows)
        return classifier(np.array(ops.host(ops.pool(found, batch, classifier.pooling)), np.float32))


EACH = pytest.mark.parametrize("case", cases(), ids=str)
PLAIN = [case for case in cases() if case.name.endswith(": vectors")]
VECTORS = pytest.mark.parametrize("case", PLAIN, ids=str)


@EACH
def test_weights_are_those_that_the_results_were_made_with(case: Case):
    weights = RandomWeights(case.config, case.seed, architecture=reading_architecture(case.config))
    assert digest(weights.tensors) == case.weights


@EACH
def test_float_results_equal_those_of_transformers(backend: Backend, case: Case):
    found = vectors(case.network(backend), *case.texts)
    assert_close(found, case.results, "logits", backend.activation_dtype, np.abs(case.results).max())


@EACH
@pytest.mark.parametrize("kind", ["float", "w8a8"])
def test_a_text_has_the_same_vectors_in_any_batch(case: Case, kind: str):
    network = case.network(Backend(np.float32), kind)
    together = vectors(network, *case.texts)
    alone = np.concatenate([vectors(network, text) for text in case.texts])
    magnitude = np.abs(alone).max()
    assert_close(together, alone, "logits, w8a8" if kind == "w8a8" else "logits, same rounding", np.float32, magnitude)


@pytest.mark.gpu
@EACH
@pytest.mark.parametrize("kind", ["float", "w8a8", "w8a16"])
def test_the_gpu_gives_what_the_reference_gives(cuda_backend: Backend, case: Case, kind: str):
    found, expected = (vectors(case.network(ops, kind), *case.texts) for ops in (cuda_backend, Backend(np.float16)))
    name = "logits, w8a8" if kind == "w8a8" else "logits, same rounding"
    assert_close(found, expected, name, np.float16, np.abs(expected).max())


@pytest.mark.parametrize("name", ["bert: vectors", "nomic_bert: vectors"])
def test_the_second_text_of_a_pair_has_vectors_of_its_own(name: str):
    network = next(case for case in cases() if case.name == name).network(Backend(np.float32))
    tokens = np.arange(5, 15, dtype=np.int32)
    batch = ForwardBatch.packed(network.ops.array, [tokens])
    as_one, as_pair = (network(replace(batch, token_types=np.array([0] * 6 + [kind] * 4, np.int32))) for kind in (0, 1))
    assert np.array_equal(as_one, network(batch))
    assert np.abs(as_pair - as_one).max() > 0.1


@VECTORS
def test_matrices_are_quantized_and_heads_are_not(case: Case):
    architecture = reading_architecture(case.config)
    spec = architecture.spec(architecture.parse(case.config))
    roles = {parameter.role for parameter in spec.parameters.values()}
    assert roles == {Role.LINEAR, Role.EMBEDDING, Role.VECTOR}
    assert not architecture.parse(case.config).cache_layout.layers


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"hidden_size": 50}, "not a multiple"),
        ({"is_decoder": True}, "run as an encoder"),
        ({"position_embedding_type": "relative_key"}, "absolute is supported"),
        ({"architectures": ["BertForTokenClassification"], "id2label": {"1": "x"}}, "id2label"),
        ({"hidden_act": "mish"}, "hidden_act"),
    ],
)
def test_what_is_not_run_is_an_error(config: dict[str, Any], words: str):
    base = next(case for case in cases() if case.name == "bert: vectors").config
    with pytest.raises(models.CheckpointError, match=words):
        models.find(base).parse(base | config)


def test_roberta_leaves_rows_for_positions():
    base = next(case for case in cases() if case.name == "roberta: vectors").config
    with pytest.raises(models.CheckpointError, match="leaves no position"):
        models.find(base).parse(base | {"pad_token_id": 90})
