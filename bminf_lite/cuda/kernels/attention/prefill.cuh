// What the prefill kernels share: the work of a block, masks, the softmax of a tile, and the merge of segments. The
// order of all sums is that of softmax.cuh.
//
// A piece of work is a tile of rows of one key-value head of one sequence. Blocks take pieces in turn, so the grid does
// not depend on the lengths of sequences. The query heads that share the key-value head are
// packed into rows: row r is token r / group under the head r % group. So grouped-query heads fill a tile even if there
// are few tokens, and as the rows of a tile have neighbouring positions, few keys need a mask.
//
// Where few rows see many keys, a tile is split into several pieces, each with some of the segments. The first of them
// begins at the first segment and merges its segments itself. The others hand over a record for each segment, and
// attention_prefill_merge merges all of them.
//
// Scores s[n][j] and outputs o[n][j] of a warp's 16 rows are accumulators of the tensor cores: lane t holds of each
// eight columns n the elements j = {(r, q), (r, q + 1), (r + 8, q), (r + 8, q + 1)}, with r = t / 4 and q = t % 4 * 2.
#pragma once
#include "attention/int8_cache.cuh"
#include "attention/scores.cuh"
#include "common/async.cuh"
#include "common/tensor_cores.cuh"
#include "constants/prefill.cuh"

namespace bminf {

// Sequence b has the tokens cu_seqlens[b] to cu_seqlens[b + 1] - 1, at positions from context_lens[b] on. The token at
// position j is in block block_tables[b, j / BLOCK_SIZE], at place j % BLOCK_SIZE. D is head_dim padded to a multiple
// of 16.
struct PrefillParams {
    const __half* q;  // [T, heads, D], q_pitch elements from token to token
    long long q_pitch;
    const void* keys;    // [blocks, kv_heads, BLOCK_SIZE, D] of fp16, or of int8 codes; BIDIRECTIONAL: head h of the
    const void* values;  // step's token t is row t * stride + h, of D elements
    __half* out;         // [T, heads * head_dim], out_pitch elements from token to token
    long long out_pitch;
    const int* cu_seqlens;
    const int* context_lens;  // only for CAUSAL
    const int* block_tables;  // [sequences, table_pitch]
    int table_pitch;
    int stride;
    float scale;  // of the scores, times log2(e), because exponentials are to the base 2; positive; see softcap
    int window;   // how many keys a query sees, its own included; 0 for all up to its own. BIDIRECTIONAL: this many in
                  // each direction; 0 for all
    int heads, kv_heads, head_dim, sequences;
    // [heads, 2 * max_distance + 1] by the distance key - query, clipped to max_distance; for ALIBI the slopes [heads],
    // for SINKS the sinks [heads]
    const float* bias;
    int max_distance;
    float softcap;             // for CAPPED, where it and scale are the cap and the factor of capped_score
    const int* source_lens;    // [sequences], only for CROSS
    const __half* key_scales;  // of codes: [blocks, kv_heads, BLOCK_SIZE]
    const __half* value_scales;
    float* records;          // [max_records, rows of a tile * (D + 2)]: see Record
    int max_records, parts;  // parts: about how many all tiles make, if they are split
    float* running;          // [gridDim.x, rows of a tile * D]: see RunningResult; null if it is in shared memory
    int* counters;           // the blocks' next piece of work, and the blocks that have ended; zero before and after
};

__device__ __forceinline__ int ceil_div(int a, int b) { return (a + b - 1) / b; }

// ---- work --------------------------------------------------------------------------------------------------------

// A piece of work.
struct WorkTile {
    int head, first, rows, group;       // key-value head, first row of the tile, rows of the sequence, query heads per
    int before, window;                 // key-value head; position of the sequence's first token; see PrefillParams
    int first_position, last_position;  // of the tile's rows
    int begin, end;                     // keys of this piece that any row sees; begin is a multiple of KEYS
    int sequence, start;                // the sequence and its first token
    int record;                         // the first record of the tile, -1 if it is not split
    int part, per_part;                 // this part of a split tile, and the segments of a part
    int first_segment, segments;        // of the whole tile

