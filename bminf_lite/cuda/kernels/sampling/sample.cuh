// What the sampling kernels share: the definition's arithmetic, the state of a row, and sums over a block.
#pragma once
#include "common/common.cuh"
#include "constants/sampling.cuh"

using namespace bminf;
typedef unsigned long long u64;

constexpr int EACH = CHUNK / THREADS;  // ids of a thread, a multiple of 4
constexpr int WARPS = THREADS / WARP;
constexpr int PROMPT_FLAG = 1 << 30;
constexpr int WEIGHT_BITS = 40;
constexpr float LOG2_E = 0x1.715476p+0f;
constexpr float EXP2[7] = {0x1.430912p-13f, 0x1.5d87fep-10f, 0x1.3b2ab6p-7f, 0x1.c6b08ep-5f,
                           0x1.ebfbe0p-3f,  0x1.62e430p-1f,  0x1p+0f};
constexpr u64 LAST_KEY = ~0ull;

// What the kernels know of a row.
struct Row {
    u64 cut;                             // the last key that top-k and top-p keep
    u64 total_weight;                    // without top-k: what top-p is a part of
    u64 weight_before, k_weight_before;  // of tokens ranked before the first and before top-k's bucket, and not listed
    unsigned arrival_count, listed;      // blocks that have ended; entries of the list
    float largest, top, log_sum;         // largest penalised and largest given logit, log(sum(exp(given - top)))
    int drawing, cutting;                // whether draw_token and cut_tail have anything to do
    int first, last, k_bucket, k_rank;   // top-p ends in first..last, top-k (-1: off) as listed number k_rank
};
static_assert(sizeof(Row) <= ROW_BYTES, "the host allocates ROW_BYTES for each row");

// What one block, or the whole row, found in best_token.
struct MaxLogSumExp {
    u64 key;
    float top, sum;
};

// The same for every kernel. [B] each but logits [B, pitch], counts [B, vocab] and result [2, B]; counts, tokens and
// context_lens may be null.
struct Arguments {
    const float *logits, *temperature;
    const int* top_k;
    const float *top_p, *min_p, *repetition, *presence, *frequency;
    const u64* seed;
    const int* sequence;
    int *step, *counts, *result, *tokens, *context_lens;
    char* scratch;
    int rows, vocab, pitch, chunks;

    __device__ Row& row() const { return *reinterpret_cast<Row*>(scratch + size_t(blockIdx.y) * ROW_BYTES); }
    __device__ MaxLogSumExp* parts() const {  // [rows, chunks]; draw_token's sums take their place
        return reinterpret_cast<MaxLogSumExp*>(scratch + size_t(rows) * ROW_BYTES) + size_t(blockIdx.y) * chunks;
    }
    __device__ u64* weights() const {  // [rows, BUCKETS]
        return reinterpret_cast<u64*>(scratch + size_t(rows) * (ROW_BYTES + chunks * sizeof(MaxLogSumExp))) +
               size_t(blockIdx.y) * BUCKETS;
    }
    __device__ unsigned* numbers() const {  // [rows, BUCKETS]
        u64* const end = weights() + size_t(rows - blockIdx.y) * BUCKETS;
        return reinterpret_cast<unsigned*>(end) + size_t(blockIdx.y) * BUCKETS;
    }
    __device__ u64* list() const {  // [rows, vocab]
        unsigned* const end = numbers() + size_t(rows - blockIdx.y) * BUCKETS;
        return reinterpret_cast<u64*>(end) + size_t(blockIdx.y) * vocab;
    }
};

// ---- the definition's arithmetic ---------------------------------------------------------------------------------

__device__ __forceinline__ float penalised(float x, int count, float repetition, float presence, float frequency) {
    if (count == 0) return x;
    const float generated = __int2float_rn(count & (PROMPT_FLAG - 1));
    x = x > 0.0f ? __fdiv_rn(x, repetition) : __fmul_rn(x, repetition);
    x = __fsub_rn(x, __fmul_rn(frequency, generated));
    return __fsub_rn(x, generated > 0.0f ? presence : 0.0f);
}

struct TokenWeight {
    u64 weight;
    float log2;  // of the likelihood, relative to the most likely token: not positive, and never falls as x grows
};

__device__ __forceinline__ TokenWeight token_weight(float x, float largest, float temperature) {
    float t = __fmul_rn(__fdiv_rn(__fsub_rn(x, largest), temperature), LOG2_E);
    t = fmaxf(t, -2.0f * WEIGHT_BITS);
    const float n = rintf(t), f = __fsub_rn(t, n);
    float power = EXP2[0];
#pragma unroll
    for (int i = 1; i < 7; ++i) power = __fadd_rn(__fmul_rn(power, f), EXP2[i]);
    const float scale = __int_as_float((__float2int_rn(n) + WEIGHT_BITS + 127) << 23);
    return {static_cast<u64>(__float2ll_rn(__fmul_rn(power, scale))), t};
}

// floor(a * b / 2**32); the bits that fell off are left in `rest`.
__device__ __forceinline__ u64 scaled_down(u64 a, u64 b, unsigned& rest) {
    const u64 low = a * b;
    rest = static_cast<unsigned>(low);
    return __umul64hi(a, b) << 32 | low >> 32;
}

