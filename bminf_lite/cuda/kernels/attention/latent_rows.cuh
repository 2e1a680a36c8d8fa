// The preparation of latent attention, but for the product that absorbs the keys' matrix: the rows of new tokens into
// the cache, and the rotated part of their queries.
//
//     cache[token] = norm(kv[:rank]), rope(kv[rank:]), queries[token, h] = .., factor * rope(q[token, h, nope_dim:]), 0
//
// kv: fp32 [T, rank + rope_dim], rows kv_pitch apart; q: fp16 [T, heads * (nope_dim + rope_dim)]; cache and scales: see
// latent.cu; queries: fp16 [T, heads, depth], of which columns from rank on are written. norm_weight: fp32, padded with
// zeros to weight_pitch. `original` > 0: queries grow with their position p, by the factor 1 + beta * ln(1 + p /
// original), which is written to factors, fp32 [T]. Part 0 of a token is its row, part 1 + j HEADS heads of its
// queries. Tokens behind the last sequence are left out.
#pragma once
#include "attention/int8_cache.cuh"
#include "attention/place.cuh"
#include "constants/attention.cuh"
#include "constants/latent_rows.cuh"

namespace bminf {

// The element of a row as it is stored.
__device__ __forceinline__ void store_element(__half* place, float x, float) { *place = __float2half_rn(x); }
__device__ __forceinline__ void store_element(int8* place, float x, float scale) { *place = head_code(x, scale); }

// What the preparation needs, as the kernels take it.
template <class CACHE>
struct LatentRowsParams {
    const float* kv;
    long long kv_pitch;
    const float* norm_weight;
    int weight_pitch;
    float eps;
    const float* frequencies;
    float rope_scale;
    const __half* q;
    long long q_pitch;
    int heads, nope_dim, rope_dim, rank, depth;
    float beta;
    int original;
    const int *cu_seqlens, *context_lens, *block_tables;
    int table_pitch, sequences;
    CACHE* cache;
    __half *scales, *queries;
    float* factors;
};

template <int THREADS>
struct LatentRowsScratch {
    RowScratch<THREADS> row;
    float key[MAX_KEY], cosines[MAX_KEY / 2], sines[MAX_KEY / 2];
};

// A part of the token number `index` of the step. It is made before the kernel waits for its input, and finds what does
// not depend on that: the token's place, the angles of its rotation, and the norm's weight.
template <int THREADS, class CACHE>
struct LatentRowPart {
    using Norm = LoadedNorm<1, false, NormParams<WholeVectors<THREADS>>>;
    const LatentRowsParams<CACHE>& p;
    LatentRowsScratch<THREADS>& shared;
    const int part;
    Place at;
    bool is_there;
    int block = 0;
    Norm norm;

    __device__ __forceinline__
    LatentRowPart(const LatentRowsParams<CACHE>& p, int index, int part, LatentRowsScratch<THREADS>& shared)
        : p(p),
          shared(shared),
          part(part),
          norm({p.norm_weight, nullptr, p.eps, p.rank, p.weight_pitch}, 1.0 / p.rank) {
        at = find_place(p.cu_seqlens, p.context_lens, p.sequences, index);
        is_there = at.token < p.cu_seqlens[p.sequences] && at.position / BLOCK_SIZE < p.table_pitch;
        if (!is_there) return;
        if (part == 0)
            block = ld_global(
                p.block_tables + static_cast<long long>(at.sequence) * p.table_pitch + at.position / BLOCK_SIZE);
        for (int pair = threadIdx.x; pair < p.rope_dim / 2; pair += THREADS)
            rope_angle(at.position, p.frequencies[pair], p.rope_scale, shared.cosines[pair], shared.sines[pair]);
        __syncthreads();
    }