    __device__ __forceinline__ int position(int row) const { return before + row / group; }
    // The record of a segment. The first part has one record, because it merges its segments.
    __device__ __forceinline__ int record_of(int segment) const {
        return record + (part ? segment - first_segment - per_part + 1 : 0);
    }
    __device__ __forceinline__ int records() const { return 1 + max(0, segments - per_part); }
};

// The blocks or, with clusters, the clusters of the grid take pieces of work in turn. The first piece of each is its
// number. The index of the next one, in all lanes of a warp:
__device__ __forceinline__ int next_index(const PrefillParams& p, int takers) {
    int index = 0;
    if (threadIdx.x % WARP == 0) index = takers + atomicAdd(p.counters, 1);
    return __shfl_sync(FULL, index, 0);
}

// One of `takers` finds no more work; one thread of each calls it. The last one clears the counters.
__device__ __forceinline__ void end_work(const PrefillParams& p, int takers) {
    if (atomicAdd(p.counters + 1, 1) == takers - 1) p.counters[0] = p.counters[1] = 0;
}

// The part of the walk over sequences that one lane computes.
struct SequenceWork {
    int start, tokens, before, end, tiles, segments;  // end: of its keys; segments: the most that a tile sees
};

template <int MASK, int ROWS>
__device__ __forceinline__ SequenceWork sequence_work(const PrefillParams& p, int b, int group) {
    if (b >= p.sequences) return {};
    SequenceWork s;
    s.start = p.cu_seqlens[b], s.tokens = p.cu_seqlens[b + 1] - s.start;
    s.before = MASK == CAUSAL ? p.context_lens[b] : 0;
    s.end = MASK == CROSS ? p.source_lens[b] : s.before + s.tokens;
    s.tiles = ceil_div(s.tokens * group, ROWS), s.segments = ceil_div(s.end, SEGMENT);
    if (MASK == CAUSAL && p.window)
        s.segments = min(s.segments, (p.window + (ROWS - 1) / group + SEGMENT - 1) / SEGMENT + 1);
    return s;
}

// The sum over this lane and those before it.
__device__ __forceinline__ int inclusive_sum(int x) {
    const int lane = threadIdx.x % WARP;
#pragma unroll
    for (int d = 1; d < WARP; d *= 2) {
        const int before = __shfl_up_sync(FULL, x, d);
        if (lane >= d) x += before;
    }
    return x;
}

// How tiles are split: those that may see more than `longest` segments, into parts of `per_part` segments and a rest.
struct Split {
    int longest, per_part;
};

// The order of pieces of work: in_turn pieces of one head, then in_turn of the next. With 1 heads take turns, so the
// longest pieces of all heads come first.
struct PieceOrder {
    int in_turn;

