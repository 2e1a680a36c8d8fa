// Attention of all heads to the latent rows of a paged cache (latent.cu), for so few rows that a segment for each block
// would leave most of the GPU idle. Results have the bits that latent.cu gives.
//
// A cluster of CLUSTER blocks has one segment of a tile of ROWS pairs (token, head). Each block computes the scores of
// its part of the segment's keys from whole rows, and sends them to all blocks. Then each block computes the weights of
// all keys, and sums its part of the columns. So a row of the cache is read twice, the second time from the L2 cache.
// The chain of tensor-core steps of an element is that of latent.cu. Rows of earlier steps are read before the wait for
// earlier kernels.
//
// If a tile has several segments, each block writes a record of its columns, and the last one of a part of the columns
// to arrive merges these: the same merges in the same order. Without `arrivals` the next kernel does
// (latent_values.cu). The grid is (CLUSTER * segments, at least the number of row tiles).
#include "attention/latent.cuh"
#include "attention/latent_records.cuh"
#include "common/cluster.cuh"
#include "common/tensor_cores.cuh"

using namespace bminf;

constexpr int ROWS = LATENT_FEW_ROWS, CLUSTER = LATENT_CLUSTER, OWN_KEYS = LATENT_SEGMENT / CLUSTER;
constexpr int WARPS = THREADS / WARP, TILES = LATENT_SEGMENT / KEYS, LANES = THREADS / ROWS;
constexpr int SCORE_PITCH = (LATENT_SEGMENT + 4) * 4;  // bytes of a row of scores, in whose place the weights come
static_assert(ROWS == 32 && OWN_KEYS == 32 && KEYS == 32 && WARPS == 8, "the shares of warps");
static_assert(LANES == 8, "a lane for each residue of keys");

// Sixteen codes as fp16(scale * code).
__device__ __forceinline__ void store_codes(unsigned target, uint4 codes, __half of_all) {
    const __half2 scale = __half2half2(of_all);
    const uint2 a = dequantize_codes(as_bytes(codes.x), scale), b = dequantize_codes(as_bytes(codes.y), scale);
    const uint2 c = dequantize_codes(as_bytes(codes.z), scale), d = dequantize_codes(as_bytes(codes.w), scale);
    st_shared_v4(target, make_uint4(a.x, a.y, b.x, b.y));
    st_shared_v4(target + 16, make_uint4(c.x, c.y, d.x, d.y));
}

// The keys that are loaded: those from `from` on and before `end`. If `clears`, keys from `all` on become zeros too.
struct KeyRange {
    int from, end, all;  // all: how many keys there are
    bool clears;

    __device__ __forceinline__ bool takes(int key) const {
        return (key >= from && key < end) || (clears && key >= all);
    }
    __device__ __forceinline__ bool is_there(int key) const { return key < all; }
};

// The rows of a segment. The blocks of the cache are found before the kernel waits.
template <class CACHE>
struct SegmentSource {
    static constexpr int BLOCKS = LATENT_SEGMENT / BLOCK_SIZE;
    const CACHE* cache;
    const __half* scales;
    int depth, rank, first;  // first: the segment's first key
    int blocks[BLOCKS];

    // Reads what belongs to the segment of a sequence's row of the table, which has `pitch` entries.
    __device__ __forceinline__ void find(const int* table, int pitch) {
#pragma unroll
        for (int i = 0; i < BLOCKS; ++i) blocks[i] = ld_global(table + min(first / BLOCK_SIZE + i, pitch - 1));
    }

    // The index in the cache of a key; it and the rest of its block follow one another.
    __device__ __forceinline__ long long at(int key) const {
        const int own = (key - first) / BLOCK_SIZE;
        int block = blocks[0];
#pragma unroll
        for (int i = 1; i < BLOCKS; ++i) block = own == i ? blocks[i] : block;
        return static_cast<long long>(block) * BLOCK_SIZE + key % BLOCK_SIZE;
    }
};

