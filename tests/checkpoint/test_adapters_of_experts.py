"""Adapters of experts in folders: as modules of their own and in one parameter, and models that serve them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from adapter_files import write_adapter
from expert_adapter_files import (
    RANK,
    Factors,
    as_modules,
    as_parameters,
    matrices,
    named,
    parameters,
    random_factors,
    saved,
)
from model_kit import run
from tiny_models import MIXTURES, RENAMED, Golden, goldens, random_tokens

import bminf_lite
from bminf_lite.adapters import adapter_sites
from bminf_lite.checkpoint.adapter_folder import AdapterFolder, read_adapter
from bminf_lite.checkpoint.opened_model import open_model
from bminf_lite.cuda.runtime.driver import device_count
from bminf_lite.engine.request import Request
from bminf_lite.engine.sampling_params import SamplingParams
from bminf_lite.errors import CheckpointError, UsageError

CASES = [next(goldens(family)) for family in MIXTURES if family not in RENAMED]
TOKENS = random_tokens(7, 20, 97)


def merged(golden: Golden, tensors: dict[str, np.ndarray], factors: Factors, folder: Path) -> Path:
    """The float model with the adapter in its matrices."""
    added = {name: tensors[name] + np.float32(6 / RANK) * (b @ a) for name, (a, b) in factors.items()}
    golden.save(folder, {**tensors, **added})
    return folder


def read(folder: Path, base: Path) -> AdapterFolder:
    with open_model(base) as model:
        return read_adapter(folder, model, adapter_sites(model).names())


def row_error(found: np.ndarray, expected: np.ndarray) -> float:
    """The median over tokens of the relative error: in a mixture a token whose experts nearly tie has a large one."""
    return float(np.median(np.linalg.norm(found - expected, axis=1) / np.linalg.norm(expected, axis=1)))


@pytest.mark.parametrize("golden", CASES, ids=str)
def test_a_model_with_an_adapter_is_the_merged_model(golden: Golden, tmp_path: Path) -> None:
    tensors, factors = saved(golden, tmp_path / "base"), random_factors(golden)
    other = merged(golden, tensors, factors, tmp_path / "merged")
    adapter = as_modules(factors, tmp_path / "adapter")
    with bminf_lite.load(other, device="cpu") as model:
        expected = model.logits(TOKENS)
    with bminf_lite.load(tmp_path / "base", device="cpu", adapters={"a": adapter}) as model:
        found, plain = model.logits(TOKENS, adapter="a"), model.logits(TOKENS)
    with bminf_lite.load(tmp_path / "base", device="cpu") as model:
        np.testing.assert_array_equal(model.logits(TOKENS), plain)
    assert row_error(plain, expected) > 0.003, "the adapter changes little"
    assert row_error(found, expected) < 1e-4


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "gpt_oss", "granitemoe", "deepseek_v3", "nemotron_h"])
@pytest.mark.parametrize("recipe", ["w8a8", "w8a8-rotate-all", "w8a16"])
def test_on_a_migrated_model(family: str, recipe: str, tmp_path: Path) -> None:
    """It costs what int8 costs the merged model; docs/numerics.md."""
    golden = named(family)
    tensors, factors = saved(golden, tmp_path / "source"), random_factors(golden)
    other = merged(golden, tensors, factors, tmp_path / "merged")
    adapter, tokens = as_modules(factors, tmp_path / "adapter"), random_tokens(7, 60, 97)
    with bminf_lite.load(other, device="cpu") as model:
        expected = model.logits(tokens)
    for folder in ("source", "merged"):
        bminf_lite.migrate(tmp_path / folder, tmp_path / f"{folder}-int8", recipe)
    with bminf_lite.load(tmp_path / "merged-int8", device="cpu") as model:
        loss = row_error(model.logits(tokens), expected)
    with bminf_lite.load(tmp_path / "source-int8", device="cpu", adapters={"a": adapter}) as model:
        assert row_error(model.logits(tokens, adapter="a"), expected) < 2 * loss < 0.3


@pytest.mark.parametrize("golden", [g for g in CASES if parameters(g)], ids=str)
@pytest.mark.parametrize("turned", [False, True])
def test_one_parameter_and_modules_of_their_own_are_the_same_adapter(
    golden: Golden, turned: bool, tmp_path: Path
) -> None:
    """``turned`` as PEFT before 0.19 saves parameters that are ``[experts, out, in]``."""
    saved(golden, tmp_path / "base")
    factors = random_factors(golden)
    modules = read(as_modules(factors, tmp_path / "modules"), tmp_path / "base")
    together = read(as_parameters(golden, factors, tmp_path / "parameters", turned), tmp_path / "base")
    assert modules.adapters.keys() == together.adapters.keys() == set(matrices(golden))
    for name, part in modules.adapters.items():
        np.testing.assert_array_equal(part.a, together.adapters[name].a)
        np.testing.assert_array_equal(part.b, together.adapters[name].b)
        assert part.scale == together.adapters[name].scale == 2


def test_the_version_of_peft_decides_where_matrices_are_square(tmp_path: Path) -> None:
    """Gate and up of experts half as wide as the stream are one square matrix, as in Granite 3.1 1B-A400M."""
    golden = named("granitemoe")
    golden.config["intermediate_size"] = golden.config["hidden_size"] // 2
    saved(golden, tmp_path / "base")
    factors = random_factors(golden)
    for turned in (False, True):
        found = read(as_parameters(golden, factors, tmp_path / str(turned), turned), tmp_path / "base")
        for name, (a, b) in factors.items():
            np.testing.assert_array_equal(found.adapters[name].a, a)
            np.testing.assert_array_equal(found.adapters[name].b, b)


def served(model: bminf_lite.Model, names: list[str | None], alone: bool) -> list[tuple[list[int], list[float]]]:
    """Tokens and log-probabilities of requests with these adapters, one after another or in the same steps."""
    requests = [
        Request(
            0,
            random_tokens(place, 9, 97).tolist(),
            SamplingParams(max_new_tokens=8, seed=1),
            adapter=None if name is None else model._with_adapters.registry.find(name),
        )
        for place, name in enumerate(names)
    ]
    for group in [[request] for request in requests] if alone else [requests]:
        run(model, group)
    return [(request.output_token_ids, request.logprobs.tolist()) for request in requests]


def test_who_shares_a_step_changes_no_bit_and_zeros_change_none(tmp_path: Path) -> None:
    """Adapters of all experts, of some, and of zeros, beside requests without one."""
    golden = named("qwen3_moe")
    saved(golden, tmp_path / "source")
    bminf_lite.migrate(tmp_path / "source", tmp_path / "int8", "w8a8-rotate-all")
    zeros = {name: (a, 0 * b) for name, (a, b) in random_factors(golden, 1).items()}
    folders = {
        "all": as_modules(random_factors(golden), tmp_path / "all"),
        "some": as_modules(random_factors(golden, 2, matrices(golden)[::3]), tmp_path / "some"),
        "zeros": as_modules(zeros, tmp_path / "zeros"),
    }
    names = ["all", None, "some", "zeros", "all", None]
    with bminf_lite.load(tmp_path / "int8", device="cpu", prefix_cache=False) as model:
        plain = served(model, [None] * len(names), alone=True)
    with bminf_lite.load(tmp_path / "int8", device="cpu", adapters=folders, prefix_cache=False) as model:
        alone, together = served(model, names, alone=True), served(model, names, alone=False)
    assert together == alone
    for place, name in enumerate(names):
        assert (alone[place] == plain[place]) == (name in (None, "zeros"))


def test_two_ranks_give_what_one_gives(tmp_path: Path) -> None:
    golden = named("mixtral")
    saved(golden, tmp_path / "base")
    adapter = as_modules(random_factors(golden), tmp_path / "adapter")
    found = []
    for gpus in (1, 2):
        with bminf_lite.load(tmp_path / "base", device="cpu", gpus=gpus, adapters={"a": adapter}) as model:
            found.append([model.logits(TOKENS, adapter=name) for name in (None, "a")])
    for one, two in zip(*found, strict=True):
        assert row_error(two, one) < 1e-5
    assert row_error(found[0][0], found[0][1]) > 0.01


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_checked_inputs_change_little(device: str, tmp_path: Path) -> None:
    """Each expert is then a product of its own, with a bank of its own."""
    golden, limit = named("gpt_oss"), {} if device == "cpu" else {"memory_limit": "256MiB"}
    saved(golden, tmp_path / "base")
    adapter, found = as_modules(random_factors(golden), tmp_path / "adapter"), []
    for check in (False, True):
        with bminf_lite.load(tmp_path / "base", device=device, check=check, adapters={"a": adapter}, **limit) as model:
            found.append(model.logits(TOKENS, adapter="a"))
    assert row_error(found[1], found[0]) < (1e-5 if device == "cpu" else 0.01)


def test_room_for_experts_is_made_for_the_adapters_given_at_once(tmp_path: Path) -> None:
    golden = named("mixtral")
    saved(golden, tmp_path / "base")
    factors, attention = random_factors(golden), "model.layers.0.self_attn.q_proj.weight"
    experts = as_modules(factors, tmp_path / "experts")
    first = as_modules({name: of for name, of in factors.items() if ".layers.0." in name}, tmp_path / "first")
    out, features = golden.spec.parameters[attention].shape
    plain = as_modules(
        {attention: (np.ones((RANK, features), np.float32), np.ones((out, RANK), np.float32))}, tmp_path / "p"
    )
    with (
        bminf_lite.load(tmp_path / "base", device="cpu", adapters={"plain": plain}) as model,
        pytest.raises(UsageError, match=r"changes experts \('model\.layers\.0\..*\), for which there is no room: load"),
    ):
        model.load_adapter("experts", experts)
    with bminf_lite.load(tmp_path / "base", device="cpu", adapters={"first": first}) as model:
        with pytest.raises(UsageError, match=r"changes experts \('model\.layers\.1\."):
            model.load_adapter("experts", experts)
        model.load_adapter("plain", plain)
    sizes = [
        bminf_lite.plan(
            tmp_path / "base", gpu_memory="8GiB", link=1e10, bandwidth=1e12, **options
        ).requirements.adapters
        for options in ({}, {"max_adapters": 2}, {"max_adapters": 2, "adapter_experts": True})
    ]
    assert sizes[0] == 0 < sizes[1] < sizes[2]
    with pytest.raises(UsageError, match="adapter_experts is for adapters, and max_adapters is 0"):
        bminf_lite.plan(tmp_path / "base", gpu_memory="8GiB", link=1e10, bandwidth=1e12, adapter_experts=True)


def test_what_does_not_fit_is_named(tmp_path: Path) -> None:
    golden = named("mixtral")
    saved(golden, tmp_path / "base")
    factors = random_factors(golden)
    router = next(name for name, p in golden.spec.parameters.items() if p.role.value == "router")
    out, features = golden.spec.parameters[router].shape
    others = {
        "changes .* a router, which is not done here": {router: (np.ones((2, features)), np.ones((out, 2)))},
        "but its matrix here is": {matrices(golden)[0]: (np.ones((2, 5)), np.ones((7, 2)))},
        "holds a NaN": {matrices(golden)[0]: tuple(np.full_like(x, np.nan) for x in factors[matrices(golden)[0]])},
    }
    for place, (message, bad) in enumerate(others.items()):
        wrong = {name: (a.astype(np.float32), b.astype(np.float32)) for name, (a, b) in bad.items()}
        with pytest.raises(CheckpointError, match=message):
            read(as_modules(wrong, tmp_path / str(place)), tmp_path / "base")
    broken = {name: (a * np.float32(np.inf), b) for name, (a, b) in factors.items()}
    with pytest.raises(CheckpointError, match=r"a factor of .*experts' holds a NaN or an infinity"):
        read(as_parameters(golden, broken, tmp_path / "broken"), tmp_path / "base")
    module, features = "base_model.model.model.layers.0.mlp.experts", golden.config["hidden_size"]
    empty = {
        f"{module}.lora_A.weight": np.zeros((0, features), np.float32),
        f"{module}.lora_B.weight": np.zeros((2 * golden.config["intermediate_size"], 0), np.float32),
    }
    with pytest.raises(CheckpointError, match=r"experts' has factors \[0, .*, which fit none of its parameters"):
        read(write_adapter(tmp_path / "empty", empty, r=RANK), tmp_path / "base")


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("family", "recipe", "gpus"),
    [("qwen3_moe", "w8a8-rotate-all", 1), ("gpt_oss", "w8a8", 1), ("deepseek_v3", None, 1), ("mixtral", "w8a8", 2)],
)
def test_on_a_gpu_in_any_company(family: str, recipe: str | None, gpus: int, tmp_path: Path) -> None:
    """Captured and not, with more adapters than slots: about the logits of a CPU, and the same bits."""
    if device_count() < gpus:
        pytest.skip(f"needs {gpus} GPUs")
    golden = named(family)
    saved(golden, folder := tmp_path / "source")
    if recipe is not None:
        bminf_lite.migrate(tmp_path / "source", folder := tmp_path / "int8", recipe)
    zeros = {name: (a, 0 * b) for name, (a, b) in random_factors(golden, 1).items()}
    folders = {
        "all": as_modules(random_factors(golden), tmp_path / "all"),
        "some": as_modules(random_factors(golden, 2, matrices(golden)[::3]), tmp_path / "some"),
        "zeros": as_modules(zeros, tmp_path / "zeros"),
    }
    with bminf_lite.load(folder, device="cpu", gpus=gpus, adapters=folders) as model:
        expected = {name: model.logits(TOKENS, adapter=name) for name in (None, *folders)}
    names = ["all", None, "some", "zeros", "all", None, "some"]
    options = {"memory_limit": "512MiB", "max_batch": 8, "adapters": folders, "max_adapters": 2, "prefix_cache": False}
    with bminf_lite.load(folder, device="cuda", gpus=gpus, **options) as model:
        model.warm_up()
        found = {name: model.logits(TOKENS, adapter=name) for name in (None, *folders)}
        alone = served(model, names, alone=True)
        assert served(model, names, alone=False) == alone
        assert [tokens for tokens, _ in served(model, [None] * len(names), alone=False)][3] == alone[3][0]
    np.testing.assert_array_equal(found["zeros"], found[None])
    for name, logits in expected.items():
        assert row_error(found[name], logits) < 0.05, name
