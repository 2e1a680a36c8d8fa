// Sampling: chooses the next token of each row of fp32 logits, the same token as bminf_lite/backend/sampling.py, which
// defines it. The definition rounds every fp32 operation on its own, hence the intrinsics, which the compiler does not
// fuse.
//
// Logits are [B, pitch]; see Arguments. The grid of each kernel is (chunks of CHUNK ids, B), in best_token and
// token_logprobs (WARPS parts of PART ids, B). The last block of a row to arrive does what needs the whole row, so that
// no block waits for another. Weights are integers, so their sums do not depend on the order of atomics. The sums of
// log-probabilities are floats: they are taken over a thread's ids, a warp, and the parts of a row, always in the same
// order, so that they depend on the row alone.
//
//   best_token    argmax and log-sum-exp; chooses the token of rows with temperature 0
//   histogram     weight and number of tokens by bucket of likelihood: finds the buckets in which top-k and top-p end
//   cut_tail      lists the tokens of these buckets and finds the exact token with which top-k and top-p end
//   draw_token    sums the weights of each chunk, draws a chunk, then a token in it
//   top_logprobs  the most likely tokens and their log-probabilities
//
// The first four have an instantiation with ADJUSTED for steps in which biases, penalties or masks change logits.
//
//   token_logprobs      log-probabilities of given tokens and of the most likely ones
//   insert_last_tokens  the tokens that a step chose, as the input of the next
//   write_step          both in one: the integers of a step from host memory, with the tokens that the last step chose
//   guess               what a draft model guesses (bminf_lite/backend/guesses.py), as the input of the next guess
//   insert_guesses      guesses, as the drafts of a step
//   insert_positions    positions that follow from the number of tokens that a sequence has got
//   commit_drafts       updates the sequences of a step that checks drafts by what they get
//
// The scratch memory must be zero before the first launch; the counters in it are zero again after each.
#include "sampling/sample.cuh"

// ---- the most likely token ---------------------------------------------------------------------------------------

// exp(from - to), the factor for a sum relative to `from`. 1 for equal arguments, infinities included.
__device__ __forceinline__ float rescale(float from, float to) { return from == to ? 1.0f : __expf(from - to); }

__device__ __forceinline__ MaxLogSumExp merge(const MaxLogSumExp& a, const MaxLogSumExp& b) {
    const float top = fmaxf(a.top, b.top);
    // Rounded as written, so that every instantiation and every compiler gives the same bits.
    const float sum = __fadd_rn(__fmul_rn(a.sum, rescale(a.top, top)), __fmul_rn(b.sum, rescale(b.top, top)));
    return {min(a.key, b.key), top, sum};
}

template <int LANES>
__device__ __forceinline__ MaxLogSumExp merge_lanes(MaxLogSumExp best) {
#pragma unroll
    for (int d = LANES / 2; d; d /= 2) {
        const MaxLogSumExp other = {
            __shfl_xor_sync(FULL, best.key, d), __shfl_xor_sync(FULL, best.top, d), __shfl_xor_sync(FULL, best.sum, d)};
        best = merge(best, other);
    }
    return best;
}

// Merges over a block in a fixed order; thread 0 has the result.
__device__ __forceinline__ MaxLogSumExp merge_block(MaxLogSumExp best) {
    __shared__ MaxLogSumExp of_warp[WARPS];
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    best = merge_lanes<WARP>(best);
    if (lane == 0) of_warp[warp] = best;
    __syncthreads();
    if (warp == 0) best = merge_lanes<WARPS>(of_warp[lane % WARPS]);
    return best;
}

__device__ __forceinline__ float largest_of_warp(float x) {
#pragma unroll
    for (int d = WARP / 2; d; d /= 2) x = fmaxf(x, __shfl_xor_sync(FULL, x, d));
    return x;
}

// The logits of a thread's ids of a part, which are GROUPS groups of EACH neighbours; -inf beyond the vocabulary.
struct PartLogits {
    static constexpr int GROUPS = PART / WARP / EACH;
    int first;  // id; that of the next group is WARP * EACH higher
    float given[GROUPS][EACH];
};

__device__ __forceinline__ PartLogits load_part(const Arguments& a) {
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    PartLogits own;
    own.first = (blockIdx.x * WARPS + warp) * PART + lane * EACH;
#pragma unroll
    for (int g = 0; g < PartLogits::GROUPS; ++g) load_given(a, own.first + g * WARP * EACH, own.given[g]);
    return own;
}