    __device__ __forceinline__ int head(int index, int kv_heads) const { return index / in_turn % kv_heads; }
    __device__ __forceinline__ int piece(int index, int kv_heads) const {
        return index / (in_turn * kv_heads) * in_turn + index % in_turn;
    }
};

// The order of tiles of ROWS rows for `takers`, which take work. Where the keys and values of all heads do not fit in
// the L2 cache, one head follows another, because those of one may fit; but only if a head has a tile for each that
// takes work, and no tile is split. Called by whole warps.
template <int ROWS>
__device__ __forceinline__ PieceOrder find_order(const PrefillParams& p, const Split& split, int takers) {
    constexpr float CACHE = 32 << 20;  // bytes
    const int group = p.heads / p.kv_heads;
    int tiles = 0;
    float keys = 0;
    bool is_split = false;
    for (int first = 0; first < p.sequences; first += WARP) {
        const SequenceWork s = sequence_work<CAUSAL, ROWS>(p, first + threadIdx.x % WARP, group);
        tiles += s.tiles, keys += static_cast<float>(s.end), is_split |= s.segments > split.longest;
    }
#pragma unroll
    for (int d = WARP / 2; d; d /= 2) tiles += __shfl_xor_sync(FULL, tiles, d), keys += __shfl_xor_sync(FULL, keys, d);
    const bool fits = keys * static_cast<float>(4 * p.kv_heads * p.head_dim) <= CACHE;
    return {fits || tiles < takers || __any_sync(FULL, is_split) ? 1 : tiles};
}

// Finds the split with which p.parts blocks that take pieces in turn end earliest, if its records fit. Called by whole
// warps.
template <int MASK, int ROWS>
__device__ __forceinline__ Split find_split(const PrefillParams& p) {
    constexpr int ROUNDS = 4;
    const int group = p.heads / p.kv_heads, lane = threadIdx.x % WARP;
    if (!p.max_records) return {1 << 28, 1 << 28};
    int work = 0;
    for (int first = 0; first < p.sequences; first += WARP) {
        const SequenceWork s = sequence_work<MASK, ROWS>(p, first + lane, group);
        work += s.tiles * s.segments;
    }
#pragma unroll
    for (int d = WARP / 2; d; d /= 2) work += __shfl_xor_sync(FULL, work, d);
    const int share = max(1, ceil_div(work * p.kv_heads, p.parts)), longest = share * 5 / 4;  // else it does not pay
    // Lane n considers blocks that take n + 1 parts or more.
    const int part = ceil_div(share, lane % ROUNDS + 1);
    int parts = 0, rests = 0, segments_of_rests = 0, records = 0;
    for (int first = 0; first < p.sequences; first += WARP) {
        const SequenceWork s = sequence_work<MASK, ROWS>(p, first + lane, group);
        for (int i = 0; i < min(WARP, p.sequences - first); ++i) {
            const int segments = __shfl_sync(FULL, s.segments, i), tiles = __shfl_sync(FULL, s.tiles, i) * p.kv_heads;
            if (segments <= longest) continue;
            parts += tiles * (segments / part), records += tiles * (segments - part + 1);
            if (segments % part) rests += tiles, segments_of_rests += tiles * (segments % part);
        }
    }
    const int rounds = ceil_div(parts, p.parts), free = rounds * p.parts - parts;  // blocks in the last round
    const int rest = rests ? ceil_div(segments_of_rests, rests) : 1, left = max(0, rests - free * (part / rest));
    const int length = rounds * part + ceil_div(left, p.parts) * rest;
    int best = (length + (records <= p.max_records ? 0 : 1 << 24)) * ROUNDS + lane % ROUNDS;
#pragma unroll
    for (int d = 1; d < ROUNDS; d *= 2) best = min(best, __shfl_xor_sync(FULL, best, d));
    return {longest, __shfl_sync(FULL, part, best % ROUNDS)};
}

enum Found { NO_MORE, NOTHING, FOUND };

// A place in the walk over sequences: those before `first` have this many pieces of a head, and records.
struct WorkCursor {
    int first = 0, pieces = 0, records = 0;
};

// Finds piece `index` of the work of a head, and leaves the cursor there: the next piece is sought from it on. NOTHING:
// this part of a split tile has no keys. With SPLIT_TILES `index` counts only tiles that are split, and the work is the
// whole tile. Called by whole warps.
template <int MASK, int ROWS, int KEYS, bool SPLIT_TILES = false>
__device__ __forceinline__ Found
find_work_tile(const PrefillParams& p, const Split& split, int head, int index, WorkCursor& cursor, WorkTile& work) {
    const int group = p.heads / p.kv_heads, per_part = split.per_part;
    if (index < cursor.pieces) cursor = {};
    for (; cursor.first < p.sequences; cursor.first += WARP) {
        const SequenceWork s = sequence_work<MASK, ROWS>(p, cursor.first + threadIdx.x % WARP, group);
        int first_record = -1, pieces = SPLIT_TILES ? 0 : s.tiles, records_behind = 0;
        if (p.max_records) {
            const bool long_enough = s.segments > split.longest;
            const int records = long_enough ? s.tiles * p.kv_heads * (s.segments - per_part + 1) : 0;
            const int records_end = cursor.records + inclusive_sum(records);
            if (long_enough && records_end <= p.max_records) {
                first_record = records_end - records;
                pieces = SPLIT_TILES ? s.tiles : s.tiles * ceil_div(s.segments, per_part);
            }
            records_behind = __shfl_sync(FULL, records_end, WARP - 1);
        }
        const int pieces_end = cursor.pieces + inclusive_sum(pieces);
        if (const unsigned after = __ballot_sync(FULL, index < pieces_end)) {
            const int lane = __ffs(after) - 1;
            const auto from = [&](int x) { return __shfl_sync(FULL, x, lane); };
            const int tiles = from(s.tiles), segments = from(s.segments);
            index -= from(pieces_end - pieces);
            // The last tiles of a sequence see the most keys, so they start first.
            const int tile = tiles - 1 - index % tiles;
            work.part = SPLIT_TILES ? 0 : index / tiles, work.per_part = per_part;
            work.record = from(first_record);
            if (work.record >= 0) work.record += (tile * p.kv_heads + head) * (segments - per_part + 1);
            work.head = head, work.group = group, work.first = tile * ROWS, work.rows = from(s.tokens) * group;
            work.sequence = cursor.first + lane, work.start = from(s.start);
            work.before = from(s.before), work.window = p.window;
            work.first_position = work.position(work.first);
            work.last_position = work.position(min(work.first + ROWS, work.rows) - 1);
            work.begin = 0, work.end = from(s.end);
            if (MASK != CROSS && p.window) work.begin = max(0, work.first_position - p.window + 1) / KEYS * KEYS;
            if (MASK == CAUSAL) work.end = work.last_position + 1;
            if (MASK == BIDIRECTIONAL && p.window) work.end = min(work.end, work.last_position + p.window);
            work.first_segment = work.begin / SEGMENT;
            work.segments = ceil_div(work.end, SEGMENT) - work.first_segment;
            if (SPLIT_TILES || work.record < 0) return FOUND;
            const int segment = work.first_segment + work.part * per_part;
            work.begin = max(work.begin, segment * SEGMENT);
            work.end = min(work.end, (segment + per_part) * SEGMENT);
            return work.begin < work.end ? FOUND : NOTHING;
        }
        cursor.pieces = __shfl_sync(FULL, pieces_end, WARP - 1), cursor.records = records_behind;
    }
    return NO_MORE;
}

// Finds the first piece of work from `index` on, counted over all heads, that is not empty; returns whether there is
// one.
template <int MASK, int ROWS, int KEYS>
__device__ __forceinline__ bool find_work(
    const PrefillParams& p, const Split& split, const PieceOrder& order, int index, int takers, WorkTile& work) {
    for (;;) {
        const int head = order.head(index, p.kv_heads), piece = order.piece(index, p.kv_heads);
        WorkCursor cursor;
        const Found found = find_work_tile<MASK, ROWS, KEYS>(p, split, head, piece, cursor, work);
        if (found != NOTHING) return found == FOUND;
        index = next_index(p, takers);
    }
}

// ---- cached keys and values --------------------------------------------------------------------------------------

// The row of a key in a pool [blocks * kv_heads * BLOCK_SIZE, D]. The rows of the rest of its block follow. Keys from
// work.end on have no block.
__device__ __forceinline__ unsigned pool_row(const PrefillParams& p, const WorkTile& work, int key) {
    const int block =
        key < work.end ? p.block_tables[static_cast<size_t>(work.sequence) * p.table_pitch + key / BLOCK_SIZE] : 0;
    return (block * p.kv_heads + work.head) * BLOCK_SIZE + key % BLOCK_SIZE;
}

// COUNT keys of a head, or their values, from a multiple of COUNT on: those of a cache, or of the step.
template <int D, int COUNT, class CACHE, int MASK>
struct CachedRows {
    static constexpr bool PAGED = MASK != BIDIRECTIONAL;
    static constexpr int PARTS = PAGED && COUNT > BLOCK_SIZE ? COUNT / BLOCK_SIZE : 1;
    Cached<CACHE> pool;
    unsigned start[PARTS];  // the row of the first key, in the pool that of each block
    int stride;             // rows from key to key
    int valid;              // the number of keys that are present

