// What the products with float activations share: the order of their sums, int8 codes as fp16 operands, the epilogue.
//
//     out = epilogue(w_scale * (x @ w.T) + bias)
//
// Each sum is one chain of tensor-core steps of STEP columns in fp32, from the first column to the last: c = a b + c,
// with zeros behind the last column. It depends neither on the number of rows nor on the kernel. A weight whose scales
// each belong to GROUP columns has a chain for each group, and sum = fma(scale, chain, sum) over the groups in order.
#pragma once
#include "common/async.cuh"
#include "common/epilogue.cuh"

namespace bminf {

constexpr int STEP = 16;   // columns of a step
constexpr int BLOCK = 64;  // columns of a row of 128 bytes in fp16

// The product of a scale and a chain is added to the sum of the groups before.
__device__ __forceinline__ float add_group(float sum, float scale, float chain) { return fmaf(scale, chain, sum); }

// A scale of type S, __half or float, in shared memory.
template <class S>
__device__ __forceinline__ float ld_shared_scale(unsigned address) {
    if constexpr (sizeof(S) == 4) return ld_shared_float(address);
    return __half2float(__ushort_as_half(ld_shared_u16(address)));
}

__device__ __forceinline__ unsigned half2_add(unsigned a, __half2 b) {
    const __half2 sum = __hadd2(*reinterpret_cast<const __half2*>(&a), b);
    return *reinterpret_cast<const unsigned*>(&sum);
}

// Four int8 codes as fp16 numbers, the lower two in `a`: exact. The bytes of code + 128 are the low bits of 1024 +
// (code
// + 128) in fp16.
__device__ __forceinline__ void halves_of_codes(unsigned codes, unsigned& a, unsigned& b) {
    const unsigned biased = codes ^ 0x80808080u;
    const __half2 bias = __float2half2_rn(-1152.0f);
    a = half2_add(__byte_perm(biased, 0x64646464u, 0x4140), bias);
    b = half2_add(__byte_perm(biased, 0x64646464u, 0x4342), bias);
}

// Two codes at each of two shared addresses.
__device__ __forceinline__ unsigned two_codes(unsigned low, unsigned high) {
    return __byte_perm(ld_shared_u16_wide(low), ld_shared_u16_wide(high), 0x5410);
}

// What the epilogue needs of a channel, a row of the weight. `scale` is used if the weight has one scale for each.
struct ChannelOperands {
    float scale, bias;
};

// The value of an output. Each operation rounds on its own, and without a bias nothing is added.
template <bool SCALED>
__device__ __forceinline__ float output_value(float sum, const ChannelOperands& channel, bool is_biased) {
    const float y = SCALED ? __fmul_rn(channel.scale, sum) : sum;
    return is_biased ? __fadd_rn(y, channel.bias) : y;
}

}  // namespace bminf
