// The last step of an epilogue, for the products that compute each output in one thread.
#pragma once
#include "common/bfloat16.cuh"
#include "common/common.cuh"
#include "constants/epilogue.cuh"

namespace bminf {

// Writes out[index] from the value y, or from the values y of the gate and up:
//     fp16 y; bf16 y; fp32 y; fp32 residual + fp16(y); fp16 f(y) * up; or fp16 f(y), with f(y) = F(fp16(y)).
// residual: the value of out[index] before, for ADD.
template <int EPILOGUE, int F>
__device__ __forceinline__ void store_output(void* out, size_t index, float y, float up, float residual) {
    if constexpr (EPILOGUE == TO_HALF) static_cast<__half*>(out)[index] = __float2half_rn(y);
    if constexpr (EPILOGUE == TO_BFLOAT16) static_cast<__nv_bfloat16*>(out)[index] = __float2bfloat16_rn(y);
    if constexpr (EPILOGUE == TO_FLOAT) static_cast<float*>(out)[index] = y;
    if constexpr (EPILOGUE == ADD) static_cast<float*>(out)[index] = __fadd_rn(residual, rounded(y));
    if constexpr (EPILOGUE == ACTIVATED) static_cast<__half*>(out)[index] = __float2half_rn(activate<F>(rounded(y)));
    if constexpr (EPILOGUE == GATED) static_cast<__half*>(out)[index] = __float2half_rn(gated<F>(y, up));
}

}  // namespace bminf
