"""``embed``, ``rerank`` and ``classify`` of tiny random models, and the command ``embed``."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tiny_checkpoint
from click.testing import CliRunner
from embedding_kit import WORDS, cosine, write_encoder, write_modules
from safetensors.numpy import load_file, save_file

import bminf_lite
from bminf_lite.api import Model, load
from bminf_lite.backend.operations.rows import pooled
from bminf_lite.backend.values import Pooling
from bminf_lite.cli import main
from bminf_lite.cli.embed import POOLINGS
from bminf_lite.errors import CheckpointError, UsageError
from bminf_lite.evaluation.vectors import LabelComparison, compare_vectors, compared, rank_correlation
from bminf_lite.pooling import pooler
from bminf_lite.pooling.scores import cosines
from bminf_lite.pooling.yes_no import JUDGE
from bminf_lite.text.json_tokenizer import kept_lengths

TEXTS = ["a cat sits on the mat", "the dog runs", "now", "a red cat and a red dog sits on the mat and barks"]
DECODER = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "num_key_value_heads": 2}
PROMPTS = {"prompts": {"query": "query : ", "document": "passage : "}, "default_prompt_name": None}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_encoder(tmp_path_factory.mktemp("encoders") / "plain")


@pytest.fixture(scope="module")
def model(folder: Path) -> Iterator[Model]:
    with load(folder, device="cpu") as loaded:
        yield loaded


def token_vectors(model: Model, text: str) -> np.ndarray:
    """The vectors of a text's tokens."""
    assert model.pooler is not None
    tokens = model.pooler.texts.encode([text])
    [vectors] = next(model.pooler._vectors(tokens, list, ()))
    return vectors


def test_vectors_have_length_1_and_do_not_depend_on_the_batch(model: Model, monkeypatch: pytest.MonkeyPatch):
    together = model.embed(TEXTS)
    assert together.shape == (4, 32) and together.dtype == np.float32
    np.testing.assert_allclose(np.linalg.norm(together, axis=1), 1, rtol=1e-6)
    monkeypatch.setattr(pooler, "SLICE", 2)
    np.testing.assert_allclose(model.embed(TEXTS), together, atol=1e-6)
    alone = np.stack([model.embed(text) for text in TEXTS])
    np.testing.assert_allclose(alone, together, atol=1e-6)
    assert model.embed([]).shape == (0, 32)
    assert model.stats().texts >= 12 and "vectors of 32 elements" in repr(model)


@pytest.mark.parametrize(("batch_tokens", "ahead"), [(1, 2), (1 << 20, 8)])
def test_slices_are_made_ahead_for_some_batches(
    model: Model, batch_tokens: int, ahead: int, monkeypatch: pytest.MonkeyPatch
):
    assert model.pooler is not None
    submit, submitted = model.pooler.submit, []
    monkeypatch.setattr(pooler, "SLICE", 1)
    monkeypatch.setattr(model.pooler, "batch_tokens", batch_tokens)
    monkeypatch.setattr(model.pooler, "submit", lambda request: (submitted.append(request), submit(request)))
    vectors = model.embed_slices(TEXTS * 2)
    first = next(vectors)
    assert len(submitted) == ahead
    np.testing.assert_allclose(np.concatenate([first, *vectors]), model.embed(TEXTS * 2), atol=1e-6)


def test_token_ids_are_taken_as_they_are(model: Model):
    ids = model.tokenizer.encode(TEXTS[0])
    for given in (ids, [ids], np.array(ids)):
        np.testing.assert_allclose(np.ravel(model.embed(given)), model.embed(TEXTS[0]), atol=1e-6)


@pytest.mark.parametrize("pooling", Pooling)
def test_each_pooling_of_sentence_transformers(tmp_path: Path, pooling: Pooling):
    folder = write_encoder(tmp_path / "model")
    write_modules(folder, {"pooling_mode": pooling.value})
    with load(folder, device="cpu") as model:
        expected = pooled(token_vectors(model, TEXTS[0]), pooling)
        np.testing.assert_allclose(model.embed(TEXTS[0]), expected, rtol=1e-5, atol=1e-5)


