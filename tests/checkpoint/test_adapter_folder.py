"""Adapters' folders: what is read, how it is scaled and changed, and what is refused by name."""

from __future__ import annotations

import gc
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from adapter_files import CONFIG, MODULES, factors, merged, modules_of, random_adapter, write_adapter
from safetensors.numpy import load_file, save_file

import bminf_lite
from bminf_lite.adapters import adapter_sites
from bminf_lite.backend.adapter_slots import SavedMatrix
from bminf_lite.checkpoint.adapter_folder import AdapterFolder, read_adapter, scale_of
from bminf_lite.checkpoint.opened_model import open_model
from bminf_lite.checkpoint.weight_rewrite import packed_vector, unpacked_vector
from bminf_lite.errors import CheckpointError, UsageError

TOKENS = np.random.default_rng(5).integers(0, 250, 40)


def read(folder: Path, base: Path) -> AdapterFolder:
    with open_model(base) as model:
        sites = adapter_sites(model)
        return read_adapter(folder, model, sites.names(), sites.names(SavedMatrix))


def error(logits: np.ndarray, expected: np.ndarray) -> float:
    return float(np.linalg.norm(logits - expected) / np.linalg.norm(expected))


# -- what it computes -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"use_rslora": True}, {"lora_alpha": 3, "alpha_pattern": {"x_proj": 9}}])
def test_an_adapter_gives_what_the_merged_model_gives(source: Path, tmp_path: Path, options: dict[str, Any]) -> None:
    adapter = random_adapter(tmp_path / "adapter", source, **options)
    scale = options.get("lora_alpha", 8) / (2 if options.get("use_rslora") else 4)
    other = merged(source, adapter, tmp_path / "merged", scale)
    with (
        bminf_lite.load(source, device="cpu", adapters={"a": adapter}) as model,
        bminf_lite.load(other, device="cpu") as expected,
    ):
        theirs = expected.logits(TOKENS)
        assert error(model.logits(TOKENS, adapter="a"), theirs) < 1e-5 < error(model.logits(TOKENS), theirs)
        assert model.generate("hello", max_new_tokens=8, adapter="a").text == (
            expected.generate("hello", max_new_tokens=8).text
        )


ROTATED = 'linear = "w8a8"\nhead = "w8a8"\noffline_rotation = true\n'


@pytest.mark.parametrize("recipe", ["w8a8", "w8a16", "w8a8-rotate", ROTATED], ids=lambda r: r.split("\n")[-2:][0])
def test_on_a_migrated_model(source: Path, tmp_path: Path, recipe: str) -> None:
    """It costs what int8 costs the merged model; docs/numerics.md."""
    if "\n" in recipe:
        (tmp_path / "recipe.toml").write_text(recipe)
        recipe = str(tmp_path / "recipe.toml")
    adapter = random_adapter(tmp_path / "adapter", source, lora_alpha=2)
    other = merged(source, adapter, tmp_path / "merged", 0.5)
    for name in ("source", "merged"):
        bminf_lite.migrate(source if name == "source" else other, tmp_path / f"{name}-int8", recipe)
    with bminf_lite.load(other, device="cpu") as model:
        expected = model.logits(TOKENS)
    with bminf_lite.load(tmp_path / "merged-int8", device="cpu") as model:
        loss = error(model.logits(TOKENS), expected)
    with bminf_lite.load(tmp_path / "source-int8", device="cpu", adapters={"a": adapter}) as model:
        assert error(model.logits(TOKENS, adapter="a"), expected) < 1.5 * loss < 0.1


