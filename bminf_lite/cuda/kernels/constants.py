"""Numbers and enumerations that Python and CUDA C++ both use, stated once.

:data:`HEADERS` renders them as the files ``constants/*.cuh``, which the kernels include.
"""

from __future__ import annotations

from enum import IntEnum

from ...backend.expert_values import GroupScore, MaskedScore, Score
from ...backend.values import BLOCK_SIZE as BLOCK_SIZE
from ...backend.values import GPTQ_BLOCK as GPTQ_BLOCK
from ...backend.values import GUESS_HEAT as GUESS_HEAT
from ...backend.values import LATENT_SEGMENT as LATENT_SEGMENT
from ...backend.values import POOLING_LANES as POOLING_LANES
from ...backend.values import SEGMENT as SEGMENT
from ...backend.values import STATE_CHUNK as STATE_CHUNK
from ..runtime.cublaslt import Order
from ..runtime.tensor_maps import ROW_BYTES


class Activation(IntEnum):
    """An activation function, computed in fp32."""

    SILU = 0
    GELU_TANH = 1
    RELU = 2
    GELU = 3
    RELU_SQUARED = 4


ACTIVATIONS = {activation.name.lower(): activation for activation in Activation}
"""Activations by their names in the backend's operations."""


class Epilogue(IntEnum):
    """The epilogue of a product's kernel, on its int32 or fp32 sums.

    ``ADD`` adds to fp32 values in memory. ``GATED``: rows ``n`` and ``n + N/2`` of the weight are gate and up.
    ``ACTIVATED`` applies an activation to each output. ``TO_INT32`` writes unscaled sums. ``TO_BFLOAT16`` is for the
    tensors of other libraries: the engine's own activations are fp16.
    """

    TO_HALF = 0
    TO_FLOAT = 1
    ADD = 2
    GATED = 3
    ACTIVATED = 4
    TO_INT32 = 5
    TO_BFLOAT16 = 6


class GemvInput(IntEnum):
    """The input of a matrix-vector kernel.

    An fp16 row, a norm of an fp32 row, a rotated fp16 row, a bf16 row of another library, an fp32 row, or a ``SUM``: an
    fp32 row plus the RMSNorm of another one. ``RMS_NORM_OF_SUM`` is the norm of a sum. The kernel also writes the sum.
    ``ROTATED_`` norms are rotated.
    """

    HALF = 0
    RMS_NORM = 1
    LAYER_NORM = 2
    ROTATED = 3
    BFLOAT16 = 4
    FLOAT = 5
    SUM = 6
    RMS_NORM_OF_SUM = 7
    ROTATED_RMS_NORM = 8
    ROTATED_LAYER_NORM = 9
    ROTATED_RMS_NORM_OF_SUM = 10


class Source(IntEnum):
    """The source of a row's values: none, an fp16 or fp32 array, or an unscaled int32 product."""

    NONE = 0
    FROM_HALF = 1
    FROM_FLOAT = 2
    FROM_INT32 = 3


class RowOp(IntEnum):
    """A row kernel's operation. A norm first adds the values to the residual stream; a gate has two halves.

    Gates and activations are in the order of :class:`Activation`.
    """

    IDENTITY = 0
    RMS_NORM = 1
    LAYER_NORM = 2
    GATE_SILU = 3
    GATE_GELU_TANH = 4
    GATE_RELU = 5
    GATE_GELU = 6
    GATE_RELU_SQUARED = 7
    ACTIVATE_SILU = 8
    ACTIVATE_GELU_TANH = 9
    ACTIVATE_RELU = 10
    ACTIVATE_GELU = 11
    ACTIVATE_RELU_SQUARED = 12


class Target(IntEnum):
    """The output of a kernel over rows: int8 codes and a scale per row, values, or fp32 values that are added to.

    ``CODES_AND_HALF`` and ``CODES_AND_FLOAT``: codes, and the values before they are rotated.
    """

    CODES = 0
    TO_HALF = 1
    TO_FLOAT = 2
    ADD_TO_FLOAT = 3
    CODES_AND_HALF = 4
    CODES_AND_FLOAT = 5


