"""Checkpoints on disk, through the public API, against transformers: source, migrated, and what others can open."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from parity_kit import greedy, relative_error, reopened
from tiny_models import DECODERS, FAMILIES, goldens, random_tokens
from tolerances import assert_close

import bminf_lite
from bminf_lite.checkpoint.recipe import Recipe, Scheme

torch = pytest.importorskip("torch", reason="parity needs torch")
transformers = pytest.importorskip("transformers", reason="parity needs transformers")
helpers = pytest.importorskip("compressed_tensors.quantization.utils.helpers", reason="parity needs compressed-tensors")
import make_goldens  # noqa: E402  (needs torch)

pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("ignore::DeprecationWarning")]

MIXED = Recipe("mixed", Scheme.W8A16, Scheme.FLOAT, {"*.0.mlp*": Scheme.FLOAT})
UNPACKED = ("falcon", "gpt_bigcode", "nanochat")
NAMES = (
    "grouped",
    "own head size",
    "biases, tied, window",
    "tied, biases, multi-query",
    "window, multi-query",
    "window from layer 1",
)
CASES = [golden for family in FAMILIES for golden in goldens(family) if golden.name in NAMES]
CASES += [next(goldens(family)) for family in DECODERS]
UNTIED = ("query scale, biases, untied", "two rotary bases, untied", "six heads, untied")
CASES += [golden for family in DECODERS for golden in goldens(family) if golden.name in UNTIED]


@pytest.fixture(params=CASES, ids=str)
def golden(request: pytest.FixtureRequest):
    return request.param


@pytest.fixture
def hf(golden):
    """transformers' model, without the end-of-text token of the class, which tiny vocabularies lack."""
    model = make_goldens.build(golden.config, golden.seed)
    model.config.eos_token_id = model.generation_config.eos_token_id = None
    return model


@pytest.fixture
def source(hf, tmp_path: Path) -> Path:
    hf.save_pretrained(tmp_path / "source")
    return tmp_path / "source"


def test_a_folder_with_a_vision_tower(tmp_path: Path) -> None:
    """Gemma 3 as it is published, with a vision tower."""
    (golden,) = (golden for golden in goldens("gemma3_text") if golden.name == "layer types")
    text = {key: value for key, value in golden.config.items() if key != "model_type"}
    tower = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.Gemma3Config(
        text_config=text,
        vision_config=tower | {"model_type": "siglip_vision_model", "image_size": 28, "patch_size": 14},
    )
    hf = transformers.Gemma3ForConditionalGeneration(config).eval()
    hf.model.language_model.load_state_dict(make_goldens.build(golden.config, golden.seed).model.state_dict())
    hf.save_pretrained(tmp_path / "source")
    for path in (tmp_path / "source", tmp_path / "out"):
        with bminf_lite.load(path, device="cpu") as model:
            logits = model.logits(golden.tokens)
        if path.name == "source":
            assert_close(logits, golden.logits, "logits", np.float32, np.abs(golden.logits).max())
            bminf_lite.migrate(path, tmp_path / "out", "w8a8")
    theirs = make_goldens.logits_of(reopened(tmp_path / "out"), golden.tokens)
    assert relative_error(logits, theirs) < 0.02


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_source_that_transformers_saved(golden, hf, tmp_path, dtype):
    """In one file or in shards, in the types that checkpoints have."""
    hf.to(getattr(torch, dtype)).save_pretrained(tmp_path / "source", max_shard_size="60KB")
    assert len(list((tmp_path / "source").glob("*.safetensors"))) > 1
    expected = make_goldens.logits_of(reopened(tmp_path / "source"), golden.tokens)
    with bminf_lite.load(tmp_path / "source", device="cpu") as model:
        assert_close(model.logits(golden.tokens), expected, "logits", np.float32, np.abs(expected).max())


def test_greedy_generation(golden, hf, source):
    """Token for token, an end-of-text token included."""
    prompts = [golden.tokens[:9].tolist(), golden.tokens[3:4].tolist(), golden.tokens[5:30].tolist()]
    hf.generation_config.eos_token_id = 7
    hf.generation_config.save_pretrained(source)
    with bminf_lite.load(source, device="cpu") as model:
        results = model.generate(prompts, max_new_tokens=24, temperature=0)
    for prompt, result in zip(prompts, results, strict=True):
        assert result.token_ids == greedy(hf, prompt)
        assert result.finish_reason == ("stop" if 7 in result.token_ids else "length")


@pytest.mark.parametrize("recipe", ["w8a16", MIXED], ids=["w8a16", "mixed"])
def test_a_migrated_w8a16_checkpoint_means_the_same_to_transformers(golden, source, tmp_path, recipe):
    """Weights alone are quantized, so nothing is left to definition: fp32 rounding is the only difference."""
    if golden.config["model_type"] in UNPACKED:
        pytest.skip("transformers' layers of this family read weights themselves, which packed ones do not have")
    bminf_lite.migrate(source, tmp_path / "out", recipe)
    expected = make_goldens.logits_of(reopened(tmp_path / "out"), golden.tokens)
    with bminf_lite.load(tmp_path / "out", device="cpu") as model:
        logits = model.logits(golden.tokens)
    if golden.spec.tied:  # quantized when loaded here, float there
        assert relative_error(logits, expected) < 0.02
    else:
        assert_close(logits, expected, "logits", np.float32, np.abs(expected).max())


