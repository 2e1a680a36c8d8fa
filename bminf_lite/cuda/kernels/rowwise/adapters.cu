// Adapters that the rows of a step choose: each row has the number of a slot, from 1 on, or 0 for none.
//
//     shrink_rows, shrink_many_rows   inputs = fp16(scale * (x @ down[slot].T))
//     shrink_rows_and_quantize   the same, and the codes of all rows of x
//     expand_rows   out = sums + inputs @ up[slot] + bias; a row without a slot gets no product
//     saved_products, saved_embed   a head, or a table of tokens, in place of the model's
//
// See common/adapters.cuh for a slot. The kernels of products that add the side product themselves need no
// expand_rows. A row's sums have one order, whatever the other rows and their slots are.
#include "common/adapters.cuh"
#include "common/cluster.cuh"
#include "common/common.cuh"
#include "common/tensor_cores.cuh"

using namespace bminf;

constexpr int PARTS = 8, PIECES = 8, CHUNK = 32, SHRINK_ROWS = 64, EXPAND_ROWS = 8;
constexpr int ROW_WARPS = SHRINK_ROWS / 16, QUEUE = 8;  // of shrink_many_rows

// Whether a row of a tile is the first with its slot.
__device__ __forceinline__ bool leads(const int* slots, int first, int row, int slot) {
    for (int r = first; r < row; ++r)
        if (slots[r] == slot) return false;
    return true;
}

__device__ __forceinline__ int count_rows(unsigned long long mask) {
    return __popc(static_cast<unsigned>(mask)) + __popc(static_cast<unsigned>(mask >> 32));
}

// The slots of the SHRINK_ROWS rows of a tile, two in each lane of every warp.
struct TileSlots {
    int own[2];

    __device__ __forceinline__ TileSlots(const int* slots, int first, int rows) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int row = first + h * WARP + threadIdx.x % WARP;
            own[h] = row < rows ? slots[row] : 0;
        }
    }
    __device__ __forceinline__ unsigned long long rows_of(int slot) const {
        const unsigned low = __ballot_sync(FULL, own[0] == slot), high = __ballot_sync(FULL, own[1] == slot);
        return static_cast<unsigned long long>(high) << 32 | low;
    }
    // The rows with the slot that is number `index` of those that occur, and this slot; no rows if there are fewer.
    __device__ __forceinline__ unsigned long long find(int index, int& slot) const {
        unsigned long long left = ~rows_of(0);
        while (left) {
            const unsigned low = left, high = left >> 32;
            const int row = low ? __ffs(low) - 1 : WARP + __ffs(high) - 1;
            slot = __shfl_sync(FULL, row < WARP ? own[0] : own[1], row % WARP);
            const unsigned long long found = rows_of(slot);
            if (index-- == 0) return found;
            left &= ~found;
        }
        return 0;
    }
};

// The chunks of piece `piece` of PARTS * PIECES.
__device__ __forceinline__ int2 piece_chunks(int chunks, int piece) {
    return {chunks * piece / (PARTS * PIECES), chunks * (piece + 1) / (PARTS * PIECES)};
}

// Fetches what a warp reads of `down` into the L2 cache, while the kernel waits for its input.
__device__ __forceinline__ void prefetch_piece(const __half* weights, int down_pitch, int chunks, int piece) {
    const int2 range = piece_chunks(chunks, piece);
#pragma unroll 1
    for (int chunk = range.x; chunk < range.y; ++chunk)
        if (threadIdx.x % 4 == 0) {
            prefetch_l2(weights + chunk * CHUNK);
            prefetch_l2(weights + 8 * static_cast<size_t>(down_pitch) + chunk * CHUNK);
        }
}

// The groups of RANKS columns that a block computes, from `column` on: where this lane reads them in a slot, null for
// ranks that the slot does not have. A column of the inputs is a row of `down`.
template <int GROUPS>
struct DownRows {
    int rank;
    const float* scales;
    const __half* rows[GROUPS];  // those of `at` in each group
    bool any = false;

