"""Adapters beside PEFT on the original float model: every architecture's names, options of PEFT, and every recipe."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import outliers
import pytest
from expert_adapter_files import as_modules, named, random_factors
from parity_kit import relative_error as error
from tiny_models import EVERY, MIXTURES, RENAMED, SCALED_INPUTS, Golden, goldens, random_tokens
from tolerances import assert_close

import bminf_lite
from bminf_lite import models
from bminf_lite.adapters import adapter_sites
from bminf_lite.backend.cpu import CpuBackend
from bminf_lite.backend.values import ForwardBatch
from bminf_lite.checkpoint.adapter_folder import module_tensor
from bminf_lite.checkpoint.adapter_merge import MergedFolder
from bminf_lite.checkpoint.opened_model import open_model
from bminf_lite.layers.cache import KVCache

torch = pytest.importorskip("torch", reason="parity needs torch")
transformers = pytest.importorskip("transformers", reason="parity needs transformers")
peft = pytest.importorskip("peft", reason="peft is not installed")
import make_goldens  # noqa: E402  (needs torch)

pytestmark = [
    pytest.mark.parity,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]
DEMO = Path(bminf_lite.__file__).parent / "demo_model"
LEFT_OUT = ("nemotron_h", "falcon_h1", "olmo_hybrid")
"""PEFT refuses Nemotron-H and Falcon-H1; transformers 5.23 writes OLMo hybrid's convolution in equal parts."""
CASES = [next(goldens(family)) for family in EVERY if family not in (*RENAMED, *LEFT_OUT)]
WITHOUT = {"granitemoehybrid": "mamba.out_proj", "mamba2": "mixer.out_proj"}
"""Matrices whose adapters PEFT refuses, by the end of their names: the output projection of Mamba 2."""


NAMES_OF_EXPERTS = (".gate_proj", ".up_proj", ".down_proj", ".w1", ".w2", ".w3")


def with_adapter(hf: Any, modules: list[str], folder: Path, **options: Any) -> Any:
    """The model with a random adapter of some modules, which is saved in ``folder``."""
    torch.manual_seed(1)
    kind = "SEQ_2_SEQ_LM" if hf.config.is_encoder_decoder else "CAUSAL_LM"
    pattern = rf"(.*\.)?({'|'.join(map(re.escape, modules))})"
    chosen = {"r": 4, "lora_alpha": 8, "init_lora_weights": False, **options}
    model = peft.get_peft_model(hf, peft.LoraConfig(target_modules=pattern, task_type=kind, **chosen)).eval()
    model.save_pretrained(folder)
    return model


def logits_of(model: Any, tokens: np.ndarray, source: np.ndarray | None = None) -> np.ndarray:
    ids = torch.from_numpy(np.asarray(tokens, np.int64))[None]
    with torch.no_grad():
        if source is None:
            return model(input_ids=ids).logits[0].float().numpy()
        read = torch.from_numpy(np.asarray(source, np.int64))[None]
        return model(input_ids=read, decoder_input_ids=ids).logits[0].float().numpy()


def adapted(golden: Golden, folder: Path, **options: Any) -> tuple[Any, Any]:
    """transformers' model in ``folder / "base"``, and with an adapter of each matrix that can have one but of experts.

    The adapter has the names that PEFT gives the matrices.
    """
    hf = make_goldens.build(golden.config, golden.seed)
    hf.save_pretrained(folder / "base")
    with open_model(folder / "base") as opened:
        experts = {name for fused in opened.spec.fused.values() for own in fused.experts for name in own}
        adaptable = adapter_sites(opened).names() - experts
        found = {module_tensor(name, opened.spec): name for name, _ in hf.named_modules()}
    modules = {tensor: name for tensor, name in found.items() if tensor in adaptable}
    assert adaptable - modules.keys() <= {"shared.weight"}, "a matrix has another name in PEFT"
    if golden.config["model_type"] in MIXTURES:  # PEFT takes these names for those of experts
        modules = {tensor: name for tensor, name in modules.items() if not name.endswith(NAMES_OF_EXPERTS)}
    if left := WITHOUT.get(golden.config["model_type"]):
        modules = {tensor: name for tensor, name in modules.items() if not name.endswith(left)}
    tied = {"lm_head.weight"} if hf.config.get_text_config().tie_word_embeddings else set()
    chosen = [name for tensor, name in modules.items() if tensor not in tied]
    return hf, with_adapter(hf, chosen, folder / "adapter", **options)