class Rotated(IntEnum):
    """How a kernel over rows rotates them: exchanging elements between lanes, or between threads in shared memory."""

    NOT_ROTATED = 0
    BETWEEN_LANES = 1
    IN_MEMORY = 2


class WeightType(IntEnum):
    """What the weights of a token's experts are rounded to: ``WEIGHT_TYPES``, by their places there."""

    FLOAT32 = 0
    FLOAT16 = 1
    BFLOAT16 = 2


class DecodeMask(IntEnum):
    """The keys that a new token attends to in decode attention, and their scores.

    ``CAUSAL``: all tokens up to itself. ``BIASED``, ``CAPPED``, ``ALIBI``, ``SINKS``: the same, with scores of that
    :class:`ScoreKind`. ``CROSS``: the whole source, whose keys and values are in the cache already. ``SHARED``: as
    ``CAUSAL``, with its own key and value in the cache already.
    """

    CAUSAL = 0
    BIASED = 1
    CROSS = 2
    CAPPED = 3
    ALIBI = 4
    SINKS = 5
    SHARED = 6


class ScoreKind(IntEnum):
    """The scores of prefill attention.

    ``PLAIN``: scaled dot products. ``BIASED``: with a bias from a table by distance. ``CAPPED``: with a soft-cap.
    ``ALIBI``: with a bias that is linear in the distance. ``SINKS``: scaled dot products, and one more score of
    each head, whose value is zero.
    """

    PLAIN = 0
    BIASED = 1
    CAPPED = 2
    ALIBI = 3
    SINKS = 4


class DecodeWork(IntEnum):
    """What a unit of blocks computes in decode attention.

    ``ITEMS``: a range of segments of all sequences, which it finds from the lengths on the device. ``ONE_SEGMENT``: one
    segment of one pair (sequence, group of query heads). ``ONE_PAIR``: one pair, whose context is one segment.
    """

    ITEMS = 0
    ONE_SEGMENT = 1
    ONE_PAIR = 2


class AttentionMask(IntEnum):
    """The keys that a query attends to in prefill attention.

    ``CAUSAL``: the keys of its sequence up to its own, in the cache. ``CROSS``: its sequence's whole source, in the
    cache. ``BIDIRECTIONAL``: its whole sequence in this step, whose sequences are packed, or what a window has of it.
    """

    CAUSAL = 0
    CROSS = 1
    BIDIRECTIONAL = 2


class PoolingKind(IntEnum):
    """The poolings of :class:`.values.Pooling`."""

    POOL_FIRST = 0
    POOL_LAST = 1
    POOL_MAX = 2
    POOL_MEAN = 3
    POOL_MEAN_SQRT_LEN = 4
    POOL_WEIGHTED_MEAN = 5


