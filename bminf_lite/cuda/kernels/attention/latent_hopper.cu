// Attention of all heads to the latent rows of a paged cache (latent.cu) by wgmma, on compute capability 9.0, for an
// fp16 cache. Results have the bits that latent.cu gives.
//
// A tile has 64 neighbouring pairs (token, head) of a sequence. A block takes items of work, one after another: a tile,
// or one of `parts` shares of a tile's segments. One thread copies blocks of the cache, 64 rows, into a pipeline, also
// those of the next item. Two warpgroups consume them:
//
//  - each computes one of the two chains of steps over the halves of the row, for all 64 keys, and then the scores of
//    32 keys, which are one of the two tiles of keys in the order of sums. They exchange chains, the largest scores,
//    and weights in shared memory;
//  - each sums half of the columns of the latents over all keys.
//
// A block that has all of a tile's segments merges them one after another, keeps the result in `merged`, and writes the
// means. Else each segment of a pair has a record, which are merged in the same order: by two blocks of a cluster if
// each has one of two parts of a tile, and no other item; otherwise by latent_hopper_merge.
//
// Tiles in shared memory are [column / 64][row][64] with the 128-byte swizzle.
#include "attention/latent.cuh"
#include "attention/place.cuh"
#include "common/cluster.cuh"
#include "common/wgmma.cuh"

using namespace bminf;

constexpr int ROWS = 64, CONSUMERS = 2 * WARPGROUP, CONSUMER_WARPS = CONSUMERS / WARP;
constexpr int PIECE = ROWS * 128;  // bytes of 64 columns of a tile of 64 rows
static_assert(BLOCK_SIZE == 64 && KEYS == 32, "a block of the cache is two tiles of keys");

template <int RANK>
struct Shape {
    static constexpr int DEPTH = RANK + 64, PIECES = DEPTH / 64, TILE = PIECES * PIECE, COLUMNS = RANK / 2;
    static constexpr int STAGES = RANK > 256 ? 2 : 4, STEPS = DEPTH / 16, MIDDLE = STEPS / 2;
    static_assert(2 * MIDDLE == STEPS, "both halves of a row have as many steps");
};

// The shared memory of a block, by address.
template <int RANK>
struct Shared {
    using S = Shape<RANK>;
    unsigned keys, queries, weights, barriers, tops, sums, totals, flags;

    __device__ __forceinline__ explicit Shared(unsigned start)
        : keys(start),
          queries(keys + S::STAGES * S::TILE),
          weights(queries + S::TILE),
          barriers(weights + PIECE),
          tops(barriers + S::STAGES * 16),
          sums(tops + 2 * ROWS * 4),
          totals(sums + ROWS * 8 * 4),
          flags(totals + ROWS * 4) {}
    __device__ __forceinline__ unsigned tile(unsigned t) const { return keys + t % S::STAGES * S::TILE; }
    __device__ __forceinline__ unsigned full(unsigned t) const { return barriers + t % S::STAGES * 8; }
    __device__ __forceinline__ unsigned empty(unsigned t) const { return full(t) + S::STAGES * 8; }
};

// The address of eight columns of a row in a tile.
__device__ __forceinline__ unsigned swizzled(unsigned tile, int row, int chunk) {
    return tile + (chunk / 8 * ROWS + row) * 128 + (chunk ^ row) % 8 * 16;
}

// An item of work: a tile and its segments [begin, end).
struct Item {
    RowTile tile;
    int begin, end;
    bool is_whole;

    __device__ __forceinline__ int first_key() const { return begin * LATENT_SEGMENT; }
    __device__ __forceinline__ int end_key() const { return min(tile.end, end * LATENT_SEGMENT); }
};

// Calls f(item) for the items of this block. Where there are more items than blocks, blocks take turns in alternating
// order, and late tiles, which have most keys, come first. Called by all lanes of a warp.
template <class F>
__device__ __forceinline__ void each_item(
    const int* cu_seqlens, const int* context_lens, int sequences, int heads, int tiles, int parts, F f) {
    const int items = tiles * parts, blocks = gridDim.x;
    for (int round = 0; round * blocks < items; ++round) {
        const int index = round * blocks + (round % 2 ? blocks - 1 - blockIdx.x : blockIdx.x), part = index % parts;
        Item item;
        if (index >= items ||
            !find_row_tile<ROWS>(cu_seqlens, context_lens, sequences, heads, tiles - 1 - index / parts, item.tile))
            continue;
        const int segments = item.tile.segments();
        item.begin = part * segments / parts, item.end = (part + 1) * segments / parts, item.is_whole = parts == 1;
        if (item.begin < item.end) f(item);
    }
}