    __device__ __forceinline__ DownRows(const SideProduct& side, int slot, int column) : rank(side.rank(slot)) {
        scales = reinterpret_cast<const float*>(side.adapter(slot) + ADAPTER_HEADER);
        const __half* down = reinterpret_cast<const __half*>(scales + side.sections * rank);
#pragma unroll
        for (int g = 0; g < GROUPS; ++g) {
            const int section = (column + g * RANKS) / side.rank_pitch, at = (column + g * RANKS) % side.rank_pitch;
            const bool inside = section < side.sections && at < rank;
            any |= inside;
            rows[g] = inside ? down + static_cast<size_t>(section * rank + at) * side.down_pitch : nullptr;
        }
    }
};

// Writes the numbers of a tile's rows in `mask` to `list`. Called by one warp.
__device__ __forceinline__ void list_rows(unsigned long long mask, int* list) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        const int row = h * WARP + threadIdx.x % WARP;
        if (mask >> row & 1) list[count_rows(mask & ((1ull << row) - 1))] = row;
    }
}

// Where the scale of a column of the inputs is; null for a rank that the slot does not have.
__device__ __forceinline__ const float* find_scale(const SideProduct& side, const float* scales, int rank, int column) {
    const int section = column / side.rank_pitch, at = column % side.rank_pitch;
    return section < side.sections && at < rank ? scales + section * rank + at : nullptr;
}

// Adds up what the blocks of a cluster have of a sum, part by part, scales it, and rounds it to an input of the side
// product. total: this block's; row: of all rows; column: of the inputs.
template <int CLUSTER>
__device__ __forceinline__ void write_input(
    const SideProduct& side, const float* total, float scale, int row, int column) {
    float parts[CLUSTER];
#pragma unroll
    for (int p = 0; p < CLUSTER; ++p) parts[p] = ld_shared_cluster<CLUSTER>(total, p);
    float sum = parts[0];
#pragma unroll
    for (int p = 1; p < CLUSTER; ++p) sum = __fadd_rn(sum, parts[p]);
    const_cast<__half*>(side.inputs)[static_cast<size_t>(row) * side.input_columns + column] =
        __float2half_rn(__fmul_rn(scale, sum));
}

// ---- codes of the same rows --------------------------------------------------------------------------------------

struct NoCodes {
    static constexpr bool EXIST = false;
};

// Where the codes of rows go: int8 [rows, pitch], and their scales.
struct RowCodes {
    int8* codes;
    long long pitch;
    float* scales;
    static constexpr bool EXIST = true;
    static constexpr int AT_ONCE = 8;  // vectors that a lane loads before it quantizes them

    // Writes the codes of one row of at most THREADS * AT_ONCE vectors, by the THREADS threads of a block.
    template <int THREADS>
    __device__ __forceinline__ void write_row(const __half* x, int row, int k) const {
        __shared__ RowScratch<THREADS, 1> scratch;
        const int padded = (k + 15) / 16 * 16;
        uint4 raw[AT_ONCE];
        unsigned top = 0;
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i)
            raw[i] = ld_global_cg_v4(x + min((i * THREADS + static_cast<int>(threadIdx.x)) * 8, padded - 8));
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i)
            zero_tail(raw[i], (i * THREADS + threadIdx.x) * 8, k), top = packed_max(top, raw[i]);
        const float row_top = threads_absmax<THREADS>(larger_of(top), scratch, 0);
        if (threadIdx.x == 0) scales[row] = row_scale(row_top).scale;
        const float ratio = row_ratio(row_top);
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            const int column = (i * THREADS + threadIdx.x) * 8;
            if (column >= padded) break;
            float v[8];
            load8(reinterpret_cast<const __half*>(&raw[i]), v);
            *reinterpret_cast<uint2*>(codes + row * pitch + column) = quantize8(v, ratio);
        }
    }
};

// ---- inputs ------------------------------------------------------------------------------------------------------

