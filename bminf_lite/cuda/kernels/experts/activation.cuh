// What stands between the two products of an expert.
#pragma once
#include "common/common.cuh"
#include "constants/experts.cuh"

namespace bminf {

// Of gpt-oss's activation: the bound of gate and up, and the factor within the sigmoid.
struct Clamp {
    float limit, alpha;
};

// f(gate) * up, or with GATED false f(gate), of products that are rounded to fp16 first; in fp32. F: an Activation, or
// CLAMPED_SWIGLU. The comparisons keep NaN.
template <bool GATED, int F>
__device__ __forceinline__ float expert_activation(float gate, float up, const Clamp& clamp) {
    if constexpr (F == CLAMPED_SWIGLU) {
        gate = rounded(gate), up = rounded(up);
        gate = gate > clamp.limit ? clamp.limit : gate;
        up = up > clamp.limit ? clamp.limit : up;
        up = up < -clamp.limit ? -clamp.limit : up;
        const float power = exp2_fast(__fmul_rn(-1.4426950408889634f, __fmul_rn(clamp.alpha, gate)));
        return __fmul_rn(__fmul_rn(gate, reciprocal_fast(__fadd_rn(1.0f, power))), __fadd_rn(up, 1.0f));
    } else {
        return GATED ? gated<F>(gate, up) : activate<F>(rounded(gate));
    }
}

}  // namespace bminf