    __device__ __forceinline__ static CachedRows find(
        const PrefillParams& p, const WorkTile& work, bool values, int key) {
        CachedRows rows;
        rows.pool = {static_cast<const CACHE*>(values ? p.values : p.keys), values ? p.value_scales : p.key_scales};
        rows.valid = work.end - key, rows.stride = PAGED ? 1 : p.stride;
#pragma unroll
        for (int i = 0; i < PARTS; ++i)
            rows.start[i] = PAGED ? pool_row(p, work, key + i * BLOCK_SIZE) : (work.start + key) * p.stride + work.head;
        return rows;
    }
    __device__ __forceinline__ unsigned index(int row) const {
        if (PARTS > 1) return start[row / BLOCK_SIZE] + row % BLOCK_SIZE;
        return start[0] + (PAGED ? row : row * stride);
    }
    __device__ __forceinline__ const CACHE* data(int row) const {
        return pool.data + static_cast<size_t>(index(row)) * D;
    }
    __device__ __forceinline__ const __half* scale(int row) const { return pool.scales + index(row); }
};

// Sixteen codes of one token in registers; zeros if not present.
struct CodeVector {
    uint4 codes;
    __half scale;

    __device__ __forceinline__ void load(const int8* data, const __half* scales, bool present) {
        codes = present ? *reinterpret_cast<const uint4*>(data) : make_uint4(0, 0, 0, 0);
        scale = present ? *scales : __float2half_rn(0.0f);
    }
};

// Starts the copy of eight elements of a row's query from `column` on; zeros for rows beyond the sequence.
template <int D>
__device__ __forceinline__ void copy_query(
    __half* target, const WorkTile& work, const PrefillParams& p, int row, int column) {
    const int token = row / work.group, head = work.head * work.group + row - token * work.group;
    const bool valid = row < work.rows;
    cp_async_16(target, valid ? p.q + (work.start + token) * p.q_pitch + head * D + column : p.q, valid);
}

// ---- masks and biases --------------------------------------------------------------------------------------------

// The keys that not all rows of a tile see: those before `first`, and those behind `last`.
struct MaskedKeys {
    int first, last;

