"""Models with int8 layers: their state, transformers, peft, folders, and streaming."""

from __future__ import annotations

import copy
import io
import pickle
from dataclasses import replace
from importlib import resources
from pathlib import Path

import numpy as np
import pytest
import tiny_checkpoint
import torch
from tiny_models import EVERY, Golden, RandomWeights, goldens
from torch import nn
from torch.nn.utils import prune
from torch_kit import assert_near, random

import bminf_lite
from bminf_lite.backend.quantization import quantize_weight as quantize_in_numpy
from bminf_lite.backend.rotation import rotated
from bminf_lite.checkpoint.migrate import migrate
from bminf_lite.checkpoint.reader import open_checkpoint
from bminf_lite.checkpoint.recipe import Recipe, Scheme, load_recipe
from bminf_lite.checkpoint.verify import verify
from bminf_lite.errors import BminfError, CheckpointError, UsageError
from bminf_lite.migration.budget import offline_part
from bminf_lite.torch import Int8Linear, from_migrated, ops, save_pretrained, streaming, wrap
from bminf_lite.torch.experts import ExpertStack
from bminf_lite.torch.linear import quantize_weight

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
TOKENS = torch.tensor([[256, 5, 77, 31, 200, 9]])
GPT2 = {
    "architectures": ["GPT2LMHeadModel"],
    "model_type": "gpt2",
    "vocab_size": 260,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 64,
    "bos_token_id": 256,
    "eos_token_id": 257,
}
FALCON = {
    "architectures": ["FalconForCausalLM"],
    "model_type": "falcon",
    "vocab_size": 260,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "bos_token_id": 256,
    "eos_token_id": 257,
}
GPT_NEOX = {
    "architectures": ["GPTNeoXForCausalLM"],
    "model_type": "gpt_neox",
    "vocab_size": 260,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "bos_token_id": 256,
    "eos_token_id": 257,
}
T5 = {
    "architectures": ["T5ForConditionalGeneration"],
    "model_type": "t5",
    "vocab_size": 260,
    "d_model": 32,
    "d_ff": 48,
    "d_kv": 8,
    "num_heads": 4,
    "num_layers": 2,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "decoder_start_token_id": 0,
}
TIED = tiny_checkpoint.CONFIG | {"tie_word_embeddings": True}


def written(folder: Path, config: dict) -> Path:
    """A checkpoint of random values."""
    return tiny_checkpoint.save(folder, config, tiny_checkpoint.tensors(config))


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return tiny_checkpoint.write(tmp_path / "source")


def opened(folder: Path) -> nn.Module:
    """The float model, in fp32."""
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def logits(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(TOKENS).logits


def small(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, 16, bias=False)).to(dtype)


class Blocks(nn.Module):
    """A stack of layers, as a decoder has."""

    def __init__(self, count: int = 5) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(64, 64)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(64, 96), nn.Tanh(), nn.Linear(96, 64)) for _ in range(count)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = x + layer(x)
        return x


def rotate(model: nn.Module, block: int = 16) -> nn.Module:
    """The same model, whose int8 layers rotate their inputs."""
    for layer in model.modules():
        if isinstance(layer, Int8Linear):
            layer.codes, layer.scale = quantize_weight(ops.rotated(layer.dequantize(), block))
            layer.rotation = block
    return model


# -- the layer ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("magnitude", [1.0, 1e-4])
def test_codes_and_scales_are_the_definition_s(dtype, magnitude):
    weight = (random(300, 40) * magnitude).to(dtype)
    weight[7] = 0
    codes, scale = quantize_weight(weight)
    expected = quantize_in_numpy(weight.float().numpy())
    assert np.array_equal(codes.numpy(), expected.codes)
    assert np.array_equal(scale.numpy(), expected.scale.astype(np.float32))


def test_a_nan_in_a_weight_is_refused():
    weight = random(4, 8)
    weight[2, 3] = torch.nan
    with pytest.raises(ValueError, match="row 2"):
        quantize_weight(weight)
    model = small()
    nn.init.constant_(model[2].weight[5], torch.inf)
    with pytest.raises(ValueError, match=r"2: row 5 of a weight \[16, 48\]"):
        wrap(model)


@pytest.mark.parametrize("rotation", [1, 16])
def test_state_survives(rotation):
    model, x = rotate(wrap(small()), rotation), random(3, 32)
    expected = model(x)
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    buffer.seek(0)
    other = wrap(small().apply(lambda m: nn.init.normal_(m.weight) if isinstance(m, nn.Linear) else None))
    assert not torch.equal(other(x), expected)
    other.load_state_dict(torch.load(buffer))
    for copied in (other, copy.deepcopy(model), pickle.loads(pickle.dumps(model)), model.to("cpu")):
        assert torch.equal(copied(x), expected) and copied[0].rotation == rotation


