// Adapters that the rows of a step choose: each row has the number of a slot, from 1 on, or 0 for none.
//
//     shrink_rows   inputs = fp16(scale * (x @ down[slot].T))
//     expand_rows   out = sums + inputs @ up[slot] + bias; a row without a slot gets no product
//     saved_products, saved_embed   a head, or a table of tokens, in place of the model's
//
// See common/adapters.cuh for a slot. The kernels of products that add the side product themselves need no
// expand_rows. A row's sums have one order, whatever the other rows and their slots are: see shrink_rows.
#include "common/adapters.cuh"
#include "common/cluster.cuh"
#include "common/common.cuh"
#include "common/tensor_cores.cuh"

using namespace bminf;

constexpr int SHRINK_WARPS = 8, PARTS = 8, CHUNK = 32, SHRINK_ROWS = 64, EXPAND_ROWS = 8;

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

// The chunks of piece `piece`; of PARTS * SHRINK_WARPS.
__device__ __forceinline__ int2 piece_chunks(int chunks, int piece) {
    return {chunks * piece / (PARTS * SHRINK_WARPS), chunks * (piece + 1) / (PARTS * SHRINK_WARPS)};
}

// Fetches what a warp reads of `down` into the L2 cache, while the kernel waits for its input.
template <int GROUPS>
__device__ __forceinline__ void prefetch_piece(
    const __half* const (&weights)[GROUPS], int down_pitch, int chunks, int piece) {
    const int2 range = piece_chunks(chunks, piece);
#pragma unroll 1
    for (int chunk = range.x; chunk < range.y; ++chunk)
#pragma unroll
        for (int g = 0; g < GROUPS; ++g)
            if (weights[g] && threadIdx.x % 4 == 0) {
                prefetch_l2(weights[g] + chunk * CHUNK);
                prefetch_l2(weights[g] + 8 * static_cast<size_t>(down_pitch) + chunk * CHUNK);
            }
}

