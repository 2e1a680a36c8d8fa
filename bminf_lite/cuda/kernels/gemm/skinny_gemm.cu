// A few activation rows (2 to 32) times an int8 weight, on the tensor cores: decoding of small batches, bound by
// reading the weights, which each block does once.
//
// A product of the tensor cores takes a group of 16 rows of the weight and a tile of 8 rows of the activations. Which
// 32 columns it multiplies is free as long as both operands agree, so a lane reads 16 contiguous bytes of its row and
// feeds two products with them.
//
// A block has whole groups, so it finishes its outputs itself. Its work is cut into units, a group's SEGMENT columns,
// and its warps take a run of them each, column by column, so that the activations of a segment stay in registers:
// int32 sums are exact in any order. The first units are under way before the kernel waits for its input.
#include "common/async.cuh"
#include "common/common.cuh"
#include "constants/skinny_gemm.cuh"
#include "gemm/skinny_gemm.cuh"

using namespace bminf;

constexpr int WARPS = PIPELINE_WARPS;  // as many as the shared memory has room for
constexpr int THREADS = WARPS * WARP;
constexpr int STAGES = PIPELINE_STAGES;  // units under way per warp
constexpr int STEPS = PIPELINE_STEPS;
constexpr int SEGMENT = STEPS * STEP;
constexpr int STRIDE = SEGMENT + 64;  // in shared memory, so that the 8 lanes of a read meet all banks
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

// What a block computes: `count` groups of outputs from group `first` on. With GATED each has two groups of the weight.
template <int EPILOGUE>
struct BlockRange {
    static constexpr int MATRICES = EPILOGUE == GATED ? 2 : 1;
    int outputs, first, count;

    __device__ __forceinline__ explicit BlockRange(int n) {
        outputs = (n / MATRICES + ROWS - 1) / ROWS;
        first = static_cast<int>(static_cast<long long>(outputs) * blockIdx.x / gridDim.x);
        count = static_cast<int>(static_cast<long long>(outputs) * (blockIdx.x + 1) / gridDim.x) - first;
    }
    __device__ __forceinline__ int groups() const { return count * MATRICES; }
    __device__ __forceinline__ int group(int local) const {  // the weight's group of a local one
        return MATRICES == 2 && local >= count ? outputs + first + local - count : first + local;
    }
};

// A warp's run of the block's units.
struct WarpRange {
    int groups, group, segment, left;

    __device__ __forceinline__ WarpRange(int warp, int groups_, int segments) : groups(groups_) {
        const int total = groups * segments, begin = total * warp / WARPS;
        segment = begin / groups, group = begin % groups;
        left = total * (warp + 1) / WARPS - begin;
    }
    __device__ __forceinline__ void next() {
        --left;
        if (++group == groups) group = 0, ++segment;
    }
};

// Brings a warp's units to its part of the pipeline: by the copy engine from 9.0 on, where a lane copies a row; before,
// by copies of what the lane itself will read.
template <class BlockRange>
struct WeightStream {
    const int8* weight;
    const BlockRange& share;
    int pitch, lane, stage = 0, phase = 0;
    char* pipeline;
    unsigned barriers;
    WarpRange ahead;

