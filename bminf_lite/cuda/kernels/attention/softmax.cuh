// The order of sums of attention. Every attention kernel follows it, so a query's output has the same bits whichever
// kernel computes it, and whatever else is in the batch.
//
// The keys of a query lie in tiles of TILE keys and segments of SEGMENT keys, both at absolute positions. c is the
// scale of the scores times log2(e), rounded to fp32 once.
//
// 1. A dot product d = q . k is one chain of k16 tensor-core steps over the head's elements in natural order, from
//    zero. A score is s = fl(c * d), with a bias s = fma(d, c, fl(bias * log2(e))), else as in scores.cuh. A masked
//    score is -inf.
// 2. A segment starts with m = -inf, l[r] = 0 for r = 0..7, o = 0. For each tile in order:
//        m' = max(m, scores of the tile), f = factor(m, m'), w = weight(s, m')
//        l[r] = fl(l[r] * f) + t[r], where t[r] is the fp32 sum of w over the keys j with j % 8 == r, in order of j
//        o    = fl(o * f), then one chain of k16 tensor-core steps over the keys: o += fp16(w) * value
//    Rescaling by f = 1 changes no bit, and neither does a tile whose keys are all masked.
// 3. The segment's record is (m, l, o) with l = ((l[0] + l[1]) + (l[2] + l[3])) + ((l[4] + l[5]) + (l[6] + l[7])).
// 4. Records are merged from the left in order of position (merge_factors, merge).
// 5. A head's sink is one more record behind the last, (fl(sink * log2(e)), 1, 0).
// 6. The output is fp16(o / l), and zero where no key is visible and there is no sink.
#pragma once
#include "common/common.cuh"
#include "constants/attention.cuh"

namespace bminf {

constexpr float LOG2_E = 1.4426950408889634f;

// A score with a bias, to the base 2. dot: d; scale: c.
__device__ __forceinline__ float biased_score(float dot, float scale, float bias) {
    return __fmaf_rn(dot, scale, __fmul_rn(bias, LOG2_E));
}

// What is subtracted from scores before exponentiation: the largest score, or 0 where there is none.
__device__ __forceinline__ float softmax_shift(float top) { return top == -INF_F ? 0.0f : top; }

// The weight of a key from its dot product, without a bias. Because rounding is monotonic, the largest score is
// fl(c * max d), so kernels may keep dot products and their maximum.
__device__ __forceinline__ float softmax_weight(float dot, float scale, float shift) {
    return exp2_fast(__fmaf_rn(dot, scale, -shift));
}

// The weight of a key from its score, with a bias.
__device__ __forceinline__ float softmax_weight(float score, float shift) { return exp2_fast(__fsub_rn(score, shift)); }

// The factor of what was summed relative to `top` when the new maximum has `shift`. 0 for top = -inf.
__device__ __forceinline__ float rescale_factor(float top, float shift) { return exp2_fast(__fsub_rn(top, shift)); }

// A partial sum of weights after one more tile: `factor` rescales what was before, `tile` is the tile's sum.
__device__ __forceinline__ float add_tile_sum(float sum, float factor, float tile) {
    return __fadd_rn(__fmul_rn(sum, factor), tile);
}

// The merge of two records: the new maximum, and the factors of the left and the right side.
struct MergeFactors {
    float top, left, right;
};

__device__ __forceinline__ MergeFactors merge_factors(float left_top, float right_top) {
    const float top = fmaxf(left_top, right_top), shift = softmax_shift(top);
    return {top, rescale_factor(left_top, shift), rescale_factor(right_top, shift)};
}

// The merged sum of weights, or the merged output of one element.
__device__ __forceinline__ float merge(const MergeFactors& factors, float left, float right) {
    return __fmaf_rn(right, factors.right, __fmul_rn(left, factors.left));
}

// The factors that merge a head's sink with the records of all segments, of which `top` is the largest score.
__device__ __forceinline__ MergeFactors sink_factors(float top, const float* sink) {
    return merge_factors(top, __fmul_rn(__ldg(sink), LOG2_E));
}

// One element of the output.
__device__ __forceinline__ __half attention_output(float o, float sum) {
    return __float2half_rn(sum == 0.0f ? 0.0f : __fdiv_rn(o, sum));
}

// Elements of the outputs of two heads, y[m] = attention_output(o[m], sum[m % 2]): at once, where each division by
// itself would branch. It is the division that the compiler makes for operands whose quotients neither over- nor
// underflow. If a quotient's last bit may differ because o[m] is tiny, it rounds to zero in fp16.
__device__ __forceinline__ void attention_outputs(const float (&o)[4], const float (&sum)[2], __half (&y)[4]) {
    const float largest = fmaxf(fmaxf(fabsf(o[0]), fabsf(o[1])), fmaxf(fabsf(o[2]), fabsf(o[3])));
    if (largest < 0x1p100f && fminf(sum[0], sum[1]) >= 0x1p-20f && fmaxf(sum[0], sum[1]) <= 0x1p40f) {
        float inverse[2];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const float x = reciprocal_fast(sum[h]);
            inverse[h] = __fmaf_rn(x, __fmaf_rn(-sum[h], x, 1.0f), x);
        }
#pragma unroll
        for (int m = 0; m < 4; ++m) {
            const float quotient = __fmul_rn(inverse[m % 2], o[m]);
            y[m] = __float2half_rn(__fmaf_rn(inverse[m % 2], __fmaf_rn(-sum[m % 2], quotient, o[m]), quotient));
        }
    } else {
#pragma unroll
        for (int m = 0; m < 4; ++m) y[m] = attention_output(o[m], sum[m % 2]);
    }
}

}  // namespace bminf