def test_codes_are_not_loaded_without_their_rotation():
    plain, turned, x = wrap(small()), rotate(wrap(small())), random(3, 32)
    assert plain.state_dict().keys() < turned.state_dict().keys()
    expected = plain(x)
    state = plain.state_dict()
    turned.load_state_dict(state)
    assert torch.equal(turned(x), expected) and state.keys() == turned.state_dict().keys()
    state = rotate(wrap(small()), 16).state_dict()
    with pytest.raises(RuntimeError, match=r"0\.rotation is 64; it must be a power of two up to 256 that divides 32"):
        plain.load_state_dict(state | {"0.rotation": torch.tensor(64)})
    turned = rotate(wrap(small()))
    turned.load_state_dict({"0.bias": torch.zeros(48)}, strict=False)
    assert turned[0].rotation == 16


@pytest.mark.parametrize("rotation", [0, 3, 64, 512, 16.0])
def test_a_rotation_that_does_not_divide_is_refused(rotation):
    codes, scale = quantize_weight(random(8, 32))
    with pytest.raises(ValueError, match=rf"rotation is {rotation}; it must be a power of two"):
        Int8Linear(codes, scale, rotation=rotation)


@pytest.mark.parametrize("dynamic", [True, False])
def test_a_rotated_input_is_that_of_the_definition(dynamic):
    """In w8a8 it is not rounded before it is quantized; in w8a16 it is rounded to its type. Also under autocast."""
    layer = rotate(wrap(small(), "w8a8" if dynamic else "w8a16"))[0]
    assert f", {'w8a8' if dynamic else 'w8a16'}, rotation=16" in repr(layer)
    for dtype in (torch.float32, torch.bfloat16):
        x = random(5, 32).to(dtype)
        turned = torch.from_numpy(rotated(x.float().numpy(), 16))
        turned = turned if dynamic else turned.to(dtype)
        expected = ops.int8_linear(turned, layer.codes, layer.scale, layer.bias, dynamic=dynamic).to(dtype)
        assert torch.equal(layer(x), expected)
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            assert torch.equal(layer(x.float()), expected)
    assert layer.to("meta")(x.to("meta")).shape == (5, 48)


@pytest.mark.parametrize("dynamic", [True, False])
def test_a_rotated_input_has_the_gradient_of_the_dequantized_weight(dynamic):
    layer = rotate(wrap(small(), "w8a8" if dynamic else "w8a16"))[0]
    torch.testing.assert_close(layer.dequantize(), small()[0].weight.detach(), rtol=0, atol=3e-3)
    weight, dy = layer.dequantize().double(), random(5, 48)
    for dtype in (torch.float32, torch.bfloat16):
        x = random(5, 32, dtype=dtype).requires_grad_()
        layer(x).backward(dy.to(dtype))
        wide = dy.to(dtype).double()
        assert_near(x.grad, wide @ weight, wide.abs() @ weight.abs() + (dtype == torch.bfloat16) * 2**10)
    if not dynamic:
        assert torch.autograd.gradcheck(layer.double(), (random(3, 32, dtype=torch.float64).requires_grad_(),))


def test_conversions_leave_codes_and_scales_alone():
    model = wrap(small())
    before = [model[0].codes.clone(), model[0].scale.clone()]
    for convert in (nn.Module.half, nn.Module.bfloat16, nn.Module.double, nn.Module.float):
        convert(model)
        assert torch.equal(model[0].codes, before[0]) and torch.equal(model[0].scale, before[1])
    assert model.half()[0].bias.dtype == torch.float16
    assert model(random(2, 32, dtype=torch.float16)).dtype == torch.float16
    with torch.autocast("cpu", torch.bfloat16):
        assert model.float()(random(2, 32)).dtype == torch.bfloat16


def test_the_weight_s_values_are_refused():
    layer = wrap(small())[0]
    assert layer.weight.dtype == torch.int8 and layer.weight.shape == (48, 32) and layer.weight.device.type == "cpu"
    layer.weight.requires_grad = False
    assert not layer.weight.requires_grad_(False).requires_grad
    for use in (
        lambda w: w + 1,
        lambda w: w.data.add_(1),
        lambda w: w.data.clone(),
        lambda w: w.to(torch.float32),
        lambda w: w @ random(32, 2),
    ):
        with pytest.raises(UsageError, match="dequantize"):
            use(layer.weight)
    with pytest.raises(UsageError, match="skip="):
        layer(random(3, 32).to(layer.weight.dtype))
    torch.testing.assert_close(layer.dequantize(), small()[0].weight.detach(), rtol=0, atol=2e-3)


