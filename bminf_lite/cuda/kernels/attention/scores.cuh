// The changes of a score that depend on more than its dot product with the scale: they come before masks, and their
// results are scores to the base 2. Each operation rounds on its own, so all kernels compute the same bits.
#pragma once
#include "attention/softmax.cuh"

namespace bminf {

// A score with a limit, cap * tanh(scale * dot / cap): tanh(x) = 1 - 2 / (1 + exp(2 x)). factor: 2 log2(e) scale / cap;
// cap: times log2(e).
__device__ __forceinline__ float capped_score(float dot, float factor, float cap) {
    const float inverse = reciprocal_fast(__fadd_rn(1.0f, exp2_fast(__fmul_rn(dot, factor))));
    return __fmaf_rn(__fmul_rn(-2.0f, cap), inverse, cap);
}

// A score with ALiBi's bias. dot and scale as in biased_score; distance: key - query.
__device__ __forceinline__ float alibi_score(float dot, float scale, float slope, float distance) {
    return biased_score(dot, scale, __fmul_rn(slope, distance));
}

}  // namespace bminf
