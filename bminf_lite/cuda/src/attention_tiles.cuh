// Keys and values of a few tokens in shared memory, as decode attention copies them there and multiplies them.
#pragma once
#include "async.cuh"
#include "int8_cache.cuh"
#include "tensor_cores.cuh"

namespace bminf {

// Keys or values of one head, D elements a token, which belong to one warp. A row is a token, in pieces of 16 bytes; within
// 128 bytes, pieces are exchanged by the number of the row, so that those which a warp reads at once lie in different banks.
template <int D, class CACHE>
struct Tile {
    static constexpr int TOKENS = IS_INT8<CACHE> || D == 64 ? 32 : 16;
    static constexpr int ROW = D * sizeof(CACHE), PIECES = ROW / 16, EACH = 16 / sizeof(CACHE);
    static constexpr int VECTORS = EACH / 8;  // of eight elements in a piece

    alignas(16) char bytes[TOKENS * ROW];

    __device__ __forceinline__ static constexpr int exchanged(int token) {
        constexpr int AMONG = PIECES < 8 ? PIECES : 8;
        return token * AMONG / 8 % AMONG;
    }
    __device__ __forceinline__ static int place(int token, int piece) {
        return token * ROW + (piece ^ exchanged(token)) * 16;
    }
    // So many tokens and pieces on from `place`, where neither sum carries within its lowest three bits: constants, so that
    // an address takes no register of its own.
    __device__ __forceinline__ static int beyond(int place, int token, int piece) {
        return (place ^ (piece % 8 ^ exchanged(token)) * 16) + token * ROW + piece / 8 * 128;
    }

    // Lets the copies of `present` tokens begin, `pitch` elements from one to the next. What lies beyond them, or in a row
    // beyond the pitch, becomes zero, because what was never written may be NaN.
    __device__ __forceinline__ void bring(const CACHE* from, int pitch, int present) {
        const int row = threadIdx.x % WARP / PIECES, piece = threadIdx.x % PIECES;
        const int target = place(row, piece), source = row * pitch + piece * EACH;
        if (piece * EACH >= pitch) present = 0;
#pragma unroll
        for (int r = 0; r < TOKENS; r += WARP / PIECES) {
            const bool here = row + r < present;
            copy16(bytes + beyond(target, r, 0), here ? from + source + r * pitch : from, here);
        }
    }
    // One token from elsewhere in shared memory.
    __device__ __forceinline__ void put(int token, const CACHE* from) {
        const int piece = threadIdx.x % WARP;
        if (piece < PIECES) *reinterpret_cast<int4*>(bytes + place(token, piece)) = reinterpret_cast<const int4*>(from)[piece];
        __syncwarp();
    }

    // Scores of these keys with eight heads' queries: of tokens 16 j + lane / 4, and that plus 8, with the heads lane % 4 * 2
    // and one more. Which column of a product is which element of a head is free to choose, so a thread reads 16 bytes at
    // once. `scale`: the key's of token `lane`, of an int8 cache.
    __device__ __forceinline__ void multiply_keys(
        const __half (*query)[D + 8], __half scale, float (&score)[TOKENS / 16][4]) const
    {
        const int row = threadIdx.x % WARP / 4, first = threadIdx.x % 4 * (PIECES == 4 ? 1 : 2), start = place(row, first);
        float sums[TOKENS / 16][2][4] = {};  // two, because a product has to wait for the one before it
        __half scales[TOKENS / 8] = {};
        if constexpr (IS_INT8<CACHE>) {
#pragma unroll
            for (int j = 0; j < TOKENS / 8; ++j) scales[j] = __shfl_sync(FULL, scale, 8 * j + row);
        }
#pragma unroll
        for (int i = 0; i < PIECES / 4; ++i) {
            const int piece = i / 2 * 8 + i % 2;  // beyond the thread's first
            uint4 q[VECTORS];
#pragma unroll
            for (int v = 0; v < VECTORS; ++v)
                q[v] = *reinterpret_cast<const uint4*>(&query[row][(first + piece) * EACH + 8 * v]);
#pragma unroll
            for (int j = 0; j < TOKENS / 16; ++j) {
                uint4 near[VECTORS], far[VECTORS];
                vectors(beyond(start, 16 * j, piece), scales[2 * j], near);
                vectors(beyond(start, 16 * j + 8, piece), scales[2 * j + 1], far);
#pragma unroll
                for (int v = 0; v < VECTORS; ++v) {
                    const unsigned low[4] = {near[v].x, far[v].x, near[v].y, far[v].y};
                    const unsigned high[4] = {near[v].z, far[v].z, near[v].w, far[v].w};
                    multiply_add(sums[j][0], low, q[v].x, q[v].y);
                    multiply_add(sums[j][1], high, q[v].z, q[v].w);
                }
            }
        }
#pragma unroll
        for (int j = 0; j < TOKENS / 16; ++j)
#pragma unroll
            for (int m = 0; m < 4; ++m) score[j][m] = sums[j][0][m] + sums[j][1][m];
    }