// Stores the best token and the log-sum-exp of each warp's part, for the block that arrives last. The largest logit of
// the part is found before any exponential is taken, so a logit takes one, and lanes add their sums as they are. They
// are sums of exp(inverse_heat * (given - top)) where `top` is finite.
template <bool ADJUSTED>
__device__ __forceinline__ void store_parts(
    const Arguments& a, const PartLogits& own, int table_row, float inverse_heat = 1.0f) {
    const int part = blockIdx.x * WARPS + threadIdx.x / WARP;
    if (part >= a.num_parts()) return;
    float largest = -INF_F, top = -INF_F;
    int id = 0x7fffffff;
    bool is_nan = false;
#pragma unroll
    for (int g = 0; g < PartLogits::GROUPS; ++g) {
        const int first = own.first + g * WARP * EACH;
        float x[EACH];
#pragma unroll
        for (int i = 0; i < EACH; ++i) x[i] = own.given[g][i];
        if (ADJUSTED) adjust(a, table_row, first, x);
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            if (ADJUSTED) top = fmaxf(top, own.given[g][i]);
            is_nan |= x[i] != x[i];
            if (x[i] > largest) largest = x[i], id = first + i;  // the first of equal ones
        }
    }
    const float best = largest_of_warp(largest);
    top = ADJUSTED ? largest_of_warp(top) : best;
    id = largest == best ? id : 0x7fffffff;
#pragma unroll
    for (int d = WARP / 2; d; d /= 2) id = min(id, __shfl_xor_sync(FULL, id, d));

    float sum = 0.0f;
    if (fabsf(top) < INF_F) {
#pragma unroll
        for (int g = 0; g < PartLogits::GROUPS; ++g)
#pragma unroll
            for (int i = 0; i < EACH; ++i) sum = __fadd_rn(sum, __expf((own.given[g][i] - top) * inverse_heat));
    } else {
#pragma unroll
        for (int g = 0; g < PartLogits::GROUPS; ++g)
#pragma unroll
            for (int i = 0; i < EACH; ++i)
                if (own.first + g * WARP * EACH + i < a.vocab) sum = __fadd_rn(sum, rescale(own.given[g][i], top));
    }
#pragma unroll
    for (int d = WARP / 2; d; d /= 2) sum = __fadd_rn(sum, __shfl_xor_sync(FULL, sum, d));
    const bool any_nan = __any_sync(FULL, is_nan);
    if (threadIdx.x % WARP == 0) a.parts()[part] = {any_nan ? 0 : rank_key(best, id), top, sum};
}

// Those of the whole row. Called by the block that arrives last; thread 0 has the result.
__device__ __forceinline__ MaxLogSumExp merged_parts(const Arguments& a) {
    MaxLogSumExp best = {LAST_KEY, -INF_F, 0.0f};
    for (int i = threadIdx.x; i < a.num_parts(); i += THREADS) best = merge(best, a.parts()[i]);
    return merge_block(best);
}

// Blocks per SM, one less where logits are adjusted. From 10.0 on, the code for more would spill.
constexpr int PART_BLOCKS = __CUDA_ARCH__ >= 1000 ? 2 : 3;

template <bool ADJUSTED>
__global__ void __launch_bounds__(THREADS, PART_BLOCKS - ADJUSTED) best_token(const Arguments a) {
    wait_on_dependent_grids();
    launch_dependent_grids();
    const int table_row = a.table_row();
    const PartLogits own = load_part(a);
    if (table_row == NULL_ROW) {
        if (blockIdx.x == 0 && threadIdx.x == 0) {
            a.row().drawing = a.row().cutting = false;
            write_choice(a, -1, NAN_F);
        }
        return;
    }
    store_parts<ADJUSTED>(a, own, table_row);
    if (!is_last_block(a)) return;

    const SamplerRow& parameters = a.table[table_row];  // read here, while the parts are on their way
    const float temperature = parameters.temperature, top_p = parameters.top_p, min_p = parameters.min_p;
    const int top_k = parameters.top_k;
    const MaxLogSumExp best = merged_parts(a);
    if (threadIdx.x != 0) return;
    Row& row = a.row();
    const float largest = value_of(best.key), log_sum = logf(best.sum);
    const bool valid = fabsf(largest) < INF_F;
    const bool drawing = valid && temperature > 0.0f;
    row.cut = LAST_KEY;
    row.largest = largest, row.top = best.top, row.log_sum = log_sum;
    row.drawing = drawing, row.cutting = false;
    row.temperature = temperature, row.top_p = top_p, row.min_p = min_p, row.top_k = top_k;
    if (!drawing) finish_row(a, table_row, valid ? static_cast<int>(best.key) : -1, best.top, log_sum);
}

