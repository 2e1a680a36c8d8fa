// The block Hadamard transform of a row in registers (bminf_lite/backend/rotation.py defines it).
#pragma once
#include "common/common.cuh"

namespace bminf {

// Transforms each `block` neighbouring elements of a row, and multiplies them by `scale`, fp32(block^-0.5). A pair of
// elements h apart becomes their sum and their difference, for h = 1, 2, 4, ... in this order. A thread holds RUN
// neighbouring elements: those of all its vectors if these are NEIGHBOURS, else eight. Pairs within a run are in
// registers, others in lanes of a warp, so `block` is at most WARP * RUN. All lanes of a warp must call this.
template <bool NEIGHBOURS, int VECTORS>
__device__ __forceinline__ void rotate_row(float (&v)[VECTORS][8], int block, float scale) {
    constexpr int COUNT = 8 * VECTORS, RUN = NEIGHBOURS ? COUNT : 8;
#pragma unroll
    for (int h = 1; h < RUN; h *= 2)
        if (h < block)
#pragma unroll
            for (int i = 0; i < COUNT; ++i)
                if (!(i & h)) {
                    float &x = v[i / 8][i % 8], &y = v[(i + h) / 8][(i + h) % 8];
                    const float sum = __fadd_rn(x, y);
                    y = __fsub_rn(x, y), x = sum;
                }
    for (int d = 1; d * RUN < block; d *= 2) {
        const float sign = threadIdx.x & d ? -1.0f : 1.0f;  // of this lane's own element
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            float& x = v[i / 8][i % 8];
            x = __fmaf_rn(sign, x, __shfl_xor_sync(FULL, x, d));  // a sum or a difference, rounded once
        }
    }
#pragma unroll
    for (int i = 0; i < COUNT; ++i) v[i / 8][i % 8] = __fmul_rn(v[i / 8][i % 8], scale);
}

// The same of a row whose elements a thread has as Layout says, WholeVectors or HalfVectors. Of halves a lane has two
// runs of four elements, 128 apart, of the 256 that its warp has in each vector. A transform of halves takes one
// exchange of lanes more than one of whole vectors of the same block, but for blocks of 256, where both take five.
template <class Layout, int VECTORS>
__device__ __forceinline__ void rotate_in_layout(float (&v)[VECTORS][8], int block, float scale) {
    if constexpr (!Layout::HALVES) {
        rotate_row<false>(v, block, scale);
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
