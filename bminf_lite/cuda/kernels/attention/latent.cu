// Attention of all heads to the latent rows of a paged cache, on the tensor cores (bminf_lite/backend/latent.py):
//
//     means[t, h] = softmax(scale * q[t, h] @ rows.T) @ rows[:, :rank]
//
// q: fp16 [T, heads, depth]; cache: CACHE [num_blocks, BLOCK_SIZE, depth], __half or int8; scales: for int8 fp16
// [num_blocks, BLOCK_SIZE, 2], of the latent and of the key behind it; means: fp16 [T, heads, mean_pitch]. depth is a
// multiple of 16, with zeros behind the end of a row, and rank and mean_pitch are multiples of 8. Sequence b has the
// tokens cu_seqlens[b] to cu_seqlens[b + 1] - 1, whose rows are in the cache.
//
// Heads are rows of the products, as tokens are: a block has ROWS neighbouring pairs (token, head) of one sequence, and
// reads each cached row once for all of them. So the same kernel reads prompts and decodes, and a pair's result has the
// same bits in any of these. The order of sums is that of softmax.cuh with tiles of KEYS keys and segments of
// LATENT_SEGMENT, but that a dot product is the sum of two chains of k16 steps, over the halves of the row.
//
// The grid is (at least the number of row tiles, blocks of a tile). Where a tile has one block, this takes all segments
// of its rows, one after another, and keeps what is merged in its record. Where it has several, they take the segments
// in turn and write a record of each, and latent_merge merges them: the same merges in the same order. Tiles whose keys
// are one segment need none.
#include "attention/latent.cuh"
#include "common/tensor_cores.cuh"

using namespace bminf;

constexpr int WARPS = THREADS / WARP;
constexpr int SCORE_PITCH = (KEYS + 4) * 4;  // bytes of a row of scores: fp32, and in their place the weights in fp16

// Starts to load the tile of KEYS rows from `key` on, to rows that are `pitch` bytes apart.
__device__ __forceinline__ void load_tile(const LatentSource<__half>& source, int key, unsigned target, int pitch) {
    const __half* const rows = source.cache + source.at(key) * source.depth;
    const int lane = threadIdx.x % WARP;
    for (int i = threadIdx.x / WARP; i < KEYS; i += WARPS)
        for (int piece = lane; piece < source.depth / 8; piece += WARP)
            cp_async_16(
                target + i * pitch + piece * 16, rows + static_cast<long long>(i) * source.depth + piece * 8,
                key + i < source.end);
}

// A thread's pieces of 16 codes of a tile, on their way from the cache to shared memory. The thread has pieces
// threadIdx.x, threadIdx.x + THREADS, ..., of at most N.
template <int N>
struct CodePieces {
    uint4 codes[N];
    unsigned scales[N];  // fp16: of the latent in the low half, of the key in the high one

    __device__ __forceinline__ void fetch(const LatentSource<int8>& source, int key) {
        const long long first = source.at(key);
        const int pieces = source.depth / 16;
#pragma unroll
        for (int n = 0; n < N; ++n) {
            const int index = threadIdx.x + n * THREADS, row = index / pieces;
            codes[n] = make_uint4(0, 0, 0, 0), scales[n] = 0;
            if (row >= KEYS || key + row >= source.end) continue;
            codes[n] =
                *reinterpret_cast<const uint4*>(source.cache + (first + row) * source.depth + index % pieces * 16);
            scales[n] = *reinterpret_cast<const unsigned*>(source.scales + (first + row) * 2);
        }
    }