// Starts to load this block's keys, whole rows, from `key` on.
__device__ __forceinline__ void load_keys(
    const SegmentSource<__half>& source, int key, const KeyRange& range, unsigned target, int pitch) {
    const __half* const rows = source.cache + source.at(key) * source.depth;
    const int lane = threadIdx.x % WARP;
#pragma unroll 1
    for (int i = threadIdx.x / WARP; i < OWN_KEYS; i += WARPS) {
        if (!range.takes(key + i)) continue;
#pragma unroll 1
        for (int piece = lane; piece < source.depth / 8; piece += WARP)
            cp_async_16(
                target + i * pitch + piece * 16, rows + static_cast<long long>(i) * source.depth + piece * 8,
                range.is_there(key + i));
    }
}

__device__ __forceinline__ void load_keys(
    const SegmentSource<int8>& source, int key, const KeyRange& range, unsigned target, int pitch) {
    const long long first = source.at(key);
    const int pieces = source.depth / 16;
    for (int i = threadIdx.x; i < OWN_KEYS * pieces; i += THREADS) {
        const int row = i / pieces, piece = i % pieces;
        if (!range.takes(key + row)) continue;
        uint4 codes = make_uint4(0, 0, 0, 0);
        __half scale = __float2half_rn(0.0f);
        if (range.is_there(key + row)) {
            codes = *reinterpret_cast<const uint4*>(source.cache + (first + row) * source.depth + piece * 16);
            scale = source.scales[2 * (first + row) + (piece * 16 >= source.rank)];
        }
        store_codes(target + row * pitch + piece * 32, codes, scale);
    }
}

// Starts to load this block's columns of all keys of the segment, from `key` on.
template <int COLUMNS>
__device__ __forceinline__ void load_columns(
    const SegmentSource<__half>& source, int key, int column, const KeyRange& range, unsigned target) {
    constexpr int PIECES = COLUMNS / 8;
#pragma unroll 1
    for (int n = 0; n < LATENT_SEGMENT * PIECES / THREADS; ++n) {
        const int i = threadIdx.x + n * THREADS, row = i / PIECES, piece = i % PIECES;
        if (!range.takes(key + row)) continue;
        const bool is_there = range.is_there(key + row);
        const __half* const origin = source.cache + (is_there ? source.at(key + row) : 0) * source.depth;
        cp_async_16(target + row * (COLUMNS + 8) * 2 + piece * 16, origin + column + piece * 8, is_there);
    }
}

template <int COLUMNS>
__device__ __forceinline__ void load_columns(
    const SegmentSource<int8>& source, int key, int column, const KeyRange& range, unsigned target) {
    constexpr int PIECES = COLUMNS / 16;
#pragma unroll
    for (int n = 0; n < LATENT_SEGMENT * PIECES / THREADS; ++n) {
        const int i = threadIdx.x + n * THREADS, row = i / PIECES, piece = i % PIECES;
        if (!range.takes(key + row)) continue;
        uint4 codes = make_uint4(0, 0, 0, 0);
        __half scale = __float2half_rn(0.0f);
        if (range.is_there(key + row)) {
            const long long at = source.at(key + row);
            codes = *reinterpret_cast<const uint4*>(source.cache + at * source.depth + column + piece * 16);
            scale = source.scales[2 * at];
        }
        store_codes(target + row * (COLUMNS + 8) * 2 + piece * 32, codes, scale);
    }
}