__device__ __forceinline__ void sync_consumers() { asm volatile("bar.sync 1, %0;" ::"n"(CONSUMERS) : "memory"); }

// What is known of a thread's two rows: of the segment, and of the segments before.
struct Rows {
    float top[2], sum[2][2];  // sum: of the weights of two residues of keys
    float merged_top[2], merged_sum[2];
    int visible[2];
};

// Where the fragments of a block's sums lie between segments: [32 or 16][threads] vectors.
struct Merged {
    float4* vectors;
    __device__ __forceinline__ float4& at(int n) const { return vectors[n * CONSUMERS + threadIdx.x]; }
};

template <int RANK>
struct Consumer {
    using S = Shape<RANK>;
    static constexpr int N = S::COLUMNS / 8;
    const Shared<RANK>& shared;
    int group, lane, row;  // row: the first of the thread's two rows

    __device__ __forceinline__ explicit Consumer(const Shared<RANK>& shared)
        : shared(shared),
          group(__shfl_sync(FULL, threadIdx.x / WARPGROUP, 0)),
          lane(threadIdx.x % WARP),
          row(threadIdx.x % WARPGROUP / WARP * 16 + lane / 4) {}

    __device__ __forceinline__ void load_queries(const __half* q, const RowTile& tile) const {
        const __half* const first = q + static_cast<long long>(tile.row) * S::DEPTH;
        for (int i = threadIdx.x; i < ROWS * (S::DEPTH / 8); i += CONSUMERS) {
            const int r = i / (S::DEPTH / 8), chunk = i % (S::DEPTH / 8);
            const bool is_there = r < tile.rows;
            cp_async_16(
                swizzled(shared.queries, r, chunk), first + (is_there ? r * S::DEPTH + chunk * 8 : 0), is_there);
        }
        cp_async_wait_all();
        fence_proxy_async();
    }

    // Clears the rows of a tile from `valid` on, which may hold NaN.
    __device__ __forceinline__ void clear_rows(unsigned tile, int valid) const {
        for (int i = valid * (RANK / 8) + threadIdx.x; i < BLOCK_SIZE * (RANK / 8); i += CONSUMERS)
            st_shared_v4(swizzled(tile, i / (RANK / 8), i % (RANK / 8)), make_uint4(0, 0, 0, 0));
        fence_proxy_async();
        sync_consumers();
    }

    using Halves = float[2 * KEYS / 8][4];

    // Starts this warpgroup's half of the dot products of all rows with a tile of keys. The first warpgroup has the
    // first half of the row. Products of 64 keys read shared memory less than those of 32, which each finishes.
    __device__ __forceinline__ void start_keys(unsigned tile, Halves& halves) const {
        warpgroup_fence_operand(halves);
        wgmma_fence();
        const int first = group ? S::MIDDLE : 0;
#pragma unroll
        for (int i = 0; i < S::MIDDLE; ++i) {
            const int k = first + i;
            const unsigned at = k / 4 * PIECE + k % 4 * 32;
            wgmma_nt(halves, make_smem_desc(shared.queries + at, 0), make_smem_desc(tile + at, 0), i > 0);
        }
        wgmma_commit_group();
    }

    // The dot products of all rows with the 32 keys of this warpgroup. Each gives the other one its share, which lies
    // where the weights come, or in the last piece of the keys, which only the second warpgroup reads.
    __device__ __forceinline__ void finish_keys(unsigned tile, Halves& halves, float (&dots)[KEYS / 8][4]) const {
        wgmma_wait_group<0>();
        warpgroup_fence_operand(halves);
        sync_consumers();  // the weights before have been read
        const unsigned last = tile + (S::PIECES - 1) * PIECE;
        const unsigned given = (group ? last : shared.weights) + threadIdx.x % WARPGROUP * 16;
        const unsigned taken = (group ? shared.weights : last) + threadIdx.x % WARPGROUP * 16;
#pragma unroll
        for (int n = 0; n < KEYS / 8; ++n) {
            float x[4];
#pragma unroll
            for (int j = 0; j < 4; ++j) x[j] = group ? halves[n][j] : halves[KEYS / 8 + n][j];
            st_shared_v4(
                given + n * WARPGROUP * 16,
                make_uint4(__float_as_uint(x[0]), __float_as_uint(x[1]), __float_as_uint(x[2]), __float_as_uint(x[3])));
        }
        sync_consumers();
#pragma unroll
        for (int n = 0; n < KEYS / 8; ++n) {
            const int4 other = ld_shared_v4(taken + n * WARPGROUP * 16);
            const float y[4] = {
                __int_as_float(other.x), __int_as_float(other.y), __int_as_float(other.z), __int_as_float(other.w)};
#pragma unroll
            for (int j = 0; j < 4; ++j) dots[n][j] = __fadd_rn(group ? halves[KEYS / 8 + n][j] : halves[n][j], y[j]);
        }
    }

