"""The format's configuration: written so that others read it, and refused where this package cannot run it."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from bminf_lite.checkpoint.compressed_tensors import ConfigGroup, parse_quantization, quantization_config
from bminf_lite.checkpoint.name_patterns import Targets
from bminf_lite.checkpoint.recipe import Scheme
from bminf_lite.errors import CheckpointError

PUBLISHED: dict[str, Any] = {
    "config_groups": {
        "group_0": {
            "input_activations": {
                "actorder": None,
                "block_structure": None,
                "dynamic": True,
                "group_size": None,
                "num_bits": 8,
                "observer": None,
                "observer_kwargs": {},
                "strategy": "token",
                "symmetric": True,
                "type": "int",
            },
            "output_activations": None,
            "targets": ["Linear"],
            "weights": {
                "actorder": None,
                "block_structure": None,
                "dynamic": False,
                "group_size": None,
                "num_bits": 8,
                "observer": "minmax",
                "observer_kwargs": {},
                "strategy": "channel",
                "symmetric": True,
                "type": "int",
            },
        }
    },
    "format": "int-quantized",
    "global_compression_ratio": 1.5,
    "ignore": ["lm_head"],
    "kv_cache_scheme": None,
    "quant_method": "compressed-tensors",
    "quantization_status": "frozen",
    "transform_config": {
        "config_groups": {
            "R1": {"type": "random-hadamard", "apply": [{"targets": ["x"], "location": "weight_output"}]},
            "R4": {
                "type": "hadamard",
                "head_dim": 64,
                "precision": "torch.float32",
                "randomize": False,
                "apply": [
                    {"targets": ["re:.*down_proj$"], "location": "input", "ignore": "re:model.layers.3.*"},
                    {"targets": ["re:.*down_proj$"], "location": "weight_input", "inverse": True},
                ],
            },
        }
    },
}
"""As the common tools write it for W8A8, with a rotation that is part of the weights and one that is not."""
R4 = ("transform_config", "config_groups", "R4")


def test_a_published_configuration() -> None:
    for key in ("quantization_config", "compression_config"):
        parsed = parse_quantization({key: PUBLISHED}, "config.json")
        assert parsed is not None and parsed.groups == (ConfigGroup(Targets(["Linear"]), packed=False, dynamic=True),)
        assert parsed.group_of("lm_head") is None
        assert parsed.group_of("model.layers.0.mlp.up_proj") is parsed.groups[0]
    assert parse_quantization({}, "config.json") is None


def test_transforms_of_inputs_are_read_and_those_of_weights_are_in_the_weights() -> None:
    parsed = parse_quantization({"quantization_config": PUBLISHED}, "config.json")
    assert parsed is not None and len(parsed.transforms) == 1
    assert parsed.rotation_of("model.layers.0.mlp.down_proj") == 64
    assert parsed.rotation_of("model.layers.3.mlp.down_proj") == parsed.rotation_of("x") == 1
    by_class = copy.deepcopy(PUBLISHED)
    by_class["transform_config"]["config_groups"]["R4"]["apply"][0]["targets"] = "Linear"
    parsed = parse_quantization({"quantization_config": by_class}, "config.json")
    assert parsed is not None and parsed.rotation_of("x") == 64


def test_targets_by_name_go_before_targets_by_class() -> None:
    config = copy.deepcopy(PUBLISHED)
    group = config["config_groups"]["group_0"]
    config["format"] = "mixed-precision"
    group["format"] = "int-quantized"
    config["config_groups"]["group_1"] = {
        "targets": ["re:.*down_proj$", "exact.name"],
        "format": "pack-quantized",
        "weights": group["weights"],
    }
    config["ignore"] = ["re:model.skip.*"]
    parsed = parse_quantization({"quantization_config": config}, "x")
    assert parsed is not None
    first, second = parsed.groups
    assert second.packed and not second.dynamic
    assert parsed.group_of("a.down_proj") is parsed.group_of("exact.name") is second
    assert parsed.group_of("a.down_proj.b") is parsed.group_of("exact.names") is first
    assert parsed.group_of("model.skip.this") is None


@pytest.mark.parametrize(
    "path, value, expected",
    [
        (["quant_method"], "gptq", "quant_method is 'gptq'"),
        (["format"], "float-quantized", "group_0.format is 'float-quantized'"),
        (["format"], None, "group_0.format is None"),
        (["config_groups"], {}, "config_groups must name at least one group"),
        (["config_groups", "group_0"], ["Linear"], "group_0 must be an object"),
        (["config_groups", "group_0", "targets"], None, "targets must be a list of names"),
        (["config_groups", "group_0", "targets"], ["re:("], "'re:(' is not a regular expression"),
        (["config_groups", "group_0", "weights"], None, "weights must be an object"),
        (["config_groups", "group_0", "weights", "num_bits"], 4, "weights.num_bits is 4"),
        (["config_groups", "group_0", "weights", "type"], "float", "weights.type is 'float'"),
        (["config_groups", "group_0", "weights", "symmetric"], False, "weights.symmetric is False"),
        (["config_groups", "group_0", "weights", "strategy"], "group", "weights.strategy is 'group'"),
        (["config_groups", "group_0", "weights", "group_size"], 128, "weights.group_size is 128"),
        (["config_groups", "group_0", "weights", "block_structure"], [1, 2], "weights.block_structure is [1, 2]"),
        (["config_groups", "group_0", "weights", "dynamic"], True, "weights.dynamic is True"),
        (["config_groups", "group_0", "input_activations", "dynamic"], False, "input_activations.dynamic is False"),
        (["config_groups", "group_0", "input_activations", "dynamic"], "local", "input_activations.dynamic is 'local'"),
        (["config_groups", "group_0", "input_activations", "strategy"], "tensor", "input_activations.strategy"),
        (["config_groups", "group_0", "input_activations", "symmetric"], False, "input_activations.symmetric"),
        (["config_groups", "group_0", "output_activations"], {"num_bits": 8}, "output_activations is set"),
        (["kv_cache_scheme"], {"num_bits": 8}, "kv_cache_scheme is"),
        (["transform_config"], [1], "transform_config must hold an object config_groups"),
        ([*R4], {"type": "hadamard"}, "R4 must be an object with a list apply"),
        ([*R4, "type"], "random-hadamard", "R4 has type 'random-hadamard'"),
        ([*R4, "randomize"], True, "R4 has type 'hadamard' with randomize"),
        ([*R4, "head_dim"], None, "R4.head_dim is None"),
        ([*R4, "head_dim"], 1024, "R4.head_dim is 1024; this version runs powers of two up to 256"),
        ([*R4, "apply", 0, "location"], "output", "R4 has location 'output'"),
        ([*R4, "apply", 0, "targets"], ["re:("], "R4.apply.targets: 're:(' is not a regular expression"),
        (["sparsity_config"], {"format": "sparse-24-bitmask"}, "sparsity_config.format is 'sparse-24-bitmask'"),
        (["ignore"], "lm_head", "ignore must be a list"),
    ],
)
def test_what_cannot_be_run_is_refused(path: list[str], value: Any, expected: str) -> None:
    config = copy.deepcopy(PUBLISHED)
    place = config
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    with pytest.raises(CheckpointError) as caught:
        parse_quantization({"quantization_config": config}, "folder/config.json")
    assert str(caught.value).startswith("folder/config.json") and expected in str(caught.value)


def test_rotations_that_are_written_read_back() -> None:
    schemes = {"a": Scheme.W8A8, "b": Scheme.W8A8, "c": Scheme.W8A8}
    config = quantization_config(schemes, rotations={"a": 64, "c": 4})
    assert "transform_config" in config["quantization_status"]
    parsed = parse_quantization({"quantization_config": config}, "x")
    assert parsed is not None and [parsed.rotation_of(name) for name in "abc"] == [64, 1, 4]


def test_all_refusals_are_listed() -> None:
    config = copy.deepcopy(PUBLISHED)
    config["config_groups"]["group_0"]["weights"] |= {"num_bits": 4, "symmetric": False}
    config["kv_cache_scheme"] = {"num_bits": 8}
    with pytest.raises(CheckpointError, match="3 problems"):
        parse_quantization({"quantization_config": config}, "x")
    with pytest.raises(CheckpointError, match="must be an object"):
        parse_quantization({"quantization_config": "int8"}, "x")


@pytest.mark.parametrize(
    "schemes, layout",
    [
        ({"a": Scheme.W8A8, "b": Scheme.FLOAT}, "int-quantized"),
        ({"a": Scheme.W8A16, "b": Scheme.W8A16}, "pack-quantized"),
        ({"a": Scheme.W8A8, "b": Scheme.W8A16, "c": Scheme.FLOAT, "d": Scheme.W8A8}, "mixed-precision"),
    ],
)
def test_what_is_written_reads_back(schemes: dict[str, Scheme], layout: str) -> None:
    config = quantization_config(schemes)
    assert config["format"] == layout and config["quantization_status"] == "compressed"
    parsed = parse_quantization({"quantization_config": config}, "x")
    assert parsed is not None
    for module, scheme in schemes.items():
        group = parsed.group_of(module)
        if scheme is Scheme.FLOAT:
            assert group is None and module in config["ignore"]
        else:
            assert group is not None and group.dynamic == (scheme is Scheme.W8A8)
            assert group.packed == (scheme is Scheme.W8A16)
