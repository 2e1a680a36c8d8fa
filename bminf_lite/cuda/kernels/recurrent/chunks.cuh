// Recurrences in chunks of CHUNK tokens at fixed positions on tensor cores: what gated DeltaNet and Mamba 2 share. The
// formulas are those of backend/chunked_state.py.
//
// A block of `scan` computes a text of the step, its drafts included, in COLUMNS columns of a value head, chunk by
// chunk; each warp has WARP_COLUMNS of them, and keeps the state in its registers. A chunk begins with the keys and
// deltas of its earlier tokens, which lie in the rings of the sequence's slot, and goes on with new tokens.
//
// What does not depend on the state is prepared first: keys and queries as pairs of fp16, decays, products of the
// chunk's tokens with each other, and of a rule that corrects the factors with which tokens act on later ones. A text
// of at least PREPARED_TOKENS tokens has it prepared by another kernel, for all its chunks at once; else a block of
// `scan` does so for each chunk. Both call the same functions, and one token takes the same way as a whole chunk, so
// the bits of a token depend on its text alone.
//
// Products are sums of `mma.sync`. An fp32 factor is divided by a power of two that all of its row has in common, and
// split in two fp16 numbers, which have 22 bits together; a product is (low * high + high * low) + high * high. Each
// element of a result depends on its own row and column alone, so what other tokens leave in the operands does not
// reach it. Sums over the tokens of a chunk go from the first to the last by fma.
#pragma once
#include "common/async.cuh"
#include "common/common.cuh"
#include "common/sequences.cuh"
#include "common/tensor_cores.cuh"
#include "constants/recurrent.cuh"

namespace bminf {

constexpr int WARPS = THREADS / WARP;
constexpr int WARP_COLUMNS = 8;
// Threads of a block of `scan`. Each of its warps reads a prepared chunk whole. So blocks are smaller where chunks are
// prepared: several blocks of an SM are at different places of their chunks.
template <int N, bool PREPARED>
constexpr int SCAN_THREADS = PREPARED && N <= 128 ? THREADS / 2 : THREADS;
template <int N, bool PREPARED>
constexpr int COLUMNS = SCAN_THREADS<N, PREPARED> / WARP * WARP_COLUMNS;  // of a head's state in a block
constexpr int HEADS_AT_ONCE = 4;                                          // value heads that a block prepares
constexpr int PITCH = CHUNK + 4;  // of rows with a number for each token of a chunk

// What the sequences keep, in slots that are a pitch apart: states [value_heads, key_dim, value_dim], and rings of
// ring_rows tokens: keys [key_heads, key_dim]; deltas [value_heads, value_dim], or of a rule that corrects the
// differences from which `solves` make deltas; decays [value_heads], or with CHANNELS [value_heads, key_dim], sums of
// log-decays from their chunk's start on; and of a rule that corrects solves [value_heads, CHUNK]. All are fp32. ends:
// [key_heads], the position of the states of a key head's value heads, int32.
// cu_seqlens to count: see Sequences. padding: not used.
struct Recurrence {
    float* states;
    long long states_pitch;
    float* keys;
    long long keys_pitch;
    float* deltas;
    long long deltas_pitch;
    float* decays;
    long long decays_pitch;
    float* solves;
    long long solves_pitch;
    int* ends;
    long long ends_pitch;
    const int* cu_seqlens;
    const int* context_lens;
    const int* slots;
    long long slots_pitch;
    int count;
    int ring_rows;
    int has_drafts;
    int key_heads;
    int value_heads;
    int key_dim;
    int value_dim;
    int padding;

    __device__ __forceinline__ Sequences sequences() const {
        return {cu_seqlens, context_lens, slots, slots_pitch, count};
    }
    __device__ __forceinline__ int values() const { return value_heads * value_dim; }
    __device__ __forceinline__ int ring_row(int position) const { return position % ring_rows; }
    // What the step keeps of a token until its last kernel: sums of log-decays, and behind them solves.
    template <class Rule>
    __device__ __forceinline__ int sums() const {
        return value_heads * (Rule::CHANNELS ? key_dim : 1);
    }
    template <class Rule>
    __device__ __forceinline__ long long sums_pitch() const {
        return sums<Rule>() + (Rule::CORRECTS ? value_heads * CHUNK : 0);
    }
};

// A text of a step: the tokens of a sequence that is no draft, and of the drafts behind it. New tokens have positions
// [start, stop), of which those before own_stop are no drafts. The state is that at position `loaded`.
struct Text {
    int first_token, start, own_stop, stop, loaded;
    long long slot;

    Text() = default;
    __device__ __forceinline__ Text(const Recurrence& net, int sequence, int key_head) {
        const Sequences step = net.sequences();
        first_token = step.cu_seqlens[sequence];
        const int own_tokens = step.cu_seqlens[sequence + 1] - first_token;
        start = step.context_lens[sequence];
        slot = step.slot(sequence);
        own_stop = start + own_tokens;
        const int end = step.end_of_text(sequence, net.has_drafts);
        stop = end == sequence + 1 ? own_stop : start + step.cu_seqlens[end] - first_token;
        loaded = start ? net.ends[slot * net.ends_pitch + key_head] : 0;
    }
    __device__ __forceinline__ bool is_prepared() const { return stop - start >= PREPARED_TOKENS; }
    // The first of the places where chunks of a text are prepared. All texts of at least PREPARED_TOKENS tokens
    // together have PLACES_OF_32 places for each 32 tokens of the step, which leaves each text more than it needs.
    __device__ static __forceinline__ int first_place(int token) { return token * PLACES_OF_32 / 32; }
};

// Tokens [known, count) of the chunk at position `end` are new, and `token` is the first of them.
struct Part {
    int end, known, count, token;

    __device__ __forceinline__ Part(const Text& text, int chunk) {
        end = text.loaded + chunk * CHUNK;
        const int position = max(text.start, end);
        known = min(position - end, CHUNK);
        count = min(text.stop - end, CHUNK);
        token = text.first_token + position - text.start;
    }
    __device__ __forceinline__ int token_of(int row) const { return token + row - known; }
    __device__ __forceinline__ bool is_whole() const { return known == 0 && count == CHUNK; }  // and new
    // Whether one of eight rows is new.
    __device__ __forceinline__ bool has_new(int eighth) const { return eighth * 8 < count && eighth * 8 + 8 > known; }
};

// Rows of a chunk: (high + low) * unit.
template <int N>
struct Vectors {
    __align__(16) __half high[CHUNK][N + 8];
    __half low[CHUNK][N + 8];
    float unit[CHUNK];
};

// Keys and queries as the formulas multiply them with the state. With CHANNELS, keys have the decay until the chunk's
// end and queries that since its start; `readers` are keys with the latter, and `decay` is that of a whole chunk.
template <int N, bool CHANNELS>
struct Rows {
    Vectors<N> keys, queries;