@pytest.mark.parametrize("recipe", [None, "w8a8", ROTATED], ids=["float", "w8a8", "rotated"])
def test_saved_copies_of_head_and_table(source: Path, tmp_path: Path, recipe: str | None) -> None:
    """As the model that has them in its files; another adapter and the model keep theirs in the same step."""
    rng, weights = np.random.default_rng(9), load_file(source / "model.safetensors")
    ends = {"lm_head": "lm_head.weight", "model.embed_tokens": "model.embed_tokens.weight"}
    changed = {n: weights[w] + 0.2 * rng.standard_normal(weights[w].shape).astype(np.float32) for n, w in ends.items()}
    tensors = factors(source, modules_of(source)[:4])
    saved = {f"base_model.model.{name}.weight": values for name, values in changed.items()}
    adapter = write_adapter(tmp_path / "saved", {**tensors, **saved}, r=4, modules_to_save=["lm_head", "embed_tokens"])
    plain = random_adapter(tmp_path / "plain", source)
    other = merged(source, write_adapter(tmp_path / "only", tensors, r=4), tmp_path / "merged", 2)
    replaced = {ends[name]: values for name, values in changed.items()}
    save_file({**load_file(other / "model.safetensors"), **replaced}, other / "model.safetensors")
    base = source
    if recipe is not None:
        if "\n" in recipe:
            (tmp_path / "recipe.toml").write_text(recipe)
            recipe = str(tmp_path / "recipe.toml")
        bminf_lite.migrate(source, base := tmp_path / "int8", recipe)
    with bminf_lite.load(other, device="cpu") as model:
        expected = model.logits(TOKENS)
    with bminf_lite.load(base, device="cpu", adapters={"saved": adapter, "plain": plain}) as model:
        assert error(model.logits(TOKENS, adapter="saved"), expected) < (1e-5 if recipe is None else 0.03)
        names = ["saved", "plain", None]
        alone = [model.generate("hello", max_new_tokens=6, adapter=name).text for name in names]
        streams = [model.stream("hello", max_new_tokens=6, adapter=name) for name in names]
        assert ["".join(piece.text for piece in stream) for stream in streams] == alone
    with bminf_lite.load(base, device="cpu", adapters={"plain": plain}) as model:
        no_room = "has a copy of lm_head.weight, model.embed_tokens.weight, for which there is no room"
        with pytest.raises(UsageError, match=re.escape(no_room)):
            model.load_adapter("saved", adapter)


def test_scales_are_those_of_peft() -> None:
    patterns = {"q_proj": 6, r"layers\.1\.mlp\..*": 10}
    config = {"lora_alpha": 16, "alpha_pattern": patterns}
    assert scale_of("model.layers.0.self_attn.k_proj", 8, config) == 2
    assert scale_of("model.layers.0.self_attn.q_proj", 8, config) == 0.75
    assert scale_of("model.layers.1.mlp.up_proj", 4, config) == 2.5
    assert scale_of("model.layers.11.mlp.up_proj", 4, config) == 4
    assert scale_of("a.q_proj", 9, {**config, "use_rslora": True}) == 2
    with pytest.raises(CheckpointError, match=r"alpha_pattern has '\(', which is no regular expression"):
        scale_of("a", 4, {"alpha_pattern": {"(": 1}})


def test_vectors_in_the_manifest_keep_every_bit() -> None:
    values = np.random.default_rng(0).standard_normal(300).astype(np.float32)
    values[:3] = 0, -0.0, np.float32(1e-42)
    np.testing.assert_array_equal(unpacked_vector(packed_vector(values)).view(np.int32), values.view(np.int32))


def test_without_options_a_model_has_room_for_rank_16(source: Path, tmp_path: Path) -> None:
    small, large = (random_adapter(tmp_path / str(rank), source, rank) for rank in (4, 17))
    with bminf_lite.load(source, device="cpu", adapters={"small": small}) as model:
        with pytest.raises(UsageError, match="rank 17, but there is room for 16: load the model with max_adapter_rank"):
            model.load_adapter("large", large)
        assert model.adapters == {"small": str(small)}
    with bminf_lite.load(source, device="cpu", adapters={"large": large}) as model:
        model.load_adapter("small", small)
        with pytest.raises(UsageError, match="adapter 'small' is loaded already"):
            model.load_adapter("small", small)
        model.load_adapter("small", large, replace=True)
        model.unload_adapter("large")
        assert model.adapters == {"small": str(large)}
        for use in (lambda: model.generate("a", adapter="large"), lambda: model.logits([1], adapter="large")):
            with pytest.raises(UsageError, match="adapter is 'large', but the model has 'small': load it first"):
                use()
    with bminf_lite.load(source, device="cpu") as model:
        with pytest.raises(UsageError, match="without room for adapters: load it with adapters="):
            model.load_adapter("small", small)
        with pytest.raises(UsageError, match="the model has none"):
            model.generate("a", adapter="small")


