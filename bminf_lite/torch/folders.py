"""Folders of int8 models in transformers: open a migrated one, write one as migration does."""

from __future__ import annotations

import fnmatch
import functools
import json
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import torch
from torch import Tensor, nn

from ..backend.quantization import Int8Weight, fits_fp16, rows_fit_fp16
from ..checkpoint.checksum import FileChecksums
from ..checkpoint.compressed_tensors import pack, packed_width, quantization_config
from ..checkpoint.manifest import MANIFEST_FILE, MigrationReport, TensorReport
from ..checkpoint.opened_model import CheckpointWeights, describe_model, open_model
from ..checkpoint.output_folder import output_folder
from ..checkpoint.recipe import Recipe, RotatedInputs, Scheme
from ..checkpoint.tensor_file import DTYPES
from ..checkpoint.writer import SHARD_BYTES, CheckpointWriter, TensorDeclaration, write_json
from ..errors import CheckpointError, UsageError, require_bool
from ..files import expand, thread_count
from ..models.spec import Parameter, Role
from . import ops, streaming
from .experts import compute_one_by_one
from .linear import Int8Linear
from .places import Place, fused_layers, fused_value, layer_at, owner_of, places, tensor_at

TOKENIZER_FILES = ("tokenizer*", "vocab*", "merges.txt", "special_tokens_map.json", "*.model", "chat_template*")
MATRICES = (Role.LINEAR, Role.HEAD, Role.ABSORBED)
"""The roles of matrices that a folder may hold in int8."""
TIED_ROWS = 1 << 12
"""Rows of an embedding that are compared at once."""
_TYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def from_migrated(
    path: str | Path,
    *,
    dtype: torch.dtype = torch.bfloat16,
    memory_limit: int | None = None,
    device: torch.device | str | None = None,
) -> Any:
    """The transformers model of a migrated folder, with int8 layers; no float copy of their weights ever exists.

    The model is of the class that ``architectures`` in ``config.json`` names. Its float parameters have ``dtype``.
    ``device`` and ``memory_limit`` are those of :func:`wrap`. Needs transformers and accelerate. Raises
    :class:`CheckpointError` if the folder is no such checkpoint, and for outlier columns, which only the engine runs,
    and :class:`UsageError` for a limit without a device, or one that is too small.
    """
    import transformers
    from accelerate import init_empty_weights

    streaming.check_limit(device, memory_limit)
    path = expand(path)
    with open_model(path) as opened:
        names = opened.checkpoint.config.get("architectures") or []
        kind = getattr(transformers, names[0], None) if names else None
        if kind is None:
            raise CheckpointError(f"{path}: config.json names no class of transformers in architectures: {names}")
        config = _config_class(kind, opened.checkpoint.config.get("model_type")).from_pretrained(path)
        if hasattr(config, "quantization_config"):
            del config.quantization_config
        config.dtype = dtype
        with init_empty_weights(), _default_dtype(dtype):
            model = kind(config)
        _fill(model, opened.weights(), dtype)
        manifest = opened.checkpoint.manifest
    generation = path / "generation_config.json"
    if generation.is_file() and model.can_generate():
        model.generation_config = transformers.GenerationConfig.from_pretrained(path)
    bind_save(model, _recipe_of(manifest.get("recipe")), manifest.get("rotated_offline") or ())
    streaming.move(model, device, memory_limit)
    return model.eval()


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Tensors that name no type get ``dtype``, and those that name one keep it, such as frequencies of positions."""
    previous = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(previous)


def _config_class(kind: Any, model_type: str | None) -> Any:
    """The class of a model's ``config.json``: that of its type, whose defaults may differ from those of its class.

    A type of text and images has a configuration for each, so its text model's is that of the class.
    """
    import transformers

    if model_type is None or model_type not in transformers.CONFIG_MAPPING:
        return kind.config_class
    own = transformers.CONFIG_MAPPING[model_type]
    return kind.config_class if own.sub_configs else own


def _fill(model: Any, weights: CheckpointWeights, dtype: torch.dtype) -> None:
    """Replace the layers of a model without values by int8 layers, and give all other parameters their values."""
    spec, path = weights.spec, weights.checkpoint.path
    if all(weights.scheme_of(name) is Scheme.FLOAT for name in spec.parameters):
        raise CheckpointError(f"{path}: has no int8 weights; migrate it first (bminf-lite migrate), or wrap the model")
    members: dict[str, dict[str, Place]] = {}
    for name, place in places(model, spec).items():
        members.setdefault(place.name, {})[name] = place

    def is_int8(name: str) -> bool:
        return spec.parameters[name].role in MATRICES and weights.scheme_of(name) is not Scheme.FLOAT

    has_experts = False
    for own, group in members.items():
        owner, attribute = owner_of(model, own)
        fused = next(iter(group.values())).fused
        if any(map(is_int8, group)):
            if fused is not None:
                if not all(map(is_int8, group)):
                    raise CheckpointError(f"{path}: experts of {own} are int8, and others float; migrate them alike")
                try:
                    stack = fused_layers({name: _int8_layer(name, weights) for name in group}, fused)
                except ValueError as error:
                    raise CheckpointError(f"{path}: {own}: {error}; migrate them alike") from None
                del owner._parameters[attribute]
                owner.add_module(attribute, stack)
                has_experts = True
                continue
            (name,) = group
            layer = _int8_layer(name, weights)
            if spec.parameters[name].role is Role.HEAD:
                layer.show_floats(dtype)
            replace_module(model, own.removesuffix(".weight"), layer)
        elif not group.keys() & spec.tied.keys():
            kept = torch.float32 if attribute in owner._buffers else dtype
            tensors = {name: _tensor(weights.vector(name), kept) for name in group}
            joined = torch.cat([*tensors.values()]) if len(tensors) > 1 else next(iter(tensors.values()))
            _assign(owner, attribute, fused_value(tensors, fused) if fused else joined)
    if has_experts:
        compute_one_by_one(model)
    by_name = {name: own for own, group in members.items() for name in group}
    for name, source in spec.tied.items():
        if name in by_name:
            owner, attribute = owner_of(model, by_name[name])
            if not isinstance(owner, Int8Linear):
                original, shared = owner_of(model, by_name[source])
                owner.register_parameter(attribute, original.get_parameter(shared))
    shared = model.get_input_embeddings().get_parameter("weight")
    for module in model.modules():  # encoder and decoder may have one each, which share their weight
        if isinstance(module, nn.Embedding) and module.weight.is_meta and module.weight.shape == shared.shape:
            module.weight = shared
    missing = [name for name, parameter in model.named_parameters() if parameter.device.type == "meta"]
    if missing:
        raise CheckpointError(f"{path}: the model has parameters that the folder lacks: {', '.join(missing)}")


def _int8_layer(name: str, weights: CheckpointWeights) -> Int8Linear:
    stored = weights.weight(name)
    assert isinstance(stored, Int8Weight)
    if stored.outliers is not None:
        raise CheckpointError(f"{weights.checkpoint.path}: {name} keeps columns in fp16, which only the engine can run")
    codes, scale = torch.from_numpy(np.array(stored.codes)), _tensor(stored.scale, torch.float32)
    transposed = weights.spec.parameters[name].transposed
    return Int8Linear(codes, scale, dynamic=stored.dynamic, transposed=transposed, rotation=stored.rotation)


def _assign(owner: nn.Module, attribute: str, values: Tensor) -> None:
    """Give a parameter or a buffer its values; a model may have it in another shape."""
    previous = getattr(owner, attribute, None)
    if previous is not None and previous.shape != values.shape and previous.numel() == values.numel():
        values = values.view(previous.shape)
    if attribute in owner._buffers:
        owner._buffers[attribute] = values
    else:
        owner.register_parameter(attribute, nn.Parameter(values))


def save_pretrained(
    model: nn.Module,
    folder: str | Path,
    *,
    recipe: Recipe | None = None,
    rotated_offline: Sequence[str] = (),
    force: bool = False,
) -> None:
    """Write a wrapped transformers model as the folder that ``bminf-lite migrate`` writes.

    ``config.json`` has the ``quantization_config``, ``model.safetensors`` (or shards) the codes and scales, and
    ``bminf_lite.json`` the manifest, without checksums of a source. Tokenizer files are copied from the folder that
    the model was loaded from, where there is one. ``recipe`` is what the manifest says, None one named "wrapped", and
    ``rotated_offline`` what it says was rotated in the weights; the method of a model of :func:`from_migrated` repeats
    those of its folder. The folder appears complete or not at all; ``force`` replaces an earlier result.

    A matrix that the source stored ``[in, out]`` is written as its dequantized values in fp32, from which loading makes
    the same codes. Raises :class:`CheckpointError` if the folder cannot be written, and :class:`UsageError` for a model
    without a transformers configuration or an output head, whose architecture this package does not know, with adapters
    of peft, or whose embedding was trained after the output head had been quantized from it.
    """
    require_bool("force", force)
    config = _config_of(model)
    if has_adapters(model):
        raise UsageError(
            "the model has adapters of peft; save those by the peft model's save_pretrained (or save_adapter), and the "
            "model that its unload() returns"
        )
    spec = describe_model(config).spec
    found = places(model, spec)
    layers = {
        name.removesuffix(".weight"): layer
        for name in spec.parameters
        if name in found and (layer := layer_at(model, found[name])) is not None
    }
    arrays: dict[str, np.ndarray] = {}
    schemes: dict[str, Scheme] = {}
    for name, parameter in spec.parameters.items():
        module = name.removesuffix(".weight")
        is_matrix = parameter.role in MATRICES
        layer = layers.get(module) if is_matrix else None
        scheme = Scheme.FLOAT if layer is None else Scheme.W8A8 if layer.dynamic else Scheme.W8A16
        if is_matrix:
            late = name in spec.tied or parameter.transposed
            schemes[module] = Scheme.FLOAT if late else scheme
        if name in spec.tied:
            if layer is not None:
                _check_tied(layer, name, *owner_of(model, found[spec.tied[name]].name))
            continue
        if layer is None and module in layers:
            arrays[name] = _array(layers[module].dequantize())
        elif layer is None:
            arrays[name] = _array(tensor_at(model, found[name])).reshape(parameter.shape)
            if parameter.role is Role.EMBEDDING and arrays[name].dtype == np.float32 and rows_fit_fp16(arrays[name]):
                arrays[name] = arrays[name].astype(np.float16)  # as migration does
        elif parameter.transposed:
            arrays[name] = _array(layer.dequantize().t())
        else:
            arrays |= _stored(module, layer)
    running = {f"{module}.weight": Scheme.W8A8 if layer.dynamic else Scheme.W8A16 for module, layer in layers.items()}
    tied = next((name for name in spec.tied if spec.parameters[name].role is Role.HEAD), None)
    late_schemes = {name: running[name] for name, p in spec.parameters.items() if p.transposed and name in running}
    quantized_late = [*late_schemes, *([tied] if tied is not None and tied in running else [])]
    late_rotations = {n: block for n in quantized_late if (block := layers[n.removesuffix(".weight")].rotation) > 1}
    tied_scheme = None if tied is None else running.get(tied, Scheme.FLOAT)
    rotations = {module: layer.rotation for module, layer in layers.items() if layer.rotation > 1}
    if not set(schemes.values()) <= {Scheme.FLOAT}:
        stored = {module: block for module, block in rotations.items() if schemes[module] is not Scheme.FLOAT}
        config["quantization_config"] = quantization_config(schemes, rotations=stored)
    report = MigrationReport(
        recipe or Recipe("wrapped", Scheme.W8A8, Scheme.W8A8),
        tied_scheme,
        _reports(arrays, schemes, spec.parameters),
        (),
        late=late_schemes,
        late_rotations=late_rotations,
        rotated_offline=tuple(rotated_offline),
    )
    target = expand(folder)
    with output_folder(target, force, sum(a.nbytes for a in arrays.values()) + (1 << 20)) as partial:
        _write(partial, arrays)
        write_json(partial / "config.json", config)
        _write_beside(model, partial)
        written = sorted(path for path in partial.rglob("*") if path.is_file())
        with ThreadPoolExecutor(thread_count(), "checksums") as pool:
            files = tuple(FileChecksums(written, partial, pool).records())
        write_json(partial / MANIFEST_FILE, replace(report, files=files).manifest())


def _check_tied(head: Int8Linear, name: str, owner: nn.Module, attribute: str) -> None:
    """Refuse a head whose codes are more than a step from the embedding's weight, from which loading would make it."""
    weight = owner.get_parameter(attribute)
    for first in range(0, len(weight), TIED_ROWS):
        rows = slice(first, first + TIED_ROWS)
        scale = head.scale[rows, None].to(weight.device)
        expected = ops.rotated(weight[rows].float(), head.rotation)
        if ((scale * head.codes[rows].to(weight.device) - expected).abs() > scale).any():
            raise UsageError(
                f"the embedding was trained after {name} had been quantized from it, and the folder has one matrix for "
                f"both; save the state_dict by torch.save, or train with the head float (skip) or the embedding frozen"
            )


