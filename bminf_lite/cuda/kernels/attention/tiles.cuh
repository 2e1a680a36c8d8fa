// Chunks of keys or values in shared memory for decode attention: fragments of the tensor cores.
//
// Scores are S^T = K Q^T and outputs O^T = V^T P^T: keys and values are the left operands, so that their tokens or
// elements fill the 16 rows of an instruction, and the up to eight query heads are its columns. The elements of a head
// and the tokens run along k in their natural order.
#pragma once
#include "attention/int8_cache.cuh"
#include "common/async.cuh"
#include "common/tensor_cores.cuh"
#include "constants/attention.cuh"

namespace bminf {

// Rows of 16 << log2_pieces bytes at a shared address that is a multiple of 128; a row is a token. Within 128 bytes of
// a row the 16-byte pieces are swizzled (XORed with a number that depends on the row), so that the pieces which a warp
// reads at once lie in different banks. Rows that are a multiple of 16 apart have the same swizzle.
struct ChunkLayout {
    int log2_pieces;

    __device__ __forceinline__ int row_bytes() const { return 16 << log2_pieces; }
    __device__ __forceinline__ int swizzle(int row) const {
        const int log2_among = min(log2_pieces, 3);
        return (row >> (3 - log2_among)) & ((1 << log2_among) - 1);
    }
    __device__ __forceinline__ int offset(int row, int piece) const {
        return ((row << log2_pieces) | (piece ^ swizzle(row))) * 16;
    }
};

__host__ __device__ constexpr int log2_of(int x) { return x > 1 ? 1 + log2_of(x / 2) : 0; }

// Loads of one warp. The block of key j of a segment is lane j / BLOCK_SIZE of `table`; key j is in the cache if j <
// present, and granules before `end` are read. Other keys, and elements beyond the pitch, become zero, because memory
// that was never written may hold NaN. Keys are loaded in granules of SUB keys, which lie in one block.
template <int D, int SUB, class CACHE>
struct ChunkSource {
    static constexpr int ROW = D * sizeof(CACHE), EACH = 16 / sizeof(CACHE);
    int table, kv, kv_heads, pitch, present, end;

    // The index in the cache of key `key`. Every lane calls it.
    __device__ __forceinline__ long long token(int key) const {
        const int block = __shfl_sync(FULL, table, key / BLOCK_SIZE);
        return static_cast<long long>(block * kv_heads + kv) * BLOCK_SIZE + key % BLOCK_SIZE;
    }

    // Copies `count` granules granule, granule + step, ..., of each token the 1 / PARTS of the elements from `column`
    // on.
    template <int PARTS>
    __device__ __forceinline__ void load(
        unsigned chunk, const CACHE* data, int granule, int step, int count, int column) const {
        constexpr int PIECES = ROW / 16 / PARTS, TURNS = PIECES > WARP ? PIECES / WARP : 1;  // copies of a row
        constexpr int ROWS = TURNS > 1 ? 1 : WARP / PIECES < SUB ? WARP / PIECES : SUB;      // of one copy
        const ChunkLayout layout = {log2_of(PIECES)};
        const int lane = threadIdx.x % WARP, row = lane / PIECES, piece = lane % PIECES;
        const int element = column + piece * EACH;
        unsigned start = chunk + layout.offset(row, piece);
        if (ROWS * PIECES < WARP && row >= ROWS) return;
#pragma unroll 1
        for (int i = 0; i < count && granule < end; ++i, granule += step, start += SUB * PIECES * 16) {
            const int key = granule * SUB;
            const CACHE* from = data + token(key) * pitch + row * pitch + element;
            if (pitch == D && key + SUB <= present) {  // the common case, with constant offsets
                asm volatile("" : "+l"(from));         // keeps the compiler from folding the offsets into additions
#pragma unroll
                for (int r = 0; r < SUB; r += ROWS)
#pragma unroll
                    for (int t = 0; t < TURNS; ++t)
                        cp_async_16(
                            (start ^ layout.swizzle(r) * 16) + r * PIECES * 16 + t * WARP * 16,
                            from + r * D + t * WARP * EACH);
            } else {
                const int rows = element < pitch ? present - key - row : 0;
#pragma unroll
                for (int r = 0; r < SUB; r += ROWS)
#pragma unroll
                    for (int t = 0; t < TURNS; ++t)
                        cp_async_16(
                            (start ^ layout.swizzle(r) * 16) + r * PIECES * 16 + t * WARP * 16,
                            from + r * pitch + t * WARP * EACH,
                            r < rows && (TURNS == 1 || element + t * WARP * EACH < pitch));
            }
        }
    }

