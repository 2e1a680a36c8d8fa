// int8 GEMM for a few rows (2 to 32) by mma.sync, from compute capability 8.0 on: decoding of small batches, which is
// memory-bound, because the weight is read once.
//
//     out = epilogue(x @ w.T), see skinny_gemm.cuh
//
// x: int8 [rows, pitch]; weight: int8 [n, pitch]; x_scale: fp32 [rows]; w_scale, bias: fp32 [n]; out: [rows, n], or
// [rows, n / 2] of a gated layer.
//
// The weight is the left operand of mma.m16n8k32, in groups of 16 channels, and the activations are the right operand,
// in tiles of 8 rows. The order of k within an instruction is arbitrary as long as both operands agree, so each lane
// reads 16 contiguous bytes and uses them for two instructions.
//
// A block has whole groups of outputs (BlockRange), so that it can apply the epilogue itself. Its work is cut into
// units: SEGMENT columns of one group. Each warp takes a contiguous run of units that goes through all groups before it
// goes on to the next segment, so that a segment of the activations stays in registers. Warps add their sums in shared
// memory by atomics; int32 sums are exact in any order. The copies of the first units start before the kernel waits for
// its input.
#include "common/async.cuh"
#include "common/block_range.cuh"
#include "common/common.cuh"
#include "constants/skinny_gemm.cuh"
#include "gemm/skinny_gemm.cuh"

using namespace bminf;

constexpr int WARPS = PIPELINE_WARPS;
constexpr int THREADS = WARPS * WARP;
constexpr int STAGES = PIPELINE_STAGES;  // units in a warp's pipeline
constexpr int STEPS = PIPELINE_STEPS;
constexpr int SEGMENT = STEPS * STEP;
constexpr int STRIDE = SEGMENT + 64;  // of rows in shared memory: avoids bank conflicts
constexpr int UNIT = ROWS * STRIDE;