    // Writes fp16(scale * code). The pieces of a row have latents up to `rank`.
    __device__ __forceinline__ void store(const LatentSource<int8>& source, unsigned target, int pitch) const {
        const int pieces = source.depth / 16;
#pragma unroll
        for (int n = 0; n < N; ++n) {
            const int index = threadIdx.x + n * THREADS, row = index / pieces, piece = index % pieces;
            if (row >= KEYS) continue;
            const __half2 both = *reinterpret_cast<const __half2*>(&scales[n]);
            const __half2 of_latent = __low2half2(both), of_key = __high2half2(both);
            const __half2 low = piece * 16 < source.rank ? of_latent : of_key;
            const __half2 high = piece * 16 + 8 < source.rank ? of_latent : of_key;
            const uint2 a = dequantize_codes(as_bytes(codes[n].x), low);
            const uint2 b = dequantize_codes(as_bytes(codes[n].y), low);
            const uint2 c = dequantize_codes(as_bytes(codes[n].z), high);
            const uint2 d = dequantize_codes(as_bytes(codes[n].w), high);
            const unsigned at = target + row * pitch + piece * 32;
            st_shared_v4(at, make_uint4(a.x, a.y, b.x, b.y));
            st_shared_v4(at + 16, make_uint4(c.x, c.y, d.x, d.y));
        }
    }
};

// The dot products of ROWS rows of queries with KEYS keys, for one half of the row: scores[half][row][key]. Each warp
// has 16 rows, one half, and KEYS / KEY_GROUPS keys. queries, keys: shared addresses of rows `pitch` bytes apart.
template <int ROWS>
__device__ __forceinline__ void multiply_keys(unsigned queries, unsigned keys, int pitch, int depth, unsigned scores) {
    constexpr int GROUPS = ROWS / 16, TILES = GROUPS;  // tiles of 8 keys of a warp
    static_assert(GROUPS * 2 * (KEYS / 8 / TILES) == WARPS, "each warp has a share");
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const int group = warp % GROUPS, half = warp / GROUPS % 2, first_key = warp / (2 * GROUPS) * TILES * 8;
    const int steps = depth / 16, middle = (steps + 1) / 2;
    const unsigned a_row = queries + (group * 16 + lane % 16) * pitch + lane / 16 * 16;
    const unsigned b_row = TILES == 1 ? keys + (first_key + lane / 4) * pitch + lane % 4 * 4
                                      : keys + (first_key + lane % 8 + lane / 16 * 8) * pitch + lane / 8 % 2 * 16;
    float dots[TILES][4] = {};
#pragma unroll 2
    for (int step = half ? middle : 0; step < (half ? steps : middle); ++step) {
        unsigned a[4];
        ldmatrix_x4(a, a_row + step * 32);
        if constexpr (TILES == 1) {
            const unsigned at = b_row + step * 32;
            mma_m16n8k16(dots[0], a, ld_shared(at), ld_shared(at + 16));
        } else {
#pragma unroll
            for (int n = 0; n < TILES; n += 2) {
                unsigned b[4];
                ldmatrix_x4(b, b_row + n * 8 * pitch + step * 32);
                mma_m16n8k16(dots[n], a, b[0], b[1]);
                mma_m16n8k16(dots[n + 1], a, b[2], b[3]);
            }
        }
    }
    const unsigned at = scores + (half * ROWS + group * 16 + lane / 4) * SCORE_PITCH + (first_key + lane % 4 * 2) * 4;
#pragma unroll
    for (int n = 0; n < TILES; ++n) {
        st_shared_v2(at + n * 32, dots[n][0], dots[n][1]);
        st_shared_v2(at + n * 32 + 8 * SCORE_PITCH, dots[n][2], dots[n][3]);
    }
}

// The softmax of one row, of which LANES neighbouring threads have the keys j with j % 8 in their share of the
// residues.
template <int ROWS>
struct RowSoftmax {
    static constexpr int LANES = ROWS == 64 ? 4 : 8, RESIDUES = 8 / LANES;
    float top = -INF_F, sums[RESIDUES] = {};
    int row = threadIdx.x / LANES, part = threadIdx.x % LANES;

    __device__ __forceinline__ bool has_row() const { return row < ROWS; }