POOLING_COLUMNS = 32
"""Columns that a block of the pooling computes."""
LARGE_SHARED_MEMORY = 163 << 10
"""The shared memory of a block with which two blocks of prefill attention for heads of 128 elements fit an SM."""
GEMV_THREADS = 512
GEMV_CHUNK = 512
"""Bytes of one row of the weight that a warp multiplies at once, 16 per thread."""
DECODE_HEADS = 8
"""At most ``DECODE_HEADS`` query heads of one key-value head share a block of the decode kernel: the N of an MMA."""
DECODE_THREADS = 288
"""Eight warps compute, one loads."""
DECODE_LARGE_DEPTH, DECODE_LARGE_SCORES = 256, 40 << 10
"""Blocks for heads above ``DECODE_LARGE_DEPTH`` have ``DECODE_LARGE_SCORES`` bytes for scores, then for records."""
DECODE_GROUP = 16
"""Keys, or elements of values, that one MMA of the decode kernel takes as rows."""
DECODE_MAX_UNIT = 8
"""Blocks of a cluster that compute one segment together, at most: a unit."""
DECODE_MAX_DRAFTS = 16
"""Drafts before a row of a step whose keys the decode kernel prepares, at most."""
STAGE_RELEASING_LANES = 1
"""Lanes of a reading warp that give a stage of keys and values back; for a checker all, see tests/conftest.py."""
PREPARE_THREADS = 384
"""Threads of a block that prepares heads, at most."""
PREPARE_BLOCKS = 3
"""Blocks of ``PREPARE_THREADS`` threads for which an SM has registers."""
PREPARE_ELEMENTS = 8
"""Elements of either half of a head that one of them has."""
LATENT_THREADS = 256
LATENT_KEYS = 32
"""Rows of the cache in a tile of attention to latents."""
LATENT_FEW_ROWS, LATENT_CLUSTER = 32, 8
"""Pairs of a token and a head in a tile of few, and the blocks of a cluster that share its segment."""
LATENT_MERGED_TOKENS = 4
"""Tokens up to which the products with the values' matrices merge the records of segments."""
LATENT_ROWS_THREADS = 128
"""Threads that have a token's latent, of at most 8 elements each."""
LATENT_HEADS = 16
"""Heads whose queries a block rotates."""
LATENT_MAX_KEY = 256
"""Elements of a rotated key, at most."""
HEAD_PRODUCTS_THREADS = 128
HEAD_PRODUCTS_COLUMNS = 64
"""Columns of a block's result, and of both operands in a stage."""
SKINNY_ROWS = 16
"""Rows of the weight in a group: the M of one MMA."""
SKINNY_STEP = 64
"""Bytes of a row in a step: the K of two MMAs."""
SKINNY_HOPPER_THREADS = 320
SKINNY_HOPPER_CLUSTER = 2
SKINNY_HOPPER_ROWS = 64
"""Rows of the weight in a tile."""
SKINNY_HOPPER_BOXES = 2
"""Boxes of ``ROW_BYTES`` columns in a stage."""
SKINNY_HOPPER_WINDOW = 4
"""Stages in flight at the same time. More of them delay the loads of other blocks."""
SKINNY_HOPPER_TILES = (1, 2, 4, 6, 8)
"""Numbers of tiles of 8 rows of activations that the kernel is compiled for."""
SKINNY_FLOAT_BOXES = 2
"""Boxes of ``ROW_BYTES`` of each channel in a stage of a product with float activations."""
FLOAT_GEMM_CHANNELS = 128
"""Rows of the weight in a tile of a product with float activations of many rows."""
FLOAT_GEMM_CHUNK = 32
"""Rows of the result that a warpgroup writes at a time."""
GEMM_ROWS = 128
"""Rows of a tile of the result."""
GEMM_STAGE_COLUMNS = 128
"""Columns of both operands in a stage of the pipeline."""
GEMM_PIPELINE_BYTES = 192 << 10
GEMM_BOX_ROWS = 16
"""Rows of the result that a warp writes at a time."""
DP4A_TILE = 64
CALIBRATION_THREADS = 256
CALIBRATION_STRIP = 64
"""Rows of a column that one thread of ``column_absmax`` reads."""
GPTQ_ROOT_BLOCK = 64
"""Rows of a block of a Cholesky decomposition."""
GPTQ_THREADS = 256
UNALIGNED_NORM_THREADS = 512
SHORT_CONVOLUTION_THREADS = 128
SHORT_CONVOLUTION_TOKENS = 8
"""Tokens of a thread where the convolution does not store its inputs."""
ALL_REDUCE_THREADS = 256
ALL_REDUCE_MAX_BLOCKS = 264
"""Blocks of a sum over GPUs: two on each SM of an H200. All of them must be resident, because they wait for peers."""
ALL_REDUCE_PAIRS = 2
"""Pairs of values that a thread pushes at a time in sums of few values."""
ALL_REDUCE_NORM_THREADS = 512
"""Threads of a row that is added and normalised by one kernel."""
ALL_REDUCE_POLLS = 64
"""How often a thread polls before it looks at the clock."""
RECURRENT_THREADS = 256
PREPARED_TOKENS = 128
"""New tokens of a text from which on another kernel prepares its chunks."""
PLACES_OF_32 = 3
"""Places for prepared chunks for each 32 tokens of a step; a text of ``PREPARED_TOKENS`` needs no more."""
TOKEN_TAPS = 4
"""The most taps of a convolution that the kernel of one token of each sequence computes."""
DELTA_NET_OUTPUT_THREADS = 256
DELTA_NET_MAX_KEY_DIM = 128
MAMBA2_OUTPUT_THREADS = 256
MAMBA2_MAX_STATE_DIM = 256
SAMPLING_CHUNK = 2048
"""Token ids per block."""
SAMPLING_PART = 512
"""Token ids whose best one and log-sum-exp a warp finds."""
SAMPLING_THREADS = 512
SAMPLING_ROW_BYTES = 128
"""Bytes of scratch per row, beside its arrays."""
SAMPLING_BUCKETS = 1024
SAMPLING_BUCKETS_PER_OCTAVE = 24
"""Buckets per factor of two in probability: the buckets cover all 42 octaves of nonzero weights."""

