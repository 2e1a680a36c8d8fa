// What the sampling kernels share: the arithmetic of the definition (bminf_lite/backend/sampling.py), the state of a
// sequence, and sums over a block.
#pragma once
#include "common/common.cuh"
#include "constants/sampling.cuh"

using namespace bminf;
typedef unsigned long long u64;

constexpr int EACH = CHUNK / THREADS;  // token ids of a thread, a multiple of 4
constexpr int WARPS = THREADS / WARP;
constexpr int PROMPT_FLAG = 1 << 30;
constexpr int NULL_ROW = 0;
constexpr int MAX_LOGPROBS = 20;
constexpr int MAX_LOGIT_BIAS = 300;
constexpr int MAX_END_TOKENS = 15;
constexpr int WEIGHT_BITS = 40;
constexpr float LOG2_E = 0x1.715476p+0f;
constexpr float EXP2[7] = {0x1.430912p-13f, 0x1.5d87fep-10f, 0x1.3b2ab6p-7f, 0x1.c6b08ep-5f,
                           0x1.ebfbe0p-3f,  0x1.62e430p-1f,  0x1p+0f};
constexpr u64 LAST_KEY = ~0ull;

// A sequence's row of SamplerState.table.
struct SamplerRow {
    u64 seed;
    float temperature;
    int top_k;
    float top_p;
    float min_p;
    float repetition_penalty;
    float presence_penalty;
    float frequency_penalty;
    int sequence;
    int step;
    int last_token;
    int min_tokens;
    int num_logprobs;
    int num_bias;
    int count_row;
    int mask_row;
    int end_tokens[MAX_END_TOKENS];
};
static_assert(sizeof(SamplerRow) == 128, "one cache line");

// The state of a sequence between the kernels. top-p ends in one of the buckets first to last; top-k ends in k_bucket
// (-1: no top-k) with the listed token of rank k_rank.
struct Row {
    u64 cut;                             // the rank key of the last token that top-k and top-p keep
    u64 total_weight;                    // of all tokens
    u64 weight_before, k_weight_before;  // of unlisted tokens before `first` and before k_bucket
    unsigned arrival_count, listed;      // blocks that have arrived; entries of list()
    float largest, top, log_sum;         // largest logit after step 1 and as given, log(sum(exp(given - top)))
    int drawing, cutting;                // whether draw_token and cut_tail have work
    int first, last, k_bucket, k_rank;   // buckets, see below
    float temperature, top_p, min_p;     // of the sequence, here to be read at once
    int top_k;
};
static_assert(sizeof(Row) <= ROW_BYTES, "the host allocates ROW_BYTES for each sequence");

// The result of best_token for a part or a row: the rank key of the best token, the largest logit as given, and
// sum(exp(given - top)).
struct MaxLogSumExp {
    u64 key;
    float top, sum;
};

// The parameters of all kernels. logits: [B, pitch]; rows: [B], each sequence's row of table; offsets and drafts: [B],
// null in a step without drafts; table, bias, counts and masks as in SamplerState; result: [2 or 2 + 2 * MAX_LOGPROBS,
// result_pitch], as Choice.packed says; tokens: [B], what token_logprobs scores. Pointers that nothing needs may be
// null.
struct Arguments {
    const float* logits;
    const int *rows, *offsets, *drafts;
    SamplerRow* table;
    const int* bias;
    int* counts;
    const unsigned* masks;
    int* result;
    const int* tokens;
    char* scratch;
    u64 scratch_pitch;
    int vocab, pitch, chunks, result_pitch;

    // The row of table of this block's sequence.
    __device__ int table_row() const { return rows[blockIdx.y]; }
    // How many drafts this block's row follows.
    // It is read where it is used, which takes fewer registers.
    __device__ int offset() const { return offsets ? static_cast<const volatile int*>(offsets)[blockIdx.y] : 0; }
    // The sequence's part of the scratch, scratch_pitch bytes from that of the next: in this order
    __device__ char* own_scratch() const { return scratch + blockIdx.y * scratch_pitch; }
    __device__ Row& row() const { return *reinterpret_cast<Row*>(own_scratch()); }
    __device__ int num_parts() const { return chunks * (CHUNK / PART); }
    __device__ MaxLogSumExp* parts() const {  // [num_parts()]; draw_token overlays its sums
        return reinterpret_cast<MaxLogSumExp*>(own_scratch() + ROW_BYTES);
    }
    __device__ u64* weights() const { return reinterpret_cast<u64*>(parts() + num_parts()); }          // [BUCKETS]
    __device__ unsigned* numbers() const { return reinterpret_cast<unsigned*>(weights() + BUCKETS); }  // [BUCKETS]
    __device__ u64* list() const {  // [chunks * CHUNK]; top_logprobs overlays [chunks, WARP]
        return reinterpret_cast<u64*>(numbers() + BUCKETS);
    }
};

