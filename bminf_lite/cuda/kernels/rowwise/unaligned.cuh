// Loads and stores of eight elements in rows of any length and alignment.
#pragma once
#include "common/bfloat16.cuh"
#include "common/common.cuh"

namespace bminf {

__device__ __forceinline__ void store_element(__half* p, float x) { *p = __float2half_rn(x); }
__device__ __forceinline__ void store_element(__nv_bfloat16* p, float x) { *p = __float2bfloat16_rn(x); }
__device__ __forceinline__ void store_element(float* p, float x) { *p = x; }

// Loads the first `count` of eight elements; the others become 0. `aligned`: p is a multiple of 16 bytes.
template <class T>
__device__ __forceinline__ void load_some(const T* p, int count, bool aligned, float (&x)[8]) {
    if (aligned && count >= 8) {
        load8(p, x);
        return;
    }
#pragma unroll
    for (int j = 0; j < 8; ++j) x[j] = j < count ? to_float(p[j]) : 0.0f;
}

// Stores the first `count` of eight elements.
template <class T>
__device__ __forceinline__ void store_some(T* p, int count, bool aligned, const float (&x)[8]) {
    if (aligned && count >= 8) {
        store8(p, x);
        return;
    }
#pragma unroll
    for (int j = 0; j < 8; ++j)
        if (j < count) store_element(p + j, x[j]);
}

}  // namespace bminf