# -- wrap --------------------------------------------------------------------------------------------------------------


def test_wrapping_is_in_place_and_by_name():
    model = small()
    bias = model[0].bias
    assert wrap(model, "w8a16", skip=["2"]) is model
    assert isinstance(model[0], Int8Linear) and not model[0].dynamic and model[0].bias is bias
    assert type(model[2]) is nn.Linear


def test_shared_layers_stay_shared():
    layer = nn.Linear(8, 8)
    model = wrap(nn.Sequential(layer, nn.ReLU(), layer))
    assert model[0] is model[2]


def test_hooks_stay():
    model, called = small(), []
    handle = model[0].register_forward_hook(lambda *_: called.append("forward"))
    model[0].register_full_backward_hook(lambda *_: called.append("backward"))
    wrap(model)(random(3, 32).requires_grad_()).sum().backward()
    assert called == ["forward", "backward"]
    handle.remove()
    model(random(3, 32))
    assert called == ["forward", "backward"]


def test_layers_whose_weight_is_computed_stay_float():
    model = small()
    prune.l1_unstructured(model[0], "weight", 0.5)
    torch.nn.utils.parametrizations.weight_norm(model[2])
    model.append(nn.Linear(16, 4))
    expected = model[:3](random(3, 32))
    assert torch.equal(wrap(model)[:3](random(3, 32)), expected) and isinstance(model[3], Int8Linear)


def test_what_makes_no_sense_is_refused():
    with pytest.raises(UsageError, match="calibrate"):
        wrap(small(), "auto")
    with pytest.raises(UsageError, match=r"w8a8-rotate rotates weights, which wrap does not.*from_migrated"):
        wrap(small(), "w8a8-rotate")
    with pytest.raises(UsageError, match="no linear layer matches 'nothing'"):
        wrap(small(), skip="nothing")
    with pytest.raises(UsageError, match="every linear layer"):
        wrap(small(), skip=["*"])
    for call in (lambda: wrap(small(), memory_limit=1), lambda: from_migrated("folder", memory_limit=1)):
        with pytest.raises(UsageError, match="needs device"):
            call()
    for limit in (0, 3.5e9, "1 GiB"):
        with pytest.raises(UsageError, match=f"memory_limit is {limit!r}; it must be a whole number of bytes"):
            wrap(small(), memory_limit=limit, device="cpu")
    with pytest.raises(UsageError, match="Sequential has no float linear layers"):
        wrap(wrap(small()))
    with pytest.raises(UsageError, match=r"0\.weight is on the meta device"):
        wrap(small().to("meta"))
    with pytest.raises(ValueError, match="no columns"):
        Int8Linear.from_float(torch.empty(3, 0))


def test_rotated_inputs_compile_without_a_graph_break():
    model = rotate(wrap(small()))
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for dtype in (torch.float32, torch.bfloat16):
        results = []
        for function in (model, compiled):
            x = random(3, 32).requires_grad_()
            with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
                y = function(x)
            y.sum().backward()
            results.append((y, x.grad))
        torch.testing.assert_close(*results)


def test_compiled_without_a_graph_break(source):
    model = wrap(opened(source))
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        torch.testing.assert_close(compiled(TOKENS, use_cache=False).logits, logits(model))


# -- folders -----------------------------------------------------------------------------------------------------------


def tensors_of(folder: Path) -> dict[str, np.ndarray]:
    with open_checkpoint(folder) as checkpoint:
        return {name: checkpoint.read(name) for name in checkpoint.tensors}


@pytest.mark.parametrize("recipe", ["w8a8", "w8a16"])
@pytest.mark.parametrize("config", [tiny_checkpoint.CONFIG, TIED], ids=["llama", "tied"])
def test_saving_writes_what_migrate_writes(tmp_path, config, recipe):
    source = written(tmp_path / "source", config)
    migrate(source, tmp_path / "migrated", recipe)
    wrap(opened(source), recipe).save_pretrained(tmp_path / "saved")
    found, expected = tensors_of(tmp_path / "saved"), tensors_of(tmp_path / "migrated")
    assert found.keys() == expected.keys()
    for name in expected:
        assert found[name].dtype == expected[name].dtype and np.array_equal(found[name], expected[name]), name
    with open_checkpoint(tmp_path / "saved") as saved, open_checkpoint(tmp_path / "migrated") as migrated:
        assert saved.config.get("quantization_config") == migrated.config.get("quantization_config")
        assert saved.manifest["tied_head"] == migrated.manifest["tied_head"]
        assert saved.manifest["recipe"] == migrated.manifest["recipe"]
    again = wrap(opened(source), recipe)
    with pytest.raises(CheckpointError, match="already exists"):
        again.save_pretrained(tmp_path / "saved")
    again.save_pretrained(tmp_path / "saved", force=True)
    assert verify(tmp_path / "saved").files == len(list((tmp_path / "saved").iterdir())) - 1


