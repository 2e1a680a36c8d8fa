"""Comparing models: what equals what, where an error is put, and what is refused."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from importlib import resources
from pathlib import Path

import numpy as np
import pytest
import tiny_checkpoint
from counting_backend import CountingBackend
from safetensors.numpy import load_file, save_file
from tiny_models import Golden, RandomWeights, one_of_each_architecture

import bminf_lite
from bminf_lite import models
from bminf_lite.backend.quantization import OutlierColumns, quantize_weight
from bminf_lite.checkpoint.opened_model import open_model
from bminf_lite.checkpoint.recipe import Recipe, Scheme
from bminf_lite.errors import CheckpointError, UsageError
from bminf_lite.evaluation.blockwise import Batch, scheme_of
from bminf_lite.evaluation.compare import brace_join, check_pair, compare
from bminf_lite.evaluation.corpus import Window, read_texts, truncate_windows, windows_for
from bminf_lite.evaluation.divergence import DivergenceAccumulator, log_softmax
from bminf_lite.models.spec import Role, Spec

TEXT = ["The quick brown fox jumps over the lazy dog. " * 6, "Pack my box with five dozen liquor jugs."]


def windows(folder: Path) -> list[Window]:
    return windows_for(folder, TEXT, 64, 32)


def test_a_model_equals_itself(source: Path):
    seen: list[tuple[int, int, str]] = []
    found = compare(source, source, windows(source), "cpu", progress=lambda *args: seen.append(args))
    assert seen == [(0, 3, "layer 0"), (1, 3, "layer 1"), (2, 3, "output head"), (3, 3, "done")]
    assert (found.divergence.ratio, found.divergence.kl, found.divergence.agreement) == (1, 0, 1)
    fidelities = [f for x in (*found.blocks, *found.linears) for f in (x.own, x.accumulated)]
    assert all(math.isinf(f.snr_db) for f in fidelities)
    np.testing.assert_allclose([f.cosine for f in fidelities], 1)
    assert found.to_dict()["linears"][0]["own"]["snr_db"] is None
    json.dumps(found.to_dict(), allow_nan=False)


def test_an_int8_cache_is_the_model_s_alone(source: Path):
    """Products have no error of their own; what attention reads, and so all layers, have."""
    found = compare(source, source, windows(source), "cpu", int8_cache=True)
    assert 1e-9 < found.divergence.kl < 0.05
    assert all(math.isinf(linear.own.snr_db) for linear in found.linears)
    assert all(20 < block.own.snr_db < 80 for block in found.blocks)
    plain = compare(source, source, windows(source), "cpu")
    assert found.divergence.reference == plain.divergence.reference
    by_name = bminf_lite.compare(source, source, TEXT, window=64, stride=32, kv_cache="int8", device="cpu")
    assert by_name.divergence.kl == found.divergence.kl
    with pytest.raises(UsageError, match="kv_cache is 'int4', but must be fp16 or int8"):
        bminf_lite.compare(source, source, TEXT, kv_cache="int4", device="cpu")


def test_every_product_is_there_under_its_name(source: Path, int8: Path):
    found = compare(int8, source, windows(source), "cpu")
    names = [linear.name for linear in found.linears]
    block = ["self_attn.{q,k,v}_proj", "self_attn.o_proj", "mlp.{gate,up}_proj", "mlp.down_proj"]
    assert names == [*(f"model.layers.{i}.{name}" for i in range(2) for name in block), "lm_head"]
    assert {linear.scheme.split()[0] for linear in found.linears} == {"w8a8"}
    for linear in found.linears:
        assert 15 < linear.own.snr_db < 60 and 0.98 < linear.own.cosine < 1
        assert linear.input.largest == linear.input.channels[0][1] >= 1
        assert linear.input.spread >= 1


def test_one_quantized_product_is_found(source: Path, tmp_path: Path):
    """Everything else has no error of its own, and what comes behind it has an accumulated one."""
    name = "model.layers.1.self_attn.o_proj"
    recipe = Recipe("one", Scheme.FLOAT, Scheme.FLOAT, {f"{name}.weight": Scheme.W8A16})
    bminf_lite.migrate(source, tmp_path / "one", recipe)
    found = compare(tmp_path / "one", source, windows(source), "cpu")
    own = {linear.name: linear.own.snr_db for linear in found.linears}
    assert {key for key, value in own.items() if math.isfinite(value)} == {name}
    accumulated = [math.isfinite(linear.accumulated.snr_db) for linear in found.linears]
    place = [linear.name for linear in found.linears].index(name)
    assert accumulated == [i >= place for i in range(len(accumulated))]
    assert [math.isfinite(b.own.snr_db) for b in found.blocks] == [False, True]
    assert found.linears[place].scheme == "w8a16" and found.linears[0].scheme == "float"


def test_an_outlier_is_seen_in_the_profile(tmp_path: Path):
    """A norm's gain times 64 in one channel, divided out of the columns that read it: the same model, worse in int8."""
    source = tiny_checkpoint.write(tmp_path / "source")
    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.0.post_attention_layernorm.weight"][7] *= 64
    for x in ("gate", "up"):
        tensors[f"model.layers.0.mlp.{x}_proj.weight"][:, 7] /= 64
    harder = tiny_checkpoint.write(tmp_path / "harder")
    save_file(tensors, harder / "model.safetensors", {"format": "pt"})
    same = compare(harder, source, windows(source), "cpu")
    assert same.divergence.kl < 1e-9
    assert min(linear.own.snr_db for linear in same.linears) > 100  # factors that were moved are no error
    assert same.linears[2].input.largest > 1.5 * same.linears[2].reference_input.largest
    bminf_lite.migrate(harder, tmp_path / "int8")
    found = compare(tmp_path / "int8", source, windows(source), "cpu")
    assert min(found.linears, key=lambda linear: linear.own.snr_db).name == "model.layers.0.mlp.{gate,up}_proj"
    assert found.linears[2].input.channels[0][0] == 7


