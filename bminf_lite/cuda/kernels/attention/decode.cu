// Decode attention: one new token per sequence over a paged cache, on the tensor cores (mma.sync).
//
//     out[b, h] = softmax(scale * q[b, h] @ keys.T + bias) @ values,  q, new key = rope(norm(...)) of the projection
//
// qkv: the fused projection fp16 [B, pitch], queries only for CROSS and SHARED. keys, values: CACHE [num_blocks,
// kv_heads, BLOCK_SIZE, head_pitch], __half or int8; for int8 key_scales, value_scales: fp16 [num_blocks, kv_heads,
// BLOCK_SIZE]. block_tables: int32 [B, table_pitch]; token p of sequence b is in block block_tables[b, p / BLOCK_SIZE].
// out: fp16 [B, out_pitch]. The new token's key and value are prepared here and written to the cache, but for CROSS and
// SHARED.
//
// With DRAFTS rows of a step may be drafts: row b has draft_offsets[b] rows of the same sequence before it, one after
// another, which hold the tokens before its own. Their keys and values are in no cache yet, so a row that sees them
// prepares them too, from their rows of the projection. Each row writes its own to the cache, and nothing reads there
// what the step writes.
//
// The sums have the order of softmax.cuh. An item (decode.cuh) is a segment of one sequence, for up to HEADS query
// heads that share a key-value head. A unit is one block or the blocks of a cluster, which compute an item together:
//
//   1. Scores. Each block takes its part of the keys, in groups of 16, and sends their scores to all blocks of the unit
//      through distributed shared memory.
//   2. Weights. Each block computes all weights of the segment in place of the scores.
//   3. Outputs. Each block takes its part of the elements of the values, for all keys. Each warp has 16 elements (or
//      several times 16), so that it makes the whole chain of k16 steps by itself.
//
// Eight warps compute, and a ninth one loads keys and values into a circular buffer of chunks in shared memory. It runs
// ahead across phases and items.
//
// There is a unit for each pair, or for each segment of each pair, or each block computes a range of items: DecodeWork.
// A unit that computes all segments of a pair writes its output. Otherwise each segment leaves a record, and these are
// merged (merge_records) by the last unit of the pair to arrive, or by several.
#include "attention/decode.cuh"
#include "attention/scores.cuh"
#include "attention/stages.cuh"
#include "attention/tiles.cuh"
#include "common/values.cuh"

using namespace bminf;

constexpr int WARPS = THREADS / WARP - 1;     // that compute
constexpr int COMPUTING = WARPS * WARP;       // threads
constexpr int GROUPS = SEGMENT / GROUP;       // of a segment
constexpr int BLOCKS = SEGMENT / BLOCK_SIZE;  // of a segment
static_assert(BLOCKS <= WARP, "a lane for each block of a segment");

// The new token's queries, and its key and value (kv[0], kv[1]) as the cache stores them.
template <int D, class CACHE>
struct NewToken {
    alignas(16) __half query[HEADS][D + 8];  // padded by 16 bytes against bank conflicts
    alignas(16) CACHE kv[2][D];
    __half scales[2];
};

// The keys and values of the tokens before a new one that are new themselves, in the same form; the last one first.
template <int D, class CACHE>
struct DraftTokens {
    alignas(16) CACHE kv[MAX_DRAFTS][2][D];
    __half scales[MAX_DRAFTS][2];
};

// The heads of one pair: `count` query heads from `first` on, which share the key-value head kv.
struct HeadRange {
    int first, count, kv;

    // The groups of the heads that share a key-value head. Unsigned numbers are divided in fewer instructions.
    __device__ __forceinline__ static unsigned groups_of(unsigned heads, unsigned kv_heads) {
        return (heads / kv_heads + HEADS - 1) / HEADS;
    }
    __device__ __forceinline__ static HeadRange of(unsigned group, unsigned heads, unsigned kv_heads) {
        const unsigned groups = groups_of(heads, kv_heads), kv = group / groups;
        const int shared = heads / kv_heads, first = kv * shared + group % groups * HEADS;
        return {first, min(HEADS, static_cast<int>(kv + 1) * shared - first), static_cast<int>(kv)};
    }
};

// The sizes of an attention layer.
struct LayerShape {
    int heads, kv_heads, head_dim, head_pitch;
};

// Prepares one head of a warp: a query for which < 0, the key for 0, the value for 1. It is written to `query`, or to
// `own` with its scale, and to the cache at `cached` unless that is null. With ROTATES queries and keys are transformed
// as for an int8 cache.
template <int D, class CACHE, bool ROTATES, int PAIRS>
__device__ __forceinline__ void prepare_head(
    float (&low)[PAIRS], float (&high)[PAIRS], const HeadParams& params, const LayerShape& layer, int which,
    const float (&cosine)[PAIRS], const float (&sine)[PAIRS], __half* query, CACHE* own, __half* own_scale,
    CACHE* cached, __half* cached_scale) {
    const int lane = threadIdx.x % WARP, half = layer.head_dim / 2;
    const float* const norm_weight = which < 0    ? params.q_norm_weight
                                     : which == 0 ? params.k_norm_weight
                                                  : params.v_norm_weight;
    norm_and_rope(low, high, params, norm_weight, which <= 0, layer.head_dim, cosine, sine);
    if (ROTATES && which <= 0) rotate_head(low, high, layer.head_dim);
    if (IS_INT8<CACHE> && which >= 0) {
        if constexpr (IS_INT8<CACHE>) {
            const __half scale = quantize_head(cached ? cached : own, own, low, high, layer.head_dim, layer.head_pitch);
            if (lane == 0) *own_scale = scale;
            if (lane == 0 && cached) *cached_scale = scale;
        }
    } else {
        __half* const prepared = which < 0 ? query : reinterpret_cast<__half*>(own);
        __half* const stored = reinterpret_cast<__half*>(cached);
#pragma unroll
        for (int p = 0; p < PAIRS; ++p) {
            const int pair = p * WARP + lane;
            if (pair >= half) continue;
            prepared[pair] = __float2half_rn(low[p]), prepared[half + pair] = __float2half_rn(high[p]);
            if (stored) stored[pair] = prepared[pair], stored[half + pair] = prepared[half + pair];
        }
#pragma unroll 1
        for (int d = layer.head_dim + lane; d < D; d += WARP) {
            prepared[d] = __float2half_rn(0.0f);
            if (stored && d < layer.head_pitch) stored[d] = prepared[d];
        }
    }
}

// The pairs of elements of a head that this lane has, from `lows` on.
template <int PAIRS>
__device__ __forceinline__ void fetch_head(
    const __half* lows, int lane, int half, float (&low)[PAIRS], float (&high)[PAIRS]) {
#pragma unroll
    for (int p = 0; p < PAIRS; ++p) {
        const bool inside = p * WARP + lane < half;
        low[p] = inside ? __half2float(lows[p * WARP]) : 0.0f;
        high[p] = inside ? __half2float(lows[half + p * WARP]) : 0.0f;
    }
}