def test_a_head_that_its_trained_embedding_has_left_is_not_saved(tmp_path):
    model = wrap(opened(written(tmp_path / "source", TIED)))
    model.to(torch.bfloat16).save_pretrained(tmp_path / "saved")
    train(model)
    with pytest.raises(UsageError, match="embedding was trained"):
        model.save_pretrained(tmp_path / "trained")


def test_a_head_is_not_tied_again(tmp_path):
    model = wrap(opened(written(tmp_path / "source", TIED)))
    expected = logits(model)
    with pytest.raises(UsageError, match="codes in place of a weight"):
        model.tie_weights()
    assert torch.equal(logits(model), expected)


def test_fp64_is_saved_as_fp32(source, tmp_path):
    """Checkpoints have no fp64."""
    model = wrap(opened(source))
    model.save_pretrained(tmp_path / "single")
    model.double().save_pretrained(tmp_path / "double")
    assert np.array_equal(engine_logits(tmp_path / "double"), engine_logits(tmp_path / "single"))


def test_a_folder_without_int8_weights_is_refused(source):
    with pytest.raises(CheckpointError, match="has no int8 weights; migrate it first"):
        from_migrated(source)


def test_models_without_a_head_are_not_saved(tmp_path, source):
    model = transformers.AutoModel.from_pretrained(source)
    with pytest.raises(UsageError, match="LlamaModel has no output head"):
        wrap(model).save_pretrained(tmp_path / "saved")


def test_a_copy_saves_itself(source, tmp_path):
    model = wrap(opened(source))
    other = copy.deepcopy(model)
    other.model.layers[0].mlp.up_proj.codes.zero_()
    other.save_pretrained(tmp_path / "copy")
    assert not tensors_of(tmp_path / "copy")["model.layers.0.mlp.up_proj.weight"].any()


@pytest.mark.parametrize("recipe", ["w8a8", "w8a16"])
@pytest.mark.parametrize(
    "config",
    [tiny_checkpoint.CONFIG, TIED, GPT2, FALCON, GPT_NEOX],
    ids=["llama", "tied", "gpt2", "falcon", "gpt_neox"],
)
def test_the_engine_and_a_wrapped_model_agree(tmp_path, config, recipe):
    """From memory, from the migrated folder, and from the folder that save_pretrained wrote."""
    source = written(tmp_path / "source", config)
    migrate(source, tmp_path / "migrated", recipe)
    wrapped = wrap(opened(source), recipe)
    wrapped.save_pretrained(tmp_path / "saved")
    expected = engine_logits(tmp_path / "migrated")
    assert np.array_equal(engine_logits(tmp_path / "saved"), expected)
    for model in (wrapped, *(from_migrated(tmp_path / name, dtype=torch.float32) for name in ("migrated", "saved"))):
        found = logits(model)[0].double().numpy()
        error = np.linalg.norm(found - expected) / np.linalg.norm(expected)
        assert error < (3e-2 if recipe == "w8a8" else 1e-5)


@pytest.mark.parametrize("golden", [next(goldens(family)) for family in EVERY], ids=str)
def test_every_architecture_is_opened_and_saved(tmp_path, golden):
    """w8a16, whose results differ from the engine's by the order of sums alone."""
    auto = transformers.models.auto.modeling_auto
    kinds = auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES | auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES
    kind = kinds.get(golden.config["model_type"], "Mistral4ForCausalLM")  # which AutoModelForCausalLM does not know
    config = golden.config | {"architectures": [kind]}
    weights = RandomWeights(config, golden.seed).tensors
    migrate(replace(golden, config=config).save(tmp_path / "source", weights), tmp_path / "migrated", "w8a16")
    model = from_migrated(tmp_path / "migrated", dtype=torch.float32)
    model.save_pretrained(tmp_path / "saved")
    tokens, source = torch.tensor(golden.tokens)[None], golden.source
    inputs = {"input_ids": tokens}
    if source is not None:
        inputs = {"input_ids": torch.tensor(source)[None], "decoder_input_ids": tokens}
    with torch.no_grad():
        found = model(**inputs).logits[0].double().numpy()
    expected = []
    for name in ("migrated", "saved"):
        with bminf_lite.load(tmp_path / name, device="cpu") as engine:
            expected.append(engine.logits(golden.tokens, **({} if source is None else {"source": source})))
    assert np.array_equal(*expected)
    assert np.linalg.norm(found - expected[0]) < 1e-5 * np.linalg.norm(expected[0])


