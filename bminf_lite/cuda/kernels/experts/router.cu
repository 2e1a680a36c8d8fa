// The router of a mixture of experts: logits = norm(x) @ weight.T + bias in fp32, and the choice of experts from them.
//
// A logit has one order of sums, whichever kernel computes it. Elements are taken in vectors of four. Vector v belongs
// to part v % 32; a part is summed by fma from its first element on; the parts are added in a tree, those 16 apart
// first, then 8, 4, 2 and 1 apart. A lane of a warp has a part.
//
// x: fp32 [rows, x_pitch]; weight: fp16 or fp32 [experts, pitch]; bias: fp32 [experts] or null; logits: fp32 [rows,
// experts]. k is a multiple of 4.
#include "common/async.cuh"
#include "common/common.cuh"
#include "common/rotation.cuh"
#include "constants/rows.cuh"
#include "experts/routing.cuh"

using namespace bminf;

constexpr int STEP = 4 * WARP;  // elements that a warp multiplies at once
constexpr int WARPS = ROUTER_THREADS / WARP;
constexpr int TILE = ROUTER_TILE, TILE_THREADS = ROUTER_TILE_THREADS;

// Four elements of a weight as they are in memory. The compiler would move load() behind the wait for the input, but
// not load_now().
template <class W>
struct RawFour;
template <>
struct RawFour<float> {
    float4 raw;
    __device__ __forceinline__ void load(const float* p) { raw = __ldg(reinterpret_cast<const float4*>(p)); }
    __device__ __forceinline__ void load_now(const float* p) {
        asm volatile("ld.global.v4.f32 {%0, %1, %2, %3}, [%4];"
                     : "=f"(raw.x), "=f"(raw.y), "=f"(raw.z), "=f"(raw.w)
                     : "l"(p)
                     : "memory");
    }
    __device__ __forceinline__ float4 values() const { return raw; }
};
template <>
struct RawFour<__half> {
    uint2 raw;
    __device__ __forceinline__ void load(const __half* p) { raw = __ldg(reinterpret_cast<const uint2*>(p)); }
    __device__ __forceinline__ void load_now(const __half* p) {
        asm volatile("ld.global.v2.u32 {%0, %1}, [%2];" : "=r"(raw.x), "=r"(raw.y) : "l"(p) : "memory");
    }
    __device__ __forceinline__ float4 values() const {
        const float2 low = unpack_half2(raw.x), high = unpack_half2(raw.y);
        return make_float4(low.x, low.y, high.x, high.y);
    }
};

__device__ __forceinline__ float dot4(const float4& x, const float4& w, float sum) {
    return fmaf(x.w, w.w, fmaf(x.z, w.z, fmaf(x.y, w.y, fmaf(x.x, w.x, sum))));
}

// A row that is read as it is, in the place of a norm.
struct NoNorm {
    int k, pitch;
    __device__ __forceinline__ NoNorm(const NormParams<WholeVectors<ROUTER_THREADS>>& params, double)
        : k(params.k),
          pitch(params.pitch) {}
};

// What kernels read of a row x. OP: its RMS_NORM or its LAYER_NORM, or with IDENTITY the row itself.
template <int OP, int VECTORS>
struct Read {
    using Norm = LoadedNorm<VECTORS, OP == LAYER_NORM && VECTORS == 1, NormParams<WholeVectors<ROUTER_THREADS>>>;
};
template <int VECTORS>
struct Read<IDENTITY, VECTORS> {
    using Norm = NoNorm;
};

template <int OP, int VECTORS>
using RowNorm = typename Read<OP, VECTORS>::Norm;

// The norm of a row of x in the registers of all threads; with TOP returns its absmax. Norm: see normalise_row.
template <int OP, bool TOP, int VECTORS, class Norm>
__device__ __forceinline__ float norm_of_row(
    const float* x, const Norm& norm, float (&v)[VECTORS][8], RowScratch<ROUTER_THREADS, VECTORS>& scratch) {
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) load_row8(x, (i * ROUTER_THREADS + threadIdx.x) * 8, norm.k, norm.pitch, v[i]);
    if constexpr (OP == IDENTITY)
        return TOP ? row_max<ROUTER_THREADS>(v, scratch, 1) : 0.0f;
    else
        return normalise_row<ROUTER_THREADS, OP == LAYER_NORM, TOP>(v, norm, scratch);
}