def test_poolings_are_joined_and_linear_layers_follow(tmp_path: Path):
    folder = write_encoder(tmp_path / "model")
    flags = {"pooling_mode_max_tokens": True, "pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}
    tanh, identity = "torch.nn.modules.activation.Tanh", "torch.nn.modules.linear.Identity"
    dense = {"in_features": 64, "out_features": 40, "activation_function": tanh}
    last = {"in_features": 40, "out_features": 16, "bias": False, "activation_function": identity}
    write_modules(folder, flags, dense, last, {})
    with load(folder, device="cpu") as model:
        rows = token_vectors(model, TEXTS[1])
        x = np.concatenate([pooled(rows, Pooling.FIRST), pooled(rows, Pooling.MAX)])
        assert model.pooler is not None
        first, second = (step.linear for step in model.pooler.model.settings.steps)
        expected = np.tanh(x @ first.weight.T + first.bias) @ second.weight.T
        np.testing.assert_allclose(model.embed(TEXTS[1]), expected / np.linalg.norm(expected), atol=1e-5)
        short = model.embed(TEXTS[1], dimensions=8)
        np.testing.assert_allclose(short, expected[:8] / np.linalg.norm(expected[:8]), atol=1e-5)
        np.testing.assert_allclose(model.embed(TEXTS[1], normalize=False), expected, atol=1e-4)
        with pytest.raises(UsageError, match="1 to 16"):
            model.embed(TEXTS, dimensions=17)


def test_prompts_by_name_and_left_out_of_the_pooling(tmp_path: Path):
    folder = write_encoder(tmp_path / "model")
    write_modules(folder, {"pooling_mode_mean_tokens": True, "include_prompt": False}, **PROMPTS)
    with load(folder, device="cpu") as model:
        rows = token_vectors(model, "query : " + TEXTS[0])
        np.testing.assert_allclose(model.embed(TEXTS[0], prompt_name="query"), rows[3:].mean(axis=0), atol=1e-5)
        np.testing.assert_allclose(model.embed(TEXTS[0], prompt="query : "), rows[3:].mean(axis=0), atol=1e-5)
        with pytest.raises(UsageError, match="'query', 'document'"):
            model.embed(TEXTS, prompt_name="passage")
        with pytest.raises(UsageError, match="not both"):
            model.embed(TEXTS, prompt_name="query", prompt="a")


def test_long_texts_are_cut_or_refused(tmp_path: Path):
    folder = write_encoder(tmp_path / "model")
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 8, "do_lower_case": True}))
    long = "a cat sits on the mat and runs and barks now"
    with load(folder, device="cpu") as model:
        np.testing.assert_allclose(model.embed(long.upper()), model.embed("a cat sits on the mat"), atol=1e-6)
        with pytest.raises(UsageError, match=r"text 1: it has 13 tokens, but the model reads 8"):
            model.embed(["a cat", long], truncate=False)
    with load(write_encoder(tmp_path / "other"), device="cpu") as model:
        assert model.embed("cat " * 100).shape == (32,)


@pytest.mark.parametrize(("lengths", "room", "kept"), [([9, 3], 8, [5, 3]), ([4, 9, 9], 12, [4, 4, 4]), ([5], 9, [5])])
def test_the_longest_text_is_cut_first(lengths: list[int], room: int, kept: list[int]):
    assert kept_lengths(lengths, room) == kept


def test_one_text_alone_has_the_tokens_that_it_has_among_others(model: Model):
    """One call of the library frames a text that fits; others are cut and framed one by one."""
    tokenizer = model.tokenizer
    for text in (("a cat",), ("a cat", "the dog runs"), ("",), ("now " * 30,), ("now " * 30, "a dog")):
        for longest in (8, 24, 100):
            [alone] = tokenizer.encode_whole([text], longest)
            assert alone == tokenizer.encode_whole([text, ("a",)], longest)[0] and len(alone.token_ids) <= longest