def first_golden(family: str) -> Golden:
    golden = next(goldens(family))
    return replace(golden, config=golden.config | {"architectures": [EXPERTS[family]]})


def folder_of(golden: Golden, folder: Path) -> Path:
    return golden.save(folder, RandomWeights(golden.config, golden.seed).tensors)


def assert_computes(model: nn.Module, golden: Golden, folder: Path, tolerance: float = 1e-5) -> None:
    """``model`` computes what the engine does with the model in ``folder``, but for the order of sums."""
    with torch.no_grad():
        found = model(torch.tensor(golden.tokens)[None]).logits[0].double().numpy()
    with bminf_lite.load(folder, device="cpu") as engine:
        expected = engine.logits(golden.tokens)
    assert np.linalg.norm(found - expected) < tolerance * np.linalg.norm(expected)


EXPERTS = {
    "mixtral": "MixtralForCausalLM",
    "granitemoe": "GraniteMoeForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "llama4_text": "Llama4ForCausalLM",
    "nemotron_h": "NemotronHForCausalLM",
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "gemma4_text": "Gemma4ForCausalLM",
}
"""Experts of each form: in a module of another name, in matrices ``[in, out]``, whose rows alternate, without gates."""


@pytest.mark.parametrize("family", EXPERTS)
def test_experts_in_one_parameter_are_wrapped_and_saved(tmp_path, family):
    golden = first_golden(family)
    model = wrap(opened(folder_of(golden, tmp_path / "source")), "w8a16")
    stacks = [module for module in model.modules() if isinstance(module, ExpertStack)]
    assert stacks and all(module.dim() < 3 for name, module in model.named_parameters() if "expert" in name)
    model.save_pretrained(tmp_path / "saved")
    assert_computes(model, golden, tmp_path / "saved", 5e-3)  # where embeddings are fp16
    again = from_migrated(tmp_path / "saved", dtype=torch.float32)
    assert_computes(again, golden, tmp_path / "saved")
    again.save_pretrained(tmp_path / "again")
    found, expected = tensors_of(tmp_path / "again"), tensors_of(tmp_path / "saved")
    assert found.keys() == expected.keys() and all(np.array_equal(found[name], expected[name]) for name in expected)


def test_experts_that_are_not_quantized_alike(tmp_path):
    """Experts may differ, the two matrices of one that read the same input may not; float ones stay one parameter."""
    golden = first_golden("mixtral")
    source = folder_of(golden, tmp_path / "source")
    for number, (rules, message) in enumerate(
        [
            (
                {"*.experts.*.w1.weight": Scheme.W8A16},
                "gate_up_proj: matrices of an expert .* quantized alike",
            ),
            ({"*.experts.1.w2.weight": Scheme.FLOAT}, "experts of .*experts.down_proj are int8, and others float"),
            ({"*.experts.*.w2.weight": Scheme.FLOAT}, ""),
            ({"*.experts.1.*": Scheme.W8A16}, ""),
        ]
    ):
        folder = tmp_path / f"migrated-{number}"
        migrate(source, folder, Recipe("own", Scheme.W8A8, Scheme.W8A8, rules))
        if message:
            with pytest.raises(CheckpointError, match=message):
                from_migrated(folder)
            continue
        model = from_migrated(folder, dtype=torch.float32)
        model.save_pretrained(tmp_path / f"saved-{number}")
        found, expected = tensors_of(tmp_path / f"saved-{number}"), tensors_of(folder)
        assert found.keys() == expected.keys() and all(np.array_equal(found[name], expected[name]) for name in found)
        with torch.no_grad():
            assert torch.isfinite(model(torch.tensor(golden.tokens)[None]).logits).all()