// The codes of a row in registers, which are ROTATED first, int8 [padded], and their scale. top: the absmax of a row
// that is not. Called by all threads of a block.
template <bool ROTATED, int VECTORS>
__device__ __forceinline__ void store_codes(
    float (&v)[VECTORS][8], float top, int rotation, float rotation_scale, int padded, int8* codes, float* scale,
    RowScratch<ROUTER_THREADS, VECTORS>& scratch) {
    if constexpr (ROTATED) {
        rotate_row(v, rotation, rotation_scale);
        top = row_max<ROUTER_THREADS>(v, scratch, 1);
    }
    const RowScale s = row_scale(top);
    if (threadIdx.x == 0) *scale = s.scale;
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
        const int column = (i * ROUTER_THREADS + threadIdx.x) * 8;
        if (column < padded) *reinterpret_cast<uint2*>(codes + column) = quantize8(v[i], s.ratio);
    }
}

// out = sigmoid(norm(x) @ weight) of a row, backend/routing.py's sigmoid: x: fp32 [k]; weight: fp32 [k], padded, which
// is loaded before the wait. Called by all threads of a block: a thread sums its elements by fma from the first on, a
// warp its lanes in a tree, those 16 apart first, and the warps are added one after another.
template <int OP, int VECTORS>
__device__ __forceinline__ void write_gate(
    const float* x, const float* norm_weight, const float* norm_bias, float eps, const float* weight, float* out, int k,
    RowScratch<ROUTER_THREADS, VECTORS>& scratch) {
    __shared__ float warps[WARPS];
    const int padded = (k + 15) / 16 * 16;
    const auto column = [](int i) { return (i * ROUTER_THREADS + threadIdx.x) * 8; };
    uint4 raw[VECTORS][2] = {};
#pragma unroll
    for (int i = 0; i < VECTORS; ++i)
#pragma unroll
        for (int j = 0; j < 2; ++j)
            if (column(i) < padded) raw[i][j] = ld_global_cg_v4(weight + column(i) + 4 * j);
    const RowNorm<OP, VECTORS> norm({norm_weight, norm_bias, eps, k, padded}, 1.0 / k);
    wait_on_dependent_grids();
    float v[VECTORS][8], sum = 0;
    norm_of_row<OP, false>(x, norm, v, scratch);
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
        float w[8];
        load8(reinterpret_cast<const float*>(raw[i]), w);
        zero_tail(w, column(i), k);
#pragma unroll
        for (int j = 0; j < 8; ++j) sum = fmaf(v[i][j], w[j], sum);
    }
#pragma unroll
    for (int d = WARP / 2; d; d /= 2) sum += __shfl_xor_sync(FULL, sum, d);
    if (threadIdx.x % WARP == 0) warps[threadIdx.x / WARP] = sum;
    __syncthreads();
    if (threadIdx.x != 0) return;
    sum = warps[0];
#pragma unroll
    for (int i = 1; i < WARPS; ++i) sum = __fadd_rn(sum, warps[i]);
    *out = __fdiv_rn(1.0f, __fadd_rn(1.0f, portable_exp(-sum)));
}