def test_int8_vectors_are_close_to_float_ones(folder: Path, model: Model, tmp_path: Path):
    expected = model.embed(TEXTS)
    write_modules(other := write_encoder(tmp_path / "model"), {"pooling_mode_mean_tokens": True}, {})
    for recipe, least in ((None, 0.99), ("w8a16", 0.999)):
        report = bminf_lite.migrate(other, tmp_path / f"int8-{recipe}", recipe, portable=False)
        assert not report.skipped
        with load(tmp_path / f"int8-{recipe}", device="cpu") as migrated:
            assert cosine(migrated.embed(TEXTS), expected).min() > least
    assert (tmp_path / "int8-None" / "1_Pooling" / "config.json").is_file()
    bminf_lite.verify(tmp_path / "int8-None")


def test_a_calibration_for_an_encoder(folder: Path, model: Model, tmp_path: Path):
    ids = np.random.default_rng(0).integers(5, 20, 2000).tolist()
    bminf_lite.migrate(folder, tmp_path / "smooth", "w8a8-smooth", calibrate=ids, device="cpu")
    with load(tmp_path / "smooth", device="cpu") as migrated:
        assert cosine(migrated.embed(TEXTS), model.embed(TEXTS)).min() > 0.98


HEADS = {
    "vectors": {},
    "texts": {"architectures": ["BertForSequenceClassification"], "id2label": {"0": "no", "1": "yes"}},
    "tokens": {"architectures": ["BertForTokenClassification"], "id2label": {"0": "no", "1": "yes"}},
    "decoder": DECODER,
}


@pytest.mark.parametrize(
    "head", [pytest.param(head, marks=() if head == "vectors" else pytest.mark.slow) for head in HEADS]
)
def test_auto_takes_what_keeps_vectors_best(tmp_path: Path, head: str):
    folder = write_encoder(tmp_path / "model", **HEADS[head])
    if head in ("vectors", "decoder"):
        write_modules(folder, {"pooling_mode_mean_tokens": True, "pooling_mode_lasttoken": True}, {})
    words = np.random.default_rng(0).choice(WORDS, (120, 18))
    (tmp_path / "texts.jsonl").write_text("\n".join(json.dumps({"text": " ".join(line)}) for line in words))
    report = bminf_lite.migrate(
        folder, tmp_path / "auto", "auto", calibrate=tmp_path / "texts.jsonl", samples=8, device="cpu"
    )
    trade, cost = report.cost["trade"], report.cost
    assert trade["unit"] == "(1 - cosine)" and cost["vectors"] >= 15
    measured = [point["measured"] for point in trade["uniform"].values()]
    assert trade["assignment"]["measured"] <= min(measured) and len(measured) == 3
    assert 0 <= cost["divergence"] == pytest.approx(1 - cost["mean_cosine"]) and cost["least_cosine"] > 0.99
    if head == "vectors":
        with load(folder, device="cpu") as model, load(tmp_path / "auto", device="cpu") as migrated:
            assert cosine(migrated.embed(TEXTS), model.embed(TEXTS)).min() > 0.995


def test_a_bound_of_the_cosine_and_a_target(folder: Path, tmp_path: Path):
    ids = np.random.default_rng(0).integers(5, 20, 3000).tolist()
    options = {"calibrate": ids, "device": "cpu", "samples": 8}
    with pytest.raises(CheckpointError, match=r"\(1 - cosine\) from its source on 15 held-out texts, and 1e-09 are"):
        bminf_lite.migrate(folder, tmp_path / "int8", "w8a8-smooth", max_divergence=1e-9, **options)
    report = bminf_lite.migrate(folder, tmp_path / "target", "auto", target_divergence=1e-3, **options)
    assert report.cost["divergence"] <= 1e-3 and report.cost["trade"]["target"] == 1e-3
    with pytest.raises(CheckpointError, match=r"by at most 1e-12 \(1 - cosine\)"):
        bminf_lite.migrate(folder, tmp_path / "never", "auto", target_divergence=1e-12, **options)
    (tmp_path / "texts.txt").write_text("a cat sits on the mat and runs\n" * 200)
    arguments = ["migrate", str(folder), str(tmp_path / "cli"), "--recipe", "auto", "--samples", "8"]
    arguments += ["--calibrate", str(tmp_path / "texts.txt"), "--device", "cpu"]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 0 and "cost: cosine of" in result.output and "divergence" in result.output


