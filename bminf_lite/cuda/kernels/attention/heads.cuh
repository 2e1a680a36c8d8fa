// One attention head of one token, spread over a warp: its norm, its rotation, and where it comes from.
#pragma once
#include "common/common.cuh"
#include "common/layout.cuh"

namespace bminf {

// The fused query, key, value projection of a step: fp16 values, or int32 sums with the scales that make them.
struct Projection {
    const void* data;
    const float *x_scale, *w_scale, *bias;
    long long pitch;

    template <bool FROM_INT32, Order ORDER>
    __device__ __forceinline__ float at(int row, int column) const {
        if constexpr (!FROM_INT32) return __half2float(static_cast<const __half*>(data)[row * pitch + column]);
        const int sum = static_cast<const int*>(data)[offset<ORDER>(row, column, pitch)];
        const float y = scaled(__int2float_rn(sum), x_scale[row], w_scale[column]);
        return rounded(bias ? __fadd_rn(y, bias[column]) : y);
    }
};

// How queries and keys are made ready. A null pointer switches a part off.
struct HeadParams {
    const float *q_norm_weight, *k_norm_weight, *frequencies;
    float eps, rope_scale;
};

constexpr int PAIRS =
    4;  // a lane holds elements i and i + head_dim / 2 for i = lane, lane + 32, ...: head_dim <= 64 * PAIRS

// cos and sin of the angles at a position, for this lane's pairs.
template <int PAIRS>
__device__ __forceinline__ void rope_angles(
    const HeadParams& how, int position, int head_dim, float (&cosine)[PAIRS], float (&sine)[PAIRS]) {
    const int lane = threadIdx.x % WARP;
#pragma unroll
    for (int i = 0; i < PAIRS; ++i) {
        const int pair = i * WARP + lane;
        if (how.frequencies == nullptr || pair >= head_dim / 2) continue;
        sincosf(__fmul_rn(static_cast<float>(position), how.frequencies[pair]), &sine[i], &cosine[i]);
        sine[i] = __fmul_rn(sine[i], how.rope_scale);
        cosine[i] = __fmul_rn(cosine[i], how.rope_scale);
    }
}

// RMSNorm of the head with `norm_weight` (null: none), then the rotation.
template <int PAIRS>
__device__ __forceinline__ void norm_and_rope(
    float (&low)[PAIRS], float (&high)[PAIRS], const HeadParams& how, const float* norm_weight, int head_dim,
    const float (&cosine)[PAIRS], const float (&sine)[PAIRS]) {
    const int lane = threadIdx.x % WARP, half = head_dim / 2;
    if (norm_weight) {
        double sum = 0;
#pragma unroll
        for (int i = 0; i < PAIRS; ++i) sum += fmaf(low[i], low[i], high[i] * high[i]);
#pragma unroll
        for (int d = WARP / 2; d; d /= 2) sum += __shfl_xor_sync(FULL, sum, d);
        const float inverse = __fdiv_rn(1.0f, __fsqrt_rn(static_cast<float>(sum / head_dim) + how.eps));
#pragma unroll
        for (int i = 0; i < PAIRS; ++i) {
            const int pair = i * WARP + lane;
            if (pair >= half) continue;
            low[i] = __fmul_rn(__fmul_rn(low[i], norm_weight[pair]), inverse);
            high[i] = __fmul_rn(__fmul_rn(high[i], norm_weight[half + pair]), inverse);
        }
    }
    if (how.frequencies) {
#pragma unroll
        for (int i = 0; i < PAIRS; ++i) {
            const float a = low[i], b = high[i];
            low[i] = __fsub_rn(__fmul_rn(a, cosine[i]), __fmul_rn(b, sine[i]));
            high[i] = __fadd_rn(__fmul_rn(b, cosine[i]), __fmul_rn(a, sine[i]));
        }
    }
}

}  // namespace bminf
