"""What the kernels of recurrences do: gated DeltaNet and Mamba 2, chunk by chunk, and norms and gates of outputs."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np

from bminf_lite.backend import chunked_state, delta_net, mamba2
from bminf_lite.backend.cache_values import StateCache
from bminf_lite.backend.chunked_state import CHUNK, Chunk
from bminf_lite.backend.delta_net import ChannelChunk, DeltaChunk, TokenInputs
from bminf_lite.backend.functions import normalise, silu
from bminf_lite.backend.operations.recurrences import convolved as convolution_of
from bminf_lite.backend.routing import sigmoid
from bminf_lite.backend.values import DeltaNetSpec, ForwardBatch, GatedNorm, Mamba2Spec, Norm, ShortConvolution
from bminf_lite.cuda.kernels.constants import DELTA_NET_MAX_KEY_DIM as MAX_KEY_DIM
from bminf_lite.cuda.kernels.constants import PLACES_OF_32, TOKEN_TAPS
from bminf_lite.cuda.kernels.recurrent.chunks import FACTORS_BYTES, HEADS_AT_ONCE, TOKEN_COLUMNS, columns, rows_bytes

from .launching import Call, model

F32, F16 = np.float32, np.float16


def sequences_of(call: Call) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """The ends of the sequences, their first positions, their slots, and which of them are drafts."""
    count = call.count
    cu_seqlens, context_lens = (
        call.vector(name, n, np.int32) for name, n in (("cu_seqlens", count + 1), ("context_lens", count))
    )
    slots = call.rows("slots", count, call.slots_pitch, 1, np.int32, align=4)[:, 0]
    is_draft = np.zeros(count, bool)
    is_draft[1:] = bool(call.has_drafts) & (slots[1:] == slots[:-1]) & (slots[1:] != 0)
    return cu_seqlens, context_lens, slots, is_draft


def slot_arrays(call: Call, slots: int, sizes: tuple[int, int, int, int]) -> dict[str, np.ndarray]:
    """The arrays of the slots up to the last that a step has; ``sizes`` are heads and elements of keys and values."""
    key_heads, heads, keys, values = sizes
    shapes: dict[str, tuple[str, Any, tuple[int, ...]]] = {
        "state": ("states", F32, (heads, keys, values)),
        "keys": ("keys", F32, (call.ring_rows, key_heads, keys)),
        "deltas": ("deltas", F32, (call.ring_rows, heads, values)),
        "decays": ("decays", F32, (call.ring_rows, heads, keys) if has_channels(call) else (call.ring_rows, heads)),
        "end": ("ends", np.int32, (key_heads,)),
    }
    if corrects(call):
        shapes["solves"] = ("solves", F32, (call.ring_rows, heads, CHUNK))
    found = {}
    for array, (name, dtype, shape) in shapes.items():
        flat = call.rows(name, slots, getattr(call, f"{name}_pitch"), int(np.prod(shape)), dtype, align=4)
        strides = [4 * int(np.prod(shape[axis + 1 :])) for axis in range(len(shape))]
        found[array] = np.lib.stride_tricks.as_strided(flat, (slots, *shape), (flat.strides[0], *strides))
    return found


def sizes_of(call: Call) -> tuple[int, int, int, int]:
    """Heads and elements of keys and of values."""
    return call.key_heads, call.value_heads, call.key_dim, call.value_dim


def has_channels(call: Call) -> bool:
    """Whether each element of a key has a decay."""
    return corrects(call) and bool(call.number("CHANNELS"))


def corrects(call: Call) -> bool:
    """Whether the rule is that of a DeltaNet."""
    return "CHANNELS" in call.template


def decays_of(call: Call) -> int:
    """Sums of log-decays of a token."""
    return int(call.value_heads * (call.key_dim if has_channels(call) else 1))


def sums_of(call: Call) -> int:
    """What a step keeps of a token until its last kernel: sums of log-decays, and solves."""
    return decays_of(call) + int(call.value_heads) * CHUNK * corrects(call)


def inputs_of(call: Call, tokens: int, convolved: np.ndarray | None = None) -> tuple[TokenInputs, DeltaNetSpec]:
    """What the recurrence reads of the tokens, and the sizes of the layer; ``convolved``: where one kernel does all."""
    sizes = sizes_of(call)
    none: Any = None
    width = decays_of(call)
    of_heads, bias = call.vector("decay_rates", call.value_heads, F32), call.vector("decay_bias", width, F32)
    spec = DeltaNetSpec(*sizes, none, of_heads, bias, none, call.max_rate, has_channels(call))
    mixed = convolved
    if mixed is None:
        mixed = call.rows("mixed", tokens, call.mixed_pitch, spec.channels, F32, 4)
    rates = call.rows("token_rates", tokens, call.token_rates_pitch, call.value_heads, F32, 4)
    decays = call.rows("token_decays", tokens, call.token_decays_pitch, width, F32, 4)
    return delta_net.token_inputs(mixed, rates, decays, spec), spec


@model
def delta_rule(call: Call) -> None:
    inputs, _ = inputs_of(call, int(sequences_of(call)[0][-1]))
    in_chunks(call, ChannelChunk if has_channels(call) else DeltaChunk, inputs)


@model
def delta_prepare(call: Call) -> None:
    check_places(call, MAX_KEY_DIM)


def check_places(call: Call, state_rows: int) -> None:
    """The memory of prepared chunks; what is in it, the model of the scan computes itself."""
    (places, key_heads, parts), group = call.launch.grid, call.value_heads // call.key_heads
    tokens = int(sequences_of(call)[0][-1])
    call.require(key_heads == call.key_heads and parts * HEADS_AT_ONCE >= group, "blocks are missing")
    call.require(places * 32 >= (tokens - 31) * PLACES_OF_32, "places are missing")
    call.vector("rows", places * key_heads * rows_bytes(state_rows, has_channels(call)), np.int8, 16)
    call.vector("factors", places * call.value_heads * FACTORS_BYTES, np.int8, 16)
    call.vector("sums", tokens * sums_of(call), F32, 4)


def in_chunks(call: Call, kind: type[Chunk], inputs: Any) -> None:
    """The outputs of a recurrence, and sums of log-decays and solves; states and deltas go to the slots."""
    cu_seqlens, context_lens, slots, is_draft = sequences_of(call)
    sizes = _, heads, _, dim = sizes_of(call)
    tokens, grid = int(cu_seqlens[-1]), call.launch.grid
    state_rows = call.number("N") if "N" in call.template else MAX_KEY_DIM
    call.require(
        grid[:2] == (call.count, heads) and columns(state_rows, bool(call.number("PREPARED"))) * grid[2] >= dim,
        "blocks are missing",
    )
    is_one = not is_draft.any() and np.diff(cu_seqlens).max(initial=0) <= 1
    call.require(is_one or not ("ONE" in call.template and call.number("ONE")), "texts have more than one token")
    arrays = slot_arrays(call, int(slots.max(initial=0)) + 1, sizes)
    copied = [name for name in arrays if name not in ("state", "deltas")]
    kept = StateCache(arrays | {name: arrays[name].copy() for name in copied})
    solves: list[np.ndarray] = []

    class Noted(kind):  # type: ignore[valid-type, misc]
        def output(self, i: int, token: Any) -> Any:
            found = super().output(i, token)
            if corrects(call):
                solves.append(self.solves[:, i].ravel().copy())
            return found

    width = heads * dim
    out = call.rows("out", tokens, call.out_pitch, width, F32, 4)
    sums = call.rows("sums", tokens, sums_of(call), sums_of(call), F32, 4)
    for b, (first, end) in enumerate(pairwise(cu_seqlens.tolist())):
        if first == end:
            continue
        start, slot, rows = int(context_lens[b]), int(slots[b]), slice(first, end)
        total = kept["decays"][slot][(start - 1) % call.ring_rows].copy()
        for i in range(first, end):
            own = inputs.log_decays[i]
            total = own if (start + i - first) % CHUNK == 0 else total + own
            sums[i, : decays_of(call)] = total.ravel()
        y = chunked_state.outputs(Noted, inputs.of(rows), kept, slot, start, bool(is_draft[b]))
        out[rows] = y.reshape(-1, width)
        if corrects(call):
            sums[rows, decays_of(call) :] = solves[-len(y) :]


@model
def delta_output(call: Call) -> None:
    (rows, parts), tokens = call.launch.grid[:2], int(sequences_of(call)[0][-1])
    heads, dim = call.value_heads, call.value_dim
    call.require(parts * call.launch.block // 32 >= heads, "blocks are missing")
    x = call.rows("x", tokens, call.x_pitch, heads * dim, F32, 4).reshape(tokens, heads, dim)
    gate = call.rows("gate", rows, call.gate_pitch, heads * dim, F16, 2).astype(F32)
    out = call.rows("out", rows, call.out_pitch, heads * dim, F16, 2)
    norm = Norm(call.vector("norm_weight", dim, F32), call.eps)
    gate_of = sigmoid if has_channels(call) else silu
    out[:tokens] = normalise(x, norm).reshape(tokens, heads * dim) * gate_of(gate[:tokens])
    out[tokens:] = 0
    inputs, _ = inputs_of(call, tokens)
    store_keys(call, inputs.keys)


def of_one_token(
    call: Call, kind: type[Chunk], inputs_of: Callable[[Call, int, np.ndarray], Any]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Outputs of a step of one token of each sequence, fp32 ``[T, values]``, their gates, and where results go.

    The convolution comes before; ``inputs_of`` makes inputs of its results. ``out`` has rows for padding too.
    """
    (blocks, key_heads, rows), sizes = call.launch.grid, sizes_of(call)
    cu_seqlens, context_lens, slots, _ = sequences_of(call)
    tokens, (_, heads, _, dim) = int(cu_seqlens[-1]), sizes
    call.require(max(np.diff(cu_seqlens), default=0) <= 1 and not call.has_drafts, "a token of each sequence")
    call.require(key_heads == call.key_heads and blocks == call.launch.cluster, "blocks are missing")
    parts_fit = call.parts * TOKEN_COLUMNS >= dim and blocks == heads // key_heads * call.parts
    call.require(parts_fit and call.num_taps <= TOKEN_TAPS, "blocks are missing")
    of_slots, shape = int(slots.max(initial=0)) + 1, (call.input_rows, call.channels)
    flat = call.rows("inputs", of_slots, call.inputs_pitch, int(np.prod(shape)), F16, 2)
    ring = np.lib.stride_tricks.as_strided(flat, (of_slots, *shape), (flat.strides[0], 2 * call.channels, 2))
    convolution = ShortConvolution(
        call.vector("taps", call.num_taps * call.channels, F32).reshape(call.num_taps, -1),
        call.vector("bias", call.channels, F32) if call.bias else None,
    )
    batch = ForwardBatch(np.zeros(tokens), cu_seqlens, context_lens, (slots[:, None],), call.count, 0, 0)
    own = call.rows("rows", tokens, call.rows_pitch, call.channels, F16, 2)
    inputs = inputs_of(call, tokens, silu(convolution_of(own, convolution, ring, slots, batch)))
    cache, x = StateCache(slot_arrays(call, of_slots, sizes)), np.empty((tokens, heads, dim), F32)
    for b, (first, end) in enumerate(pairwise(cu_seqlens.tolist())):
        if first < end:
            of_token, slot, start = inputs.of(slice(first, end)), int(slots[b]), int(context_lens[b])
            x[first] = chunked_state.outputs(kind, of_token, cache, slot, start, False)
    gate = call.rows("gate", rows, call.gate_pitch, heads * dim, F16, 2).astype(F32)
    out = call.rows("out", rows, call.out_pitch, heads * dim, F16, 2)
    out[tokens:] = 0
    return x.reshape(tokens, heads * dim), gate[:tokens], out[:tokens]


