// int8 matrix-vector product (decoding at batch 1), memory-bound: reading the weight takes all of the time.
//
//     out = epilogue(x_scale * w_scale[n] * (sum over k of codes[k] * weight[n, k]) + bias[n])
//     codes, x_scale = quantize(norm(x)), or quantize(rotate(x)), or quantize(norm(sum)) with sum = x + norm(addend)
//
// x: fp16, bf16 or fp32 [k]; weight: int8 [n, pitch]; w_scale, bias: fp32 [n]; out: fp16, bf16 or fp32 [n], or fp16 [n
// / 2] of a gated layer.
//
// Every block quantizes the whole input row into shared memory: that is cheaper than a launch of its own. Then it
// multiplies its share of the weight's rows (BlockRange). The share is cut into units of U chunks of 512 bytes of one
// row, and the block's warps take every WARPS-th unit, whichever rows these belong to, so that all warps get the same
// work. They add their sums with atomics; int32 sums are exact in any order, so the result does not depend on it. The
// copies of the first units start before the kernel waits for its input.
#include "common/async.cuh"
#include "common/bfloat16.cuh"
#include "common/block_range.cuh"
#include "common/common.cuh"
#include "common/epilogue.cuh"
#include "common/rotation.cuh"
#include "constants/gemv.cuh"

using namespace bminf;

constexpr int WARPS = THREADS / WARP;

constexpr bool is_sum(int input) { return input == SUM || input == RMS_NORM_OF_SUM; }
constexpr bool is_normed(int input) { return input == RMS_NORM || input == LAYER_NORM || input == RMS_NORM_OF_SUM; }
constexpr int PIPELINE_BYTES = PIPELINE_CHUNKS * CHUNK;  // of a warp; a whole number of units for every U

__device__ __forceinline__ int dot16(const int4& a, const int4& b, int acc) {
    acc = __dp4a(a.x, b.x, acc);
    acc = __dp4a(a.y, b.y, acc);
    acc = __dp4a(a.z, b.z, acc);
    return __dp4a(a.w, b.w, acc);
}

// The sum over this lane's columns of a unit. `codes` starts at the unit's first column. The codes are zero in columns
// beyond the row, so the weights there do not matter.
template <int U>
__device__ __forceinline__ int dot_unit(const int4 (&w)[U], const int8* codes) {
    int4 c[U];
#pragma unroll
    for (int i = 0; i < U; ++i) c[i] = *reinterpret_cast<const int4*>(codes + threadIdx.x % WARP * 16 + i * CHUNK);
    int sum = 0;
#pragma unroll
    for (int i = 0; i < U; ++i) sum += dot16(w[i], c[i], 0);
    return sum;
}

__device__ __forceinline__ int warp_sum(int x) {
#if __CUDA_ARCH__ >= 800
    return __reduce_add_sync(FULL, x);
#else
    for (int d = WARP / 2; d; d /= 2) x += __shfl_xor_sync(FULL, x, d);
    return x;
#endif
}

// The first column of a thread's vector i. The vectors of a rotated row are neighbours, so that a transform needs fewer
// exchanges between threads; otherwise neighbouring threads read neighbouring vectors.
template <int INPUT, int VECTORS>
__device__ __forceinline__ int column_of(int i) {
    const int thread = threadIdx.x;
    return (INPUT == ROTATED ? thread * VECTORS + i : i * THREADS + thread) * 8;
}

// The raw vectors of the input row. All loads are unconditional, so that they are in flight together; threads beyond
// the end of the row load its last elements, and zero_tail clears them. EARLY: see gemv; L1 may hold older values then.
template <int INPUT, bool EARLY, class Source, int VECTORS, int PARTS>
__device__ __forceinline__ void load_raw(const Source* x, int pitch, uint4 (&raw)[VECTORS][PARTS]) {
#pragma unroll
    for (int i = 0; i < VECTORS; ++i)
#pragma unroll
        for (int j = 0; j < PARTS; ++j) {
            const Source* const from = x + min(column_of<INPUT, VECTORS>(i), pitch - 8) + j * (8 / PARTS);
            raw[i][j] = EARLY ? __ldcg(reinterpret_cast<const uint4*>(from)) : ld_global_v4(from);
        }
}

