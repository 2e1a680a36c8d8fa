// Recurrences in chunks of CHUNK tokens at fixed positions on tensor cores: what gated DeltaNet and Mamba 2 share. The
// formulas are those of backend/chunked_state.py.
//
// A block of `scan` computes a text of the step, its drafts included, in COLUMNS columns of a value head, chunk by
// chunk; each warp has WARP_COLUMNS of them, and keeps the state in its registers. A chunk begins with the keys and
// deltas of its earlier tokens, which lie in the rings of the sequence's slot, and goes on with new tokens.
//
// What does not depend on the state is prepared first: keys and queries as pairs of fp16, decays, and products of the
// chunk's tokens with each other. A text of at least PREPARED_TOKENS tokens has it prepared by another kernel, for all
// its chunks at once; else a block of `scan` does so for each chunk. Both call the same functions, and one token takes
// the same way as a whole chunk, so the bits of a token depend on its text alone.
//
// Products are sums of `mma.sync`. An fp32 factor is divided by a power of two that all of its row has in common, and
// split in two fp16 numbers, which have 22 bits together; a product is low * high + high * low + high * high. Each
// element of a result depends on its own row and column alone, and of what other tokens leave in the operands, nothing
// reaches it. Sums over the tokens of a chunk go from the first to the last by fma.
#pragma once
#include "common/async.cuh"
#include "common/common.cuh"
#include "common/sequences.cuh"
#include "common/tensor_cores.cuh"
#include "constants/recurrent.cuh"

namespace bminf {

constexpr int WARPS = THREADS / WARP;
constexpr int WARP_COLUMNS = 16;
constexpr int COLUMNS = WARPS * WARP_COLUMNS;  // of a head's state in a block
constexpr int HEADS_AT_ONCE = 4;               // value heads that a block prepares
constexpr int PITCH = WARP_COLUMNS + 4;        // of a warp's rows in shared memory

// What the sequences keep, in slots that are a pitch apart: states [value_heads, key_dim, value_dim], and rings of
// ring_rows tokens: keys [key_heads, key_dim], deltas [value_heads, value_dim], decays [value_heads], sums since their
// chunk's start, fp32. ends: the position of the state. cu_seqlens to count: see Sequences.
struct Recurrence {
    float* states;
    long long states_pitch;
    float* keys;
    long long keys_pitch;
    float* deltas;
    long long deltas_pitch;
    float* decays;
    long long decays_pitch;
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
};

// A text of a step: the tokens of a sequence that is no draft, and of the drafts behind it. New tokens have positions
// [start, stop), of which those before own_stop are no drafts. The state is that at position `loaded`.
struct Text {
    int first_token, start, own_stop, stop, loaded;
    long long slot;