// Sends the scores of this block's keys to the same places of all blocks: scores[row][key], as far as there are `rows`
// rows, and `count` keys of the block. A warp has 16 rows and 8 keys. first: the first of the block's keys in the
// segment.
__device__ __forceinline__ void send_scores(
    unsigned queries, unsigned keys, int pitch, int depth, unsigned scores, int first, int rows, int count) {
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, group = warp % 2, own = warp / 2 * 8;
    const int steps = depth / 16, middle = (steps + 1) / 2;
    const unsigned a_row = queries + (group * 16 + lane % 16) * pitch + lane / 16 * 16;
    const unsigned b_row =
        keys + (own + lane % 8) * pitch + lane / 8 % 2 * 16 + (lane < WARP / 2 ? 0 : middle * 32);  // of either half
    float low[4] = {}, high[4] = {};
#pragma unroll 3
    for (int step = 0; step < middle; ++step) {
        unsigned a[4], b[4];
        ldmatrix_x4(b, b_row + step * 32);
        ldmatrix_x4(a, a_row + step * 32);
        mma_m16n8k16(low, a, b[0], b[1]);
        if (middle + step == steps) break;
        ldmatrix_x4(a, a_row + (middle + step) * 32);
        mma_m16n8k16(high, a, b[2], b[3]);
    }
    const int row = group * 16 + lane / 4, key = own + lane % 4 * 2;
    if (key >= count) return;
    const unsigned at = scores + row * SCORE_PITCH + (first + key) * 4;
#pragma unroll
    for (int j = 0; j < 4; ++j) low[j] = __fadd_rn(low[j], high[j]);
#pragma unroll
    for (int rank = 0; rank < CLUSTER; ++rank) {
        const unsigned remote = map_shared_rank(at, rank);
        if (row < rows) st_shared_cluster_v2(remote, low[0], low[1]);
        if (row + 8 < rows) st_shared_cluster_v2(remote + 8 * SCORE_PITCH, low[2], low[3]);
    }
}

// The softmax of a row over a segment's keys, of which lane `part` of the row's LANES has those with j % 8 == part.
struct SegmentSoftmax {
    float top, total;  // of the segment, in all lanes of the row

    // Puts the weights in place of the scores, and the factor before each tile of keys into factors[tile][row].
    __device__ __forceinline__ void run(
        unsigned scores, int row, int part, int key, int visible, float scale, float (*factors)[ROWS]) {
        const unsigned at = scores + row * SCORE_PITCH;
        float dots[TILES][KEYS / 8], largest[TILES];
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile) {
            largest[tile] = -INF_F;
#pragma unroll
            for (int i = 0; i < KEYS / 8; ++i) {
                const int j = tile * KEYS + i * 8 + part;
                const float dot = ld_shared_float(at + j * 4);
                dots[tile][i] = key + j < visible ? dot : -INF_F;
                largest[tile] = fmaxf(largest[tile], dots[tile][i]);
            }
        }
#pragma unroll
        for (int d = LANES / 2; d; d /= 2)
#pragma unroll
            for (int tile = 0; tile < TILES; ++tile)
                largest[tile] = fmaxf(largest[tile], __shfl_xor_sync(FULL, largest[tile], d));
        __syncwarp();  // the row's scores have been read
        top = -INF_F;
        float sum = 0;
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile) {
            const float new_top = fmaxf(top, __fmul_rn(scale, largest[tile])), shift = softmax_shift(new_top);
            const float factor = rescale_factor(top, shift);
            top = new_top;
            float of_tile = 0;
#pragma unroll
            for (int i = 0; i < KEYS / 8; ++i) {
                const float weight = softmax_weight(dots[tile][i], scale, shift);
                of_tile = __fadd_rn(of_tile, weight);
                const unsigned pair = pack_half2(weight, __shfl_down_sync(FULL, weight, 1));
                if (part % 2 == 0) st_shared_word(at + (tile * KEYS + i * 8 + part) * 2, pair);
            }
            sum = add_tile_sum(sum, factor, of_tile);
            if (part == 0) factors[tile][row] = factor;
        }
#pragma unroll
        for (int d = 1; d < LANES; d *= 2) sum = __fadd_rn(sum, __shfl_xor_sync(FULL, sum, d));
        total = sum;
    }
};