    // Of the rows of a tile from `row` of the sequence on.
    __device__ __forceinline__ MaskedKeys(const WorkTile& work, int row)
        : first(work.window ? work.last_position - work.window + 1 : 0),
          last(work.position(row)) {}
    // Whether any of `count` keys from `key` on is one of them.
    __device__ __forceinline__ bool among(int key, int count) const { return key < first || key + count - 1 > last; }
};

// Sets scores to -inf where a row does not see a key; column 0 of s is `key`, position: of the thread's two rows.
template <int N>
__device__ __forceinline__ void apply_causal_mask(float (&s)[N][4], const int (&position)[2], int key, int window) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        const int last = position[h] - key - static_cast<int>(threadIdx.x) % 4 * 2;
        const int before = window ? last - window : -1;
#pragma unroll
        for (int n = 0; n < N; ++n)
#pragma unroll
            for (int j = 0; j < 2; ++j)
                if (n * 8 + j > last || n * 8 + j <= before) s[n][2 * h + j] = -INF_F;
    }
}

// The same for a query that sees the keys less than `window` tokens before or behind it.
template <int N>
__device__ __forceinline__ void apply_window_mask(float (&s)[N][4], const int (&position)[2], int key, int window) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        const int place = position[h] - key - static_cast<int>(threadIdx.x) % 4 * 2;
#pragma unroll
        for (int n = 0; n < N; ++n)
#pragma unroll
            for (int j = 0; j < 2; ++j)
                if (n * 8 + j <= place - window || n * 8 + j >= place + window) s[n][2 * h + j] = -INF_F;
    }
}

// Sets scores to -inf from column `count` on.
template <int N>
__device__ __forceinline__ void mask_keys_from(float (&s)[N][4], int count) {
    count -= static_cast<int>(threadIdx.x) % 4 * 2;
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
        for (int j = 0; j < 4; ++j)
            if (n * 8 + j % 2 >= count) s[n][j] = -INF_F;
}

// Turns dot products into scores with a bias. Column 0 of s is `key`; first: the first of the warp's 16 rows.
template <int N>
__device__ __forceinline__ void add_bias(
    float (&s)[N][4], const WorkTile& work, const PrefillParams& p, const int (&position)[2], int first, int key) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        const int head =
            work.head * work.group + (first + static_cast<int>(threadIdx.x) % WARP / 4 + h * 8) % work.group;
        const float* const bias = p.bias + static_cast<long long>(head) * (2 * p.max_distance + 1) + p.max_distance;
        const int distance = key + static_cast<int>(threadIdx.x) % 4 * 2 - position[h];
#pragma unroll
        for (int n = 0; n < N; ++n)
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                const float value = __ldg(bias + max(-p.max_distance, min(p.max_distance, distance + n * 8 + j)));
                s[n][2 * h + j] = biased_score(s[n][2 * h + j], p.scale, value);
            }
    }
}