// The input row in registers.
template <int INPUT, bool EARLY, class Source, int VECTORS>
__device__ __forceinline__ void load_input(const Source* x, int k, int pitch, float (&v)[VECTORS][8]) {
    uint4 raw[VECTORS][sizeof(Source) / 2];
    load_raw<INPUT, EARLY>(x, pitch, raw);
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
        load8(reinterpret_cast<const Source*>(raw[i]), v[i]);
        zero_tail(v[i], column_of<INPUT, VECTORS>(i), k);
    }
}

// The weight of a norm, and a bias of short rows, in registers: loaded before the kernel waits for its input. The loads
// are unconditional like those of the row.
template <int INPUT, int VECTORS>
struct LoadedNorm {
    static constexpr bool WITH_BIAS = INPUT == LAYER_NORM && VECTORS == 1;
    NormParams<THREADS> params;
    float eps;
    int k;
    double inverse;
    float weight[VECTORS][8], bias[WITH_BIAS ? VECTORS : 1][8];

    __device__ __forceinline__ explicit LoadedNorm(const NormParams<THREADS>& params)
        : params(params),
          eps(params.eps),
          k(params.k),
          inverse(params.inverse_k()) {
        asm volatile("" : "+d"(inverse));  // computed here
        load(params.weight, weight);
        if constexpr (WITH_BIAS)
            if (params.bias != nullptr) load(params.bias, bias);
    }
    __device__ __forceinline__ void load(const float* from, float (&x)[VECTORS][8]) const {
        uint4 raw[VECTORS][2];
        load_raw<INPUT, false>(from, params.pitch, raw);
#pragma unroll
        for (int i = 0; i < VECTORS; ++i) {
            load8(reinterpret_cast<const float*>(raw[i]), x[i]);
            zero_tail(x[i], column_of<INPUT, VECTORS>(i), k);
        }
    }
    __device__ __forceinline__ double inverse_k() const { return inverse; }
    __device__ __forceinline__ bool has_bias() const { return params.bias != nullptr; }
    __device__ __forceinline__ void load_weight(int i, float (&x)[8]) const {
#pragma unroll
        for (int j = 0; j < 8; ++j) x[j] = weight[i][j];
    }
    __device__ __forceinline__ void load_bias(int i, float (&x)[8]) const {
        if constexpr (!WITH_BIAS) return params.load_bias(i, x);
#pragma unroll
        for (int j = 0; j < 8; ++j) x[j] = bias[i][j];
    }
};

// A row whose RMSNorm is added to the input row, and where the sum is written: fp32 [pitch].
struct Addend {
    const float *x, *norm_weight;
    float eps;
    float* sum;
};

// v += norm(addend). The first block writes the sum. The other blocks still read the input row, so the sum must lie
// elsewhere.
template <int INPUT, int VECTORS>
__device__ __forceinline__ void add_normed(
    float (&v)[VECTORS][8], const Addend& addend, int k, int pitch, RowScratch<THREADS, VECTORS>& scratch) {
    float y[VECTORS][8];
    load_input<INPUT, false>(addend.x, k, pitch, y);
    normalise_row<THREADS, false, false>(y, addend.norm_weight, nullptr, addend.eps, k, pitch, scratch);
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
#pragma unroll
        for (int j = 0; j < 8; ++j) v[i][j] = __fadd_rn(v[i][j], y[i][j]);
        const int column = column_of<INPUT, VECTORS>(i);
        if (blockIdx.x == 0 && column < pitch) store8(addend.sum + column, v[i]);
    }
    sync_threads<THREADS>();  // the next reduction uses the same scratch
}

// quantize_input of 16-bit values that a thread keeps as they are. In fp32 they would need so many registers that two
// blocks do not fit an SM, and the next kernel could not fetch weights before this one ends.
template <int INPUT, class Source, int VECTORS>
__device__ __forceinline__ float quantize_packed(const Source* x, int k, int pitch, int width, int8* codes) {
    __shared__ RowScratch<THREADS, 1> scratch;
    uint4 raw[VECTORS][1];
    load_raw<INPUT, false>(x, pitch, raw);
    const auto vector = [&](int i, float (&v)[8]) {
        load8(reinterpret_cast<const Source*>(raw[i]), v);
        zero_tail(v, column_of<INPUT, VECTORS>(i), k);
    };
    float top = 0;
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
        float v[8];
        vector(i, v);
#pragma unroll
        for (int j = 0; j < 8; ++j) top = absmax(top, v[j]);
    }
    const RowScale s = row_scale(threads_absmax<THREADS>(top, scratch, 0));
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
        uint4& r = raw[i][0];
        asm volatile("" : "+r"(r.x), "+r"(r.y), "+r"(r.z), "+r"(r.w));  // converted again, not kept in fp32
        float v[8];
        vector(i, v);
        const int column = column_of<INPUT, VECTORS>(i);
        if (column < width) *reinterpret_cast<uint2*>(codes + column) = quantize8(v, s.ratio);
    }
    return s.scale;
}

