// bf16 elements for kernels over rows: the overloads that common.cuh has for fp16.
#pragma once
#include <cuda_bf16.h>

#include "common/common.cuh"

namespace bminf {

template <class T>
constexpr bool IS_BFLOAT16 = false;
template <>
constexpr bool IS_BFLOAT16<__nv_bfloat16> = true;

__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }

// Two fp32 values as a register of two bf16 values, `low` in the low half.
__device__ __forceinline__ unsigned pack_bfloat162(float low, float high) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<const unsigned*>(&pair);
}

// A bf16 number is the upper half of the fp32 number of the same value.
__device__ __forceinline__ void load8(const __nv_bfloat16* p, float (&x)[8]) {
    const uint4 raw = *reinterpret_cast<const uint4*>(p);
    const unsigned word[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        x[2 * i] = __uint_as_float(word[i] << 16);
        x[2 * i + 1] = __uint_as_float(word[i] & 0xffff0000u);
    }
}

__device__ __forceinline__ void store8(__nv_bfloat16* p, const float (&x)[8]) {
    *reinterpret_cast<uint4*>(p) = make_uint4(
        pack_bfloat162(x[0], x[1]), pack_bfloat162(x[2], x[3]), pack_bfloat162(x[4], x[5]), pack_bfloat162(x[6], x[7]));
}

__device__ __forceinline__ void store_vector(__nv_bfloat16* row, int column, int end, const float (&x)[8]) {
    if (column < end) store8(row + column, x);
}

}  // namespace bminf