@model
def delta_token(call: Call) -> None:
    x, gate, out = of_one_token(call, DeltaChunk, lambda call, tokens, mixed: inputs_of(call, tokens, mixed)[0])
    heads, norm = x.reshape(-1, call.value_dim), Norm(call.vector("norm_weight", call.value_dim, F32), call.eps)
    out[...] = normalise(heads, norm).reshape(x.shape) * silu(gate)


@model
def state_token(call: Call) -> None:
    call.require(call.key_dim <= call.number("N"), "the state has more rows than the kernel")
    x, gate, out = of_one_token(call, mamba2.StateSpaceChunk, state_space_inputs)
    norm = None
    if call.norm_weight:
        weight = Norm(call.vector("norm_weight", x.shape[1], F32), call.eps)
        norm = GatedNorm(weight, call.key_heads, bool(call.norm_first))
    out[...] = mamba2.gated(x, gate, norm)


def store_keys(call: Call, keys: np.ndarray) -> None:
    """What the last kernel of a recurrence leaves in the slots: keys, decays and the positions of states."""
    sizes = sizes_of(call)
    cu_seqlens, context_lens, slots, is_draft = sequences_of(call)
    arrays = slot_arrays(call, int(slots.max(initial=0)) + 1, sizes)
    sums = call.rows("sums", int(cu_seqlens[-1]), sums_of(call), sums_of(call), F32, 4)
    of_decays = decays_of(call)
    for b, (first, end) in enumerate(pairwise(cu_seqlens.tolist())):
        start, slot = int(context_lens[b]), slots[b]
        for i in range(first, end):
            place = (start + i - first) % call.ring_rows
            arrays["keys"][slot, place] = keys[i]
            arrays["decays"][slot, place] = sums[i, :of_decays].reshape(arrays["decays"].shape[2:])
            if corrects(call):
                arrays["solves"][slot, place] = sums[i, of_decays:].reshape(-1, CHUNK)
        if first < end and not is_draft[b]:
            arrays["end"][slot] = (start + end - first - 1) // CHUNK * CHUNK


