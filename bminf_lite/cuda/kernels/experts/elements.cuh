// Vectors of 16 bytes of a weight, whose elements are multiplied as floats, and the fp16 elements that meet them.
#pragma once
#include "common/common.cuh"

namespace bminf {

// The elements of a weight in 16 bytes.
template <class W>
struct WeightVector;

template <>
struct WeightVector<__half> {
    static constexpr int COUNT = 8;
    float w[COUNT];

    __device__ __forceinline__ void load(const __half* p) {
        const uint4 raw = ld_global_v4(p);
        load8(reinterpret_cast<const __half*>(&raw), w);
    }
};

template <>
struct WeightVector<int8> {
    static constexpr int COUNT = 16;
    float w[COUNT];

    __device__ __forceinline__ void load(const int8* p) {
        const uint4 raw = ld_global_v4(p);
        const int8* codes = reinterpret_cast<const int8*>(&raw);
#pragma unroll
        for (int i = 0; i < COUNT; ++i) w[i] = static_cast<float>(codes[i]);
    }
};

// sum plus the product of a vector of the weight and the elements of x from `column` on, those from k on left out.
template <class W>
__device__ __forceinline__ float dot(
    const WeightVector<W>& weight, const float (&x)[WeightVector<W>::COUNT], float sum) {
#pragma unroll
    for (int i = 0; i < WeightVector<W>::COUNT; ++i) sum = fmaf(weight.w[i], x[i], sum);
    return sum;
}

template <int COUNT>
__device__ __forceinline__ void load_elements(const __half* row, int column, int k, float (&x)[COUNT]) {
#pragma unroll
    for (int first = 0; first < COUNT; first += 8) {
        uint4 raw = {};
        if (column + first < k) raw = ld_global_cg_v4(row + column + first), zero_tail(raw, column + first, k);
        float part[8];
        load8(reinterpret_cast<const __half*>(&raw), part);
#pragma unroll
        for (int i = 0; i < 8; ++i) x[first + i] = part[i];
    }
}

}  // namespace bminf
