// A matrix of fp16 values in memory, either as fp16 or as the int32 result of an int8 product.
#pragma once
#include "common/common.cuh"
#include "common/layout.cuh"

namespace bminf {

// fp16 or fp32 data with rows of `pitch` elements; or int32 sums in some layout with leading dimension `pitch`, which
// stand for the values fp16(x_scale[row] * (w_scale[column] * sum) + bias[column]), with bias null or fp32 [columns].
struct Values {
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

}  // namespace bminf