MAX_EXPERTS = 512
"""A lane of the warp that chooses a token's experts has up to 16 of them."""
ROUTER_THREADS = 256
ROUTER_TILE, ROUTER_TILE_THREADS = 32, 512
"""Rows and experts of a block that multiplies many rows, and its threads."""
CHOOSE_THREADS = 128
SORT_THREADS = 1024
"""Threads of a block that sorts pairs: at least one for each expert."""
SORT_LIST = 1024
"""Pairs that a block sorts, at most."""
SUM_THREADS = 256
GROUPED_PRODUCTS = 2
"""Grouped products of a layer, each with a counter of the tiles that its blocks have claimed."""
FEW_THREADS = 512
FEW_CHUNK = 512
"""As ``GEMV_CHUNK``, for the experts of a few tokens."""
MAX_FEW_TOKENS = 4
MAX_FEW_PAIRS = 64
"""Tokens, and pairs of a token and an expert, whose experts are computed by matrix-vector products, at most."""
GROUPED_THREADS = 256
GROUPED_ROWS = 128
"""Rows of the weight in a tile of a product with sorted pairs."""
GROUPED_COLUMNS = 128
"""Columns of both operands in a stage of its pipeline."""
EXPERT_FLOAT_THREADS = 256
"""Threads of a block of float products with sorted pairs."""
GROUPED_HOPPER_WEIGHT_BOX = 128
GROUPED_HOPPER_STAGE_STATE_BYTES = 32
"""Bytes of a stage beside its operands: two barriers, the number of the tile that begins with it, and padding."""
"""Rows of the weight in a box, on compute capability 9.0."""
FETCH_THREADS = 1024
"""Threads of the block that finds which experts are missing in the slots of a cache."""
COPY_THREADS = 256
"""Threads of a block that copies experts into slots."""
EXPERT_HALF_LIFE = 512
"""Tokens of a layer after which the choice of an expert counts half, see :mod:`bminf_lite.memory.expert_cache`."""
EXPERT_CHOICE = 1 << 8
"""What such a choice is worth at first."""
CLAMPED_SWIGLU = len(Activation)
"""gpt-oss's activation, among the numbers of the others."""


def attention_tile(capability: tuple[int, int], padded_head_dim: int, mask: AttentionMask, biased: bool) -> int:
    """Keys of a tile of attention: its weights are relative to the largest score up to the tile's end.

    Decode and prefill attention of one kind have the same tile, because it decides how weights are rounded.
    ``padded_head_dim`` is the head size rounded up to a multiple of 16.
    """
    if capability == (9, 0) and padded_head_dim in (64, 128, 256) and mask is AttentionMask.CAUSAL and not biased:
        return 64 if padded_head_dim == 256 else 128
    if padded_head_dim > 128:
        return 32 if capability >= (8, 0) else 16
    return 32 if padded_head_dim > 64 else 64


def render_header(*enumerations: type[IntEnum], **numbers: int | float) -> str:
    """A header with the enumerations and, as ``constexpr int`` or ``float``, the numbers."""
    lines = ["#pragma once"]
    for enumeration in enumerations:
        members = ", ".join(f"{member.name} = {member.value}" for member in enumeration)
        lines.append(f"enum {enumeration.__name__} : int {{ {members} }};")
    for name, value in numbers.items():
        kind, suffix = ("float", "f") if isinstance(value, float) else ("int", "")
        lines.append(f"constexpr {kind} {name} = {value}{suffix};")
    return "\n".join(lines) + "\n"