def state_space_inputs(call: Call, tokens: int, convolved: np.ndarray | None = None) -> mamba2.TokenInputs:
    """What the state space of Mamba 2 reads of the tokens; ``convolved``: where one kernel does all."""
    none: Any = None
    groups, heads, state_dim, head_dim = sizes_of(call)
    vectors = (call.vector(name, heads, F32) for name in ("decay_rates", "step_bias", "skip"))
    limits = call.min_step, call.max_step
    spec = Mamba2Spec(groups, heads, head_dim, state_dim, none, *vectors, limits)
    mixed = convolved
    if mixed is None:
        mixed = call.rows("mixed", tokens, call.mixed_pitch, spec.channels, F32, 4)
    steps = call.rows("steps", tokens, call.steps_pitch, heads, F16, 2)
    return mamba2.token_inputs(mixed, steps, spec)


@model
def state_space(call: Call) -> None:
    call.require(call.key_dim <= call.number("N"), "the state has more rows than the kernel")
    in_chunks(call, mamba2.StateSpaceChunk, state_space_inputs(call, int(sequences_of(call)[0][-1])))


@model
def state_prepare(call: Call) -> None:
    check_places(call, call.number("N"))


@model
def state_output(call: Call) -> None:
    (rows, parts), tokens = call.launch.grid[:2], int(sequences_of(call)[0][-1])
    features = call.value_heads * call.value_dim
    call.require(parts == call.norm_groups, "blocks are missing")
    x = call.rows("x", tokens, call.x_pitch, features, F32, 4)
    gate = call.rows("gate", rows, call.gate_pitch, features, F16, 2).astype(F32)
    out = call.rows("out", rows, call.out_pitch, features, F16, 2)
    norm = None
    if call.norm_weight:
        weight = call.vector("norm_weight", features, F32)
        norm = GatedNorm(Norm(weight, call.eps), call.norm_groups, bool(call.norm_first))
    out[:tokens] = mamba2.gated(x, gate[:tokens], norm)
    out[tokens:] = 0
    store_keys(call, state_space_inputs(call, tokens).b)
