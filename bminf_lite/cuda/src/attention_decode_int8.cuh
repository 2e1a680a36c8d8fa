// The tiles of attention_decode.cu from an int8 cache: what they hold, and that only the bytes that come from memory differ,
// is said there. Codes become fp16 when they are multiplied.
#pragma once
#include "int8_cache.cuh"
#include "tensor_cores.cuh"

namespace bminf {

// Of the 16 tokens of a tile, the m-th of those whose scores and values a thread holds.
__device__ __forceinline__ int token_of(int m) { return threadIdx.x % 4 * 2 + m % 2 + m / 2 * 8; }

// As Keys: tokens lane / 4 and that plus 8, 16 elements of each 64.
template <int D>
struct Int8Keys {
    uint4 of[2][D / 64];
    __half scales[2];

    __device__ __forceinline__ void load(const Cached<int8>& from, int pitch, int present) {
        const int column = threadIdx.x % 4 * 16;
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            const int token = threadIdx.x % WARP / 4 + 8 * j;
            scales[j] = token < present ? __ldcg(from.scales + token) : __half{};
#pragma unroll
            for (int c = 0; c < D / 64; ++c) {
                const bool here = token < present && column + 64 * c < pitch;
                of[j][c] = here ? __ldcg(reinterpret_cast<const uint4*>(from.data + token * pitch + column + 64 * c)) : uint4{};
            }
        }
    }
    __device__ __forceinline__ void replace(int token, const int8* by, __half scale) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            if (token != static_cast<int>(threadIdx.x) % WARP / 4 + 8 * j) continue;
            scales[j] = scale;
#pragma unroll
            for (int c = 0; c < D / 64; ++c) of[j][c] = *reinterpret_cast<const uint4*>(by + threadIdx.x % 4 * 16 + 64 * c);
        }
    }
    __device__ __forceinline__ void multiply(const __half (*query)[D], float (&score)[4]) const {
        const unsigned(&word)[2][D / 64][4] = reinterpret_cast<const unsigned(&)[2][D / 64][4]>(of);
        const __half2 scale[2] = {__half2half2(scales[0]), __half2half2(scales[1])};
        float s[2][4] = {};
#pragma unroll
        for (int c = 0; c < D / 64; ++c) {
            const __half* const at = &query[threadIdx.x % WARP / 4][threadIdx.x % 4 * 16 + 64 * c];
            const uint4 low = reinterpret_cast<const uint4*>(at)[0], high = reinterpret_cast<const uint4*>(at)[1];
            const unsigned q[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
            for (int i = 0; i < 4; ++i)
#pragma unroll
                for (int j = 0; j < 2; ++j) {
                    const uint2 key = scaled_codes(as_bytes(word[j][c][i]), scale[j]);
                    const unsigned a[4] = {q[2 * i], 0, q[2 * i + 1], 0};
                    multiply_add(s[j], a, key.x, key.y);
                }
        }
        score[0] = s[0][0], score[1] = s[0][1], score[2] = s[1][0], score[3] = s[1][1];
    }
};

// As Values.
struct Int8Values {
    uint2 of[4];
    __half scales[4];

    __device__ __forceinline__ void load(const Cached<int8>& from, int first, int pitch, int present) {
        const int column = first + threadIdx.x % WARP / 4 * 8;
#pragma unroll
        for (int m = 0; m < 4; ++m) {
            const bool there = token_of(m) < present, here = there && column < pitch;
            scales[m] = there ? __ldcg(from.scales + token_of(m)) : __half{};
            of[m] = here ? __ldcg(reinterpret_cast<const uint2*>(from.data + token_of(m) * pitch + column)) : uint2{};
        }
    }
    __device__ __forceinline__ void replace(int token, const int8* by, __half scale) {
#pragma unroll
        for (int m = 0; m < 4; ++m) {
            if (token_of(m) != token) continue;
            of[m] = *reinterpret_cast<const uint2*>(by + threadIdx.x % WARP / 4 * 8), scales[m] = scale;
        }
    }
    __device__ __forceinline__ void multiply(const unsigned (&weights)[4], float (&o)[8][4]) const {
        const unsigned(&word)[4][2] = reinterpret_cast<const unsigned(&)[4][2]>(of);
        const __half2 near = __halves2half2(scales[0], scales[1]), far = __halves2half2(scales[2], scales[3]);
#pragma unroll
        for (int i = 0; i < 8; i += 2) {  // two elements of two tokens each
            const unsigned bytes = i % 4 ? 0x7362 : 0x5140;
            const uint2 a = scaled_codes(as_bytes(__byte_perm(word[0][i / 4], word[1][i / 4], bytes)), near);
            const uint2 b = scaled_codes(as_bytes(__byte_perm(word[2][i / 4], word[3][i / 4], bytes)), far);
            multiply_add(o[i], weights, a.x, b.x);
            multiply_add(o[i + 1], weights, a.y, b.y);
        }
    }
};

}  // namespace bminf