// The norm of the input row: in registers, where they suffice for two blocks on an SM.
template <int INPUT, int VECTORS>
using InputNorm = typename Conditional<
    is_normed(INPUT) && VECTORS <= (is_sum(INPUT) ? 1 : 2), LoadedNorm<INPUT, VECTORS>, NormParams<THREADS>>::type;

// Writes the codes of the normed or rotated input row to shared memory, with zeros up to `width`; returns the scale.
template <int INPUT, int VECTORS, bool EARLY>
__device__ __forceinline__ float quantize_input(
    const void* x, const InputNorm<INPUT, VECTORS>& norm, int rotation, float rotation_scale, int k, int pitch,
    int width, int8* codes, const Addend& addend) {
    constexpr bool NORM = is_normed(INPUT), IS_FLOAT = NORM || INPUT == FLOAT || INPUT == SUM;
    using Half = typename Conditional<INPUT == BFLOAT16, __nv_bfloat16, __half>::type;
    using Source = typename Conditional<IS_FLOAT, float, Half>::type;
    if constexpr (VECTORS > 4 && (INPUT == HALF || INPUT == BFLOAT16))
        return quantize_packed<INPUT, Source, VECTORS>(static_cast<const Source*>(x), k, pitch, width, codes);
    __shared__ RowScratch<THREADS, VECTORS> scratch;
    float v[VECTORS][8];
    load_input<INPUT, EARLY>(static_cast<const Source*>(x), k, pitch, v);
    if constexpr (INPUT == ROTATED) rotate_row<true>(v, rotation, rotation_scale);
    if constexpr (is_sum(INPUT)) add_normed<INPUT>(v, addend, k, pitch, scratch);
    float top;
    if constexpr (NORM)
        top = normalise_row<THREADS, INPUT == LAYER_NORM, true>(v, norm, scratch);
    else
        top = row_max<THREADS>(v, scratch);
    const RowScale s = row_scale(top);
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
        const int column = column_of<INPUT, VECTORS>(i);
        if (column < width) *reinterpret_cast<uint2*>(codes + column) = quantize8(v[i], s.ratio);
    }
    return s.scale;
}

// The units of one warp, as (row of the block, segment of the row): every WARPS-th unit of the block.
struct WarpUnits {
    int row, segment, segments, row_step, segment_step, remaining;

    __device__ __forceinline__ WarpUnits(int warp, int rows, int segments) : segments(segments) {
        row = warp / segments, segment = warp % segments;
        row_step = WARPS / segments, segment_step = WARPS % segments;
        const int total = rows * segments;
        remaining = total > warp ? (total - warp + WARPS - 1) / WARPS : 0;
    }
    __device__ __forceinline__ void next() {
        row += row_step, segment += segment_step, --remaining;
        if (segment >= segments) segment -= segments, ++row;
    }
};

constexpr float NO_BIAS = -0.0f;  // y + -0 is y, of either zero too

// A load that the compiler neither moves nor delays.
__device__ __forceinline__ float ld_global(const float* p) {
    float x;
    asm volatile("ld.global.f32 %0, [%1];" : "=f"(x) : "l"(p) : "memory");
    return x;
}

// What the epilogue needs of a thread's first output besides its sums.
struct EpilogueOperands {
    float w_scale[2], bias[2], residual;
};

// All but the residual.
template <int EPILOGUE>
__device__ __forceinline__ EpilogueOperands prefetch_epilogue(
    const BlockRange<EPILOGUE, 1>& block, const float* w_scale, const float* bias) {
    EpilogueOperands e = {};
    if (threadIdx.x < block.count) {
#pragma unroll
        for (int m = 0; m < block.MATRICES; ++m) {
            const int row = block.first + threadIdx.x + m * block.outputs;
            e.w_scale[m] = ld_global(w_scale + row);
            e.bias[m] = bias ? ld_global(bias + row) : NO_BIAS;
        }
    }
    return e;
}