    // Adds these values times weights[j] of tokens 16 j .. 16 j + 15: two right operands, of which the second holds what the
    // first lacks for being rounded. o[n]: elements 64 (n / 4) + lane / 4 * 8 + n % 4 * 2, and one more, each of the heads
    // lane % 4 * 2 and one more. `scale`: the value's of token `lane`.
    __device__ __forceinline__ void add_values(
        const unsigned (&weights)[TOKENS / 16][2][2], __half scale, float (&o)[D / 16][4]) const
    {
        const int column = threadIdx.x % 4;
#pragma unroll
        for (int j = 0; j < TOKENS / 16; ++j) {
            __half2 scales[2] = {};
            if constexpr (IS_INT8<CACHE>) {
#pragma unroll
                for (int m = 0; m < 2; ++m) {
                    const int token = 16 * j + 8 * m + column * 2;
                    scales[m] = __halves2half2(__shfl_sync(FULL, scale, token), __shfl_sync(FULL, scale, token + 1));
                }
            }
#pragma unroll
            for (int c = 0; c < D / 64; ++c) {
                unsigned v[4][4];
                columns(c, j, scales, v);
#pragma unroll
                for (int part = 0; part < 2; ++part)
#pragma unroll
                    for (int i = 0; i < 4; ++i) multiply_add(o[4 * c + i], v[i], weights[j][part][0], weights[j][part][1]);
            }
        }
    }

private:
    // A piece as fp16.
    __device__ __forceinline__ void vectors(int place, __half scale, uint4 (&x)[VECTORS]) const {
        const uint4 piece = *reinterpret_cast<const uint4*>(bytes + place);
        if constexpr (IS_INT8<CACHE>) dequantize16(piece, scale, x[0], x[1]);
        else x[0] = piece;
    }
    // Elements 64 c + lane / 4 * 8 + 2 i, and one more, of tokens 16 j + lane % 4 * 2, one more, and those plus 8: a left
    // operand for each i. `scales` of these two and two tokens.
    __device__ __forceinline__ void columns(int c, int j, const __half2 (&scales)[2], unsigned (&x)[4][4]) const {
        const int row = threadIdx.x % WARP / 4, token = threadIdx.x % 4 * 2;
        if constexpr (IS_INT8<CACHE>) {
            const int start = place(token, row / 2) + row % 2 * 8;
            unsigned word[4][2];
#pragma unroll
            for (int m = 0; m < 4; ++m) {
                const int place = beyond(start, 16 * j + m / 2 * 8 + m % 2, 4 * c);
                const uint2 codes = *reinterpret_cast<const uint2*>(bytes + place);
                word[m][0] = codes.x, word[m][1] = codes.y;
            }
#pragma unroll
            for (int i = 0; i < 4; ++i)
#pragma unroll
                for (int m = 0; m < 2; ++m) {  // two elements of two tokens
                    const unsigned bytes = __byte_perm(word[2 * m][i / 2], word[2 * m + 1][i / 2], i % 2 ? 0x7362 : 0x5140);
                    const uint2 pairs = scaled_codes(as_bytes(bytes), scales[m]);
                    x[i][2 * m] = pairs.x, x[i][2 * m + 1] = pairs.y;
                }
        } else {
            const int start = place(token, row);
            unsigned word[4][4];
#pragma unroll
            for (int m = 0; m < 4; ++m) {
                const int place = beyond(start, 16 * j + m / 2 * 8 + m % 2, 8 * c);
                const uint4 eight = *reinterpret_cast<const uint4*>(bytes + place);
                word[m][0] = eight.x, word[m][1] = eight.y, word[m][2] = eight.z, word[m][3] = eight.w;
            }
#pragma unroll
            for (int i = 0; i < 4; ++i)
#pragma unroll
                for (int m = 0; m < 2; ++m) {
                    x[i][2 * m] = __byte_perm(word[2 * m][i], word[2 * m + 1][i], 0x5410);
                    x[i][2 * m + 1] = __byte_perm(word[2 * m][i], word[2 * m + 1][i], 0x7632);
                }
        }
    }
};

}  // namespace bminf