def test_a_migrated_w8a8_checkpoint_differs_by_the_definition_of_activation_scales_only(
    golden, hf, source, tmp_path, monkeypatch
):
    """compressed-tensors takes ``max / 127.5`` for the scale, this project ``max / 127``.

    As they are, the two differ about as much as each differs from float. With this project's scales put into
    compressed-tensors, they agree to fp32 rounding until a code next to a tie falls either way, which later tokens see.
    """
    bminf_lite.migrate(source, tmp_path / "out", recipe="w8a8")
    opened = reopened(tmp_path / "out")
    theirs = make_goldens.logits_of(opened, golden.tokens)
    unquantized = make_goldens.logits_of(hf, golden.tokens)
    with bminf_lite.load(tmp_path / "out", device="cpu") as model:
        ours = model.logits(golden.tokens)
    # A tied head is quantized when loaded here, and float there.
    theirs_alone = relative_error(theirs, unquantized)
    assert relative_error(ours, theirs) < (2 if golden.spec.tied else 1.6) * theirs_alone
    assert relative_error(ours, unquantized) < (2 if golden.spec.tied else 1.3) * theirs_alone

    compute = helpers.calculate_qparams
    monkeypatch.setattr(helpers, "calculate_qparams", lambda *a, **k: scaled(compute(*a, **k), 127.5 / 127))
    theirs = make_goldens.logits_of(opened, golden.tokens)
    if golden.spec.tied:
        assert relative_error(ours, theirs) < 0.03
    else:
        worst = np.abs(ours - theirs).max(axis=1) / np.abs(theirs).max()
        assert np.quantile(worst, 0.1) < 2e-6 and worst.max() < 3e-2


def scaled(parameters: tuple[Any, Any], factor: float) -> tuple[Any, Any]:
    scale, zero_point = parameters
    return scale * factor, zero_point


def test_the_migrated_demo_model_in_transformers(tmp_path):
    """A trained model: both predict the held-out text equally well, and nearly always the same token."""
    source = Path(bminf_lite.__file__).parent / "demo_model"
    bminf_lite.migrate(source, tmp_path / "out", "w8a8")
    with bminf_lite.load(tmp_path / "out", device="cpu") as model:
        text = (source / "heldout.txt").read_text(encoding="utf-8")
        ids = np.array(model.tokenizer.encode(text[:3000]))
        ours = model.logits(ids)
    theirs = make_goldens.logits_of(reopened(tmp_path / "out"), ids)
    assert relative_error(ours, theirs) < 0.03
    assert (ours.argmax(axis=1) == theirs.argmax(axis=1)).mean() > 0.95
    assert loss(ours, ids) == pytest.approx(loss(theirs, ids), rel=3e-3)


def loss(logits: np.ndarray, ids: np.ndarray) -> float:
    """The mean negative log-likelihood of each token after those before it."""
    shifted = logits[:-1] - logits[:-1].max(axis=1, keepdims=True)
    chosen = shifted[np.arange(len(ids) - 1), ids[1:]] - np.log(np.exp(shifted).sum(axis=1))
    return -float(chosen.mean())


def test_the_text_model_of_a_multimodal_folder(tmp_path):
    """Mistral 3 with a picture tower: transformers' logits of text, and the migrated text model opens alone."""
    text = make_goldens.BASE | {"model_type": "mistral", "head_dim": 12, "tie_word_embeddings": False}
    vision = {
        "model_type": "pixtral",
        "hidden_size": 32,
        "intermediate_size": 40,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "head_dim": 16,
        "image_size": 28,
        "patch_size": 14,
    }
    config = transformers.Mistral3Config(
        text_config=text | {"eos_token_id": None}, vision_config=vision, tie_word_embeddings=False
    )
    torch.manual_seed(0)
    hf = transformers.Mistral3ForConditionalGeneration._from_config(config, dtype=torch.float32).eval()
    hf.save_pretrained(tmp_path / "source")
    tokens = random_tokens(8, 33, 90) % 9  # not the token of a picture
    expected = make_goldens.logits_of(hf, tokens)
    with bminf_lite.load(tmp_path / "source", device="cpu") as model:
        assert_close(model.logits(tokens), expected, "logits", np.float32, np.abs(expected).max())
    report = bminf_lite.migrate(tmp_path / "source", tmp_path / "out", "w8a16")
    assert report.left_out == ("multi_modal_projector", "vision_tower")
    theirs = make_goldens.logits_of(reopened(tmp_path / "out"), tokens)
    with bminf_lite.load(tmp_path / "out", device="cpu") as model:
        assert_close(model.logits(tokens), theirs, "logits", np.float32, np.abs(theirs).max())