// Each row's most likely token, its log-probability, and that of the row's given token, NaN for -1; uses logits,
// tokens, result [3, batch] and the scratch.
__global__ void __launch_bounds__(THREADS, PART_BLOCKS) token_logprobs(const Arguments a) {
    wait_on_dependent_grids();
    launch_dependent_grids();
    store_parts<false>(a, load_part(a), NULL_ROW);
    if (!is_last_block(a)) return;
    const MaxLogSumExp best = merged_parts(a);
    if (threadIdx.x != 0) return;
    const int token = a.tokens[blockIdx.y];
    const float log_sum = logf(best.sum), largest = value_of(best.key);
    const bool valid = fabsf(largest) < INF_F;
    write_choice(
        a, valid ? static_cast<int>(best.key) : -1, valid ? log_probability(largest, best.top, log_sum) : NAN_F);
    const float logit = token < 0 ? NAN_F : a.logits[size_t(blockIdx.y) * a.pitch + token];
    a.result[2 * a.result_pitch + blockIdx.y] = __float_as_int(log_probability(logit, best.top, log_sum));
}

// exp(exponent), not more than 1 or the sum of such numbers with `factor`, in units of 2^-WEIGHT_BITS.
__device__ __forceinline__ u64 guess_weight(float exponent, float factor = 1.0f) {
    return static_cast<u64>(__fmul_rn(__fmul_rn(factor, __expf(exponent)), 0x1p40f));
}

// What a draft model guesses of each row, or what tokens [vocab] has at its place unless it is null; uses logits, rows,
// offsets, table, tokens, result [batch] and the scratch. 0 stands for the guess of a row that has none. The part with
// the drawn position is found by the sums of all parts, and the token in it by its own logits.
__global__ void __launch_bounds__(THREADS, PART_BLOCKS) guess(const Arguments a) {
    static_assert(PART == THREADS && WEIGHT_BITS == 40, "a thread for each logit of a part");
    __shared__ float largest;
    __shared__ int drawn_part;
    __shared__ u64 drawn_position;
    wait_on_dependent_grids();
    launch_dependent_grids();
    const SamplerRow& sequence = a.table[a.table_row()];
    const float heat = sequence.temperature * GUESS_HEAT, inverse_heat = heat > 0.0f ? 1.0f / heat : 1.0f;
    store_parts<false>(a, load_part(a), NULL_ROW, inverse_heat);
    if (!is_last_block(a)) return;

    const auto write = [&](int token) { a.result[blockIdx.y] = a.tokens ? a.tokens[token] : token; };
    const MaxLogSumExp best = merged_parts(a);
    if (threadIdx.x == 0) {
        largest = value_of(best.key), drawn_part = -1;
        write(fabsf(largest) < INF_F ? static_cast<int>(best.key) : 0);
    }
    __syncthreads();
    if (!(heat > 0.0f && fabsf(largest) < INF_F)) return;

    const int share = (a.num_parts() + THREADS - 1) / THREADS;
    const int begin = threadIdx.x * share, end = min(begin + share, a.num_parts());
    const auto part_weight = [&](int part) {
        const MaxLogSumExp& found = a.parts()[part];
        return found.top > -INF_F ? guess_weight((found.top - largest) * inverse_heat, found.sum) : 0;
    };
    u64 weight = 0;
    for (int i = begin; i < end; ++i) weight += part_weight(i);
    const Sum over_row = sum_over_block(weight);
    unsigned rest;
    const unsigned word = random_word(sequence.seed, sequence.sequence, sequence.step + a.offset());
    u64 position = scaled_down(word, over_row.total, rest);
    if (over_row.before <= position && position < over_row.before + weight) {
        int part = begin;
        for (position -= over_row.before; position >= part_weight(part); ++part) position -= part_weight(part);
        drawn_part = part, drawn_position = position;
    }
    __syncthreads();
    if (drawn_part < 0) return;  // no weight is a number

    const int id = drawn_part * PART + threadIdx.x;
    const float logit = id < a.vocab ? a.logits[size_t(blockIdx.y) * a.pitch + id] : -INF_F;
    const u64 own = guess_weight((logit - largest) * inverse_heat);
    const Sum over_part = sum_over_block(own);
    position = min(drawn_position, over_part.total - 1);  // the sum of the part was rounded
    if (over_part.before <= position && position < over_part.before + own) write(id);
}