// Scales the block's sums and writes its outputs.
template <int EPILOGUE, int F>
__device__ __forceinline__ void epilogue(
    const int* sums, float x_scale, const BlockRange<EPILOGUE, 1>& block, EpilogueOperands e,
    const float* __restrict__ w_scale, const float* __restrict__ bias, void* out) {
    for (int i = threadIdx.x; i < block.count; i += THREADS) {
        const int output = block.first + i;
        if (i >= THREADS) {
#pragma unroll
            for (int m = 0; m < block.MATRICES; ++m) {
                e.w_scale[m] = w_scale[output + m * block.outputs];
                e.bias[m] = bias ? bias[output + m * block.outputs] : NO_BIAS;
            }
            if constexpr (EPILOGUE == ADD) e.residual = static_cast<const float*>(out)[output];
        }
        const float y = __fadd_rn(scaled(__int2float_rn(sums[i]), x_scale, e.w_scale[0]), e.bias[0]);
        float up = 0;
        if constexpr (EPILOGUE == GATED)
            up = __fadd_rn(scaled(__int2float_rn(sums[block.count + i]), x_scale, e.w_scale[1]), e.bias[1]);
        store_output<EPILOGUE, F>(out, output, y, up, e.residual);
    }
}

// The pipeline through which a warp reads its units of the weight. From 9.0 on it consists of STAGES units in shared
// memory, filled by bulk copies; before, of the next unit in registers. `unit` is the next unit to be loaded, `oldest`
// the stage of the next to be multiplied.
template <int U, int EPILOGUE>
struct WeightStream {
    static constexpr int UNIT = U * CHUNK;
    const int8* weight;
    const BlockRange<EPILOGUE, 1>& block;
    int pitch;
#if __CUDA_ARCH__ >= 900
    static constexpr int STAGES = PIPELINE_BYTES / UNIT;
    int lane = threadIdx.x % WARP;
    unsigned stages, barriers;
    PipelineState oldest{STAGES};
    WarpUnits unit;
#else
    static constexpr int STAGES = 1;
    WarpUnits unit;
    int4 loaded[U];
#endif

    __device__ __forceinline__ WeightStream(
        const int8* weight, const BlockRange<EPILOGUE, 1>& block, int pitch, char* pipelines,
        unsigned long long* all_barriers)
        : weight(weight),
          block(block),
          pitch(pitch),
          unit(threadIdx.x / WARP, block.groups(), (pitch + UNIT - 1) / UNIT) {
#if __CUDA_ARCH__ >= 900
        const int warp = threadIdx.x / WARP;
        stages = cast_smem_ptr_to_uint(pipelines + warp * PIPELINE_BYTES);
        barriers = cast_smem_ptr_to_uint(all_barriers + warp * STAGES);
        if (lane == 0) {
            for (int i = 0; i < STAGES; ++i) mbarrier_init(barriers + 8 * i, 1);
            fence_mbarrier_init();
        }
        __syncwarp();
#endif
        for (int i = 0; i < STAGES; ++i) load(i);
    }

    // Starts to load the warp's next unit.
    __device__ __forceinline__ void load(int stage) {
        if (unit.remaining <= 0) return;
#if __CUDA_ARCH__ >= 900
        if (lane == 0) {
            const int column = unit.segment * UNIT, bytes = min(UNIT, pitch - column);
            const int8* source = weight + static_cast<size_t>(block.group(unit.row)) * pitch + column;
            mbarrier_arrive_expect_tx(barriers + 8 * stage, bytes);
            cp_async_bulk(stages + stage * UNIT, source, bytes, barriers + 8 * stage);
        }
#else
        const int column = unit.segment * UNIT + threadIdx.x % WARP * 16;
        const int8* source = weight + static_cast<size_t>(block.group(unit.row)) * pitch + column;
#pragma unroll
        for (int i = 0; i < U; ++i)
            loaded[i] = column + i * CHUNK < pitch ? __ldcs(reinterpret_cast<const int4*>(source + i * CHUNK)) : int4{};
#endif
        unit.next();
    }