// Logits of a few rows: each warp has one expert and one row, and loads the expert's weight before the kernel waits for
// its input. Blocks normalise their row themselves. Unless `codes` is null, one more block of a row only writes its
// codes, int8 [rows, codes_pitch], and their scales, fp32 [rows]; unless `gate` is null, another one writes the gate of
// `gate_weight`, fp32 [rows]: see write_gate. ROTATED: the codes are those of the norm rotated in blocks of `rotation`
// elements (see rotate_row); the logits are those of the norm. Grid: (experts / WARPS blocks, that of the codes, that
// of the gate; rows).
template <int OP, int VECTORS, class W, bool ROTATED>
__global__ void __launch_bounds__(ROUTER_THREADS) router_few_rows(
    const float* x, long long x_pitch, const float* norm_weight, const float* norm_bias, float eps,
    const W* __restrict__ weight, const float* __restrict__ bias, float* logits, int8* codes, long long codes_pitch,
    float* scales, int rotation, float rotation_scale, const float* gate_weight, float* gate, int experts, int k,
    int pitch) {
    __shared__ RowScratch<ROUTER_THREADS, VECTORS> scratch;
    __shared__ __align__(16) float row[VECTORS * ROUTER_THREADS * 8];
    constexpr int STEPS = VECTORS * ROUTER_THREADS * 8 / STEP, MOST = sizeof(W) == 4 ? 16 : ROTATED ? 24 : 32;
    constexpr int LOADED = STEPS < MOST ? STEPS : MOST;  // steps whose weights are in registers before the wait
    launch_dependent_grids();
    const int lane = threadIdx.x % WARP, expert = blockIdx.x * WARPS + threadIdx.x / WARP, token = blockIdx.y;
    if (gate && blockIdx.x == gridDim.x - 1)
        return write_gate<OP, VECTORS>(
            x + token * x_pitch, norm_weight, norm_bias, eps, gate_weight, gate + token, k, scratch);
    const W* own = weight + static_cast<size_t>(min(expert, experts - 1)) * pitch;
    RawFour<W> loaded[LOADED];
#pragma unroll
    for (int i = 0; i < LOADED; ++i) loaded[i].load_now(own + min(i * STEP + lane * 4, k - 4));
    const int padded = (k + 15) / 16 * 16;
    const RowNorm<OP, VECTORS> norm({norm_weight, norm_bias, eps, k, padded}, 1.0 / k);
    const float own_bias = bias && expert < experts ? ld_global(bias + expert) : -0.0f;  // y + -0 is y
    wait_on_dependent_grids();
    float v[VECTORS][8];
    const float top = norm_of_row<OP, !ROTATED>(x + token * x_pitch, norm, v, scratch);
    if (codes && blockIdx.x == gridDim.x - 1 - (gate != nullptr))
        return store_codes<ROTATED>(
            v, top, rotation, rotation_scale, padded, codes + token * codes_pitch, scales + token, scratch);
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) store8(row + (i * ROUTER_THREADS + threadIdx.x) * 8, v[i]);
    __syncthreads();
    float sum = 0;
#pragma unroll
    for (int i = 0; i < STEPS; ++i) {
        const int column = i * STEP + lane * 4;
        if (column >= k) break;
        RawFour<W> later;
        if (i >= LOADED) later.load(own + column);
        const float4 w = i < LOADED ? loaded[i < LOADED ? i : 0].values() : later.values();
        sum = dot4(*reinterpret_cast<const float4*>(row + column), w, sum);
    }
#pragma unroll
    for (int d = WARP / 2; d; d /= 2) sum += __shfl_xor_sync(FULL, sum, d);
    if (lane == 0 && expert < experts) logits[static_cast<size_t>(token) * experts + expert] = __fadd_rn(sum, own_bias);
}

// The norms of many rows, fp32 [rows, normed_pitch], for router_many_rows; and their codes unless `codes` is null,
// ROTATED as above. A block for each row.
template <int OP, int VECTORS, bool ROTATED>
__global__ void __launch_bounds__(ROUTER_THREADS) router_norm(
    const float* x, long long x_pitch, const float* norm_weight, const float* norm_bias, float eps, float* normed,
    long long normed_pitch, int8* codes, long long codes_pitch, float* scales, int rotation, float rotation_scale,
    int k) {
    __shared__ RowScratch<ROUTER_THREADS, VECTORS> scratch;
    launch_dependent_grids();
    wait_on_dependent_grids();
    float v[VECTORS][8];
    const int token = blockIdx.x, padded = (k + 15) / 16 * 16;
    const NormParams<WholeVectors<ROUTER_THREADS>> norm = {norm_weight, norm_bias, eps, k, padded};
    const float top = norm_of_row<OP, !ROTATED>(x + token * x_pitch, norm, v, scratch);
#pragma unroll
    for (int i = 0; i < VECTORS; ++i)
        store_vector(normed + token * normed_pitch, (i * ROUTER_THREADS + threadIdx.x) * 8, padded, v[i]);
    if (codes)
        store_codes<ROTATED>(
            v, top, rotation, rotation_scale, padded, codes + token * codes_pitch, scales + token, scratch);
}