// ---- the definition's arithmetic ---------------------------------------------------------------------------------

// A logit with the repetition, presence and frequency penalties. count: how often the token was generated, plus
// PROMPT_FLAG if it is in the prompt.
__device__ __forceinline__ float penalised(float x, int count, float repetition, float presence, float frequency) {
    if (count == 0) return x;
    const float generated = __int2float_rn(count & (PROMPT_FLAG - 1));
    x = x > 0.0f ? __fdiv_rn(x, repetition) : __fmul_rn(x, repetition);
    x = __fsub_rn(x, __fmul_rn(frequency, generated));
    return __fsub_rn(x, generated > 0.0f ? presence : 0.0f);
}

// weight: exp((x - largest) / temperature) in units of 2^-WEIGHT_BITS, an integer.
struct TokenWeight {
    u64 weight;
    float log2;  // log2 of it, before rounding: not positive, and monotonic in x
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

// floor(a * b / 2^32); `rest` gets the low 32 bits of the product.
__device__ __forceinline__ u64 scaled_down(u64 a, u64 b, unsigned& rest) {
    const u64 low = a * b;
    rest = static_cast<unsigned>(low);
    return __umul64hi(a, b) << 32 | low >> 32;
}

// The least weight that top-p keeps of `total`: ceil(top_p * total), at least 1.
__device__ __forceinline__ u64 top_p_bound(float top_p, u64 total) {
    unsigned rest;
    const u64 floor = scaled_down(static_cast<u64>(static_cast<double>(top_p) * 4294967296.0), total, rest);
    return max(1ull, floor + (rest != 0));
}

// The first word of Philox4x32-10 with key `seed` and counter (step, sequence, 0, 0).
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

// A key by which tokens are ranked: ascending keys are descending logits, and ascending ids among equal logits. NaN is
// ranked first; -0 equals 0.
__device__ __forceinline__ u64 rank_key(float x, int id) {
    const unsigned bits = __float_as_uint(__fadd_rn(x, 0.0f));
    const unsigned down = x != x ? 0u : bits >> 31 ? bits : ~(bits | 0x80000000u);
    return static_cast<u64>(down) << 32 | static_cast<unsigned>(id);
}

// The logit in a rank key.
__device__ __forceinline__ float value_of(u64 key) {
    const unsigned down = key >> 32;
    return __uint_as_float(down >> 31 ? down : ~down & 0x7fffffffu);
}

// ---- rows, blocks and chunks -------------------------------------------------------------------------------------

// The logits of a thread's EACH ids: as given and after step 1 (x); -inf beyond the vocabulary.
struct ThreadLogits {
    float given[EACH], x[EACH];
};

// -inf for a forbidden token; a logit that makes the row unusable stays.
__device__ __forceinline__ float forbidden(float x) { return x < INF_F ? -INF_F : x; }

// How often each of the EACH ids from `first` on is among the drafts that this block's row follows, a byte for each.
__device__ __forceinline__ unsigned drafts_before(const Arguments& a, int first) {
    unsigned drafted = 0;
#pragma unroll 1
    for (int row = blockIdx.y, end = row - a.offset(); row > end; --row) {
        const unsigned place = a.drafts[row] - first;
        if (place < EACH) drafted += 1u << 8 * place;
    }
    return drafted;
}

// Step 1 of the definition for the ids from `first` on.
__device__ __forceinline__ void adjust(const Arguments& a, int table_row, int first, float (&x)[EACH]) {
    const SamplerRow& row = a.table[table_row];
    static_assert(EACH <= 4, "drafted has 4 bytes");
    if (row.num_bias > 0) {
        const int* const ids = a.bias + size_t(table_row) * 2 * MAX_LOGIT_BIAS;
        int entry = 0, end = row.num_bias;  // of the first id that is not before `first`
        while (entry < end) {
            const int middle = (entry + end) / 2;
            if (ids[middle] < first)
                entry = middle + 1;
            else
                end = middle;
        }
        for (; entry < row.num_bias && ids[entry] < first + EACH; ++entry) {
            const float value = __int_as_float(ids[MAX_LOGIT_BIAS + entry]);
#pragma unroll
            for (int i = 0; i < EACH; ++i)
                if (ids[entry] == first + i) x[i] = __fadd_rn(x[i], value);
        }
    }
    if (row.count_row >= 0) {
        const int* const counts = a.counts + size_t(row.count_row) * a.vocab;
        unsigned drafted = 0;  // how often each id is a draft before this row, a byte for each
        if (a.offsets) drafted = drafts_before(a, first);
#pragma unroll
        for (int i = 0; i < EACH; ++i)
            if (first + i < a.vocab)
                x[i] = penalised(
                    x[i], counts[first + i] + (drafted >> 8 * i & 255), row.repetition_penalty, row.presence_penalty,
                    row.frequency_penalty);
    }
    if (row.mask_row >= 0 && first < a.vocab) {
        const unsigned word =
            a.masks[unsigned(row.mask_row + a.offset()) * ((a.vocab + 31u) / 32) + first / 32] >> first % 32;
#pragma unroll
        for (int i = 0; i < EACH; ++i)
            if (!(word >> i & 1)) x[i] = forbidden(x[i]);
    }
    if (row.step + a.offset() < row.min_tokens)
#pragma unroll 1
        for (int entry = 0; entry < MAX_END_TOKENS; ++entry)
#pragma unroll
            for (int i = 0; i < EACH; ++i)
                if (row.end_tokens[entry] == first + i) x[i] = forbidden(x[i]);
}

// Loads the logits of the EACH ids from `first` on, as given.
__device__ __forceinline__ void load_given(const Arguments& a, int first, float (&given)[EACH]) {
    const float* logits = a.logits + size_t(blockIdx.y) * a.pitch + first;
#pragma unroll
    for (int i = 0; i < EACH; i += 4) {
        float4 v = make_float4(-INF_F, -INF_F, -INF_F, -INF_F);
        if (first + i < a.vocab) v = *reinterpret_cast<const float4*>(logits + i);
        const float loaded[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (int j = 0; j < 4; ++j) given[i + j] = first + i + j < a.vocab ? loaded[j] : -INF_F;
    }
}

// Loads the logits of the ids from `first` on; ADJUSTED: step 1 may change them.
template <bool ADJUSTED>
__device__ __forceinline__ ThreadLogits load_logits(const Arguments& a, int table_row, int first) {
    ThreadLogits own;
    load_given(a, first, own.given);
#pragma unroll
    for (int i = 0; i < EACH; ++i) own.x[i] = own.given[i];
    if (ADJUSTED) adjust(a, table_row, first, own.x);
    return own;
}

// Whether this block is the last of its row to arrive here. The last one sees what the others wrote before.
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
    u64 before, total;  // over the threads before this one, and over all
};

// Exclusive prefix sum and total over the threads of a block.
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

// log_sum is log(sum(exp(logit - top))). Rounded as written wherever it is inlined.
__device__ __forceinline__ float log_probability(float logit, float top, float log_sum) {
    return __fsub_rn(__fsub_rn(logit, top), log_sum);
}

// Writes the choice of a sequence, -1 if there is none.
__device__ __forceinline__ void write_choice(const Arguments& a, int token, float logprob) {
    a.result[blockIdx.y] = token;
    a.result[a.result_pitch + blockIdx.y] = __float_as_int(logprob);
}

// Writes the choice of a row, and in a step without drafts updates the sequence's state: counts, step, last_token.
// Called by one thread. Atomics whose result is unused do not stall it.
__device__ __forceinline__ void finish_row(const Arguments& a, int table_row, int token, float top, float log_sum) {
    SamplerRow& row = a.table[table_row];
    float logprob = NAN_F;
    if (token >= 0) logprob = log_probability(a.logits[size_t(blockIdx.y) * a.pitch + token], top, log_sum);
    write_choice(a, token, logprob);
    if (a.offsets) return;  // commit_drafts updates it
    if (token >= 0 && a.counts && row.count_row >= 0) atomicAdd(&a.counts[size_t(row.count_row) * a.vocab + token], 1);
    atomicAdd(&row.step, 1);
    row.last_token = max(token, 0);
}