// Fetches the weights of norms into the L2 cache.
template <int D>
__device__ __forceinline__ void prefetch_norms(const HeadParams& params, int head_dim) {
    static_assert(D <= 16 * 32, "a thread for each cache line of a norm's weight");
    const int norm = threadIdx.x / 16, line = threadIdx.x % 16 * 32;
    const float* const weight = norm == 0   ? params.q_norm_weight
                                : norm == 1 ? params.k_norm_weight
                                : norm == 2 ? params.v_norm_weight
                                            : nullptr;
    if (weight && line < head_dim) prefetch_l2(weight + line);
}

// Fills `new_token`, one warp a head at a time, from the token's row of the projection, which is complete when `wait`
// returns. The key and the value only if `newest`; then they are written to the cache too, at `key` and `value` with
// their scales, unless these are null. With ROTATES queries and keys are transformed as for an int8 cache.
template <int D, class CACHE, bool ROTATES, int PAIRS, class WAIT>
__device__ __forceinline__ void prepare_new_token(
    const __half* projection, WAIT wait, const HeadParams& params, const LayerShape& layer, const HeadRange& at,
    const float (&cosine)[PAIRS], const float (&sine)[PAIRS], NewToken<D, CACHE>& new_token, bool newest, CACHE* key,
    CACHE* value, __half* key_scale, __half* value_scale) {
    const int lane = threadIdx.x % WARP, half = layer.head_dim / 2, tasks = newest ? at.count + 2 : at.count;
    const auto lows = [&](int task) {  // of this lane
        const int head = task < at.count ? at.first + task : layer.heads + (task - at.count) * layer.kv_heads + at.kv;
        return projection + head * layer.head_dim + lane;
    };
    int task = threadIdx.x / WARP;
    const __half* own_lows = lows(min(task, tasks - 1));
    asm volatile("" : "+l"(own_lows));  // found before the wait
    prefetch_norms<D>(params, layer.head_dim);
    wait();
    float low[PAIRS], high[PAIRS], next_low[PAIRS], next_high[PAIRS];
    fetch_head(own_lows, lane, half, low, high);
#pragma unroll 1
    for (; task < tasks; task += WARPS) {
        if (task + WARPS < tasks) fetch_head(lows(task + WARPS), lane, half, next_low, next_high);
        const int which = task - at.count;  // 0 the key, 1 the value
        CACHE* const cached = which < 0 ? nullptr : which == 0 ? key : value;
        prepare_head<D, CACHE, ROTATES>(
            low, high, params, layer, which, cosine, sine, new_token.query[task], new_token.kv[which],
            &new_token.scales[which], cached, which == 0 ? key_scale : value_scale);
#pragma unroll
        for (int p = 0; p < PAIRS; ++p) low[p] = next_low[p], high[p] = next_high[p];
    }
}

// The same where rows of the projection before the token's, `pitch` elements apart, are of the tokens before it. The
// keys and values of `count` tokens are prepared, of the one `first` positions before the new token and of those before
// that: the new token's in `new_token`, those of others in `drafts`. position: the new token's.
template <int D, class CACHE, bool ROTATES, class WAIT>
__device__ __forceinline__ void prepare_new_tokens(
    const __half* projection, long long pitch, WAIT wait, const HeadParams& params, const LayerShape& layer,
    const HeadRange& at, int position, int first, int count, NewToken<D, CACHE>& new_token,
    DraftTokens<D, CACHE>& drafts, CACHE* key, CACHE* value, __half* key_scale, __half* value_scale) {
    constexpr int PAIRS = D / 64;
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, half = layer.head_dim / 2;
    const int tasks = at.count + 2 * count;
    const auto which_of = [&](int task) { return task < at.count ? -1 : (task - at.count) & 1; };
    const auto back_of = [&](int task) { return task < at.count ? 0 : first + (task - at.count) / 2; };
    const auto lows = [&](int task) {  // of this lane
        const int which = which_of(task);
        const int head = which < 0 ? at.first + task : layer.heads + which * layer.kv_heads + at.kv;
        return projection - back_of(task) * pitch + head * layer.head_dim + lane;
    };
    const __half* own_lows = lows(min(warp, tasks - 1));
    asm volatile("" : "+l"(own_lows));  // found before the wait
    prefetch_norms<D>(params, layer.head_dim);
    if (warp >= tasks) {
        wait();
        return;
    }
    float low[PAIRS], high[PAIRS], next_low[PAIRS], next_high[PAIRS], cosine[PAIRS], sine[PAIRS];
#pragma unroll 1
    for (int task = warp; task < tasks; task += WARPS) {
        const int which = which_of(task), back = back_of(task);
        if (which <= 0) rope_angles(params, position - back, layer.head_dim, cosine, sine);
        if (task < WARPS) {
            wait();
            fetch_head(own_lows, lane, half, low, high);
        } else {
#pragma unroll
            for (int p = 0; p < PAIRS; ++p) low[p] = next_low[p], high[p] = next_high[p];
        }
        if (task + WARPS < tasks) fetch_head(lows(task + WARPS), lane, half, next_low, next_high);
        CACHE* const cached = which < 0 || back > 0 ? nullptr : which == 0 ? key : value;
        prepare_head<D, CACHE, ROTATES>(
            low, high, params, layer, which, cosine, sine, new_token.query[task],
            back == 0 ? new_token.kv[which] : drafts.kv[back - 1][which],
            back == 0 ? &new_token.scales[which] : &drafts.scales[back - 1][which], cached,
            which == 0 ? key_scale : value_scale);
    }
}

// What the loading warp tells the others of an item: the keys [begin, stop) of its segment are visible, those before
// `present` are in the cache. Keys are loaded in granules of SUB keys; granules [first, end) are visible, at least one.
struct Task {
    int sequence, pair, segment;  // sequence < 0: no more items
    HeadRange heads;
    int position, begin, stop, present, first, end;
    int is_new, newest;     // the first item of this pair; if the unit computes the new token's segment too
    int folds;              // the unit computes all segments of the pair
    int is_left, is_right;  // the first and the last item of this pair
    int record, first_record, segments, written;  // see merge_records
    int has_own_block;                            // as all items have
};

// Whether the new token's key and value are prepared here.
template <int KIND>
constexpr bool HAS_NEW_KEY = KIND != CROSS && KIND != SHARED;

// A segment of the keys in `range`. newest: if the unit computes the new token's segment too.
template <int KIND, int SUB>
__device__ __forceinline__ Task
segment_task(int sequence, int pair, int segment, const HeadRange& heads, const KeyRange& range, bool newest) {
    const int start = segment * SEGMENT;
    Task task = {sequence, pair, segment, heads, range.end - 1};
    task.begin = max(0, range.begin - start), task.stop = min(SEGMENT, range.end - start);
    task.present = HAS_NEW_KEY<KIND> && segment == range.last ? task.stop - 1 : task.stop;
    task.first = task.begin / SUB, task.end = max(1, (task.stop + SUB - 1) / SUB);
    task.newest = HAS_NEW_KEY<KIND> && newest;
    task.is_left = segment == range.first;
    return task;
}

// The left and right operands of the products with the values of SUB keys.
template <class CACHE, int PARTS, int SUB>
struct OutputStep {
    static constexpr int HALVES = SUB > 32 ? SUB / 32 : 1;
    ValueFragments<CACHE> values[PARTS][HALVES];
    unsigned weights[HALVES][4];