    // One more tile, whose first key is `key`: the weights replace the scores. Returns the factor of what was before.
    __device__ __forceinline__ float add(unsigned scores, int key, int visible, float scale) {
        const unsigned at = scores + row * SCORE_PITCH + part * RESIDUES * 4;
        float dots[KEYS / 8][RESIDUES], largest = -INF_F;
#pragma unroll
        for (int i = 0; i < KEYS / 8; ++i)
#pragma unroll
            for (int r = 0; r < RESIDUES; ++r) {
                const unsigned place = at + (i * 8 + r) * 4;
                const float dot = __fadd_rn(ld_shared_float(place), ld_shared_float(place + ROWS * SCORE_PITCH));
                dots[i][r] = key + i * 8 + part * RESIDUES + r < visible ? dot : -INF_F;
                largest = fmaxf(largest, dots[i][r]);
            }
#pragma unroll
        for (int d = LANES / 2; d; d /= 2) largest = fmaxf(largest, __shfl_xor_sync(FULL, largest, d));
        const float new_top = fmaxf(top, __fmul_rn(scale, largest)), shift = softmax_shift(new_top);
        const float factor = rescale_factor(top, shift);
        top = new_top;
        __syncwarp();
        const unsigned weights = scores + row * SCORE_PITCH + part * RESIDUES * 2;  // of pairs of neighbouring keys
        float tile[RESIDUES] = {};
#pragma unroll
        for (int i = 0; i < KEYS / 8; ++i) {
            float weight[RESIDUES];
#pragma unroll
            for (int r = 0; r < RESIDUES; ++r) {
                weight[r] = softmax_weight(dots[i][r], scale, shift);
                tile[r] = __fadd_rn(tile[r], weight[r]);
            }
            const float right = RESIDUES == 2 ? weight[RESIDUES - 1] : __shfl_down_sync(FULL, weight[0], 1);
            const unsigned pair = pack_half2(weight[0], right);
            if (RESIDUES == 2 || part % 2 == 0) st_shared_word(weights + i * 16, pair);
        }
#pragma unroll
        for (int r = 0; r < RESIDUES; ++r) sums[r] = add_tile_sum(sums[r], factor, tile[r]);
        return factor;
    }

    // The sum of the segment's weights, in all threads of the row.
    __device__ __forceinline__ float total() const {
        float sum = sums[0];
        if constexpr (RESIDUES == 2) sum = __fadd_rn(sums[0], sums[1]);
#pragma unroll
        for (int d = 1; d < LANES; d *= 2) sum = __fadd_rn(sum, __shfl_xor_sync(FULL, sum, d));
        return sum;
    }
};

// A warp's share of the weighted sums of latents: COLUMNS columns of ROWS rows.
template <int ROWS, int COLUMNS>
struct Sums {
    static constexpr int GROUPS = ROWS / 16;
    float o[GROUPS][COLUMNS / 8][4] = {};
    int lane = threadIdx.x % WARP, first_column = threadIdx.x / WARP * COLUMNS;

    __device__ __forceinline__ int row(int group, int high) const { return group * 16 + lane / 4 + high * 8; }
    __device__ __forceinline__ int column(int n) const { return first_column + n * 8 + lane % 4 * 2; }

    __device__ __forceinline__ void rescale(const float* factors) {
#pragma unroll
        for (int group = 0; group < GROUPS; ++group) {
            const float low = factors[row(group, 0)], high = factors[row(group, 1)];
            if (!__any_sync(FULL, low != 1.0f || high != 1.0f)) continue;
#pragma unroll
            for (int n = 0; n < COLUMNS / 8; ++n) {
                o[group][n][0] = __fmul_rn(o[group][n][0], low), o[group][n][1] = __fmul_rn(o[group][n][1], low);
                o[group][n][2] = __fmul_rn(o[group][n][2], high), o[group][n][3] = __fmul_rn(o[group][n][3], high);
            }
        }
    }