// Three kernels change the integers of a step in place. They let the next one start before they have written, so only
// kernels may follow that wait before they let their own successor start: others of these three, then `embed`
// (rowwise/rows.cu). The kernels behind `embed` read tokens and positions before their wait.

// Replaces -1 - i among drafts [count] by guesses[i], and the token at the same place too; copy [count] gets the
// drafts.
__global__ void __launch_bounds__(THREADS)
    insert_guesses(int* tokens, int* drafts, const int* guesses, int* copy, int count) {
    wait_on_dependent_grids();
    launch_dependent_grids();
    const int i = blockIdx.x * THREADS + threadIdx.x;
    if (i >= count) return;
    int draft = drafts[i];
    if (draft < 0) tokens[i] = drafts[i] = draft = guesses[~draft];
    copy[i] = draft;
}

// Replaces -1 - p among positions [count] by p and the tokens that the sequence has got; rows [batch] name it, again
// and again.
__global__ void __launch_bounds__(THREADS)
    insert_positions(int* positions, const int* rows, const SamplerRow* table, int batch, int count) {
    wait_on_dependent_grids();
    launch_dependent_grids();
    const int i = blockIdx.x * THREADS + threadIdx.x;
    if (i < count && positions[i] < 0) positions[i] = ~positions[i] + table[rows[i % batch]].step;
}

// Replaces -1 among tokens [count] by the newest token of its sequence.
__global__ void __launch_bounds__(THREADS)
    insert_last_tokens(int* tokens, const int* rows, const SamplerRow* table, int count) {
    wait_on_dependent_grids();
    launch_dependent_grids();
    const int i = blockIdx.x * THREADS + threadIdx.x;
    if (i < count && tokens[i] < 0) tokens[i] = table[rows[i]].last_token;
}

// to[i] = from[i] for i < count. For i < num_tokens a -1 is replaced by the newest token of the sequence in row
// from[rows_offset + i]. No kernel changes `from`, memory of the host, so it is read before the wait. The next kernel
// does not start early: those behind it may read `to` before they wait.
__global__ void __launch_bounds__(THREADS)
    write_step(const int* from, int* to, int count, int num_tokens, int rows_offset, const SamplerRow* table) {
    const int i = blockIdx.x * THREADS + threadIdx.x;
    int word = i < count ? *static_cast<const volatile int*>(from + i) : 0;
    const bool is_unknown = i < num_tokens && word < 0;
    const int row = is_unknown ? *static_cast<const volatile int*>(from + rows_offset + i) : NULL_ROW;
    wait_on_dependent_grids();
    if (is_unknown) word = table[row].last_token;
    if (i < count) to[i] = word;
}

// Updates the sequences of a step of `batch` rows that checks drafts: a thread for each row without drafts before it. A
// sequence gets the choices of its rows up to the first that is not the next row's draft.
__global__ void __launch_bounds__(THREADS) commit_drafts(
    const int* choice, const int* rows, const int* offsets, const int* drafts, SamplerRow* table, int* counts,
    int vocab, int batch) {
    wait_on_dependent_grids();
    launch_dependent_grids();
    const int first = blockIdx.x * THREADS + threadIdx.x;
    if (first >= batch || offsets[first] != 0 || rows[first] == NULL_ROW) return;
    SamplerRow& row = table[rows[first]];
    int end = first, token;
    do {
        token = choice[end++];
        if (token >= 0 && counts && row.count_row >= 0) ++counts[size_t(row.count_row) * vocab + token];
    } while (end < batch && offsets[end] != 0 && token == drafts[end]);
    row.step += end - first;
    row.last_token = max(token, 0);
}

// ---- in which buckets top-k and top-p end ------------------------------------------------------------------------

// The number and the 64-bit weight of tokens by bin. Weights are two 32-bit words, because 64-bit atomics on shared
// memory are compare-and-swap loops.
template <int BINS>
struct Histogram {
    unsigned number[BINS], low[BINS], high[BINS];

