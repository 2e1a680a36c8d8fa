"""Training an EAGLE-3 head: each step computes what the engine's head does, and a head learns what can be learned."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner

import bminf_lite
from bminf_lite.backend.cpu import CpuBackend
from bminf_lite.backend.guesses import GuessPlace
from bminf_lite.backend.values import ForwardBatch
from bminf_lite.checkpoint.draft_head import open_head
from bminf_lite.cli import main
from bminf_lite.draft_training import (
    head_config,
    measure_acceptance,
    pieces_of,
    read_written,
    train_head,
    write_head,
)
from bminf_lite.engine.draft_model import HeadedNetwork
from bminf_lite.errors import CheckpointError, OutOfMemory, UsageError
from bminf_lite.evaluation.corpus import read_prompts
from bminf_lite.layers.cache import KVCache
from bminf_lite.models import _eagle3 as eagle3
from bminf_lite.models._eagle3 import Eagle3Head
from bminf_lite.text.prompts import EncodedPrompt
from bminf_lite.torch import draft_training
from bminf_lite.torch.draft_head import Head
from bminf_lite.torch.draft_training import (
    ABSENT,
    NUM_LABELS,
    Batches,
    Progress,
    SoftCrossEntropy,
    TrainingOptions,
    TrainingTexts,
    draft_tokens,
    schedule,
    torch_device,
    train,
)

VOCAB, WIDTH, LAYERS = 50, 16, 3
CONFIG = {
    "model_type": "llama", "vocab_size": VOCAB, "hidden_size": WIDTH, "intermediate_size": 24, "num_hidden_layers": 1,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "draft_vocab_size": 30,
    "eagle_aux_hidden_state_layer_ids": [0, 1, 2],
}  # fmt: skip


class KnownStreams:
    """A model whose embeddings and residual streams are given, by position."""

    def __init__(self, embedded: np.ndarray, streams: np.ndarray):
        self.ops, self.embedded, self.streams = CpuBackend(), embedded, streams

    def embed(self, batch: ForwardBatch) -> np.ndarray:
        start = int(batch.context_lens[0])
        return np.array(self.embedded[start : start + len(batch.tokens)])

    def __call__(self, batch: ForwardBatch, cache: KVCache, all_logits: bool, observe: Any, observes_end: bool) -> None:
        start = int(batch.context_lens[0])
        for layer, stream in enumerate(self.streams):
            observe(layer, np.array(stream[start : start + len(batch.tokens)]))


@pytest.mark.parametrize("norm_before_residual", [False, True])
def test_each_step_is_a_guess_of_the_engine(norm_before_residual: bool) -> None:
    """The logits of step ``j`` at a token are those of guess ``j + 1`` of a chain that ends there."""
    config = replace(eagle3.parse(CONFIG | {"norm_before_residual": norm_before_residual}), has_embedding=False)
    rng, tokens = np.random.default_rng(1), 12
    embedded = rng.standard_normal((tokens, WIDTH)).astype(np.float32)
    streams = rng.standard_normal((LAYERS, tokens, WIDTH)).astype(np.float32)
    trained = Head(config, 3, stream_scales=torch.linspace(0.5, 3, LAYERS * WIDTH))
    with torch.no_grad():
        joined = torch.from_numpy(streams).movedim(0, 1).flatten(1)
        steps = trained(torch.from_numpy(embedded)[None], joined[None], 4)
    model = KnownStreams(embedded, streams)
    head = Eagle3Head(config, Tensors(trained.tensors()), model.ops)
    head.attach(LAYERS, model.embed)
    network = HeadedNetwork(model, 0, head)
    for known in (1, 2, 7):
        cache = KVCache.for_sequences(model.ops, config.cache_layout.with_drafts(4), 1, 16)
        network(ForwardBatch.packed(np.array, [[0] * known], [0], cache.tables(1, 16)), cache)
        features = None
        for step in range(4):
            batch = ForwardBatch.packed(np.array, [[0]], [known + step], cache.tables(1, 16))
            with pytest.MonkeyPatch.context() as patch:
                logits: list[np.ndarray] = []
                patch.setattr(head.ops, "guess", lambda x, *_, logits=logits: logits.append(np.array(x)))
                features = head.guess(GuessPlace(batch, None, None), cache, features)
            expected = steps[step][0, known + step].numpy()
            np.testing.assert_allclose(logits[0][0], expected, atol=1e-4)  # fp32 sums of at most 48 terms


class Tensors:
    """Tensors by name."""

    def __init__(self, tensors: dict[str, np.ndarray]):
        self.tensors = tensors

    def weight(self, name: str) -> np.ndarray:
        return self.tensors[name]

    vector = weight


def texts_of(rows: list[np.ndarray], labels: list[np.ndarray], table: np.ndarray, prompt: int = 1) -> TrainingTexts:
    """Texts whose streams are their embeddings, and whose labels are certain."""
    count = len(rows)
    found = TrainingTexts.empty([len(row) for row in rows], [prompt] * count, LAYERS * WIDTH, WIDTH, VOCAB)
    found.embeddings.copy_(torch.from_numpy(table))
    found.tokens.copy_(torch.from_numpy(np.concatenate(rows)))
    found.streams.copy_(found.embeddings[found.tokens].repeat(1, LAYERS))
    likely = torch.from_numpy(np.concatenate(labels)).to(torch.int32)[:, None]
    found.labels.copy_((likely + torch.arange(NUM_LABELS)) % VOCAB)
    found.probabilities.zero_()
    found.probabilities[:, 0] = 1
    return found


def test_a_head_learns_a_rule() -> None:
    """The next token is the one behind the last, so that embeddings suffice: most guesses become right."""
    table = np.random.default_rng(2).standard_normal((VOCAB, WIDTH)).astype(np.float32)
    config = replace(eagle3.parse(CONFIG | {"draft_vocab_size": VOCAB}), has_embedding=False)
    rng = np.random.default_rng(3)
    rows = [(np.arange(length) + rng.integers(VOCAB)) % VOCAB for length in rng.integers(15, 25, 16)]
    texts = texts_of(rows, [(row + 1) % VOCAB for row in rows], table)

    def told(options: TrainingOptions) -> list[Progress]:
        found: list[Progress] = []
        tensors = train(texts, config, np.arange(VOCAB), options, report=found.append)
        assert tensors.keys() == eagle3.spec(config).parameters.keys()
        return found

    found = told(TrainingOptions(epochs=12, batch=80, rate=1e-2, steps=2))
    assert found[-1].loss < found[0].loss / 2 and min(found[-1].right) > 0.5
    assert [one.tokens for one in found] == [len(texts.tokens)] * 12, "an epoch has every token once"
    few = TrainingOptions(epochs=2, batch=80, steps=2)
    assert [one.loss for one in told(few)] == [one.loss for one in told(few)], "the seed decides everything"
    assert len(told(replace(few, epochs=10**6, seconds=0.3))) < 10**4, "it ends when the time is over"


def test_what_is_learnt_lies_behind_prompts() -> None:
    """Guesses are made behind the first token of a completion and later ones, and their labels are the model's."""
    table = np.zeros((VOCAB, WIDTH), np.float32)
    table[:, 0] = np.arange(VOCAB)
    rows = [np.arange(8), np.arange(10, 22)]
    texts = texts_of(rows, [row + 1 for row in rows], table, prompt=3)
    assert texts.learnt.tolist() == [False] * 3 + [True] * 5 + [False] * 3 + [True] * 9
    number_of = torch.arange(VOCAB) - 2
    number_of[15] = ABSENT
    batches = Batches(texts, number_of, "cpu")
    found = batches.read(np.array([1, 0]), 2)
    assert found.embedded[..., 0].tolist() == [list(range(10, 22)), [*range(8), 0, 0, 0, 0]]
    assert found.streams[0, 5, ::WIDTH].tolist() == [15.0] * LAYERS
    first, second = ([divmod(i, 12) for i in own.tolist()] for own in found.guessed)
    assert first == [(0, i) for i in range(3, 12)] + [(1, i) for i in range(3, 8)]
    assert second == [(0, i) for i in range(4, 12)] + [(1, i) for i in range(4, 8)], "behind a guess"
    assert found.labels[1, 3:8, 0].tolist() == [2, 3, 4, 5, 6]
    assert found.weights[1, 3].tolist() == [1.0] + [0.0] * (NUM_LABELS - 1)
    assert not found.weights[0, 4].any() and found.labels[0, 4, 0] == 0, "a label that the head lacks is left out"