// Merges the records of `segments` segments, which are `stride` apart, and writes the means of `rows` rows.
template <int COLUMNS>
__device__ __forceinline__ void merge_columns(
    const float* records, long long stride, int segments, int rows, __half* means, int mean_pitch) {
    constexpr int VECTORS = COLUMNS / 4;
    for (int i = threadIdx.x; i < rows * VECTORS; i += THREADS) {
        const int row = i / VECTORS, column = i % VECTORS * 4;
        *reinterpret_cast<uint2*>(means + static_cast<long long>(row) * mean_pitch + column) =
            merged_means<COLUMNS>(records, stride, segments, row, column);
    }
}

// COLUMNS: of the latents of a block: rank is COLUMNS * CLUSTER. Other parameters: see latent_attention. records: fp32,
// RECORD<COLUMNS> for each tile, segment of the grid and block of a cluster; arrivals: int32, of each tile and block of
// a cluster, 0 before and after, or null. Dynamic shared memory: ROWS + OWN_KEYS rows of depth + 8 fp16 elements,
// LATENT_SEGMENT rows of COLUMNS + 8, and ROWS rows of scores.
template <int COLUMNS, class CACHE>
__global__ void __launch_bounds__(THREADS, 1) latent_few(
    const __half* q, const CACHE* cache, const __half* scales, const int* block_tables, int table_pitch,
    const int* cu_seqlens, const int* context_lens, int sequences, int heads, int depth, int rank, float scale,
    float* records, int* arrivals, __half* means, int mean_pitch) {
    extern __shared__ __align__(128) char shared[];
    __shared__ float factors[TILES][ROWS], tops[ROWS], totals[ROWS];
    __shared__ bool is_last;
#if __CUDA_ARCH__ >= 900
    launch_dependent_grids();
    const int segment = blockIdx.x / CLUSTER, part = blockIdx.x % CLUSTER, first_key = segment * LATENT_SEGMENT;
    SegmentSource<CACHE> source = {cache, scales, depth, rank, first_key, {}};
    source.find(block_tables, table_pitch);  // of the first sequence, while the tile's is found
    RowTile tile;
    if (!find_row_tile<ROWS>(cu_seqlens, context_lens, sequences, heads, blockIdx.y, tile) || first_key >= tile.end) {
        wait_on_dependent_grids();
        return;  // the other blocks of the cluster too
    }
    cluster_arrive_relaxed<CLUSTER>();
    const int pitch = (depth + 8) * 2, lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const unsigned queries = cast_smem_ptr_to_uint(shared), keys = queries + ROWS * pitch;
    const unsigned columns = keys + OWN_KEYS * pitch, scores = columns + LATENT_SEGMENT * (COLUMNS + 8) * 2;
    if (tile.sequence > 0) source.find(block_tables + static_cast<long long>(tile.sequence) * table_pitch, table_pitch);
    const auto load = [&](const KeyRange& range) {
        const int own_key = first_key + part * OWN_KEYS;
        if (own_key < tile.end) load_keys(source, own_key, range, keys, pitch);
        load_columns<COLUMNS>(source, first_key, part * COLUMNS, range, columns);
    };
    load({0, tile.context, tile.end, true});
    wait_on_dependent_grids();
#pragma unroll 1
    for (int i = warp; i < ROWS; i += WARPS)
#pragma unroll 1
        for (int piece = lane; piece < depth / 8; piece += WARP) {
            const int row = min(i, tile.rows - 1);
            cp_async_16(
                queries + i * pitch + piece * 16, q + static_cast<long long>(tile.row + row) * depth + piece * 8,
                i < tile.rows);
        }
    if (first_key + LATENT_SEGMENT > tile.context) load({tile.context, tile.end, tile.end, false});
    cp_async_wait_all();
    __syncthreads();
    cluster_wait<CLUSTER>();  // all blocks have started
    send_scores(
        queries, keys, pitch, depth, scores, part * OWN_KEYS, tile.rows, tile.end - first_key - part * OWN_KEYS);
    cluster_sync<CLUSTER>();

    SegmentSoftmax softmax;
    const int own_row = threadIdx.x / LANES;
    const int visible = own_row < tile.rows ? tile.context + (tile.first + own_row) / heads + 1 : 0;
    softmax.run(scores, own_row, threadIdx.x % LANES, first_key, visible, scale, factors);
    if (threadIdx.x % LANES == 0) tops[own_row] = softmax.top, totals[own_row] = softmax.total;
    __syncthreads();

    const int group = warp % 2, column = warp / 2 * 16, segments = tile.segments();
    float o[2][4] = {};
    if (column < COLUMNS) {
        const unsigned a_row = scores + (group * 16 + lane % 16) * SCORE_PITCH + lane / 16 * 16;
        const unsigned b_row = columns + lane % 16 * (COLUMNS + 8) * 2 + lane / 16 * 16 + column * 2;
#pragma unroll
        for (int t = 0; t < TILES; ++t) {
            const float low = factors[t][group * 16 + lane / 4], high = factors[t][group * 16 + lane / 4 + 8];
#pragma unroll
            for (int n = 0; n < 2; ++n) {
                o[n][0] = __fmul_rn(o[n][0], low), o[n][1] = __fmul_rn(o[n][1], low);
                o[n][2] = __fmul_rn(o[n][2], high), o[n][3] = __fmul_rn(o[n][3], high);
            }
#pragma unroll
            for (int step = t * KEYS / 16; step < (t + 1) * KEYS / 16; ++step) {
                unsigned a[4], b[4];
                ldmatrix_x4(a, a_row + step * 32);
                ldmatrix_x4_trans(b, b_row + step * 16 * (COLUMNS + 8) * 2);
                mma_m16n8k16(o[0], a, b[0], b[1]);
                mma_m16n8k16(o[1], a, b[2], b[3]);
            }
        }
    }
    const int max_segments = gridDim.x / CLUSTER;
    const long long stride = static_cast<long long>(CLUSTER) * RECORD<COLUMNS>;
    float* const of_tile =
        records + (static_cast<long long>(blockIdx.y) * max_segments * CLUSTER + part) * RECORD<COLUMNS>;
    float* const record = of_tile + segment * stride;
    __half* const own_means = means + static_cast<long long>(tile.row) * mean_pitch + part * COLUMNS;
    if (column < COLUMNS) {
#pragma unroll
        for (int n = 0; n < 2; ++n)
#pragma unroll
            for (int high = 0; high < 2; ++high) {
                const int row = group * 16 + lane / 4 + high * 8, at = column + n * 8 + lane % 4 * 2;
                const float x = o[n][2 * high], y = o[n][2 * high + 1];
                if (row >= tile.rows) continue;
                if (segments > 1) {
                    *reinterpret_cast<float2*>(record + row * COLUMNS + at) = make_float2(x, y);
                } else {
                    const MergeFactors merging = merge_factors(-INF_F, tops[row]);
                    store_means(
                        own_means + static_cast<long long>(row) * mean_pitch + at, merge(merging, 0, x),
                        merge(merging, 0, y), merge(merging, 0, totals[row]));
                }
            }
    }
    if (segments < 2) return;
    if (threadIdx.x < ROWS)
        *reinterpret_cast<float2*>(record + ROWS * COLUMNS + 2 * threadIdx.x) =
            make_float2(tops[threadIdx.x], totals[threadIdx.x]);
    if (!arrivals) return;
    __syncthreads();
    if (threadIdx.x == 0) {
        int* const counter = arrivals + blockIdx.y * CLUSTER + part;
        is_last = atomic_add_acq_rel(counter, 1) == segments - 1;
        if (is_last) *counter = 0;
    }
    __syncthreads();
    if (is_last) merge_columns<COLUMNS>(of_tile, stride, segments, tile.rows, own_means, mean_pitch);
#endif
}