    // The scales of `count` granules granule, granule + step, ..., eight with a copy.
    __device__ __forceinline__ void load_scales(
        unsigned target, const __half* scales, int granule, int step, int count) const {
        const int lane = threadIdx.x % WARP;
#pragma unroll 1
        for (int i = 0; i < count * SUB; i += WARP * 8) {
            const int row = i + lane * 8, key = (granule + row / SUB * step) * SUB + row % SUB;
            const long long from = token(key % SEGMENT);
            if (row < count * SUB)
                cp_async_16_partial(target + row * 2, scales + from, 2 * max(0, min(8, present - key)));
        }
    }
};

// On 9.0 the order of the 16 products of an instruction changes no bit of their sum. (Seen on an H200: none of 65,536
// sums of 128 products differs. Most differ if 32 products change their order.) There ldmatrix may take two int8 codes
// for one fp16 element: it gives a lane four neighbouring codes of 16, not the two pairs of the natural order. Of these
// the even ones make one pair and the odd ones the other. Elsewhere codes are read in the natural order.
template <class CACHE>
constexpr bool PERMUTED = IS_INT8<CACHE> && __CUDA_ARCH__ == 900;

// The queries of up to eight heads as right operands, in the order of the keys.
template <int D, class CACHE>
struct QueryFragments {
    unsigned b[D / 16][2];

    __device__ __forceinline__ void load(const __half (*query)[D + 8]) {
        const int lane = threadIdx.x % WARP;
        if constexpr (PERMUTED<CACHE>) {
#pragma unroll
            for (int i = 0; i < D / 16; ++i) {
                const uint2 x = *reinterpret_cast<const uint2*>(&query[lane / 4][16 * i + lane % 4 * 4]);
                b[i][0] = __byte_perm(x.x, x.y, 0x5410), b[i][1] = __byte_perm(x.x, x.y, 0x7632);
            }
        } else {
#pragma unroll
            for (int i = 0; i < D / 32; ++i) {
                unsigned x[4];
                ldmatrix_x4(x, cast_smem_ptr_to_uint(&query[lane % 8][32 * i + lane / 8 * 8]));
                b[2 * i][0] = x[0], b[2 * i][1] = x[1], b[2 * i + 1][0] = x[2], b[2 * i + 1][1] = x[3];
            }
        }
    }
};

// A value that the compiler keeps in a register instead of computing it again.
__device__ __forceinline__ unsigned opaque(unsigned x) {
    asm volatile("" : "+r"(x));
    return x;
}

// The bytes 0 and 2 of four codes as fp16(scale * code). A byte with its top bit flipped is code + 128, and the fp16
// with bits 0x64xx is 1024 + xx.
__device__ __forceinline__ unsigned dequantize_even(unsigned codes, __half2 scales) {
    const unsigned bias = 0x64806480u;
    unsigned biased;  // (codes & 0x00ff00ff) ^ bias; the compiler would take two instructions
    asm("lop3.b32 %0, %1, %2, %3, 0x6a;" : "=r"(biased) : "r"(codes), "r"(0x00ff00ffu), "r"(bias));
    const __half2 x =
        __hmul2(__hsub2(*reinterpret_cast<const __half2*>(&biased), *reinterpret_cast<const __half2*>(&bias)), scales);
    return *reinterpret_cast<const unsigned*>(&x);
}

// The bytes 1 and 3.
__device__ __forceinline__ unsigned dequantize_odd(unsigned codes, __half2 scales) {
    return dequantize_even(codes >> 8, scales);
}

// Where mma_qk reads in 16 keys, as bytes from the first of them in a chunk of whole heads.
template <int D, class CACHE>
__device__ __forceinline__ unsigned key_fragment_offset() {
    const ChunkLayout layout = {log2_of(D * sizeof(CACHE) / 16)};
    const int lane = threadIdx.x % WARP;
    return IS_INT8<CACHE> && !PERMUTED<CACHE> ? layout.offset(lane / 4, 0) : layout.offset(lane % 16, lane / 16);
}

// The dot products of 16 keys with the queries: the fragment of S^T. start: the address of the keys plus
// key_fragment_offset; scales: of the scale of key lane / 4.
template <int D, class CACHE>
__device__ __forceinline__ void mma_qk(
    float (&dots)[4], unsigned start, const QueryFragments<D, CACHE>& query, unsigned scales) {
#pragma unroll
    for (int i = 0; i < 4; ++i) dots[i] = 0;
    if constexpr (IS_INT8<CACHE>) {
        const __half2 scale[2] = {
            __half2half2(__ushort_as_half(ld_shared_u16(scales))),
            __half2half2(__ushort_as_half(ld_shared_u16(scales + 16)))};
        if constexpr (PERMUTED<CACHE>) {
#pragma unroll
            for (int i = 0; i < D / 32; ++i) {
                unsigned codes[4];
                ldmatrix_x4(codes, (start ^ i % 4 * 32) + i / 4 * 128);
#pragma unroll
                for (int n = 0; n < 2; ++n) {
                    unsigned k[4];
#pragma unroll
                    for (int m = 0; m < 4; ++m)
                        k[m] = m / 2 ? dequantize_odd(codes[2 * n + m % 2], scale[m % 2])
                                     : dequantize_even(codes[2 * n + m % 2], scale[m % 2]);
                    mma_m16n8k16(dots, k, query.b[2 * i + n][0], query.b[2 * i + n][1]);
                }
            }
        } else {
#pragma unroll
            for (int i = 0; i < D / 16; ++i) {
                unsigned k[4];
#pragma unroll
                for (int m = 0; m < 4; ++m) {
                    const unsigned codes = ld_shared_u16(
                        (start ^ i % 8 * 16) + i / 8 * 128 + threadIdx.x % 4 * 2 + m / 2 * 8 + m % 2 * 8 * D);
                    k[m] = dequantize_even(__byte_perm(codes, 0, 0x4140), scale[m % 2]);
                }
                mma_m16n8k16(dots, k, query.b[i][0], query.b[i][1]);
            }
        }
    } else {
#pragma unroll
        for (int i = 0; i < D / 16; ++i) {
            unsigned k[4];
            ldmatrix_x4(k, (start ^ i % 4 * 32) + i / 4 * 128);
            mma_m16n8k16(dots, k, query.b[i][0], query.b[i][1]);
        }
    }
}

// 16 elements of the values of 32 tokens as left operands of two steps.
template <class CACHE>
struct ValueFragments;

template <>
struct ValueFragments<__half> {
    unsigned a[2][4];