def test_experts_stream_and_train(tmp_path):
    golden = first_golden("mixtral")
    deep = replace(golden, config=golden.config | {"num_hidden_layers": 8})
    source = folder_of(deep, tmp_path / "source")
    whole, streamed = wrap(opened(source)), wrap(opened(source))
    total = sum(t.nbytes for t in [*streamed.parameters(), *streamed.buffers()])
    assert streaming.place(streamed, torch.device("cpu"), total - 50_000) > 0
    tokens = torch.tensor([[1, 5, 77, 31]])
    losses = []
    for model in (whole, streamed):
        loss = model(tokens, labels=tokens).loss
        loss.backward()
        losses.append((loss, model.get_input_embeddings().weight.grad))
    assert all(map(torch.equal, *losses))
    whole.set_experts_implementation("batched_mm")
    with pytest.raises(UsageError, match=r"set_experts_implementation\('eager'\)"):
        whole(tokens)


def test_frequencies_of_positions_stay_exact(source, tmp_path):
    migrate(source, tmp_path / "migrated", "w8a8")
    frequencies = [m.model.rotary_emb.inv_freq for m in (opened(source), from_migrated(tmp_path / "migrated"))]
    assert frequencies[1].dtype == torch.float32 and torch.equal(*frequencies)


def test_a_family_that_transformers_knows_under_another_name(tmp_path):
    golden = next(goldens("deepseek_v3"))
    own = {"model_type": "kimi_k2", "architectures": ["DeepseekV3ForCausalLM"]}
    golden = replace(golden, config=golden.config | own)
    migrate(folder_of(golden, tmp_path / "source"), tmp_path / "migrated", "w8a16")
    assert_computes(from_migrated(tmp_path / "migrated", dtype=torch.float32), golden, tmp_path / "migrated")


BUNDLED = Path(str(resources.files("bminf_lite.demo_model")))


@pytest.mark.parametrize("rotates", ["offline only", "feed-forward", "all"])
@pytest.mark.parametrize("config", [tiny_checkpoint.CONFIG, TIED, GPT2, None], ids=["llama", "tied", "gpt2", "bundled"])
def test_a_rotated_folder_runs_and_is_written_again(tmp_path, config, rotates):
    recipe = load_recipe("w8a8-rotate-all" if rotates == "all" else "w8a8-rotate")
    if rotates == "offline only":
        if config is GPT2:
            pytest.skip("its weights alone rotate nothing")
        recipe = offline_part(recipe)
    source = BUNDLED if config is None else written(tmp_path / "source", config)
    migrate(source, tmp_path / "migrated", recipe)
    model = from_migrated(tmp_path / "migrated", dtype=torch.float32)
    blocks = {name: m.rotation for name, m in model.named_modules() if isinstance(m, Int8Linear) and m.rotation > 1}
    layers = sum(isinstance(m, Int8Linear) for m in model.modules())
    expected_blocks = {"offline only": 0, "feed-forward": model.config.num_hidden_layers, "all": layers}
    assert len(blocks) == expected_blocks[rotates]
    model.save_pretrained(tmp_path / "saved")
    found, expected = logits(model)[0].double().numpy(), engine_logits(tmp_path / "migrated")
    assert np.linalg.norm(found - expected) < 3e-2 * np.linalg.norm(expected)
    assert np.array_equal(engine_logits(tmp_path / "saved"), expected)
    again = from_migrated(tmp_path / "saved", dtype=torch.float32)
    assert torch.equal(logits(again)[0].double(), torch.from_numpy(found))
    with open_checkpoint(tmp_path / "saved") as saved, open_checkpoint(tmp_path / "migrated") as migrated:
        for key in ("recipe", "tied_head", "rotated_offline"):
            assert saved.manifest.get(key) == migrated.manifest.get(key)
        if config is not GPT2:  # whose matrices of another layout are written as floats
            assert saved.manifest.get("rotated_when_loaded") == migrated.manifest.get("rotated_when_loaded")
            assert saved.config.get("quantization_config") == migrated.config.get("quantization_config")
            assert {n: t.dtype for n, t in saved.tensors.items()} == {n: t.dtype for n, t in migrated.tensors.items()}


def test_encoder_and_decoder_of_a_folder_share_their_embeddings(tmp_path):
    migrate(written(tmp_path / "source", T5), tmp_path / "migrated", "w8a8")
    wrapped = wrap(transformers.T5ForConditionalGeneration.from_pretrained(tmp_path / "source", dtype=torch.float32))
    model = from_migrated(tmp_path / "migrated", dtype=torch.float32)
    assert model.encoder.embed_tokens.weight is model.shared.weight
    with torch.no_grad():
        found, expected = (m.eval()(input_ids=TOKENS, decoder_input_ids=TOKENS).logits for m in (model, wrapped))
    assert torch.equal(found, expected)