// The order of a sum: the chunks of 32 elements of k are cut into PARTS parts of neighbouring ones, and each part into
// PIECES. A piece adds up its chunks in order. Of each chunk a lane reads 8 neighbouring elements, which two mma take
// in turn. The pieces of a part are added one after another, then the parts. Each block of a cluster has a part;
// without clusters a block has all of them.

// Blocks of shrink_rows on an SM, of a warp more than they have: from 9.0 on 56 registers, with which a block fits an
// SM beside one that quantizes rows and one of the product.
#if __CUDA_ARCH__ >= 900
constexpr int SHRINK_BLOCKS = 4;
#else
constexpr int SHRINK_BLOCKS = 3;
#endif

// For a few rows. x: fp16 [rows, x_pitch]; the inputs of `side` are written. The grid is (CLUSTER * groups of RANKS
// columns, tiles of SHRINK_ROWS rows, slots of a tile at once). A cluster finds the rows of a tile that have its slot,
// and computes its columns of these, 8 rows at a time. A warp has a piece of each part.
//
// Blocks are small, because the product behind this kernel runs beside them, see SideProduct::wait_for_operands. It
// fills the queues of the memory, and an access takes microseconds then: a thread loads the scale of its input before
// it waits for the rows. With codes, blocks from `shrinking` on in z write those of a row each.
template <int CLUSTER, class Codes>
__device__ __forceinline__ void shrink_few_rows(
    const SideProduct& side, const __half* x, long long x_pitch, int rows, int k, int shrinking, const Codes& codes) {
    static_assert(CLUSTER == 1 || CLUSTER == PARTS, "a block has a part, or all");
    constexpr int SUMS = RANKS * 8, THREADS = PIECES * WARP;
    __shared__ float of_pieces[PIECES * SUMS], totals[SUMS];
    __shared__ int list[SHRINK_ROWS];
    launch_dependent_grids();
    const int first = blockIdx.y * SHRINK_ROWS, part = CLUSTER > 1 ? blockIdx.x % CLUSTER : 0;
    const int column = blockIdx.x / CLUSTER * RANKS, chunks = (k + CHUNK - 1) / CHUNK;
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, group = lane / 4, quarter = lane % 4 * 8;
    const TileSlots tile(side.slots, first, rows);
    bool has_waited = false;
    const auto wait = [&] {
        if (has_waited) return;
        has_waited = true;
        wait_on_dependent_grids();
        const bool is_first = blockIdx.x == 0 && blockIdx.y == 0 && blockIdx.z == 0 && threadIdx.x == 0;
        if (!Codes::EXIST && side.ready && is_first) red_add_release(side.ready, rows);
    };
    if constexpr (Codes::EXIST)
        if (blockIdx.z >= shrinking) {
            const int row = (blockIdx.z - shrinking) * gridDim.x + blockIdx.x;
            wait();
            if (row >= rows) return;
            codes.template write_row<THREADS>(x + row * x_pitch, row, k);
            __syncthreads();
            if (side.ready && threadIdx.x == 0) red_add_release(side.ready, 1);
            return;
        }
    for (int index = blockIdx.z;; index += shrinking) {
        int slot;
        const unsigned long long mask = tile.find(index, slot);
        if (!mask) break;
        const DownRows<1> down(side, slot, column);
        if (!down.any) continue;
        const int count = count_rows(mask);
        const __half* weights = down.rows[0] + static_cast<size_t>(group) * side.down_pitch + quarter;
        if (warp == 0) list_rows(mask, list);
        if (CLUSTER > 1 && !has_waited) prefetch_piece(weights, side.down_pitch, chunks, part * PIECES + warp);
        const bool writes = part == 0 && threadIdx.x < SUMS;  // of 8 rows a thread writes one input
        const float* const scale =
            writes ? find_scale(side, down.scales, down.rank, column + threadIdx.x / 8) : nullptr;
        const float own_scale = scale ? ld_global(scale) : 0;
        wait();
        __syncthreads();
#pragma unroll 1
        for (int from = 0; from < count; from += 8) {
            const __half* own = x + (first + list[min(from + group, count - 1)]) * x_pitch + quarter;
#pragma unroll 1
            for (int p = part; p < (CLUSTER > 1 ? part + 1 : PARTS); ++p) {
                float sums[4] = {};
                const int2 range = piece_chunks(chunks, p * PIECES + warp);
#pragma unroll 2
                for (int chunk = range.x; chunk < range.y; ++chunk) {
                    const int at = chunk * CHUNK;
                    uint4 values = {};
                    if (at + quarter < k) values = ld_global_cg_v4(own + at), zero_tail(values, at + quarter, k);
                    const uint4 low = ld_global_v4(weights + at);
                    const uint4 high = ld_global_v4(weights + 8 * static_cast<size_t>(side.down_pitch) + at);
                    const unsigned even[4] = {low.x, high.x, low.y, high.y}, odd[4] = {low.z, high.z, low.w, high.w};
                    mma_m16n8k16(sums, even, values.x, values.y);
                    mma_m16n8k16(sums, odd, values.z, values.w);
                }
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    of_pieces[warp * SUMS + (group + i / 2 * 8) * 8 + lane % 4 * 2 + i % 2] = sums[i];
                __syncthreads();
                for (int i = threadIdx.x; i < SUMS; i += THREADS) {
                    float sum = 0;
#pragma unroll
                    for (int w = 0; w < PIECES; ++w) sum = __fadd_rn(sum, of_pieces[w * SUMS + i]);
                    totals[i] = CLUSTER == 1 && p > 0 ? __fadd_rn(totals[i], sum) : sum;
                }
                __syncthreads();
            }
            if constexpr (CLUSTER > 1) cluster_sync<CLUSTER>();
            static_assert(SUMS <= THREADS);
            if (const int row = from + threadIdx.x % 8; scale && row < count)
                write_input<CLUSTER>(
                    side, totals + threadIdx.x, own_scale, first + list[row], column + threadIdx.x / 8);
            // The sums have been read, and the list. A release would wait until the inputs are in memory.
            if constexpr (CLUSTER > 1)
                cluster_arrive_relaxed<CLUSTER>(), cluster_wait<CLUSTER>();
            else
                __syncthreads();
        }
    }
    wait();
}

