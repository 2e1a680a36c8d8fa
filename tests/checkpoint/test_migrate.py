"""Migration: the codes are those of the definition, the rest is untouched, and nothing is lost on the way."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file
from tiny_checkpoint import save
from tiny_checkpoint import tensors as random_tensors
from tiny_checkpoints import CONFIG, MakeCheckpoint

from bminf_lite.backend import quantization
from bminf_lite.backend.quantization import Int8Weight, quantize_weight, rows_fit_fp16
from bminf_lite.checkpoint.fp16_range import product_shift
from bminf_lite.checkpoint.migrate import migrate
from bminf_lite.checkpoint.opened_model import describe_model, open_model
from bminf_lite.checkpoint.reader import open_checkpoint
from bminf_lite.checkpoint.recipe import Recipe, Scheme
from bminf_lite.errors import CheckpointError, UsageError
from bminf_lite.models.spec import Role

RULES = {"*.down_proj.weight": Scheme.W8A16, "model.layers.1.mlp*": Scheme.FLOAT}
MIXED = Recipe("mixed", Scheme.W8A8, Scheme.FLOAT, RULES)
LINEAR = "model.layers.0.mlp.up_proj.weight"


def expect_migrated(source: Path, out: Path, recipe: Recipe) -> None:
    """``out`` holds what the definition makes of ``source``; fp32 embeddings become fp16 where that holds them."""
    with open_checkpoint(source) as before, open_model(out) as after:
        spec = after.spec
        schemes = {
            name: recipe.scheme_of(name, p.role.value == "head") if p.role.value in ("linear", "head") else Scheme.FLOAT
            for name, p in spec.parameters.items()
        }
        factors = {}  # of gated products beyond fp16
        for product in spec.gated:
            if Scheme.FLOAT not in {schemes[name] for name in (product.gate, product.up, product.down)}:
                shift = product_shift(before, product)
                factors |= {product.up: np.float32(2.0**-shift), product.down: np.float32(2.0**shift)}
        for name, scheme in schemes.items():
            if name in spec.tied:
                continue
            stored = before.read(name)
            if scheme is Scheme.FLOAT:
                got = after.checkpoint.read(name)
                is_table = spec.parameters[name].role is Role.EMBEDDING
                if is_table and stored.dtype == np.float32 and rows_fit_fp16(stored):
                    stored = stored.astype(np.float16)
                assert got.dtype == stored.dtype and got.tobytes() == stored.tobytes()
                continue
            got = after.checkpoint.weight(name)
            expected = quantize_weight(stored, scheme is Scheme.W8A8)
            assert isinstance(got, Int8Weight) and got.dynamic == expected.dynamic
            factor = factors.get(name, np.float32(1))
            assert got.scale.dtype == (expected.scale.dtype if factor == 1 else np.float32)
            np.testing.assert_array_equal(got.codes, expected.codes)
            np.testing.assert_array_equal(got.scale, expected.scale.astype(np.float32) * factor)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("recipe", ["w8a8", "w8a16", MIXED], ids=["w8a8", "w8a16", "mixed"])
@pytest.mark.parametrize("tied, shards", [(False, 1), (True, 3)])
def test_output_is_what_the_definition_says(
    make_checkpoint: MakeCheckpoint, tmp_path: Path, dtype: Any, recipe: Any, tied: bool, shards: int
) -> None:
    config = CONFIG | {"tie_word_embeddings": tied, "intermediate_size": 27}
    source = make_checkpoint(tensors=random_tensors(config, dtype=dtype), shards=shards, **config)
    report = migrate(source, tmp_path / "out", recipe, shard_bytes=2000 if tied else 10**9)
    assert len(list((tmp_path / "out").glob("*.safetensors"))) == 1 or tied
    expect_migrated(source, tmp_path / "out", report.recipe)
    assert report.tied_head == (report.recipe.head if tied else None)


@pytest.mark.parametrize(
    ("row", "narrowed"),
    [
        (lambda row: row * 0, True),
        (lambda row: row * 1e-3, True),
        (lambda row: row * 1e4, True),
        (lambda row: row * 1e-6, False),
        (lambda row: row * 1e6, False),
        (lambda row: row + 0.1, True),
    ],
)
def test_an_fp32_embedding_is_fp16_where_that_has_full_precision(
    make_checkpoint: MakeCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, row: Any, narrowed: bool
) -> None:
    """In whichever block the row is that fp16 cannot hold; a GPU has the same table from both."""
    monkeypatch.setattr(quantization, "BLOCK_ELEMENTS", 40)
    tensors = random_tensors(CONFIG)
    table = tensors["model.embed_tokens.weight"]
    table[-2] = row(table[-2])
    source = make_checkpoint(tensors=tensors)
    report = migrate(source, tmp_path / "out")
    with open_model(tmp_path / "out") as model:
        stored = model.checkpoint.read("model.embed_tokens.weight")
    assert stored.dtype == (np.float16 if narrowed else np.float32)
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(stored.astype(np.float16), table.astype(np.float16))
    error = np.abs(stored.astype(np.float32) - table)
    assert (error <= 2.0**-11 * np.abs(table).max(axis=1, keepdims=True)).all()
    (tensor,) = (t for t in report.tensors if t.name == "model.embed_tokens.weight")
    assert (tensor.bytes_before, tensor.bytes_after) == (table.nbytes, stored.nbytes)
    assert migrate(source, tmp_path / "dry", dry_run=True).bytes_after == report.bytes_after


@pytest.mark.parametrize("scheme", ["w8a8", "w8a16"])
def test_small_rows_zero_rows_and_blocks(
    make_checkpoint: MakeCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scheme: str
) -> None:
    """Whatever the size of a block, and in whichever block the row is that needs fp32 scales."""
    monkeypatch.setattr(quantization, "BLOCK_ELEMENTS", 40)
    tensors = random_tensors(CONFIG)
    tensors[LINEAR][5] = 0
    tensors["model.layers.0.self_attn.q_proj.weight"][11] *= 1e-4
    tensors["model.layers.1.self_attn.q_proj.weight"][0] = 1e-44
    tensors["model.layers.0.self_attn.k_proj.weight"][-1] = 1e30
    tensors["model.layers.0.self_attn.v_proj.weight"][:] = 0
    source = make_checkpoint(tensors=tensors)
    report = migrate(source, tmp_path / "out", scheme)
    expect_migrated(source, tmp_path / "out", report.recipe)
    with open_checkpoint(tmp_path / "out") as out:
        types = {n: w.scale.dtype for n in tensors if isinstance(w := out.weight(n), Int8Weight)}
    assert [n for n, dtype in types.items() if dtype == np.float32] == [
        "model.layers.0.self_attn.q_proj.weight",
        "model.layers.0.self_attn.k_proj.weight",
    ]
    rows = {row.name: row for row in report.tensors}
    zero = rows["model.layers.0.self_attn.v_proj.weight"]
    assert zero.snr_db is None and zero.worst_row is None and zero.scale_min == zero.scale_max == 1


def test_report_and_manifest(make_checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    source, out = make_checkpoint(shards=2), tmp_path / "out"
    report = migrate(source, out)
    assert json.loads((out / "bminf_lite.json").read_text()) == json.loads(json.dumps(report.manifest()))
    stored = {name: value.nbytes for name, value in load_file(out / "model.safetensors").items()}
    assert report.bytes_after == sum(stored.values())
    assert report.bytes_before == sum(value.nbytes for value in random_tensors(CONFIG).values())
    for file in report.sources:
        content = (source / file.name).read_bytes()
        digest = xxhash.xxh3_128_digest(content)  # of the only part of a small file
        assert file.bytes == len(content) and file.xxh3 == xxhash.xxh3_128_hexdigest(digest)
    assert {file.name for file in report.sources} == {path.name for path in source.iterdir()}
    with open_checkpoint(source) as before, open_checkpoint(out) as after:
        for row in report.tensors:
            weight = before.read(row.name).astype(np.float64)
            got = after.weight(row.name)
            if row.scheme is Scheme.FLOAT:
                assert row.bytes_after == stored[row.name] and row.snr_db is None
                continue
            assert isinstance(got, Int8Weight)
            assert row.bytes_after == stored[row.name] + stored[f"{row.name}_scale"]
            signal, noise = (weight**2).sum(axis=1), ((weight - got.dequantize()) ** 2).sum(axis=1)
            assert row.snr_db is not None and row.worst_row_snr_db is not None
            # fp32 sums of a few dozen squares
            assert row.snr_db == pytest.approx(10 * math.log10(signal.sum() / noise.sum()), abs=1e-3)
            assert row.worst_row == np.argmin(signal / noise)
            assert row.worst_row_snr_db == pytest.approx(10 * math.log10((signal / noise).min()), abs=1e-3)
            assert (row.scale_min, row.scale_max) == (got.scale.min(), got.scale.max())


def test_dry_run_writes_nothing_and_foretells(make_checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    source = make_checkpoint()
    foretold = migrate(source, tmp_path / "out", MIXED, dry_run=True)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]
    reports = foretold, migrate(source, tmp_path / "out", MIXED)
    columns = [[(r.name, r.scheme, r.bytes_before, r.bytes_after) for r in report.tensors] for report in reports]
    assert columns[0] == columns[1]


def test_what_is_carried_along(make_checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    source, out = make_checkpoint(), tmp_path / "out"
    carried = ["tokenizer.json", "tokenizer.model", "chat_template.jinja", "generation_config.json"]
    carried += ["LICENSE.txt", "README.md", "merges.txt"]
    left = ["pytorch_model.bin", "pytorch_model.bin.index.json", "model.py", ".hidden.json", "bminf_lite.json"]
    for name in carried + left:
        (source / name).write_text(json.dumps({"name": name}))
    (source / "additional_chat_templates").mkdir()
    (source / "additional_chat_templates" / "rag.jinja").write_text("x")
    (source / "folder.json").mkdir()
    migrate(source, out)
    for name in [*carried, "additional_chat_templates/rag.jinja"]:
        assert (out / name).read_bytes() == (source / name).read_bytes()
    expected = {*carried, "additional_chat_templates", "bminf_lite.json", "config.json", "model.safetensors"}
    assert {path.name for path in out.iterdir()} == expected
    config = json.loads((out / "config.json").read_text())
    assert config.pop("quantization_config")["quantization_status"] == "compressed"
    assert config == json.loads((source / "config.json").read_text())


def test_what_generation_does_not_obey_is_named(make_checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    source = make_checkpoint()
    named = "generation_config.json: not obeyed here: num_beams is 4 (there is no beam search); max_time is 3"
    for values, text in (({"num_beams": 4, "typical_p": 0.9, "max_time": 3}, named), ({"top_k": 3}, "")):
        (source / "generation_config.json").write_text(json.dumps(values))
        report = migrate(source, tmp_path / "out", "w8a16", dry_run=True)
        assert report.not_obeyed == text and text in str(report)


def test_fields_of_a_configuration_that_strict_json_lacks_are_kept(
    make_checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    source, out = make_checkpoint(), tmp_path / "out"
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"limit": math.inf, "name": "\ud800", "author": "Zoë"}))
    migrate(source, out)
    written = json.loads((out / "config.json").read_text())
    assert (written["limit"], written["name"], written["author"]) == (math.inf, "\ud800", "Zoë")


def test_every_tensor_with_a_nan_is_told(make_checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    tensors = random_tensors(CONFIG)
    tensors[LINEAR][7, 3] = np.nan
    tensors["lm_head.weight"][0, 0] = -np.inf
    tensors["model.embed_tokens.weight"][39, 1] = np.inf
    tensors["model.norm.weight"][2] = np.nan
    source = make_checkpoint(tensors=tensors)
    for recipe in ("w8a8", "w8a16"):
        with pytest.raises(CheckpointError) as caught:
            migrate(source, tmp_path / "out", recipe)
        text = str(caught.value)
        assert "4 problems" in text and f"tensor '{LINEAR}' holds a NaN or an infinity, first in row 7" in text
        assert "'model.embed_tokens.weight' holds a NaN or an infinity, first in row 39" in text
        assert text.endswith("export the checkpoint again")
        assert "tensor 'model.norm.weight' holds a NaN or an infinity\n" in text and "int8 scale" not in text
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_sources_that_cannot_be_migrated(make_checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    source = make_checkpoint()
    migrate(source, tmp_path / "int8")
    with pytest.raises(CheckpointError, match="is quantized already"):
        migrate(tmp_path / "int8", tmp_path / "out")
    with pytest.raises(CheckpointError, match="model_type 'nonsense' is not supported"):
        migrate(make_checkpoint("other", model_type="nonsense", tensors=random_tensors(CONFIG)), tmp_path / "out")
    with pytest.raises(CheckpointError, match="missing tensor"):
        migrate(make_checkpoint("less", tensors={"x": np.zeros(1, np.float32)}), tmp_path / "out")
    with pytest.raises(CheckpointError, match="holds the source"):
        migrate(source, tmp_path, force=True)
    with pytest.raises(UsageError, match="matches 'nothing'"):
        migrate(source, tmp_path / "out", Recipe("r", Scheme.W8A8, Scheme.W8A8, {"nothing": Scheme.FLOAT}))
    with pytest.raises(UsageError, match="leaves every weight matrix"):
        migrate(source, tmp_path / "out", Recipe("r", Scheme.FLOAT, Scheme.FLOAT))
    assert not (tmp_path / "out").exists()


def test_too_many_inputs_for_an_exact_sum(make_checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    config = CONFIG | {"intermediate_size": 131_072, "num_hidden_layers": 1}
    source = make_checkpoint(tensors=random_tensors(config, dtype=np.float16), **config)
    with pytest.raises(CheckpointError, match=r"down_proj.weight' \[16, 131072\]: w8a8 allows 131,071 inputs"):
        migrate(source, tmp_path / "out", dry_run=True)
    migrate(source, tmp_path / "out", "w8a16", dry_run=True)


def test_progress_and_interruption(make_checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    calls: list[tuple[int, int, str]] = []
    source = make_checkpoint()
    report = migrate(source, tmp_path / "out", progress=lambda *call: calls.append(call))
    done = [call[0] for call in calls]
    assert done == sorted(done) and done[-1] == calls[-1][1] == report.bytes_before
    assert [name for _, _, name in calls] == [row.name for row in report.tensors]

    def interrupt(done: int, total: int, name: str) -> None:
        if done > total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        migrate(source, tmp_path / "out2", progress=interrupt)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "source"]


def test_source_that_changes_meanwhile(make_checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    source = make_checkpoint()

    def shrink(done: int, total: int, name: str) -> None:
        os.truncate(source / "model.safetensors", 1000)

    with pytest.raises(CheckpointError, match=r"changed since it was opened|became shorter"):
        migrate(source, tmp_path / "out", progress=shrink)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


@pytest.mark.slow
@given(st.integers(1, 9), st.integers(1, 70), st.integers(0, 2**32), st.sampled_from([1, 16, 4096]))
def test_threads_give_what_one_call_gives(
    tmp_path_factory: pytest.TempPathFactory, heads: int, inner: int, seed: int, block: int
) -> None:
    """Random shapes and magnitudes, and blocks of any size."""
    config = CONFIG | {"hidden_size": 2 * heads, "num_attention_heads": heads, "intermediate_size": inner}
    folder = tmp_path_factory.mktemp("m")
    random = np.random.default_rng(seed)
    tensors = random_tensors(config)
    for value in tensors.values():
        value *= np.float32(10.0 ** random.uniform(-8, 3))
    save(folder / "source", config, tensors)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quantization, "BLOCK_ELEMENTS", block)
        report = migrate(folder / "source", folder / "out", "w8a16" if seed % 2 else "w8a8")
    expect_migrated(folder / "source", folder / "out", report.recipe)


@pytest.mark.parametrize("shards", [1, 2])
def test_torch_files_give_the_bits_that_safetensors_give(
    make_checkpoint: MakeCheckpoint, tmp_path: Path, shards: int
) -> None:
    """With a matrix that lies transposed in the file, as ``state_dict`` may hold one."""
    tensors = random_tensors(CONFIG)
    migrate(make_checkpoint(tensors=tensors), tmp_path / "expected")
    name = "model.layers.1.mlp.down_proj.weight"
    tensors[name] = np.ascontiguousarray(tensors[name].T).T
    folder = make_checkpoint("torch", tensors, shards, "legacy" if shards == 2 else "bin")
    report = migrate(folder, tmp_path / "got")
    got, wanted = (load_file(tmp_path / out / "model.safetensors") for out in ("got", "expected"))
    assert got.keys() == wanted.keys()
    assert all(got[k].dtype == wanted[k].dtype and got[k].tobytes() == wanted[k].tobytes() for k in wanted)
    assert {source.name for source in report.sources} == {file.name for file in folder.iterdir()}
    assert not list((tmp_path / "got").glob("pytorch_model*"))


def test_memory_does_not_grow_with_the_file(make_checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    """A PyTorch file of 40 MB is migrated by a process on one core that grows by 30 MB at most."""
    config = CONFIG | {"num_hidden_layers": 5, "hidden_size": 256, "intermediate_size": 2048, "num_attention_heads": 4}
    rows = np.random.default_rng(0).standard_normal((2048, 256)).astype(np.float32)
    tensors = {}
    for name, parameter in describe_model(config).spec.parameters.items():
        large = np.resize(rows, parameter.shape)
        tensors[name] = np.ascontiguousarray(large.T).T if "layers.0." in name else large
    folder = make_checkpoint(tensors=tensors, form="bin", **config)
    assert (folder / "pytorch_model.bin").stat().st_size > 35e6
    code = (
        "import os, re, sys, bminf_lite.checkpoint.migrate as m\n"
        "os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])\n"
        "def memory(what): return int(re.search(what + r':\\s+(\\d+)', open('/proc/self/status').read())[1])\n"
        "before = memory('VmRSS')\n"
        "m.migrate(sys.argv[1], sys.argv[2])\n"
        "print(memory('VmHWM') - before)"
    )
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", code, str(folder), str(tmp_path / "out")]
    result = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert int(result.stdout) < 30_000


def test_links_out_of_the_source_are_not_carried_along(make_checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    """But links within it are, and those in the cache of Hugging Face, whose files are links to blobs."""
    (tmp_path / "secret").write_text("secret")
    source = make_checkpoint()
    (source / "LICENSE").symlink_to(tmp_path / "secret")
    (source / "tokenizer.json").write_text("{}")
    (source / "README.md").symlink_to("tokenizer.json")
    report = migrate(source, tmp_path / "out")
    assert report.skipped == (f"LICENSE is a link to {tmp_path / 'secret'}, outside of the source",)
    assert f"not copied: {report.skipped[0]}" in str(report)
    assert not (tmp_path / "out" / "LICENSE").exists() and (tmp_path / "out" / "README.md").read_text() == "{}"
    snapshot = tmp_path / "models--a--b" / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    (tmp_path / "models--a--b" / "blobs").mkdir()
    for file in source.iterdir():
        (tmp_path / "models--a--b" / "blobs" / file.name).write_bytes(file.read_bytes())
        (snapshot / file.name).symlink_to(f"../../blobs/{file.name}")
    assert not migrate(snapshot, tmp_path / "out2").skipped
    assert (tmp_path / "out2" / "LICENSE").read_text() == "secret"


def test_files_that_cannot_be_carried_along_are_named(make_checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    """A copy of a snapshot without its blobs would otherwise lose its tokenizer without a word."""
    source = make_checkpoint()
    (source / "tokenizer.json").symlink_to("../../blobs/0123")
    os.mkfifo(source / "merges.txt")
    report = migrate(source, tmp_path / "out")
    assert report.skipped == (
        "merges.txt is not a regular file",
        "tokenizer.json is a link to ../../blobs/0123, which does not exist",
    )