    // Starts o = o + weights @ latents over COUNT times 32 keys, from those of warpgroup FIRST on.
    template <int FIRST, int COUNT>
    __device__ __forceinline__ void start_latents(float (&o)[N][4], unsigned tile, bool add) const {
        warpgroup_fence_operand(o);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < COUNT * KEYS / 16; ++i) {
            const int k = FIRST * (KEYS / 16) + i;
            wgmma_nn(
                o, make_smem_desc(shared.weights + k * 32, 0),
                make_smem_desc(tile + group * (S::COLUMNS / 64) * PIECE + k * 16 * 128, PIECE), add || i > 0);
        }
        wgmma_commit_group();
    }

    __device__ __forceinline__ static void rescale(float (&o)[N][4], const float (&factor)[2]) {
        if (!__any_sync(FULL, factor[0] != 1.0f || factor[1] != 1.0f)) return;
#pragma unroll
        for (int n = 0; n < N; ++n)
#pragma unroll
            for (int j = 0; j < 4; ++j) o[n][j] = __fmul_rn(o[n][j], factor[j / 2]);
    }

    // One more tile of 64 keys from `key` on, whose halves have been started; is_first: of the segment. flag: of this
    // tile, 0, and the other one. start_next(halves) starts those of the next tile, or behind the last one of anything.
    template <class F>
    __device__ __forceinline__ void add_tile(
        float (&o)[N][4], Rows& rows, Halves& halves, unsigned tile, int key, bool is_first, float scale, unsigned flag,
        unsigned other_flag, F start_next) const {
        float dots[KEYS / 8][4];
        finish_keys(tile, halves, dots);
        const int own_key = key + group * KEYS + lane % 4 * 2;
        float largest[2] = {-INF_F, -INF_F};
#pragma unroll
        for (int n = 0; n < KEYS / 8; ++n)
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                if (own_key + n * 8 + j % 2 >= rows.visible[j / 2]) dots[n][j] = -INF_F;
                largest[j / 2] = fmaxf(largest[j / 2], dots[n][j]);
            }
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            largest[h] = fmaxf(largest[h], __shfl_xor_sync(FULL, largest[h], 1));
            largest[h] = fmaxf(largest[h], __shfl_xor_sync(FULL, largest[h], 2));
            if (lane % 4 == 0) st_shared_float(shared.tops + (group * ROWS + row + h * 8) * 4, largest[h]);
        }
        sync_consumers();
        float factors[2][2], sums[2][2] = {};  // factors: before either half of the keys
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const float other = ld_shared_float(shared.tops + ((1 - group) * ROWS + row + h * 8) * 4);
            const float of_low = group ? other : largest[h], of_high = group ? largest[h] : other;
            const float low = fmaxf(rows.top[h], __fmul_rn(scale, of_low));
            const float high = fmaxf(low, __fmul_rn(scale, of_high));
            const float low_shift = softmax_shift(low), high_shift = softmax_shift(high);
            // Without a key before, there are zeros to rescale.
            factors[0][h] = rows.top[h] == -INF_F ? 1.0f : rescale_factor(rows.top[h], low_shift);
            factors[1][h] = low == -INF_F ? 1.0f : rescale_factor(low, high_shift);
            rows.top[h] = high;
            const float shift = group ? high_shift : low_shift;