    Text() = default;
    __device__ __forceinline__ Text(const Recurrence& net, int sequence) {
        const Sequences step = net.sequences();
        first_token = step.cu_seqlens[sequence];
        const int own_tokens = step.cu_seqlens[sequence + 1] - first_token;
        start = step.context_lens[sequence];
        slot = step.slot(sequence);
        own_stop = start + own_tokens;
        const int end = step.end_of_text(sequence, net.has_drafts);
        stop = end == sequence + 1 ? own_stop : start + step.cu_seqlens[end] - first_token;
        loaded = start ? net.ends[slot * net.ends_pitch] : 0;
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

// What the tokens of a chunk have of a value head. from_keys and from_queries: products of a token's key or query with
// the key of an earlier token, which is the first index, or with its own, with the decay in between.
struct Factors {
    __align__(16) float from_keys[CHUNK][CHUNK];
    float from_queries[CHUNK][2][CHUNK / 2];  // tokens with even numbers, then those with odd ones
    float sums[CHUNK];                        // of log-decays since the chunk's start
    float decays[CHUNK];                      // exp of these
    float remaining[CHUNK];                   // decays until the end of a whole chunk
    float rates[CHUNK];
};

// What a warp keeps of its columns.
struct WarpRoom {
    float read[2][CHUNK][PITCH];  // keys and queries times the state; then deltas [WARP_COLUMNS, CHUNK]
    float values[CHUNK][PITCH];   // of new tokens; deltas of known ones
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
template <int N>
__device__ __forceinline__ void load_known_rows(
    Vectors<N>& keys, const Recurrence& net, const Text& text, const Part& part, int key_head) {
    constexpr int COUNT = CHUNK / WARPS;
    const float* ring = net.keys + text.slot * net.keys_pitch + key_head * net.key_dim;
    const int first = threadIdx.x / WARP;
    float x[COUNT][N / WARP];
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
        const int row = first + i * WARPS;
        if (row < part.known)
            load_row<N>(x[i], ring + net.ring_row(part.end + row) * net.key_heads * net.key_dim, net.key_dim);
    }
#pragma unroll
    for (int i = 0; i < COUNT; ++i)
        if (first + i * WARPS < part.known) split_row<N>(keys, first + i * WARPS, x[i]);
}

// Keys and queries of the chunk's new tokens. Called by all threads.
template <int N, class Rule>
__device__ __forceinline__ void load_new_rows(
    Rows<N, false>& rows, const Recurrence& net, const Rule& rule, const Part& part, int key_head) {
    constexpr int COUNT = 4;  // rows of a warp that are loaded at once
    const int count = 2 * (part.count - part.known);
#pragma unroll 1
    for (int first = threadIdx.x / WARP; first < count; first += COUNT * WARPS) {
        float x[COUNT][N / WARP];
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            const int item = first + i * WARPS, row = part.known + item / 2;
            if (item < count) load_row<N>(x[i], rule.vector(net, item % 2, part.token_of(row), key_head), net.key_dim);
        }
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            const int item = first + i * WARPS, row = part.known + item / 2;
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
    static_assert(WARPS == 4, "two kinds of rows, and twice eight keys");
    float x[4];

    template <int N>
    __device__ __forceinline__ void compute(const Rows<N, false>& rows, const Part& part) {
        const int kind = threadIdx.x / WARP / 2, eighth = threadIdx.x / WARP % 2, lane = threadIdx.x % WARP;
        PairProduct product = {};
        if ((CORRECTS || kind) && eighth * 8 < part.count) {
            const Vectors<N>& left = kind ? rows.queries : rows.keys;
            const int row = lane % 16, column = lane / 16 * 8;
            const unsigned high_at = cast_smem_ptr_to_uint(&left.high[row][column]);
            const unsigned low_at = cast_smem_ptr_to_uint(&left.low[row][column]);
            const __half* right =
                &(lane < 16 ? rows.keys.high : rows.keys.low)[eighth * 8 + lane % 8][lane / 8 % 2 * 8];
            const unsigned right_at = cast_smem_ptr_to_uint(right);
#pragma unroll
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
        if (!CORRECTS && !kind) return;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int row = lane / 4 + i / 2 * 8, j = eighth * 8 + lane % 4 * 2 + i % 2;
            if (row < part.known || row >= part.count || j > row) continue;
            const float since = __fsub_rn(factors.sums[row], factors.sums[j]);
            const float decay = expf(since > 0.0f ? 0.0f : since);  // a NaN stays
            const float unit = (kind ? rows.queries : rows.keys).unit[row];
            const float found = __fmul_rn(__fmul_rn(__fmul_rn(x[i], unit), rows.keys.unit[j]), decay);
            if (kind)
                factors.from_queries[j][row % 2][row / 2] = found;
            else
                factors.from_keys[j][row] = found;
        }
    }
};

// With CHANNELS, all that does not depend on the state, in three phases that are a barrier apart. Called by all
// threads. First keys, queries and log-decays, or the sums of known tokens.
template <int N, class Rule>
__device__ __forceinline__ void load_channels(
    ChannelRoom<N, true>& room, Factors& factors, const Recurrence& net, const Rule& rule, const Text& text,
    const Part& part, int head) {
    const int lane = threadIdx.x % WARP, features = net.value_heads * net.key_dim;
    const long long slot = text.slot;
#pragma unroll 2
    for (int i = threadIdx.x / WARP; i < 3 * part.count; i += WARPS) {
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
    for (int row = threadIdx.x; row < part.count; row += THREADS) {
        if (row >= part.known) factors.rates[row] = rule.rate_and_decay(net, part.token_of(row), head).x;
        factors.decays[row] = factors.remaining[row] = 1.0f;
    }
}

// Then the sums, of which new ones go to `sums` [T, value_heads * key_dim] if that is not null.
template <int N>
__device__ __forceinline__ void add_channels(
    ChannelRoom<N, true>& room, Rows<N, true>& rows, const Recurrence& net, const Part& part, int head, float* sums) {
    for (int d = threadIdx.x; d < N; d += THREADS) {
        float sum = part.known ? room.sums[part.known - 1][d] : 0.0f;
        for (int i = part.known; i < part.count; ++i) {
            sum = __fadd_rn(sum, room.sums[i][d]);
            room.sums[i][d] = sum;
            if (sums && d < net.key_dim)
                sums[(static_cast<long long>(part.token_of(i)) * net.value_heads + head) * net.key_dim + d] = sum;
        }
        rows.decay[d] = expf(sum);
    }
}

// Then the rows, and products of new tokens with each other.
template <int N>
__device__ __forceinline__ void compute_channels(
    const ChannelRoom<N, true>& room, Rows<N, true>& rows, Factors& factors, const Part& part) {
    const int lane = threadIdx.x % WARP;
    for (int i = threadIdx.x / WARP; i < 3 * part.count; i += WARPS) {
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
    for (int i = threadIdx.x / LANES; i < CHUNK * (part.count - part.known); i += THREADS / LANES) {
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
        factors.from_keys[j][row] = of_key;
        factors.from_queries[j][row % 2][row / 2] = of_query;
    }
}

// Copies `count` bytes, a multiple of 16, by all threads.
__device__ __forceinline__ void copy_out(char* to, const void* from, int count) {
    for (int i = threadIdx.x * 16; i < count; i += THREADS * 16)
        *reinterpret_cast<uint4*>(to + i) = *reinterpret_cast<const uint4*>(static_cast<const char*>(from) + i);
}

// Prepares a chunk of a text, for HEADS_AT_ONCE value heads of a key head: the grid is (places, key_heads, parts of the
// value heads of a key head). rows: [places, key_heads] of Rows, factors: [places, value_heads] of Factors; sums: fp32
// [T, value_heads].
template <int N, class Rule>
__device__ __forceinline__ void prepare(
    const Recurrence& net, const Rule& rule, char* rows, char* factors, float* sums, Stage<N, Rule::CHANNELS>& stage,
    ChannelRoom<N, Rule::CHANNELS>& room) {
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
    const Text text(net, sequence);
    const int chunk = blockIdx.x - Text::first_place(text.first_token), key_head = blockIdx.y;
    if (chunk < 0 || text.loaded + chunk * CHUNK >= text.stop || !text.is_prepared()) return;
    const Part part(text, chunk);
    using OwnRows = Rows<N, Rule::CHANNELS>;
    const long long place = blockIdx.x;
    rows += (place * net.key_heads + key_head) * sizeof(OwnRows);
    if constexpr (Rule::CHANNELS) {
        load_channels<N>(room, stage.factors, net, rule, text, part, key_head);
        __syncthreads();
        add_channels<N>(room, stage.rows, net, part, key_head, sums);
        __syncthreads();
        compute_channels<N>(room, stage.rows, stage.factors, part);
        __syncthreads();
        copy_out(rows, &stage.rows, sizeof(OwnRows));
        copy_out(factors + (place * net.value_heads + key_head) * sizeof(Factors), &stage.factors, sizeof(Factors));
    } else {
        load_known_rows<N>(stage.rows.keys, net, text, part, key_head);
        load_new_rows<N>(stage.rows, net, rule, part, key_head);
        __syncthreads();
        Products<Rule::CORRECTS> products;
        products.compute<N>(stage.rows, part);
        if (blockIdx.z == 0) copy_out(rows, &stage.rows, sizeof(OwnRows));
        const int group = net.value_heads / net.key_heads, first = blockIdx.z * HEADS_AT_ONCE;
        for (int i = first; i < min(first + HEADS_AT_ONCE, group); ++i) {
            const int head = key_head * group + i, row = threadIdx.x;
            if (threadIdx.x < WARP) load_decays(stage.factors, net, rule, text, part, head);
            __syncthreads();
            products.store<N>(stage.factors, stage.rows, part);
            if (row >= part.known && row < part.count)
                sums[static_cast<long long>(part.token_of(row)) * net.value_heads + head] = stage.factors.sums[row];
            __syncthreads();
            copy_out(factors + (place * net.value_heads + head) * sizeof(Factors), &stage.factors, sizeof(Factors));
            __syncthreads();
        }
    }
}

// Starts copies of a prepared chunk. Called by all threads.
template <class OwnStage>
__device__ __forceinline__ void fetch(OwnStage& stage, const char* rows, const char* factors) {
    char* to = reinterpret_cast<char*>(&stage.rows);
    for (int i = threadIdx.x * 16; i < static_cast<int>(sizeof(stage.rows)); i += THREADS * 16)
        cp_async_16(to + i, rows + i);
    to = reinterpret_cast<char*>(&stage.factors);
    for (int i = threadIdx.x * 16; i < static_cast<int>(sizeof(Factors)); i += THREADS * 16)
        cp_async_16(to + i, factors + i);
    cp_async_commit_group();
}

// ---- what depends on it ------------------------------------------------------------------------------------------

// A warp's columns of a state, transposed: tile t of a lane has rows 8 t + lane % 4 * 2 and the next one, of column
// lane / 4 and then of the eighth behind it. So it is the result of one product and the left operand of another.
template <int N>
struct State {
    float x[N / 8][4];

    // Calls f(element, its offset in the memory of a head, whether it exists) for all elements.
    template <class F>
    __device__ __forceinline__ void each(const Recurrence& net, int first_column, F f) {
        const int lane = threadIdx.x % WARP, column = first_column + lane / 4;
#pragma unroll
        for (int t = 0; t < N / 8; ++t)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int row = t * 8 + lane % 4 * 2 + i % 2, own = column + i / 2 * 8;
                f(x[t][i], row * net.value_dim + own, row < net.key_dim && own < net.value_dim);
            }
    }

    // Keys, if CORRECTS, and queries of new tokens times the state; all tokens of a WHOLE chunk are new.
    template <bool CORRECTS, bool WHOLE, bool CHANNELS>
    __device__ __forceinline__ void read(WarpRoom& room, const Rows<N, CHANNELS>& rows, const Part& part) const {
        const int lane = threadIdx.x % WARP;
        float largest[2] = {};
#pragma unroll
        for (int t = 0; t < N / 8; ++t)
#pragma unroll
            for (int i = 0; i < 4; ++i) largest[i / 2] = fmaxf(largest[i / 2], fabsf(x[t][i]));
#pragma unroll
        for (int d = 1; d < 4; d *= 2)
#pragma unroll
            for (int i = 0; i < 2; ++i) largest[i] = fmaxf(largest[i], __shfl_xor_sync(FULL, largest[i], d));
        const Unit units[2] = {Unit(largest[0]), Unit(largest[1])};
        unsigned at[2];
#pragma unroll
        for (int kind = 0; kind < 2; ++kind) {
            const Vectors<N>& vectors = rows.reading(kind);
            at[kind] = cast_smem_ptr_to_uint(&(lane < 16 ? vectors.high : vectors.low)[lane % 8][lane / 8 % 2 * 8]);
        }
        constexpr int EIGHTH = 8 * (N + 8) * sizeof(__half);
        PairProduct products[2][2] = {};
#pragma unroll
        for (int k = 0; k < N / 16; ++k) {
            unsigned high[4], low[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float* pair = &x[2 * k + i / 2][i % 2 * 2];
                const float inverse = units[i % 2].inverse;
                split(__fmul_rn(pair[0], inverse), __fmul_rn(pair[1], inverse), high[i], low[i]);
            }
#pragma unroll
            for (int kind = !CORRECTS; kind < 2; ++kind)
#pragma unroll
                for (int eighth = 0; eighth < 2; ++eighth) {
                    if (!WHOLE && !part.has_new(eighth)) continue;
                    unsigned b[4];
                    ldmatrix_x4(b, at[kind] + eighth * EIGHTH + k * 32);
                    products[kind][eighth].add(high, low, b);
                }
        }
#pragma unroll
        for (int kind = !CORRECTS; kind < 2; ++kind)
#pragma unroll
            for (int eighth = 0; eighth < 2; ++eighth)
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const int row = eighth * 8 + lane % 4 * 2 + i % 2;
                    const float unit = rows.reading(kind).unit[row];
                    room.read[kind][row][lane / 4 + i / 2 * 8] =
                        __fmul_rn(__fmul_rn(products[kind][eighth].sum(i), units[i / 2].unit), unit);
                }
    }

    // The state behind a whole chunk, whose deltas lie in `room`, with decays until its end.
    template <bool CHANNELS>
    __device__ __forceinline__ void advance(const WarpRoom& room, const Rows<N, CHANNELS>& rows, float of_chunk) {
        const int lane = threadIdx.x % WARP;
        const float* deltas = &room.read[0][0][0];
        float2 pairs[4];
#pragma unroll
        for (int i = 0; i < 4; ++i)
            pairs[i] =
                *reinterpret_cast<const float2*>(deltas + (lane / 4 + i % 2 * 8) * PITCH + i / 2 * 8 + lane % 4 * 2);
        float largest[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            largest[i] =
                fmaxf(fmaxf(fabsf(pairs[i].x), fabsf(pairs[i].y)), fmaxf(fabsf(pairs[i + 2].x), fabsf(pairs[i + 2].y)));
#pragma unroll
            for (int d = 1; d < 4; d *= 2) largest[i] = fmaxf(largest[i], __shfl_xor_sync(FULL, largest[i], d));
        }
        const Unit units[2] = {Unit(largest[0]), Unit(largest[1])};
        unsigned high[4], low[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float inverse = units[i % 2].inverse;
            split(__fmul_rn(pairs[i].x, inverse), __fmul_rn(pairs[i].y, inverse), high[i], low[i]);
        }
        const unsigned at = cast_smem_ptr_to_uint(&(lane < 16 ? rows.keys.high : rows.keys.low)[lane % 16][0]);
        constexpr int AT_ONCE = N > 128 ? 2 : 4;
#pragma unroll
        for (int first = 0; first < N / 8; first += AT_ONCE) {
            PairProduct added[AT_ONCE] = {};
#pragma unroll
            for (int t = 0; t < AT_ONCE; ++t) {
                unsigned b[4];
                ldmatrix_x4_trans(b, at + (first + t) * 16);
                added[t].add(high, low, b);
            }
#pragma unroll
            for (int t = 0; t < AT_ONCE; ++t)
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const float decay = rows.decay_of(of_chunk, (first + t) * 8 + lane % 4 * 2 + i % 2);
                    x[first + t][i] = fmaf(decay, x[first + t][i], __fmul_rn(added[t].sum(i), units[i / 2].unit));
                }
        }
    }
};

// A lane's values of a chunk: of eight tokens, from lane / 16 * 8 on, in column lane % 16.
struct Values {
    float x[CHUNK / 2];