__device__ __forceinline__ void mma_m16n8k32(int (&c)[4], int a0, int a1, int a2, int a3, int b0, int b1) {
#if __CUDA_ARCH__ >= 800
    asm volatile(
        "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
        "%3};"
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
#endif
}

// The units of one warp, as (group of the block, segment).
struct WarpUnits {
    int groups, group, segment, remaining;

    __device__ __forceinline__ WarpUnits(int warp, int groups, int segments) : groups(groups) {
        const int total = groups * segments, begin = total * warp / WARPS;
        segment = begin / groups, group = begin % groups;
        remaining = total * (warp + 1) / WARPS - begin;
    }
    __device__ __forceinline__ void next() {
        --remaining;
        if (++group == groups) group = 0, ++segment;
    }
};

// A warp's pipeline of units of the weight. From 9.0 on it is filled by bulk copies, one row by each lane; before, by
// cp.async of the very bytes that the lane will read. `ahead` is the next unit to be loaded, `stage` the next to be
// multiplied.
template <int EPILOGUE>
struct WeightStream {
    const int8* weight;
    const BlockRange<EPILOGUE, ROWS>& block;
    int pitch, lane, stage = 0, phase = 0;
    char* pipeline;
    unsigned barriers;
    WarpUnits ahead;

    __device__ __forceinline__ WeightStream(
        const int8* weight, const BlockRange<EPILOGUE, ROWS>& block, int pitch, char* pipelines,
        unsigned long long* all_barriers, const WarpUnits& units)
        : weight(weight),
          block(block),
          pitch(pitch),
          lane(threadIdx.x % WARP),
          ahead(units) {
        const int warp = threadIdx.x / WARP;
        pipeline = pipelines + warp * (STAGES * UNIT);
        barriers = cast_smem_ptr_to_uint(all_barriers + warp * STAGES);
#if __CUDA_ARCH__ >= 900
        if (lane == 0) {
            for (int i = 0; i < STAGES; ++i) mbarrier_init(barriers + 8 * i, 1);
            fence_mbarrier_init();
        }
        __syncwarp();
#endif
        for (int i = 0; i < STAGES; ++i) load(i);
    }
    // Starts to load the warp's next unit.
    __device__ __forceinline__ void load(int to) {
        if (ahead.remaining > 0) {
            const int column = ahead.segment * SEGMENT;
            const int8* source = weight + static_cast<size_t>(block.group(ahead.group)) * (ROWS * pitch) + column;
            char* target = pipeline + to * UNIT;
#if __CUDA_ARCH__ >= 900
            const int bytes = min(SEGMENT, pitch - column);
            if (lane == 0) mbarrier_arrive_expect_tx(barriers + 8 * to, ROWS * bytes);
            __syncwarp();
            if (lane < ROWS)
                cp_async_bulk(
                    cast_smem_ptr_to_uint(target + lane * STRIDE), source + lane * pitch, bytes, barriers + 8 * to);
#else
#pragma unroll
            for (int s = 0; s < STEPS; ++s) {
                const int at = s * STEP + lane % 4 * 16, row = lane / 4;
                if (column + at >= pitch) continue;
                cp_async_16(target + row * STRIDE + at, source + row * pitch + at);
                cp_async_16(target + (row + 8) * STRIDE + at, source + (row + 8) * pitch + at);
            }
#endif
            ahead.next();
        }
        cp_async_commit_group();
    }
    // c += the oldest unit times its segment of the activations; the next unit takes its place in the pipeline.
    template <int TILES>
    __device__ __forceinline__ void multiply(const int4 (&x)[STEPS][TILES], int (&c)[2][TILES][4]) {
#if __CUDA_ARCH__ >= 900
        mbarrier_wait(barriers + 8 * stage, phase);
#else
        cp_async_wait_group<STAGES - 1>();
#endif
        const char* from = pipeline + stage * UNIT + lane / 4 * STRIDE + lane % 4 * 16;
#pragma unroll
        for (int s = 0; s < STEPS; ++s) {
            const int4 low = *reinterpret_cast<const int4*>(from + s * STEP);
            const int4 high = *reinterpret_cast<const int4*>(from + 8 * STRIDE + s * STEP);
#pragma unroll
            for (int t = 0; t < TILES; ++t) {
                mma_m16n8k32(c[0][t], low.x, high.x, low.y, high.y, x[s][t].x, x[s][t].y);
                mma_m16n8k32(c[1][t], low.z, high.z, low.w, high.w, x[s][t].z, x[s][t].w);
            }
        }
#if __CUDA_ARCH__ >= 900
        if (ahead.remaining > 0) fence_proxy_async();
#endif
        __syncwarp();
        load(stage);
        if (++stage == STAGES) stage = 0, phase ^= 1;
    }
};

// Loads a segment of the activations as right operands. It is zero past the last row and column, so the weights there
// do not matter. __ldcg bypasses L1, which is not coherent with writes since the launch of this kernel.
template <int TILES>
__device__ __forceinline__ void load_segment(
    int4 (&x)[STEPS][TILES], const int8* codes, int rows, int pitch, int segment) {
    const int lane = threadIdx.x % WARP;
#pragma unroll
    for (int s = 0; s < STEPS; ++s)
#pragma unroll
        for (int t = 0; t < TILES; ++t) {
            const int row = t * 8 + lane / 4, column = segment * SEGMENT + s * STEP + lane % 4 * 16;
            x[s][t] = row < rows && column < pitch
                          ? __ldcg(reinterpret_cast<const int4*>(codes + static_cast<size_t>(row) * pitch + column))
                          : make_int4(0, 0, 0, 0);
        }
}

// The index in shared memory of the sum of a local channel and a row of x. Sums have the order of the accumulators:
// [group][tile][register][lane].
template <int TILES>
__device__ __forceinline__ int accumulator_index(int channel, int token) {
    const int lane = channel % 8 * 4 + token % 8 / 2, part = channel % ROWS / 8 * 2 + token % 2;
    return ((channel / ROWS * TILES + token / 8) * 4 + part) * WARP + lane;
}

// The residual stream at the block's outputs. Each thread's first two values are loaded before the product.
template <int EPILOGUE>
struct Residual {
    const float* values;
    float loaded[2];

    __device__ __forceinline__
    Residual(const BlockRange<EPILOGUE, ROWS>& block, const void* out, long long pitch, int rows, int n) {
        values = static_cast<const float*>(out) + block.first * ROWS;
        const int width = block.count * ROWS;
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            const int i = j * THREADS + threadIdx.x, token = i / width, channel = i % width;
            const bool inside = EPILOGUE == ADD && token < rows && block.first * ROWS + channel < n;
            loaded[j] = inside ? __ldcg(values + token * pitch + channel) : 0.0f;
        }
    }
    __device__ __forceinline__ float at(int i, size_t index) const {
        return i < THREADS ? loaded[0] : i < 2 * THREADS ? loaded[1] : __ldcg(values + index);
    }
};

