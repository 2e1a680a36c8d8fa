// Vectors of eight in rows that need not be padded nor aligned.
#pragma once
#include "common/common.cuh"

namespace bminf {

__device__ __forceinline__ float as_float(__half x) { return __half2float(x); }
__device__ __forceinline__ float as_float(float x) { return x; }
__device__ __forceinline__ void put(__half* p, float x) { *p = __float2half_rn(x); }
__device__ __forceinline__ void put(float* p, float x) { *p = x; }

// The first `count` of eight elements, one by one where they are fewer, or not `aligned` to 16 bytes; else zero.
template <class T>
__device__ __forceinline__ void load_some(const T* p, int count, bool aligned, float (&x)[8]) {
    if (aligned && count >= 8) {
        load8(p, x);
        return;
    }
#pragma unroll
    for (int j = 0; j < 8; ++j) x[j] = j < count ? as_float(p[j]) : 0.0f;
}

template <class T>
__device__ __forceinline__ void store_some(T* p, int count, bool aligned, const float (&x)[8]) {
    if (aligned && count >= 8) {
        store8(p, x);
        return;
    }
#pragma unroll
    for (int j = 0; j < 8; ++j)
        if (j < count) put(p + j, x[j]);
}

}  // namespace bminf