// Whether scores are more than scaled dot products.
template <int SCORES>
constexpr bool CHANGES_SCORES = SCORES != PLAIN && SCORES != SINKS;

// Turns dot products into scores, of a kind that changes them. The arguments are those of add_bias.
template <int SCORES, int N>
__device__ __forceinline__ void change_scores(
    float (&s)[N][4], const WorkTile& work, const PrefillParams& p, const int (&position)[2], int first, int key) {
    if constexpr (SCORES == BIASED) add_bias(s, work, p, position, first, key);
    if constexpr (SCORES == CAPPED) {
#pragma unroll
        for (int n = 0; n < N; ++n)
#pragma unroll
            for (int j = 0; j < 4; ++j) s[n][j] = capped_score(s[n][j], p.scale, p.softcap);
    }
    if constexpr (SCORES == ALIBI) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int row = first + static_cast<int>(threadIdx.x) % WARP / 4 + h * 8;
            const float slope = __ldg(p.bias + work.head * work.group + row % work.group);
            const float distance = static_cast<float>(key + static_cast<int>(threadIdx.x) % 4 * 2 - position[h]);
#pragma unroll
            for (int n = 0; n < N; ++n)
#pragma unroll
                for (int j = 0; j < 2; ++j)
                    s[n][2 * h + j] = alibi_score(
                        s[n][2 * h + j], p.scale, slope, __fadd_rn(distance, static_cast<float>(n * 8 + j)));
        }
    }
}

// ---- softmax -----------------------------------------------------------------------------------------------------

// A thread's two rows in the segment under way: the largest score so far, and the partial sums of weights over the keys
// j with j % 8 == lane % 4 * 2 and its successor.
struct SoftmaxState {
    float top[2] = {-INF_F, -INF_F}, sum[2][2] = {};
};

// Turns dot products into weights, and updates the state. rescale: the factor for outputs that were accumulated before.
// scale: p.scale, or 1 if s are scores already.
template <int N>
__device__ __forceinline__ void online_softmax(
    SoftmaxState& state, float (&s)[N][4], float (&rescale)[2], float scale) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        float dot = -INF_F, sum[2];
#pragma unroll
        for (int n = 0; n < N; ++n) dot = fmaxf(dot, fmaxf(s[n][2 * h], s[n][2 * h + 1]));
        dot = fmaxf(dot, __shfl_xor_sync(FULL, dot, 1));
        dot = fmaxf(dot, __shfl_xor_sync(FULL, dot, 2));
        const float top = fmaxf(state.top[h], __fmul_rn(dot, scale)), shift = softmax_shift(top);
        rescale[h] = rescale_factor(state.top[h], shift);
#pragma unroll
        for (int n = 0; n < N; ++n)
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                float& x = s[n][2 * h + j];
                x = softmax_weight(x, scale, shift);
                sum[j] = n == 0 ? x : __fadd_rn(sum[j], x);
            }
        state.top[h] = top;
#pragma unroll
        for (int j = 0; j < 2; ++j) state.sum[h][j] = add_tile_sum(state.sum[h][j], rescale[h], sum[j]);
    }
}

// o[row] *= by[row].
template <int N>
__device__ __forceinline__ void multiply_rows(float (&o)[N][4], const float (&by)[2]) {
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
        for (int j = 0; j < 4; ++j) o[n][j] = __fmul_rn(o[n][j], by[j / 2]);
}

template <int N>
__device__ __forceinline__ void set_zero(float (&o)[N][4]) {
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
        for (int j = 0; j < 4; ++j) o[n][j] = 0.0f;
}

// The weights of the keys 16 * k to 16 * k + 15, rounded to fp16, as a left operand of the tensor cores.
template <int N>
__device__ __forceinline__ void weights_fragment(unsigned (&a)[4], const float (&s)[N][4], int k) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        const float (&piece)[4] = s[2 * k + j / 2];
        a[j] = pack_half2(piece[j % 2 * 2], piece[j % 2 * 2 + 1]);
    }
}

// ---- segments ----------------------------------------------------------------------------------------------------