    // Called by the whole block; the caller synchronizes.
    __device__ void clear() {
        for (int i = threadIdx.x; i < BINS; i += THREADS) number[i] = low[i] = high[i] = 0;
    }
    __device__ u64 weight(int bin) const { return static_cast<u64>(high[bin]) << 32 | low[bin]; }
    __device__ void add_one(int bin, unsigned n, u64 w) {
        atomicAdd(&number[bin], n);
        const unsigned word = static_cast<unsigned>(w), carry = atomicAdd(&low[bin], word) > ~word;
        const unsigned rest = static_cast<unsigned>(w >> 32) + carry;
        if (rest) atomicAdd(&high[bin], rest);
    }
    // Called by a whole warp, with a token in each lane; bin -1 adds nothing. If all lanes have the same bin, which is
    // frequent with equal logits, the warp adds once instead of 32 times.
    __device__ void add(int bin, u64 w) {
        int same;
        __match_all_sync(FULL, bin, &same);
        if (!same) {
            if (bin >= 0) add_one(bin, 1, w);
            return;
        }
        if (bin < 0) return;
#pragma unroll
        for (int d = WARP / 2; d; d /= 2) w += __shfl_xor_sync(FULL, w, d);
        if (threadIdx.x % WARP == 0) add_one(bin, WARP, w);
    }
};

// The bucket of a token by its likelihood, the most likely first. Tokens whose weight rounds to 0 have no bucket (-1):
// they are never drawn and rank after all others.
__device__ __forceinline__ int bucket_of(const TokenWeight& w) {
    return w.weight ? min(BUCKETS - 1, static_cast<int>(-w.log2 * BUCKETS_PER_OCTAVE)) : -1;
}

// Exclusive prefix sums over the buckets; entry BUCKETS is the total.
struct Totals {
    u64 number[BUCKETS + 1], weight[BUCKETS + 1];
};

// The first bucket b with before[b + 1] >= target, for 1 <= target <= before[BUCKETS]. Called by a whole warp.
__device__ __forceinline__ int first_reaching(const u64* before, u64 target) {
    static_assert(BUCKETS == WARP * WARP, "two steps of a warp");
    const int lane = threadIdx.x % WARP;
    const int coarse = WARP * __popc(__ballot_sync(FULL, before[WARP * (lane + 1)] < target));
    return coarse + __popc(__ballot_sync(FULL, before[coarse + lane + 1] < target));
}

// Finds the buckets whose tokens cut_tail lists, and the weight and number of the tokens before them. Called by a whole
// warp.
__device__ __forceinline__ void plan_cuts(const Arguments& a, const Totals& totals) {
    const u64 tokens = totals.number[BUCKETS], total = totals.weight[BUCKETS];
    const int k = a.row().top_k;
    const float p = a.row().top_p;
    const bool by_k = 0 < k && k < tokens, by_p = p < 1.0f;
    const int k_bucket = by_k ? first_reaching(totals.number, k) : -1;
    // The weight that top-k keeps of its last bucket is not known yet. Its bounds give the first and the last bucket in
    // which top-p can end.
    int first = k_bucket, last = k_bucket;
    if (by_p) {
        first = first_reaching(totals.weight, top_p_bound(p, by_k ? totals.weight[k_bucket] : total));
        last = first_reaching(totals.weight, top_p_bound(p, by_k ? totals.weight[k_bucket + 1] : total));
    }
    if (threadIdx.x != 0) return;
    Row& row = a.row();
    row.cutting = by_k || by_p;
    row.total_weight = total;
    row.first = first, row.last = last, row.k_bucket = k_bucket;
    if (!row.cutting) return;
    row.weight_before = totals.weight[first];
    if (!by_k) return;
    const int gap = min(last + 1, k_bucket);  // no token of the buckets from here to k_bucket is listed
    row.k_rank = k - static_cast<int>(totals.number[k_bucket] - totals.number[gap] + totals.number[first]);
    row.k_weight_before = totals.weight[k_bucket] - totals.weight[gap] + totals.weight[first];
}

template <bool ADJUSTED>
__global__ void __launch_bounds__(THREADS, 3) histogram(const Arguments a) {
    __shared__ Histogram<BUCKETS> bins;
    __shared__ Totals totals;
    wait_on_dependent_grids();
    launch_dependent_grids();
    const Row row = a.row();
    if (!row.drawing || !((0 < row.top_k && row.top_k < a.vocab) || row.top_p < 1.0f)) return;
    const ThreadLogits own = load_logits<ADJUSTED>(a, a.table_row(), blockIdx.x * CHUNK + threadIdx.x * EACH);
    bins.clear();
    __syncthreads();
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        const TokenWeight w = token_weight(own.x[i], row.largest, row.temperature);
        bins.add(bucket_of(w), w.weight);
    }
    __syncthreads();
    u64* const weights = a.weights();
    unsigned* const numbers = a.numbers();
    for (int i = threadIdx.x; i < BUCKETS; i += THREADS)
        if (bins.number[i]) {
            atomicAdd(&weights[i], bins.weight(i));
            atomicAdd(&numbers[i], bins.number[i]);
        }
    if (!is_last_block(a)) return;

    constexpr int SHARE = BUCKETS / THREADS;
    const int begin = threadIdx.x * SHARE;
    u64 number = 0, weight = 0;
    for (int i = begin; i < begin + SHARE; ++i) number += numbers[i], weight += weights[i];
    u64 number_before = sum_over_block(number).before, weight_before = sum_over_block(weight).before;
    if (threadIdx.x == 0) totals.number[0] = totals.weight[0] = 0;
    for (int i = begin; i < begin + SHARE; ++i) {
        totals.number[i + 1] = number_before += numbers[i];
        totals.weight[i + 1] = weight_before += weights[i];
        numbers[i] = 0, weights[i] = 0;
    }
    __syncthreads();
    if (threadIdx.x < WARP) plan_cuts(a, totals);
}