def test_each_text_is_in_one_batch() -> None:
    rng = np.random.default_rng(4)
    rows = [rng.integers(VOCAB, size=count) for count in rng.integers(2, 60, 100)]
    batches = Batches(texts_of(rows, rows, np.zeros((VOCAB, WIDTH), np.float32)), torch.arange(VOCAB), "cpu")
    found = batches.order(rng, 128)
    assert sorted(np.concatenate(found).tolist()) == list(range(100))
    longest = [max(len(rows[i]) for i in batch) * len(batch) for batch in found]
    assert max(longest) <= 128 and sum(longest) < 1.25 * sum(len(row) for row in rows), "little padding"


def test_the_loss_is_a_cross_entropy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its value and gradients are those of torch, whatever the number of rows at a time; fp64, so that sums agree."""
    torch.manual_seed(5)
    x = torch.randn(7, 6, dtype=torch.float64, requires_grad=True)
    matrix = torch.randn(9, 6, dtype=torch.float64, requires_grad=True)
    labels = torch.stack([torch.randperm(9)[:3] for _ in range(7)])
    weights = torch.rand(7, 3, dtype=torch.float64)
    weights /= weights.sum(1, keepdim=True)
    weights[4] = 0
    known = torch.arange(7) != 4
    shares = torch.zeros(7, 9, dtype=torch.float64).scatter(1, labels, weights)
    logits = x @ matrix.T
    expected = torch.nn.functional.cross_entropy(logits[known], shares[known])
    gradients = torch.autograd.grad(3 * expected, [x, matrix])
    for rows in (1, 3, 100):
        monkeypatch.setattr(draft_training, "LOGITS", 9 * rows)
        loss, right = SoftCrossEntropy.apply(x, matrix, labels, weights)  # type: ignore[no-untyped-call]
        assert right.tolist() == [int((logits.argmax(1) == labels[:, 0])[known].sum()), 6]
        torch.testing.assert_close(loss.double(), expected, rtol=1e-6, atol=0)  # logits are summed in fp32
        for own, other in zip(torch.autograd.grad(3 * loss, [x, matrix]), gradients, strict=True):
            torch.testing.assert_close(own, other, rtol=1e-5, atol=1e-6)


def test_no_guess_at_all_costs_nothing() -> None:
    x, matrix = torch.zeros(0, 6, requires_grad=True), torch.ones(9, 6, requires_grad=True)
    loss, right = SoftCrossEntropy.apply(  # type: ignore[no-untyped-call]
        x, matrix, torch.zeros(0, 3, dtype=torch.int64), torch.zeros(0, 3)
    )
    loss.backward()
    assert loss == 0 and right.tolist() == [0, 0] and not matrix.grad.any()  # type: ignore[union-attr]


def test_the_rate_grows_and_falls() -> None:
    rates = [schedule(i / 1000) for i in range(1001)]
    top = int(np.argmax(rates))
    assert rates[0] < 0.01 and max(rates) == pytest.approx(1, abs=0.03) and abs(rates[-1]) < 1e-3
    assert rates[: top + 1] == sorted(rates[: top + 1]) and rates[top:] == sorted(rates[top:], reverse=True)


def test_where_torch_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert [torch_device(name) for name in ("auto", "cuda", "cuda:1", "cpu")] == ["cuda", "cuda", "cuda:1", "cpu"]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert torch_device("auto") == "cpu"


def test_draft_tokens_are_the_most_frequent() -> None:
    assert draft_tokens(np.array([7, 7, 3, 9, 3, 1]), 2).tolist() == [3, 7]
    assert draft_tokens(np.array([7, 7, 3]), 4).tolist() == [0, 1, 3, 7]


DEMO = Path(bminf_lite.__file__).parent / "demo_model"


def test_what_a_model_computes_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts of several batches: labels and probabilities are those of the model's logits, streams those of its layers.

    Memory that is too small for a batch halves it.
    """
    config = replace(eagle3.parse(head_config(DEMO, 64, None)), has_embedding=False)
    monkeypatch.setattr(bminf_lite.draft_training, "READ_LOGITS", 2048 * 40)
    with bminf_lite.load(DEMO, device="cpu", speculative="none") as model:
        rng = np.random.default_rng(6)
        written = [(2, rng.integers(2048, size=count).tolist()) for count in (9, 30, 1, 12, 20)]
        network, seen = model.network, list[int]()
        real = type(network).__call__

        def watched(self: Any, batch: ForwardBatch, *rest: Any) -> Any:
            if batch.batch_size > 1:
                raise OutOfMemory("too much")
            seen.append(len(batch.tokens))
            return real(self, batch, *rest)

        monkeypatch.setattr(type(network), "__call__", watched)
        found = read_written(model, written, config, is_rotated=False)
        monkeypatch.undo()
        assert seen == [9, 12, 20, 30] and np.diff(found.starts).tolist() == seen, "a text of one token has no guess"
        for start, tokens in zip(
            found.starts[:-1], sorted((own for _, own in written if len(own) > 1), key=len), strict=True
        ):
            some = slice(start, start + len(tokens))
            assert found.tokens[some].tolist() == tokens
            logits = torch.from_numpy(model.logits(tokens))
            largest, labels = logits.softmax(1).topk(NUM_LABELS)
            # int8 codes may move by one, as fp32 sums of another number of rows differ in the last bits
            torch.testing.assert_close(found.probabilities[some].float(), largest, rtol=0, atol=0.02)
            assert (found.labels[some][:, 0] == labels[:, 0]).float().mean() > 0.8
        assert not found.embeddings.isnan().any() and bool(found.embeddings[tokens].any(1).all())