// The weight that top-p keeps at least, of `total`.
__device__ __forceinline__ u64 top_p_bound(float top_p, u64 total) {
    unsigned rest;
    const u64 floor = scaled_down(static_cast<u64>(static_cast<double>(top_p) * 4294967296.0), total, rest);
    return max(1ull, floor + (rest != 0));
}

__device__ __forceinline__ unsigned random_word(u64 seed, int sequence, int step) {
    unsigned c0 = step, c1 = sequence, c2 = 0, c3 = 0, k0 = static_cast<unsigned>(seed), k1 = seed >> 32;
#pragma unroll
    for (int round = 0; round < 10; ++round) {
        const u64 a = 0xD2511F53ull * c0, b = 0xCD9E8D57ull * c2;
        c0 = static_cast<unsigned>(b >> 32) ^ c1 ^ k0;
        c1 = static_cast<unsigned>(b);
        c2 = static_cast<unsigned>(a >> 32) ^ c3 ^ k1;
        c3 = static_cast<unsigned>(a);
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    return c0;
}

// Ascending keys are descending x, of equals ascending ids; a NaN comes first of all. -0 and 0 are equal.
__device__ __forceinline__ u64 rank_key(float x, int id) {
    const unsigned bits = __float_as_uint(__fadd_rn(x, 0.0f));
    const unsigned down = x != x ? 0u : bits >> 31 ? bits : ~(bits | 0x80000000u);
    return static_cast<u64>(down) << 32 | static_cast<unsigned>(id);
}

__device__ __forceinline__ float value_of(u64 key) {
    const unsigned down = key >> 32;
    return __uint_as_float(down >> 31 ? down : ~down & 0x7fffffffu);
}

// ---- rows, blocks and chunks -------------------------------------------------------------------------------------

// A thread's EACH ids from `first` on: the logits as given (-inf past the last) and with penalties.
struct ThreadLogits {
    float given[EACH], x[EACH];
};

__device__ __forceinline__ ThreadLogits load_logits(const Arguments& a, int first) {
    ThreadLogits own;
    const float* logits = a.logits + size_t(blockIdx.y) * a.pitch + first;
#pragma unroll
    for (int i = 0; i < EACH; i += 4) {
        float4 v = make_float4(-INF_F, -INF_F, -INF_F, -INF_F);
        if (first + i < a.vocab) v = *reinterpret_cast<const float4*>(logits + i);
        const float loaded[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (int j = 0; j < 4; ++j) own.x[i + j] = own.given[i + j] = first + i + j < a.vocab ? loaded[j] : -INF_F;
    }
    if (a.counts) {
        const float repetition = a.repetition[blockIdx.y];
        const float presence = a.presence[blockIdx.y], frequency = a.frequency[blockIdx.y];
        const int* counts = a.counts + size_t(blockIdx.y) * a.vocab;
#pragma unroll
        for (int i = 0; i < EACH; ++i)
            if (first + i < a.vocab)
                own.x[i] = penalised(own.given[i], counts[first + i], repetition, presence, frequency);
    }
    return own;
}

// Whether this block is the last of its row to get here: then it sees what the others wrote before.
__device__ __forceinline__ bool is_last_block(const Arguments& a) {
    __shared__ bool last;
    __syncthreads();
    if (threadIdx.x == 0) {
        Row& row = a.row();
        __threadfence();
        last = atomicAdd(&row.arrival_count, 1u) + 1 == gridDim.x;
        if (last) row.arrival_count = 0;
        __threadfence();
    }
    __syncthreads();
    return last;
}

struct Sum {
    u64 before, total;  // of the threads before this one, and of all
};

__device__ __forceinline__ Sum sum_over_block(u64 x) {
    __shared__ u64 of_warp[WARPS];
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    u64 through = x;
#pragma unroll
    for (int d = 1; d < WARP; d *= 2) {
        const u64 other = __shfl_up_sync(FULL, through, d);
        if (lane >= d) through += other;
    }
    __syncthreads();
    if (lane == WARP - 1) of_warp[warp] = through;
    __syncthreads();
    Sum sum = {through - x, 0};
#pragma unroll
    for (int i = 0; i < WARPS; ++i) {
        if (i < warp) sum.before += of_warp[i];
        sum.total += of_warp[i];
    }
    return sum;
}

// Everything that follows from a row's choice; token -1 where there is none. By one thread, which
// has nothing to wait for: an atomic whose result is not used is only sent.
__device__ __forceinline__ void finish_row(const Arguments& a, int token, float top, float log_sum) {
    const int row = blockIdx.y;
    float logprob = NAN_F;
    if (token >= 0) {
        logprob = a.logits[size_t(row) * a.pitch + token] - top - log_sum;
        if (a.counts) atomicAdd(&a.counts[size_t(row) * a.vocab + token], 1);
    }
    a.result[row] = token;
    a.result[a.rows + row] = __float_as_int(logprob);
    atomicAdd(&a.step[row], 1);
    if (a.tokens) a.tokens[row] = max(token, 0);
    if (a.context_lens) atomicAdd(&a.context_lens[row], 1);
}