    // The product of the oldest unit and `codes`, in every lane; the next unit takes its place in the pipeline.
    __device__ __forceinline__ int multiply(const int8* codes) {
        int4 w[U];
#if __CUDA_ARCH__ >= 900
        mbarrier_wait(barriers + 8 * oldest.index, oldest.phase);
        const unsigned source = stages + oldest.index * UNIT + lane * 16;
#pragma unroll
        for (int i = 0; i < U; ++i)
            asm volatile("ld.shared.v4.s32 {%0, %1, %2, %3}, [%4];"
                         : "=r"(w[i].x), "=r"(w[i].y), "=r"(w[i].z), "=r"(w[i].w)
                         : "r"(source + i * CHUNK));
        const int sum = dot_unit<U>(w, codes);
        __syncwarp();
        load(oldest.index);
        oldest.next();
        return warp_sum(sum);
#else
#pragma unroll
        for (int i = 0; i < U; ++i) w[i] = loaded[i];
        load(0);
        return warp_sum(dot_unit<U>(w, codes));
#endif
    }
};

// INPUT: what is quantized, x, a norm of it, a rotation in blocks of `rotation` elements (see rotate_row), or a sum
// with the norm of `addend`, which is written to `sum`. VECTORS: vectors of eight elements of x per thread. F: the
// function of GATED and ACTIVATED. U: chunks of a unit. EARLY: x was complete before this kernel could start, so the
// kernel waits for its predecessor only before it writes. Dynamic shared memory: from 9.0 on the pipelines (WARPS *
// PIPELINE_BYTES); the codes (pitch bytes, rounded up to whole units); an int32 sum for each row of the weight that the
// block has.
template <int INPUT, int VECTORS, int EPILOGUE, int F, int U, bool EARLY>
__global__ void __launch_bounds__(THREADS) gemv(
    const void* x, const float* norm_weight, const float* norm_bias, float eps, int rotation, float rotation_scale,
    const int8* __restrict__ weight, const float* __restrict__ w_scale, const float* __restrict__ bias, void* out,
    int n, int k, int pitch, const float* addend, const float* addend_weight, float addend_eps, float* sum) {
    extern __shared__ __align__(128) char shared[];
    launch_dependent_grids();
    const BlockRange<EPILOGUE, 1> block(n);
    using Stream = WeightStream<U, EPILOGUE>;
    __shared__ __align__(8) unsigned long long barriers[WARPS * Stream::STAGES];
#if __CUDA_ARCH__ >= 900
    int8* codes = reinterpret_cast<int8*>(shared + WARPS * PIPELINE_BYTES);
#else
    int8* codes = reinterpret_cast<int8*>(shared);
#endif
    const int width = (pitch + U * CHUNK - 1) / (U * CHUNK) * (U * CHUNK);
    int* sums = reinterpret_cast<int*>(codes + width);
    Stream stream(weight, block, pitch, shared, barriers);
    for (int i = threadIdx.x; i < block.groups(); i += THREADS) sums[i] = 0;
    if constexpr (is_sum(INPUT)) {  // the latency of these loads counts, and the weight stream delays them
        const int column = (blockIdx.x * THREADS + threadIdx.x) * 32;
        if (column < k) {
            prefetch_l2(addend_weight + column);
            if (is_normed(INPUT)) prefetch_l2(norm_weight + column);
        }
    }
    EpilogueOperands operands = prefetch_epilogue<EPILOGUE>(block, w_scale, bias);
    const InputNorm<INPUT, VECTORS> norm(NormParams<THREADS>{norm_weight, norm_bias, eps, k, pitch});
    if constexpr (!EARLY) wait_on_dependent_grids();
    if (EPILOGUE == ADD && threadIdx.x < block.count)
        operands.residual = ld_global(static_cast<const float*>(out) + block.first + threadIdx.x);
    const float x_scale = quantize_input<INPUT, VECTORS, EARLY>(
        x, norm, rotation, rotation_scale, k, pitch, width, codes, {addend, addend_weight, addend_eps, sum});
    sync_threads<THREADS>();
    for (WarpUnits unit(threadIdx.x / WARP, block.groups(), (pitch + U * CHUNK - 1) / (U * CHUNK)); unit.remaining > 0;
         unit.next()) {
        const int sum = stream.multiply(codes + unit.segment * (U * CHUNK));
        if (threadIdx.x % WARP == 0) atomicAdd(sums + unit.row, sum);
    }
    if constexpr (EARLY) wait_on_dependent_grids();
    sync_threads<THREADS>();
    epilogue<EPILOGUE, F>(sums, x_scale, block, operands, w_scale, bias, out);
}