def test_a_loaded_model_keeps_no_folder_that_was_read(source: Path, tmp_path: Path) -> None:
    """Only what is copied to the slots stays in memory."""
    first, second = (random_adapter(tmp_path / str(seed), source, seed=seed) for seed in (1, 2))
    with bminf_lite.load(source, device="cpu", adapters={"first": first}) as model:
        model.load_adapter("second", second)
        gc.collect()
        kept = [found for found in gc.get_objects() if isinstance(found, AdapterFolder)]
        assert [folder.path for folder in kept if folder.path in (first, second)] == []
        assert list(model.adapters) == ["first", "second"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"adapters": "folder"}, "adapters is 'folder', but must map names to folders"),
        ({"adapters": {"": "x"}}, "the name of an adapter is '', but must be 1 to 256 printable characters"),
        ({"adapters": {}, "max_adapters": 0}, "max_adapters"),
        ({"adapters": {}, "max_adapter_rank": 513}, "max_adapter_rank"),
    ],
)
def test_bad_options_are_refused(source: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        bminf_lite.load(source, device="cpu", **options)


# -- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"peft_type": "IA3"},
            "peft_type is 'IA3', and adapters are LORA here; merge the adapter into the float model",
        ),
        ({"use_dora": True}, "has DoRA, which scales the rows of each matrix, which is not done here"),
        ({"bias": "all"}, "has trained biases"),
        ({"modules_to_save": ["lm_head"], "ensure_weight_tying": True}, "a trained table that is the head too"),
        ({"trainable_token_indices": [1]}, "trained tokens"),
        ({"layer_replication": [[0, 1]]}, "replicated layers"),
        ({"r": 0}, "r is 0, but must be a number above 0"),
        ({"lora_alpha": "8"}, "lora_alpha is '8'"),
        ({"alpha_pattern": [1]}, r"alpha_pattern is \[1\], but must be an object"),
        ({"alpha_pattern": {"q_proj": "8"}}, "alpha_pattern has '8' for 'q_proj', but must have a number above 0"),
    ],
)
def test_what_is_not_done_is_named(source: Path, tmp_path: Path, config: dict[str, Any], message: str) -> None:
    adapter = random_adapter(tmp_path / "adapter", source)
    (adapter / "adapter_config.json").write_text(json.dumps({**CONFIG, **config}))
    with pytest.raises(CheckpointError, match=message):
        read(adapter, source)


def rename(old: str, new: str) -> Callable[[dict[str, np.ndarray]], None]:
    def change(tensors: dict[str, np.ndarray]) -> None:
        tensors[new] = tensors.pop(old)

    return change


def put(name: str, values: np.ndarray) -> Callable[[dict[str, np.ndarray]], None]:
    return lambda tensors: tensors.update({name: values})


Q = "base_model.model.model.layers.0.self_attn.q_proj"
EMBEDDING = "base_model.model.model.embed_tokens"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (rename(f"{Q}.lora_A.weight", f"{Q}.lora_A.bias"), "a trained bias, which is not done here"),
        (rename(f"{Q}.lora_A.weight", "x.lora_A.weight"), "has one factor of 'x', not both"),
        (
            put(f"{Q}.lora_A.weight", np.ones((4, 33), np.float32)),
            r"factors \[4, 33\] and \[32, 4\], but its matrix here",
        ),
        (put(f"{Q}.lora_A.weight", np.full((4, 32), np.nan, np.float32)), "holds a NaN or an infinity"),
        (put(f"{Q}.lora_A.weight", np.ones((4, 32), np.int8)), "is I8, not one of"),
        (put(f"{Q}.lora_magnitude_vector", np.ones(32, np.float32)), "DoRA, which is not done here"),
        (put(f"{EMBEDDING}.lora_embedding_A", np.ones((4, 260), np.float32)), "has one factor of 'model.embed_tokens"),
        (
            put("base_model.model.x.lora_embedding_A", np.ones((4, 260), np.float32)),
            "an embedding that this model does",
        ),
        (
            put("base_model.model.lm_head.base_layer.weight", np.ones((264, 32), np.float32)),
            "trained with other tokens",
        ),
        (put("base_model.model.lm_head.weight", np.ones((261, 32), np.float32)), "trained with other tokens"),
        (put("base_model.model.lm_head.weight", np.full((260, 32), np.inf, np.float32)), "lm_head.weight' holds a NaN"),
        (put("base_model.model.lm_head.weight", np.ones((260, 32), np.int8)), "lm_head.weight' is I8, not one of"),
        (put("base_model.model.model.norm.weight", np.ones(32, np.float32)), "a trained copy of a module"),
    ],
)
def test_tensors_that_do_not_fit_are_named(
    source: Path, tmp_path: Path, change: Callable[[dict[str, np.ndarray]], None], message: str
) -> None:
    tensors = factors(source, modules_of(source))
    change(tensors)
    with pytest.raises(CheckpointError, match=message):
        read(write_adapter(tmp_path / "adapter", tensors), source)