// The largest score and the sum of weights of a thread's two rows, of a segment or of several merged ones. All four
// lanes of a row have the same. The outputs are beside it.
struct RowSums {
    float top[2], sum[2];
};

__device__ __forceinline__ RowSums row_sums(const SoftmaxState& state) {
    RowSums sums;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        sums.top[h] = state.top[h], sums.sum[h] = __fadd_rn(state.sum[h][0], state.sum[h][1]);
        sums.sum[h] = __fadd_rn(sums.sum[h], __shfl_xor_sync(FULL, sums.sum[h], 1));
        sums.sum[h] = __fadd_rn(sums.sum[h], __shfl_xor_sync(FULL, sums.sum[h], 2));
    }
    return sums;
}

// A thread's part of the outputs of the warp's 16 rows from `row` on, where those of a tile lie in memory: vector n has
// o[n], and vectors are WARP apart. So the outputs of a warp are one piece of 16 rows.
template <int D>
__device__ __forceinline__ float4* fragment_of(float* tile, int row) {
    return reinterpret_cast<float4*>(tile + row * D) + threadIdx.x % WARP;
}

template <int N>
__device__ __forceinline__ void store_fragment(float4* vectors, const float (&o)[N][4]) {
#pragma unroll
    for (int n = 0; n < N; ++n) vectors[n * WARP] = make_float4(o[n][0], o[n][1], o[n][2], o[n][3]);
}

// A thread's part of the merged result of the segments that have ended. The outputs lie outside registers, see
// fragment_of. If they lie in shared memory, the outputs of a record go there on their way, so that the warp need not
// wait for stores to global memory.
template <int N, bool IN_SHARED>
struct RunningResult {
    float4* vectors;
    bool empty = true;
    RowSums left = {};

    // Merges a segment's record with what is to its left.
    __device__ __forceinline__ void merge_with(RowSums& sums, float (&o)[N][4]) const {
        if (empty) return;
        const MergeFactors factors[2] = {
            merge_factors(left.top[0], sums.top[0]), merge_factors(left.top[1], sums.top[1])};
#pragma unroll
        for (int h = 0; h < 2; ++h)
            sums.top[h] = factors[h].top, sums.sum[h] = merge(factors[h], left.sum[h], sums.sum[h]);
#pragma unroll
        for (int n = 0; n < N; ++n) {
            const float4 x = vectors[n * WARP];
            o[n][0] = merge(factors[0], x.x, o[n][0]), o[n][1] = merge(factors[0], x.y, o[n][1]);
            o[n][2] = merge(factors[1], x.z, o[n][2]), o[n][3] = merge(factors[1], x.w, o[n][3]);
        }
    }
    __device__ __forceinline__ void store(const RowSums& sums, const float (&o)[N][4]) {
        empty = false, left = sums;
        wait_for_copy();
        store_fragment(vectors, o);
    }
    // Writes the outputs of a record to `target`.
    __device__ __forceinline__ void hand_over(float4* target, const float (&o)[N][4]) const {
        if constexpr (!IN_SHARED) return store_fragment(target, o);
        wait_for_copy();
        store_fragment(vectors, o);
#if __CUDA_ARCH__ >= 900
        warp_copy_to_global(target, vectors, N * WARP * sizeof(float4));
#endif
    }
    __device__ __forceinline__ void wait_for_copy() const {
#if __CUDA_ARCH__ >= 900
        if constexpr (IN_SHARED) warp_copy_wait_read();
#endif
    }
};

// A record in memory: o [ROWS, D] in the order of fragment_of, then (top, sum) [ROWS, 2], in fp32.
template <int D, int ROWS>
struct Record {
    float* data;

    __device__ __forceinline__ Record(const PrefillParams& p, int index)
        : data(p.records + static_cast<size_t>(index) * (ROWS * (D + 2))) {}
    __device__ __forceinline__ float4* outputs(int row) const { return fragment_of<D>(data, row); }
    __device__ __forceinline__ float2* sums(int row) const { return reinterpret_cast<float2*>(data + ROWS * D) + row; }
    // row: the first of the warp's 16 rows in the tile. o: its N times eight columns, from 8 * first on.
    template <int N, bool IN_SHARED>
    __device__ __forceinline__ void write(
        int row, const RowSums& of, const float (&o)[N][4], const RunningResult<N, IN_SHARED>& running,
        int first) const {
        const int lane = threadIdx.x % WARP;
#pragma unroll
        for (int h = 0; h < 2; ++h)
            if (lane % 4 == 0) *sums(row + lane / 4 + h * 8) = make_float2(of.top[h], of.sum[h]);
        running.hand_over(outputs(row) + first * WARP, o);
    }
};

