// Tiles of keys or values in shared memory for decode attention: asynchronous loads, and products by mma.sync.
//
// Scores are S^T = K Q^T and outputs O^T = V^T P^T: keys and values are the left operands, so that their tokens or
// elements fill the 16 rows of an instruction, and the up to eight query heads are its columns.
#pragma once
#include "attention/int8_cache.cuh"
#include "common/async.cuh"
#include "common/tensor_cores.cuh"

namespace bminf {

// TOKENS keys or values of one head, D elements each, owned by one warp at a shared address that is a multiple of 128.
// A row is a token. Within 128 bytes of a row the 16-byte pieces are swizzled (XORed with a number that depends on the
// row), so that the pieces which a warp reads at once lie in different banks.
template <int D, class CACHE>
struct Tile {
    static constexpr int TOKENS = IS_INT8<CACHE> || D == 64 ? 32 : 16;
    static constexpr int ROW = D * sizeof(CACHE), PIECES = ROW / 16, EACH = 16 / sizeof(CACHE), BYTES = TOKENS * ROW;

    __device__ __forceinline__ static constexpr int swizzle(int token) {
        constexpr int AMONG = PIECES < 8 ? PIECES : 8;
        return token * AMONG / 8 % AMONG;
    }
    __device__ __forceinline__ static int swizzled_offset(int token, int piece) {
        return token * ROW + (piece ^ swizzle(token)) * 16;
    }
    // The address `token` rows and `piece` pieces after `address`, if adding them to the row and piece of `address`
    // carries nothing out of their lowest three bits. Both are constants at compile time, so the address is computed by
    // an XOR and the offset of the instruction.
    __device__ __forceinline__ static unsigned advance(unsigned address, int token, int piece) {
        return (address ^ (piece % 8 ^ swizzle(token)) * 16) + token * ROW + piece / 8 * 128;
    }

    // Starts copies of `present` tokens with rows of `pitch` elements. Further tokens, and elements beyond the pitch,
    // become zero, because memory that was never written may hold NaN.
    __device__ __forceinline__ static void load_async(unsigned tile, const CACHE* from, int pitch, int present) {
        constexpr int AT_ONCE = WARP / PIECES;
        const int row = threadIdx.x % WARP / PIECES, piece = threadIdx.x % PIECES;
        const unsigned target = swizzled_offset(row, piece);
        if (pitch == D && present >= TOKENS) {  // the common case, with constant offsets
            from += row * D + piece * EACH;
            asm volatile("" : "+l"(from));  // keeps the compiler from folding the offsets into 64-bit additions
#pragma unroll
            for (int r = 0; r < TOKENS; r += AT_ONCE) cp_async_16(tile + advance(target, r, 0), from + r * D);
        } else {
#pragma unroll 1
            for (int r = 0; r < TOKENS; r += AT_ONCE) {
                const bool valid = row + r < present && piece * EACH < pitch;
                cp_async_16(
                    tile + advance(target, r, 0), valid ? from + (row + r) * pitch + piece * EACH : from, valid);
            }
        }
    }
    // Copies one token from elsewhere in shared memory into the tile.
    __device__ __forceinline__ static void store_token(unsigned tile, int token, const CACHE* from) {
        const int piece = threadIdx.x % WARP;
        if (piece < PIECES)
            st_shared_v4(tile + swizzled_offset(token, piece), reinterpret_cast<const uint4*>(from)[piece]);
        __syncwarp();
    }

    // score[j]: the fragment of S^T for the tokens 16 j to 16 j + 15 and the eight heads in `query`.
    __device__ __forceinline__ static void mma_qk(
        unsigned tile, const __half (*query)[D + 8], float (&score)[TOKENS / 16][4]) {
        float sums[TOKENS / 16][2][4] = {};  // two chains, because an instruction waits for its accumulator
#pragma unroll
        for (int i = 0; i < D / 32; ++i) {
            unsigned q[4];
            load_queries(query, i, q);
#pragma unroll
            for (int j = 0; j < TOKENS / 16; ++j) {
                unsigned k[2][4];
                load_keys(tile, i, j, k);
#pragma unroll
                for (int n = 0; n < 2; ++n) mma_m16n8k16(sums[j][n], k[n], q[2 * n], q[2 * n + 1]);
            }
        }
#pragma unroll
        for (int j = 0; j < TOKENS / 16; ++j)
#pragma unroll
            for (int m = 0; m < 4; ++m) score[j][m] = sums[j][0][m] + sums[j][1][m];
    }

