// The preparation of attention heads: norm and rotary position embedding of one head of one token, held by one warp.
//
// Lane t holds the pairs of elements (i, i + head_dim / 2) for i = t, t + 32, ..., as low[] and high[], because rotary
// embedding rotates these pairs.
#pragma once
#include "common/common.cuh"

namespace bminf {

// The parameters of the preparation. q_norm_weight, k_norm_weight, v_norm_weight: fp32 [head_dim], null without a norm.
// frequencies: fp32 [head_dim / 2], null without rotary embedding; rope_scale multiplies cosine and sine.
struct HeadParams {
    const float *q_norm_weight, *k_norm_weight, *v_norm_weight, *frequencies;
    float eps, rope_scale;
};

// With the macro NORM_AFTER_ROPE, query and key heads are normalised behind their rotation.
#ifdef NORM_AFTER_ROPE
constexpr bool ROPE_FIRST = true;
#else
constexpr bool ROPE_FIRST = false;
#endif

constexpr int PAIRS = 8;  // of a lane, for head_dim <= 64 * PAIRS

// rope_scale times cosine and sine of position * frequency.
__device__ __forceinline__ void rope_angle(
    int position, float frequency, float rope_scale, float& cosine, float& sine) {
    float c, s;
    sincosf(__fmul_rn(static_cast<float>(position), frequency), &s, &c);
    sine = __fmul_rn(s, rope_scale);
    cosine = __fmul_rn(c, rope_scale);
}

// The rotation of a pair (a, b): (a cos - b sin, b cos + a sin).
__device__ __forceinline__ void rotate_pair(float& low, float& high, float cosine, float sine) {
    const float a = low, b = high;
    low = __fsub_rn(__fmul_rn(a, cosine), __fmul_rn(b, sine));
    high = __fadd_rn(__fmul_rn(b, cosine), __fmul_rn(a, sine));
}

// rope_angle for this lane's pairs.
template <int PAIRS>
__device__ __forceinline__ void rope_angles(
    const HeadParams& params, int position, int head_dim, float (&cosine)[PAIRS], float (&sine)[PAIRS]) {
    const int lane = threadIdx.x % WARP;
#pragma unroll
    for (int i = 0; i < PAIRS; ++i) {
        const int pair = i * WARP + lane;
        if (params.frequencies == nullptr || pair >= head_dim / 2) continue;
        rope_angle(position, params.frequencies[pair], params.rope_scale, cosine[i], sine[i]);
    }
}

// x / n. By a power of two it is exact, and takes a multiplication.
__device__ __forceinline__ double divided(double x, int n) {
    return n & (n - 1) ? x / n : x * __hiloint2double((1023 - 31 + __clz(n)) << 20, 0);
}

// RMSNorm with `norm_weight`; null: none.
template <int PAIRS>
__device__ __forceinline__ void norm_head(
    float (&low)[PAIRS], float (&high)[PAIRS], const float* norm_weight, float eps, int head_dim) {
    const int lane = threadIdx.x % WARP, half = head_dim / 2;
    if (norm_weight == nullptr) return;
    double sum = 0;
    float low_weight[PAIRS], high_weight[PAIRS];
#pragma unroll
    for (int i = 0; i < PAIRS; ++i) {  // here, as their latency would count behind the sum
        const int pair = min(i * WARP + lane, half - 1);
        low_weight[i] = ld_global(norm_weight + pair), high_weight[i] = ld_global(norm_weight + half + pair);
    }
#pragma unroll
    for (int i = 0; i < PAIRS; ++i) sum += fmaf(low[i], low[i], high[i] * high[i]);
#pragma unroll
    for (int d = WARP / 2; d; d /= 2) sum += __shfl_xor_sync(FULL, sum, d);
    const float inverse = __fdiv_rn(1.0f, __fsqrt_rn(static_cast<float>(divided(sum, head_dim)) + eps));
#pragma unroll
    for (int i = 0; i < PAIRS; ++i) {
        low[i] = __fmul_rn(__fmul_rn(low[i], low_weight[i]), inverse);
        high[i] = __fmul_rn(__fmul_rn(high[i], high_weight[i]), inverse);
    }
}

// The norm of a head, then the rotation of each pair if the head `has_rope`, as those of queries and keys have; with
// ROPE_FIRST in the other order. One call for heads of any kind: a second copy of the norm for values makes the kernel
// a tenth longer.
template <int PAIRS>
__device__ __forceinline__ void norm_and_rope(
    float (&low)[PAIRS], float (&high)[PAIRS], const HeadParams& params, const float* norm_weight, bool has_rope,
    int head_dim, const float (&cosine)[PAIRS], const float (&sine)[PAIRS]) {
    if constexpr (ROPE_FIRST) {
#pragma unroll
        for (int i = 0; i < PAIRS; ++i)  // behind the last pair there is no angle, and the norm reads zeros
            if (params.frequencies && has_rope && i * WARP + threadIdx.x % WARP < head_dim / 2)
                rotate_pair(low[i], high[i], cosine[i], sine[i]);
    }
    norm_head(low, high, norm_weight, params.eps, head_dim);
    if (!ROPE_FIRST && params.frequencies && has_rope) {
#pragma unroll
        for (int i = 0; i < PAIRS; ++i) rotate_pair(low[i], high[i], cosine[i], sine[i]);
    }
}

// The root of 1 / (2 * pairs), rounded, for a power of two.
__device__ __forceinline__ float rotation_root(int pairs) {
    const int log2 = WARP - __clz(pairs);  // of 2 * pairs
    return (log2 & 1 ? 0.70710678118654752f : 1.0f) * __int_as_float((127 - log2 / 2) << 23);
}

// The last step of rotated_heads (backend/rotation.py): sums and differences of pairs, times the root.
__device__ __forceinline__ void rotate_last(float& low, float& high, float root) {
    const float a = low, b = high;
    low = __fmul_rn(__fadd_rn(a, b), root);
    high = __fmul_rn(__fsub_rn(a, b), root);
}

constexpr int MAX_ROTATED_PAIRS = 128;  // of a block

// rotated_heads of a warp's head.
template <int PAIRS>
__device__ __forceinline__ void rotate_head(float (&low)[PAIRS], float (&high)[PAIRS], int head_dim) {
    const int lane = threadIdx.x % WARP, half = head_dim / 2,
              pairs = min(half & -half, min(PAIRS * WARP, MAX_ROTATED_PAIRS));
#pragma unroll
    for (int h = 1; h < WARP; h *= 2) {
        if (h >= pairs) break;
#pragma unroll
        for (int i = 0; i < PAIRS; ++i) {
            const float other_low = __shfl_xor_sync(FULL, low[i], h), other_high = __shfl_xor_sync(FULL, high[i], h);
            low[i] = lane & h ? __fsub_rn(other_low, low[i]) : __fadd_rn(low[i], other_low);
            high[i] = lane & h ? __fsub_rn(other_high, high[i]) : __fadd_rn(high[i], other_high);
        }
    }
#pragma unroll
    for (int h = 1; h < PAIRS; h *= 2) {
        if (h * WARP >= pairs) break;
#pragma unroll
        for (int i = 0; i < PAIRS; ++i) {
            if (i & h) continue;
            const float a = low[i], b = low[i | h], c = high[i], d = high[i | h];
            low[i] = __fadd_rn(a, b), low[i | h] = __fsub_rn(a, b);
            high[i] = __fadd_rn(c, d), high[i | h] = __fsub_rn(c, d);
        }
    }
    const float root = rotation_root(pairs);
#pragma unroll
    for (int i = 0; i < PAIRS; ++i) rotate_last(low[i], high[i], root);
}

}  // namespace bminf