    __device__ __forceinline__ const Vectors<N>& reading(int kind) const { return kind ? queries : keys; }
    __device__ __forceinline__ float decay_of(float of_chunk, int) const { return of_chunk; }
};
template <int N>
struct Rows<N, true> {
    Vectors<N> keys, queries, readers;
    float decay[N];

    __device__ __forceinline__ const Vectors<N>& reading(int kind) const { return kind ? queries : readers; }
    __device__ __forceinline__ float decay_of(float, int row) const { return decay[row]; }
};

// A chunk's keys, queries and sums of log-decays, from which rows with CHANNELS are made.
template <int N, bool CHANNELS>
struct ChannelRoom {};
template <int N>
struct ChannelRoom<N, true> {
    float keys[CHUNK][N + 4], queries[CHUNK][N + 4], sums[CHUNK][N + 4];
};

// What the tokens of a chunk have of a value head. Of a rule that corrects, a token's delta is the sum of `solves`
// times the differences of the tokens up to itself; else its difference is its delta. The sum of `reads` times the same
// differences is a part of its output. Before `solve`, `solves` and `reads` are products of its key and of its query
// with the keys of these tokens, times the decay between the two.
struct Factors {
    __align__(16) float solves[CHUNK][PITCH];
    float reads[CHUNK][PITCH];
    float sums[CHUNK];       // of log-decays since the chunk's start
    float decays[CHUNK];     // exp of these
    float remaining[CHUNK];  // decays until the end of a whole chunk
    float rates[CHUNK];
};

// The differences of a warp's columns.
struct WarpRoom {
    __align__(16) float differences[WARP_COLUMNS][PITCH];
};

template <bool VALUE_>
struct Flag {
    static constexpr bool VALUE = VALUE_;
};

template <int N, bool CHANNELS>
struct Stage {
    Rows<N, CHANNELS> rows;
    Factors factors;
};

template <int N, int STAGES, bool CHANNELS>
struct Shared {
    Stage<N, CHANNELS> stages[STAGES];
    WarpRoom room[WARPS];
    ChannelRoom<N, CHANNELS> channels;
};

template <int N, bool CHANNELS>
struct PrepareRoom {
    Rows<N, CHANNELS> rows;
    Factors factors[CHANNELS ? 1 : HEADS_AT_ONCE];
    ChannelRoom<N, CHANNELS> channels;
};

__device__ __forceinline__ float softplus(float x) { return x > 20.0f ? x : log1pf(expf(x)); }

// The sum over a warp, in all lanes.
__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
    for (int d = WARP / 2; d; d /= 2) x = __fadd_rn(x, __shfl_xor_sync(FULL, x, d));
    return x;
}

// ---- pairs of fp16 -----------------------------------------------------------------------------------------------

// A power of two by which numbers up to `largest` are divided: then the largest is below 2^13.
struct Unit {
    float unit, inverse;

    __device__ __forceinline__ explicit Unit(float largest) {
        const int exponent = min(max(__float_as_int(largest) >> 23, 14), 240);
        unit = __int_as_float((exponent - 12) << 23);
        inverse = __int_as_float((266 - exponent) << 23);
    }
};

__device__ __forceinline__ void split(float a, float b, unsigned& high, unsigned& low) {
    high = pack_half2(a, b);
    const float2 rounded = unpack_half2(high);
    low = pack_half2(__fsub_rn(a, rounded.x), __fsub_rn(b, rounded.y));
}

// A product whose three parts are added apart, because each addition waits for the one before.
struct PairProduct {
    float low_high[4], high_low[4], high_high[4];

    // Adds a @ b; b: registers of the high part, then of the low one.
    __device__ __forceinline__ void add(const unsigned (&high)[4], const unsigned (&low)[4], const unsigned (&b)[4]) {
        mma_m16n8k16(low_high, low, b[0], b[1]);
        mma_m16n8k16(high_low, high, b[2], b[3]);
        mma_m16n8k16(high_high, high, b[0], b[1]);
    }
    __device__ __forceinline__ float sum(int i) const {
        return __fadd_rn(__fadd_rn(low_high[i], high_low[i]), high_high[i]);
    }
};

// The same of eight rows on the left, whose high parts are rows 0 to 7 of an operand and whose low parts lie behind
// them.
struct StackedProduct {
    float with_high[4], with_low[4];

    __device__ __forceinline__ void add(const unsigned (&a)[4], const unsigned (&b)[4]) {
        mma_m16n8k16(with_high, a, b[0], b[1]);
        mma_m16n8k16(with_low, a, b[2], b[3]);
    }
    // Element i % 2 of the lane's pair.
    __device__ __forceinline__ float sum(int i) const {
        return __fadd_rn(__fadd_rn(with_high[2 + i], with_low[i]), with_high[i]);
    }
};

// A lane's elements of a row: pairs from 2 * lane on, 64 apart; zeros behind `dim`.
template <int N>
__device__ __forceinline__ void load_row(float (&x)[N / WARP], const float* row, int dim) {
#pragma unroll
    for (int i = 0; i < N / WARP; ++i) {
        const int d = i / 2 * 64 + threadIdx.x % WARP * 2 + i % 2;
        x[i] = d < dim ? row[d] : 0.0f;
    }
}

// What a vector is multiplied by for a length of 1. Called by a warp.
template <int COUNT>
__device__ __forceinline__ float inverse_length(const float (&x)[COUNT]) {
    float sum = 0;
#pragma unroll
    for (int i = 0; i < COUNT; ++i) sum = fmaf(x[i], x[i], sum);
    return __fdiv_rn(1.0f, __fsqrt_rn(__fadd_rn(warp_sum(sum), 1e-6f)));
}

// A row of `vectors`. Called by a warp.
template <int N>
__device__ __forceinline__ void split_row(Vectors<N>& vectors, int row, const float (&x)[N / WARP]) {
    float largest = 0;
#pragma unroll
    for (int i = 0; i < N / WARP; ++i) largest = fmaxf(largest, fabsf(x[i]));
#pragma unroll
    for (int d = WARP / 2; d; d /= 2) largest = fmaxf(largest, __shfl_xor_sync(FULL, largest, d));
    const Unit of_row(largest);
    const int lane = threadIdx.x % WARP;
#pragma unroll
    for (int i = 0; i < N / WARP; i += 2) {
        unsigned high, low;
        split(__fmul_rn(x[i], of_row.inverse), __fmul_rn(x[i + 1], of_row.inverse), high, low);
        *reinterpret_cast<unsigned*>(&vectors.high[row][i * 32 + lane * 2]) = high;
        *reinterpret_cast<unsigned*>(&vectors.low[row][i * 32 + lane * 2]) = low;
    }
    if (lane == 0) vectors.unit[row] = of_row.unit;
}

