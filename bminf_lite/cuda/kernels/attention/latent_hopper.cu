// Attention of all heads to the latent rows of a paged cache (latent.cu) by wgmma, on compute capability 9.0, for an
// fp16 cache. Results have the bits that latent.cu gives.
//
// A tile has 64 neighbouring pairs (token, head) of a sequence. A block takes items of work, one after another: a tile,
// or one of `parts` shares of a tile's segments. Four warpgroups work at the same time:
//
//  - one thread of the last one copies blocks of the cache, 64 rows, into a pipeline, also those of the next item;
//  - the third one computes scores and weights of 64 keys, which are two tiles of keys in the order of sums. Weights
//    replace the last 64 columns of the keys, which nobody else reads;
//  - the first two each sum half of the columns of the latents, one block of keys behind the scores. They begin when
//    the weights of the first tile of keys are there.
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

constexpr int ROWS = 64, SUMMING = 2 * WARPGROUP, SUMMING_WARPS = SUMMING / WARP, WORKING = 3 * WARPGROUP;
constexpr int PIECE = ROWS * 128;  // bytes of 64 columns of a tile of 64 rows
static_assert(BLOCK_SIZE == 64 && KEYS == 32, "a block of the cache is two tiles of keys");

template <int RANK>
struct Shape {
    static constexpr int DEPTH = RANK + 64, PIECES = DEPTH / 64, TILE = PIECES * PIECE, COLUMNS = RANK / 2;
    static constexpr int STAGES = RANK > 256 ? 2 : 4, STEPS = DEPTH / 16, MIDDLE = STEPS / 2;
    static_assert(2 * MIDDLE == STEPS, "both halves of a row have as many steps");
};

// What the scores' warpgroup tells of a block of keys, by shared address: of each row the factors of the sums before
// either tile of keys, and at the end of a segment those that merge it and the sum of weights so far; of each of its
// warps whether a factor before the second tile is not 1.
struct Told {
    static constexpr int BYTES = 5 * ROWS * 4 + 16;
    unsigned at;
    __device__ __forceinline__ unsigned factor(int tile, int row) const { return at + (tile * ROWS + row) * 4; }
    __device__ __forceinline__ unsigned merging(int side, int row) const { return at + ((2 + side) * ROWS + row) * 4; }
    __device__ __forceinline__ unsigned sum(int row) const { return at + (4 * ROWS + row) * 4; }
    __device__ __forceinline__ unsigned flag(int warp) const { return at + 5 * ROWS * 4 + warp * 4; }
};

// The shared memory of a block, by address.
template <int RANK>
struct Shared {
    using S = Shape<RANK>;
    unsigned keys, queries, all_told, barriers;

    __device__ __forceinline__ explicit Shared(unsigned start)
        : keys(start),
          queries(keys + S::STAGES * S::TILE),
          all_told(queries + S::TILE),
          barriers(all_told + S::STAGES * Told::BYTES) {}
    __device__ __forceinline__ unsigned tile(unsigned t) const { return keys + t % S::STAGES * S::TILE; }
    __device__ __forceinline__ unsigned weights(unsigned t) const { return tile(t) + (S::PIECES - 1) * PIECE; }
    __device__ __forceinline__ Told told(unsigned t) const { return {all_told + t % S::STAGES * Told::BYTES}; }
    __device__ __forceinline__ unsigned full(unsigned t, int piece) const {
        return barriers + (t % S::STAGES * (S::PIECES + 3) + piece) * 8;
    }
    __device__ __forceinline__ unsigned weighted(unsigned t, int half) const { return full(t, S::PIECES + half); }
    __device__ __forceinline__ unsigned empty(unsigned t) const { return full(t, S::PIECES + 2); }
    __device__ __forceinline__ static unsigned phase(unsigned t) { return t / S::STAGES % 2; }
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

// Waits for all threads of this warpgroup.
__device__ __forceinline__ void sync_warpgroup(int group) {
    asm volatile("bar.sync %0, %1;" ::"r"(group + 1), "n"(WARPGROUP) : "memory");
}

// The third warpgroup: scores and weights.
template <int RANK>
struct Scores {
    using S = Shape<RANK>;
    static constexpr int GROUP = 2, N = BLOCK_SIZE / 8;
    const Shared<RANK>& shared;
    int lane, row;            // row: the first of the thread's two rows
    float top[2], sum[2][2];  // of the segment; sum: of the weights of two residues of keys
    float merged_top[2], merged_sum[2];
    int visible[2];

