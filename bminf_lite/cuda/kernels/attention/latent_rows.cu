// The preparation of latent attention, but for the product that absorbs the keys' matrix: the rows of new tokens into
// the cache, and the rotated part of their queries.
//
//     cache[token] = norm(kv[:rank]), rope(kv[rank:]), queries[token, h] = .., factor * rope(q[token, h, nope_dim:]), 0
//
// kv: fp32 [T, rank + rope_dim], rows kv_pitch apart; q: fp16 [T, heads * (nope_dim + rope_dim)]; cache and scales: see
// latent.cu; queries: fp16 [T, heads, depth], of which columns from rank on are written. norm_weight: fp32, padded with
// zeros to weight_pitch. `original` > 0: queries grow with their position p, by the factor 1 + beta * ln(1 + p /
// original), which is written to factors, fp32 [T]. Block (t, 0) has the row of token t, block (t, 1 + j) HEADS heads
// of its queries. Tokens behind the last sequence are left out.
#include "attention/int8_cache.cuh"
#include "attention/place.cuh"
#include "constants/attention.cuh"
#include "constants/latent_rows.cuh"

using namespace bminf;

// The element of a row as it is stored.
__device__ __forceinline__ void store_element(__half* place, float x, float) { *place = __float2half_rn(x); }
__device__ __forceinline__ void store_element(int8* place, float x, float scale) { *place = head_code(x, scale); }

template <class CACHE>
__global__ void __launch_bounds__(THREADS) latent_rows(
    const float* kv, long long kv_pitch, const float* norm_weight, int weight_pitch, float eps,
    const float* frequencies, float rope_scale, const __half* q, long long q_pitch, int heads, int nope_dim,
    int rope_dim, int rank, int depth, float beta, int original, const int* cu_seqlens, const int* context_lens,
    const int* block_tables, int table_pitch, int sequences, CACHE* cache, __half* scales, __half* queries,
    float* factors) {
    __shared__ RowScratch<THREADS> scratch;
    __shared__ float key[MAX_KEY];
    launch_dependent_grids();
    if (blockIdx.y == 0 && threadIdx.x * 32 < rank) prefetch_l2(norm_weight + threadIdx.x * 32);
    wait_on_dependent_grids();
    const auto [token, sequence, position] = find_place(cu_seqlens, context_lens, sequences);
    const int thread = threadIdx.x, half = rope_dim / 2;
    if (token >= cu_seqlens[sequences] || position / BLOCK_SIZE >= table_pitch) return;
    if (blockIdx.y > 0) {
        float factor = 1.0f;
        if (original > 0) {
            const float passed = static_cast<float>(position / original);
            factor = __fadd_rn(1.0f, __fmul_rn(beta, logf(__fadd_rn(1.0f, passed))));
            if (blockIdx.y == 1 && thread == 0) factors[token] = factor;
        }
        const int first = (blockIdx.y - 1) * HEADS, end = min(heads, first + HEADS), zeros = depth - rank - rope_dim;
        for (int i = thread; i < (end - first) * half; i += THREADS) {
            const int head = first + i / half, pair = i % half;
            const __half* const x = q + token * q_pitch + head * (nope_dim + rope_dim) + nope_dim;
            __half* const out = queries + (static_cast<long long>(token) * heads + head) * depth + rank;
            float low = __half2float(x[pair]), high = __half2float(x[half + pair]), cosine, sine;
            rope_angle(position, frequencies[pair], rope_scale, cosine, sine);
            rotate_pair(low, high, cosine, sine);
            out[pair] = __float2half_rn(__fmul_rn(low, factor));
            out[half + pair] = __float2half_rn(__fmul_rn(high, factor));
        }
        for (int i = thread; i < (end - first) * zeros; i += THREADS)
            queries[(static_cast<long long>(token) * heads + first + i / zeros) * depth + rank + rope_dim + i % zeros] =
                __float2half_rn(0.0f);
        return;
    }
    const float* const row = kv + token * kv_pitch;
    float latent[1][8];
    load_row8(row, thread * 8, rank, static_cast<int>(kv_pitch), latent[0]);
    for (int pair = thread; pair < half; pair += THREADS) {
        float low = row[rank + pair], high = row[rank + half + pair], cosine, sine;
        rope_angle(position, frequencies[pair], rope_scale, cosine, sine);
        rotate_pair(low, high, cosine, sine);
        key[pair] = rounded(low), key[half + pair] = rounded(high);
    }
    normalise_row<THREADS, false, false>(latent, norm_weight, nullptr, eps, rank, weight_pitch, scratch);
    __syncthreads();
    const int block = block_tables[static_cast<long long>(sequence) * table_pitch + position / BLOCK_SIZE];
    const long long place = static_cast<long long>(block) * BLOCK_SIZE + position % BLOCK_SIZE;
    float of_latent = 0, of_key = 0;
#pragma unroll
    for (int j = 0; j < 8; ++j) latent[0][j] = rounded(latent[0][j]);
    if constexpr (IS_INT8<CACHE>) {
#pragma unroll
        for (int j = 0; j < 8; ++j) of_latent = absmax(of_latent, latent[0][j]);
        for (int j = thread; j < rope_dim; j += THREADS) of_key = absmax(of_key, key[j]);
        const __half latent_scale = head_scale(threads_absmax<THREADS>(of_latent, scratch, 0));
        const __half key_scale = head_scale(threads_absmax<THREADS>(of_key, scratch, 1));
        if (thread == 0) scales[2 * place] = latent_scale, scales[2 * place + 1] = key_scale;
        of_latent = __half2float(latent_scale), of_key = __half2float(key_scale);
    }
    CACHE* const out = cache + place * depth;
#pragma unroll
    for (int j = 0; j < 8; ++j)
        if (thread * 8 + j < rank) store_element(out + thread * 8 + j, latent[0][j], of_latent);
    for (int j = thread; j < depth - rank; j += THREADS)
        store_element(out + rank + j, j < rope_dim ? key[j] : 0.0f, of_key);
}