#pragma unroll
            for (int n = 0; n < KEYS / 8; ++n) {
                const float a = softmax_weight(dots[n][2 * h], scale, shift);
                const float b = softmax_weight(dots[n][2 * h + 1], scale, shift);
                sums[h][0] = __fadd_rn(sums[h][0], a), sums[h][1] = __fadd_rn(sums[h][1], b);
                st_shared_word(
                    swizzled(shared.weights, row + h * 8, group * (KEYS / 8) + n) + lane % 4 * 4, pack_half2(a, b));
            }
            if (group == 0) st_shared_v2(shared.sums + ((row + h * 8) * 8 + lane % 4 * 2) * 4, sums[h][0], sums[h][1]);
        }
        if (__any_sync(FULL, factors[1][0] != 1.0f || factors[1][1] != 1.0f) && lane == 0) st_shared_word(flag, 1);
        fence_proxy_async();
        sync_consumers();
        if (!is_first) rescale(o, factors[0]);
        if (threadIdx.x == 0) st_shared_word(other_flag, 0);
        if (__shfl_sync(FULL, ld_shared(flag), 0)) {  // all warps of a warpgroup take the same way
            start_latents<0, 1>(o, tile, !is_first);
            wgmma_wait_group<0>();
            warpgroup_fence_operand(o);
            rescale(o, factors[1]);
            start_latents<1, 1>(o, tile, true);
        } else {
            start_latents<0, 2>(o, tile, !is_first);
        }
        start_next(halves);
        if (group == 1) {
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const float2 before = ld_shared_float2(shared.sums + ((row + h * 8) * 8 + lane % 4 * 2) * 4);
                rows.sum[h][0] = add_tile_sum(rows.sum[h][0], factors[0][h], before.x);
                rows.sum[h][1] = add_tile_sum(rows.sum[h][1], factors[0][h], before.y);
                rows.sum[h][0] = add_tile_sum(rows.sum[h][0], factors[1][h], sums[h][0]);
                rows.sum[h][1] = add_tile_sum(rows.sum[h][1], factors[1][h], sums[h][1]);
            }
        }
        wgmma_wait_group<1>();  // the products of the next tile's keys go on
        warpgroup_fence_operand(o);
    }

    // The sum of the segment's weights of the thread's rows, in both warpgroups.
    __device__ __forceinline__ void total(const Rows& rows, float (&totals)[2]) const {
        if (group == 1) {
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                float sum = __fadd_rn(rows.sum[h][0], rows.sum[h][1]);
                sum = __fadd_rn(sum, __shfl_xor_sync(FULL, sum, 1));
                sum = __fadd_rn(sum, __shfl_xor_sync(FULL, sum, 2));
                if (lane % 4 == 0) st_shared_float(shared.totals + (row + h * 8) * 4, sum);
            }
        }
        sync_consumers();
#pragma unroll
        for (int h = 0; h < 2; ++h) totals[h] = ld_shared_float(shared.totals + (row + h * 8) * 4);
    }
};

// The records of a pair (token, head), of `pairs`: of each segment the sums of weighted latents, and behind those of
// all pairs the largest score and the sum of weights of each.
template <int RANK>
struct PairRecords {
    float* sums;
    float2* rows;

    __device__ __forceinline__ PairRecords(float* records, long long pairs, long long pair, int segments)
        : sums(records + pair * segments * RANK),
          rows(reinterpret_cast<float2*>(records + pairs * segments * RANK) + pair * segments) {}

    // Merges the records of the first `segments` segments, and writes the means from `column` on, four of them.
    __device__ __forceinline__ void store_merged(int segments, int column, __half* means) const {
        float top = -INF_F, sum = 0, o[4] = {};
#pragma unroll 8
        for (int segment = 0; segment < segments; ++segment) {
            const float2 of_row = __ldcg(rows + segment);
            const float4 x = __ldcg(reinterpret_cast<const float4*>(sums + segment * RANK + column));
            const MergeFactors merging = merge_factors(top, of_row.x);
            top = merging.top, sum = merge(merging, sum, of_row.y);
            o[0] = merge(merging, o[0], x.x), o[1] = merge(merging, o[1], x.y);
            o[2] = merge(merging, o[2], x.z), o[3] = merge(merging, o[3], x.w);
        }
        store_means(means + column, o[0], o[1], sum);
        store_means(means + column + 2, o[2], o[3], sum);
    }
};