template <int CLUSTER>
__global__ void __launch_bounds__((PIECES + 1) * WARP, SHRINK_BLOCKS)
    shrink_rows(const SideProduct side, const __half* x, long long x_pitch, int rows, int k) {
    shrink_few_rows<CLUSTER>(side, x, x_pitch, rows, k, gridDim.z, NoCodes());
}

// codes: int8 [rows, codes_pitch], written up to the next multiple of 16 columns; scales: fp32 [rows]. At most 16,384
// columns; gridDim.y is 1, and behind `shrinking` in z there are blocks for all rows.
template <int CLUSTER>
__global__ void __launch_bounds__((PIECES + 1) * WARP, SHRINK_BLOCKS) shrink_rows_and_quantize(
    const SideProduct side, const __half* x, long long x_pitch, int rows, int k, int shrinking, int8* codes,
    long long codes_pitch, float* scales) {
    shrink_few_rows<CLUSTER>(side, x, x_pitch, rows, k, shrinking, RowCodes{codes, codes_pitch, scales});
}

// For many rows, as shrink_rows, for groups of GROUPS * RANKS columns. A warp has 16 of the rows with a slot and all
// pieces of a part, so it adds these up in registers. The block's part of `down` lies in shared memory; a lane's own
// elements of x go through a queue there, QUEUE chunks long.
//
// Dynamic shared memory: the queue; the sums, of GROUPS * RANKS + 8 floats for each row; the part of `down`, see pitch.
template <int GROUPS, int CLUSTER>
__global__ void __launch_bounds__(ROW_WARPS* WARP)
    shrink_many_rows(const SideProduct side, const __half* x, long long x_pitch, int rows, int k) {
    static_assert(CLUSTER == 1 || CLUSTER == PARTS, "a block has a part, or all");
    constexpr int COLUMNS = GROUPS * RANKS, TILES = COLUMNS / 8, THREADS = ROW_WARPS * WARP, TOTALS = COLUMNS + 8;
    extern __shared__ __align__(16) char shared[];
    __shared__ int list[SHRINK_ROWS];
    uint4* const queue = reinterpret_cast<uint4*>(shared) + threadIdx.x;
    float* const totals = reinterpret_cast<float*>(shared + QUEUE * 2 * THREADS * sizeof(uint4));
    __half* const weights = reinterpret_cast<__half*>(totals + SHRINK_ROWS * TOTALS);
    launch_dependent_grids();
    const int first = blockIdx.y * SHRINK_ROWS, part = CLUSTER > 1 ? blockIdx.x % CLUSTER : 0;
    const int column = blockIdx.x / CLUSTER * COLUMNS, chunks = (k + CHUNK - 1) / CHUNK;
    // Elements between rows of `down`: an odd number of 64 bytes, so that two rows lie in different banks.
    const int pitch = ((chunks + PARTS - 1) / PARTS | 1) * CHUNK;
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, group = lane / 4, quarter = lane % 4 * 8;
    const TileSlots tile(side.slots, first, rows);
    bool has_waited = false;
    for (int index = blockIdx.z;; index += gridDim.z) {
        int slot;
        const unsigned long long mask = tile.find(index, slot);
        if (!mask) break;
        const DownRows<GROUPS> down(side, slot, column);
        if (!down.any) continue;
        const int count = count_rows(mask);
        const bool has_rows = warp * 16 < count;
        if (warp == 0) list_rows(mask, list);
        __syncthreads();
        const __half* own[2];
#pragma unroll
        for (int h = 0; h < 2; ++h) own[h] = x + (first + list[min(warp * 16 + h * 8 + group, count - 1)]) * x_pitch;
        float total[TILES][4];
#pragma unroll 1
        for (int p = part; p < (CLUSTER > 1 ? part + 1 : PARTS); ++p) {
            const int begin = piece_chunks(chunks, p * PIECES).x, end = piece_chunks(chunks, p * PIECES + PIECES - 1).y;
            if (CLUSTER == 1 && p > 0) __syncthreads();  // the part before has been read
#pragma unroll
            for (int g = 0; g < GROUPS; ++g)
                if (down.rows[g])
#pragma unroll 1
                    for (int r = warp; r < RANKS; r += ROW_WARPS) {
                        const __half* from = down.rows[g] + static_cast<size_t>(r) * side.down_pitch + begin * CHUNK;
#pragma unroll 1
                        for (int i = lane * 8; i < (end - begin) * CHUNK; i += WARP * 8)
                            cp_async_16(weights + (g * RANKS + r) * pitch + i, from + i);
                    }
            cp_async_commit_group();
            if (!has_waited) wait_on_dependent_grids();
            has_waited = true;
            // Copies what this lane multiplies of a chunk.
            const auto fetch = [&](int chunk) {
                const int at = chunk * CHUNK + quarter;
                if (has_rows && chunk < end)
#pragma unroll
                    for (int h = 0; h < 2; ++h)
                        cp_async_16_partial(
                            cast_smem_ptr_to_uint(queue + (chunk % QUEUE * 2 + h) * THREADS),
                            own[h] + min(at, (k - 1) / 8 * 8), min(max(k - at, 0), 8) * 2);
                cp_async_commit_group();
            };
#pragma unroll 1
            for (int i = 0; i < QUEUE - 1; ++i) fetch(begin + i);
            cp_async_wait_group<QUEUE - 1>();
            __syncthreads();  // the weights have arrived
            float of_part[TILES][4] = {};
            int chunk = begin;
#pragma unroll 1
            for (int piece = 0; piece < PIECES; ++piece) {
                float sums[TILES][4] = {};
#pragma unroll 1
                for (const int last = piece_chunks(chunks, p * PIECES + piece).y; chunk < last; ++chunk) {
                    fetch(chunk + QUEUE - 1);
                    cp_async_wait_group<QUEUE - 1>();
                    if (!has_rows) continue;
                    const uint4 low = queue[chunk % QUEUE * 2 * THREADS];
                    const uint4 high = queue[(chunk % QUEUE * 2 + 1) * THREADS];
                    const unsigned even[4] = {low.x, high.x, low.y, high.y}, odd[4] = {low.z, high.z, low.w, high.w};
                    const __half* at = weights + group * pitch + (chunk - begin) * CHUNK + quarter;
#pragma unroll
                    for (int t = 0; t < TILES; ++t) {
                        if (!down.rows[t / 2]) continue;
                        const uint4 w = *reinterpret_cast<const uint4*>(at + t * 8 * pitch);
                        mma_m16n8k16(sums[t], even, w.x, w.y);
                        mma_m16n8k16(sums[t], odd, w.z, w.w);
                    }
                }
#pragma unroll
                for (int t = 0; t < TILES; ++t)
#pragma unroll
                    for (int i = 0; i < 4; ++i) of_part[t][i] = __fadd_rn(of_part[t][i], sums[t][i]);
            }
#pragma unroll
            for (int t = 0; t < TILES; ++t)
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    total[t][i] = CLUSTER == 1 && p > 0 ? __fadd_rn(total[t][i], of_part[t][i]) : of_part[t][i];
        }
#pragma unroll
        for (int t = 0; t < TILES; ++t)
#pragma unroll
            for (int h = 0; h < 2; ++h)
                *reinterpret_cast<float2*>(totals + (warp * 16 + h * 8 + group) * TOTALS + t * 8 + lane % 4 * 2) = {
                    total[t][2 * h], total[t][2 * h + 1]};
        cluster_sync<CLUSTER>();
        for (int i = part * THREADS + threadIdx.x; i < count * COLUMNS; i += CLUSTER * THREADS) {
            const int row = i / COLUMNS, at = i % COLUMNS;
            if (const float* scale = find_scale(side, down.scales, down.rank, column + at))
                write_input<CLUSTER>(side, totals + row * TOTALS + at, *scale, first + list[row], column + at);
        }
        cluster_sync<CLUSTER>();  // the sums have been read, and the list
    }
    // The grid ends behind its predecessor: the first blocks of each tile wait. Others make room for the product.
    if (!has_waited && blockIdx.z == 0) wait_on_dependent_grids();
}