@pytest.mark.parametrize("golden", CASES, ids=str)
def test_every_architecture(golden: Golden, tmp_path: Path) -> None:
    hf, model = adapted(golden, tmp_path)
    tokens = random_tokens(7, 20, hf.config.vocab_size)
    source = random_tokens(8, 12, hf.config.vocab_size) if hf.config.is_encoder_decoder else None
    theirs = logits_of(model, tokens, source)
    with bminf_lite.load(tmp_path / "base", device="cpu", adapters={"a": tmp_path / "adapter"}) as mine:
        ours, plain = mine.logits(tokens, source=source, adapter="a"), mine.logits(tokens, source=source)
    assert error(plain, theirs) > 0.01, "the adapter changes little"
    if golden.config["model_type"] in MIXTURES:  # a token whose experts nearly tie
        assert np.median(np.abs(ours - theirs).max(axis=1)) < 1e-4 * np.abs(theirs).max()
    else:
        assert_close(ours, theirs, "logits", np.float32, np.abs(theirs).max())


def row_error(found: np.ndarray, expected: np.ndarray) -> float:
    """The median over tokens of the relative error: in a mixture a token whose experts nearly tie has a large one."""
    norms = np.linalg.norm(found - expected, axis=1) / np.linalg.norm(expected, axis=1)
    return float(np.median(norms))


@pytest.mark.parametrize("golden", CASES, ids=str)
def test_every_architecture_migrated(golden: Golden, tmp_path: Path) -> None:
    """With an adapter, an int8 model is as far from PEFT's float one as without, for every recipe.

    The measured ratios are up to 1.5; of mixtures, where int8 makes some tokens choose other experts, up to 2.1.
    """
    hf, model = adapted(golden, tmp_path, lora_alpha=2)
    tokens = random_tokens(7, 64, hf.config.vocab_size)
    source = random_tokens(8, 24, hf.config.vocab_size) if hf.config.is_encoder_decoder else None
    theirs = logits_of(model, tokens, source)
    with model.disable_adapter():
        base = logits_of(model, tokens, source)
    text = random_tokens(9, 1500, hf.config.vocab_size).tolist()
    for recipe in ("w8a8", "w8a8-rotate", "auto"):
        options = {"calibrate": text, "samples": 2, "device": "cpu"} if recipe == "auto" else {}
        bminf_lite.migrate(tmp_path / "base", tmp_path / recipe, recipe, **options)
        with bminf_lite.load(tmp_path / recipe, device="cpu", adapters={"a": tmp_path / "adapter"}) as mine:
            ours, plain = mine.logits(tokens, source=source, adapter="a"), mine.logits(tokens, source=source)
        loss, found, change = row_error(plain, base), row_error(ours, theirs), row_error(theirs, base)
        assert change > 4 * loss, "the adapter changes little"
        assert found < (3 if golden.config["model_type"] in MIXTURES else 1.6) * loss


@pytest.mark.parametrize(
    "options",
    [
        {"use_rslora": True},
        {"rank_pattern": {"q_proj": 7, r".*\.1\.mlp\.down_proj": 2}, "alpha_pattern": {"v_proj": 3, "up_proj": 40}},
        {"use_rslora": True, "rank_pattern": {"o_proj": 1}, "alpha_pattern": {"o_proj": 3}, "r": 16},
        {"init_lora_weights": "orthogonal"},
    ],
    ids=["rslora", "patterns", "patterns of rslora", "orthogonal"],
)
def test_options_of_peft(options: dict[str, Any], tmp_path: Path) -> None:
    hf = transformers.AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32)
    model = with_adapter(hf, ["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"], tmp_path / "adapter", **options)
    tokens = random_tokens(7, 20, hf.config.vocab_size)
    theirs = logits_of(model, tokens)
    with bminf_lite.load(DEMO, device="cpu", adapters={"a": tmp_path / "adapter"}) as mine:
        assert_close(mine.logits(tokens, adapter="a"), theirs, "logits", np.float32, np.abs(theirs).max())


@pytest.mark.parametrize("saved", [["lm_head"], ["embed_tokens"], ["lm_head", "embed_tokens"]], ids="+".join)
def test_saved_modules(saved: list[str], tmp_path: Path) -> None:
    """Of a model whose head is its table: each name has a copy of its own."""
    hf = transformers.AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32)
    model = peft.get_peft_model(hf, peft.LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=saved))
    torch.manual_seed(2)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "modules_to_save" in name:
                parameter += 0.2 * parameter.std() * torch.randn_like(parameter)
    model.eval().save_pretrained(tmp_path / "adapter")
    tokens = random_tokens(7, 20, hf.config.vocab_size)
    theirs = logits_of(model, tokens)
    with bminf_lite.load(DEMO, device="cpu", adapters={"a": tmp_path / "adapter"}) as mine:
        assert error(mine.logits(tokens), theirs) > 0.01
        assert_close(mine.logits(tokens, adapter="a"), theirs, "logits", np.float32, np.abs(theirs).max())


