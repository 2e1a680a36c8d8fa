// int8 matrix-vector product (decoding at batch 1), memory-bound: reading the weight takes all of the time.
//
//     out = epilogue(x_scale * w_scale[n] * (sum over k of codes[k] * weight[n, k]) + bias[n])
//     codes, x_scale = quantize(norm(x)), or quantize(rotate(x)), or quantize(norm(sum)) with sum = x + norm(addend);
//                      norms may be rotated
//
// x: fp16, bf16 or fp32 [k]; weight: int8 [n, pitch]; w_scale, bias: fp32 [n]; out: fp16, bf16 or fp32 [n], or fp16 [n
// / 2] of a gated layer.
//
// Every block quantizes the whole input row into shared memory: that is cheaper than a launch of its own. Then it
// multiplies its share of the weight's rows (BlockRange). The share is cut into units of U chunks of 512 bytes of one
// row, and the block's warps take every WARPS-th unit, whichever rows these belong to, so that all warps get the same
// work. They add their sums with atomics; int32 sums are exact in any order, so the result does not depend on it.
//
// What a product costs beside reading its weight is the time from the end of its predecessor to its first sum. So all
// that does not depend on the predecessor is requested before the kernel waits for it: the first units, scales, biases,
// the norm's weight. And a block has few registers and little code, because the kernels before and after it share the
// SM and its instruction cache.
#include "common/async.cuh"
#include "common/block_range.cuh"
#include "common/common.cuh"
#include "common/epilogue.cuh"
#include "constants/gemv.cuh"
#include "gemv/input_row.cuh"

using namespace bminf;

constexpr int WARPS = THREADS / WARP;

// Blocks on an SM: one of this kernel and one of the next, which starts beside it, on 9.0 and 10.0. An SM of 12.0 has
// too little shared memory for two. The longest rotated rows take as many registers as they need.
constexpr int blocks_per_sm(int input, int vectors) {
#if __CUDA_ARCH__ >= 900 && __CUDA_ARCH__ < 1200
    return input == ROTATED && vectors == 8 ? 1 : 2;
#else
    return 1;
#endif
}
constexpr int PREFETCHED_UNITS = 2;                      // of a warp, while a row is rotated
constexpr int PIPELINE_BYTES = PIPELINE_CHUNKS * CHUNK;  // of a warp; a whole number of units for every U

__device__ __forceinline__ int dot16(const int4& a, const int4& b, int acc) {
    acc = __dp4a(a.x, b.x, acc);
    acc = __dp4a(a.y, b.y, acc);
    acc = __dp4a(a.z, b.z, acc);
    return __dp4a(a.w, b.w, acc);
}

// The number of this lane, in a register. The compiler would read the thread's number wherever it is needed, which
// takes as long as a read of shared memory, and for addresses that do not depend on the lane it counts the lanes that
// add.
__device__ __forceinline__ int kept_lane() { return __shfl_xor_sync(FULL, threadIdx.x % WARP, 0); }

// The codes of this lane's columns of a unit. `codes` starts at the unit's first column.
template <int U>
__device__ __forceinline__ void load_codes(const int8* codes, int lane, int4 (&c)[U]) {
#pragma unroll
    for (int i = 0; i < U; ++i) c[i] = *reinterpret_cast<const int4*>(codes + lane * 16 + i * CHUNK);
}

// The sum over this lane's columns of a unit. The codes are zero in columns beyond the row, so the weights there do not
// matter.
template <int U>
__device__ __forceinline__ int dot_unit(const int4 (&w)[U], const int4 (&c)[U]) {
    int sum = 0;
#pragma unroll
    for (int i = 0; i < U; ++i) sum += dot16(w[i], c[i], 0);
    return sum;
}

// Adds to shared memory.
__device__ __forceinline__ void red_shared(unsigned p, int x) {
    asm volatile("red.shared.add.s32 [%0], %1;" ::"r"(p), "r"(x) : "memory");
}

__device__ __forceinline__ int warp_sum(int x) {
#if __CUDA_ARCH__ >= 800
    return __reduce_add_sync(FULL, x);
#else
    for (int d = WARP / 2; d; d /= 2) x += __shfl_xor_sync(FULL, x, d);
    return x;
#endif
}

// The units of one warp, as (row of the block, segment of the row): every WARPS-th unit of the block.
struct WarpUnits {
    int row, segment, segments, row_step, segment_step, remaining;