    // Adds the products of the weights, fp16 in place of the scores, and a tile's latents.
    __device__ __forceinline__ void add(unsigned weights, unsigned keys, int pitch, int rank) {
#pragma unroll
        for (int step = 0; step < KEYS / 16; ++step) {
            unsigned a[GROUPS][4];
#pragma unroll
            for (int group = 0; group < GROUPS; ++group)
                ldmatrix_x4(a[group], weights + (group * 16 + lane % 16) * SCORE_PITCH + lane / 16 * 16 + step * 32);
            const unsigned b_row = keys + (step * 16 + lane % 16) * pitch + lane / 16 * 16 + first_column * 2;
#pragma unroll
            for (int n = 0; n < COLUMNS / 8; n += 2) {
                if (first_column + n * 8 >= rank) break;
                unsigned b[4];
                ldmatrix_x4_trans(b, b_row + n * 16);
#pragma unroll
                for (int group = 0; group < GROUPS; ++group) {
                    mma_m16n8k16(o[group][n], a[group], b[0], b[1]);
                    mma_m16n8k16(o[group][n + 1], a[group], b[2], b[3]);
                }
            }
        }
    }

    // Calls f(row, column, o[..], o[.. + 1]) for each pair of neighbouring columns of `rows` rows.
    template <class F>
    __device__ __forceinline__ void each(int rows, int rank, F f) {
#pragma unroll
        for (int group = 0; group < GROUPS; ++group)
#pragma unroll
            for (int high = 0; high < 2; ++high)
#pragma unroll
                for (int n = 0; n < COLUMNS / 8; ++n)
                    if (row(group, high) < rows && column(n) < rank)
                        f(row(group, high), column(n), o[group][n][2 * high], o[group][n][2 * high + 1]);
    }

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int i = 0; i < GROUPS * COLUMNS / 2; ++i) o[i / (COLUMNS / 2)][i / 4 % (COLUMNS / 8)][i % 4] = 0;
    }
};

// What is known of some rows after some segments: the sums of weighted latents [ROWS, rank], and behind them of each
// row the largest score and the sum of weights.
template <int ROWS>
__device__ __forceinline__ float* record_of(float* records, long long index, int rank) {
    return records + index * ROWS * (rank + 2);
}

