// Adapters that the rows of a step choose: each row has the number of a slot, from 1 on, or 0 for none.
//
//     shrink_rows   inputs = fp16(scale * (x @ down[slot].T))
//     expand_rows   out = sums + inputs @ up[slot] + bias; a row without a slot gets no product
//     saved_products, saved_embed   a head, or a table of tokens, in place of the model's
//
// A weight that is stacked from several matrices has a section for each. down: fp16 [slots, columns, pitch] with zeros
// behind column k, where columns = sections * rank_pitch; scales: fp32 [slots, columns]; up: fp16 [slots, rank_pitch,
// up_pitch], whose columns belong to the sections by `end0`, `end1` and `end2`, the outputs at which the first three
// end. ranks: [slots], the largest rank of a slot's sections; rank_pitch is a multiple of 16, and down, scales and up
// have zeros behind the ranks of sections up to a multiple of 16.
//
// A row's sums have one order, whatever the other rows and their slots are: see shrink_rows and expand_rows.
#include "common/common.cuh"
#include "common/tensor_cores.cuh"

using namespace bminf;

constexpr int SHRINK_WARPS = 8, CHUNK = 32, RANKS = 16, EXPAND_ROWS = 8;

// Whether a row of a tile is the first with its slot, so that its block computes the slot.
__device__ __forceinline__ bool leads(const int* slots, int first, int row, int slot) {
    for (int r = first; r < row; ++r)
        if (slots[r] == slot) return false;
    return true;
}

// x: fp16 [rows, x_pitch]; slots: [rows]; inputs: fp16 [rows, columns]. The grid is (columns / RANKS, tiles of 8 *
// TILES rows, rows of a tile). The block of a tile's row computes RANKS columns of the rows with that row's slot, if no
// row of the tile before it has the slot. Tensor cores multiply 16 columns by 8 rows. Of each 32 elements of k a lane
// reads 8 neighbouring ones, which two mma take in turn; chunk c of 32 elements belongs to warp c % SHRINK_WARPS. The
// warps' sums are added one after another.
template <int TILES>
__global__ void __launch_bounds__(SHRINK_WARPS* WARP) shrink_rows(
    const __half* x, long long x_pitch, const int* slots, const __half* __restrict__ down, int pitch,
    const float* __restrict__ scales, const int* ranks, __half* inputs, int rows, int k, int columns, int rank_pitch) {
    __shared__ float partial[SHRINK_WARPS][TILES][RANKS][8];
    launch_dependent_grids();
    wait_on_dependent_grids();
    const int first = blockIdx.y * 8 * TILES, row = first + blockIdx.z, column = blockIdx.x * RANKS;
    if (row >= rows) return;
    const int slot = slots[row];
    if (slot <= 0 || column % rank_pitch >= ranks[slot - 1] || !leads(slots, first, row, slot)) return;
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, group = lane / 4, part = lane % 4 * 8;
    const __half* weight = down + (static_cast<size_t>(slot - 1) * columns + column + group) * pitch;
    float sums[TILES][4] = {};
#pragma unroll 2
    for (int begin = warp * CHUNK; begin < k; begin += SHRINK_WARPS * CHUNK) {
        const int at = begin + part;
        const uint4 low = ld_global_v4(weight + at), high = ld_global_v4(weight + 8 * static_cast<size_t>(pitch) + at);
        const unsigned even[4] = {low.x, high.x, low.y, high.y}, odd[4] = {low.z, high.z, low.w, high.w};
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile) {
            const int own = first + tile * 8 + group;
            uint4 values = {};
            if (own < rows && at < k) values = ld_global_cg_v4(x + own * x_pitch + at), zero_tail(values, at, k);
            mma_m16n8k16(sums[tile], even, values.x, values.y);
            mma_m16n8k16(sums[tile], odd, values.z, values.w);
        }
    }
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile)
#pragma unroll
        for (int i = 0; i < 4; ++i) partial[warp][tile][group + i / 2 * 8][lane % 4 * 2 + i % 2] = sums[tile][i];
    __syncthreads();
    for (int i = threadIdx.x; i < TILES * 8 * RANKS; i += SHRINK_WARPS * WARP) {
        const int own = i / RANKS, rank = i % RANKS;
        if (first + own >= rows || slots[first + own] != slot) continue;
        float sum = 0;
#pragma unroll
        for (int w = 0; w < SHRINK_WARPS; ++w) sum = __fadd_rn(sum, partial[w][own / 8][rank][own % 8]);
        const float scale = scales[static_cast<size_t>(slot - 1) * columns + column + rank];
        inputs[static_cast<size_t>(first + own) * columns + column + rank] = __float2half_rn(__fmul_rn(scale, sum));
    }
}

// sums: fp32 [rows, sums_pitch], which may be `out`; bias: fp32 [n] or null; out: [rows, out_pitch]. The grid is
// (blocks of 128 outputs, tiles of EXPAND_ROWS rows). A thread computes one output of the rows of a tile, by fma over
// the rank in its order. A product of zero is not added, so that the sum keeps the sign of a zero.
template <class T>
__global__ void __launch_bounds__(128) expand_rows(
    const float* sums, long long sums_pitch, const int* slots, const __half* inputs, int columns, const int* ranks,
    const __half* __restrict__ up, int up_pitch, const float* __restrict__ bias, T* out, long long out_pitch, int rows,
    int n, int rank_pitch, int end0, int end1, int end2) {
    launch_dependent_grids();
    wait_on_dependent_grids();
    const int column = blockIdx.x * 128 + threadIdx.x, first = blockIdx.y * EXPAND_ROWS;
    if (column >= n) return;
    const int section = (column >= end0) + (column >= end1) + (column >= end2);
    inputs += static_cast<size_t>(first) * columns + section * rank_pitch;
    int own[EXPAND_ROWS];
#pragma unroll
    for (int r = 0; r < EXPAND_ROWS; ++r) own[r] = first + r < rows ? slots[first + r] : 0;
    float products[EXPAND_ROWS] = {};
#pragma unroll 1
    for (int row = first; row < min(first + EXPAND_ROWS, rows); ++row) {
        const int slot = slots[row];
        if (slot <= 0 || !leads(slots, first, row, slot)) continue;
        const __half* values = up + static_cast<size_t>(slot - 1) * rank_pitch * up_pitch + column;
        for (int begin = 0; begin < ranks[slot - 1]; begin += 8) {
            float weight[8];
#pragma unroll
            for (int j = 0; j < 8; ++j) weight[j] = __half2float(values[static_cast<size_t>(begin + j) * up_pitch]);
#pragma unroll
            for (int r = 0; r < EXPAND_ROWS; ++r) {
                if (own[r] != slot) continue;
                const uint4 raw = ld_global_cg_v4(inputs + static_cast<size_t>(r) * columns + begin);
                float part[8];
                load8(reinterpret_cast<const __half*>(&raw), part);
#pragma unroll
                for (int j = 0; j < 8; ++j) products[r] = fmaf(part[j], weight[j], products[r]);
            }
        }
    }
#pragma unroll
    for (int r = 0; r < EXPAND_ROWS; ++r) {
        if (first + r >= rows) break;
        float y = sums[(first + r) * sums_pitch + column];
        if (products[r] != 0) y = __fadd_rn(y, products[r]);
        if (bias) y = __fadd_rn(y, bias[column]);
        out[(first + r) * out_pitch + column] = static_cast<T>(y);
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