    // What load() reads, as bytes from the start of 32 rows and of their scales: the 16 elements `tile`.
    __device__ __forceinline__ static unsigned offset(const ChunkLayout& layout, int tile) {
        const int lane = threadIdx.x % WARP;
        return layout.offset(lane % 8 + lane / 16 * 8, 2 * tile + lane / 8 % 2);
    }
    __device__ __forceinline__ static unsigned scale_offset() { return 0; }
    __device__ __forceinline__ void load(unsigned address, int row_bytes, unsigned scales) {
        ldmatrix_x4_trans(a[0], address);
        ldmatrix_x4_trans(a[1], address + 16 * row_bytes);
    }
    __device__ __forceinline__ void get(int step, unsigned (&v)[4]) const {
#pragma unroll
        for (int i = 0; i < 4; ++i) v[i] = a[step][i];
    }
    // The element of a tile that lane t holds as row t / 4 (which = 0) or t / 4 + 8 (which = 1) of the result.
    __device__ __forceinline__ static int element(int which) { return threadIdx.x % WARP / 4 + 8 * which; }
};

template <>
struct ValueFragments<int8> {
    unsigned codes[4], scales[4];  // of eight tokens each: two elements of two tokens, and the tokens' scales

    // ldmatrix takes two codes for one fp16 element. The scales are read as four matrices of eight equal rows.
    __device__ __forceinline__ static unsigned offset(const ChunkLayout& layout, int tile) {
        return layout.offset(threadIdx.x % WARP, tile);
    }
    __device__ __forceinline__ static unsigned scale_offset() { return threadIdx.x % WARP / 8 * 16; }
    __device__ __forceinline__ void load(unsigned address, int row_bytes, unsigned scales) {
        ldmatrix_x4_trans(codes, address);
        ldmatrix_x4(this->scales, scales);
    }
    __device__ __forceinline__ void get(int step, unsigned (&v)[4]) const {
#pragma unroll
        for (int m = 0; m < 2; ++m) {
            const unsigned x = codes[2 * step + m];
            const __half2 scale = *reinterpret_cast<const __half2*>(&scales[2 * step + m]);
            v[2 * m] = dequantize_even(x, scale), v[2 * m + 1] = dequantize_odd(x, scale);
        }
    }
    __device__ __forceinline__ static int element(int which) { return threadIdx.x % WARP / 4 * 2 + which; }
};

}  // namespace bminf