// ROWS: 16, 32 or 64. COLUMNS: of the latents of a warp: rank is at most COLUMNS * WARPS. STAGES: tiles of keys in
// shared memory. scale: of the scores, times log2(e). records: fp32, ROWS * (rank + 2) each, and records_of_tile for
// each tile: one, or if a tile has several blocks one for each segment; needed if some sequence may have several
// segments. Dynamic shared memory: ROWS + STAGES * KEYS rows of depth + 8 fp16 elements, and 2 * ROWS rows of scores.
template <int ROWS, int COLUMNS, int STAGES, class CACHE>
__global__ void __launch_bounds__(THREADS, 1) latent_attention(
    const __half* q, const CACHE* cache, const __half* scales, const int* block_tables, int table_pitch,
    const int* cu_seqlens, const int* context_lens, int sequences, int heads, int depth, int rank, float scale,
    float* records, int records_of_tile, __half* means, int mean_pitch) {
    constexpr int MAX_PIECES = IS_INT8<CACHE> ? (KEYS * (COLUMNS * WARPS + 64) / 16 + THREADS - 1) / THREADS : 1;
    extern __shared__ __align__(128) char shared[];
    __shared__ float factors[ROWS], lefts[ROWS], rights[ROWS], totals[ROWS];
    launch_dependent_grids();
    wait_on_dependent_grids();
    RowTile tile;
    if (!find_row_tile<ROWS>(cu_seqlens, context_lens, sequences, heads, blockIdx.x, tile)) return;
    const int segments = tile.segments(), first_key = blockIdx.y * LATENT_SEGMENT;
    const bool writes_records = gridDim.y > 1 && segments > 1;
    if (blockIdx.y >= (writes_records ? segments : 1)) return;
    // The key behind a tile of keys, of those that this block has.
    const auto next_key = [&](int key) {
        key += KEYS;
        return writes_records && key % LATENT_SEGMENT == 0 ? key + (gridDim.y - 1) * LATENT_SEGMENT : key;
    };

    const int pitch = (depth + 8) * 2, lane = threadIdx.x % WARP;
    const unsigned queries = cast_smem_ptr_to_uint(shared), keys = queries + ROWS * pitch;
    const unsigned scores = keys + STAGES * KEYS * pitch;
    for (int i = threadIdx.x / WARP; i < ROWS; i += WARPS)
        for (int piece = lane; piece < depth / 8; piece += WARP) {
            const int row = min(i, tile.rows - 1);
            cp_async_16(
                queries + i * pitch + piece * 16, q + static_cast<long long>(tile.row + row) * depth + piece * 8,
                i < tile.rows);
        }
    const LatentSource<CACHE> source = {
        cache, scales, block_tables + static_cast<long long>(tile.sequence) * table_pitch, depth, rank, tile.end};
    int ahead = first_key;  // the next key to load
    [[maybe_unused]] CodePieces<MAX_PIECES> pieces;
    if constexpr (IS_INT8<CACHE>) {
        pieces.fetch(source, first_key);
        if constexpr (STAGES > 1) {
            pieces.store(source, keys, pitch);
            ahead = next_key(first_key);
            if (ahead < tile.end) pieces.fetch(source, ahead);
        }
        cp_async_wait_all();
    } else {
#pragma unroll
        for (int i = 0; i < STAGES - 1; ++i) {
            if (ahead < tile.end) load_tile(source, ahead, keys + i * KEYS * pitch, pitch);
            cp_async_commit_group();
            ahead = next_key(ahead);
        }
    }

    RowSoftmax<ROWS> softmax;
    Sums<ROWS, COLUMNS> sums;
    float merged_top = -INF_F, merged_sum = 0;  // of the segments before, in the threads of a row
    const int visible = softmax.row < tile.rows ? tile.context + (tile.first + softmax.row) / heads + 1 : 0;
    int index = 0;  // of the stage
#pragma unroll 1
    for (int key = first_key; key < tile.end; key = next_key(key), index = (index + 1) % STAGES) {
        if constexpr (STAGES == 1) {
            __syncthreads();  // the tile before has been read
            if constexpr (IS_INT8<CACHE>) {
                pieces.store(source, keys, pitch);
                ahead = next_key(key);
                if (ahead < tile.end) pieces.fetch(source, ahead);
            } else {
                load_tile(source, key, keys, pitch);
                cp_async_wait_all();
            }
            __syncthreads();
        } else if constexpr (IS_INT8<CACHE>) {
            __syncthreads();  // this tile is there, and the one before has been read
            if (ahead < tile.end) {
                pieces.store(source, keys + (index + 1) % STAGES * KEYS * pitch, pitch);
                ahead = next_key(ahead);
                if (ahead < tile.end) pieces.fetch(source, ahead);
            }
        } else {
            cp_async_wait_group<STAGES - 2>();
            __syncthreads();
            if (ahead < tile.end) load_tile(source, ahead, keys + (index + STAGES - 1) % STAGES * KEYS * pitch, pitch);
            cp_async_commit_group();
            ahead = next_key(ahead);
        }
        const unsigned stage = keys + index * KEYS * pitch;
        multiply_keys<ROWS>(queries, stage, pitch, depth, scores);
        __syncthreads();
        if (softmax.has_row()) {
            const float factor = softmax.add(scores, key, visible, scale);
            if (softmax.part == 0) factors[softmax.row] = factor;
        }
        __syncthreads();
        sums.rescale(factors);
        sums.add(scores, stage, pitch, rank);
        if ((key + KEYS) % LATENT_SEGMENT != 0 && key + KEYS < tile.end) continue;

        // the end of a segment
        float* const record = record_of<ROWS>(
            records, static_cast<long long>(blockIdx.x) * records_of_tile + (writes_records ? key / LATENT_SEGMENT : 0),
            rank);
        const float total = softmax.total();
        if (softmax.has_row()) {
            const MergeFactors merging = merge_factors(merged_top, softmax.top);
            merged_sum = merge(merging, merged_sum, total), merged_top = merging.top;
            if (softmax.part == 0) {
                lefts[softmax.row] = merging.left, rights[softmax.row] = merging.right;
                totals[softmax.row] = merged_sum;
                if (writes_records) {
                    record[ROWS * rank + 2 * softmax.row] = softmax.top;
                    record[ROWS * rank + 2 * softmax.row + 1] = total;
                }
            }
        }
        softmax.top = -INF_F;
#pragma unroll
        for (int r = 0; r < softmax.RESIDUES; ++r) softmax.sums[r] = 0;
        __syncthreads();
        const bool is_first = key < LATENT_SEGMENT, is_last = key + KEYS >= tile.end;
        sums.each(tile.rows, rank, [&](int row, int column, float low, float high) {
            float2* const kept = reinterpret_cast<float2*>(record + row * rank + column);
            if (writes_records) {
                *kept = make_float2(low, high);
                return;
            }
            const float2 before = is_first ? make_float2(0, 0) : *kept;
            const MergeFactors merging = {0, lefts[row], rights[row]};
            low = merge(merging, before.x, low), high = merge(merging, before.y, high);
            if (is_last)
                store_means(
                    means + static_cast<long long>(tile.row + row) * mean_pitch + column, low, high, totals[row]);
            else
                *kept = make_float2(low, high);
        });
        sums.clear();
    }
    if constexpr (!IS_INT8<CACHE>) cp_async_wait_all();
}

