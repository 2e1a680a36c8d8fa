// A few activation rows (2 to 32) times an int8 weight, exactly, on the tensor cores: bound by reading the weights, which
// each block does once. acc = x @ w.T in int32.
//
// A product of the tensor cores takes 16 rows of the weight and 8 of the activations. Which 32 columns it multiplies is
// free as long as both operands agree, so a lane reads 16 contiguous bytes of its row and feeds two products with them.
#include "async.cuh"
#include "common.cuh"

using namespace bminf;

constexpr int THREADS = 256;
constexpr int WARPS = THREADS / WARP;
constexpr int ROWS = 16;             // of the weight, in one product
constexpr int SEGMENT = 512;         // bytes of each of these rows in a unit
constexpr int STRIDE = SEGMENT + 64; // in shared memory, so that the 8 lanes of a read meet all banks
constexpr int SLOTS = 2;             // units under way per warp
constexpr int STEP = 64;             // bytes of a row that two products take
constexpr int STEPS = SEGMENT / STEP;

__device__ __forceinline__ void multiply(int (&c)[4], int a0, int a1, int a2, int a3, int b0, int b1) {
#if __CUDA_ARCH__ >= 800
    asm volatile(
        "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
#endif
}

// The units of a warp, a contiguous run of the block's: unit = group of 16 rows, segment of their columns.
struct Run {
    int group, segment, segments, left;

    __device__ __forceinline__ Run(int warp, int groups, int segments_) : segments(segments_) {
        const int total = groups * segments, first = total * warp / WARPS;
        group = first / segments, segment = first % segments;
        left = total * (warp + 1) / WARPS - first;
    }
    __device__ __forceinline__ void next() {
        --left;
        if (++segment == segments) segment = 0, ++group;
    }
};

// Brings a warp's units to its part of the ring. A lane copies a row; lane 0 announces the bytes first.
struct Stream {
    const int8* weight;
    int first_row, pitch, lane, slot = 0, parity = 0;
    char* ring;
    unsigned barriers;
    Run ahead;

    __device__ __forceinline__ Stream(
        const int8* weight, int first_row, int pitch, char* rings, unsigned long long* all, const Run& run)
        : weight(weight), first_row(first_row), pitch(pitch), lane(threadIdx.x % WARP), ahead(run)
    {
        const int warp = threadIdx.x / WARP;
        ring = rings + warp * SLOTS * ROWS * STRIDE;
        barriers = shared_address(all + warp * SLOTS);
        if (lane == 0) {
            for (int i = 0; i < SLOTS; ++i) barrier_init(barriers + 8 * i, 1);
            barriers_ready();
        }
        __syncwarp();
        for (int i = 0; i < SLOTS; ++i) start(i);
    }
    __device__ __forceinline__ void start(int to) {
        if (ahead.left <= 0) return;
        const int column = ahead.segment * SEGMENT, bytes = min(SEGMENT, pitch - column);
        if (lane == 0) barrier_expect(barriers + 8 * to, ROWS * bytes);
        __syncwarp();
        if (lane < ROWS) {
            const size_t row = first_row + ahead.group * ROWS + lane;
            const unsigned target = shared_address(ring + (to * ROWS + lane) * STRIDE);
            bulk_copy(target, weight + row * pitch + column, bytes, barriers + 8 * to);
        }
        ahead.next();
    }
    __device__ __forceinline__ void wait() { barrier_wait(barriers + 8 * slot, parity); }
    // 16 bytes of this lane's row, or with `half` of the row 8 further, at byte `step` of the segment.
    __device__ __forceinline__ int4 read(int half, int step) const {
        const int row = half * 8 + lane / 4;
        return *reinterpret_cast<const int4*>(ring + (slot * ROWS + row) * STRIDE + step + lane % 4 * 16);
    }
    __device__ __forceinline__ void release() {
        __syncwarp();
        start(slot);
        if (++slot == SLOTS) slot = 0, parity ^= 1;
    }
};

// x: int8 [rows, pitch], rows up to 8 TILES; weight: int8 [n, pitch], n a multiple of 16; acc: int32 [rows, n]. The grid has
// at most GROUPS groups of 16 weight rows per block. Dynamic shared memory: the rings, and GROUPS * 16 * 8 TILES sums.
template <int TILES>
__global__ void __launch_bounds__(THREADS, 1) few_rows(
    int* acc, const int8* __restrict__ weight, const int8* x, int rows, int n, int pitch)
{
#if __CUDA_ARCH__ >= 900
    extern __shared__ __align__(128) char shared[];
    __shared__ __align__(8) unsigned long long barriers[WARPS * SLOTS];
    constexpr int TOKENS = 8 * TILES;
    const int all = n / ROWS, warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const int first = static_cast<int>(static_cast<long long>(all) * blockIdx.x / gridDim.x);
    const int groups = static_cast<int>(static_cast<long long>(all) * (blockIdx.x + 1) / gridDim.x) - first;
    int* sums = reinterpret_cast<int*>(shared + WARPS * SLOTS * ROWS * STRIDE);
    Run unit(warp, groups, (pitch + SEGMENT - 1) / SEGMENT);
    Stream stream(weight, first * ROWS, pitch, shared, barriers, unit);
    for (int i = threadIdx.x; i < groups * ROWS * TOKENS; i += THREADS) sums[i] = 0;
    wait_for_predecessor();
    __syncthreads();
    int c[TILES][4] = {};
    for (; unit.left > 0; unit.next()) {
#pragma unroll
        for (int part = 0; part < 2; ++part) {
            int4 b[STEPS / 2][TILES];
#pragma unroll
            for (int s = 0; s < STEPS / 2; ++s)
#pragma unroll
                for (int t = 0; t < TILES; ++t) {
                    const int token = t * 8 + lane / 4;
                    const int column = unit.segment * SEGMENT + (part * STEPS / 2 + s) * STEP + lane % 4 * 16;
                    b[s][t] = token < rows && column < pitch
                        ? *reinterpret_cast<const int4*>(x + static_cast<size_t>(token) * pitch + column) : make_int4(0, 0, 0, 0);
                }
            if (part == 0) stream.wait();
#pragma unroll
            for (int s = 0; s < STEPS / 2; ++s) {
                const int step = (part * STEPS / 2 + s) * STEP;
                const int4 low = stream.read(0, step), high = stream.read(1, step);
#pragma unroll
                for (int t = 0; t < TILES; ++t) {
                    multiply(c[t], low.x, high.x, low.y, high.y, b[s][t].x, b[s][t].y);
                    multiply(c[t], low.z, high.z, low.w, high.w, b[s][t].z, b[s][t].w);
                }
            }
        }
        stream.release();
        if (unit.segment + 1 == unit.segments || unit.left == 1) {
#pragma unroll
            for (int t = 0; t < TILES; ++t)
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const int row = unit.group * ROWS + lane / 4 + i / 2 * 8, token = t * 8 + lane % 4 * 2 + i % 2;
                    atomicAdd(sums + row * TOKENS + token, c[t][i]);
                    c[t][i] = 0;
                }
        }
    }
    __syncthreads();
    const int width = groups * ROWS;
    for (int i = threadIdx.x; i < rows * width; i += THREADS) {
        const int token = i / width, row = i % width;
        acc[static_cast<size_t>(token) * n + first * ROWS + row] = sums[row * TOKENS + token];
    }
#endif
}