def engine_logits(folder: Path) -> np.ndarray:
    with bminf_lite.load(folder, device="cpu") as model:
        return model.logits(TOKENS[0].numpy()).astype(np.float64)


def test_a_model_from_a_folder_has_no_float_weights_and_generates(source, tmp_path):
    migrate(source, tmp_path / "migrated", "w8a8")
    model = from_migrated(tmp_path / "migrated", dtype=torch.float32)
    assert sum(isinstance(m, Int8Linear) for m in model.modules()) == 15
    assert not any(type(m) is nn.Linear for m in model.modules())
    found = model.generate(TOKENS, attention_mask=torch.ones_like(TOKENS), do_sample=False, max_new_tokens=8)
    expected = wrap(opened(source)).generate(
        TOKENS, attention_mask=torch.ones_like(TOKENS), do_sample=False, max_new_tokens=8
    )
    assert torch.equal(found, expected) and found.shape[1] > TOKENS.shape[1]


def test_saving_needs_a_transformers_model(tmp_path):
    with pytest.raises(UsageError, match="no transformers model"):
        save_pretrained(wrap(small()), tmp_path / "saved")


# -- peft and accelerate -----------------------------------------------------------------------------------------------


def adapted(model: nn.Module) -> nn.Module:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    torch.manual_seed(0)
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "up_proj"], task_type="CAUSAL_LM")
    return peft.get_peft_model(model, config)


def train(model: nn.Module, steps: int = 12) -> list[float]:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-2)
    losses = []
    for _ in range(steps):
        loss = model(TOKENS, labels=TOKENS).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    return losses


def test_lora_trains_as_on_the_float_model_and_is_saved(source, tmp_path):
    peft = pytest.importorskip("peft", reason="peft is not installed")
    losses, reference = train(adapted(model := wrap(opened(source)))), train(adapted(opened(source)))
    assert losses[-1] < 0.8 * losses[0]
    np.testing.assert_allclose(losses, reference, rtol=0.1)
    trained = adapted(wrap(opened(source)))
    train(trained)
    trained.save_pretrained(tmp_path / "adapter")
    again = peft.PeftModel.from_pretrained(wrap(opened(source)), tmp_path / "adapter")
    torch.testing.assert_close(logits(again), logits(trained.eval()))
    del model


def test_lora_trains_beside_rotated_inputs(source, tmp_path):
    """The adapter of a layer that rotates its input sees the input as it is."""
    peft = pytest.importorskip("peft", reason="peft is not installed")
    migrate(source, tmp_path / "migrated", "w8a8-rotate")

    def adapted(model: nn.Module) -> nn.Module:
        torch.manual_seed(0)
        config = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")
        return peft.get_peft_model(model, config)

    model = adapted(from_migrated(tmp_path / "migrated", dtype=torch.float32))
    down = model.base_model.model.model.layers[0].mlp.down_proj
    assert down.base_layer.rotation == 16
    losses, reference = train(model), train(adapted(opened(source)))
    assert losses[-1] < 0.8 * losses[0]
    np.testing.assert_allclose(losses, reference, rtol=0.1)
    x = random(3, 48)
    low_rank = down.lora_B["default"](down.lora_A["default"](x)) * down.scaling["default"]
    torch.testing.assert_close(down(x), down.base_layer(x) + low_rank)
    with pytest.raises(UsageError, match="merge an adapter into the float model"):
        down.merge()


def test_adapters_are_neither_quantized_nor_saved_as_a_model(source, tmp_path):
    with pytest.raises(UsageError, match="before get_peft_model"):
        wrap(adapted(opened(source)))
    model = wrap(opened(source))
    adapters = adapted(model)
    with pytest.raises(UsageError, match=r"unload\(\)"):
        model.save_pretrained(tmp_path / "saved")
    adapters.unload().save_pretrained(tmp_path / "saved")


@pytest.mark.parametrize("safe", [False, True])
def test_merging_an_adapter_is_refused(source, safe):
    model = adapted(wrap(opened(source)))
    before = model.base_model.model.model.layers[0].self_attn.q_proj.base_layer.codes.clone()
    with pytest.raises(UsageError, match="merge an adapter into the float model"):
        model.merge_and_unload(safe_merge=safe)
    assert torch.equal(model.base_model.model.model.layers[0].self_attn.q_proj.base_layer.codes, before)


def test_accelerate_dispatches(source):
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
    model = wrap(opened(source))
    expected = logits(model)
    torch.testing.assert_close(logits(accelerate.dispatch_model(model, {"": "cpu"}, force_hooks=True)), expected)