def test_no_divergence_per_token_is_promised_for_vectors(folder: Path, tmp_path: Path):
    result = CliRunner().invoke(main, ["migrate", str(folder), str(tmp_path / "int8")])
    assert result.exit_code == 0 and "bminf-lite compare" in result.output and "nats" not in result.output


def test_no_cosine_is_beyond_one():
    rows = np.random.default_rng(0).standard_normal((1000, 7)).astype(np.float32)
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    assert (rows * rows).sum(axis=1).max() > 1 >= cosines(rows, rows).max()
    assert cosines(rows, -rows).min() >= -1 and np.isnan(cosines(rows, np.full_like(rows, np.nan))).all()


def test_a_reranker_reads_query_and_text_together(tmp_path: Path):
    changes = {"architectures": ["BertForSequenceClassification"], "id2label": {"0": "LABEL_0"}}
    with load(write_encoder(tmp_path / "model", **changes), device="cpu") as model:
        found = model.rerank("the dog", TEXTS)
        assert sorted(hit.index for hit in found) == [0, 1, 2, 3]
        assert [hit.score for hit in found] == sorted((hit.score for hit in found), reverse=True)
        assert all(0 < hit.score < 1 and hit.text == TEXTS[hit.index] for hit in found)
        assert model.rerank("the dog", TEXTS, top_n=2) == found[:2]
        assert model.rerank("a cat", TEXTS)[0].score != found[0].score
        with pytest.raises(UsageError, match="classifies"):
            model.embed(TEXTS)


def test_an_embedder_ranks_by_cosine(model: Model):
    found = model.rerank(TEXTS[1], TEXTS)
    assert found[0].index == 1 and found[0].score == pytest.approx(1, abs=1e-5)
    with pytest.raises(UsageError, match="list of texts"):
        model.rerank("a", "b")


def test_labels_of_texts_pairs_and_tokens(tmp_path: Path):
    names = {"0": "no", "1": "maybe", "2": "yes"}
    changes = {"architectures": ["BertForSequenceClassification"], "id2label": names}
    with load(write_encoder(tmp_path / "texts", **changes), device="cpu") as model:
        one = model.classify(TEXTS[0])
        assert one.label == max(one.scores, key=lambda name: one.scores[name]) and list(one.scores) == [*names.values()]
        assert sum(one.scores.values()) == pytest.approx(1, abs=1e-6)
        assert model.classify([TEXTS[0]])[0].scores == pytest.approx(one.scores)
        assert model.classify((TEXTS[0], TEXTS[1])).scores != pytest.approx(one.scores)
        with pytest.raises(UsageError, match="3 labels"):
            model.rerank("a", TEXTS)
        with pytest.raises(UsageError, match="not both"):
            model.classify([TEXTS[0], (TEXTS[0], TEXTS[1])])
    changes["architectures"] = ["BertForTokenClassification"]
    with load(write_encoder(tmp_path / "tokens", **changes), device="cpu") as model:
        found = model.classify(TEXTS[1])
        assert [token.text for token in found] == ["the", "dog", "runs"]
        assert [(token.start, token.end) for token in found] == [(0, 3), (4, 7), (8, 12)]
        assert {token.label for token in found} <= set(names.values())
        assert len(model.classify("cat " * 40)) == 22
        with pytest.raises(UsageError, match="text 1: it has 42 tokens, but the model reads 24"):
            model.classify(["a", "cat " * 40], truncate=False)
        with pytest.raises(UsageError, match="no head that classifies texts"):
            model.rerank("a", TEXTS)