    // Behind the wait.
    __device__ __forceinline__ void store() {
        if (!is_there) return;
        if (part > 0)
            store_queries();
        else
            store_row();
    }

private:
    __device__ __forceinline__ void store_queries() {
        const int thread = threadIdx.x, half = p.rope_dim / 2;
        float factor = 1.0f;
        if (p.original > 0) {
            const float passed = static_cast<float>(at.position / p.original);
            factor = __fadd_rn(1.0f, __fmul_rn(p.beta, logf(__fadd_rn(1.0f, passed))));
            if (part == 1 && thread == 0) p.factors[at.token] = factor;
        }
        constexpr int EACH = HEADS / (THREADS / WARP);  // heads of a warp
        const int first = (part - 1) * HEADS, end = min(p.heads, first + HEADS), zeros = p.depth - p.rank - p.rope_dim;
        const int own = first + thread / WARP * EACH;
        for (int pair = thread % WARP; pair < half; pair += WARP) {
            __half low[EACH], high[EACH];  // all loads are in flight before the first store
#pragma unroll
            for (int i = 0; i < EACH; ++i) {
                const __half* const x =
                    p.q + at.token * p.q_pitch + min(own + i, end - 1) * (p.nope_dim + p.rope_dim) + p.nope_dim + pair;
                low[i] = x[0], high[i] = x[half];
            }
#pragma unroll
            for (int i = 0; i < EACH; ++i) {
                if (own + i >= end) break;
                float a = __half2float(low[i]), b = __half2float(high[i]);
                rotate_pair(a, b, shared.cosines[pair], shared.sines[pair]);
                __half* const out =
                    p.queries + (static_cast<long long>(at.token) * p.heads + own + i) * p.depth + p.rank + pair;
                out[0] = __float2half_rn(__fmul_rn(a, factor)), out[half] = __float2half_rn(__fmul_rn(b, factor));
            }
        }
#pragma unroll 1
        for (int i = thread; i < (end - first) * zeros; i += THREADS)
            p.queries
                [(static_cast<long long>(at.token) * p.heads + first + i / zeros) * p.depth + p.rank + p.rope_dim +
                 i % zeros] = __float2half_rn(0.0f);
    }

    __device__ __forceinline__ void store_row() {
        const int thread = threadIdx.x, half = p.rope_dim / 2;
        float (&key)[MAX_KEY] = shared.key;
        const float* const row = p.kv + at.token * p.kv_pitch;
        float latent[1][8];
        load_row8(row, thread * 8, p.rank, p.rank, latent[0]);
        for (int pair = thread; pair < half; pair += THREADS) {
            float low = row[p.rank + pair], high = row[p.rank + half + pair];
            rotate_pair(low, high, shared.cosines[pair], shared.sines[pair]);
            key[pair] = rounded(low), key[half + pair] = rounded(high);
        }
        normalise_row<THREADS, false, false>(latent, norm, shared.row);
        __syncthreads();
        const long long place = static_cast<long long>(block) * BLOCK_SIZE + at.position % BLOCK_SIZE;
        float of_latent = 0, of_key = 0;
#pragma unroll
        for (int j = 0; j < 8; ++j) latent[0][j] = rounded(latent[0][j]);
        if constexpr (IS_INT8<CACHE>) {
#pragma unroll
            for (int j = 0; j < 8; ++j) of_latent = absmax(of_latent, latent[0][j]);
            for (int j = thread; j < p.rope_dim; j += THREADS) of_key = absmax(of_key, key[j]);
            const __half latent_scale = head_scale(threads_absmax<THREADS>(of_latent, shared.row, 0));
            const __half key_scale = head_scale(threads_absmax<THREADS>(of_key, shared.row, 1));
            if (thread == 0) p.scales[2 * place] = latent_scale, p.scales[2 * place + 1] = key_scale;
            of_latent = __half2float(latent_scale), of_key = __half2float(key_scale);
        }
        CACHE* const out = p.cache + place * p.depth;
#pragma unroll
        for (int j = 0; j < 8; ++j)
            if (thread * 8 + j < p.rank) store_element(out + thread * 8 + j, latent[0][j], of_latent);
#pragma unroll 1
        for (int j = thread; j < p.depth - p.rank; j += THREADS)
            store_element(out + p.rank + j, j < p.rope_dim ? key[j] : 0.0f, of_key);
    }
};

}  // namespace bminf