// The tree over the parts of SUMS sums at once, a multiple of 32. Lanes that exchange sums keep one half of them each,
// so that in the end lane t has the sums from t * SUMS / 32 on.
template <int DISTANCE = WARP / 2, int SUMS>
__device__ __forceinline__ void add_parts(float (&sums)[SUMS]) {
    constexpr int KEPT = SUMS / WARP * DISTANCE;
    const bool upper = threadIdx.x & DISTANCE;
#pragma unroll
    for (int i = 0; i < KEPT; ++i) {
        const float low = sums[i], high = sums[i + KEPT];
        sums[i] = (upper ? high : low) + __shfl_xor_sync(FULL, upper ? low : high, DISTANCE);
    }
    if constexpr (DISTANCE > 1) add_parts<DISTANCE / 2>(sums);
}

// What router_many_rows reads at a time: four columns of its experts' weights and of its rows.
template <int ROWS, int EXPERTS, class W>
struct ManyOperands {
    RawFour<W> w[EXPERTS];
    float4 x[ROWS];

    __device__ __forceinline__ void add_to(float (&sums)[ROWS * EXPERTS]) const {
#pragma unroll
        for (int e = 0; e < EXPERTS; ++e) {
            const float4 values = w[e].values();
#pragma unroll
            for (int r = 0; r < ROWS; ++r) sums[r * EXPERTS + e] = dot4(x[r], values, sums[r * EXPERTS + e]);
        }
    }
};

// Logits of more rows. A warp has ROWS rows and EXPERTS experts, its lanes the parts of their sums. DEPTH: where blocks
// are few, their warps load the operands of as many steps at once. BLOCK_WARPS: of a block. x: the norms, fp32 [rows,
// x_pitch]. Grid: (experts / (EXPERTS * BLOCK_WARPS), rows / ROWS).
template <int ROWS, int EXPERTS, int DEPTH, int BLOCK_WARPS, class W>
__global__ void __launch_bounds__(BLOCK_WARPS* WARP, DEPTH > 1 ? 1 : 2) router_many_rows(
    const float* x, long long x_pitch, const W* __restrict__ weight, const float* __restrict__ bias, float* logits,
    int rows, int experts, int k, int pitch) {
    static_assert(ROWS * EXPERTS % WARP == 0 && ROWS * EXPERTS <= 2 * WARP && (ROWS & (ROWS - 1)) == 0);
    constexpr int SUMS = ROWS * EXPERTS;
    launch_dependent_grids();
    const int lane = threadIdx.x % WARP, first_row = blockIdx.y * ROWS;
    const int first_expert = (blockIdx.x * BLOCK_WARPS + threadIdx.x / WARP) * EXPERTS;
    const W* weights[EXPERTS];
#pragma unroll
    for (int e = 0; e < EXPERTS; ++e)
        weights[e] = weight + static_cast<size_t>(min(first_expert + e, experts - 1)) * pitch;
    float sums[SUMS] = {};
    if constexpr (DEPTH > 1) {
        const float* row[ROWS];
#pragma unroll
        for (int r = 0; r < ROWS; ++r) row[r] = x + min(first_row + r, rows - 1) * x_pitch;
        ManyOperands<ROWS, EXPERTS, W> operands[DEPTH];
#pragma unroll
        for (int d = 0; d < DEPTH; ++d)
#pragma unroll
            for (int e = 0; e < EXPERTS; ++e) operands[d].w[e].load_now(weights[e] + min(d * STEP + lane * 4, k - 4));
        wait_on_dependent_grids();
#pragma unroll
        for (int d = 0; d < DEPTH; ++d)
#pragma unroll
            for (int r = 0; r < ROWS; ++r)
                operands[d].x[r] = *reinterpret_cast<const float4*>(row[r] + min(d * STEP + lane * 4, k - 4));
#pragma unroll 1
        for (int base = lane * 4; base < k; base += DEPTH * STEP) {
#pragma unroll
            for (int d = 0; d < DEPTH; ++d) {
                const int column = base + d * STEP, next = column + DEPTH * STEP;
                if (column < k) operands[d].add_to(sums);
                if (next >= k) continue;
#pragma unroll
                for (int e = 0; e < EXPERTS; ++e) operands[d].w[e].load(weights[e] + next);
#pragma unroll
                for (int r = 0; r < ROWS; ++r) operands[d].x[r] = *reinterpret_cast<const float4*>(row[r] + next);
            }
        }
    } else {
        wait_on_dependent_grids();
#pragma unroll 1
        for (int column = lane * 4; column < k; column += STEP) {
            float4 w[EXPERTS];
#pragma unroll
            for (int e = 0; e < EXPERTS; ++e) {
                RawFour<W> raw;
                raw.load(weights[e] + column);
                w[e] = raw.values();
            }
#pragma unroll
            for (int r = 0; r < ROWS; ++r) {
                const float4 values =
                    *reinterpret_cast<const float4*>(x + min(first_row + r, rows - 1) * x_pitch + column);
#pragma unroll
                for (int e = 0; e < EXPERTS; ++e) sums[r * EXPERTS + e] = dot4(values, w[e], sums[r * EXPERTS + e]);
            }
        }
    }
    add_parts(sums);
#pragma unroll
    for (int i = 0; i < SUMS / WARP; ++i) {
        const int index = lane * (SUMS / WARP) + i, row = first_row + index / EXPERTS;
        const int expert = first_expert + index % EXPERTS;
        if (row < rows && expert < experts)
            logits[static_cast<size_t>(row) * experts + expert] = bias ? __fadd_rn(sums[i], bias[expert]) : sums[i];
    }
}