// ---- what does not depend on the state ---------------------------------------------------------------------------

// Keys of the chunk's known tokens, from the ring. Called by all threads.
template <int N, int THREADS_>
__device__ __forceinline__ void load_known_rows(
    Vectors<N>& keys, const Recurrence& net, const Text& text, const Part& part, int key_head) {
    constexpr int WARPS_ = THREADS_ / WARP, COUNT = CHUNK / WARPS_;
    const float* ring = net.keys + text.slot * net.keys_pitch + key_head * net.key_dim;
    const int first = threadIdx.x / WARP;
    float x[COUNT][N / WARP];
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
        const int row = first + i * WARPS_;
        if (row < part.known)
            load_row<N>(x[i], ring + net.ring_row(part.end + row) * net.key_heads * net.key_dim, net.key_dim);
    }
#pragma unroll
    for (int i = 0; i < COUNT; ++i)
        if (first + i * WARPS_ < part.known) split_row<N>(keys, first + i * WARPS_, x[i]);
}

// Keys and queries of the chunk's new tokens, COUNT rows of a warp at once. Called by all threads.
template <int N, int THREADS_, int COUNT, class Rule>
__device__ __forceinline__ void load_new_rows(
    Rows<N, false>& rows, const Recurrence& net, const Rule& rule, const Part& part, int key_head) {
    const int count = 2 * (part.count - part.known);
    constexpr int WARPS_ = THREADS_ / WARP;
#pragma unroll 1
    for (int first = threadIdx.x / WARP; first < count; first += COUNT * WARPS_) {
        float x[COUNT][N / WARP];
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            const int item = first + i * WARPS_, row = part.known + item / 2;
            if (item < count) load_row<N>(x[i], rule.vector(net, item % 2, part.token_of(row), key_head), net.key_dim);
        }
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            const int item = first + i * WARPS_, row = part.known + item / 2;
            if (item >= count) continue;
            rule.scale(net, item % 2, x[i]);
            split_row<N>(item % 2 ? rows.queries : rows.keys, row, x[i]);
        }
    }
}

// Decays and rates of the chunk's tokens. Called by one warp.
template <class Rule>
__device__ __forceinline__ void load_decays(
    Factors& factors, const Recurrence& net, const Rule& rule, const Text& text, const Part& part, int head) {
    const int row = threadIdx.x % WARP;
    const bool is_known = row < part.known;
    float2 gates = {};  // a rate, and a log-decay, or the sum of those up to a known token
    if (is_known)
        gates.y = net.decays[text.slot * net.decays_pitch + net.ring_row(part.end + row) * net.value_heads + head];
    else if (row < part.count)
        gates = rule.rate_and_decay(net, part.token_of(row), head);
    const float before = __shfl_sync(FULL, gates.y, max(part.known, 1) - 1);
    float sum = is_known ? gates.y : part.known ? before : 0.0f;
#pragma unroll
    for (int i = 0; i < CHUNK; ++i) {
        const float own = __shfl_sync(FULL, gates.y, i);
        if (i >= part.known && i <= row) sum = __fadd_rn(sum, own);
    }
    const float last = __shfl_sync(FULL, sum, CHUNK - 1);
    if (row >= part.count) return;
    factors.sums[row] = sum;
    factors.decays[row] = expf(sum);
    factors.remaining[row] = expf(__fsub_rn(last, sum));
    factors.rates[row] = gates.x;
}

// Products of rows of a chunk with its keys, as the lanes of a warp have them: warp w has keys or queries, w / 2, and
// eight of the keys, w % 2. Without CORRECTS there are no products of keys with keys.
template <bool CORRECTS>
struct Products {
    static constexpr int WARPS_OF_PRODUCTS = 4;
    static_assert(WARPS >= WARPS_OF_PRODUCTS, "two kinds of rows, and twice eight keys");
    float x[4];

    __device__ static __forceinline__ bool has_none() {
        return threadIdx.x >= WARPS_OF_PRODUCTS * WARP || (!CORRECTS && threadIdx.x < WARPS_OF_PRODUCTS / 2 * WARP);
    }

    template <int N>
    __device__ __forceinline__ void compute(const Rows<N, false>& rows, const Part& part) {
        const int kind = threadIdx.x / WARP / 2, eighth = threadIdx.x / WARP % 2, lane = threadIdx.x % WARP;
        PairProduct product = {};
        if (!has_none() && eighth * 8 < part.count) {
            const Vectors<N>& left = kind ? rows.queries : rows.keys;
            const int row = lane % 16, column = lane / 16 * 8;
            const unsigned high_at = cast_smem_ptr_to_uint(&left.high[row][column]);
            const unsigned low_at = cast_smem_ptr_to_uint(&left.low[row][column]);
            const __half* right =
                &(lane < 16 ? rows.keys.high : rows.keys.low)[eighth * 8 + lane % 8][lane / 8 % 2 * 8];
            const unsigned right_at = cast_smem_ptr_to_uint(right);
#pragma unroll 2
            for (int k = 0; k < N; k += 16) {
                unsigned high[4], low[4], b[4];
                ldmatrix_x4(high, high_at + k * 2);
                ldmatrix_x4(low, low_at + k * 2);
                ldmatrix_x4(b, right_at + k * 2);
                product.add(high, low, b);
            }
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) x[i] = product.sum(i);
    }

    // Adds the decay, for rows of new tokens.
    template <int N>
    __device__ __forceinline__ void store(Factors& factors, const Rows<N, false>& rows, const Part& part) const {
        const int kind = threadIdx.x / WARP / 2, eighth = threadIdx.x / WARP % 2, lane = threadIdx.x % WARP;
        if (has_none()) return;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int row = lane / 4 + i / 2 * 8, j = eighth * 8 + lane % 4 * 2 + i % 2;
            if (row < part.known || row >= part.count) continue;
            const float since = __fsub_rn(factors.sums[row], factors.sums[j]);
            const float decay = expf(since > 0.0f ? 0.0f : since);  // a NaN stays
            const float unit = (kind ? rows.queries : rows.keys).unit[row];
            const float found = __fmul_rn(__fmul_rn(__fmul_rn(x[i], unit), rows.keys.unit[j]), decay);
            (kind ? factors.reads : factors.solves)[row][j] = j > row ? 0.0f : found;
        }
    }
};

// Solves of the chunk's known tokens, from the ring. Called by all threads.
__device__ __forceinline__ void load_known_solves(
    Factors& factors, const Recurrence& net, const Text& text, const Part& part, int head) {
    const float* ring = net.solves + text.slot * net.solves_pitch + head * CHUNK;
    for (int i = threadIdx.x; i < part.known * CHUNK; i += blockDim.x)
        factors.solves[i / CHUNK][i % CHUNK] =
            ring[net.ring_row(part.end + i / CHUNK) * net.value_heads * CHUNK + i % CHUNK];
}