    // The keys from `key` on of a chunk. address, scales: of key 0, with the offsets of ValueFragments; weight_rows: of
    // key 0, the lane's row for ldmatrix.
    __device__ __forceinline__ void load(
        const unsigned (&address)[PARTS], int key, int row_bytes, unsigned scales, unsigned weight_rows) {
#pragma unroll
        for (int h = 0; h < HALVES; ++h) {
#pragma unroll
            for (int p = 0; p < PARTS; ++p)
                values[p][h].load(address[p] + (key + h * 32) * row_bytes, row_bytes, scales + (key + h * 32) * 2);
            ldmatrix_x4_trans(weights[h], weight_rows + (key + h * 32) * 32);
        }
    }
};

constexpr int min_of(int a, int b) { return a < b ? a : b; }

// A barrier of the warps that compute.
__device__ __forceinline__ void computing_sync() { asm volatile("bar.sync 1, %0;" ::"n"(COMPUTING) : "memory"); }

// D: head_dim rounded up to a power of two. CHUNK: bytes of a chunk; STAGES: chunks in shared memory. UNIT: blocks of a
// unit, which are a cluster; 1 for ITEMS. WORK: a DecodeWork. For ONE_PAIR there is a unit for each pair, in order, and
// no context has more than one segment. For ONE_SEGMENT there are units for max_segments segments of each pair, which
// no pair exceeds. context_lens: int32 [B], the new tokens' positions. lengths: int32 [B], the lengths of the sources,
// for CROSS. bias: fp32 [heads, 2 * max_distance + 1] by the distance key - query, for BIASED; fp32 [heads], the
// slopes, for ALIBI, or the sinks, for SINKS. window: the number of tokens that are seen, 0 for all. scale: of the
// scores, times log2(e); for CAPPED it and softcap are the factor and the cap of capped_score. records: fp32
// [record_capacity, Records::FLOATS]; record_capacity is at least the number of blocks for ITEMS, of units for
// ONE_SEGMENT. arrival_counts: int32, for each pair, or for each block of a unit of each pair; zero before and after.
// starts_next: if the next kernel may start at once, else when the projection is complete. written: the number of
// tokens before each new one whose keys and values earlier kernels of the step may have written. draft_offsets: int32
// [B], at most MAX_DRAFTS each, for DRAFTS. Dynamic shared memory: STAGES chunks with their scales, and 32 bytes for
// each of SEGMENT + GROUP keys, because the last GROUP of weights may be read together with what follows; or
// LARGE_SCORES bytes, into which records of large heads fit. Behind that, DraftTokens for DRAFTS.
template <
    int D, int TILE, int CHUNK, int STAGES, int BLOCKS_PER_SM, int UNIT, int WORK, int KIND, class CACHE, bool DRAFTS>