// ---- many rows ---------------------------------------------------------------------------------------------------

// A stage of router_tiles: STEP columns of TILE rows of x, and then of TILE rows of the weight.
template <class W>
struct TileStage {
    static constexpr int ROW_BYTES = STEP * sizeof(float), WEIGHT_BYTES = STEP * sizeof(W);  // of a row
    static constexpr int BYTES = TILE * (ROW_BYTES + WEIGHT_BYTES);

    // The place of 16 bytes in a row, such that those of two neighbouring rows are in different banks.
    __device__ __forceinline__ static int place(int row, int chunk) { return (chunk ^ row % 2 * 4) * 16; }

    // Four elements of the weight.
    __device__ __forceinline__ static float4 weight(unsigned address) {
        if constexpr (sizeof(W) == 4) {
            const int4 raw = ld_shared_v4(address);
            return make_float4(
                __int_as_float(raw.x), __int_as_float(raw.y), __int_as_float(raw.z), __int_as_float(raw.w));
        } else {
            unsigned raw[2];
            ld_shared_v2(raw, address);
            const float2 low = unpack_half2(raw[0]), high = unpack_half2(raw[1]);
            return make_float4(low.x, low.y, high.x, high.y);
        }
    }
};

// The copies of an operand of router_tiles: a thread has 16 bytes of one row, or of two.
template <class T>
struct TileCopies {
    static constexpr int CHUNKS = STEP * sizeof(T) / 16, EACH = 16 / sizeof(T);
    static constexpr int ROWS = TILE_THREADS / CHUNKS, COUNT = TILE / ROWS;
    const T* source;
    unsigned offsets[COUNT], target;
    int left;  // elements of a row, from this thread's on