def test_batches_do_not_matter(source: Path, int8: Path, monkeypatch: pytest.MonkeyPatch):
    expected = compare(int8, source, windows(source), "cpu").divergence.to_dict()
    monkeypatch.setattr("bminf_lite.evaluation.compare.LOGIT_ROWS", 5)
    monkeypatch.setattr("bminf_lite.evaluation.compare.batch_windows", lambda w: [*map(one_window, w)])
    assert compare(int8, source, windows(source), "cpu").divergence.to_dict() == pytest.approx(expected, rel=1e-4)


def one_window(window: Window) -> Batch:
    return Batch((window,))


def test_schemes_are_named():
    weight = np.ones((4, 8), np.float32)
    outliers = OutlierColumns(np.array([1, 5], np.int32), np.zeros((4, 2), np.float16))
    int8 = quantize_weight(weight)
    found = [weight, int8, quantize_weight(weight, dynamic=False), replace(int8, outliers=outliers)]
    assert [scheme_of(w) for w in found] == ["float", "w8a8", "w8a16", "w8a8+2"]


@pytest.mark.slow
@pytest.mark.parametrize("golden", one_of_each_architecture(), ids=lambda golden: golden.config["model_type"])
def test_every_model_runs_layer_by_layer_as_it_does_at_once(golden: Golden, tmp_path: Path):
    """The encoder of an encoder-decoder reads the first half of a window, and the decoder continues with the second."""
    weights, spec = RandomWeights(golden.config, golden.seed), golden.spec
    source = golden.save(tmp_path / "source", weights.tensors)
    bminf_lite.migrate(source, tmp_path / "int8", "w8a8")
    random = np.random.default_rng(0)
    texts = [random.integers(0, golden.config["vocab_size"], n).astype(np.int32) for n in (13, 8, 2)]
    given = [Window(text, len(text) - 1) for text in texts]
    if golden.source is not None:
        start = models.find(golden.config).parse(golden.config).decoder_start_token_ids
        given = [window.for_encoder_decoder(start) for window in given]
    total = DivergenceAccumulator()
    with open_model(tmp_path / "int8") as opened:
        for window in given:
            logits = [golden.logits_with(w, window.tokens, window.source) for w in (weights, opened.weights())]
            total.add(*(part[-window.scored - 1 : -1] for part in logits), window.tokens[-window.scored :])
    found = compare(tmp_path / "int8", source, given, "cpu")
    for divergence in (found.divergence, compare(tmp_path / "int8", source, given, "cpu", layers=False).divergence):
        np.testing.assert_allclose(divergence.divergences, total.result().divergences, rtol=1e-3, atol=1e-7)
    assert [block.layer for block in found.blocks] == list(range(number_of_layers(spec)))
    assert all(5 < linear.own.snr_db < 70 for linear in found.linears)
    seen = sorted(name for linear in found.linears for name in linear.tensors)
    assert seen == sorted(name for name, p in spec.parameters.items() if p.role in (Role.LINEAR, Role.HEAD))


def number_of_layers(spec: Spec) -> int:
    """The number of prefixes with a number in the names, of both stacks."""
    found = (re.match(r".*?\.\d+\.", name) for name in spec.parameters)
    return len({match.group() for match in found if match})


def test_one_layer_of_each_is_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    source = tiny_checkpoint.write(tmp_path / "source", num_hidden_layers=6, intermediate_size=200)
    ops = CountingBackend()
    monkeypatch.setattr("bminf_lite.backend.create", lambda *args: ops)
    tensors = load_file(source / "model.safetensors")
    layer = sum(t.nbytes for name, t in tensors.items() if ".0." in name and t.ndim == 2)
    for layers in (True, False):
        ops.most = 0
        compare(source, source, windows(source)[:2], layers=layers)
        assert layer <= ops.most <= 2 * layer