// Makes products of new tokens what the comment of Factors says: with a rate b and products a of keys, a token's solves
// are b * (1 - sum of a times those of earlier tokens), where 1 is that of its own difference; its reads are the sum of
// its query's products times the solves up to its own. `to`: solves of the first new token, `pitch` apart, or null.
// Called by a warp, whose lanes have a difference each.
__device__ __forceinline__ void solve(Factors& factors, const Part& part, float* to, long long pitch) {
    const int own = threadIdx.x % WARP % CHUNK, half = threadIdx.x % WARP / CHUNK;
    float solves[CHUNK], reads[CHUNK / 2] = {};
#pragma unroll
    for (int i = 0; i < CHUNK; ++i) {
        solves[i] = 0;
        if (i < part.known) {
            solves[i] = factors.solves[i][own];
        } else if (i < part.count) {
            float earlier = 0;
#pragma unroll
            for (int j = 0; j < i; ++j) earlier = fmaf(factors.solves[i][j], solves[j], earlier);
            if (own <= i) solves[i] = __fmul_rn(factors.rates[i], __fsub_rn(own == i ? 1.0f : 0.0f, earlier));
        }
    }
#pragma unroll
    for (int i = 0; i < CHUNK / 2; ++i) {
        const int row = 2 * i + half;
        if (row < part.known || row >= part.count) continue;
#pragma unroll
        for (int j = 0; j < 2 * i + 2; ++j)
            if (j <= row) reads[i] = fmaf(factors.reads[row][j], solves[j], reads[i]);
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < CHUNK / 2; ++i) {
        const int row = 2 * i + half;
        if (row < part.known || row >= part.count) continue;
        factors.reads[row][own] = reads[i];
        const float of_row = half ? solves[2 * i + 1] : solves[2 * i];
        factors.solves[row][own] = of_row;
        if (to) to[(row - part.known) * pitch + own] = of_row;
    }
}

// With CHANNELS, all that does not depend on the state, in three phases that are a barrier apart. Called by all
// threads. First keys, queries and log-decays, or the sums of known tokens.
template <int N, class Rule>
__device__ __forceinline__ void load_channels(
    ChannelRoom<N, true>& room, Factors& factors, const Recurrence& net, const Rule& rule, const Text& text,
    const Part& part, int head) {
    const int lane = threadIdx.x % WARP, features = net.value_heads * net.key_dim;
    const long long slot = text.slot;
#pragma unroll 2
    for (int i = threadIdx.x / WARP; i < 3 * part.count; i += blockDim.x / WARP) {
        const int row = i / 3, kind = i % 3;
        const bool is_known = row < part.known;
        if (is_known && kind == 1) continue;
        const long long kept = static_cast<long long>(net.ring_row(part.end + row)) * features + head * net.key_dim;
        float x[N / WARP];
        if (kind == 2)
            load_row<N>(
                x, is_known ? net.decays + slot * net.decays_pitch + kept : rule.decay(net, part.token_of(row), head),
                net.key_dim);
        else
            load_row<N>(
                x,
                is_known ? net.keys + slot * net.keys_pitch + kept : rule.vector(net, kind, part.token_of(row), head),
                net.key_dim);
        if (!is_known && kind < 2) rule.scale(net, kind, x);
        float* to = kind == 0 ? room.keys[row] : kind == 1 ? room.queries[row] : room.sums[row];
#pragma unroll
        for (int j = 0; j < N / WARP; ++j) {
            const int d = j / 2 * 64 + lane * 2 + j % 2;
            to[d] = kind == 2 && !is_known && d < net.key_dim ? rule.log_decay(x[j], net, head, d) : x[j];
        }
    }
    for (int row = threadIdx.x; row < part.count; row += blockDim.x) {
        if (row >= part.known) factors.rates[row] = rule.rate_and_decay(net, part.token_of(row), head).x;
        factors.decays[row] = factors.remaining[row] = 1.0f;
    }
}

// Then the sums, of which new ones go to `sums`, `pitch` apart, if that is not null.
template <int N>
__device__ __forceinline__ void add_channels(
    ChannelRoom<N, true>& room, Rows<N, true>& rows, const Recurrence& net, const Part& part, int head, float* sums,
    long long pitch) {
    for (int d = threadIdx.x; d < N; d += blockDim.x) {
        float sum = part.known ? room.sums[part.known - 1][d] : 0.0f;
        for (int i = part.known; i < part.count; ++i) {
            sum = __fadd_rn(sum, room.sums[i][d]);
            room.sums[i][d] = sum;
            if (sums && d < net.key_dim) sums[part.token_of(i) * pitch + head * net.key_dim + d] = sum;
        }
        rows.decay[d] = expf(sum);
    }
}

// Then the rows, and products of new tokens with each other.
template <int N>
__device__ __forceinline__ void compute_channels(
    const ChannelRoom<N, true>& room, Rows<N, true>& rows, Factors& factors, const Part& part) {
    const int lane = threadIdx.x % WARP;
    for (int i = threadIdx.x / WARP; i < 3 * part.count; i += blockDim.x / WARP) {
        const int row = i / 3, kind = i % 3;  // keys, queries, and keys that read
        if (kind == 0 ? part.count < CHUNK : row < part.known) continue;
        const float* from = kind == 1 ? room.queries[row] : room.keys[row];
        float x[N / WARP];
#pragma unroll
        for (int j = 0; j < N / WARP; ++j) {
            const int d = j / 2 * 64 + lane * 2 + j % 2;
            const float own = room.sums[row][d];
            x[j] = __fmul_rn(from[d], expf(kind ? own : __fsub_rn(room.sums[CHUNK - 1][d], own)));
        }
        split_row<N>(kind == 0 ? rows.keys : kind == 1 ? rows.queries : rows.readers, row, x);
    }
    constexpr int LANES = 8;
    for (int i = threadIdx.x / LANES; i < CHUNK * (part.count - part.known); i += blockDim.x / LANES) {
        const int j = i % CHUNK, row = part.known + i / CHUNK;
        float of_key = 0, of_query = 0;
        if (j <= row)
            for (int d = threadIdx.x % LANES; d < N; d += LANES) {
                const float since = __fsub_rn(room.sums[row][d], room.sums[j][d]);
                const float key = __fmul_rn(room.keys[j][d], expf(since > 0.0f ? 0.0f : since));  // a NaN stays
                of_key = fmaf(room.keys[row][d], key, of_key);
                of_query = fmaf(room.queries[row][d], key, of_query);
            }
#pragma unroll
        for (int d = LANES / 2; d; d /= 2) {
            of_key = __fadd_rn(of_key, __shfl_xor_sync(FULL, of_key, d));
            of_query = __fadd_rn(of_query, __shfl_xor_sync(FULL, of_query, d));
        }
        if (j > row || threadIdx.x % LANES) continue;
        factors.solves[row][j] = of_key;
        factors.reads[row][j] = of_query;
    }
}