__global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM) attention_decode(
    const __half* qkv, long long pitch, const float* q_norm_weight, const float* k_norm_weight,
    const float* v_norm_weight, const float* frequencies, float eps, float rope_scale, const int* context_lens,
    const int* block_tables, int table_pitch, int sequences, CACHE* keys, CACHE* values, __half* key_scales,
    __half* value_scales, float* records, int record_capacity, int* arrival_counts, __half* out, long long out_pitch,
    int heads, int kv_heads, int head_dim, int head_pitch, int window, float scale, const float* bias, int max_distance,
    const int* lengths, int max_segments, float softcap, int starts_next, int written, const int* draft_offsets,
    const __half* gate, long long gate_pitch) {
    constexpr bool HOLDS_SCORES = KIND == BIASED || KIND == CAPPED || KIND == ALIBI;  // else scaled dot products
    constexpr int ROW = D * sizeof(CACHE), EACH = 16 / sizeof(CACHE);  // bytes of a head, elements of a piece
    constexpr int PIECES = ROW / 16;                                   // of a head
    constexpr int KEYS = CHUNK / ROW;                                  // of a chunk of keys
    constexpr int SUB = KEYS < BLOCK_SIZE ? KEYS : BLOCK_SIZE, SUBS = KEYS / SUB;     // keys of a granule, granules
    constexpr int SCALES = IS_INT8<CACHE> ? (KEYS * UNIT * 2 + 127) / 128 * 128 : 0;  // chunks are aligned to 128 bytes
    constexpr int STAGE = CHUNK + SCALES;
    constexpr int SCORE_BYTES = D > LARGE_DEPTH ? LARGE_SCORES : (SEGMENT + GROUP) * HEADS * 4;
    constexpr int TILES = SEGMENT / TILE, TILE_GROUPS = TILE / GROUP;
    // Tasks at a time. Before the loading warp replaces a task, the chunk STAGES before the new task's first one has
    // been read. Each task has two chunks or more, so that chunk belongs to a later task than the replaced one.
    constexpr int TASKS = STAGES;
    constexpr int RANK_ELEMENTS = D / UNIT;  // elements of the values of a block
    constexpr int ELEMENT_TILES = RANK_ELEMENTS / GROUP, VALUE_ROW = ROW / UNIT;
    constexpr int PARTS = ELEMENT_TILES > WARPS ? ELEMENT_TILES / WARPS : 1;  // tiles of a warp
    // All chunks of a segment are in shared memory at the same time, so none is given back.
    constexpr bool RESIDENT = UNIT > 1 && 2 * SEGMENT / UNIT * ROW <= STAGES * CHUNK;
    // Records are merged in place of scores, and of chunks where none is loaded any more.
    constexpr int MERGE_AT = WORK == ITEMS ? STAGES * STAGE : 0;
    constexpr int MERGE_BYTES = STAGES * STAGE - MERGE_AT + (D > LARGE_DEPTH ? LARGE_SCORES : SEGMENT * 32);
    using Scratch = MergeScratch<RANK_ELEMENTS, MERGE_BYTES>;
    static_assert(sizeof(Scratch) <= MERGE_BYTES, "it fits");
    static_assert(
        ELEMENT_TILES > 0 && (WORK != ITEMS || UNIT == 1), "a block has elements, and items are of one block");
    static_assert(!DRAFTS || (HAS_NEW_KEY<KIND> && WORK != ITEMS), "a unit of one item prepares drafts");
    static_assert(TILE % GROUP == 0 && SEGMENT % TILE == 0 && SUB % GROUP == 0, "whole groups");
    extern __shared__ __align__(128) char shared[];
    if (starts_next) launch_dependent_grids();
    __shared__ struct {
        float group_tops[GROUPS][HEADS];  // the largest score of each group, or dot product: see HOLDS_SCORES
        float factors[TILES][HEADS];      // that rescale what was summed before a tile
        float tops[2][HEADS];             // the largest score of a segment, and of the next one
        float sum[HEADS];                 // of the segment's weights
        unsigned long long stage_barriers[2 * STAGES], published[TASKS], exchanged;
        NewToken<D, CACHE> new_token;
        Task tasks[WORK == ITEMS ? TASKS : 1];
    } own;
    [[maybe_unused]] DraftTokens<D, CACHE>& draft_tokens =
        *reinterpret_cast<DraftTokens<D, CACHE>*>(shared + STAGES * STAGE + SCORE_BYTES);
    // Scores fp32 [SEGMENT][HEADS]. In phase 2 the weights of a key, fp16 [HEADS], replace its scores: they take one
    // half of the 32 bytes, and partial sums of weights (see tile_sum) the other.
    const unsigned scores = opaque(cast_smem_ptr_to_uint(shared)) + STAGES * STAGE;
    const unsigned small = opaque(cast_smem_ptr_to_uint(&own));
    const unsigned group_tops = small, factors = group_tops + GROUPS * HEADS * 4, tops = factors + TILES * HEADS * 4;
    const unsigned total = tops + 2 * HEADS * 4, barriers = total + HEADS * 4, published = barriers + 16 * STAGES;
    const unsigned exchanged = published + 8 * TASKS;
    const auto tile_sum = [&](int tile, int residue, int head) {
        return scores + (tile * TILE + head / 4 * 8 + residue) * 32 + (1 - residue / 4) * 16 + head % 4 * 4;
    };

    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, row = lane / 4, head = lane % 4 * 2;
    const int groups = kv_heads * HeadRange::groups_of(heads, kv_heads), rank = blockIdx.x % UNIT;
    const Contexts contexts = {
        KIND == CROSS ? lengths : context_lens, sequences, groups, window, table_pitch * BLOCK_SIZE};
    // The blocks of the cache of a segment, as ChunkSource has them.
    const auto table_of = [&](int sequence, int segment) {
        const int block = segment * BLOCKS + lane;
        return lane < BLOCKS && block < table_pitch
                   ? block_tables[static_cast<long long>(sequence) * table_pitch + block]
                   : 0;
    };
    // The one item of this unit, unless WORK is ITEMS, and its blocks. They are loaded together with the length, as if
    // no segment were before the window.
    Task only;
    int table = 0;
    if constexpr (WORK != ITEMS) {
        const unsigned unit = blockIdx.x / UNIT, pair = WORK == ONE_PAIR ? unit : unit / max_segments;
        const int sequence = pair / groups, index = WORK == ONE_PAIR ? 0 : unit - pair * max_segments;
        if (warp == WARPS) table = table_of(sequence, index);
        const int drafts = DRAFTS ? min(MAX_DRAFTS, draft_offsets[sequence]) : 0;
        const KeyRange range = contexts.range<KIND>(sequence);
        const int segment = WORK == ONE_PAIR ? 0 : range.first + index;
        if (segment > range.last) return;
        if (warp == WARPS && segment != index) table = table_of(sequence, segment);
        only = segment_task<KIND, SUB>(
            sequence, pair, segment, HeadRange::of(pair % groups, heads, kv_heads), range, segment == range.last);
        if (DRAFTS) only.present = min(only.stop, max(only.first * SUB, only.position - drafts - segment * SEGMENT));
        only.is_new = only.is_right = only.written = only.has_own_block = 1;
        only.first_record = pair * max_segments, only.record = only.first_record + segment - range.first;
        only.segments = range.segments(), only.folds = WORK == ONE_PAIR || only.segments == 1;
    }
    Stages<STAGES, STAGE, WARPS> stages(scores - STAGES * STAGE, barriers);
    if (threadIdx.x == 0) {
        stages.init();
        if (WORK == ITEMS) {
#pragma unroll
            for (int i = 0; i < TASKS; ++i) barrier_init(published + 8 * i, 1);
        }
#if __CUDA_ARCH__ >= 900
        // The scores of the other blocks and the largest one of each group, of HEADS heads or half as many. The warps
        // of this block arrive by themselves.
        if constexpr (UNIT > 1) {
            const int received = only.heads.count > HEADS / 2 ? HEADS : HEADS / 2;
            barrier_init(exchanged, 1 + WARPS * RELEASING_LANES);
            fence_mbarrier_init();
            const int all = (only.stop + GROUP - 1) / GROUP - only.first * (SUB / GROUP),
                      granules = only.end - only.first;
            const int own_groups = max(granules - rank + UNIT - 1, 0) / UNIT * (SUB / GROUP) -
                                   ((granules - 1) % UNIT == rank ? granules * (SUB / GROUP) - all : 0);
            mbarrier_arrive_expect_tx(exchanged, (all - own_groups) * (GROUP + 1) * received * 4);
        }
#endif
    }
    __syncthreads();
    cluster_arrive_relaxed<UNIT>();

    if (warp == WARPS) {
        // Under compute-sanitizer no warp seems to pass the cluster's barrier before all wait there. So this one waits
        // there before it waits for warps that compute.
        const auto wait_empty = [&] {
            if (!RESIDENT && stages.count() == STAGES) cluster_wait<UNIT>();
            stages.wait_empty();
        };
        // The loads start before the kernel waits for the projection. That is allowed because it is launched as
        // dependent only if no earlier kernel of the step wrote to this cache, but for the `written` tokens before each
        // new one: chunks that have any of them are loaded when earlier kernels are complete.
        // Granules first + rank, first + rank + UNIT, ... of the keys; the block's elements of all granules of values.
        const auto load = [&](const Task& task, int table) {
            const ChunkSource<D, SUB, CACHE> source = {table,      task.heads.kv, kv_heads,
                                                       head_pitch, task.present,  task.end};
            // The keys of the segment that are known, or fewer.
            const int known = written ? task.position - written - task.segment * SEGMENT : SEGMENT;
            const auto wait_written = [&](int granule) {
                if (min(granule + SUBS * UNIT, task.end) * SUB > known) wait_on_dependent_grids();
            };
#pragma unroll 1
            for (int granule = task.first + rank; granule < task.end; granule += SUBS * UNIT) {
                wait_empty();
                wait_written(granule);
                source.template load<1>(stages.address(), keys, granule, UNIT, SUBS, 0);
                if constexpr (IS_INT8<CACHE>)
                    source.load_scales(stages.address() + CHUNK, key_scales, granule, UNIT, SUBS);
                stages.fill();
            }
#pragma unroll 1
            for (int granule = task.first; granule < task.end; granule += SUBS * UNIT) {
                wait_empty();
                wait_written(granule);
                source.template load<UNIT>(stages.address(), values, granule, 1, SUBS * UNIT, rank * RANK_ELEMENTS);
                if constexpr (IS_INT8<CACHE>)
                    source.load_scales(stages.address() + CHUNK, value_scales, granule, 1, SUBS * UNIT);
                stages.fill();
            }
        };
        if constexpr (WORK != ITEMS) {
            load(only, table);
            if (RESIDENT || stages.count() <= STAGES) cluster_wait<UNIT>();
        } else {
            Share share;
            Item item = find_work<KIND>(contexts, record_capacity, share);
            int number = 0, written = 0;
            bool is_new = true, folds = false;
            const auto publish = [&](const Task& task) {
                if (lane == 0) own.tasks[number % TASKS] = task, barrier_arrive(published + number % TASKS * 8);
                __syncwarp();
                ++number;
            };
#pragma unroll 1
            while (item.belongs_to(contexts, share)) {
                table = table_of(item.sequence, item.segment);
                const bool reaches = item.reaches(item.range.last, share);
                Task task = segment_task<KIND, SUB>(
                    item.sequence, item.sequence * groups + item.group, item.segment,
                    HeadRange::of(item.group, heads, kv_heads), item.range, reaches);
                if (is_new) folds = item.segment == item.range.first && reaches;
                task.is_new = is_new, task.folds = folds;
                task.record = item.record(), task.first_record = task.record - (item.segment - item.range.first);
                task.segments = item.range.segments(), task.written = ++written, task.has_own_block = share.even;
                const int last = item.range.last;
                item.next<KIND>(contexts, share);
                is_new = task.segment == last || !item.belongs_to(contexts, share);
                task.is_right = is_new;
                if (is_new) written = 0;
                stages.wait_empty();  // so no warp reads the task that had the same place
                publish(task);
                load(task, table);
            }
            if (number) stages.wait_empty();
            publish({-1});
        }
        cp_async_wait_all();
        return;
    }

    const HeadParams params = {q_norm_weight, k_norm_weight, v_norm_weight, frequencies, eps, rope_scale};
    QueryFragments<D, CACHE> query;
    [[maybe_unused]] float slopes[2];               // of the thread's two heads, for ALIBI
    float all_o[PARTS][4], all_top[2], all_sum[2];  // of the segments before
#pragma unroll 1
    for (int number = 0;; ++number) {  // once unless WORK is ITEMS
        if constexpr (WORK == ITEMS) barrier_wait(published + number % TASKS * 8, number / TASKS, 1);
        const Task& task = WORK == ITEMS ? own.tasks[number % TASKS] : only;
        if (WORK == ITEMS && task.sequence < 0) break;
        if (task.is_new) {
            [[maybe_unused]] float cosine[D / 64], sine[D / 64];
            if (!DRAFTS && warp <= task.heads.count)  // the warps of the queries and of the key
                rope_angles(params, task.position, head_dim, cosine, sine);
            const bool writes = task.newest && rank == 0;
            long long token = 0;
            if (writes) {
                const int block =
                    block_tables[static_cast<long long>(task.sequence) * table_pitch + task.position / BLOCK_SIZE];
                token =
                    static_cast<long long>(block * kv_heads + task.heads.kv) * BLOCK_SIZE + task.position % BLOCK_SIZE;
            }
            const auto wait = [&] {
                if (number == 0) {
                    cluster_wait<UNIT>();  // all blocks have started
                    wait_on_dependent_grids();
                    launch_dependent_grids();
                }
            };
            constexpr bool ROTATES = IS_INT8<CACHE> && KIND != CROSS;
            const LayerShape layer = {heads, kv_heads, head_dim, head_pitch};
            CACHE *const key = writes ? keys + token * head_pitch : nullptr, *const value =
                                                                                 writes ? values + token * head_pitch
                                                                                        : nullptr;
            if constexpr (DRAFTS) {
                prepare_new_tokens<D, CACHE, ROTATES>(
                    qkv + task.sequence * pitch, pitch, wait, params, layer, task.heads, task.position,
                    task.position - task.segment * SEGMENT - (task.stop - 1), task.stop - task.present, own.new_token,
                    draft_tokens, key, value, key_scales + token, value_scales + token);
            } else {
                prepare_new_token<D, CACHE, ROTATES>(
                    qkv + task.sequence * pitch, wait, params, layer, task.heads, cosine, sine, own.new_token,
                    task.newest, key, value, key_scales + token, value_scales + token);
            }
            computing_sync();
            query.load(own.new_token.query);
            if constexpr (KIND == ALIBI) {
#pragma unroll
                for (int h = 0; h < 2; ++h)
                    slopes[h] = head + h < task.heads.count ? __ldg(bias + task.heads.first + head + h) : 0.0f;
            }
        }
        const int first = task.first, end = task.end;
        const int new_key = task.present < task.stop ? task.present : SEGMENT;
        constexpr ChunkLayout value_layout = {log2_of(VALUE_ROW / 16)};
        // Writes the elements [16 tile, 16 (tile + 1)) of the new token's value to its row of a chunk; by one warp.
        constexpr int TILE_PIECES = GROUP / EACH;
        const auto write_new_value = [&](unsigned chunk, int new_row, int tile) {
            const int piece = tile * TILE_PIECES + lane;
            if (tile < ELEMENT_TILES && lane < TILE_PIECES)
                st_shared_v4(
                    chunk + value_layout.offset(new_row, piece),
                    *reinterpret_cast<const uint4*>(&own.new_token.kv[1][rank * RANK_ELEMENTS + piece * EACH]));
            if (IS_INT8<CACHE> && tile == 0 && lane == 0)
                st_shared_half(chunk + CHUNK + new_row * 2, own.new_token.scales[1]);
        };
        // With DRAFTS all keys from new_key on are new. The key (which = 0) or the value (1) of the segment's token
        // number `key`, and its scale.
        [[maybe_unused]] const auto new_head = [&](int key, int which) {
            const int back = task.position - task.segment * SEGMENT - key;
            return back == 0 ? own.new_token.kv[which] : draft_tokens.kv[back - 1][which];
        };
        [[maybe_unused]] const auto new_scale = [&](int key, int which) {
            const int back = task.position - task.segment * SEGMENT - key;
            return back == 0 ? own.new_token.scales[which] : draft_tokens.scales[back - 1][which];
        };
        // As write_new_value, for all new tokens of a chunk that has `count` tokens from `from` on.
        [[maybe_unused]] const auto write_new_values = [&](unsigned chunk, int from, int count, int tile) {
            const int piece = tile * TILE_PIECES + lane % TILE_PIECES;
            if (tile >= ELEMENT_TILES) return;
            for (int key = max(task.present, from) + lane / TILE_PIECES; key < min(task.stop, from + count);
                 key += WARP / TILE_PIECES) {
                st_shared_v4(
                    chunk + value_layout.offset(key - from, piece),
                    *reinterpret_cast<const uint4*>(new_head(key, 1) + rank * RANK_ELEMENTS + piece * EACH));
                if (IS_INT8<CACHE> && piece == 0) st_shared_half(chunk + CHUNK + (key - from) * 2, new_scale(key, 1));
            }
        };
        if constexpr (RESIDENT) {  // early, while other warps compute scores
            if (warp >= WARPS - ELEMENT_TILES && new_key < SEGMENT) {
                constexpr int GRANULES = SUBS * UNIT;  // of a chunk of values
                const int key_chunks = max(end - first - rank + GRANULES - 1, 0) / GRANULES;
                const int row = new_key - first * SUB;
                Stages<STAGES, STAGE, WARPS> values = stages;
                values.skip(key_chunks + row / (GRANULES * SUB));
                if constexpr (DRAFTS) {
#pragma unroll 1
                    for (int from = first * SUB + row / (GRANULES * SUB) * (GRANULES * SUB); from < task.stop;
                         from += GRANULES * SUB, values.next()) {
                        values.wait_full();
                        write_new_values(values.address(), from, GRANULES * SUB, WARPS - 1 - warp);
                    }
                } else {
                    values.wait_full();
                    write_new_value(values.address(), row % (GRANULES * SUB), WARPS - 1 - warp);
                }
            }
        }

        // 1. Scores.
        {
            const int begin = task.begin, stop = task.stop, present = task.present;
            // A warp has every WARPS-th group of a chunk. If there are fewer groups, those of the next chunk go to
            // other warps.
            constexpr int CHUNK_GROUPS = KEYS / GROUP, ROUNDS = CHUNK_GROUPS > WARPS ? CHUNK_GROUPS / WARPS : 1;
            int first_group = warp;
            const unsigned fragment = opaque(key_fragment_offset<D, CACHE>()), lane_scale = opaque(CHUNK + row * 2);
            const unsigned lane_scores = opaque(scores + row * 32 + head * 4);
            const unsigned lane_tops = opaque(group_tops + (head + row) * 4);
#pragma unroll 1
            for (int from = first + rank; from < end; from += SUBS * UNIT) {
                const unsigned chunk = stages.address();
                if (!RESIDENT || CHUNK_GROUPS >= WARPS || first_group < CHUNK_GROUPS) stages.wait_full();
#pragma unroll 1
                for (int round = 0; round < ROUNDS; ++round) {
                    const int i = first_group + round * WARPS;
                    if (CHUNK_GROUPS < WARPS && i >= CHUNK_GROUPS) break;
                    const int key = UNIT == 1 ? from * SUB + i * GROUP
                                              : (from + i / (SUB / GROUP) * UNIT) * SUB + i % (SUB / GROUP) * GROUP;
                    const bool whole = key >= begin && key + GROUP <= present;  // all keys are visible and in the cache
                    if (!whole) {
                        if (key >= stop) break;
                        const int at = new_key - key;
                        if constexpr (DRAFTS) {
                            constexpr int LANES = PIECES < WARP ? PIECES : WARP;  // of a key
#pragma unroll 1
                            for (int new_at = max(at, 0) + lane / LANES; new_at < min(stop - key, GROUP);
                                 new_at += WARP / LANES) {
#pragma unroll
                                for (int piece = lane % LANES; piece < PIECES; piece += LANES)
                                    st_shared_v4(
                                        chunk + ChunkLayout{log2_of(PIECES)}.offset(i * GROUP + new_at, piece),
                                        reinterpret_cast<const uint4*>(new_head(key + new_at, 0))[piece]);
                                if (IS_INT8<CACHE> && lane % LANES == 0)
                                    st_shared_half(
                                        chunk + CHUNK + (i * GROUP + new_at) * 2, new_scale(key + new_at, 0));
                            }
                            __syncwarp();
                        } else if (at >= 0 && at < GROUP) {
#pragma unroll
                            for (int piece = lane; piece < (PIECES > WARP ? PIECES : WARP); piece += WARP)
                                if (PIECES >= WARP || piece < PIECES)
                                    st_shared_v4(
                                        chunk + ChunkLayout{log2_of(PIECES)}.offset(i * GROUP + at, piece),
                                        reinterpret_cast<const uint4*>(own.new_token.kv[0])[piece]);
                            if (IS_INT8<CACHE> && lane == 0)
                                st_shared_half(chunk + CHUNK + (i * GROUP + at) * 2, own.new_token.scales[0]);
                            __syncwarp();
                        }
                    }
                    float s[4];
                    mma_qk<D, CACHE>(s, chunk + i * GROUP * ROW + fragment, query, chunk + i * GROUP * 2 + lane_scale);
                    if constexpr (KIND == BIASED) {
#pragma unroll
                        for (int m = 0; m < 4; ++m) {
                            const int distance = task.segment * SEGMENT + key + row + m / 2 * 8 - task.position;
                            if (head + m % 2 < task.heads.count)
                                s[m] = biased_score(
                                    s[m], scale,
                                    bias
                                        [(task.heads.first + head + m % 2) * (2ll * max_distance + 1) + max_distance +
                                         max(-max_distance, min(0, distance))]);
                        }
                    }
                    if constexpr (KIND == CAPPED) {
#pragma unroll
                        for (int m = 0; m < 4; ++m) s[m] = capped_score(s[m], scale, softcap);
                    }
                    if constexpr (KIND == ALIBI) {
                        const int distance = task.segment * SEGMENT + key + row - task.position;
#pragma unroll
                        for (int m = 0; m < 4; ++m)
                            s[m] = alibi_score(s[m], scale, slopes[m % 2], static_cast<float>(distance + m / 2 * 8));
                    }
                    if (!whole) {
#pragma unroll
                        for (int m = 0; m < 4; ++m)
                            if (key + row + m / 2 * 8 < begin || key + row + m / 2 * 8 >= stop) s[m] = -INF_F;
                    }
                    // The largest scores of the group. fmaxf drops a NaN, but it reaches the sums.
                    float largest[2] = {fmaxf(s[0], s[2]), fmaxf(s[1], s[3])};
                    if constexpr (UNIT == 1) {
                        const unsigned target = lane_scores + key * 32;
                        st_shared_v2(target, s[0], s[1]), st_shared_v2(target + 8 * 32, s[2], s[3]);
                        const bool odd = lane & 4;  // the row: its lanes reduce the second head
                        float x = fmaxf(
                            odd ? largest[1] : largest[0], __shfl_xor_sync(FULL, odd ? largest[0] : largest[1], 4));
                        x = fmaxf(x, __shfl_xor_sync(FULL, x, 8));
                        x = fmaxf(x, __shfl_xor_sync(FULL, x, 16));
                        if (row < 2) st_shared_float(lane_tops + key * (HEADS * 4 / GROUP), x);
                    } else {
#if __CUDA_ARCH__ >= 900
                        // Neighbouring lanes exchange halves, so that each has four heads of one key.
                        const bool odd = lane % 2;
                        const float x = __shfl_xor_sync(FULL, odd ? s[0] : s[2], 1);
                        const float y = __shfl_xor_sync(FULL, odd ? s[1] : s[3], 1);
                        alignas(16)
                            const float four[4] = {odd ? x : s[0], odd ? y : s[1], odd ? s[2] : x, odd ? s[3] : y};
                        const unsigned target = scores + (key + row + odd * 8) * 32 + lane % 4 / 2 * 16;
                        const unsigned top_target = group_tops + key / GROUP * HEADS * 4 + head * 4;
#pragma unroll
                        for (int d = 4; d < WARP; d *= 2)
#pragma unroll
                            for (int h = 0; h < 2; ++h)
                                largest[h] = fmaxf(largest[h], __shfl_xor_sync(FULL, largest[h], d));
                        if (lane % 4 / 2 * 4 < task.heads.count) {
#pragma unroll
                            for (int i = 1; i < UNIT; ++i) {
                                const unsigned to = (rank + i) & (UNIT - 1);
                                st_async(map_shared_rank(target, to), four, map_shared_rank(exchanged, to));
                            }
                            // All rows have the largest scores: each gives them to another block.
                            if (row < UNIT && row != rank)
                                st_async(
                                    map_shared_rank(top_target, row), largest[0], largest[1],
                                    map_shared_rank(exchanged, row));
                            st_shared_v4(target, *reinterpret_cast<const uint4*>(four));
                            if (row == rank) st_shared_v2(top_target, largest[0], largest[1]);
                        }
#endif
                    }
                }
                if constexpr (CHUNK_GROUPS < WARPS) first_group = (first_group - CHUNK_GROUPS) & (WARPS - 1);
                RESIDENT ? stages.next() : stages.release();
            }
        }

        // 2. Weights. A lane has one head of a tile and the keys j with the same j % 8. So up to four heads take one
        // warp for a tile, and more heads two, of which one has the keys with j % 8 < 4. What does not depend on scores
        // is found while they are on their way.
        // A warp may still read the tops of the segment before when another one has the scores of this one.
        const unsigned top = tops + (number & 1) * HEADS * 4;
        const int first_tile = first * SUB / TILE, last_tile = (end * SUB - 1) / TILE;
        {
            const int log2_heads = task.heads.count > HEADS / 2 ? 3 : 2, log2_sharing = log2_heads - 2;
            const int own_head = opaque(lane & ((1 << log2_heads) - 1)), residues = WARP >> log2_heads;
            const int residue = opaque((warp & log2_sharing) * residues + (lane >> log2_heads));
            const int own_first_tile = opaque(first_tile + (warp >> log2_sharing));
            const int end_group = opaque((task.stop + GROUP - 1) / GROUP);
            const unsigned own_scores = opaque(scores + residue * 32), own_tops = opaque(group_tops + own_head * 4);
            if constexpr (UNIT == 1) {
                computing_sync();
            } else {
#if __CUDA_ARCH__ >= 900
                __syncwarp();
                if (lane < RELEASING_LANES) mbarrier_arrive(exchanged);
                mbarrier_wait_acquire_cluster(exchanged, 0);
#endif
            }
            float running = -INF_F;  // the largest score before the tile
            int seen = first * (SUB / GROUP);
            const auto group_top = [&](int group) { return ld_shared_float(own_tops + group * HEADS * 4); };
#pragma unroll 1
            for (int tile = own_first_tile; tile <= last_tile; tile += WARPS >> log2_sharing) {
                const int from = min(max(tile * TILE_GROUPS, first * (SUB / GROUP)), end_group);
                const int to = min((tile + 1) * TILE_GROUPS, end_group);
                float s[TILE / 8], sum = 0, tile_top = -INF_F;
                const unsigned mine = own_scores + tile * TILE * 32;
#pragma unroll
                for (int i = 0; i < TILE / 8; ++i) {
                    const int group = tile * TILE_GROUPS + i / 2;
                    s[i] = -INF_F;
                    if (group >= from && group < to) s[i] = ld_shared_float(mine + i * 8 * 32 + own_head * 4);
                }
#pragma unroll
                for (int g = 0; g < TILE_GROUPS; g += WARP / HEADS)
                    if (from + g + lane / HEADS < to) tile_top = fmaxf(tile_top, group_top(from + g + lane / HEADS));
#pragma unroll 4
                for (int g = seen + lane / HEADS; g < from; g += WARP / HEADS) running = fmaxf(running, group_top(g));
#pragma unroll
                for (int d = HEADS; d < WARP; d *= 2) {
                    running = fmaxf(running, __shfl_xor_sync(FULL, running, d));
                    tile_top = fmaxf(tile_top, __shfl_xor_sync(FULL, tile_top, d));
                }
                const auto to_score = [&](float x) { return HOLDS_SCORES ? x : __fmul_rn(x, scale); };
                const float before = to_score(running);
                running = fmaxf(running, tile_top), seen = to;
                const float new_top = to_score(running), shift = softmax_shift(new_top);
                __syncwarp();  // weights take the place of scores that other lanes have read
                if (residue == 0) {
                    st_shared_float(factors + (tile * HEADS + own_head) * 4, rescale_factor(before, shift));
                    if (tile == last_tile) st_shared_float(top + own_head * 4, new_top);
                }
#pragma unroll
                for (int i = 0; i < TILE / 8; ++i) {
                    const float w = HOLDS_SCORES ? softmax_weight(s[i], shift) : softmax_weight(s[i], scale, shift);
                    sum = __fadd_rn(sum, w);
                    st_shared_half(mine + i * 8 * 32 + residue / 4 * 16 + own_head * 2, __float2half_rn(w));
                }
                st_shared_float(tile_sum(tile, residue, own_head), sum);
            }
        }
        const unsigned weight_rows = opaque(scores + lane * 32 + lane / 4 % 2 * 16);
        const unsigned lane_factors = opaque(factors + head * 4);
        const unsigned lane_scales = opaque(CHUNK + ValueFragments<CACHE>::scale_offset());
        unsigned fragments[PARTS];
#pragma unroll
        for (int p = 0; p < PARTS; ++p)
            fragments[p] = opaque(ValueFragments<CACHE>::offset(value_layout, warp + p * WARPS));
        computing_sync();

        // 3. Outputs. One warp also makes the sums of weights.
        if (warp == WARPS - 1) {
            const int sub = lane / HEADS, sub_head = lane % HEADS;
            float low = 0, high = 0;  // the sums of the keys j with j % 8 == sub and sub + 4
            const unsigned low_sums = opaque(tile_sum(first_tile, sub, sub_head));
            const unsigned high_sums = low_sums + tile_sum(0, 4, 0) - tile_sum(0, 0, 0);
            const unsigned all_factors = opaque(factors + (first_tile * HEADS + sub_head) * 4);
            constexpr int UNROLL = TILES <= 8 ? TILES : 2;
#pragma unroll UNROLL
            for (int i = 0; i < TILES; ++i) {
                if (first_tile + i > last_tile) break;
                const float f = ld_shared_float(all_factors + i * HEADS * 4);
                low = add_tile_sum(low, f, ld_shared_float(low_sums + i * TILE * 32));
                high = add_tile_sum(high, f, ld_shared_float(high_sums + i * TILE * 32));
            }
#pragma unroll
            for (int d = HEADS; d < WARP; d *= 2) {
                low = __fadd_rn(low, __shfl_xor_sync(FULL, low, d));
                high = __fadd_rn(high, __shfl_xor_sync(FULL, high, d));
            }
            if (sub == 0) st_shared_float(total + sub_head * 4, __fadd_rn(low, high));
        }
        // Of the thread's outputs, if they have gates. They are on their way while the values are multiplied.
        constexpr bool HAS_GATES = UNIT > 1 && WORK == ONE_PAIR;
        const auto element_of = [&](int p, int m) {
            return rank * RANK_ELEMENTS + (warp + p * WARPS) * GROUP + ValueFragments<CACHE>::element(m / 2);
        };
        [[maybe_unused]] __half gates[HAS_GATES ? PARTS : 1][4];
        if constexpr (HAS_GATES) {
            const __half* own = gate + task.sequence * gate_pitch + (task.heads.first + head) * head_dim;
#pragma unroll
            for (int p = 0; p < PARTS; ++p)
#pragma unroll
                for (int m = 0; m < 4; ++m) {
                    const int element = element_of(p, m);
                    const bool exists = gate && warp + p * WARPS < ELEMENT_TILES && head + m % 2 < task.heads.count;
                    gates[p][m] = exists && element < head_dim ? own[m % 2 * head_dim + element] : __half();
                }
        }
        float o[PARTS][4] = {};  // of the segment
        if (ELEMENT_TILES >= WARPS || warp < ELEMENT_TILES || !RESIDENT) {
            using Operands = OutputStep<CACHE, PARTS, SUB>;
#pragma unroll 1
            for (int granule = first; granule < end; granule += SUBS * UNIT) {
                const unsigned chunk = stages.address();
                stages.wait_full();
                if (ELEMENT_TILES >= WARPS || warp < ELEMENT_TILES) {
                    const int count = min(end - granule, SUBS * UNIT), new_row = new_key - granule * SUB;
                    const bool has_new = new_row < count * SUB && (DRAFTS ? new_key < task.stop : new_row >= 0);
                    if (!RESIDENT && has_new) {  // each warp writes what it reads
#pragma unroll
                        for (int p = 0; p < PARTS; ++p) {
                            if constexpr (DRAFTS)
                                write_new_values(chunk, granule * SUB, count * SUB, warp + p * WARPS);
                            else
                                write_new_value(chunk, new_row, warp + p * WARPS);
                        }
                        if constexpr (IS_INT8<CACHE>)  // but for the scale
                            asm volatile("bar.sync 2, %0;" ::"n"(min_of(ELEMENT_TILES, WARPS) * WARP) : "memory");
                        else
                            __syncwarp();
                    }
                    unsigned address[PARTS], weights = weight_rows + granule * SUB * 32, scales = chunk + lane_scales;
#pragma unroll
                    for (int p = 0; p < PARTS; ++p) address[p] = chunk + fragments[p];
                    const auto factors_at = [&](int key) {
                        return ld_shared_float2(lane_factors + key / TILE * HEADS * 4);
                    };
                    // The granule whose first key is `key`. If it begins a tile, `factors` are those of the tile.
                    const auto multiply = [&](int key, const Operands& operands, bool begins, const float2& factors) {
#pragma unroll
                        for (int step = 0; step < SUB / GROUP; ++step) {
                            if (step * GROUP % TILE == 0 && begins) {
                                const float2 f = step == 0 ? factors : factors_at(key + step * GROUP);
#pragma unroll
                                for (int p = 0; p < PARTS; ++p)
#pragma unroll
                                    for (int m = 0; m < 4; ++m) o[p][m] = __fmul_rn(o[p][m], m % 2 ? f.y : f.x);
                            }
#pragma unroll
                            for (int p = 0; p < PARTS; ++p) {
                                unsigned a[4];
                                operands.values[p][step / 2].get(step % 2, a);
                                mma_m16n8k16(
                                    o[p], a, operands.weights[step / 2][step % 2 * 2],
                                    operands.weights[step / 2][step % 2 * 2 + 1]);
                            }
                        }
                    };
                    if constexpr (UNIT == 1) {
#pragma unroll
                        for (int i = 0; i < SUBS; ++i) {
                            if (i == count) break;
                            Operands operands;
                            operands.load(address, i * SUB, VALUE_ROW, scales, weights);
                            const int key = (granule + i) * SUB;
                            multiply(key, operands, key % TILE == 0, factors_at(key));
                        }
                    } else {
                        // Few warps work, so the loads of two granules are in flight together. If a tile has an even
                        // number of granules, it begins with the first one of a pair.
                        constexpr bool PAIRS = TILE % (2 * SUB) == 0;
                        const int before = PAIRS ? granule % 2 : 0;
                        const auto move = [&](int granules) {
#pragma unroll
                            for (int p = 0; p < PARTS; ++p) address[p] += granules * SUB * VALUE_ROW;
                            weights += granules * SUB * 32, scales += granules * SUB * 2;
                        };
                        move(-before);
#pragma unroll 1
                        for (int i = -before; i < count; i += 2) {
                            const int key = (granule + i) * SUB;
                            Operands even, odd;
                            const float2 factors = factors_at(key), next_factors = factors_at(PAIRS ? key : key + SUB);
                            if (!PAIRS || i >= 0) even.load(address, 0, VALUE_ROW, scales, weights);
                            if (i + 1 < count) odd.load(address, SUB, VALUE_ROW, scales, weights);
                            move(2);
                            if (!PAIRS || i >= 0) multiply(key, even, TILE == 2 * SUB || key % TILE == 0, factors);
                            if (i + 1 < count)
                                multiply(key + SUB, odd, !PAIRS && (key + SUB) % TILE == 0, next_factors);
                        }
                    }
                }
                RESIDENT ? stages.next() : stages.release();
            }
        }

        // The record of the segment. After this barrier no warp reads scores, weights or the new token any more.
        computing_sync();
        const float2 all_tops = ld_shared_float2(top + head * 4), sums = ld_shared_float2(total + head * 4);
        const float record_top[2] = {all_tops.x, all_tops.y}, record_sum[2] = {sums.x, sums.y};
        const Records<D, RANK_ELEMENTS> place = {records, rank};
        const bool folds = task.folds, is_right = task.is_right;
        __half* const target = out + task.sequence * out_pitch + static_cast<long long>(task.heads.first) * head_dim;
        if (folds) {
            const bool is_left = WORK != ITEMS || task.is_left;
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const MergeFactors merging = merge_factors(all_top[h], record_top[h]);
                all_top[h] = is_left ? record_top[h] : merging.top;
                all_sum[h] = is_left ? record_sum[h] : merge(merging, all_sum[h], record_sum[h]);
#pragma unroll
                for (int p = 0; p < PARTS; ++p)
#pragma unroll
                    for (int m = h; m < 4; m += 2)
                        all_o[p][m] = is_left ? o[p][m] : merge(merging, all_o[p][m], o[p][m]);
            }
        } else if (warp == 0 && row == 0) {
#pragma unroll
            for (int h = 0; h < 2; ++h) *place.sums(task.record, head + h) = make_float2(record_top[h], record_sum[h]);
        }
        const float* const sinks = bias + task.heads.first;  // only for SINKS
        if (KIND == SINKS && folds && is_right) {
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const MergeFactors merging = sink_factors(all_top[h], sinks + min(head + h, task.heads.count - 1));
                all_sum[h] = merge(merging, all_sum[h], 1.0f);
#pragma unroll
                for (int p = 0; p < PARTS; ++p)
#pragma unroll
                    for (int m = h; m < 4; m += 2) all_o[p][m] = merge(merging, all_o[p][m], 0.0f);
            }
        }
        if ((!folds || is_right) && head < task.heads.count) {
#pragma unroll
            for (int p = 0; p < PARTS; ++p) {
                const int tile = warp + p * WARPS;
                if (tile >= ELEMENT_TILES) continue;
                __half y[4];
                if (folds) attention_outputs(all_o[p], all_sum, y);
#pragma unroll
                for (int m = 0; m < 4; ++m) {
                    const int h = head + m % 2, element = tile * GROUP + ValueFragments<CACHE>::element(m / 2);
                    if (h >= task.heads.count) continue;
                    if (!folds)
                        place.outputs(task.record, h)[element] = o[p][m];
                    else if (rank * RANK_ELEMENTS + element < head_dim)
                        target[h * head_dim + rank * RANK_ELEMENTS + element] =
                            HAS_GATES && gate ? gated(y[m], gates[HAS_GATES ? p : 0][m]) : y[m];
                }
            }
        }
        if (is_right && !folds) {
            const int log2_parts =
                task.has_own_block ? log2_parts_of(task.segments, task.heads.count * RANK_ELEMENTS) : 0;
            merge_records<COMPUTING, KIND == SINKS>(
                computing_sync, place, task.first_record, task.record - task.first_record, task.written, task.segments,
                log2_parts, arrival_counts + task.pair * UNIT + rank, target, task.heads.count, head_dim, sinks,
                *reinterpret_cast<Scratch*>(shared + MERGE_AT));
        }
        if constexpr (WORK != ITEMS) break;
    }
}
