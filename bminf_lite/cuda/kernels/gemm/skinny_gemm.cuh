// The epilogue of the skinny GEMMs: from int32 sums to outputs.
#pragma once
#include "common/common.cuh"
#include "constants/epilogue.cuh"

namespace bminf {

// The scale and the bias of a channel, a row of the weight.
struct Channel {
    float scale, bias;
};

// Writes out[index], with y = x_scale * (scale * sum) + bias:
//     fp16 y; fp32 y; fp32 residual + fp16(y); fp16 f(gate) * up; fp16 f(y); or the int32 sum itself.
// sums, channels: of the output's channel, or with GATED of gate and up. F: the function f. residual: the value of
// out[index] before, for ADD.
template <int EPILOGUE, int F, int MATRICES>
__device__ __forceinline__ void store_output(
    void* out, size_t index, const int (&sums)[MATRICES], float x_scale, const Channel (&channels)[MATRICES],
    bool biased, float residual) {
    if constexpr (EPILOGUE == TO_INT32) {
        static_cast<int*>(out)[index] = sums[0];
    } else {
        float y[MATRICES];
#pragma unroll
        for (int m = 0; m < MATRICES; ++m) {
            y[m] = scaled(__int2float_rn(sums[m]), x_scale, channels[m].scale);
            if (biased) y[m] = __fadd_rn(y[m], channels[m].bias);
        }
        if constexpr (EPILOGUE == TO_HALF) static_cast<__half*>(out)[index] = __float2half_rn(y[0]);
        if constexpr (EPILOGUE == TO_FLOAT) static_cast<float*>(out)[index] = y[0];
        if constexpr (EPILOGUE == ADD) static_cast<float*>(out)[index] = __fadd_rn(residual, rounded(y[0]));
        if constexpr (EPILOGUE == ACTIVATED)
            static_cast<__half*>(out)[index] = __float2half_rn(activate<F>(rounded(y[0])));
        if constexpr (EPILOGUE == GATED) static_cast<__half*>(out)[index] = __float2half_rn(gated<F>(y[0], y[1]));
    }
}

}  // namespace bminf