// Applies the epilogue to the block's sums, the channels of a row after each other.
template <int TILES, int EPILOGUE, int F>
__device__ __forceinline__ void epilogue(
    const int* sums, const float* x_scale, const float* w_scale, const float* bias,
    const BlockRange<EPILOGUE, ROWS>& block, const Residual<EPILOGUE>& residual, void* out, long long out_pitch,
    int rows, int n) {
    const int width = block.count * ROWS, first = block.first * ROWS, end = n / block.MATRICES - first;
    for (int i = threadIdx.x; i < rows * width; i += THREADS) {
        const int token = i / width, channel = i % width;
        if (channel >= end) continue;
        const size_t index = token * out_pitch + channel;
        int channel_sums[BlockRange<EPILOGUE, ROWS>::MATRICES];
        Channel channels[BlockRange<EPILOGUE, ROWS>::MATRICES];
#pragma unroll
        for (int m = 0; m < BlockRange<EPILOGUE, ROWS>::MATRICES; ++m) {
            const int local = m * width + channel;
            channel_sums[m] = sums[accumulator_index<TILES>(local, token)];
            channels[m] = {w_scale[local], bias ? bias[local] : 0.0f};
        }
        const float before = EPILOGUE == ADD ? residual.at(i, index) : 0.0f;
        store_scaled<EPILOGUE, F>(out, first + index, channel_sums, x_scale[token], channels, bias != nullptr, before);
    }
}

// TILES: tiles of 8 rows of x. F: the function of GATED and ACTIVATED. The weight has whole groups of memory; with
// GATED n / 2 is a multiple of 16. Dynamic shared memory: the pipelines, WARPS * STAGES * UNIT bytes; and for each
// channel of the block 8 * TILES sums, its scale and its bias.
template <int TILES, int EPILOGUE, int F>
__global__ void __launch_bounds__(THREADS, 1) skinny_gemm(
    const int8* x, const float* x_scale, const int8* __restrict__ weight, const float* __restrict__ w_scale,
    const float* __restrict__ bias, void* out, long long out_pitch, int rows, int n, int pitch) {
    extern __shared__ __align__(128) char shared[];
    __shared__ __align__(8) unsigned long long barriers[WARPS * STAGES];
    __shared__ float row_scales[8 * TILES];
    launch_dependent_grids();
    const BlockRange<EPILOGUE, ROWS> block(n);
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, channels = block.groups() * ROWS;
    int* sums = reinterpret_cast<int*>(shared + WARPS * STAGES * UNIT);
    float* scales = reinterpret_cast<float*>(sums + channels * 8 * TILES);
    float* biases = scales + channels;
    WarpUnits unit(warp, block.groups(), (pitch + SEGMENT - 1) / SEGMENT);
    WeightStream<EPILOGUE> stream(weight, block, pitch, shared, barriers, unit);
    for (int i = threadIdx.x; i < channels * 8 * TILES; i += THREADS) sums[i] = 0;
    if constexpr (EPILOGUE != TO_INT32)
        for (int i = threadIdx.x; i < channels; i += THREADS) {
            const int row = block.group(i / ROWS) * ROWS + i % ROWS;
            scales[i] = row < n ? w_scale[row] : 0.0f;
            biases[i] = row < n && bias ? bias[row] : 0.0f;
        }
    wait_on_dependent_grids();
    if (EPILOGUE != TO_INT32 && threadIdx.x < rows) row_scales[threadIdx.x] = __ldcg(x_scale + threadIdx.x);
    const Residual<EPILOGUE> residual(block, out, out_pitch, rows, n);
    __syncthreads();
    int4 segment[STEPS][TILES];
    for (int held = -1; unit.remaining > 0; unit.next()) {
        if (unit.segment != held) load_segment(segment, x, rows, pitch, held = unit.segment);
        int c[2][TILES][4] = {};
        stream.multiply(segment, c);
#pragma unroll
        for (int t = 0; t < TILES; ++t)
#pragma unroll
            for (int i = 0; i < 4; ++i)
                atomicAdd(sums + ((unit.group * TILES + t) * 4 + i) * WARP + lane, c[0][t][i] + c[1][t][i]);
    }
    __syncthreads();
    epilogue<TILES, EPILOGUE, F>(
        sums, row_scales, scales, bias ? biases : nullptr, block, residual, out, out_pitch, rows, n);
}