// ---- the exact end of top-k and top-p ----------------------------------------------------------------------------

constexpr int DIGIT = 8;       // bits of a key that a pass of the radix select decides
constexpr int CACHED = CHUNK;  // keys in shared memory: at least those that one block can list

struct Prefix {
    u64 key, weight;  // the last key of a prefix of the ranking, and the weight of the listed tokens in it
};

// The highest bit in which any two keys differ, 0 if none do. Called by the whole block.
__device__ __forceinline__ int highest_difference(const u64* keys, int n) {
    __shared__ unsigned low, high;
    u64 differ = 0;
    for (int i = threadIdx.x; i < n; i += THREADS) differ |= keys[i] ^ keys[0];
#pragma unroll
    for (int d = WARP / 2; d; d /= 2) differ |= __shfl_xor_sync(FULL, differ, d);
    if (threadIdx.x == 0) low = high = 0;
    __syncthreads();
    if (threadIdx.x % WARP == 0) {
        atomicOr(&low, static_cast<unsigned>(differ));
        atomicOr(&high, static_cast<unsigned>(differ >> 32));
    }
    __syncthreads();
    return max(0, 63 - __clzll(static_cast<long long>(static_cast<u64>(high) << 32 | low)));
}

// The shortest prefix, by rank, of the n listed keys that reaches `target` in weight or in number: a radix select,
// digit by digit from the highest one that differs, until one key is left. Called by the whole block.
__device__ Prefix shortest_prefix(
    const u64* keys, int n, bool by_weight, u64 target, float largest, float temperature, Histogram<1 << DIGIT>& bins) {
    __shared__ u64 next_cut, next_target, next_weight, last_key;
    __shared__ unsigned next_number;
    int shift = max(0, highest_difference(keys, n) + 1 - DIGIT);
    u64 cut = keys[0] >> shift >> DIGIT << DIGIT << shift, weight_before = 0;
    while (true) {
        bins.clear();
        __syncthreads();
        for (int base = 0; base < n; base += THREADS) {
            int digit = -1;
            u64 w = 0;
            if (base + threadIdx.x < n) {
                // The last digit may overlap the previous one: keys that differ there get bins after those that agree.
                const u64 key = keys[base + threadIdx.x], above = (key ^ cut) >> shift;
                if (above < 1 << DIGIT) {
                    digit = static_cast<int>(above);
                    w = token_weight(value_of(key), largest, temperature).weight;
                }
            }
            bins.add(digit, w);
        }
        __syncthreads();
        const int bin = threadIdx.x;
        const unsigned number = bin < 1 << DIGIT ? bins.number[bin] : 0;
        const u64 weight = bin < 1 << DIGIT ? bins.weight(bin) : 0;
        const u64 lighter = sum_over_block(weight).before, fewer = sum_over_block(number).before;
        const u64 before = by_weight ? lighter : fewer;
        if (before < target && target <= before + (by_weight ? weight : number)) {
            next_cut = cut | static_cast<u64>(bin) << shift;
            next_target = target - before;
            next_weight = weight_before + lighter + (number == 1 ? weight : 0);
            next_number = number;
        }
        __syncthreads();
        cut = next_cut, target = next_target, weight_before = next_weight;
        if (next_number == 1) break;
        shift = max(0, shift - DIGIT);
    }
    for (int i = threadIdx.x; i < n; i += THREADS)
        if ((keys[i] ^ cut) >> shift == 0) last_key = keys[i];
    __syncthreads();
    return {last_key, weight_before};
}