@pytest.mark.parametrize(
    "recipe", [None, 'linear = "w8a8"\nhead = "w8a8"\noffline_rotation = true\n'], ids=["float", "R1"]
)
def test_an_adapter_of_the_table_of_tokens(recipe: str | None, tmp_path: Path) -> None:
    hf = transformers.AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32)
    model = with_adapter(hf, ["embed_tokens", "q_proj"], tmp_path / "adapter", lora_alpha=1)
    tokens, folder = random_tokens(7, 20, hf.config.vocab_size), DEMO
    theirs = logits_of(model, tokens)
    if recipe is not None:
        (tmp_path / "recipe.toml").write_text(recipe)
        bminf_lite.migrate(DEMO, folder := tmp_path / "out", tmp_path / "recipe.toml")
    with bminf_lite.load(folder, device="cpu", adapters={"a": tmp_path / "adapter"}) as mine:
        assert error(mine.logits(tokens), theirs) > 0.05
        assert error(mine.logits(tokens, adapter="a"), theirs) < (1e-5 if recipe is None else 0.03)


def has_fused_experts(golden: Golden) -> bool:
    """Whether one parameter holds all experts in transformers."""
    architecture = models.find(golden.config)
    return bool(architecture.spec(architecture.parse(golden.config)).fused)


FUSED = list(filter(has_fused_experts, CASES))


def adapted_experts(golden: Golden, folder: Path, **options: Any) -> tuple[Any, Any]:
    """transformers' model in ``folder / "base"``, and with an adapter of all its experts in ``folder / "adapter"``."""
    hf = make_goldens.build(golden.config, golden.seed)
    hf.save_pretrained(folder / "base")
    names = {
        name.rpartition(".experts.")[2] for name, p in hf.named_parameters() if ".experts." in name and p.ndim == 3
    }
    assert len(names) == 2
    chosen = {"r": 2, "lora_alpha": 3, "alpha_pattern": {r".*\.down_proj": 5}, "init_lora_weights": False, **options}
    config = peft.LoraConfig(target_modules=[], target_parameters=sorted(names), **chosen)
    torch.manual_seed(1)
    model = peft.get_peft_model(hf, config).eval()
    model.save_pretrained(folder / "adapter")
    return hf, model


@pytest.mark.parametrize("golden", FUSED, ids=str)
def test_adapters_of_experts(golden: Golden, tmp_path: Path) -> None:
    hf, model = adapted_experts(golden, tmp_path)
    tokens = random_tokens(7, 20, hf.config.vocab_size)
    theirs = logits_of(model, tokens)
    with bminf_lite.load(tmp_path / "base", device="cpu", adapters={"a": tmp_path / "adapter"}) as mine:
        ours, plain = mine.logits(tokens, adapter="a"), mine.logits(tokens)
    assert error(plain, theirs) > 0.003, "the adapter changes little"
    assert np.median(np.abs(ours - theirs).max(axis=1)) < 1e-4 * np.abs(theirs).max()


@pytest.mark.parametrize("golden", FUSED, ids=str)
def test_adapters_of_experts_migrated(golden: Golden, tmp_path: Path) -> None:
    """As far from PEFT on the float model as int8 is from that model without the adapter.

    The measured ratios are up to 1.5, of Mellum 1.1 to 2.2 by the tokens, some of which choose other experts; of Llama
    4, of whose experts a token has one, up to 3.0.
    """
    hf, model = adapted_experts(golden, tmp_path, lora_alpha=12, alpha_pattern={})
    tokens = random_tokens(7, 64, hf.config.vocab_size)
    theirs = logits_of(model, tokens)
    with model.disable_adapter():
        base = logits_of(model, tokens)
    for recipe in ("w8a8", "w8a8-rotate-all", "w8a16"):
        bminf_lite.migrate(tmp_path / "base", tmp_path / recipe, recipe)
        with bminf_lite.load(tmp_path / recipe, device="cpu", adapters={"a": tmp_path / "adapter"}) as mine:
            ours, plain = mine.logits(tokens, adapter="a"), mine.logits(tokens)
        loss, found, change = row_error(plain, base), row_error(ours, theirs), row_error(theirs, base)
        assert change > 4 * loss, "the adapter changes little"
        assert found < (4 if golden.config["model_type"] in SCALED_INPUTS else 3) * loss


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "olmoe", "glm4_moe", "deepseek_v3", "minimax_m2"])
def test_adapters_of_experts_that_are_modules(family: str, tmp_path: Path) -> None:
    """As trained with transformers 4. PEFT makes one parameter's factors of them, of rank 2 r for gate and up."""
    golden = named(family)
    hf = make_goldens.build(golden.config, golden.seed)
    hf.save_pretrained(tmp_path / "base")
    factors = random_factors(golden)
    modules = sorted({name.split(".")[-2] for name in factors})
    config = {"target_modules": modules, "task_type": "CAUSAL_LM", "inference_mode": True}
    as_modules(factors, tmp_path / "adapter", **config)
    model = peft.PeftModel.from_pretrained(hf, str(tmp_path / "adapter")).eval()
    tokens = random_tokens(7, 20, hf.config.vocab_size)
    theirs = logits_of(model, tokens)
    with bminf_lite.load(tmp_path / "base", device="cpu", adapters={"a": tmp_path / "adapter"}) as mine:
        ours, plain = mine.logits(tokens, adapter="a"), mine.logits(tokens)
    assert error(plain, theirs) > 0.1, "the adapter changes little"
    assert np.median(np.abs(ours - theirs).max(axis=1)) < 1e-5 * np.abs(theirs).max()