    __device__ __forceinline__ WeightStream(
        const int8* weight, const BlockRange& share, int pitch, char* pipelines, unsigned long long* all,
        const WarpRange& run)
        : weight(weight),
          share(share),
          pitch(pitch),
          lane(threadIdx.x % WARP),
          ahead(run) {
        const int warp = threadIdx.x / WARP;
        pipeline = pipelines + warp * (STAGES * UNIT);
        barriers = cast_smem_ptr_to_uint(all + warp * STAGES);
#if __CUDA_ARCH__ >= 900
        if (lane == 0) {
            for (int i = 0; i < STAGES; ++i) mbarrier_init(barriers + 8 * i, 1);
            fence_mbarrier_init();
        }
        __syncwarp();
#endif
        for (int i = 0; i < STAGES; ++i) start(i);
    }
    __device__ __forceinline__ void start(int to) {
        if (ahead.left > 0) {
            const int column = ahead.segment * SEGMENT;
            const int8* source = weight + static_cast<size_t>(share.group(ahead.group)) * (ROWS * pitch) + column;
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
    // The unit's product with a segment of the activations, and the next copy into its place.
    template <int TILES>
    __device__ __forceinline__ void multiply_by(const int4 (&x)[STEPS][TILES], int (&c)[2][TILES][4]) {
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
        __syncwarp();
        start(stage);
        if (++stage == STAGES) stage = 0, phase ^= 1;
    }
};

// A segment of the activations, as the tensor cores take it. What lies past the last row or column is 0, which makes
// what the pipeline holds there harmless. Not through L1, which knows nothing of writes since this kernel began.
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

// Where the sum of a local channel (row of the weight) and a token is: as the tensor cores hold it, lane by lane.
template <int TILES>
__device__ __forceinline__ int accumulator_index(int channel, int token) {
    const int lane = channel % 8 * 4 + token % 8 / 2, part = channel % ROWS / 8 * 2 + token % 2;
    return ((channel / ROWS * TILES + token / 8) * 4 + part) * WARP + lane;
}

// What a block adds its outputs to: the first two of each thread are fetched while the product is under way.
template <int EPILOGUE>
struct Residual {
    const float* values;
    float early[2];

    __device__ __forceinline__
    Residual(const BlockRange<EPILOGUE>& share, const void* out, long long pitch, int rows, int n) {
        values = static_cast<const float*>(out) + share.first * ROWS;
        const int width = share.count * ROWS;
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            const int i = j * THREADS + threadIdx.x, token = i / width, channel = i % width;
            const bool inside = EPILOGUE == ADD && token < rows && share.first * ROWS + channel < n;
            early[j] = inside ? __ldcg(values + token * pitch + channel) : 0.0f;
        }
    }
    __device__ __forceinline__ float at(int i, size_t place) const {
        return i < THREADS ? early[0] : i < 2 * THREADS ? early[1] : __ldcg(values + place);
    }
};

// The exact sums of a block, scaled and put where they belong, channel by channel of a token.
template <int TILES, int EPILOGUE, int F>
__device__ __forceinline__ void epilogue(
    const int* sums, const float* x_scale, const float* w_scale, const float* bias, const BlockRange<EPILOGUE>& share,
    const Residual<EPILOGUE>& residual, void* out, long long out_pitch, int rows, int n) {
    const int width = share.count * ROWS, first = share.first * ROWS, end = n / share.MATRICES - first;
    for (int i = threadIdx.x; i < rows * width; i += THREADS) {
        const int token = i / width, channel = i % width;
        if (channel >= end) continue;
        const size_t place = token * out_pitch + channel;
        int found[BlockRange<EPILOGUE>::MATRICES];
        Channel channels[BlockRange<EPILOGUE>::MATRICES];
#pragma unroll
        for (int m = 0; m < BlockRange<EPILOGUE>::MATRICES; ++m) {
            const int local = m * width + channel;
            found[m] = sums[accumulator_index<TILES>(local, token)];
            channels[m] = {w_scale[local], bias ? bias[local] : 0.0f};
        }
        const float before = EPILOGUE == ADD ? residual.at(i, place) : 0.0f;
        put<EPILOGUE, F>(out, first + place, found, x_scale[token], channels, bias != nullptr, before);
    }
}

// x: int8 [rows, pitch], rows up to 8 TILES; x_scale: fp32 [rows]. weight: int8 [n in whole groups, pitch]; w_scale,
// bias: fp32 [n]. out: [rows, n] with rows of out_pitch elements: fp16, fp32, fp32 to add to, or int32; or fp16 [rows,
// n / 2] if GATED, then n / 2 is a multiple of 16. F is the gate's function. Dynamic shared memory: the pipeline, and
// for each channel of a block's share 8 TILES sums, its scale and its bias.
template <int TILES, int EPILOGUE, int F>
__global__ void __launch_bounds__(THREADS, 1) skinny_gemm(
    const int8* x, const float* x_scale, const int8* __restrict__ weight, const float* __restrict__ w_scale,
    const float* __restrict__ bias, void* out, long long out_pitch, int rows, int n, int pitch) {
    extern __shared__ __align__(128) char shared[];
    __shared__ __align__(8) unsigned long long barriers[WARPS * STAGES];
    __shared__ float row_scales[8 * TILES];
    launch_dependent_grids();
    const BlockRange<EPILOGUE> share(n);
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, channels = share.groups() * ROWS;
    int* sums = reinterpret_cast<int*>(shared + WARPS * STAGES * UNIT);
    float* scales = reinterpret_cast<float*>(sums + channels * 8 * TILES);
    float* biases = scales + channels;
    WarpRange unit(warp, share.groups(), (pitch + SEGMENT - 1) / SEGMENT);
    WeightStream<BlockRange<EPILOGUE>> stream(weight, share, pitch, shared, barriers, unit);
    for (int i = threadIdx.x; i < channels * 8 * TILES; i += THREADS) sums[i] = 0;
    if constexpr (EPILOGUE != TO_INT32)
        for (int i = threadIdx.x; i < channels; i += THREADS) {
            const int row = share.group(i / ROWS) * ROWS + i % ROWS;
            scales[i] = row < n ? w_scale[row] : 0.0f;
            biases[i] = row < n && bias ? bias[row] : 0.0f;
        }
    wait_on_dependent_grids();
    if (EPILOGUE != TO_INT32 && threadIdx.x < rows) row_scales[threadIdx.x] = __ldcg(x_scale + threadIdx.x);
    const Residual<EPILOGUE> residual(share, out, out_pitch, rows, n);
    __syncthreads();
    int4 segment[STEPS][TILES];
    for (int held = -1; unit.left > 0; unit.next()) {
        if (unit.segment != held) load_segment(segment, x, rows, pitch, held = unit.segment);
        int c[2][TILES][4] = {};
        stream.multiply_by(segment, c);
#pragma unroll
        for (int t = 0; t < TILES; ++t)
#pragma unroll
            for (int i = 0; i < 4; ++i)
                atomicAdd(sums + ((unit.group * TILES + t) * 4 + i) * WARP + lane, c[0][t][i] + c[1][t][i]);
    }
    __syncthreads();
    epilogue<TILES, EPILOGUE, F>(
        sums, row_scales, scales, bias ? biases : nullptr, share, residual, out, out_pitch, rows, n);
}