// Copies `count` bytes, a multiple of 16, by all threads.
__device__ __forceinline__ void copy_out(char* to, const void* from, int count) {
    for (int i = threadIdx.x * 16; i < count; i += THREADS * 16)
        *reinterpret_cast<uint4*>(to + i) = *reinterpret_cast<const uint4*>(static_cast<const char*>(from) + i);
}

// Prepares a chunk of a text, for HEADS_AT_ONCE value heads of a key head: the grid is (places, key_heads, parts of the
// value heads of a key head). rows: [places, key_heads] of Rows, factors: [places, value_heads] of Factors; sums: fp32
// [T, sums_pitch].
template <int N, class Rule>
__device__ __forceinline__ void prepare(
    const Recurrence& net, const Rule& rule, char* rows, char* factors, float* sums,
    PrepareRoom<N, Rule::CHANNELS>& shared) {
    const Sequences step = net.sequences();
    int sequence = 0, behind = net.count;
    while (behind - sequence > 1) {
        const int middle = (sequence + behind) / 2;
        if (Text::first_place(step.cu_seqlens[middle]) <= static_cast<int>(blockIdx.x))
            sequence = middle;
        else
            behind = middle;
    }
    sequence = step.first_of_text(sequence, net.has_drafts);
    const int key_head = blockIdx.y;
    const Text text(net, sequence, key_head);
    const int chunk = blockIdx.x - Text::first_place(text.first_token);
    if (chunk < 0 || text.loaded + chunk * CHUNK >= text.stop || !text.is_prepared()) return;
    const Part part(text, chunk);
    using OwnRows = Rows<N, Rule::CHANNELS>;
    const long long place = blockIdx.x;
    rows += (place * net.key_heads + key_head) * sizeof(OwnRows);
    const int group = net.value_heads / net.key_heads, first = blockIdx.z * HEADS_AT_ONCE;
    const int head = key_head * group + first, heads = min(HEADS_AT_ONCE, group - first), warp = threadIdx.x / WARP;
    const long long pitch = net.sums_pitch<Rule>();
    float* solves = sums + part.token * pitch + net.sums<Rule>() + (head + warp) * CHUNK;
    if constexpr (Rule::CHANNELS) {
        load_channels<N>(shared.channels, shared.factors[0], net, rule, text, part, key_head);
        load_known_solves(shared.factors[0], net, text, part, head);
        __syncthreads();
        add_channels<N>(shared.channels, shared.rows, net, part, key_head, sums, pitch);
        __syncthreads();
        compute_channels<N>(shared.channels, shared.rows, shared.factors[0], part);
    } else {
        load_known_rows<N, THREADS>(shared.rows.keys, net, text, part, key_head);
        load_new_rows<N, THREADS, 4>(shared.rows, net, rule, part, key_head);
        if (warp < heads) load_decays(shared.factors[warp], net, rule, text, part, head + warp);
        if (Rule::CORRECTS)
            for (int i = 0; i < heads; ++i) load_known_solves(shared.factors[i], net, text, part, head + i);
        __syncthreads();
        Products<Rule::CORRECTS> products;
        products.compute<N>(shared.rows, part);
        for (int i = 0; i < heads; ++i) products.store<N>(shared.factors[i], shared.rows, part);
        const int row = threadIdx.x % CHUNK, i = threadIdx.x / CHUNK;
        if (i < heads && row >= part.known && row < part.count)
            sums[part.token_of(row) * pitch + head + i] = shared.factors[i].sums[row];
    }
    __syncthreads();
    if (blockIdx.z == 0) copy_out(rows, &shared.rows, sizeof(OwnRows));
    if (Rule::CORRECTS) {
        if (warp < heads) solve(shared.factors[warp], part, solves, pitch);
        __syncthreads();
    }
    copy_out(factors + (place * net.value_heads + head) * sizeof(Factors), shared.factors, heads * sizeof(Factors));
}

// Starts copies of a thread's share of BYTES, a multiple of 16.
template <int BYTES, int THREADS_>
__device__ __forceinline__ void fetch(void* to, const char* from) {
    constexpr int STEP = THREADS_ * 16;
    const unsigned target = cast_smem_ptr_to_uint(to) + threadIdx.x * 16;
    from += threadIdx.x * 16;
#pragma unroll
    for (int first = 0; first < BYTES; first += STEP)
        if (first + STEP <= BYTES || threadIdx.x * 16 < BYTES - first) cp_async_16(target + first, from + first);
}

// Starts copies of a prepared chunk. Called by all threads.
template <int THREADS_, class OwnStage>
__device__ __forceinline__ void fetch_chunk(OwnStage& stage, const char* rows, const char* factors) {
    fetch<sizeof(stage.rows), THREADS_>(&stage.rows, rows);
    fetch<sizeof(stage.factors), THREADS_>(&stage.factors, factors);
    cp_async_commit_group();
}

// ---- what depends on it ------------------------------------------------------------------------------------------

// A warp's columns of a state, transposed: tile t of a lane has rows 8 t + lane % 4 * 2 and the next one, of column
// lane / 4. So it is the result of one product and the left operand of another.
template <int N>
struct State {
    float x[N / 8][2];