@pytest.mark.parametrize("golden", FUSED, ids=str)
def test_adapters_of_experts_are_merged(golden: Golden, tmp_path: Path) -> None:
    hf, model = adapted_experts(golden, tmp_path)
    tokens = random_tokens(7, 20, hf.config.vocab_size)
    theirs = logits_of(model, tokens)
    with bminf_lite.load(tmp_path / "base", device="cpu") as mine:
        plain = mine.logits(tokens)
    with open_model(MergedFolder(tmp_path / "base", tmp_path / "adapter")) as merged:
        network = merged.architecture.Model(merged.config, merged.weights(), CpuBackend())
        cache = KVCache.for_sequences(network.ops, merged.config.cache_layout, 1, 128)
        batch = ForwardBatch.packed(network.ops.array, [tokens], block_tables=cache.tables(1, 128))
        ours = np.array(network(batch, cache, True))
    assert error(plain, theirs) > 0.003, "the adapter changes little"
    assert np.median(np.abs(ours - theirs).max(axis=1)) < 1e-4 * np.abs(theirs).max()


RECIPES = {
    "rotated in the weights": 'linear = "w8a8"\nhead = "w8a8"\noffline_rotation = true\n',
    "rotated and smoothed": (
        'linear = "w8a8"\nhead = "w8a8"\noffline_rotation = true\n[calibration]\nsmoothing = true\n'
    ),
    "outlier columns": 'linear = "w8a8"\nhead = "w8a8"\n[calibration]\nmax_error = 0.005\noutlier_columns = 2\n',
}


@pytest.mark.parametrize(
    ("recipe", "put_in"),
    [
        ("w8a8", None),
        ("w8a16", None),
        ("w8a8-rotate", None),
        ("w8a8-smooth", outliers.in_norms),
        ("w8a8-smooth", outliers.in_values),
        ("w8a8-smooth", outliers.in_neurons),
        ("auto", outliers.in_norms),
        ("rotated in the weights", None),
        ("rotated and smoothed", outliers.in_neurons),
        ("outlier columns", outliers.in_norms),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_a_migrated_model_is_as_close_as_without_the_adapter(
    tmp_path: Path, recipe: str, put_in: Callable[[outliers.Tensors, dict], None] | None
) -> None:
    """The adapter was trained on the original; what int8 costs is what it costs the original alone."""
    source = DEMO if put_in is None else outliers.write(DEMO, tmp_path / "source", put_in)
    chosen = recipe
    if recipe in RECIPES:
        chosen = str(tmp_path / "recipe.toml")
        Path(chosen).write_text(RECIPES[recipe])
    needs_text = recipe in ("w8a8-smooth", "auto") or "calibration" in RECIPES.get(recipe, "")
    calibration = {"calibrate": DEMO / "heldout.txt", "samples": 4, "device": "cpu"} if needs_text else {}
    bminf_lite.migrate(source, tmp_path / "out", chosen, **calibration)
    hf = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    with open_model(source) as opened:
        tied = set(opened.spec.tied)
    with bminf_lite.load(source, device="cpu") as before:
        text = (DEMO / "heldout.txt").read_text(encoding="utf-8")[:1500]
        ids = np.array(before.tokenizer.encode(text))
    base = logits_of(hf, ids)
    alpha = 0.25 if put_in is outliers.in_norms else 1  # random factors multiply the outliers, which trained ones learn
    modules = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    model = with_adapter(hf, modules if tied else [*modules, "lm_head"], tmp_path / "adapter", lora_alpha=alpha)
    theirs = logits_of(model, ids)
    with bminf_lite.load(tmp_path / "out", device="cpu", adapters={"a": tmp_path / "adapter"}) as mine:
        ours, plain = mine.logits(ids, adapter="a"), mine.logits(ids)
    loss = error(plain, base)
    assert loss < 0.03
    assert error(theirs, base) > 4 * loss, "the adapter changes little"
    assert error(ours, theirs) < 1.6 * loss