template <bool ADJUSTED>
__global__ void __launch_bounds__(THREADS, 2) cut_tail(const Arguments a) {
    __shared__ u64 cache[CACHED];
    __shared__ Histogram<1 << DIGIT> bins;
    __shared__ unsigned found, base;
    wait_on_dependent_grids();
    launch_dependent_grids();
    const int first = blockIdx.x * CHUNK + threadIdx.x * EACH;
    const Row row = a.row();
    if (!row.cutting) return;
    const ThreadLogits own = load_logits<ADJUSTED>(a, a.table_row(), first);
    if (threadIdx.x == 0) found = 0;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        const int bucket = bucket_of(token_weight(own.x[i], row.largest, row.temperature));
        if (bucket >= 0 && ((row.first <= bucket && bucket <= row.last) || bucket == row.k_bucket))
            cache[atomicAdd(&found, 1u)] = rank_key(own.x[i], first + i);
    }
    __syncthreads();
    u64* const list = a.list();
    if (found) {
        if (threadIdx.x == 0) base = atomicAdd(&a.row().listed, found);
        __syncthreads();
        for (unsigned i = threadIdx.x; i < found; i += THREADS) list[base + i] = cache[i];
    }
    if (!is_last_block(a)) return;

    const int n = a.row().listed;
    const u64* keys = list;
    if (n <= CACHED) {
        for (int i = threadIdx.x; i < n; i += THREADS) cache[i] = list[i];
        keys = cache;
        __syncthreads();
    }
    Prefix kept = {LAST_KEY, row.total_weight};
    if (row.k_bucket >= 0) {
        kept = shortest_prefix(keys, n, false, row.k_rank, row.largest, row.temperature, bins);
        kept.weight += row.k_weight_before;
    }
    if (row.top_p < 1.0f) {
        const u64 target = top_p_bound(row.top_p, kept.weight) - row.weight_before;
        kept = shortest_prefix(keys, n, true, target, row.largest, row.temperature, bins);
    }
    if (threadIdx.x == 0) a.row().cut = kept.key, a.row().listed = 0;
}

// ---- the draw ----------------------------------------------------------------------------------------------------

struct Weights {
    u64 of[EACH], sum;
};

// The weights of a thread's ids from `first` on; 0 for tokens that top-k, top-p or min-p drop.
__device__ __forceinline__ Weights kept_weights(const Row& row, const ThreadLogits& own, int first) {
    const u64 least = static_cast<u64>(ceil(static_cast<double>(row.min_p) * (1ull << WEIGHT_BITS)));
    Weights weights = {};
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        const u64 w = token_weight(own.x[i], row.largest, row.temperature).weight;
        if (w >= least && rank_key(own.x[i], first + i) <= row.cut) weights.of[i] = w;
        weights.sum += weights.of[i];
    }
    return weights;
}

template <bool ADJUSTED>
__global__ void __launch_bounds__(THREADS, ADJUSTED ? 2 : 3) draw_token(const Arguments a) {
    wait_on_dependent_grids();
    launch_dependent_grids();
    const int table_row = a.table_row();
    int first = blockIdx.x * CHUNK + threadIdx.x * EACH;
    const ThreadLogits own = load_logits<ADJUSTED>(a, table_row, first);
    const Row row = a.row();
    if (!row.drawing) return;
    u64* const sums = reinterpret_cast<u64*>(a.parts());  // [chunks]
    const u64 sum = sum_over_block(kept_weights(row, own, first).sum).total;
    if (threadIdx.x == 0) sums[blockIdx.x] = sum;
    if (!is_last_block(a)) return;

    __shared__ int drawn_chunk;
    __shared__ u64 drawn_position;
    const int chunks = (a.chunks + THREADS - 1) / THREADS;
    const int begin = threadIdx.x * chunks, end = min(begin + chunks, a.chunks);
    u64 weight = 0;
    for (int i = begin; i < end; ++i) weight += sums[i];
    const Sum over_row = sum_over_block(weight);
    unsigned rest;
    const SamplerRow& sequence = a.table[table_row];
    const unsigned word = random_word(sequence.seed, sequence.sequence, sequence.step + a.offset());
    u64 position = scaled_down(word, over_row.total, rest);
    if (over_row.before <= position && position < over_row.before + weight) {
        int chunk = begin;
        for (position -= over_row.before; position >= sums[chunk]; ++chunk) position -= sums[chunk];
        drawn_chunk = chunk;
        drawn_position = position;
    }
    __syncthreads();
    first = drawn_chunk * CHUNK + threadIdx.x * EACH;
    position = drawn_position;
    const Weights kept = kept_weights(row, load_logits<ADJUSTED>(a, table_row, first), first);
    u64 before = sum_over_block(kept.sum).before;
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        if (before <= position && position < before + kept.of[i])
            finish_row(a, table_row, first + i, row.top, row.log_sum);
        before += kept.of[i];
    }
}