    // Calls f(element, its address, whether it exists) for all elements of a head's state at `kept`; the address of one
    // that does not exist is that of another.
    template <class T, class F>
    __device__ __forceinline__ void each(const Recurrence& net, int first_column, T* kept, F f) {
        const int lane = threadIdx.x % WARP, column = first_column + lane / 4;
        int pitch = net.value_dim;
        asm volatile("" : "+r"(pitch));  // or the compiler keeps all offsets from chunk to chunk
        if (N <= 128 && net.key_dim == N && first_column + WARP_COLUMNS <= net.value_dim) {
            T* at = kept + lane % 4 * 2 * pitch + column;
#pragma unroll
            for (int t = 0; t < N / 8; ++t) {
                f(x[t][0], at, true);
                f(x[t][1], at + pitch, true);
                at += 8 * pitch;
            }
            return;
        }
#pragma unroll
        for (int t = 0; t < N / 8; ++t)
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const int row = t * 8 + lane % 4 * 2 + i;
                const bool exists = row < net.key_dim && column < net.value_dim;
                f(x[t][i], kept + (exists ? row * pitch + column : 0), exists);
            }
    }

    // Keys, if CORRECTS, and queries of new tokens times the state; all tokens of a WHOLE chunk are new, and with ONE
    // the token behind the known ones. A lane gets those of its tokens: see Tokens.
    template <bool CORRECTS, bool WHOLE, bool AHEAD, bool ONE, bool CHANNELS>
    __device__ __forceinline__ void read(float (&found)[2][4], const Rows<N, CHANNELS>& rows, const Part& part) const {
        const int lane = threadIdx.x % WARP;
        float largest[2] = {};  // AHEAD in two chains
#pragma unroll
        for (int t = 0; t < N / 8; ++t) {
            float& of_chain = largest[AHEAD ? t % 2 : 0];
            of_chain = fmaxf(of_chain, fmaxf(fabsf(x[t][0]), fabsf(x[t][1])));
        }
        const Unit unit(largest_of_four(fmaxf(largest[0], largest[1])));
        unsigned at[2];
#pragma unroll
        for (int kind = 0; kind < 2; ++kind) {
            const Vectors<N>& vectors = rows.reading(kind);
            const int row = (ONE ? part.known / 8 * 8 : 0) + lane % 8;
            at[kind] = cast_smem_ptr_to_uint(&(lane < 16 ? vectors.high : vectors.low)[row][lane / 8 % 2 * 8]);
        }
        constexpr int EIGHTH = 8 * (N + 8) * sizeof(__half), EIGHTHS = ONE ? 1 : 2;
        StackedProduct products[2][EIGHTHS] = {};
        unsigned b[2][2][EIGHTHS][4];  // of a step, and AHEAD of the next one
        const auto each = [&](auto f) {
#pragma unroll
            for (int kind = !CORRECTS; kind < 2; ++kind)
#pragma unroll
                for (int eighth = 0; eighth < EIGHTHS; ++eighth)
                    if (WHOLE || ONE || part.has_new(eighth)) f(kind, eighth);
        };
        const auto load = [&](int k, int kind, int eighth) {
            ldmatrix_x4(b[k % 2][kind][eighth], at[kind] + eighth * EIGHTH + k * 32);
        };
        if (AHEAD) each([&](int kind, int eighth) { load(0, kind, eighth); });
#pragma unroll
        for (int k = 0; k < N / 16; ++k) {
            if (AHEAD && k + 1 < N / 16) each([&](int kind, int eighth) { load(k + 1, kind, eighth); });
            unsigned a[4];
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const float* pair = x[2 * k + i];
                split(__fmul_rn(pair[0], unit.inverse), __fmul_rn(pair[1], unit.inverse), a[2 * i], a[2 * i + 1]);
            }
            each([&](int kind, int eighth) {
                if (!AHEAD) load(k, kind, eighth);
                products[kind][eighth].add(a, b[k % 2][kind][eighth]);
            });
        }
#pragma unroll
        for (int kind = !CORRECTS; kind < 2; ++kind)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float of_row = rows.reading(kind).unit[i / 2 * 8 + lane % 4 * 2 + i % 2];
                found[kind][i] = __fmul_rn(__fmul_rn(products[kind][i / 2 % EIGHTHS].sum(i % 2), unit.unit), of_row);
            }
    }

    // The state behind a whole chunk, given the deltas of the lane's tokens with decays until its end.
    template <bool AHEAD, bool CHANNELS>
    __device__ __forceinline__ void advance(const float (&deltas)[4], const Rows<N, CHANNELS>& rows, float of_chunk) {
        const int lane = threadIdx.x % WARP;
        const float largest =
            fmaxf(fmaxf(fabsf(deltas[0]), fabsf(deltas[1])), fmaxf(fabsf(deltas[2]), fabsf(deltas[3])));
        const Unit unit(largest_of_four(largest));
        unsigned a[4];
#pragma unroll
        for (int i = 0; i < 4; i += 2)
            split(__fmul_rn(deltas[i], unit.inverse), __fmul_rn(deltas[i + 1], unit.inverse), a[i], a[i + 1]);
        const unsigned at = cast_smem_ptr_to_uint(&(lane < 16 ? rows.keys.high : rows.keys.low)[lane % 16][0]);
        constexpr int AT_ONCE = 4;
        unsigned b[2][AT_ONCE][4];  // of some tiles, and AHEAD of the next ones
        const auto load = [&](int tile) { ldmatrix_x4_trans(b[tile / AT_ONCE % 2][tile % AT_ONCE], at + tile * 16); };
        if (AHEAD)
#pragma unroll
            for (int t = 0; t < AT_ONCE; ++t) load(t);
#pragma unroll
        for (int first = 0; first < N / 8; first += AT_ONCE) {
            if (AHEAD && first + AT_ONCE < N / 8)
#pragma unroll
                for (int t = 0; t < AT_ONCE; ++t) load(first + AT_ONCE + t);
            StackedProduct added[AT_ONCE] = {};
#pragma unroll
            for (int t = 0; t < AT_ONCE; ++t) {
                if (!AHEAD) load(first + t);
                added[t].add(a, b[first / AT_ONCE % 2][t]);
            }
#pragma unroll
            for (int t = 0; t < AT_ONCE; ++t)
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    const float decay = rows.decay_of(of_chunk, (first + t) * 8 + lane % 4 * 2 + i);
                    x[first + t][i] = fmaf(decay, x[first + t][i], __fmul_rn(added[t].sum(i), unit.unit));
                }
        }
    }

    // The largest of the lanes that have a column.
    __device__ static __forceinline__ float largest_of_four(float x) {
        x = fmaxf(x, __shfl_xor_sync(FULL, x, 1));
        return fmaxf(x, __shfl_xor_sync(FULL, x, 2));
    }
};

// A lane's tokens of a chunk: number i is row(i). Its column is lane / 4 of the warp's.
struct Tokens {
    float x[4];

    __device__ static __forceinline__ int row(int i) { return threadIdx.x % 4 * 2 + i % 2 + i / 2 * 8; }

    // f(i, address of the value of a token `row(i)` behind `first`), where tokens are `pitch` apart.
    template <class T, class F>
    __device__ static __forceinline__ void each(T* first, long long pitch, F f) {
        T* const own = first + row(0) * pitch;
        f(0, own);
        f(1, own + pitch);
        f(2, own + 8 * pitch);
        f(3, own + 9 * pitch);
    }