    template <class Rule>
    __device__ __forceinline__ void load(
        const Recurrence& net, const Rule& rule, const Text& text, const Part& part, int value, bool has_column) {
#pragma unroll
        for (int i = 0; i < CHUNK / 2; ++i) {
            const int row = threadIdx.x % WARP / 16 * 8 + i;
            x[i] = 0;
            if (!has_column || row >= part.count) continue;
            if (row < part.known)
                x[i] = net.deltas[text.slot * net.deltas_pitch + net.ring_row(part.end + row) * net.values() + value];
            else
                x[i] = rule.value(net, part.token_of(row), value);
        }
    }
    __device__ __forceinline__ void store(WarpRoom& room) const {
#pragma unroll
        for (int i = 0; i < CHUNK / 2; ++i) {
            const int lane = threadIdx.x % WARP;
            room.values[lane / 16 * 8 + i][lane % 16] = x[i];
        }
    }
};

// Deltas of a chunk's new tokens in column lane % 16, to room.read[0], and write(token, its output). Both halves of a
// warp compute all deltas, and each the outputs of every second token. All tokens of a whole chunk are new.
template <bool CORRECTS, class Write>
__device__ __forceinline__ void whole_chunk(const Factors& factors, WarpRoom& room, Write write) {
    const int column = threadIdx.x % WARP_COLUMNS, half = threadIdx.x % WARP / WARP_COLUMNS;
    float deltas[CHUNK], earlier[CHUNK] = {}, outputs[CHUNK / 2] = {};
#pragma unroll
    for (int j = 0; j < CHUNK; ++j) {
        float delta = room.values[j][column];
        if (CORRECTS) delta = __fsub_rn(delta, fmaf(factors.decays[j], room.read[0][j][column], earlier[j]));
        delta = __fmul_rn(factors.rates[j], delta);
        deltas[j] = delta;
        if (CORRECTS) {
#pragma unroll
            for (int i = j + 1; i < CHUNK; ++i) earlier[i] = fmaf(factors.from_keys[j][i], delta, earlier[i]);
        }
#pragma unroll
        for (int i = j / 2; i < CHUNK / 2; ++i)
            if (2 * i + half >= j) outputs[i] = fmaf(factors.from_queries[j][half][i], delta, outputs[i]);
    }
#pragma unroll
    for (int i = 0; i < CHUNK / 2; ++i) {
        const int row = 2 * i + half;
        write(row, fmaf(factors.decays[row], room.read[1][row][column], outputs[i]));
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < CHUNK / 2; ++i) room.read[0][2 * i + half][column] = half ? deltas[2 * i + 1] : deltas[2 * i];
}

// The same of a part of a chunk.
template <bool CORRECTS, class Write>
__device__ __forceinline__ void part_of_chunk(const Factors& factors, WarpRoom& room, const Part& part, Write write) {
    const int column = threadIdx.x % WARP_COLUMNS, half = threadIdx.x % WARP / WARP_COLUMNS;
    const auto sum = [&](const float* of_tokens, int count) {
        float found = 0;
#pragma unroll 4
        for (int j = 0; j < min(count, part.known); ++j)
            found = fmaf(of_tokens[j * CHUNK], room.values[j][column], found);
#pragma unroll 1
        for (int j = part.known; j < count; ++j) found = fmaf(of_tokens[j * CHUNK], room.read[0][j][column], found);
        return found;
    };
#pragma unroll 1
    for (int i = part.known; i < part.count; ++i) {
        float delta = room.values[i][column];
        if (CORRECTS) {
            const float earlier = sum(&factors.from_keys[0][i], i);
            delta = __fsub_rn(delta, fmaf(factors.decays[i], room.read[0][i][column], earlier));
        }
        __syncwarp();
        if (half == 0) room.read[0][i][column] = __fmul_rn(factors.rates[i], delta);
        __syncwarp();
    }
#pragma unroll 1
    for (int i = part.known + half; i < part.count; i += 2) {
        const float found = sum(&factors.from_queries[0][i % 2][i / 2], i + 1);
        write(i, fmaf(factors.decays[i], room.read[1][i][column], found));
    }
}

// The text and the state of a block of `scan`, and the keys of its first chunk that are in the ring. Returns whether
// there is a text. Called by all threads.
template <int N, bool PREPARED, bool CHANNELS>
__device__ __forceinline__ bool begin(
    const Recurrence& net, Text& text, State<N>& state, Shared<N, PREPARED ? 2 : 1, CHANNELS>& shared) {
    const int sequence = blockIdx.x, head = blockIdx.y;
    text = Text(net, sequence);
    if (text.own_stop == text.start || net.sequences().is_draft(sequence, net.has_drafts)) return false;
    const float* kept =
        net.states + text.slot * net.states_pitch + static_cast<long long>(head) * net.key_dim * net.value_dim;
    const int first_column = blockIdx.z * COLUMNS + threadIdx.x / WARP * WARP_COLUMNS;
    state.each(
        net, first_column, [&](float& x, int offset, bool exists) { x = exists && text.start ? kept[offset] : 0.0f; });
    if (!CHANNELS && !(PREPARED && text.is_prepared()))
        load_known_rows<N>(
            shared.stages[0].rows.keys, net, text, Part(text, 0), head / (net.value_heads / net.key_heads));
    return true;
}

// Outputs of all tokens, fp32 [T, out_pitch], and the sums of log-decays, `sums` fp32 [T, value_heads], where they are
// not prepared. States and deltas go to the slots. The grid is (sequences, value_heads, value_dim / COLUMNS). Chunks
// lie in `rows` and `factors`: see `prepare`. `begin` came before.
template <int N, bool PREPARED, class Rule>
__device__ __forceinline__ void scan(
    const Recurrence& net, const Rule& rule, const Text& text, const char* rows, const char* factors, float* sums,
    float* out, long long out_pitch, State<N>& state, Shared<N, PREPARED ? 2 : 1, Rule::CHANNELS>& shared) {
    const int head = blockIdx.y, warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const int key_head = head / (net.value_heads / net.key_heads);
    const int first_column = blockIdx.z * COLUMNS + warp * WARP_COLUMNS, column = first_column + lane % WARP_COLUMNS;
    const bool has_column = column < net.value_dim, is_prepared = PREPARED && text.is_prepared();
    const int value = head * net.value_dim + column, half = lane / WARP_COLUMNS;
    float* const deltas = net.deltas + text.slot * net.deltas_pitch + value;
    WarpRoom& room = shared.room[warp];
    const long long place = Text::first_place(text.first_token);
    const char* own_rows = rows + (place * net.key_heads + key_head) * sizeof(Rows<N, Rule::CHANNELS>);
    const char* own_factors = factors + (place * net.value_heads + head) * sizeof(Factors);
    Values values;
    values.load(net, rule, text, Part(text, 0), value, has_column);
    if (is_prepared) fetch(shared.stages[0], own_rows, own_factors);
#pragma unroll 1
    for (int chunk = 0;; ++chunk) {
        const Part part(text, chunk);
        Stage<N, Rule::CHANNELS>& stage = shared.stages[is_prepared ? chunk % 2 : 0];
        const bool is_last = text.stop <= part.end + CHUNK;
        if (is_prepared) {
            values.store(room);
            cp_async_wait_all();
            __syncthreads();
            if (!is_last) {
                own_rows += net.key_heads * sizeof(stage.rows);
                own_factors += net.value_heads * sizeof(Factors);
                fetch(shared.stages[PREPARED ? (chunk + 1) % 2 : 0], own_rows, own_factors);
            }
        } else {
            if constexpr (Rule::CHANNELS) {
                load_channels<N>(shared.channels, stage.factors, net, rule, text, part, head);
                values.store(room);
                __syncthreads();
                add_channels<N>(shared.channels, stage.rows, net, part, head, blockIdx.z == 0 ? sums : nullptr);
                __syncthreads();
                compute_channels<N>(shared.channels, stage.rows, stage.factors, part);
                __syncthreads();
            } else {
                if (chunk) load_known_rows<N>(stage.rows.keys, net, text, part, key_head);
                load_new_rows<N>(stage.rows, net, rule, part, key_head);
                if (warp == WARPS - 1) load_decays(stage.factors, net, rule, text, part, head);
                values.store(room);
                __syncthreads();
                Products<Rule::CORRECTS> products;
                products.compute<N>(stage.rows, part);
                products.store<N>(stage.factors, stage.rows, part);
                if (blockIdx.z == 0 && threadIdx.x >= part.known && threadIdx.x < part.count)
                    sums[static_cast<long long>(part.token_of(threadIdx.x)) * net.value_heads + head] =
                        stage.factors.sums[threadIdx.x];
            }
        }
        if (!is_last) values.load(net, rule, text, Part(text, chunk + 1), value, has_column);
        const bool is_whole = part.known == 0 && part.count == CHUNK;
        if (is_whole)
            state.template read<Rule::CORRECTS, true, Rule::CHANNELS>(room, stage.rows, part);
        else
            state.template read<Rule::CORRECTS, false, Rule::CHANNELS>(room, stage.rows, part);
        if (!is_prepared) __syncthreads();
        __syncwarp();
        const auto write = [&](int row, float y) {
            if (has_column)
                out[part.token_of(row) * out_pitch + value] =
                    rule.output(y, room.values[row][lane % WARP_COLUMNS], head);
        };
        if (is_whole)
            whole_chunk<Rule::CORRECTS>(stage.factors, room, write);
        else
            part_of_chunk<Rule::CORRECTS>(stage.factors, room, part, write);
        __syncwarp();
        if (has_column && part.end + CHUNK > text.stop - net.ring_rows)
            for (int j = max(part.known, text.stop - net.ring_rows - part.end) + half; j < part.count; j += 2)
                deltas[net.ring_row(part.end + j) * net.values()] = room.read[0][j][lane % WARP_COLUMNS];
        // The last token that is no draft lies in this chunk: the state at its start is kept.
        if (text.own_stop > part.end && text.own_stop <= part.end + CHUNK && (chunk || text.start == 0)) {
            float* kept =
                net.states + text.slot * net.states_pitch + static_cast<long long>(head) * net.key_dim * net.value_dim;
            state.each(net, first_column, [&](float& x, int offset, bool exists) {
                if (exists) kept[offset] = x;
            });
        }
        if (is_last) break;
        __syncwarp();
        float found[CHUNK / 2];
#pragma unroll
        for (int i = 0; i < CHUNK / 2; ++i) {
            const int j = half * 8 + i;
            const float delta = (j < part.known ? room.values : room.read[0])[j][lane % WARP_COLUMNS];
            found[i] = __fmul_rn(__fmul_rn(stage.factors.remaining[j], delta), stage.rows.keys.unit[j]);
        }
        __syncwarp();
        float* by_column = &room.read[0][0][0] + lane % WARP_COLUMNS * PITCH + half * 8;
#pragma unroll
        for (int i = 0; i < CHUNK / 2; ++i) by_column[i] = found[i];
        __syncwarp();
        state.advance(room, stage.rows, stage.factors.decays[CHUNK - 1]);
        if (is_prepared)
            __syncwarp();
        else
            __syncthreads();
    }
}

// What blocks of `scan` read of a slot, behind them: the key and the decay of a token, and the position of the state.
// Called by all threads of all blocks of a token, which are those along y.
template <int N, class Rule>
__device__ __forceinline__ void keep_rows(const Recurrence& net, const Rule& rule, int token, const float* sums) {
    const Sequences step = net.sequences();
    const int sequence = step.of(token), position = step.position(sequence, token);
    const long long slot = step.slot(sequence);
    if (token == step.cu_seqlens[sequence + 1] - 1 && !step.is_draft(sequence, net.has_drafts) && threadIdx.x == 0 &&
        blockIdx.y == 0)
        net.ends[slot * net.ends_pitch] = position / CHUNK * CHUNK;
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
    const int width = net.value_heads * (Rule::CHANNELS ? net.key_dim : 1);  // of the sums of a token
    float* decays = net.decays + slot * net.decays_pitch + static_cast<long long>(place) * width;
    for (int i = blockIdx.y * blockDim.x + threadIdx.x; i < width; i += gridDim.y * blockDim.x)
        decays[i] = sums[static_cast<long long>(token) * width + i];
}

}  // namespace bminf