// ---- the most likely tokens --------------------------------------------------------------------------------------

// The smaller key of two lanes that are `distance` apart goes to the lower lane if `ascending`.
__device__ __forceinline__ u64 exchanged(u64 key, int distance, bool ascending) {
    const u64 other = __shfl_xor_sync(FULL, key, distance);
    const bool lower = !(threadIdx.x & distance);
    return lower == ascending ? min(key, other) : max(key, other);
}

// Sorts the keys of a warp, ascending, if they are a bitonic sequence of length WARP.
__device__ __forceinline__ u64 merged_lanes(u64 key) {
#pragma unroll
    for (int d = WARP / 2; d; d /= 2) key = exchanged(key, d, true);
    return key;
}

// Sorts the keys of a warp, ascending (Batcher's bitonic sort).
__device__ __forceinline__ u64 sorted_lanes(u64 key) {
#pragma unroll
    for (int run = 2; run <= WARP; run *= 2)
#pragma unroll
        for (int d = run / 2; d; d /= 2) key = exchanged(key, d, run == WARP || !(threadIdx.x & run));
    return key;
}

// The WARP smallest keys of two ascending lists, ascending.
__device__ __forceinline__ u64 smallest_of(u64 a, u64 b) {
    return merged_lanes(min(a, __shfl_sync(FULL, b, WARP - 1 - threadIdx.x % WARP)));
}

// Merges the ascending lists of a block's warps; warp 0 has the result.
__device__ __forceinline__ u64 smallest_of_block(u64 key) {
    __shared__ u64 lists[WARPS][WARP];
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    lists[warp][lane] = key;
#pragma unroll
    for (int half = WARPS / 2; half; half /= 2) {
        __syncthreads();
        if (warp < half) lists[warp][lane] = key = smallest_of(key, lists[warp + half][lane]);
    }
    return key;
}

// Launched after the token is chosen. A row of a table that asks for none, and a sequence without a token, gets -1 and
// NaN.
__global__ void __launch_bounds__(THREADS, 2) top_logprobs(const Arguments a) {
    static_assert(MAX_LOGPROBS <= WARP && EACH == 4, "a lane per token");
    wait_on_dependent_grids();
    launch_dependent_grids();
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const int table_row = a.table_row();
    int wanted = table_row == NULL_ROW ? 0 : min(a.table[table_row].num_logprobs, a.vocab);
    if (a.result[blockIdx.y] < 0) wanted = 0;
    int* const ids = a.result + 2 * size_t(a.result_pitch) + blockIdx.y;
    if (wanted == 0) {
        if (blockIdx.x == 0 && threadIdx.x < MAX_LOGPROBS) {
            ids[size_t(threadIdx.x) * a.result_pitch] = -1;
            ids[size_t(threadIdx.x + MAX_LOGPROBS) * a.result_pitch] = __float_as_int(NAN_F);
        }
        return;
    }
    const int first = blockIdx.x * CHUNK + threadIdx.x * EACH;
    float given[EACH];
    load_given(a, first, given);
    u64 smallest = LAST_KEY;
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        const u64 key = first + i < a.vocab ? rank_key(given[i], first + i) : LAST_KEY;
        const u64 worst = __shfl_sync(FULL, smallest, WARP - 1);
        if (__any_sync(FULL, key < worst)) smallest = smallest_of(smallest, sorted_lanes(key));
    }
    smallest = smallest_of_block(smallest);
    u64* const lists = a.list();
    if (warp == 0) lists[blockIdx.x * WARP + lane] = smallest;
    if (!is_last_block(a)) return;

    smallest = LAST_KEY;
    for (int chunk = warp; chunk < a.chunks; chunk += WARPS)
        smallest = smallest_of(smallest, lists[chunk * WARP + lane]);
    smallest = smallest_of_block(smallest);
    if (threadIdx.x >= MAX_LOGPROBS) return;
    const int id = static_cast<int>(smallest);
    const bool used = lane < wanted;
    const float logit = used ? a.logits[size_t(blockIdx.y) * a.pitch + id] : NAN_F;
    const float logprob = log_probability(logit, a.row().top, a.row().log_sum);
    ids[size_t(lane) * a.result_pitch] = used ? id : -1;
    ids[size_t(lane + MAX_LOGPROBS) * a.result_pitch] = __float_as_int(logprob);
}