    // Values of new tokens, and differences of known ones. Where there is no column, those of another one.
    template <class Rule>
    __device__ __forceinline__ void load(
        const Recurrence& net, const Rule& rule, const Text& text, const Part& part, int value) {
        const float* values = rule.values(net) + value;
        if (part.is_whole()) {
            each(values + part.token * rule.mixed_pitch, rule.mixed_pitch, [&](int i, const float* from) {
                x[i] = *from;
            });
            return;
        }
        const float* ring = net.deltas + text.slot * net.deltas_pitch + value;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            x[i] = 0;
            if (row(i) < part.known)
                x[i] = ring[net.ring_row(part.end + row(i)) * net.values()];
            else if (row(i) < part.count)
                x[i] = values[part.token_of(row(i)) * rule.mixed_pitch];
        }
    }

    // Sums of `factors` times the differences of a column's tokens up to each of the lane's. Factors of later ones are
    // zeros, and so are their differences, whatever they are.
    __device__ __forceinline__ void add(const float (&factors)[CHUNK][PITCH], const float (&differences)[CHUNK]) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float* of_row = factors[row(i)];
            x[i] = 0;
#pragma unroll
            for (int first = 0; first < (i < 2 ? CHUNK / 2 : CHUNK); first += 4) {
                float own[4];
                load_4(own, of_row + first);
#pragma unroll
                for (int j = first; j < first + 4; ++j) {
                    const int least = (j - i / 2 * 8 - i % 2 + 1) / 2;  // of lane % 4
                    const bool is_earlier = j < i / 2 * 8 || static_cast<int>(threadIdx.x % 4) >= least;
                    x[i] = fmaf(own[j - first], is_earlier ? differences[j] : 0.0f, x[i]);
                }
            }
        }
    }
    __device__ static __forceinline__ void load_4(float* to, const float* from) {
        const float4 x = *reinterpret_cast<const float4*>(from);
        to[0] = x.x, to[1] = x.y, to[2] = x.z, to[3] = x.w;
    }
};

// The text and the state of a block of `scan`, and keys and solves of its first chunk that are in the rings. Returns
// whether there is a text. Called by all threads.
template <int N, bool PREPARED, class Rule>
__device__ __forceinline__ bool begin(
    const Recurrence& net, Text& text, State<N>& state, Shared<N, PREPARED ? 2 : 1, Rule::CHANNELS>& shared) {
    const int sequence = blockIdx.x, head = blockIdx.y, key_head = head / (net.value_heads / net.key_heads);
    text = Text(net, sequence, key_head);
    if (text.own_stop == text.start || net.sequences().is_draft(sequence, net.has_drafts)) return false;
    const float* kept =
        net.states + text.slot * net.states_pitch + static_cast<long long>(head) * net.key_dim * net.value_dim;
    const int first_column = blockIdx.z * COLUMNS<N, PREPARED> + threadIdx.x / WARP * WARP_COLUMNS;
    if (text.start)
        state.each(net, first_column, kept, [&](float& x, const float* from, bool exists) {
            const float found = *from;
            x = exists ? found : 0.0f;
        });
    else
        state = {};
    if constexpr (!Rule::CHANNELS) {
        if (PREPARED && text.is_prepared()) return true;
        auto& stage = shared.stages[0];
        const Part part(text, 0);
        load_known_rows<N, SCAN_THREADS<N, PREPARED>>(stage.rows.keys, net, text, part, key_head);
        if (Rule::CORRECTS) load_known_solves(stage.factors, net, text, part, head);
    }
    return true;
}

// Prepares a chunk in a block of `scan`, but for `solve`, which one warp still does. Called by all threads.
template <int N, int STAGES, bool ONE, class Rule>
__device__ __forceinline__ void prepare_here(
    Shared<N, STAGES, Rule::CHANNELS>& shared, Stage<N, Rule::CHANNELS>& stage, const Recurrence& net, const Rule& rule,
    const Text& text, const Part& part, int head, int key_head, int chunk, float* sums) {
    const int warp = threadIdx.x / WARP, last_warp = SCAN_THREADS<N, STAGES == 2> / WARP - 1;
    const long long pitch = net.sums_pitch<Rule>();
    const bool keeps = blockIdx.z == 0;
    if constexpr (Rule::CHANNELS) {
        load_channels<N>(shared.channels, stage.factors, net, rule, text, part, head);
        load_known_solves(stage.factors, net, text, part, head);
        __syncthreads();
        add_channels<N>(shared.channels, stage.rows, net, part, head, keeps ? sums : nullptr, pitch);
        __syncthreads();
        compute_channels<N>(shared.channels, stage.rows, stage.factors, part);
    } else {
        if (chunk) load_known_rows<N, SCAN_THREADS<N, STAGES == 2>>(stage.rows.keys, net, text, part, key_head);
        load_new_rows<N, SCAN_THREADS<N, STAGES == 2>, ONE ? 1 : 4>(stage.rows, net, rule, part, key_head);
        if (warp == last_warp) load_decays(stage.factors, net, rule, text, part, head);
        if (Rule::CORRECTS && chunk) load_known_solves(stage.factors, net, text, part, head);
        __syncthreads();
        Products<Rule::CORRECTS> products;
        products.template compute<N>(stage.rows, part);
        products.template store<N>(stage.factors, stage.rows, part);
        const int row = threadIdx.x;
        if (keeps && row >= part.known && row < part.count)
            sums[part.token_of(row) * pitch + head] = stage.factors.sums[row];
    }
    if (!Rule::CORRECTS) return;
    __syncthreads();
    float* solves = sums + part.token * pitch + net.sums<Rule>() + head * CHUNK;
    if (warp == last_warp) solve(stage.factors, part, keeps ? solves : nullptr, pitch);
}