def bind_save(model: nn.Module, recipe: Recipe | None, rotated_offline: Sequence[str] = ()) -> None:
    """Make :func:`save_pretrained` the method of a transformers model."""
    if "transformers" not in sys.modules:
        return
    from transformers import PreTrainedModel

    if isinstance(model, PreTrainedModel):
        model.save_pretrained = functools.partial(  # type: ignore[method-assign]
            save_pretrained, model, recipe=recipe, rotated_offline=rotated_offline
        )


def has_adapters(model: nn.Module) -> bool:
    """Whether peft has replaced layers of ``model``."""
    if "peft" not in sys.modules:
        return False
    from peft.tuners.tuners_utils import BaseTunerLayer

    return any(isinstance(module, BaseTunerLayer) for module in model.modules())


def replace_module(model: nn.Module, name: str, layer: nn.Module) -> None:
    owner, attribute = owner_of(model, name)
    setattr(owner, attribute, layer)


def _recipe_of(manifest: Any) -> Recipe | None:
    """The recipe of a manifest, without its calibration, whose decisions are in the layers."""
    if not isinstance(manifest, dict):
        return None
    rules = {pattern: Scheme(scheme) for pattern, scheme in manifest.get("rules", {}).items()}
    rotations: dict[str, Any] = {key: manifest[key] for key in ("rotation", "offline_rotation") if key in manifest}
    if "rotated_inputs" in manifest:
        rotations["rotated_inputs"] = RotatedInputs(manifest["rotated_inputs"])
    return Recipe(manifest["name"], Scheme(manifest["linear"]), Scheme(manifest["head"]), rules, **rotations)