def test_what_a_model_does_not_do_is_an_error(model: Model, tmp_path: Path):
    for call in (lambda: model.generate("a"), lambda: model.logits([5, 6]), lambda: list(model.stream("a"))):
        with pytest.raises(UsageError, match="makes vectors of texts"):
            call()
    with pytest.raises(UsageError, match="no head"):
        model.classify(TEXTS)
    with pytest.raises(UsageError, match=r"2 problems|text 0"):
        model.embed(["\ud800", "a"])
    with pytest.raises(UsageError, match="give a text or a list of texts, not int"):
        model.embed(5)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="prompt_name must be text, but is list"):
        model.embed("a", prompt_name=[])  # type: ignore[arg-type]
    for texts, words in ((TEXTS[0], "not one text"), (iter(TEXTS), "not list_iterator")):
        with pytest.raises(UsageError, match=words):
            next(model.embed_slices(texts))  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="text 1: token 0 is 99"):
        model.embed(["a", [99]])
    write_modules(folder := write_encoder(tmp_path / "order"), {"pooling_mode": "mean"}, {})
    modules = json.loads((folder / "modules.json").read_text())
    (folder / "modules.json").write_text(json.dumps([modules[0], modules[2], modules[1]]))
    with pytest.raises(CheckpointError, match="Pooling is behind Normalize; modules are run in the order Transformer"):
        load(folder, device="cpu")
    write_modules(folder := write_encoder(tmp_path / "model"), {"pooling_mode": "median"})
    with pytest.raises(CheckpointError, match="the pooling is"):
        load(folder, device="cpu")
    (folder / "modules.json").write_text(json.dumps([{"type": "sentence_transformers.models.CNN", "path": ""}]))
    with pytest.raises(CheckpointError, match="CNN"):
        load(folder, device="cpu")