// sums: fp32 [rows, sums_pitch], which may be `out`; bias: fp32 [n] or null; out: [rows, out_pitch]. The grid is
// (blocks of 128 outputs, tiles of EXPAND_ROWS rows). A warp computes 16 outputs of the rows of a tile.
template <class T>
__global__ void __launch_bounds__(256) expand_rows(
    const SideProduct side, const float* sums, long long sums_pitch, const float* __restrict__ bias, T* out,
    long long out_pitch, int rows) {
    launch_dependent_grids();
    wait_on_dependent_grids();
    const int lane = threadIdx.x % WARP, group = lane / 4, column = (blockIdx.x * 8 + threadIdx.x / WARP) * 16;
    const int first = blockIdx.y * EXPAND_ROWS, count = min(EXPAND_ROWS, rows - first), n = side.outputs;
    if (column >= n) return;
    float products[4] = {};  // outputs `group` and 8 behind, rows lane % 4 * 2 and the next
    int own[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) own[r] = lane % 4 * 2 + r < count ? side.slots[first + lane % 4 * 2 + r] : 0;
#pragma unroll 1
    for (int row = first; row < first + count; ++row) {
        const int slot = side.slots[row];
        if (slot <= 0 || !leads(side.slots, first, row, slot)) continue;
        const int rank = side.rank(slot);
        const __half* up = side.up(slot, rank);
#pragma unroll 1
        for (int section = side.section(column); section <= side.section(min(column + 15, n - 1)); ++section) {
            float d[4] = {};
#pragma unroll 1
            for (int at = 0; at < rank; at += RANKS)
                mma_ranks(
                    d, side.up_ranks(up, rank, column + group, at), side.up_ranks(up, rank, column + group + 8, at),
                    side.input_ranks(first + min(group, count - 1), section, at));
#pragma unroll
            for (int i = 0; i < 4; ++i)
                if (own[i % 2] == slot && side.section(column + group + i / 2 * 8) == section) products[i] = d[i];
        }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const int row = lane % 4 * 2 + i % 2, output = column + group + i / 2 * 8;
        if (row >= count || output >= n) continue;
        float y = add_side(sums[(first + row) * sums_pitch + output], products[i]);
        if (bias) y = __fadd_rn(y, bias[output]);
        out[(first + row) * out_pitch + output] = static_cast<T>(y);
    }
}