    __device__ __forceinline__ explicit Scores(const Shared<RANK>& shared)
        : shared(shared),
          lane(threadIdx.x % WARP),
          row(threadIdx.x % WARPGROUP / WARP * 16 + lane / 4) {}

    // Starts an item.
    __device__ __forceinline__ void start(const __half* q, const RowTile& tile, int heads) {
        const __half* const first = q + static_cast<long long>(tile.row) * S::DEPTH;
        for (int i = threadIdx.x % WARPGROUP; i < ROWS * (S::DEPTH / 8); i += WARPGROUP) {
            const int r = i / (S::DEPTH / 8), chunk = i % (S::DEPTH / 8);
            const bool is_there = r < tile.rows;
            cp_async_16(
                swizzled(shared.queries, r, chunk), first + (is_there ? r * S::DEPTH + chunk * 8 : 0), is_there);
        }
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int own = row + h * 8;
            visible[h] = own < tile.rows ? tile.context + (tile.first + own) / heads + 1 : 0;
            merged_top[h] = -INF_F, merged_sum[h] = 0;
        }
        start_segment();
        cp_async_wait_all();
        fence_proxy_async();
        sync_warpgroup(GROUP);
    }

    __device__ __forceinline__ void start_segment() {
#pragma unroll
        for (int h = 0; h < 2; ++h) top[h] = -INF_F, sum[h][0] = sum[h][1] = 0;
    }

    // The dot products of all rows with 64 keys: the sums of two chains, over the halves of the row.
    __device__ __forceinline__ void multiply(unsigned t, float (&dots)[N][4]) const {
        float rest[N][4];
        const unsigned long long of_queries = make_smem_desc(shared.queries, 0);
        const unsigned long long of_keys = make_smem_desc(shared.tile(t), 0);
        warpgroup_fence_operand(dots);
        warpgroup_fence_operand(rest);
#pragma unroll
        for (int k = 0; k < S::STEPS; ++k) {
            if (k % 4 == 0) {
                mbarrier_wait(shared.full(t, k / 4), Shared<RANK>::phase(t));
                wgmma_fence();
            }
            const unsigned at = k / 4 * PIECE + k % 4 * 32;
            wgmma_nt(
                k < S::MIDDLE ? dots : rest, advance_smem_desc(of_queries, at), advance_smem_desc(of_keys, at),
                k % S::MIDDLE > 0);
        }
        wgmma_commit_group();
        wgmma_wait_group<0>();
        warpgroup_fence_operand(dots);
        warpgroup_fence_operand(rest);
#pragma unroll
        for (int n = 0; n < N; ++n)
#pragma unroll
            for (int j = 0; j < 4; ++j) dots[n][j] = __fadd_rn(dots[n][j], rest[n][j]);
    }

