// Tiles of queries, keys and values for wgmma, and the products of attention. A tile in shared memory is
// [column / 64][row][64] of fp16 with the 128-byte swizzle.
#pragma once
#include "attention/prefill.cuh"
#include "common/wgmma.cuh"

namespace bminf {

constexpr int COLUMNS = 64;  // fp16 elements in 128 bytes

// The offset in elements of eight columns of a row in a tile of ROWS rows.
template <int ROWS>
__device__ __forceinline__ int swizzled_offset(int row, int chunk) {
    return (chunk / 8 * ROWS + row) * COLUMNS + ((chunk ^ row) % 8) * 8;
}

// Clears the rows of a tile from `valid` on, which may hold NaN.
template <int D, int BN>
__device__ __forceinline__ void clear_rows_from(__half* tile, int valid) {
    for (int i = valid * (D / 8) + threadIdx.x % WARPGROUP; i < BN * (D / 8); i += WARPGROUP)
        *reinterpret_cast<uint4*>(tile + swizzled_offset<BN>(i / (D / 8), i % (D / 8))) = make_uint4(0, 0, 0, 0);
    fence_proxy_async();
}

// Starts s = queries @ keys.T; q and k are the shared addresses of the tiles.
template <int D, int BM, int BN>
__device__ __forceinline__ void gemm_qk(float (&s)[BN / 8][4], unsigned q, unsigned k) {
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < D / 16; ++i) {
        const unsigned column = i / 4 * COLUMNS * 2, inside = i % 4 * 32;
        const unsigned long long a = make_smem_desc(q + column * BM + inside, 0),
                                 b = make_smem_desc(k + column * BN + inside, 0);
        if (i == 0)
            wgmma<false>(s, a, b);
        else
            wgmma<true>(s, a, b);
    }
    wgmma_commit_group();
}

// Starts o = weights @ values + (add ? o : 0); v is the shared address of the tile.
template <int D, int BN>
__device__ __forceinline__ void gemm_pv(float (&o)[D / 8][4], const unsigned (&w)[BN / 16][4], unsigned v, bool add) {
    constexpr int WIDTH = D < 128 ? D : 128, COLUMN = BN * COLUMNS * 2;
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < BN / 16; ++i)
#pragma unroll
        for (int n = 0; n < D; n += WIDTH) {
            auto& part = reinterpret_cast<float (&)[WIDTH / 8][4]>(o[n / 8]);
            wgmma(part, w[i], make_smem_desc(v + n / COLUMNS * COLUMN + i * 16 * COLUMNS * 2, COLUMN), add || i > 0);
        }
    wgmma_commit_group();
}

}  // namespace bminf
