// The router of a mixture of experts: logits = norm(x) @ weight.T + bias in fp32, and the choice of experts from them.
//
// A logit has one order of sums, whichever kernel computes it. Elements are taken in vectors of four. Vector v belongs
// to part v % 32; a part is summed by fma from its first element on; the parts are added in a tree, those 16 apart
// first, then 8, 4, 2 and 1 apart. A lane of a warp has a part.
//
// x: fp32 [rows, x_pitch]; weight: fp16 or fp32 [experts, pitch]; bias: fp32 [experts] or null; logits: fp32 [rows,
// experts]. k is a multiple of 4.
#include "common/common.cuh"
#include "common/rotation.cuh"
#include "experts/routing.cuh"

using namespace bminf;

constexpr int STEP = 4 * WARP;  // elements that a warp multiplies at once
constexpr int WARPS = ROUTER_THREADS / WARP;

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

template <bool CENTER, int VECTORS>
using RowNorm = LoadedNorm<VECTORS, CENTER && VECTORS == 1, NormParams<WholeVectors<ROUTER_THREADS>>>;

// The norm of a row of x in the registers of all threads; with TOP returns its absmax. Norm: see normalise_row.
template <bool CENTER, bool TOP, int VECTORS, class Norm>
__device__ __forceinline__ float norm_of_row(
    const float* x, const Norm& norm, float (&v)[VECTORS][8], RowScratch<ROUTER_THREADS, VECTORS>& scratch) {
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) load_row8(x, (i * ROUTER_THREADS + threadIdx.x) * 8, norm.k, norm.pitch, v[i]);
    return normalise_row<ROUTER_THREADS, CENTER, TOP>(v, norm, scratch);
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