def test_the_bundled_model_s_weak_spot_is_found(tmp_path: Path):
    """Its down projections have inputs of 50 times their rms, as those of large models have."""
    demo = Path(str(resources.files("bminf_lite.demo_model")))
    bminf_lite.migrate(demo, tmp_path / "int8", "w8a8")
    text = [read_texts(demo / "heldout.txt")[0][:1500]]
    found = compare(tmp_path / "int8", demo, truncate_windows(windows_for(demo, text, 128, 128), 250), "cpu")
    worst = sorted(found.linears, key=lambda linear: linear.own.snr_db)[:4]
    assert {linear.name.rpartition(".")[2] for linear in worst} == {"down_proj"}
    assert min(linear.input.largest for linear in worst) > 20
    assert abs(found.divergence.ratio - 1) < 0.02 and 0.001 < found.divergence.kl < 0.004
    assert found.divergence.agreement > 0.95


@pytest.mark.gpu
def test_a_gpu_finds_what_a_cpu_finds(source: Path, int8: Path):
    cpu, gpu = (compare(int8, source, windows(source), device) for device in ("cpu", "cuda"))
    np.testing.assert_allclose(gpu.divergence.kl, cpu.divergence.kl, rtol=0.3)
    np.testing.assert_allclose(gpu.divergence.reference.value, cpu.divergence.reference.value, rtol=1e-3)
    for a, b in zip(cpu.linears, gpu.linears, strict=True):
        assert (a.tensors, a.scheme) == (b.tensors, b.scheme)
        assert abs(a.own.snr_db - b.own.snr_db) < 1.5
        np.testing.assert_allclose(a.input.largest, b.input.largest, rtol=0.02)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"vocab_size": 300}, "vocabulary's size is 260, but the reference's is 300"),
        ({"hidden_size": 48}, "hidden_size is 32, but the reference's is 48"),
        ({"num_hidden_layers": 3, "hidden_size": 48}, "2 problems"),
        ({"model_type": "qwen2"}, "model_type is 'llama', but the reference's is 'qwen2'"),
    ],
)
def test_models_of_other_shapes_are_refused(source: Path, tmp_path: Path, config: dict, message: str):
    other = tiny_checkpoint.write(tmp_path / "other", **config)
    with pytest.raises(UsageError, match=message):
        check_pair(source, other, TEXT)


def test_another_vocabulary_of_the_same_size_and_no_checkpoint_are_refused(source: Path, tmp_path: Path):
    other = tiny_checkpoint.write(tmp_path / "other")
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    vocab["q"], vocab["r"] = vocab["r"], vocab["q"]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    check_pair(source, source, TEXT)
    with pytest.raises(UsageError, match="read the text differently"):
        check_pair(source, other, TEXT)
    with pytest.raises(CheckpointError, match="does not exist"):
        check_pair(source, tmp_path / "none", TEXT)


def test_divergence_by_its_definition():
    rng = np.random.default_rng(0)
    p, q = rng.standard_normal((2, 40, 9)).astype(np.float32) * 3
    targets = rng.integers(0, 9, 40)
    total = DivergenceAccumulator()
    for part in (slice(0, 13), slice(13, 40)):
        total.add(p[part], q[part], targets[part])
    found = total.result()
    a, b = (np.exp(x.astype(np.float64)) / np.exp(x.astype(np.float64)).sum(axis=1, keepdims=True) for x in (p, q))
    kl = (a * np.log(a / b)).sum(axis=1)
    np.testing.assert_allclose(found.divergences, kl, rtol=1e-9)
    np.testing.assert_allclose([found.kl, found.kl_median], [kl.mean(), np.median(kl)])
    assert found.agreement == (a.argmax(1) == b.argmax(1)).mean()
    rows = np.arange(40)
    np.testing.assert_allclose(found.ratio, np.exp(np.mean(np.log(a[rows, targets] / b[rows, targets]))))
    assert found.kl_p999 == pytest.approx(kl.max(), rel=0.05)


def test_logits_far_from_zero():
    logits = np.array([[3e4, 0, -3e4], [0, 0, 0]], np.float32)
    np.testing.assert_allclose(log_softmax(logits), [[0, -3e4, -6e4], np.log([1 / 3] * 3)], atol=1e-12)


def test_what_is_not_a_number_stays_visible():
    total = DivergenceAccumulator()
    logits = np.zeros((4, 5), np.float32)
    broken = logits.copy()
    broken[1] = np.nan
    total.add(logits, broken, np.zeros(4, int))
    found = total.result()
    assert math.isnan(found.kl) and math.isnan(found.ratio)
    assert found.to_dict()["kl"] is None


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["a.b"], "a.b"),
        (["m.0.q_proj", "m.0.k_proj"], "m.0.{q,k}_proj"),
        (["m.query", "m.key"], "m.{query,key}"),
        (["m.gate_up", "m.up"], "m.{gate_up,up}"),
    ],
)
def test_names_of_stacked_matrices(names: list[str], expected: str):
    assert brace_join(names) == expected
