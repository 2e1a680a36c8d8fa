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

}  // namespace bminf