@pytest.mark.gpu
def test_a_gpu_reads_what_the_cpu_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts of several lengths in one batch. The emulated GPU's arrays have no DLPack: copies take its place."""
    real = torch.utils.dlpack.from_dlpack
    monkeypatch.setattr(
        torch.utils.dlpack, "from_dlpack", lambda x: torch.from_numpy(x.get()) if is_emulated(x) else real(x)
    )
    config = replace(eagle3.parse(head_config(DEMO, 64, None)), has_embedding=False)
    rng = np.random.default_rng(6)
    written = [(2, rng.integers(2048, size=count).tolist()) for count in (9, 30, 12, 20)]
    found = []
    for device in ("cpu", "cuda"):
        with bminf_lite.load(DEMO, device=device, speculative="none") as model:
            found.append(read_written(model, written, config, is_rotated=False))
    cpu, gpu = found
    assert torch.equal(cpu.tokens, gpu.tokens) and torch.equal(cpu.embeddings, gpu.embeddings)
    # activations are fp16 on a GPU, and int8 codes of them may move by one
    spread = (cpu.streams - gpu.streams).float().square().mean() / cpu.streams.float().square().mean()
    assert spread < 1e-3
    torch.testing.assert_close(gpu.probabilities[:, 0], cpu.probabilities[:, 0], rtol=0, atol=0.1)
    assert (gpu.labels[:, 0] == cpu.labels[:, 0]).float().mean() > 0.8