def test_an_adapter_of_another_model_lists_everything(source: Path, tmp_path: Path) -> None:
    tensors = factors(source, modules_of(source))
    renamed = {name.replace("model.layers.1", "model.layers.9"): values for name, values in tensors.items()}
    with pytest.raises(CheckpointError) as found:
        read(write_adapter(tmp_path / "adapter", renamed), source)
    assert f"{len(MODULES)} problems" in str(found.value)
    assert "this model has no 'model.layers.9.mlp.up_proj.weight'; it has 'model.layers" in str(found.value)
    experts = {name.replace("mlp.up_proj", "mlp.experts.3.up_proj"): values for name, values in tensors.items()}
    with pytest.raises(CheckpointError, match=r"changes experts .* is not done for this arch"):
        read(write_adapter(tmp_path / "adapter", experts), source)


def test_the_copy_of_a_head_beside_its_adapter_is_not_read(source: Path, tmp_path: Path) -> None:
    tensors = factors(source, ["lm_head"])
    tensors["base_model.model.lm_head.base_layer.weight"] = load_file(source / "model.safetensors")["lm_head.weight"]
    assert list(read(write_adapter(tmp_path / "adapter", tensors), source).adapters) == ["lm_head.weight"]


def test_a_folder_that_this_user_may_not_read(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    exists = Path.exists

    def refuse(self: Path) -> bool:
        if self.name == "adapter_config.json":
            raise PermissionError(13, "Permission denied", str(self))
        return exists(self)

    adapter = random_adapter(tmp_path / "adapter", source)
    monkeypatch.setattr(Path, "exists", refuse)
    with pytest.raises(CheckpointError, match=r"adapter: cannot be read: Permission denied; let this user read"):
        read(adapter, source)


def test_folders_that_are_none(source: Path, tmp_path: Path) -> None:
    adapter = random_adapter(tmp_path / "outer" / "adapter", source)
    with pytest.raises(
        CheckpointError, match=r"is no adapter, because it has no adapter_config.json; give .*adapter, w"
    ):
        read(tmp_path / "outer", source)
    with pytest.raises(CheckpointError, match="does not exist; give the folder that PEFT saved"):
        read(tmp_path / "nothing", source)
    (adapter / "adapter_model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"holds neither adapter_model.safetensors nor adapter_model.bin"):
        read(adapter, source)
    write_adapter(adapter, {})
    with pytest.raises(CheckpointError, match="changes no matrix"):
        read(adapter, source)


def test_a_rotated_folder_of_an_earlier_version_is_refused(source: Path, tmp_path: Path) -> None:
    (tmp_path / "recipe.toml").write_text(ROTATED)
    bminf_lite.migrate(source, tmp_path / "out", tmp_path / "recipe.toml")
    adapter = random_adapter(tmp_path / "adapter", source)
    read(adapter, tmp_path / "out")
    manifest = json.loads((tmp_path / "out" / "bminf_lite.json").read_text())
    norms = manifest.pop("rotated_norms")
    damaged = {**manifest, "rotated_norms": dict.fromkeys(norms, "AAAA")}
    for value, message in (
        (manifest, "written by an earlier version"),
        (damaged, "cannot be read .*the file is damaged"),
    ):
        (tmp_path / "out" / "bminf_lite.json").write_text(json.dumps(value))
        with pytest.raises(CheckpointError, match=message):
            read(adapter, tmp_path / "out")