    // Of TILE rows from `first` on, of `end` rows of k elements.
    __device__ __forceinline__ TileCopies(const T* source, int pitch, int first, int end, int k) : source(source) {
        const int row = threadIdx.x / CHUNKS, chunk = threadIdx.x % CHUNKS;
#pragma unroll
        for (int i = 0; i < COUNT; ++i)
            offsets[i] = min(first + row + i * ROWS, end - 1) * pitch + min(chunk * EACH, pitch - EACH);
        target = row * (CHUNKS * 16) + TileStage<T>::place(row, chunk);
        left = k - chunk * EACH;
    }
    __device__ __forceinline__ void start(unsigned stage, int step) const {
        const int bytes = max(0, min(EACH, left - step * STEP)) * static_cast<int>(sizeof(T));
        const T* from = source + (bytes ? step * STEP : 0);
#pragma unroll
        for (int i = 0; i < COUNT; ++i)
            cp_async_16_partial(stage + target + i * ROWS * CHUNKS * 16, from + offsets[i], bytes);
    }
};

// One level of the tree, over two warps: each keeps one half of the sums, the upper warp the upper half, and adds the
// other's. buffer: SUMS / 2 floats for each thread.
template <int SUMS>
__device__ __forceinline__ void add_warp(
    const float (&sums)[SUMS], bool upper, int distance, float* buffer, float (&kept)[SUMS / 2]) {
    constexpr int KEPT = SUMS / 2;
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    __syncthreads();  // the buffer is free
#pragma unroll
    for (int i = 0; i < KEPT; ++i) buffer[(warp * KEPT + i) * WARP + lane] = upper ? sums[i] : sums[i + KEPT];
    __syncthreads();
#pragma unroll
    for (int i = 0; i < KEPT; ++i)
        kept[i] = (upper ? sums[i + KEPT] : sums[i]) + buffer[((warp ^ distance) * KEPT + i) * WARP + lane];
}

// One level of the tree, over two lanes.
template <int SUMS>
__device__ __forceinline__ void add_lane(const float (&sums)[SUMS], int distance, float (&kept)[SUMS / 2]) {
    const bool upper = threadIdx.x & distance;
#pragma unroll
    for (int i = 0; i < SUMS / 2; ++i) {
        const float low = sums[i], high = sums[i + SUMS / 2];
        kept[i] = (upper ? high : low) + __shfl_xor_sync(FULL, upper ? low : high, distance);
    }
}