def test_accelerate_offloads_and_trains():
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
    model, x = wrap(small()), random(3, 32)
    expected = model(x)
    offloaded = accelerate.cpu_offload(wrap(small()), execution_device=torch.device("cpu"), offload_buffers=True)
    assert torch.equal(offloaded(x), expected)
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision="bf16")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    model, optimizer = accelerator.prepare(model, optimizer)
    before = model[0].bias.detach().clone()
    accelerator.backward(model(x).square().sum())
    optimizer.step()
    assert not torch.equal(model[0].bias, before)


# -- streaming ---------------------------------------------------------------------------------------------------------

BLOCK_BYTES = 2 * 64 * 96


@pytest.mark.parametrize(("resident", "rotation"), [(0, 1), (1, 1), (2, 1), (1, 16)])
def test_streamed_equals_resident_forward_and_backward(resident, rotation):
    whole, streamed = rotate(wrap(Blocks()), rotation), rotate(wrap(Blocks()), rotation)
    total = sum(t.nbytes for t in [*streamed.parameters(), *streamed.buffers()])
    # Two buffers of a block, with room to align its two layers, in place of those that are not resident.
    limit = total - (5 - resident) * BLOCK_BYTES + 2 * (BLOCK_BYTES + 2 * 256)
    assert streaming.place(streamed, torch.device("cpu"), limit) == 5 - resident
    x = random(3, 64)
    for _ in range(2):
        results = []
        for model in (whole, streamed):
            own = x.clone().requires_grad_()
            y = model(own)
            y.square().sum().backward()
            results.append((y.detach(), own.grad, model.layers[0][0].bias.grad))
        for a, b in zip(*results, strict=True):
            assert torch.equal(a, b)
    assert streamed.state_dict().keys() == whole.state_dict().keys()
    assert torch.equal(streamed.state_dict()["layers.3.0.codes"], whole.state_dict()["layers.3.0.codes"])


def test_each_pass_copies_each_block_once():
    """The block that is expected next is the one that is used next, also from the last block to the first."""
    model = wrap(Blocks(), memory_limit=50_000, device="cpu")
    codes = next(layer.host_codes for layer in model.modules() if isinstance(layer, Int8Linear) and layer.host_codes)
    streamed = sum(len(block) for block in codes.stream.blocks)
    with torch.no_grad():
        model(random(3, 64))
        for _ in range(3):
            before = codes.stream.copied_bytes
            model(random(3, 64))
            assert codes.stream.copied_bytes - before == streamed


@pytest.mark.parametrize("assign", [False, True])
def test_streamed_layers_load_a_state(assign):
    """Also those whose codes the device holds."""
    streamed, x = wrap(Blocks(), memory_limit=50_000, device="cpu"), random(3, 64)
    other = rotate(wrap(Blocks().apply(lambda m: nn.init.normal_(m.weight) if isinstance(m, nn.Linear) else None)))
    streamed(x)
    streamed.load_state_dict(other.state_dict(), assign=assign)
    for _ in range(2):
        assert torch.equal(streamed(x), other(x))


def test_a_limit_that_everything_fits_streams_nothing():
    model = wrap(Blocks(), memory_limit=1 << 30, device="cpu")
    assert all(layer.host_codes is None for layer in model.modules() if isinstance(layer, Int8Linear))


def test_limits_that_cannot_be_kept_are_refused():
    with pytest.raises(UsageError, match="every block streamed"):
        wrap(Blocks(), memory_limit=10_000, device="cpu")
    with pytest.raises(UsageError, match="no ModuleList"):
        wrap(small(), memory_limit=100, device="cpu")


def test_a_streamed_model_is_not_copied():
    model = wrap(Blocks(), memory_limit=50_000, device="cpu")
    assert any(layer.host_codes is not None for layer in model.modules() if isinstance(layer, Int8Linear))
    for attempt in (copy.deepcopy, pickle.dumps):
        with pytest.raises(BminfError, match="state_dict"):
            attempt(model)


def test_adapters_train_on_a_streamed_model(tmp_path):
    source = written(tmp_path / "deep", tiny_checkpoint.CONFIG | {"num_hidden_layers": 6, "intermediate_size": 256})
    whole, streamed = wrap(opened(source)), wrap(opened(source))
    total = sum(t.nbytes for t in [*streamed.parameters(), *streamed.buffers()])
    assert streaming.place(streamed, torch.device("cpu"), total - 50_000) >= 3
    np.testing.assert_allclose(train(adapted(streamed)), train(adapted(whole)), rtol=1e-6)