    __device__ __forceinline__ WarpUnits(int rows, int segments) : segments(segments) {
        const int warp = warp_index();
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

// What the epilogue needs of an output besides its sums.
struct EpilogueOperands {
    float w_scale[2], bias[2], residual;
};

// All but the residual, of output i of the block.
template <int EPILOGUE>
__device__ __forceinline__ EpilogueOperands
prefetch_epilogue(const BlockRange<EPILOGUE, 1>& block, int i, const float* w_scale, const float* bias) {
    EpilogueOperands e = {};
#pragma unroll
    for (int m = 0; m < block.MATRICES; ++m) {
        const int row = block.first + i + m * block.outputs;
        e.w_scale[m] = ld_global(w_scale + row);
        e.bias[m] = bias ? ld_global(bias + row) : NO_BIAS;
    }
    return e;
}

// Scales the block's sums and writes its outputs. e: of the thread's first output.
template <int EPILOGUE, int F>
__device__ __forceinline__ void epilogue(
    const int* sums, float x_scale, const BlockRange<EPILOGUE, 1>& block, EpilogueOperands e, const float* w_scale,
    const float* bias, void* out) {
    if (threadIdx.x >= block.count) return;
#pragma unroll 1
    for (int i = threadIdx.x;;) {
        const int output = block.first + i;
        const float y = __fadd_rn(scaled(__int2float_rn(sums[i]), x_scale, e.w_scale[0]), e.bias[0]);
        float up = 0;
        if constexpr (EPILOGUE == GATED)
            up = __fadd_rn(scaled(__int2float_rn(sums[block.count + i]), x_scale, e.w_scale[1]), e.bias[1]);
        store_output<EPILOGUE, F>(out, output, y, up, e.residual);
        i += THREADS;
        if (i >= block.count) return;
        e = prefetch_epilogue(block, i, w_scale, bias);
        if constexpr (EPILOGUE == ADD) e.residual = static_cast<const float*>(out)[block.first + i];
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
    int pitch, lane;
#if __CUDA_ARCH__ >= 900
    static constexpr int STAGES = PIPELINE_BYTES / UNIT;
    unsigned stages, barriers;
    PipelineState oldest{STAGES};
    WarpUnits unit;
#else
    static constexpr int STAGES = 1;
    WarpUnits unit;
    int4 loaded[U];
#endif

    __device__ __forceinline__ WeightStream(
        const int8* weight, const BlockRange<EPILOGUE, 1>& block, const WarpUnits& first, int pitch, int lane,
        char* pipelines, unsigned long long* all_barriers)
        : weight(weight),
          block(block),
          pitch(pitch),
          lane(lane),
          unit(first) {
#if __CUDA_ARCH__ >= 900
        const int warp = warp_index();
        stages = cast_smem_ptr_to_uint(pipelines + warp * PIPELINE_BYTES);
        barriers = cast_smem_ptr_to_uint(all_barriers + warp * STAGES);
        if (lane == 0) {
#pragma unroll 1
            for (int i = 0; i < STAGES; ++i) mbarrier_init(barriers + 8 * i, 1);
            fence_mbarrier_init();
        }
        __syncwarp();
#endif
#pragma unroll 1
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
            cp_async_bulk_evict_first(stages + stage * UNIT, source, bytes, barriers + 8 * stage);
        }
#else
        const int column = unit.segment * UNIT + lane * 16;
        const int8* source = weight + static_cast<size_t>(block.group(unit.row)) * pitch + column;
#pragma unroll
        for (int i = 0; i < U; ++i)
            loaded[i] = column + i * CHUNK < pitch ? __ldcs(reinterpret_cast<const int4*>(source + i * CHUNK)) : int4{};
#endif
        unit.next();
    }

    // Fetches the bytes of the next units into the L2 cache, while the warps have no codes to multiply and the memory
    // would be idle.
    __device__ __forceinline__ void prefetch() const {
#if __CUDA_ARCH__ >= 900
        if (lane != 0) return;
        WarpUnits next = unit;
#pragma unroll 1
        for (int i = 0; i < PREFETCHED_UNITS && next.remaining > 0; ++i, next.next()) {
            const int column = next.segment * UNIT;
            const int8* source = weight + static_cast<size_t>(block.group(next.row)) * pitch + column;
            prefetch_bulk_l2(source, min(UNIT, pitch - column));
        }
#endif
    }

    // The product of the oldest unit and `codes`, in every lane; the next unit takes its place in the pipeline.
    __device__ __forceinline__ int multiply(const int4 (&codes)[U]) {
        int4 w[U];
#if __CUDA_ARCH__ >= 900
        mbarrier_wait(barriers + 8 * oldest.index, oldest.phase);
        const unsigned source = stages + oldest.index * UNIT + lane * 16;
#pragma unroll
        for (int i = 0; i < U; ++i) w[i] = ld_shared_v4(source + i * CHUNK);
        const int sum = dot_unit<U>(w, codes);
        if (unit.remaining > 0) fence_proxy_async();
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

// Adds the products of the warp's units, from `unit` on, to `sums`.
template <int U, int EPILOGUE>
__device__ __forceinline__ void multiply_units(
    WeightStream<U, EPILOGUE>& stream, WarpUnits unit, const int8* codes, int* sums) {
    const int lane = stream.lane;
    unsigned own_sums = cast_smem_ptr_to_uint(sums) + lane * 4;  // of lane 0: all sums
    asm volatile("" : "+r"(own_sums));
    int4 c[U];
    int segment = -1;  // whose codes are in c; mostly the same for all units of a warp
#pragma unroll 1
    for (; unit.remaining > 0; unit.next()) {
        if (segment != unit.segment) load_codes(codes + unit.segment * (U * CHUNK), lane, c);
        segment = unit.segment;
        const int sum = stream.multiply(c);
        if (lane == 0) red_shared(own_sums + unit.row * 4, sum);
    }
}

// INPUT: what is quantized, x, a norm of it, rotations of both in blocks of `rotation` elements (see rotate_row), or a
// sum with the norm of `addend`, which is written to `sum`. inverse_k: 1 / k. ROW_THREADS, VECTORS: see InputRow. F:
// the function of GATED and ACTIVATED. U: chunks of a unit. EARLY, of GATED and ACTIVATED: x was complete before this
// kernel could start, so the kernel waits for its predecessor only before it writes; of TO_HALF: the kernel lets its
// successor, which reads x too, start when x is complete. Dynamic shared memory: from 9.0 on the pipelines (WARPS *
// PIPELINE_BYTES); the codes (pitch bytes, rounded up to whole units); an int32 sum for each row of the weight that the
// block has.
template <int INPUT, int ROW_THREADS, int VECTORS, int EPILOGUE, int F, int U, bool EARLY>
__global__ void __launch_bounds__(THREADS, blocks_per_sm(INPUT, VECTORS)) gemv(
    const void* x, const float* norm_weight, const float* norm_bias, float eps, double inverse_k, int rotation,
    float rotation_scale, const int8* __restrict__ weight, const float* __restrict__ w_scale,
    const float* __restrict__ bias, void* out, int n, int k, int pitch, const float* addend, const float* addend_weight,
    float addend_eps, float* sum) {
    constexpr bool STARTS_LATE = EARLY && EPILOGUE == TO_HALF, READS_EARLY = EARLY && !STARTS_LATE;
    extern __shared__ __align__(128) char shared[];
    if constexpr (!STARTS_LATE) launch_dependent_grids();
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
    const WarpUnits first(block.groups(), width / (U * CHUNK));
    using Row = InputRow<INPUT, ROW_THREADS, VECTORS>;
    const int lane = VECTORS <= 2 || Row::IS_PACKED ? kept_lane() : threadIdx.x % WARP;  // others leave no register
    Stream stream(weight, block, first, pitch, lane, shared, barriers);
#pragma unroll 1
    for (int i = threadIdx.x; i < block.groups(); i += THREADS) sums[i] = 0;
    if constexpr (is_sum(INPUT)) {  // the latency of these loads counts, and the weight stream delays them
        const int column = (blockIdx.x * THREADS + threadIdx.x) * 32;
        if (column < k) {
            prefetch_l2(addend_weight + column);
            if (is_normed(INPUT)) prefetch_l2(norm_weight + column);
        }
    }
    EpilogueOperands operands = {};
    if (threadIdx.x < block.count) operands = prefetch_epilogue(block, threadIdx.x, w_scale, bias);
    const auto norm = input_norm<Row>({norm_weight, norm_bias, eps, k, pitch}, inverse_k);
    const RowAddresses<Row> row(x, pitch);
    if constexpr (!READS_EARLY) wait_on_dependent_grids();
    if constexpr (STARTS_LATE) launch_dependent_grids();
    if (EPILOGUE == ADD && threadIdx.x < block.count)
        operands.residual = ld_global(static_cast<const float*>(out) + block.first + threadIdx.x);
    float top = 0;
    if (THREADS == ROW_THREADS || threadIdx.x < ROW_THREADS)
        top = quantize_input<Row>(
            row, norm, rotation, rotation_scale, k, pitch, width, codes, {addend, addend_weight, addend_eps, sum},
            [&] { stream.prefetch(); });
    __syncthreads();
    multiply_units(stream, first, codes, sums);
    __shared__ float x_scale;
    if (threadIdx.x == ROW_THREADS - 1) x_scale = row_scale(top).scale;  // few warps have fewer units than this one's
    if constexpr (READS_EARLY) wait_on_dependent_grids();
    __syncthreads();
    epilogue<EPILOGUE, F>(sums, x_scale, block, operands, w_scale, bias, out);
}
