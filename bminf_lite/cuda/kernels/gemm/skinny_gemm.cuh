// The epilogue of the skinny GEMMs: from int32 sums to outputs.
#pragma once
#include "common/adapters.cuh"
#include "common/epilogue.cuh"

namespace bminf {

// The scale and the bias of a channel, a row of the weight.
struct Channel {
    float scale, bias;
};

// Writes out[index]: the int32 sum itself, or what store_output makes of the values x_scale * (scale * sum) + side +
// bias. sums, channels, side: of the output's channel, or with GATED of gate and up; side may be null.
template <int EPILOGUE, int F, int MATRICES>
__device__ __forceinline__ void store_scaled(
    void* out, size_t index, const int (&sums)[MATRICES], float x_scale, const Channel (&channels)[MATRICES],
    bool biased, float residual, const float* side = nullptr) {
    if constexpr (EPILOGUE == TO_INT32) {
        static_cast<int*>(out)[index] = sums[0];
    } else {
        float y[MATRICES];
#pragma unroll
        for (int m = 0; m < MATRICES; ++m) {
            y[m] = scaled(__int2float_rn(sums[m]), x_scale, channels[m].scale);
            if (side) y[m] = add_side(y[m], side[m]);
            if (biased) y[m] = __fadd_rn(y[m], channels[m].bias);
        }
        store_output<EPILOGUE, F>(out, index, y[0], y[MATRICES - 1], residual);
    }
}

}  // namespace bminf