    // o += V^T P^T. weights[j]: two right operands for the tokens 16 j to 16 j + 15, P rounded to fp16 and the rounding
    // error, so that the sum is as exact as with P in fp32. o[n]: the elements element_of(n, 0) and element_of(n, 1) of
    // the head for the heads lane % 4 * 2 and its successor.
    __device__ __forceinline__ static void mma_pv(
        unsigned tile, const unsigned (&weights)[TOKENS / 16][2][2], float (&o)[D / 16][4]) {
#pragma unroll
        for (int j = 0; j < TOKENS / 16; ++j)
#pragma unroll
            for (int c = 0; c < D / 64; ++c) {
                unsigned v[4][4];
                load_values(tile, c, j, v);
#pragma unroll
                for (int part = 0; part < 2; ++part)
#pragma unroll
                    for (int i = 0; i < 4; ++i)
                        mma_m16n8k16(o[4 * c + i], v[i], weights[j][part][0], weights[j][part][1]);
            }
    }
    __device__ __forceinline__ static int element_of(int n, int which) {
        const int row = threadIdx.x % WARP / 4;
        return IS_INT8<CACHE> ? 64 * (n / 4) + 8 * row + n % 4 * 2 + which : 16 * n + row + 8 * which;
    }

private:
    // Fragments of the queries for the elements 32 i to 32 i + 31 of a head. The order of elements along k is free, as
    // long as keys and queries agree. For int8 it is chosen so that a lane reads eight neighbouring codes of a key at
    // once.
    __device__ __forceinline__ static void load_queries(const __half (*query)[D + 8], int i, unsigned (&q)[4]) {
        const int lane = threadIdx.x % WARP;
        if constexpr (IS_INT8<CACHE>) {
            const int column = PIECES == 4 ? lane % 4 * 16 : i / 4 * 128 + lane % 4 * 32 + i / 2 % 2 * 16;
            const uint4 x = *reinterpret_cast<const uint4*>(&query[lane / 4][column + i % 2 * 8]);
            q[0] = x.x, q[1] = x.y, q[2] = x.z, q[3] = x.w;
        } else {
            ldmatrix_x4(q, cast_smem_ptr_to_uint(&query[lane % 8][32 * i + lane / 8 * 8]));
        }
    }
    // The left operands for 32 elements of the keys of the tokens 16 j to 16 j + 15.
    __device__ __forceinline__ static void load_keys(unsigned tile, int i, int j, unsigned (&k)[2][4]) {
        const int lane = threadIdx.x % WARP;
        if constexpr (IS_INT8<CACHE>) {
            const unsigned start = tile + swizzled_offset(lane / 4, lane % 4 * (PIECES == 4 ? 1 : 2));
#pragma unroll
            for (int m = 0; m < 2; ++m) {  // eight codes of a token
                const uint2 codes = ld_shared_v2(advance(start, 16 * j + 8 * m, i / 4 * 8 + i / 2 % 2) + i % 2 * 8);
                const uint2 a = codes_to_half2(as_bytes(codes.x)), b = codes_to_half2(as_bytes(codes.y));
                k[0][m] = a.x, k[0][m + 2] = a.y, k[1][m] = b.x, k[1][m + 2] = b.y;
            }
        } else {
            const unsigned start = tile + swizzled_offset(lane % 16, lane / 16);
#pragma unroll
            for (int n = 0; n < 2; ++n) ldmatrix_x4(k[n], advance(start, 16 * j, 4 * i + 2 * n));
        }
    }
    // The left operands for 64 elements of the values of the tokens 16 j to 16 j + 15.
    __device__ __forceinline__ static void load_values(unsigned tile, int c, int j, unsigned (&v)[4][4]) {
        const int lane = threadIdx.x % WARP;
        if constexpr (IS_INT8<CACHE>) {
            const unsigned start = tile + swizzled_offset(lane % 4 * 2, lane / 8) + lane / 4 % 2 * 8;
            uint2 codes[4];
#pragma unroll
            for (int m = 0; m < 4; ++m) codes[m] = ld_shared_v2(advance(start, 16 * j + m / 2 * 8 + m % 2, 4 * c));
#pragma unroll
            for (int i = 0; i < 4; ++i)
#pragma unroll
                for (int m = 0; m < 4; m += 2) {  // two elements of two tokens
                    const unsigned near = i < 2 ? codes[m].x : codes[m].y,
                                   far = i < 2 ? codes[m + 1].x : codes[m + 1].y;
                    const uint2 pairs = codes_to_half2(as_bytes(__byte_perm(near, far, i % 2 ? 0x7362 : 0x5140)));
                    v[i][m] = pairs.x, v[i][m + 1] = pairs.y;
                }
        } else {
            const unsigned start = tile + swizzled_offset(lane % 8 + lane / 16 * 8, lane / 8 % 2);
#pragma unroll
            for (int i = 0; i < 4; ++i) ldmatrix_x4_trans(v[i], advance(start, 16 * j, 8 * c + 2 * i));
        }
    }
};

}  // namespace bminf