def test_a_short_queue_takes_a_long_list(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(pooler, "SLICE", 4)
    with load(folder, device="cpu", max_queue=1) as model:
        assert model.embed(TEXTS * 8).shape == (32, 32)


def test_a_prompt_may_be_empty(tmp_path: Path):
    folder = write_encoder(tmp_path / "model")
    prompts = {"query": "query : ", "document": "", "passage": "passage : "}
    write_modules(folder, {"pooling_mode_mean_tokens": True}, {}, prompts=prompts)
    with load(folder, device="cpu") as model:
        np.testing.assert_allclose(model.embed(TEXTS[0], prompt_name="document"), model.embed(TEXTS[0]), atol=1e-6)
        expected = model.embed(TEXTS, prompt_name="passage") @ model.embed("a", prompt_name="query")
        scores = {hit.index: hit.score for hit in model.rerank("a", TEXTS)}
        np.testing.assert_allclose([scores[i] for i in range(4)], expected, atol=1e-5)


def test_threads_share_a_model(model: Model):
    expected, found = model.embed(TEXTS), {}

    def embed(number: int) -> None:
        found[number] = model.embed(TEXTS)

    threads = [threading.Thread(target=embed, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(np.allclose(vectors, expected, atol=1e-6) for vectors in found.values()) and len(found) == 6


def test_the_command_writes_files(folder: Path, model: Model, tmp_path: Path):
    (tmp_path / "texts.txt").write_text("\n".join([*TEXTS, "", ""]))
    lines = (json.dumps({"id": f"n{i}", "text": text}) for i, text in enumerate(TEXTS))
    (tmp_path / "texts.jsonl").write_text("\n".join(lines))
    expected = model.embed(TEXTS)
    run = CliRunner().invoke

    def embed(source: str, out: str, *options: str) -> str:
        paths = str(folder), str(tmp_path / source), str(tmp_path / out)
        return run(main, ["embed", *paths, "--device", "cpu", *options]).output

    assert "4 vectors of 32 elements" in embed("texts.txt", "out.npy")
    np.testing.assert_allclose(np.load(tmp_path / "out.npy"), expected, atol=1e-6)
    assert "4 vectors of 8 elements" in embed("texts.jsonl", "out.jsonl", "--dimensions", "8", "--no-normalize")
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [row["id"] for row in rows] == ["n0", "n1", "n2", "n3"] and len(rows[0]["embedding"]) == 8
    assert "suffix must be one of .npy" in embed("texts.txt", "out.csv")
    assert "cannot be read" in embed("missing.txt", "out.npy")


def test_a_pooling_may_be_chosen(model: Model, tmp_path: Path):
    rows = token_vectors(model, TEXTS[0])
    for pooling in Pooling:
        found = model.embed(TEXTS[0], pooling=pooling.value, normalize=False)
        np.testing.assert_allclose(found, pooled(rows, pooling), rtol=1e-5, atol=1e-5)
    assert set(POOLINGS) == {pooling.value for pooling in Pooling}
    with pytest.raises(UsageError, match="pooling is 'last', but must be one of cls, max, mean"):
        model.embed(TEXTS, pooling="last")
    write_modules(folder := write_encoder(tmp_path / "model"), {"pooling_mode": ["cls", "max"]}, {})
    with load(folder, device="cpu") as joined:
        assert joined.embed([]).shape == (0, 64) and joined.embed([], pooling="cls").shape == (0, 32)
        np.testing.assert_allclose(joined.embed(TEXTS, pooling="cls"), model.embed(TEXTS, pooling="cls"), atol=1e-6)
    dense = {"in_features": 64, "out_features": 8}
    write_modules(folder := write_encoder(tmp_path / "dense"), {"pooling_mode": ["cls", "max"]}, dense)
    with load(folder, device="cpu") as joined, pytest.raises(UsageError, match="2 poolings together"):
        joined.embed(TEXTS, pooling="cls")


def test_the_command_writes_a_table(folder: Path, model: Model, tmp_path: Path):
    parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed")
    (tmp_path / "texts.jsonl").write_text(
        "\n".join(json.dumps({"id": f"n{i}", "text": t}) for i, t in enumerate(TEXTS))
    )
    paths = str(folder), str(tmp_path / "texts.jsonl"), str(tmp_path / "out.parquet")
    assert CliRunner().invoke(main, ["embed", *paths, "--device", "cpu"]).exit_code == 0
    columns = parquet.read_table(paths[2]).to_pydict()
    assert columns["id"] == ["n0", "n1", "n2", "n3"] and columns["text"] == TEXTS
    np.testing.assert_allclose(columns["embedding"], model.embed(TEXTS), atol=1e-6)


def test_a_batch_on_a_cpu_is_small_enough_to_be_interrupted(tmp_path: Path):
    """A batch under way ends before Ctrl-C does anything: one of 8,192 tokens takes MiniLM 14 s on a core."""
    with load(write_encoder(tmp_path / "model"), device="cpu") as model:
        assert model.engine_config.max_num_batched_tokens == 1024


def test_the_command_embeds_with_a_model_that_generates(tmp_path: Path):
    folder = write_encoder(tmp_path / "model", **DECODER)
    (tmp_path / "texts.txt").write_text("\n".join(TEXTS))
    with load(folder, device="cpu", embeddings=True) as model:
        expected = {pooling: model.embed(TEXTS, pooling=pooling) for pooling in (None, "mean")}
    paths = str(folder), str(tmp_path / "texts.txt"), str(tmp_path / "out.npy")
    for options in ([], ["--pooling", "mean"]):
        result = CliRunner().invoke(main, ["embed", *paths, "--device", "cpu", *options])
        assert result.exit_code == 0 and f"{folder} generates text; for a search" in result.stderr
        np.testing.assert_allclose(np.load(tmp_path / "out.npy"), expected["mean" if options else None], atol=1e-6)


def test_a_long_text_is_computed_in_pieces_beside_generation(tmp_path: Path):
    folder = write_encoder(tmp_path / "model", **DECODER, max_position_embeddings=512)
    long = " ".join(TEXTS * 20)
    with load(folder, device="cpu", embeddings=True) as model:
        expected, alone = model.embed([long, *TEXTS]), model.generate([5, 6, 7], max_new_tokens=40, ignore_eos=True)
        mean = model.embed(long, pooling="mean")
    with load(folder, device="cpu", embeddings=True, max_num_batched_tokens=32) as model:
        stream = model.stream([5, 6, 7], max_new_tokens=40, ignore_eos=True)
        pieces = [next(stream)]
        np.testing.assert_allclose(model.embed([long, *TEXTS]), expected, atol=1e-5)
        np.testing.assert_allclose(model.embed(long, pooling="mean"), mean, atol=1e-5)
        pieces += stream
        assert pieces[-1].result is not None and pieces[-1].result.token_ids == alone.token_ids
    write_modules(folder, {"pooling_mode_lasttoken": True}, {})
    with load(folder, device="cpu", max_num_batched_tokens=32) as model:
        assert model.pooler is not None and model.pooler.model.longest == 512
        np.testing.assert_allclose(model.embed([long, *TEXTS]), expected, atol=1e-5)


def test_a_model_that_generates_ranks_by_yes_and_no(tmp_path: Path):
    folder = tiny_checkpoint.write(tmp_path / "model", max_position_embeddings=1024)
    tokenizer = tiny_checkpoint.byte_tokenizer()
    tokenizer.add_tokens(["yes", "no"])
    tokenizer.save(str(folder / "tokenizer.json"))
    with load(folder, device="cpu") as model:
        found = model.rerank("the cat", TEXTS, instruction="find cats")
        assert sorted(hit.index for hit in found) == [0, 1, 2, 3]
        asked = f"<Instruct>: find cats\n<Query>: the cat\n<Document>: {found[0].text}"
        prompt = model.chat([{"role": "system", "content": JUDGE}, {"role": "user", "content": asked}])
        logits = model.logits(model.encode(prompt, add_special_tokens=False))[-1]
        yes, no = (logits[tokenizer.token_to_id(word)] for word in ("yes", "no"))
        assert found[0].score == pytest.approx(1 / (1 + np.exp(no - yes)), abs=1e-5)
        long = "a cat sits on the mat " * 60
        [cut] = model.rerank("the cat", [long])
        assert 0 < cut.score < 1 and cut.text == long
        with pytest.raises(UsageError, match="prompt is too long"):
            model.rerank("the cat", [long], truncate=False)
        with pytest.raises(UsageError, match="prompt is too long"):
            model.rerank(long, TEXTS)
        with pytest.raises(UsageError, match="load an embedding model"):
            model.embed(TEXTS)
    with (
        load(tiny_checkpoint.write(tmp_path / "other"), device="cpu") as model,
        pytest.raises(UsageError, match="no token for 'yes'"),
    ):
        model.rerank("the cat", TEXTS)


@pytest.mark.parametrize("prefix", [True, False])
def test_a_decoder_embeds_without_its_head(tmp_path: Path, prefix: bool):
    """As Qwen3-Embedding: the last token's vector, of files without the prefix ``model.`` and without a head."""
    config = {
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "tie_word_embeddings": False,
        "num_key_value_heads": 2,
    }
    folder = write_encoder(tmp_path / "plain", **config)
    tensors = load_file(folder / "model.safetensors")
    if not prefix:
        tensors = {name.removeprefix("model."): x for name, x in tensors.items() if name != "lm_head.weight"}
    other = tmp_path / "embedder"
    shutil.copytree(folder, other)
    save_file(tensors, other / "model.safetensors")
    write_modules(other, {"pooling_mode_lasttoken": True}, {}, **PROMPTS)
    with load(other, device="cpu") as model:
        found = model.embed(TEXTS)
        query = model.embed(TEXTS[0], prompt_name="query")
        rows = token_vectors(model, "query : " + TEXTS[0])
        np.testing.assert_allclose(query, rows[-1] / np.linalg.norm(rows[-1]), atol=1e-5)
        alone = np.stack([model.embed(text) for text in TEXTS])
        np.testing.assert_allclose(found, alone, atol=1e-5)
        with pytest.raises(UsageError, match="makes vectors"):
            model.generate("a")
    bminf_lite.migrate(other, tmp_path / "int8")
    with load(tmp_path / "int8", device="cpu") as model:
        assert cosine(model.embed(TEXTS), found).min() > 0.98
    with load(folder, device="cpu") as model:
        assert model.generate([5, 6], max_new_tokens=2).token_ids


def test_compare_gives_cosines_and_how_pairs_rank(folder: Path, tmp_path: Path):
    bminf_lite.migrate(folder, tmp_path / "int8")
    (tmp_path / "texts.txt").write_text("\n".join(TEXTS))
    arguments = ["compare", str(tmp_path / "int8"), str(folder), str(tmp_path / "texts.txt"), "--device", "cpu"]
    found = json.loads(CliRunner().invoke(main, [*arguments, "--json"]).output)
    assert found["texts"] == 4 and found["pairs"] == 6
    assert 0.99 < found["least_cosine"] <= found["mean_cosine"] < 1 and found["rank_correlation"] > 0.7
    assert "cosine of 4 texts' vectors" in CliRunner().invoke(main, arguments).output
    refused = CliRunner().invoke(main, [*arguments, "--tokens", "9"])
    assert "--tokens: for models that generate" in refused.output


def test_compare_of_classifiers(tmp_path: Path):
    changes = {"architectures": ["BertForSequenceClassification"], "id2label": {"0": "no", "1": "yes"}}
    folder = write_encoder(tmp_path / "model", **changes)
    bminf_lite.migrate(folder, tmp_path / "int8")
    found = compare_vectors(tmp_path / "int8", folder, TEXTS, device="cpu")
    assert isinstance(found, LabelComparison) and found.texts == 4
    assert found.largest_difference < 0.1 and "first label of 4 texts" in found.summary()
    with pytest.raises(UsageError, match="two at least"):
        compare_vectors(folder, folder, TEXTS[:1], device="cpu")


def test_rank_correlation():
    rng = np.random.default_rng(0)
    a = rng.standard_normal(50)
    assert rank_correlation(a, np.exp(a)) == pytest.approx(1)
    assert rank_correlation(a, -a) == pytest.approx(-1)
    assert rank_correlation(np.array([1, 2, 2, 3.0]), np.array([1, 3, 2, 4.0])) == pytest.approx(0.9486833)
    found = compared(rng.standard_normal((700, 4)), rng.standard_normal((700, 4)))
    assert abs(found.rank_correlation) < 0.1 and found.pairs > 190_000


def test_a_model_embeds_beside_generation(tmp_path: Path):
    """One decoder, one engine: the vector of a text's last token, while other requests generate."""
    config = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "num_key_value_heads": 2}
    folder = write_encoder(tmp_path / "model", **config, max_position_embeddings=64)
    other = tmp_path / "embedder"
    shutil.copytree(folder, other)
    write_modules(other, {"pooling_mode_lasttoken": True}, {})
    with load(other, device="cpu") as model:
        expected = model.embed(TEXTS)
    with load(folder, device="cpu", embeddings=True) as model:
        alone = model.generate([5, 6, 7], max_new_tokens=40, ignore_eos=True).token_ids
        stream = model.stream([5, 6, 7], max_new_tokens=40, ignore_eos=True)
        pieces = [next(stream)]
        np.testing.assert_allclose(model.embed(TEXTS), expected, atol=1e-5)
        pieces += stream
        assert pieces[-1].result is not None and pieces[-1].result.token_ids == alone
        assert model.stats().texts == len(TEXTS)
    with pytest.raises(UsageError, match="only a decoder on one GPU, without a draft model"):
        load(folder, device="cpu", embeddings=True, speculative={"model": str(folder), "num_speculative_tokens": 2})