// Logits of a few rows: each warp has one expert and one row, and loads the expert's weight before the kernel waits for
// its input. Blocks normalise their row themselves. Unless `codes` is null, one more block of a row, the last one, only
// writes its codes, int8 [rows, codes_pitch], and their scales, fp32 [rows]. ROTATED: the codes are those of the norm
// rotated in blocks of `rotation` elements (see rotate_row); the logits are those of the norm. Grid: (experts / WARPS
// blocks, and that one; rows).
template <bool CENTER, int VECTORS, class W, bool ROTATED>
__global__ void __launch_bounds__(ROUTER_THREADS) router_few_rows(
    const float* x, long long x_pitch, const float* norm_weight, const float* norm_bias, float eps,
    const W* __restrict__ weight, const float* __restrict__ bias, float* logits, int8* codes, long long codes_pitch,
    float* scales, int rotation, float rotation_scale, int experts, int k, int pitch) {
    __shared__ RowScratch<ROUTER_THREADS, VECTORS> scratch;
    __shared__ __align__(16) float row[VECTORS * ROUTER_THREADS * 8];
    constexpr int STEPS = VECTORS * ROUTER_THREADS * 8 / STEP, MOST = sizeof(W) == 4 ? 16 : ROTATED ? 24 : 32;
    constexpr int LOADED = STEPS < MOST ? STEPS : MOST;  // steps whose weights are in registers before the wait
    launch_dependent_grids();
    const int lane = threadIdx.x % WARP, expert = blockIdx.x * WARPS + threadIdx.x / WARP, token = blockIdx.y;
    const W* own = weight + static_cast<size_t>(min(expert, experts - 1)) * pitch;
    RawFour<W> loaded[LOADED];
#pragma unroll
    for (int i = 0; i < LOADED; ++i) loaded[i].load_now(own + min(i * STEP + lane * 4, k - 4));
    const int padded = (k + 15) / 16 * 16;
    const RowNorm<CENTER, VECTORS> norm({norm_weight, norm_bias, eps, k, padded}, 1.0 / k);
    const float own_bias = bias && expert < experts ? ld_global(bias + expert) : -0.0f;  // y + -0 is y
    wait_on_dependent_grids();
    float v[VECTORS][8];
    const float top = norm_of_row<CENTER, !ROTATED>(x + token * x_pitch, norm, v, scratch);
    if (codes && blockIdx.x == gridDim.x - 1)
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
template <bool CENTER, int VECTORS, bool ROTATED>
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
    const float top = norm_of_row<CENTER, !ROTATED>(x + token * x_pitch, norm, v, scratch);
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

// Logits of many rows. A warp has ROWS rows and EXPERTS experts, its lanes the parts of their sums. x: the norms, fp32
// [rows, x_pitch]. Grid: (experts / (EXPERTS * WARPS), rows / ROWS).
template <int ROWS, int EXPERTS, class W>
__global__ void __launch_bounds__(ROUTER_THREADS, 2) router_many_rows(
    const float* x, long long x_pitch, const W* __restrict__ weight, const float* __restrict__ bias, float* logits,
    int rows, int experts, int k, int pitch) {
    static_assert(ROWS * EXPERTS % WARP == 0 && ROWS * EXPERTS <= 2 * WARP && (ROWS & (ROWS - 1)) == 0);
    constexpr int SUMS = ROWS * EXPERTS;
    launch_dependent_grids();
    const int lane = threadIdx.x % WARP, first_row = blockIdx.y * ROWS;
    const int first_expert = (blockIdx.x * WARPS + threadIdx.x / WARP) * EXPERTS;
    const W* weights[EXPERTS];
#pragma unroll
    for (int e = 0; e < EXPERTS; ++e)
        weights[e] = weight + static_cast<size_t>(min(first_expert + e, experts - 1)) * pitch;
    wait_on_dependent_grids();
    float sums[SUMS] = {};
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
            const float4 values = *reinterpret_cast<const float4*>(x + min(first_row + r, rows - 1) * x_pitch + column);
#pragma unroll
            for (int e = 0; e < EXPERTS; ++e) sums[r * EXPERTS + e] = dot4(values, w[e], sums[r * EXPERTS + e]);
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

// out[t] = sigmoid(norm(x[t]) @ weight), backend/routing.py's sigmoid: x: fp32 [rows, x_pitch]; weight: fp32 [k],
// padded. A block for each row: a thread sums its elements by fma from the first on, a warp its lanes in a tree, those
// 16 apart first, and the warps are added one after another.
template <bool CENTER, int VECTORS>
__global__ void __launch_bounds__(ROUTER_THREADS) scalar_gate(
    const float* x, long long x_pitch, const float* norm_weight, const float* norm_bias, float eps,
    const float* __restrict__ weight, float* out, int k) {
    __shared__ RowScratch<ROUTER_THREADS, VECTORS> scratch;
    __shared__ float warps[WARPS];
    launch_dependent_grids();
    const int padded = (k + 15) / 16 * 16;
    float w[VECTORS][8], v[VECTORS][8];
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) load_row8(weight, (i * ROUTER_THREADS + threadIdx.x) * 8, k, padded, w[i]);
    const RowNorm<CENTER, VECTORS> norm({norm_weight, norm_bias, eps, k, padded}, 1.0 / k);
    wait_on_dependent_grids();
    norm_of_row<CENTER, false>(x + blockIdx.x * x_pitch, norm, v, scratch);
    float sum = 0;
#pragma unroll
    for (int i = 0; i < VECTORS; ++i)
#pragma unroll
        for (int j = 0; j < 8; ++j) sum = fmaf(v[i][j], w[i][j], sum);
#pragma unroll
    for (int d = WARP / 2; d; d /= 2) sum += __shfl_xor_sync(FULL, sum, d);
    if (threadIdx.x % WARP == 0) warps[threadIdx.x / WARP] = sum;
    __syncthreads();
    if (threadIdx.x != 0) return;
    sum = warps[0];
#pragma unroll
    for (int i = 1; i < WARPS; ++i) sum = __fadd_rn(sum, warps[i]);
    out[blockIdx.x] = __fdiv_rn(1.0f, __fadd_rn(1.0f, portable_exp(-sum)));
}