// Logits of many rows: a block has a tile of TILE rows and TILE experts, whose operands it copies to shared memory.
// Four warps share a quarter of the tile, and each of them has eight of the parts; four lanes share a part, and each of
// them has every other row and every other expert of the quarter. x: the norms, fp32 [rows, x_pitch]. Grid: (experts /
// TILE, rows / TILE). Dynamic shared memory: STAGES stages, and at least TILE_THREADS * 32 floats.
template <class W, int STAGES>
__global__ void __launch_bounds__(TILE_THREADS, 1) router_tiles(
    const float* x, long long x_pitch, const W* __restrict__ weight, const float* __restrict__ bias, float* logits,
    int rows, int experts, int k, int pitch) {
    using Stage = TileStage<W>;
    static_assert(TILE == 32 && TILE_THREADS == 16 * WARP);
    extern __shared__ __align__(128) char memory[];
    const unsigned stages = cast_smem_ptr_to_uint(memory);
    launch_dependent_grids();
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, steps = (k + STEP - 1) / STEP;
    const int first_row = blockIdx.y * TILE, first_expert = blockIdx.x * TILE;
    const TileCopies<W> weight_copies(weight, pitch, first_expert, experts, k);
    const TileCopies<float> x_copies(x, static_cast<int>(x_pitch), first_row, rows, k);
    const auto load_weight = [&](int step) {
        weight_copies.start(stages + step % STAGES * Stage::BYTES + TILE * Stage::ROW_BYTES, step);
    };
    const auto load_rows = [&](int step) { x_copies.start(stages + step % STAGES * Stage::BYTES, step); };
#pragma unroll
    for (int step = 0; step < STAGES - 1; ++step) load_weight(step);
    wait_on_dependent_grids();
#pragma unroll
    for (int step = 0; step < STAGES - 1; ++step) {
        load_rows(step);
        cp_async_commit_group();
    }
    const int own_row = warp / 4 % 2 * 16 + lane % 2, own_expert = warp / 8 * 16 + lane / 2 % 2;
    const int part = warp % 4 * 8 + lane / 4;
    const unsigned own_x = own_row * Stage::ROW_BYTES + Stage::place(lane, part);
    const unsigned own_w =
        TILE * Stage::ROW_BYTES + own_expert * Stage::WEIGHT_BYTES +
        (sizeof(W) == 4 ? Stage::place(lane / 2, part) : Stage::place(lane / 2, part / 2) + part % 2 * 8);
    float sums[64] = {};  // of eight rows by eight experts
    cp_async_wait_group<STAGES - 2>();
    __syncthreads();
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
        const unsigned stage = stages + step % STAGES * Stage::BYTES;
        // In the middle of a step, so that not all warps wait for the first operands of a step at once.
        const auto advance = [&] {
            cp_async_wait_group<STAGES - 3>();  // the next step's
            __syncthreads();                    // also: the stage of the step before has been read
            const int next = step + STAGES - 1;
            if (next < steps) load_weight(next), load_rows(next);
            cp_async_commit_group();
        };
        float4 w[8];
#pragma unroll
        for (int e = 0; e < 8; ++e) w[e] = Stage::weight(stage + own_w + e * 2 * Stage::WEIGHT_BYTES);
#pragma unroll
        for (int r = 0; r < 8; ++r) {
            if (r == 4) advance();
            const float4 values = TileStage<float>::weight(stage + own_x + r * 2 * Stage::ROW_BYTES);
#pragma unroll
            for (int e = 0; e < 8; ++e) sums[r * 8 + e] = dot4(values, w[e], sums[r * 8 + e]);
        }
    }
    cp_async_wait_all();
    float* buffer = reinterpret_cast<float*>(memory);
    float of_16[32], of_8[16], of_4[8], of_2[4], of_1[2];  // parts that far apart have been added
    add_warp(sums, warp & 2, 2, buffer, of_16);
    add_warp(of_16, warp & 1, 1, buffer, of_8);
    add_lane(of_8, 16, of_4);
    add_lane(of_4, 8, of_2);
    add_lane(of_2, 4, of_1);
    const int index = warp % 4 * 16 + lane / 4 * 2;  // see add_lane: the highest bit first
    const int row = first_row + own_row + index / 8 * 2;
    if (row >= rows) return;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const int expert = first_expert + own_expert + (index % 8 + i) * 2;
        if (expert < experts)
            logits[static_cast<size_t>(row) * experts + expert] = bias ? __fadd_rn(of_1[i], bias[expert]) : of_1[i];
    }
}

// The experts of each row, by rank, and their weights: int and fp32 [rows, top_k]. A warp for each row; EACH: experts
// of a lane.
template <int EACH>
__global__ void __launch_bounds__(CHOOSE_THREADS)
    choose_experts(const Router router, const float* logits, int* topk_ids, float* topk_weights, int rows) {
    __shared__ RoutingScratch scratch[CHOOSE_THREADS / WARP];
    launch_dependent_grids();
    wait_on_dependent_grids();
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, row = blockIdx.x * (CHOOSE_THREADS / WARP) + warp;
    if (row >= rows) return;
    const float* own = logits + static_cast<size_t>(row) * router.num_experts;
    WarpRouter<EACH> chooser(router, scratch[warp]);
    const int id = chooser.choose(own);
    const float weight = chooser.weight(own, id);
    if (lane >= router.top_k) return;
    topk_ids[row * router.top_k + lane] = id;
    topk_weights[row * router.top_k + lane] = weight;
}

// out[t] = sigmoid(norm(x[t]) @ weight), see write_gate. x: fp32 [rows, x_pitch]. A block for each row.
template <int OP, int VECTORS>
__global__ void __launch_bounds__(ROUTER_THREADS) scalar_gate(
    const float* x, long long x_pitch, const float* norm_weight, const float* norm_bias, float eps,
    const float* __restrict__ weight, float* out, int k) {
    __shared__ RowScratch<ROUTER_THREADS, VECTORS> scratch;
    launch_dependent_grids();
    write_gate<OP, VECTORS>(
        x + blockIdx.x * x_pitch, norm_weight, norm_bias, eps, weight, out + blockIdx.x, k, scratch);
}
