// The int8 key-value cache: codes [num_blocks, kv_heads, BLOCK_SIZE, head_pitch], and an fp16 scale for each token and
// head [num_blocks, kv_heads, BLOCK_SIZE]. Attention reads the values fp16(scale * code).
#pragma once
#include "attention/heads.cuh"

namespace bminf {

template <class CACHE>
constexpr bool IS_INT8 = sizeof(CACHE) == 1;

// The keys or values of one head from some token on; `scales` only for int8.
template <class CACHE>
struct Cached {
    const CACHE* data;
    const __half* scales;

    __device__ __forceinline__ Cached from(int token, int pitch) const {
        return {data + static_cast<size_t>(token) * pitch, scales + token};
    }
};

// ---- writing -----------------------------------------------------------------------------------------------------

// The scale of a head with absmax a: a / 127 rounded up, so that no code exceeds 127, and at most 515.5, so that
// 127 * scale is finite in fp16. NaN if a is NaN or infinite.
__device__ __forceinline__ __half head_scale(float a) {
    if (!(a < INF_F)) return __float2half_rn(NAN_F);
    return __float2half_rn(fminf(__half2float(__float2half_ru(__fdiv_rn(a, 127.0f))), 515.5f));
}

__device__ __forceinline__ int8 head_code(float x, float scale) {
    return scale > 0.0f ? max(-127, min(127, __float2int_rn(__fdiv_rn(x, scale)))) : 0;
}

// Rounds a warp's head (see heads.cuh) to fp16 and quantizes it. Writes the codes to both `codes` and `copy`, with
// zeros from head_dim to head_pitch. Returns the scale.
template <int PAIRS>
__device__ __forceinline__ __half quantize_head(
    int8* codes, int8* copy, const float (&low)[PAIRS], const float (&high)[PAIRS], int head_dim, int head_pitch) {
    const int lane = threadIdx.x % WARP, half = head_dim / 2;
    double none = 0;
    float top = 0;
#pragma unroll
    for (int i = 0; i < PAIRS; ++i)
        if (i * WARP + lane < half) top = absmax(absmax(top, rounded(low[i])), rounded(high[i]));
    lanes_sum_max<false, true, WARP>(none, top);
    const __half stored = head_scale(top);
    const float scale = __half2float(stored);
#pragma unroll
    for (int i = 0; i < PAIRS; ++i) {
        const int pair = i * WARP + lane;
        if (pair >= half) continue;
        codes[pair] = copy[pair] = head_code(rounded(low[i]), scale);
        codes[half + pair] = copy[half + pair] = head_code(rounded(high[i]), scale);
    }
    if (lane < head_pitch - head_dim) codes[head_dim + lane] = copy[head_dim + lane] = 0;
    return stored;
}

// ---- reading -----------------------------------------------------------------------------------------------------

// Four codes as fp16. They come as unsigned bytes code + 128 (see as_bytes): the fp16 with bits 0x64xx is 1024 + xx,
// from which 1152 is subtracted exactly.
__device__ __forceinline__ void codes_to_half2(unsigned bytes, __half2& low, __half2& high) {
    const unsigned bias = 0x64806480u;
    unsigned first = __byte_perm(bytes, 0x64646464u, 0x4140), second = __byte_perm(bytes, 0x64646464u, 0x4342);
    const __half2 offset = *reinterpret_cast<const __half2*>(&bias);
    low = __hsub2(*reinterpret_cast<__half2*>(&first), offset),
    high = __hsub2(*reinterpret_cast<__half2*>(&second), offset);
}

// fp16(scales * code) of four codes.
__device__ __forceinline__ uint2 dequantize_codes(unsigned bytes, __half2 scales) {
    __half2 low, high;
    codes_to_half2(bytes, low, high);
    low = __hmul2(low, scales), high = __hmul2(high, scales);
    return make_uint2(*reinterpret_cast<const unsigned*>(&low), *reinterpret_cast<const unsigned*>(&high));
}

// Four codes plus 128 each.
__device__ __forceinline__ unsigned as_bytes(unsigned codes) { return codes ^ 0x80808080u; }

// Sixteen codes of one token as fp16(scale * code).
__device__ __forceinline__ void dequantize16(uint4 codes, __half scale, uint4& first, uint4& second) {
    const __half2 scales = __half2half2(scale);
    const uint2 a = dequantize_codes(as_bytes(codes.x), scales), b = dequantize_codes(as_bytes(codes.y), scales);
    const uint2 c = dequantize_codes(as_bytes(codes.z), scales), d = dequantize_codes(as_bytes(codes.w), scales);
    first = make_uint4(a.x, a.y, b.x, b.y), second = make_uint4(c.x, c.y, d.x, d.y);
}

}  // namespace bminf