// Outputs of all tokens, fp32 [T, out_pitch], and what the step keeps of them, `sums` fp32 [T, sums_pitch], where they
// are not prepared. States and differences go to the slots. The grid is (sequences, value_heads, value_dim / COLUMNS).
// Chunks lie in `rows` and `factors`: see `prepare`. `begin` came before. With ONE, each text has one new token: then
// the state is not needed behind the chunk that it ends in.
template <int N, bool PREPARED, bool ONE, class Rule>
__device__ __forceinline__ void scan(
    const Recurrence& net, const Rule& rule, const Text& text, const char* rows, const char* factors, float* sums,
    float* out, long long out_pitch, State<N>& state, Shared<N, PREPARED ? 2 : 1, Rule::CHANNELS>& shared) {
    const int head = blockIdx.y, warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const int key_head = head / (net.value_heads / net.key_heads);
    const int first_column = blockIdx.z * COLUMNS<N, PREPARED> + warp * WARP_COLUMNS, column = first_column + lane / 4;
    const bool has_column = column < net.value_dim, is_prepared = PREPARED && text.is_prepared();
    const int value = head * net.value_dim + min(column, net.value_dim - 1);
    float* const room = shared.room[warp].differences[lane / 4];
    const long long place = Text::first_place(text.first_token);
    const char* own_rows = rows + (place * net.key_heads + key_head) * sizeof(Rows<N, Rule::CHANNELS>);
    const char* own_factors = factors + (place * net.value_heads + head) * sizeof(Factors);
    const float of_head = rule.of_head(head);
    Tokens next;
    next.load(net, rule, text, Part(text, 0), value);
    if (is_prepared) fetch_chunk<SCAN_THREADS<N, PREPARED>>(shared.stages[0], own_rows, own_factors);
#pragma unroll 1
    for (int chunk = 0;; ++chunk) {
        const Part part(text, chunk);
        Stage<N, Rule::CHANNELS>& stage = shared.stages[is_prepared ? chunk % 2 : 0];
        const bool is_last = text.stop <= part.end + CHUNK;
        if (is_prepared) {
            cp_async_wait_all();
            __syncthreads();
            if (!is_last) {
                own_rows += net.key_heads * sizeof(stage.rows);
                own_factors += net.value_heads * sizeof(Factors);
                fetch_chunk<SCAN_THREADS<N, PREPARED>>(
                    shared.stages[PREPARED ? (chunk + 1) % 2 : 0], own_rows, own_factors);
            }
        } else {
            prepare_here<N, PREPARED ? 2 : 1, ONE>(shared, stage, net, rule, text, part, head, key_head, chunk, sums);
        }
        const Tokens values = next;
        if (!is_last) next.load(net, rule, text, Part(text, chunk + 1), value);
        // If the last token that is no draft lies in this chunk, the state at its start is kept.
        const auto keep = [&] {
            if (text.own_stop <= part.end || text.own_stop > part.end + CHUNK || (chunk == 0 && text.start)) return;
            float* kept =
                net.states + text.slot * net.states_pitch + static_cast<long long>(head) * net.key_dim * net.value_dim;
            state.each(net, first_column, kept, [&](float x, float* to, bool exists) {
                if (exists) *to = x;
            });
        };
        if (ONE) keep();
        Tokens own;
        float differences[CHUNK];
        const bool has_new = !ONE || part.known < CHUNK;
        // Outputs, differences of the column, and those of the lane's tokens.
        const auto compute = [&](auto flag) {
            constexpr bool WHOLE = decltype(flag)::VALUE;
            const auto is_new = [&](int i) {
                return WHOLE || (Tokens::row(i) >= part.known && Tokens::row(i) < part.count);
            };
            float read[2][4];
            if (has_new)
                state.template read<Rule::CORRECTS, WHOLE, PREPARED, ONE, Rule::CHANNELS>(read, stage.rows, part);
            if (!is_prepared) __syncthreads();
            own = values;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int row = Tokens::row(i);
                const float new_one = Rule::CORRECTS ? fmaf(-stage.factors.decays[row], read[0][i], own.x[i])
                                                     : __fmul_rn(stage.factors.rates[row], own.x[i]);
                if (is_new(i)) own.x[i] = new_one;
            }
#pragma unroll
            for (int i = 0; i < 4; i += 2)
                *reinterpret_cast<float2*>(room + Tokens::row(i)) = make_float2(own.x[i], own.x[i + 1]);
            __syncwarp();
#pragma unroll
            for (int j = 0; j < CHUNK; j += 4) Tokens::load_4(differences + j, room + j);
            if (!has_new) return;
            Tokens found;
            found.add(stage.factors.reads, differences);
            float* const first = out + (part.token - part.known) * out_pitch + value;
            Tokens::each(first, out_pitch, [&](int i, float* to) {
                const float y = fmaf(stage.factors.decays[Tokens::row(i)], read[1][i], found.x[i]);
                if (has_column && is_new(i)) *to = rule.output(y, values.x[i], of_head);
            });
        };
        if (PREPARED && part.is_whole())
            compute(Flag<PREPARED>());
        else
            compute(Flag<false>());
        if (part.end + CHUNK > text.stop - net.ring_rows) {
            float* const ring = net.deltas + text.slot * net.deltas_pitch + value;
            const int first = max(part.known, text.stop - net.ring_rows - part.end);
#pragma unroll 1
            for (int i = 0; i < 4; ++i) {
                const int row = Tokens::row(i);
                if (has_column && row >= first && row < part.count)
                    ring[net.ring_row(part.end + row) * net.values()] = room[row];
            }
        }
        if (!ONE) keep();
        if (ONE ? has_new : is_last) break;
        if (Rule::CORRECTS) own.add(stage.factors.solves, differences);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int row = Tokens::row(i);
            own.x[i] = __fmul_rn(__fmul_rn(stage.factors.remaining[row], own.x[i]), stage.rows.keys.unit[row]);
        }
        __syncwarp();
        state.template advance<PREPARED>(own.x, stage.rows, stage.factors.decays[CHUNK - 1]);
        if (!is_prepared) __syncthreads();
    }
}

// What blocks of `scan` read of a slot, behind them: the key and the decay of a token, and the position of the state.
// Called by all threads of all blocks of a token, which are those along y.
template <int N, class Rule>
__device__ __forceinline__ void keep_rows(const Recurrence& net, const Rule& rule, int token, const float* sums) {
    const Sequences step = net.sequences();
    const int sequence = step.of(token), position = step.position(sequence, token);
    const long long slot = step.slot(sequence);
    if (token == step.cu_seqlens[sequence + 1] - 1 && !step.is_draft(sequence, net.has_drafts) && blockIdx.y == 0)
        for (int i = threadIdx.x; i < net.key_heads; i += blockDim.x)
            net.ends[slot * net.ends_pitch + i] = position / CHUNK * CHUNK;
    if (token < step.cu_seqlens[step.end_of_text(sequence, net.has_drafts)] - net.ring_rows) return;
    const int place = net.ring_row(position);
    float* keys = net.keys + slot * net.keys_pitch + static_cast<long long>(place) * net.key_heads * net.key_dim;
    const int warps = blockDim.x / WARP;
    for (int head = blockIdx.y * warps + threadIdx.x / WARP; head < net.key_heads; head += gridDim.y * warps) {
        float x[N / WARP];
        load_row<N>(x, rule.vector(net, false, token, head), net.key_dim);
        rule.scale(net, false, x);
#pragma unroll
        for (int i = 0; i < N / WARP; ++i) {
            const int d = i / 2 * 64 + threadIdx.x % WARP * 2 + i % 2;
            if (d < net.key_dim) keys[head * net.key_dim + d] = x[i];
        }
    }
    const float* own = sums + token * net.sums_pitch<Rule>();
    const auto copy = [&](float* to, int first, int width) {
        for (int i = blockIdx.y * blockDim.x + threadIdx.x; i < width; i += gridDim.y * blockDim.x)
            to[static_cast<long long>(place) * width + i] = own[first + i];
    };
    const int width = net.sums<Rule>();
    copy(net.decays + slot * net.decays_pitch, 0, width);
    if (Rule::CORRECTS) copy(net.solves + slot * net.solves_pitch, width, net.value_heads * CHUNK);
}

}  // namespace bminf