// RANK: 256 or 512, with rows of RANK + 64 elements. map: of the cache, [blocks * BLOCK_SIZE, RANK + 64] in boxes of a
// block. tiles: at least the number of row tiles. parts: of a tile's segments, each of which is an item. merged: fp32
// [blocks of the grid, ROWS * RANK] for one part; records: fp32 [T * heads, segments * (RANK + 2)] for several. Other
// parameters: see latent_attention. Dynamic shared memory: STAGES + 1 tiles of ROWS rows, a piece, and what Shared has
// behind it. In clusters of two blocks parts is 2, and no block has several items; they merge the records.
template <int RANK>
__global__ void __launch_bounds__(3 * WARPGROUP, 1) latent_hopper(
    const __half* q, const __half* cache, const int* block_tables, int table_pitch, const int* cu_seqlens,
    const int* context_lens, int sequences, int heads, float scale, int tiles, int parts, float* merged, float* records,
    int pairs, int segments, __half* means, int mean_pitch, const __grid_constant__ TensorMap map) {
    using S = Shape<RANK>;
    extern __shared__ __align__(1024) char dynamic[];
    const Shared<RANK> shared(cast_smem_ptr_to_uint(dynamic));
    if (threadIdx.x == 0) {
        for (int t = 0; t < S::STAGES; ++t)
            mbarrier_init(shared.full(t), 1), mbarrier_init(shared.empty(t), CONSUMER_WARPS);
        fence_mbarrier_init();
        st_shared_word(shared.flags, 0), st_shared_word(shared.flags + 4, 0);
    }
    __syncthreads();
    wait_on_dependent_grids();
    launch_dependent_grids();
    unsigned t = 0;  // counts tiles of keys of all items
    if (__shfl_sync(FULL, threadIdx.x / WARPGROUP, 0) == 2) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
        if (threadIdx.x / WARP != CONSUMER_WARPS) return;
        const bool copies = threadIdx.x % WARP == 0;
        if (copies) prefetch_tensormap(map);
        each_item(cu_seqlens, context_lens, sequences, heads, tiles, parts, [&](const Item& item) {
            const int* const table = block_tables + static_cast<long long>(item.tile.sequence) * table_pitch;
            for (int key = item.first_key(); key < item.end_key(); key += BLOCK_SIZE, ++t) {
                if (t >= S::STAGES) mbarrier_wait(shared.empty(t), (t / S::STAGES - 1) % 2);
                if (!copies) continue;
                mbarrier_arrive_expect_tx(shared.full(t), S::TILE);
                const int first = table[key / BLOCK_SIZE] * BLOCK_SIZE;
#pragma unroll
                for (int i = 0; i < S::PIECES; ++i)
                    tma_load_2d(shared.tile(t) + i * PIECE, map, i * 64, first, shared.full(t));
            }
            __syncwarp();
        });
        return;
    }
    asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
    const Consumer<RANK> consumer(shared);
    const Merged kept = {reinterpret_cast<float4*>(merged) + static_cast<long long>(blockIdx.x) * (ROWS * RANK / 4)};
    each_item(cu_seqlens, context_lens, sequences, heads, tiles, parts, [&](const Item& item) {
        const RowTile& tile = item.tile;
        const int first_column = consumer.group * S::COLUMNS + consumer.lane % 4 * 2;
        consumer.load_queries(q, tile);
        sync_consumers();
        float o[S::COLUMNS / 8][4];
        Rows rows;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int row = consumer.row + h * 8;
            rows.visible[h] = row < tile.rows ? tile.context + (tile.first + row) / heads + 1 : 0;
            rows.merged_top[h] = rows.top[h] = -INF_F, rows.merged_sum[h] = rows.sum[h][0] = rows.sum[h][1] = 0;
        }
        float halves[2 * KEYS / 8][4];
        bool is_first = true, is_start = true;  // of a segment, of the item
        for (int key = item.first_key(); key < item.end_key(); key += BLOCK_SIZE, ++t) {
            if (is_start) {
                mbarrier_wait(shared.full(t), t / S::STAGES % 2);
                consumer.start_keys(shared.tile(t), halves);
                is_start = false;
            }
            if (key + BLOCK_SIZE > tile.end) consumer.clear_rows(shared.tile(t), tile.end - key);
            const auto start_next = [&](float (&next)[2 * KEYS / 8][4]) {
                if (key + BLOCK_SIZE < item.end_key()) mbarrier_wait(shared.full(t + 1), (t + 1) / S::STAGES % 2);
                consumer.start_keys(shared.tile(t + 1), next);
            };
            consumer.add_tile(
                o, rows, halves, shared.tile(t), key, is_first, scale, shared.flags + t % 2 * 4,
                shared.flags + (t + 1) % 2 * 4, start_next);
            is_first = false;
            __syncwarp();
            if (consumer.lane == 0) mbarrier_arrive(shared.empty(t));
            if ((key + BLOCK_SIZE) % LATENT_SEGMENT != 0 && key + BLOCK_SIZE < tile.end) continue;

            // the end of a segment
            float totals[2];
            consumer.total(rows, totals);
            const int segment = key / LATENT_SEGMENT;
            MergeFactors merging[2];
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                merging[h] = merge_factors(rows.merged_top[h], rows.top[h]);
                rows.merged_sum[h] = merge(merging[h], rows.merged_sum[h], totals[h]);
                rows.merged_top[h] = merging[h].top;
            }
            if (item.is_whole) {
                // Each condition is outside its loop, so that all loads are on their way at once.
                const auto merge_all = [&](auto left_of) {
#pragma unroll
                    for (int n = 0; n < S::COLUMNS / 8; ++n) {
                        const float4 left = left_of(n);
                        o[n][0] = merge(merging[0], left.x, o[n][0]), o[n][1] = merge(merging[0], left.y, o[n][1]);
                        o[n][2] = merge(merging[1], left.z, o[n][2]), o[n][3] = merge(merging[1], left.w, o[n][3]);
                    }
                };
                if (segment > 0)
                    merge_all([&](int n) { return kept.at(n); });
                else
                    merge_all([](int) { return make_float4(0, 0, 0, 0); });
                if (key + BLOCK_SIZE < tile.end) {
#pragma unroll
                    for (int n = 0; n < S::COLUMNS / 8; ++n)
                        kept.at(n) = make_float4(o[n][0], o[n][1], o[n][2], o[n][3]);
                }
            } else {
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    const int row = consumer.row + h * 8;
                    if (row >= tile.rows) continue;
                    const PairRecords<RANK> record(records, pairs, tile.row + row, segments);
#pragma unroll
                    for (int n = 0; n < S::COLUMNS / 8; ++n)
                        *reinterpret_cast<float2*>(record.sums + segment * RANK + first_column + n * 8) =
                            make_float2(o[n][2 * h], o[n][2 * h + 1]);
                    if (consumer.group == 0 && consumer.lane % 4 == 0)
                        record.rows[segment] = make_float2(rows.top[h], totals[h]);
                }
            }
