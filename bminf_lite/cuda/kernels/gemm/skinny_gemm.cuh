// What becomes of the int32 sums of a few rows times an int8 weight.
#pragma once
#include "common/common.cuh"
#include "constants/epilogue.cuh"

namespace bminf {

// The scale and, where there is one, the bias of a channel (a row of the weight).
struct Channel {
    float scale, bias;
};

// One output at `place` from its sum, or with GATED from the sums of gate and up. F is the gate's function, `residual`
// what was at the place before.
template <int EPILOGUE, int F, int MATRICES>
__device__ __forceinline__ void put(
    void* out, size_t place, const int (&sums)[MATRICES], float x_scale, const Channel (&channels)[MATRICES],
    bool biased, float residual) {
    if constexpr (EPILOGUE == TO_INT32) {
        static_cast<int*>(out)[place] = sums[0];
    } else {
        float y[MATRICES];
#pragma unroll
        for (int m = 0; m < MATRICES; ++m) {
            y[m] = scaled(__int2float_rn(sums[m]), x_scale, channels[m].scale);
            if (biased) y[m] = __fadd_rn(y[m], channels[m].bias);
        }
        if constexpr (EPILOGUE == TO_HALF) static_cast<__half*>(out)[place] = __float2half_rn(y[0]);
        if constexpr (EPILOGUE == TO_FLOAT) static_cast<float*>(out)[place] = y[0];
        if constexpr (EPILOGUE == ADD) static_cast<float*>(out)[place] = __fadd_rn(residual, rounded(y[0]));
        if constexpr (EPILOGUE == ACTIVATED)
            static_cast<__half*>(out)[place] = __float2half_rn(activate<F>(rounded(y[0])));
        if constexpr (EPILOGUE == GATED)
            static_cast<__half*>(out)[place] = __float2half_rn(activate<F>(rounded(y[0])) * rounded(y[1]));
    }
}

}  // namespace bminf