    // The weights of 64 keys from `key` on, and what is told of them.
    __device__ __forceinline__ void weigh(unsigned t, int key, float scale, float (&dots)[N][4]) {
        const Told told = shared.told(t);
        const unsigned weights = shared.weights(t);
        const int own_key = key + lane % 4 * 2;
        if (__any_sync(FULL, key + BLOCK_SIZE > min(visible[0], visible[1]))) {
#pragma unroll
            for (int n = 0; n < N; ++n)
#pragma unroll
                for (int j = 0; j < 4; ++j)
                    if (own_key + n * 8 + j % 2 >= visible[j / 2]) dots[n][j] = -INF_F;
        }
        float largest[2][2];
#pragma unroll
        for (int tile = 0; tile < 2; ++tile)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                float most = -INF_F;
#pragma unroll
                for (int n = tile * N / 2; n < (tile + 1) * N / 2; ++n)
                    most = fmaxf(most, fmaxf(dots[n][2 * h], dots[n][2 * h + 1]));
                most = fmaxf(most, __shfl_xor_sync(FULL, most, 1));
                largest[tile][h] = fmaxf(most, __shfl_xor_sync(FULL, most, 2));
            }
        sync_warpgroup(GROUP);  // all have read the keys
        bool rescales = false;
#pragma unroll
        for (int tile = 0; tile < 2; ++tile) {
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const float now = fmaxf(top[h], __fmul_rn(scale, largest[tile][h])), shift = softmax_shift(now);
                // Without a key before, there are zeros to rescale.
                const float factor = top[h] == -INF_F ? 1.0f : rescale_factor(top[h], shift);
                top[h] = now;
                if (lane % 4 == 0) st_shared_float(told.factor(tile, row + h * 8), factor);
                rescales |= tile == 1 && factor != 1.0f;
                float low = 0, high = 0;
#pragma unroll
                for (int n = tile * N / 2; n < (tile + 1) * N / 2; ++n) {
                    const float a = softmax_weight(dots[n][2 * h], scale, shift);
                    const float b = softmax_weight(dots[n][2 * h + 1], scale, shift);
                    low = __fadd_rn(low, a), high = __fadd_rn(high, b);
                    st_shared_word(swizzled(weights, row + h * 8, n) + lane % 4 * 4, pack_half2(a, b));
                }
                sum[h][0] = add_tile_sum(sum[h][0], factor, low);
                sum[h][1] = add_tile_sum(sum[h][1], factor, high);
            }
            if (tile == 0) arrive(shared.weighted(t, 0));
        }
        rescales = __any_sync(FULL, rescales);
        if (lane == 0) st_shared_word(told.flag(threadIdx.x % WARPGROUP / WARP), rescales);
    }

    // Ends a segment, and tells how it is merged. of_row(h, top, total) takes its record.
    template <class F>
    __device__ __forceinline__ void end_segment(unsigned t, F of_row) {
        const Told told = shared.told(t);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            float total = __fadd_rn(sum[h][0], sum[h][1]);
            total = __fadd_rn(total, __shfl_xor_sync(FULL, total, 1));
            total = __fadd_rn(total, __shfl_xor_sync(FULL, total, 2));
            const MergeFactors merging = merge_factors(merged_top[h], top[h]);
            merged_sum[h] = merge(merging, merged_sum[h], total);
            merged_top[h] = merging.top;
            if (lane % 4 == 0) {
                st_shared_float(told.merging(0, row + h * 8), merging.left);
                st_shared_float(told.merging(1, row + h * 8), merging.right);
                st_shared_float(told.sum(row + h * 8), merged_sum[h]);
                of_row(h, top[h], total);
            }
        }
        start_segment();
    }

    // What this warp has written is there.
    __device__ __forceinline__ void arrive(unsigned barrier) const {
        fence_proxy_async();
        __syncwarp();
        if (lane == 0) mbarrier_arrive(barrier);
    }
};

// Where the fragments of a block's sums lie between segments: [32 or 16][threads] vectors.
struct Merged {
    float4* vectors;
    __device__ __forceinline__ float4& at(int n) const { return vectors[n * SUMMING + threadIdx.x]; }
};

// One of the first two warpgroups, which sums half of the columns.
template <int RANK>
struct Sums {
    using S = Shape<RANK>;
    static constexpr int N = S::COLUMNS / 8;
    const Shared<RANK>& shared;
    int group, lane, row;  // row: the first of the thread's two rows

    __device__ __forceinline__ Sums(const Shared<RANK>& shared, int group)
        : shared(shared),
          group(group),
          lane(threadIdx.x % WARP),
          row(threadIdx.x % WARPGROUP / WARP * 16 + lane / 4) {}

    // Clears this warpgroup's columns of the rows of a tile from `valid` on, which may hold NaN.
    __device__ __forceinline__ void clear_rows(unsigned tile, int valid) const {
        constexpr int CHUNKS = S::COLUMNS / 8;
        for (int i = valid * CHUNKS + threadIdx.x % WARPGROUP; i < BLOCK_SIZE * CHUNKS; i += WARPGROUP)
            st_shared_v4(swizzled(tile, i / CHUNKS, group * CHUNKS + i % CHUNKS), make_uint4(0, 0, 0, 0));
        fence_proxy_async();
        sync_warpgroup(group);
    }