#pragma unroll
            for (int h = 0; h < 2; ++h) rows.top[h] = -INF_F, rows.sum[h][0] = rows.sum[h][1] = 0;
            is_first = true;
        }
        wgmma_wait_group<0>();  // products of keys that the item does not have
        warpgroup_fence_operand(halves);
        if (!item.is_whole) return;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int row = consumer.row + h * 8;
            if (row >= tile.rows) continue;
            __half* const mean = means + static_cast<long long>(tile.row + row) * mean_pitch + first_column;
#pragma unroll
            for (int n = 0; n < S::COLUMNS / 8; ++n)
                store_means(mean + n * 8, o[n][2 * h], o[n][2 * h + 1], rows.merged_sum[h]);
        }
    });
    if (blocks_in_cluster() == 1) return;
    cluster_sync<2>();  // the records are there
    RowTile tile;
    if (!find_row_tile<ROWS>(cu_seqlens, context_lens, sequences, heads, tiles - 1 - blockIdx.x / 2, tile)) return;
    constexpr int VECTORS = RANK / 8;  // of four columns, of this block's half of a row
    for (int i = threadIdx.x; i < tile.rows * VECTORS; i += CONSUMERS) {
        const int row = i / VECTORS, column = (blockIdx.x % 2 * VECTORS + i % VECTORS) * 4;
        const int visible = tile.context + (tile.first + row) / heads + 1;
        const PairRecords<RANK> record(records, pairs, tile.row + row, segments);
        record.store_merged(
            (visible + LATENT_SEGMENT - 1) / LATENT_SEGMENT, column,
            means + static_cast<long long>(tile.row + row) * mean_pitch);
    }
}

// Merges the records of latent_hopper and writes the means. The grid is (tokens, blocks for heads * RANK / 4 vectors of
// four columns).
template <int RANK>
__global__ void __launch_bounds__(THREADS) latent_hopper_merge(
    const int* cu_seqlens, const int* context_lens, int sequences, int heads, const float* records, int pairs,
    int segments, __half* means, int mean_pitch) {
    launch_dependent_grids();
    wait_on_dependent_grids();
    const auto [token, sequence, position] = find_place(cu_seqlens, context_lens, sequences);
    const int index = blockIdx.y * THREADS + threadIdx.x, head = index / (RANK / 4), column = index % (RANK / 4) * 4;
    if (token >= cu_seqlens[sequences] || head >= heads) return;
    const long long row = static_cast<long long>(token) * heads + head;
    const PairRecords<RANK> record(const_cast<float*>(records), pairs, row, segments);
    record.store_merged(position / LATENT_SEGMENT + 1, column, means + row * mean_pitch);
}
