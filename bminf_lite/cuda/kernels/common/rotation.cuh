// The block Hadamard transform of a row in registers (bminf_lite/backend/rotation.py defines it).
#pragma once
#include "common/common.cuh"

namespace bminf {

// The sums and differences of a transform of each `block` neighbouring elements of a row. A pair of elements h apart
// becomes their sum and their difference, for h = 1, 2, 4, ... in this order. A thread holds runs of RUN neighbouring
// elements, and the run behind its own is STEP lanes further. Pairs within a run are in registers, others in lanes of a
// warp, so `block` is at most WARP / STEP * RUN. All lanes of a warp must call this.
template <int RUN, int STEP, int VECTORS>
__device__ __forceinline__ void rotate_sums(float (&v)[VECTORS][8], int block) {
    constexpr int COUNT = 8 * VECTORS;
    const auto add_pairs = [&](int h) {
#pragma unroll
        for (int i = 0; i < COUNT; ++i)
            if (!(i & h)) {
                float &x = v[i / 8][i % 8], &y = v[(i + h) / 8][(i + h) % 8];
                const float sum = __fadd_rn(x, y);
                y = __fsub_rn(x, y), x = sum;
            }
    };
    if (block >= RUN) {  // without a condition for each step, behind which half of the registers would be copied
#pragma unroll
        for (int h = 1; h < RUN; h *= 2) add_pairs(h);
    } else {
#pragma unroll
        for (int h = 1; h < RUN; h *= 2)
            if (h < block) add_pairs(h);
    }
    for (int d = 1; d * RUN < block; d *= 2) {
        const float sign = threadIdx.x & (d * STEP) ? -1.0f : 1.0f;  // of this lane's own element
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            float& x = v[i / 8][i % 8];
            x = __fmaf_rn(sign, x, __shfl_xor_sync(FULL, x, d * STEP));  // a sum or a difference, rounded once
        }
    }
}

template <int VECTORS>
__device__ __forceinline__ void multiply(float (&v)[VECTORS][8], float scale) {
#pragma unroll
    for (int i = 0; i < VECTORS; ++i)
#pragma unroll
        for (int j = 0; j < 8; ++j) v[i][j] = __fmul_rn(v[i][j], scale);
}

// The transform of a row of which a thread has vectors of eight elements, and the next lane the vectors behind them:
// the sums and differences, times `scale`, fp32(block^-0.5).
template <int VECTORS>
__device__ __forceinline__ void rotate_row(float (&v)[VECTORS][8], int block, float scale) {
    rotate_sums<8, 1>(v, block);
    multiply(v, scale);
}

// ---- rows of 16-bit elements -------------------------------------------------------------------------------------
//
// Neighbouring lanes load neighbouring vectors, so that a warp reads whole cache lines. Then they exchange vectors,
// still in 16 bits, until each has a run of VECTORS neighbours: most pairs of a transform lie in such a run.

// The column of a thread's vector i when it is loaded.
template <int VECTORS>
__device__ __forceinline__ int loaded_column(int thread, int i) {
    return (thread / WARP * WARP * VECTORS + i * WARP + thread % WARP) * 8;
}

// The first column of its run. The run behind it is that of lane + VECTORS.
template <int VECTORS>
__device__ __forceinline__ int run_column(int thread) {
    const int lane = thread % WARP;
    return (thread / WARP * WARP * VECTORS + lane % VECTORS * WARP + lane / VECTORS * VECTORS) * 8;
}

// Lanes that differ in one bit exchange half of their vectors, for each bit of a vector's number.
template <int VECTORS>
__device__ __forceinline__ void gather_runs(uint4 (&raw)[VECTORS]) {
    const auto exchange = [](unsigned& low, unsigned& high, bool upper, int lanes) {
        const unsigned other = __shfl_xor_sync(FULL, upper ? low : high, lanes);
        low = upper ? other : low, high = upper ? high : other;
    };
#pragma unroll
    for (int s = 1; s < VECTORS; s *= 2) {
        const bool upper = threadIdx.x & s;
#pragma unroll
        for (int i = 0; i < VECTORS; ++i) {
            if (i & s) continue;
            exchange(raw[i].x, raw[i + s].x, upper, s), exchange(raw[i].y, raw[i + s].y, upper, s);
            exchange(raw[i].z, raw[i + s].z, upper, s), exchange(raw[i].w, raw[i + s].w, upper, s);
        }
    }
}

// The last step of a transform of fp16 elements. Returns a power of two by which the elements are still to be
// multiplied: `scale` is one if `block` is a power of four, and to multiply the row's maximum and ratio takes less time
// than to multiply all elements. Both give the same codes, as no product of sums of fp16 elements and `scale` is
// subnormal.
template <int VECTORS>
__device__ __forceinline__ float scale_or_factor(float (&v)[VECTORS][8], int block, float scale) {
    constexpr int POWERS_OF_FOUR = 0x155;
    if (VECTORS < 8 && block & POWERS_OF_FOUR) return scale;
    multiply(v, scale);
    return 1.0f;
}

// The same of a row whose elements a thread has as Layout says, WholeVectors or HalfVectors. Of halves a lane has two
// runs of four elements, 128 apart, of the 256 that its warp has in each vector. A transform of halves takes one
// exchange of lanes more than one of whole vectors of the same block, but for blocks of 256, where both take five.
template <class Layout, int VECTORS>
__device__ __forceinline__ void rotate_in_layout(float (&v)[VECTORS][8], int block, float scale) {
    if constexpr (!Layout::HALVES) {
        rotate_row(v, block, scale);
    } else {
        const auto pairs_in_lane = [&](int h) {
#pragma unroll
            for (int i = 0; i < VECTORS; ++i)
#pragma unroll
                for (int j = 0; j < 8; ++j)
                    if (!(j & h)) {
                        const float sum = __fadd_rn(v[i][j], v[i][j + h]);
                        v[i][j + h] = __fsub_rn(v[i][j], v[i][j + h]), v[i][j] = sum;
                    }
        };
        if (1 < block) pairs_in_lane(1);
        if (2 < block) pairs_in_lane(2);
        for (int d = 1; d < WARP && 4 * d < block; d *= 2) {
            const float sign = threadIdx.x & d ? -1.0f : 1.0f;
#pragma unroll
            for (int i = 0; i < VECTORS; ++i)
#pragma unroll
                for (int j = 0; j < 8; ++j) v[i][j] = __fmaf_rn(sign, v[i][j], __shfl_xor_sync(FULL, v[i][j], d));
        }
        if (4 * WARP < block) pairs_in_lane(4);
#pragma unroll
        for (int i = 0; i < VECTORS; ++i)
#pragma unroll
            for (int j = 0; j < 8; ++j) v[i][j] = __fmul_rn(v[i][j], scale);
    }
}

}  // namespace bminf