// Ends a segment that is not the last of the block: merges it into the running result, or hands over its record. row,
// first: as in Record::write.
template <int D, int ROWS, int N, bool IN_SHARED>
__device__ __forceinline__ void end_segment(
    const PrefillParams& p, const WorkTile& work, int segment, int row, const SoftmaxState& state, float (&o)[N][4],
    RunningResult<N, IN_SHARED>& running, int first = 0) {
    RowSums sums = row_sums(state);
    if (work.part) {
        Record<D, ROWS>(p, work.record_of(segment)).write(row, sums, o, running, first);
    } else {
        running.merge_with(sums, o);
        running.store(sums, o);
    }
}

// The quotient o / sum as attention_output computes it: `inverse` is the rounded 1 / sum, and two corrections by the
// exact remainder leave no error, as in Markstein, IBM J. Res. Dev. 34 (1990).
__device__ __forceinline__ float quotient(float o, float sum, float inverse) {
    float q = __fmul_rn(o, inverse);
    q = __fmaf_rn(__fmaf_rn(-sum, q, o), inverse, q);
    return __fmaf_rn(__fmaf_rn(-sum, q, o), inverse, q);
}

// The sink of the head of a row of the sequence.
__device__ __forceinline__ const float* sink_of(const PrefillParams& p, const WorkTile& work, int row) {
    return p.bias + work.head * work.group + row % work.group;
}

// Ends the last segment of a piece of work. Returns whether o has become the output, else it has handed over a record.
template <int D, int ROWS, int SCORES, int N, bool IN_SHARED>
__device__ __forceinline__ bool end_last_segment(
    const PrefillParams& p, const WorkTile& work, int row, const SoftmaxState& state, float (&o)[N][4],
    const RunningResult<N, IN_SHARED>& running, int first = 0) {
    RowSums sums = row_sums(state);
    running.merge_with(sums, o);
    if (work.record >= 0) {
        Record<D, ROWS>(p, work.record_of((work.end - 1) / SEGMENT)).write(row, sums, o, running, first);
        return false;
    }
    if constexpr (SCORES == SINKS) {
        float left[2];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int own = work.first + row + static_cast<int>(threadIdx.x) % WARP / 4 + h * 8;
            const MergeFactors factors = sink_factors(sums.top[h], sink_of(p, work, own));
            sums.sum[h] = merge(factors, sums.sum[h], 1.0f), left[h] = factors.left;
        }
        multiply_rows(o, left);
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        const float sum = sums.sum[h], inverse = sum == 0.0f ? 0.0f : __frcp_rn(sum);
#pragma unroll
        for (int n = 0; n < N; ++n)
#pragma unroll
            for (int j = 2 * h; j < 2 * h + 2; ++j) o[n][j] = quotient(o[n][j], sum, inverse);
    }
    return true;
}

// ---- outputs -----------------------------------------------------------------------------------------------------

// Where the output of a row lies.
__device__ __forceinline__ __half* output_row(const WorkTile& work, const PrefillParams& p, int row) {
    const int token = row / work.group, head = work.head * work.group + row - token * work.group;
    return p.out + (work.start + token) * p.out_pitch + head * p.head_dim;
}

// Writes eight elements of a row's output from `column` on, as far as they are within the row and the sequence.
__device__ __forceinline__ void store_output(
    const WorkTile& work, const PrefillParams& p, int row, int column, const __half* eight) {
    if (row >= work.rows) return;
    __half* const target = output_row(work, p, row);
    if (p.head_dim % 8 == 0) {
        if (column < p.head_dim) *reinterpret_cast<uint4*>(target + column) = *reinterpret_cast<const uint4*>(eight);
    } else {
#pragma unroll
        for (int j = 0; j < 8; ++j)
            if (column + j < p.head_dim) target[column + j] = eight[j];
    }
}

}  // namespace bminf