    // Starts o = o + weights @ latents over 32 keys.
    __device__ __forceinline__ void start(float (&o)[N][4], unsigned t, int half, bool is_more) const {
        const unsigned long long of_weights = make_smem_desc(shared.weights(t) + half * (KEYS * 2), 0);
        const unsigned long long of_latents =
            make_smem_desc(shared.tile(t) + group * (S::COLUMNS / 64) * PIECE + half * (KEYS * 128), PIECE);
        warpgroup_fence_operand(o);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < KEYS / 16; ++i) {
#pragma unroll
            for (int n = 0; n < N / 16; ++n)  // 128 columns at once: ptxas has no room for 256
                wgmma_nn(
                    reinterpret_cast<float (&)[16][4]>(o[n * 16]), advance_smem_desc(of_weights, i * 32),
                    advance_smem_desc(of_latents, n * 2 * PIECE + i * 16 * 128), is_more || i > 0);
        }
        wgmma_commit_group();
    }

    __device__ __forceinline__ static void wait(float (&o)[N][4]) {
        wgmma_wait_group<0>();
        warpgroup_fence_operand(o);
    }

    __device__ __forceinline__ static void rescale(float (&o)[N][4], const float (&factor)[2]) {
        if (!__any_sync(FULL, factor[0] != 1.0f || factor[1] != 1.0f)) return;
#pragma unroll
        for (int n = 0; n < N; ++n)
#pragma unroll
            for (int j = 0; j < 4; ++j) o[n][j] = __fmul_rn(o[n][j], factor[j / 2]);
    }

    // Reads of the thread's rows.
    template <class F>
    __device__ __forceinline__ void load(float (&x)[2], F address) const {
#pragma unroll
        for (int h = 0; h < 2; ++h) x[h] = ld_shared_float(address(row + h * 8));
    }

    // One more block of keys; is_first: of the segment.
    __device__ __forceinline__ void add_block(float (&o)[N][4], unsigned t, bool is_first) const {
        const Told told = shared.told(t);
        float factors[2];
        if (!is_first) {
            load(factors, [&](int r) { return told.factor(0, r); });
            rescale(o, factors);
        }
        start(o, t, 0, !is_first);
        mbarrier_wait(shared.weighted(t, 1), Shared<RANK>::phase(t));
        const int4 flags = ld_shared_v4(told.flag(0));
        if (__shfl_sync(FULL, flags.x | flags.y | flags.z | flags.w, 0)) {
            wait(o);
            load(factors, [&](int r) { return told.factor(1, r); });
            rescale(o, factors);
            start(o, t, 1, true);
            wait(o);
        } else {
            start(o, t, 1, true);
            wait(o);
        }
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
// parameters: see latent_attention. Dynamic shared memory: STAGES + 1 tiles of ROWS rows, and what Shared has behind
// them. In clusters of two blocks parts is 2, and no block has several items; they merge the records.
template <int RANK>
__global__ void __launch_bounds__(4 * WARPGROUP, 1) latent_hopper(
    const __half* q, const __half* cache, const int* block_tables, int table_pitch, const int* cu_seqlens,
    const int* context_lens, int sequences, int heads, float scale, int tiles, int parts, float* merged, float* records,
    int pairs, int segments, __half* means, int mean_pitch, const __grid_constant__ TensorMap map) {
    using S = Shape<RANK>;
    extern __shared__ __align__(1024) char dynamic[];
    const Shared<RANK> shared(cast_smem_ptr_to_uint(dynamic));
    if (threadIdx.x == 0) {
        for (int t = 0; t < S::STAGES; ++t) {
            for (int piece = 0; piece < S::PIECES; ++piece) mbarrier_init(shared.full(t, piece), 1);
            for (int half = 0; half < 2; ++half) mbarrier_init(shared.weighted(t, half), WARPGROUP / WARP);
            mbarrier_init(shared.empty(t), SUMMING_WARPS);
        }
        fence_mbarrier_init();
    }
    __syncthreads();
    wait_on_dependent_grids();
    launch_dependent_grids();
    unsigned t = 0;  // counts tiles of keys of all items
    const int group = __shfl_sync(FULL, threadIdx.x / WARPGROUP, 0);
    if (group == 3) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
        if (threadIdx.x / WARP != 3 * WARPGROUP / WARP) return;
        const bool copies = threadIdx.x % WARP == 0;
        if (copies) prefetch_tensormap(map);
        each_item(cu_seqlens, context_lens, sequences, heads, tiles, parts, [&](const Item& item) {
            const int* const table = block_tables + static_cast<long long>(item.tile.sequence) * table_pitch;
            for (int key = item.first_key(); key < item.end_key(); key += BLOCK_SIZE, ++t) {
                const int first = table[key / BLOCK_SIZE] * BLOCK_SIZE;
                if (t >= S::STAGES) mbarrier_wait(shared.empty(t), Shared<RANK>::phase(t - S::STAGES));
                if (!copies) continue;
#pragma unroll
                for (int i = 0; i < S::PIECES; ++i) {
                    mbarrier_arrive_expect_tx(shared.full(t, i), PIECE);
                    tma_load_2d(shared.tile(t) + i * PIECE, map, i * 64, first, shared.full(t, i));
                }
            }
            __syncwarp();
        });
        return;
    }
    if (group == 2) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 96;");
        Scores<RANK> scores(shared);
        each_item(cu_seqlens, context_lens, sequences, heads, tiles, parts, [&](const Item& item) {
            const RowTile& tile = item.tile;
            scores.start(q, tile, heads);
            for (int key = item.first_key(); key < item.end_key(); key += BLOCK_SIZE, ++t) {
                float dots[BLOCK_SIZE / 8][4];
                scores.multiply(t, dots);
                scores.weigh(t, key, scale, dots);
                if ((key + BLOCK_SIZE) % LATENT_SEGMENT == 0 || key + BLOCK_SIZE >= tile.end) {
                    scores.end_segment(t, [&](int h, float top, float total) {
                        const int row = scores.row + h * 8;
                        if (item.is_whole || row >= tile.rows) return;
                        const PairRecords<RANK> record(records, pairs, tile.row + row, segments);
                        record.rows[key / LATENT_SEGMENT] = make_float2(top, total);
                    });
                }
                scores.arrive(shared.weighted(t, 1));
            }
        });
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 192;");
        const Sums<RANK> sums(shared, group);
        const Merged kept = {
            reinterpret_cast<float4*>(merged) + static_cast<long long>(blockIdx.x) * (ROWS * RANK / 4)};
        each_item(cu_seqlens, context_lens, sequences, heads, tiles, parts, [&](const Item& item) {
            const RowTile& tile = item.tile;
            const int first_column = group * S::COLUMNS + sums.lane % 4 * 2;
            float o[S::COLUMNS / 8][4];
            bool is_first = true;  // of a segment
            for (int key = item.first_key(); key < item.end_key(); key += BLOCK_SIZE, ++t) {
                for (int i = 0; i < S::COLUMNS / 64; ++i)
                    mbarrier_wait(shared.full(t, group * (S::COLUMNS / 64) + i), Shared<RANK>::phase(t));
                mbarrier_wait(shared.weighted(t, 0), Shared<RANK>::phase(t));
                if (key + BLOCK_SIZE > tile.end) sums.clear_rows(shared.tile(t), tile.end - key);
                sums.add_block(o, t, is_first);
                is_first = false;
                const bool ends = (key + BLOCK_SIZE) % LATENT_SEGMENT == 0 || key + BLOCK_SIZE >= tile.end;
                MergeFactors merging[2];
                float total[2];
                if (ends) {
                    const Told told = shared.told(t);
#pragma unroll
                    for (int h = 0; h < 2; ++h) {
                        merging[h].left = ld_shared_float(told.merging(0, sums.row + h * 8));
                        merging[h].right = ld_shared_float(told.merging(1, sums.row + h * 8));
                        total[h] = ld_shared_float(told.sum(sums.row + h * 8));
                    }
                }
                __syncwarp();
                if (sums.lane == 0) mbarrier_arrive(shared.empty(t));
                if (!ends) continue;

                const int segment = key / LATENT_SEGMENT;
                is_first = true;
                if (!item.is_whole) {
#pragma unroll
                    for (int h = 0; h < 2; ++h) {
                        const int row = sums.row + h * 8;
                        if (row >= tile.rows) continue;
                        const PairRecords<RANK> record(records, pairs, tile.row + row, segments);
#pragma unroll
                        for (int n = 0; n < S::COLUMNS / 8; ++n)
                            *reinterpret_cast<float2*>(record.sums + segment * RANK + first_column + n * 8) =
                                make_float2(o[n][2 * h], o[n][2 * h + 1]);
                    }
                    continue;
                }
                // Each condition is outside its loop, so that many loads are on their way at once.
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
                    continue;
                }
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    const int row = sums.row + h * 8;
                    if (row >= tile.rows) continue;
                    __half* const mean = means + static_cast<long long>(tile.row + row) * mean_pitch + first_column;
#pragma unroll
                    for (int n = 0; n < S::COLUMNS / 8; ++n)
                        store_means(mean + n * 8, o[n][2 * h], o[n][2 * h + 1], total[h]);
                }
            }
        });
    }
    if (blocks_in_cluster() == 1) return;
    cluster_sync<2>();  // the records are there
    RowTile tile;
    if (!find_row_tile<ROWS>(cu_seqlens, context_lens, sequences, heads, tiles - 1 - blockIdx.x / 2, tile)) return;
    constexpr int VECTORS = RANK / 8;  // of four columns, of this block's half of a row
    for (int i = threadIdx.x; i < tile.rows * VECTORS; i += WORKING) {
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