// x: fp16 [rows, x_pitch]; the inputs of `side` are written. The grid is (CLUSTER * groups of 16 * GROUPS columns,
// tiles of SHRINK_ROWS rows, slots of a tile at once). A cluster finds the rows of a tile that have its slot, and
// computes its columns of these, 8 * TILES rows at a time.
//
// The order of a sum: the chunks of 32 elements of k are cut into PARTS parts of neighbouring ones, and each part into
// SHRINK_WARPS. A warp adds up its chunks in order. Of each chunk a lane reads 8 neighbouring elements, which two mma
// take in turn. The warps of a part are added one after another, then the parts. Each block of a cluster has a part;
// without clusters a block has all of them.
//
// Dynamic shared memory: (SHRINK_WARPS + 1) * GROUPS * 16 * TILES * 8 floats.
template <int TILES, int GROUPS, int CLUSTER>
__global__ void __launch_bounds__(SHRINK_WARPS* WARP)
    shrink_rows(const SideProduct side, const __half* x, long long x_pitch, int rows, int k) {
    static_assert(CLUSTER == 1 || CLUSTER == PARTS, "a block has a part, or all");
    constexpr int SUMS = GROUPS * RANKS * TILES * 8, THREADS = SHRINK_WARPS * WARP;
    extern __shared__ __align__(16) float shared[];
    __shared__ int list[SHRINK_ROWS];
    __half* const inputs = const_cast<__half*>(side.inputs);
    float* const totals = shared + SHRINK_WARPS * SUMS;
    launch_dependent_grids();
    const int first = blockIdx.y * SHRINK_ROWS, part = CLUSTER > 1 ? blockIdx.x % CLUSTER : 0;
    const int column = blockIdx.x / CLUSTER * GROUPS * RANKS, chunks = (k + CHUNK - 1) / CHUNK;
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, group = lane / 4, quarter = lane % 4 * 8;
    const TileSlots tile(side.slots, first, rows);
    bool has_waited = false;
    for (int index = blockIdx.z;; index += gridDim.z) {
        int slot;
        const unsigned long long mask = tile.find(index, slot);
        if (!mask) break;
        const int rank = side.rank(slot), count = count_rows(mask);
        // Columns of the inputs are rows of `down`, but for ranks that the slot does not have.
        const float* scales = reinterpret_cast<const float*>(side.adapter(slot) + ADAPTER_HEADER);
        const __half* down = reinterpret_cast<const __half*>(scales + side.sections * rank);
        const __half* weights[GROUPS];
        bool any = false;
#pragma unroll
        for (int g = 0; g < GROUPS; ++g) {
            const int section = (column + g * RANKS) / side.rank_pitch, at = (column + g * RANKS) % side.rank_pitch;
            const bool inside = section < side.sections && at < rank;
            any |= inside;
            weights[g] =
                inside ? down + static_cast<size_t>(section * rank + at + group) * side.down_pitch + quarter : nullptr;
        }
        if (!any) continue;
        if (warp == 0)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const int row = h * WARP + lane;
                if (mask >> row & 1) list[count_rows(mask & ((1ull << row) - 1))] = row;
            }
        if (!has_waited) {
            if constexpr (CLUSTER > 1)
                prefetch_piece<GROUPS>(weights, side.down_pitch, chunks, part * SHRINK_WARPS + warp);
            wait_on_dependent_grids(), has_waited = true;
        }
        __syncthreads();
        for (int from = 0; from < count; from += TILES * 8) {
            const __half* own[TILES];
#pragma unroll
            for (int t = 0; t < TILES; ++t)
                own[t] = x + (first + list[min(from + t * 8 + group, count - 1)]) * x_pitch + quarter;
#pragma unroll 1
            for (int p = part; p < (CLUSTER > 1 ? part + 1 : PARTS); ++p) {
                float sums[GROUPS][TILES][4] = {};
                const int2 range = piece_chunks(chunks, p * SHRINK_WARPS + warp);
#pragma unroll 2
                for (int chunk = range.x; chunk < range.y; ++chunk) {
                    const int at = chunk * CHUNK;
                    uint4 values[TILES];
#pragma unroll
                    for (int t = 0; t < TILES; ++t) {
                        uint4 loaded = {};
                        if (from + t * 8 < count && at + quarter < k)
                            loaded = ld_global_cg_v4(own[t] + at), zero_tail(loaded, at + quarter, k);
                        values[t] = loaded;
                    }
#pragma unroll
                    for (int g = 0; g < GROUPS; ++g) {
                        if (!weights[g]) continue;
                        const uint4 low = ld_global_v4(weights[g] + at);
                        const uint4 high = ld_global_v4(weights[g] + 8 * static_cast<size_t>(side.down_pitch) + at);
                        const unsigned even[4] = {low.x, high.x, low.y, high.y},
                                       odd[4] = {low.z, high.z, low.w, high.w};
#pragma unroll
                        for (int t = 0; t < TILES; ++t) {
                            if (from + t * 8 >= count) break;
                            mma_m16n8k16(sums[g][t], even, values[t].x, values[t].y);
                            mma_m16n8k16(sums[g][t], odd, values[t].z, values[t].w);
                        }
                    }
                }
#pragma unroll
                for (int g = 0; g < GROUPS; ++g)
#pragma unroll
                    for (int t = 0; t < TILES; ++t)
#pragma unroll
                        for (int i = 0; i < 4; ++i) {
                            const int rank = group + i / 2 * 8, row = t * 8 + lane % 4 * 2 + i % 2;
                            shared[warp * SUMS + (g * RANKS + rank) * TILES * 8 + row] = sums[g][t][i];
                        }
                __syncthreads();
                for (int i = threadIdx.x; i < SUMS; i += THREADS) {
                    float sum = 0;
#pragma unroll
                    for (int w = 0; w < SHRINK_WARPS; ++w) sum = __fadd_rn(sum, shared[w * SUMS + i]);
                    totals[i] = CLUSTER == 1 && p > 0 ? __fadd_rn(totals[i], sum) : sum;
                }
                __syncthreads();
            }
            if constexpr (CLUSTER > 1) cluster_sync<CLUSTER>();
            for (int i = part * THREADS + threadIdx.x; i < SUMS; i += CLUSTER * THREADS) {
                const int place = i / (TILES * 8), row = from + i % (TILES * 8), to = column + place;
                const int section = to / side.rank_pitch, at = to % side.rank_pitch;
                if (row >= count || section >= side.sections || at >= rank) continue;
                float sum = ld_shared_cluster<CLUSTER>(totals + i, 0);
#pragma unroll
                for (int p = 1; p < CLUSTER; ++p) sum = __fadd_rn(sum, ld_shared_cluster<CLUSTER>(totals + i, p));
                inputs[static_cast<size_t>(first + list[row]) * side.input_columns + to] =
                    __float2half_rn(__fmul_rn(scales[section * rank + at], sum));
            }
            cluster_sync<CLUSTER>();  // the sums have been read, and the list
        }
    }
    if (!has_waited) wait_on_dependent_grids();
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