def _config_of(model: nn.Module) -> dict[str, Any]:
    """The ``config.json`` of a transformers model."""
    if "transformers" in sys.modules:
        from transformers import PreTrainedModel

        if isinstance(model, PreTrainedModel):
            parsed: dict[str, Any] = json.loads(model.config.to_json_string(use_diff=False))
            parsed.setdefault("architectures", [type(model).__name__])
            return parsed | {"architectures": parsed["architectures"] or [type(model).__name__]}
    raise UsageError(f"{type(model).__name__} is no transformers model; save its state_dict with torch.save")


def _tensor(values: np.ndarray, dtype: torch.dtype) -> Tensor:
    """A tensor of ``dtype`` from an fp32, fp16 or bf16 array."""
    array = np.array(values)
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16).to(dtype)
    return torch.from_numpy(array).to(dtype)


def _array(x: Tensor) -> np.ndarray:
    """A float tensor as an array of the same type, of fp32 for fp64, which checkpoints do not have."""
    own = x.detach().contiguous().cpu()
    if own.dtype == torch.float64:
        own = own.float()
    if own.dtype == torch.bfloat16:
        return own.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    values: np.ndarray = own.numpy()
    return values


def _stored(module: str, layer: Int8Linear) -> dict[str, np.ndarray]:
    """A layer's tensors in the compressed-tensors format, and its bias apart from them."""
    codes, scale = layer.codes.cpu().numpy(), layer.scale.cpu().numpy()
    narrow = scale.astype(np.float16)
    kept = narrow if fits_fp16(scale) and np.array_equal(narrow, scale) else scale
    tensors = {f"{module}.weight_scale": kept[:, None]}
    if layer.dynamic:
        return tensors | {f"{module}.weight": codes}
    packed = pack(codes).view(np.int32).reshape(len(codes), packed_width(codes.shape[1]))
    shape = np.array(codes.shape, np.int64)
    return tensors | {f"{module}.weight_packed": packed, f"{module}.weight_shape": shape}