def is_emulated(x: Any) -> bool:
    return type(x).__module__.startswith("fake_gpu")


def test_prompts_of_a_file(tmp_path: Path) -> None:
    """Conversations are prompts as a whole, and texts are cut into pieces."""
    path = tmp_path / "chat.jsonl"
    lines = [{"messages": [{"role": "user", "content": f"number {i}"}]} for i in range(30)]
    path.write_text("\n".join(json.dumps(line) for line in [*lines, {"text": "def f(x):\n    return x\n" * 20}]))
    documents = read_prompts(path)
    assert documents[0] == lines[0]["messages"] and isinstance(documents[-1], str)
    with bminf_lite.load(DEMO, device="cpu") as model:
        chats = pieces_of("chat", documents[:-1], ChatModel(model), 5, 20)  # type: ignore[arg-type]
        assert len(chats.trained) + len(chats.held_out) == 20 and chats.held_out[0] == [0, 8]
        pieces = pieces_of("code", documents[-1:], model, 5, 10)
        assert {len(x) for x in [*pieces.trained, *pieces.held_out]} == {5} and len(pieces.held_out) == 1
        with pytest.raises(UsageError, match="two pieces of 5000 tokens"):
            pieces_of("code", documents[-1:], model, 5000, 10)
    for wrong in ({"messages": []}, {"messages": "hi"}, {"prompt": "x"}):
        path.write_text(json.dumps(wrong))
        with pytest.raises(UsageError, match="line 1"):
            read_prompts(path)