// Merges the records of row tiles with several segments, which have one each, and writes their means. The grid is (that
// of the other kernel, blocks for all ROWS * rank / 4 vectors of four columns).
template <int ROWS>
__global__ void __launch_bounds__(THREADS) latent_merge(
    const int* cu_seqlens, const int* context_lens, int sequences, int heads, int rank, const float* records,
    int records_of_tile, __half* means, int mean_pitch) {
    launch_dependent_grids();
    wait_on_dependent_grids();
    RowTile tile;
    if (!find_row_tile<ROWS>(cu_seqlens, context_lens, sequences, heads, blockIdx.x, tile)) return;
    const int segments = tile.segments(), index = blockIdx.y * THREADS + threadIdx.x;
    const int row = index / (rank / 4), column = index % (rank / 4) * 4;
    if (segments < 2 || row >= tile.rows) return;
    const float* record = records + static_cast<long long>(blockIdx.x) * records_of_tile * ROWS * (rank + 2);
    float top = -INF_F, sum = 0, o[4] = {};
#pragma unroll 4
    for (int segment = 0; segment < segments; ++segment, record += ROWS * (rank + 2)) {
        const float2 of_row = *reinterpret_cast<const float2*>(record + ROWS * rank + 2 * row);
        const float4 x = *reinterpret_cast<const float4*>(record + row * rank + column);
        const MergeFactors merging = merge_factors(top, of_row.x);
        top = merging.top, sum = merge(merging, sum, of_row.y);
        o[0] = merge(merging, o[0], x.x), o[1] = merge(merging, o[1], x.y);
        o[2] = merge(merging, o[2], x.z), o[3] = merge(merging, o[3], x.w);
    }
    __half* const mean = means + static_cast<long long>(tile.row + row) * mean_pitch + column;
    store_means(mean, o[0], o[1], sum);
    store_means(mean + 2, o[2], o[3], sum);
}