def _reports(
    arrays: dict[str, np.ndarray], schemes: dict[str, Scheme], parameters: Mapping[str, Parameter]
) -> tuple[TensorReport, ...]:
    """The manifest's reports; what the matrices were before wrapping is no longer known."""
    return tuple(
        TensorReport(
            name,
            parameter.shape,
            "",
            schemes.get(name.removesuffix(".weight"), Scheme.FLOAT),
            0,
            sum(a.nbytes for n, a in arrays.items() if n.startswith(f"{name.removesuffix('.weight')}.weight"))
            if name.endswith(".weight")
            else arrays[name].nbytes,
        )
        for name, parameter in parameters.items()
        if name in arrays or f"{name}_packed" in arrays
    )


def _write(folder: Path, arrays: dict[str, np.ndarray]) -> None:
    declared = {name: TensorDeclaration(_TYPE_NAMES[a.dtype], a.shape) for name, a in arrays.items()}
    late = {name for name in arrays if name.endswith(".weight_scale")}
    writer = CheckpointWriter(folder, declared, late, SHARD_BYTES)
    try:
        for name, values in arrays.items():
            if name in late:
                writer.write_late(name, values)
            else:
                writer.write(name, values)
        writer.finish()
    finally:
        writer.close()


def _write_beside(model: Any, folder: Path) -> None:
    """The generation settings, and the tokenizer's files where the model was loaded from a folder."""
    if model.can_generate():
        write_json(folder / "generation_config.json", json.loads(model.generation_config.to_json_string()))
    source = Path(model.config.name_or_path)
    if not model.config.name_or_path or not source.is_dir():
        return
    for path in sorted(source.iterdir()):
        if path.is_file() and any(fnmatch.fnmatchcase(path.name, pattern) for pattern in TOKENIZER_FILES):
            shutil.copyfile(path, folder / path.name)