HEADERS = {
    "constants/activation.cuh": render_header(Activation),
    "constants/all_reduce.cuh": render_header(
        THREADS=ALL_REDUCE_THREADS,
        NORM_THREADS=ALL_REDUCE_NORM_THREADS,
        MAX_BLOCKS=ALL_REDUCE_MAX_BLOCKS,
        PAIRS=ALL_REDUCE_PAIRS,
        POLLS=ALL_REDUCE_POLLS,
    ),
    "constants/epilogue.cuh": render_header(Epilogue),
    "constants/order.cuh": render_header(Order),
    "constants/gemv.cuh": render_header(GemvInput, THREADS=GEMV_THREADS, CHUNK=GEMV_CHUNK),
    "constants/rows.cuh": render_header(Source, RowOp, Target, Rotated),
    "constants/calibration.cuh": render_header(THREADS=CALIBRATION_THREADS, STRIP=CALIBRATION_STRIP),
    "constants/gptq.cuh": render_header(BLOCK=GPTQ_BLOCK, ROOT_BLOCK=GPTQ_ROOT_BLOCK, THREADS=GPTQ_THREADS),
    "constants/norm_unaligned.cuh": render_header(THREADS=UNALIGNED_NORM_THREADS),
    "constants/short_convolution.cuh": render_header(
        THREADS=SHORT_CONVOLUTION_THREADS, TOKENS_AT_ONCE=SHORT_CONVOLUTION_TOKENS
    ),
    "constants/recurrent.cuh": render_header(
        THREADS=RECURRENT_THREADS,
        CHUNK=STATE_CHUNK,
        PREPARED_TOKENS=PREPARED_TOKENS,
        PLACES_OF_32=PLACES_OF_32,
        TOKEN_TAPS=TOKEN_TAPS,
    ),
    "constants/delta_net.cuh": render_header(
        OUTPUT_THREADS=DELTA_NET_OUTPUT_THREADS, MAX_KEY_DIM=DELTA_NET_MAX_KEY_DIM
    ),
    "constants/mamba2.cuh": render_header(OUTPUT_THREADS=MAMBA2_OUTPUT_THREADS),
    "constants/attention.cuh": render_header(BLOCK_SIZE=BLOCK_SIZE, SEGMENT=SEGMENT),
    "constants/prepare_heads.cuh": render_header(THREADS=PREPARE_THREADS, BLOCKS=PREPARE_BLOCKS, N=PREPARE_ELEMENTS),
    "constants/latent.cuh": render_header(
        THREADS=LATENT_THREADS,
        KEYS=LATENT_KEYS,
    ),
    "constants/latent_segments.cuh": render_header(
        LATENT_SEGMENT=LATENT_SEGMENT,
        LATENT_FEW_ROWS=LATENT_FEW_ROWS,
        LATENT_CLUSTER=LATENT_CLUSTER,
        LATENT_MERGED_TOKENS=LATENT_MERGED_TOKENS,
    ),
    "constants/latent_rows.cuh": render_header(
        LATENT_ROWS_THREADS=LATENT_ROWS_THREADS, HEADS=LATENT_HEADS, MAX_KEY=LATENT_MAX_KEY
    ),
    "constants/head_products.cuh": render_header(
        THREADS=HEAD_PRODUCTS_THREADS, COLUMNS=HEAD_PRODUCTS_COLUMNS, CHUNK=HEAD_PRODUCTS_COLUMNS
    ),
    "constants/decode.cuh": render_header(
        DecodeMask,
        DecodeWork,
        HEADS=DECODE_HEADS,
        THREADS=DECODE_THREADS,
        GROUP=DECODE_GROUP,
        MAX_UNIT=DECODE_MAX_UNIT,
        LARGE_DEPTH=DECODE_LARGE_DEPTH,
        LARGE_SCORES=DECODE_LARGE_SCORES,
        MAX_DRAFTS=DECODE_MAX_DRAFTS,
    ),
    "constants/stages.cuh": render_header(RELEASING_LANES=STAGE_RELEASING_LANES),
    "constants/prefill.cuh": render_header(AttentionMask, ScoreKind),
    "constants/pooling.cuh": render_header(PoolingKind, LANES=POOLING_LANES, COLUMNS=POOLING_COLUMNS),
    "constants/skinny_gemm.cuh": render_header(ROWS=SKINNY_ROWS, STEP=SKINNY_STEP),
    "constants/skinny_gemm_hopper.cuh": render_header(
        THREADS=SKINNY_HOPPER_THREADS,
        CLUSTER=SKINNY_HOPPER_CLUSTER,
        ROWS=SKINNY_HOPPER_ROWS,
        DEPTH=ROW_BYTES,
        BOXES=SKINNY_HOPPER_BOXES,
        WINDOW=SKINNY_HOPPER_WINDOW,
    ),
    "constants/float_gemm_hopper.cuh": render_header(CHANNELS=FLOAT_GEMM_CHANNELS, CHUNK=FLOAT_GEMM_CHUNK),
    "constants/skinny_float_gemm_hopper.cuh": render_header(BOXES=SKINNY_FLOAT_BOXES),
    "constants/gemm_hopper.cuh": render_header(
        BLOCK_M=GEMM_ROWS,
        BLOCK_K=GEMM_STAGE_COLUMNS,
        PIPELINE_BYTES=GEMM_PIPELINE_BYTES,
        BOX=GEMM_BOX_ROWS * ROW_BYTES,
    ),
    "constants/experts.cuh": render_header(
        Score,
        GroupScore,
        MaskedScore,
        WeightType,
        MAX_EXPERTS=MAX_EXPERTS,
        ROUTER_THREADS=ROUTER_THREADS,
        ROUTER_TILE=ROUTER_TILE,
        ROUTER_TILE_THREADS=ROUTER_TILE_THREADS,
        CHOOSE_THREADS=CHOOSE_THREADS,
        SORT_THREADS=SORT_THREADS,
        SORT_LIST=SORT_LIST,
        SUM_THREADS=SUM_THREADS,
        GROUPED_PRODUCTS=GROUPED_PRODUCTS,
        FEW_THREADS=FEW_THREADS,
        FEW_CHUNK=FEW_CHUNK,
        MAX_FEW_PAIRS=MAX_FEW_PAIRS,
        GROUPED_THREADS=GROUPED_THREADS,
        GROUPED_ROWS=GROUPED_ROWS,
        GROUPED_COLUMNS=GROUPED_COLUMNS,
        FLOAT_THREADS=EXPERT_FLOAT_THREADS,
        FETCH_THREADS=FETCH_THREADS,
        COPY_THREADS=COPY_THREADS,
        EXPERT_HALF_LIFE=EXPERT_HALF_LIFE,
        EXPERT_CHOICE=EXPERT_CHOICE,
        CLAMPED_SWIGLU=CLAMPED_SWIGLU,
    ),
    "constants/grouped_gemm_hopper.cuh": render_header(
        BLOCK_K=GROUPED_COLUMNS,
        W_BOX=GROUPED_HOPPER_WEIGHT_BOX,
        STAGE_STATE_BYTES=GROUPED_HOPPER_STAGE_STATE_BYTES,
    ),
    "constants/dp4a.cuh": render_header(TILE=DP4A_TILE),
    "constants/sampling.cuh": render_header(
        CHUNK=SAMPLING_CHUNK,
        PART=SAMPLING_PART,
        THREADS=SAMPLING_THREADS,
        ROW_BYTES=SAMPLING_ROW_BYTES,
        BUCKETS=SAMPLING_BUCKETS,
        BUCKETS_PER_OCTAVE=SAMPLING_BUCKETS_PER_OCTAVE,
        GUESS_HEAT=GUESS_HEAT,
    ),
}
"""Headers by the name in an ``#include``."""