class ChatModel:
    """A model whose conversations are two tokens: their number and the length of the text."""

    def __init__(self, model: bminf_lite.Model):
        self.tokenizer = model.tokenizer

    def encode(self, messages: list[dict[str, str]]) -> EncodedPrompt:
        text = messages[0]["content"]
        return EncodedPrompt([int(text.split()[1]), len(text)])


def test_a_head_is_written_in_the_public_form(tmp_path: Path) -> None:
    tokens = np.arange(0, 2 * 30, 2) % VOCAB
    tokens = np.sort(np.unique(tokens))[:20]
    config = CONFIG | {"draft_vocab_size": len(tokens)}
    parsed = replace(eagle3.parse(config), has_embedding=False)
    write_head(tmp_path / "head", config, Head(parsed, 1).tensors(), tokens)
    with open_head(tmp_path / "head") as head:
        assert not head.config.has_embedding and head.config.has_token_map
        assert "midlayer.hidden_norm.weight" in head.checkpoint._name_in_file.values()
    with pytest.raises(CheckpointError, match="already exists"):
        write_head(tmp_path / "head", config, Head(parsed, 1).tensors(), tokens)
    write_head(tmp_path / "head", config, Head(parsed, 2).tensors(), tokens, force=True)
    (tmp_path / "head" / "notes.txt").write_text("mine")
    with pytest.raises(CheckpointError, match=r"would delete them: notes\.txt"):
        write_head(tmp_path / "head", config, Head(parsed, 1).tensors(), tokens, force=True)


def test_the_layers_of_a_new_head() -> None:
    assert head_config(DEMO, 64, None)["eagle_aux_hidden_state_layer_ids"] == [1, 2, 3]
    assert head_config(DEMO, 64, [0, 2])["eagle_aux_hidden_state_layer_ids"] == [0, 2]
    assert head_config(DEMO, 10**6, None)["draft_vocab_size"] == 2048


@pytest.mark.slow
def test_a_head_learns_texts_by_heart(tmp_path: Path) -> None:
    """Behind the prompts that it was trained on, nearly all guesses of a check are right, in the engine: the greatest
    mean is 6 tokens a check. So features, positions and steps are the engine's.
    """
    place: dict[str, Any] = {"device": "cpu"}
    config = head_config(DEMO, 2048, None)
    with bminf_lite.load(DEMO, speculative="none", **place) as model:
        kind = pieces_of("text", read_prompts(DEMO / "heldout.txt"), model, 24, 12)
        options = TrainingOptions(epochs=30, batch=512, rate=3e-3)
        train_head(DEMO, tmp_path / "head", [kind], model, config, options, 40, [0.0], "cpu")
    known = replace(kind, held_out=kind.trained)
    [found] = measure_acceptance(DEMO, tmp_path / "head", [known], 40, [0.0], 5, **place)
    assert found.tokens_per_check > 4


@pytest.mark.slow
def test_the_command(tmp_path: Path) -> None:
    """A head of a few texts, which guesses some tokens; a file that it was trained on names its line."""
    arguments = [
        "train-draft", str(DEMO), str(tmp_path / "head"), str(DEMO / "heldout.txt"), "--device", "cpu", "--json",
        "--pieces", "20", "--new-tokens", "16", "--epochs", "1000", "--minutes", "0.05", "--batch", "128",
    ]  # fmt: skip
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout.splitlines()[-1])
    assert [one["temperature"] for one in found] == [0.0, 0.7]
    assert found[0]["kind"] == "heldout.txt" and found[0]["accepted"] > 0
    assert found[0]["tokens_per_check"] == 1 + found[0]["accepted"] / found[0]["checks"]


def test_without_torch_the_command_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delitem(sys.modules, "bminf_lite.torch.draft_training", raising=False)
    monkeypatch.setitem(sys.modules, "torch", None)
    result = CliRunner().invoke(main, ["train-draft", "MODEL", str(tmp_path / "head"), "x.txt"])
    assert result.exit_code == 2 and "pip install 'bminf-lite[torch]'" in result.output