// y[row] = x[row] @ matrices[slot].T in fp32 for the rows whose slot has a matrix. x: fp16 [rows, x_pitch]; matrices:
// fp16 [slots, n, pitch] with zeros behind column k; present: [slots]; y: fp32 [rows, y_pitch]. The grid is (blocks of
// 8 outputs, tiles of EXPAND_ROWS rows). A warp computes one output of the rows of a tile, so it reads a matrix once
// for all of them. A lane adds by fma the elements of its vectors of 8, vector v of lane v % 32, and the lanes are
// added in a tree, those 16 apart first.
__global__ void __launch_bounds__(256) saved_products(
    const __half* x, long long x_pitch, const int* slots, const __half* __restrict__ matrices, int pitch,
    const int* present, float* y, long long y_pitch, int rows, int n, int k) {
    launch_dependent_grids();
    wait_on_dependent_grids();
    const int output = blockIdx.x * 8 + threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const int first = blockIdx.y * EXPAND_ROWS;
    if (output >= n) return;
#pragma unroll 1
    for (int row = first; row < min(first + EXPAND_ROWS, rows); ++row) {
        const int slot = slots[row];
        if (slot <= 0 || !present[slot - 1] || !leads(slots, first, row, slot)) continue;
        const __half* weight = matrices + (static_cast<size_t>(slot - 1) * n + output) * pitch;
        float sums[EXPAND_ROWS] = {};
        for (int column = lane * 8; column < k; column += WARP * 8) {
            const uint4 raw = ld_global_v4(weight + column);
            float w[8];
            load8(reinterpret_cast<const __half*>(&raw), w);
#pragma unroll
            for (int r = 0; r < EXPAND_ROWS; ++r) {
                if (first + r >= rows || slots[first + r] != slot) continue;
                uint4 part = ld_global_cg_v4(x + (first + r) * x_pitch + column);
                zero_tail(part, column, k);
                float values[8];
                load8(reinterpret_cast<const __half*>(&part), values);
#pragma unroll
                for (int j = 0; j < 8; ++j) sums[r] = fmaf(values[j], w[j], sums[r]);
            }
        }
#pragma unroll
        for (int r = 0; r < EXPAND_ROWS; ++r) {
            if (first + r >= rows || slots[first + r] != slot) continue;
#pragma unroll
            for (int d = WARP / 2; d; d /= 2) sums[r] = __fadd_rn(sums[r], __shfl_xor_sync(FULL, sums[r], d));
            if (lane == 0) y[(first + r) * y_pitch + output] = sums[r];
        }
    }
}

// residual[row] = tables[slot][token] * scale for the tokens whose slot has a table. tokens: [rows]; tables: fp16
// [slots, vocab, pitch]; residual: fp32 [rows, residual_pitch]. A block handles one row.
__global__ void __launch_bounds__(256) saved_embed(
    const int* tokens, const int* slots, const __half* __restrict__ tables, int pitch, const int* present, int vocab,
    float* residual, long long residual_pitch, int features, float scale) {
    launch_dependent_grids();
    wait_on_dependent_grids();
    const int row = blockIdx.x, slot = slots[row];
    if (slot <= 0 || !present[slot - 1]) return;
    const __half* from = tables + (static_cast<size_t>(slot - 1) * vocab + tokens[row]) * pitch;
    for (int i = threadIdx.x; i < features; i += blockDim.x)
        residual[row * residual_pitch + i] = __fmul_rn(__half2float(from[i]), scale);
}
