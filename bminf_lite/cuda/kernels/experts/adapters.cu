// Adapters of experts that the tokens of a step choose. Sorted pair p is token order[p] / top_k with the expert
// topk_ids[order[p]], and has the adapter of that expert in the slot of its token, or none.
//
//     shrink_pairs   inputs = fp16(scale * (x[row] @ down[slot, expert].T))
//     expand_pairs   out = as the kernels of the products write it, of y + inputs @ up[slot, expert].T, y their sum
//
// These kernels come behind the products of all pairs, and write the rows of the pairs with an adapter once more. The
// sums y have the bits of the kernels before: those of codes are exact, and those of floats have the order of
// float_products.cu. So have the other operations, and an adapter of zeros changes no bit.
//
// A slot is one block of memory: a header, whose first int is the rank of all adapters in it, a multiple of 16, or 0 in
// an empty slot; and for each expert scales fp32 [sections, rank], down fp16 [sections, rank, down_pitch] with zeros
// behind column k, and up fp16 [sections * width, rank]. Sections are gate and up, or one matrix. Ranks that a matrix
// does not have are zeros. A sum over ranks begins with the first one, and goes on by fma.
#include "common/adapters.cuh"
#include "common/common.cuh"
#include "constants/epilogue.cuh"
#include "experts/activation.cuh"
#include "experts/elements.cuh"
#include "experts/schedule.cuh"
#include "experts/slots.cuh"

using namespace bminf;

constexpr int WARPS = FLOAT_THREADS / WARP, ROWS = 8;

// The adapters of one of the two weights of all experts. lora_ids: the slots of the [tokens]; inputs: fp16 [pairs,
// sections * rank_pitch].
struct PairAdapters {
    const int* lora_ids;
    const char* adapters;
    long long adapter_stride;
    const int* order;
    __half* inputs;
    int top_k, sections, rank_pitch, down_pitch, width;

    __device__ __forceinline__ int token(int row) const { return __ldcg(order + row) / top_k; }
    __device__ __forceinline__ int slot(int row) const { return __ldcg(lora_ids + token(row)); }
    __device__ __forceinline__ const char* adapter(int slot) const { return adapters + (slot - 1) * adapter_stride; }
    __device__ __forceinline__ int rank(int slot) const {
        return slot > 0 ? *reinterpret_cast<const int*>(adapter(slot)) : 0;
    }
    __device__ __forceinline__ const float* scales(int slot, int rank, int expert) const {
        const size_t each = static_cast<size_t>(sections) * rank * (4 + 2 * (down_pitch + width));
        return reinterpret_cast<const float*>(adapter(slot) + ADAPTER_HEADER + each * expert);
    }
    __device__ __forceinline__ const __half* down(int slot, int rank, int expert) const {
        return reinterpret_cast<const __half*>(scales(slot, rank, expert) + sections * rank);
    }
    __device__ __forceinline__ const __half* up(int slot, int rank, int expert) const {
        return down(slot, rank, expert) + static_cast<size_t>(sections) * rank * down_pitch;
    }
    __device__ __forceinline__ __half* inputs_of(int row, int section) const {
        return inputs + (static_cast<size_t>(row) * sections + section) * rank_pitch;
    }
};

// x: fp16 [.., x_pitch], of which a pair has the row of its token, or with BY_PAIR its own; factors: fp32 [pairs], by
// the pairs' own numbers, or null; each element of x is multiplied by that of its pair, and rounded. The grid is
// (sorted pairs, blocks of WARPS sums), and a warp computes one sum. A lane adds the elements of its vectors by fma,
// vector v of 8 elements belongs to lane v % 32, and the lanes are added in a tree, those 16 apart first.
template <bool BY_PAIR>
__global__ void __launch_bounds__(FLOAT_THREADS) shrink_pairs(
    const PairAdapters side, const int* topk_ids, const __half* x, long long x_pitch, const float* factors, int k) {
    launch_dependent_grids();
    wait_on_dependent_grids();
    const int row = blockIdx.x, at = blockIdx.y * WARPS + threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const int slot = side.slot(row), rank = side.rank(slot);
    if (at >= side.sections * rank) return;
    const int pair = __ldcg(side.order + row), expert = __ldcg(topk_ids + pair);
    const __half* const values = x + (BY_PAIR ? row : side.token(row)) * x_pitch;
    const __half* const weights = side.down(slot, rank, expert) + static_cast<size_t>(at) * side.down_pitch;
    const float factor = factors ? __ldcg(factors + pair) : 1.0f;
    float sum = 0;
#pragma unroll 2
    for (int column = lane * 8; column < k; column += WARP * 8) {
        float a[8], b[8];
        load_elements(values, column, k, a);
        const uint4 raw = ld_global_v4(weights + column);
        load8(reinterpret_cast<const __half*>(&raw), b);
#pragma unroll
        for (int i = 0; i < 8; ++i) sum = fmaf(factors ? rounded(__fmul_rn(a[i], factor)) : a[i], b[i], sum);
    }
#pragma unroll
    for (int d = WARP / 2; d; d /= 2) sum = __fadd_rn(sum, __shfl_xor_sync(FULL, sum, d));
    if (lane == 0)
        side.inputs_of(row, at / rank)[at % rank] =
            __float2half_rn(__fmul_rn(side.scales(slot, rank, expert)[at], sum));
}

// What a lane adds of a product of codes, or of elements; of its vectors of the weight and of rows of x.
template <class X, class W>
struct PairSum {
    using Vector = WeightVector<W>;
    static constexpr int COUNT = Vector::COUNT;
    float sum = 0;

    // The elements of a row, which several matrices multiply.
    struct Row {
        float x[COUNT];
        __device__ __forceinline__ void load(const X* row, int column, int k) { load_elements(row, column, k, x); }
    };
    __device__ __forceinline__ void add(const Vector& weight, const Row& row) { sum = dot(weight, row.x, sum); }
    __device__ __forceinline__ float total() const {
        float all = sum;
#pragma unroll
        for (int d = WARP / 2; d; d /= 2) all = __fadd_rn(all, __shfl_xor_sync(FULL, all, d));
        return all;
    }
};

template <>
struct PairSum<int8, int8> {
    static constexpr int COUNT = 16;
    int sum = 0;

    struct Vector {
        uint4 w;
        __device__ __forceinline__ void load(const int8* p) { w = ld_global_v4(p); }
    };
    struct Row {
        uint4 x;
        __device__ __forceinline__ void load(const int8* row, int column, int) { x = ld_global_cg_v4(row + column); }
    };
    __device__ __forceinline__ void add(const Vector& weight, const Row& row) {
        sum = __dp4a(static_cast<int>(weight.w.x), static_cast<int>(row.x.x), sum);
        sum = __dp4a(static_cast<int>(weight.w.y), static_cast<int>(row.x.y), sum);
        sum = __dp4a(static_cast<int>(weight.w.z), static_cast<int>(row.x.z), sum);
        sum = __dp4a(static_cast<int>(weight.w.w), static_cast<int>(row.x.w), sum);
    }
    __device__ __forceinline__ float total() const {
        int all = sum;
#pragma unroll
        for (int d = WARP / 2; d; d /= 2) all += __shfl_xor_sync(FULL, all, d);
        return __int2float_rn(all);
    }
};

// inputs @ up of one output: of `rank` ranks, a multiple of 16.
__device__ __forceinline__ float side_product(const __half* inputs, const __half* up, int rank) {
    float sum = 0;
#pragma unroll 1
    for (int at = 0; at < rank; at += 8) {
        const uint4 a = ld_global_cg_v4(inputs + at), b = ld_global_v4(up + at);
        float x[8], w[8];
        load8(reinterpret_cast<const __half*>(&a), x);
        load8(reinterpret_cast<const __half*>(&b), w);
#pragma unroll
        for (int i = 0; i < 8; ++i) sum = fmaf(x[i], w[i], sum);
    }
    return sum;
}

// The parameters are those of float_products.cu and grouped_gemm.cu: of codes (X is int8) x has a row for each sorted
// pair, and x_scale is fp32 [pairs]; of floats x_scale is null, and BY_PAIR says whether x has a row for each pair or
// for each token. k: columns of x, of codes a multiple of 16. A warp computes one output of up to ROWS rows of an
// expert, lane r that of row r, and skips rows without an adapter. Blocks are persistent.
template <class X, class W, bool BY_PAIR, int EPILOGUE, int F>
__global__ void __launch_bounds__(FLOAT_THREADS, 2) expand_pairs(
    const PairAdapters side, const X* x, long long x_pitch, const float* x_scale, const int* offsets,
    const W* __restrict__ weight, const int* slots, const float* __restrict__ w_scale, const float* __restrict__ bias,
    __half* out, long long out_pitch, int experts, int n, int k, int pitch, float limit, float alpha) {
    constexpr bool IS_GATED = EPILOGUE == GATED;
    constexpr int MATRICES = IS_GATED ? 2 : 1, COUNT = PairSum<X, W>::COUNT;
    __shared__ ExpertTiles tiles;
    launch_dependent_grids();
    wait_on_dependent_grids();
    tiles.load<ROWS>(offsets, experts);
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const int outputs = n / MATRICES, weight_tiles = (outputs + WARPS - 1) / WARPS;
    for (int index = blockIdx.x; index < tiles.starts[experts] * weight_tiles; index += gridDim.x) {
        const ExpertTile tile = tiles.find<ROWS>(index, experts, weight_tiles);
        const int output = tile.weight_tile * WARPS + warp;
        if (output >= outputs) continue;
        const int own = tile.row + min(lane, tile.rows - 1), own_slot = side.slot(own), rank = side.rank(own_slot);
        const unsigned adapted = __ballot_sync(FULL, lane < tile.rows && rank > 0);
        if (!adapted) continue;
        const size_t place = slot_of(slots, tile.expert);
        size_t channels[MATRICES];
        const W* rows_of_weight[MATRICES];
#pragma unroll
        for (int m = 0; m < MATRICES; ++m) {
            const int channel = IS_GATED ? output / 8 * 16 + output % 8 + 8 * m : output;
            channels[m] = static_cast<size_t>(tile.expert) * n + channel;
            rows_of_weight[m] = weight + (place * n + channel) * pitch;
        }
        int rows[ROWS];
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            const int row = tile.row + min(r, tile.rows - 1);
            rows[r] = BY_PAIR ? row : side.token(row);
        }
        PairSum<X, W> sums[MATRICES][ROWS];
#pragma unroll 1
        for (int column = lane * COUNT; column < k; column += WARP * COUNT) {
            typename PairSum<X, W>::Vector w[MATRICES];
#pragma unroll
            for (int m = 0; m < MATRICES; ++m) w[m].load(rows_of_weight[m] + column);
#pragma unroll
            for (int r = 0; r < ROWS; ++r) {
                if (!(adapted >> r & 1)) continue;
                typename PairSum<X, W>::Row values;
                values.load(x + rows[r] * x_pitch, column, k);
#pragma unroll
                for (int m = 0; m < MATRICES; ++m) sums[m][r].add(w[m], values);
            }
        }
        float y[MATRICES] = {};  // of the lane's row
#pragma unroll
        for (int m = 0; m < MATRICES; ++m)
#pragma unroll
            for (int r = 0; r < ROWS; ++r) {
                const float total = sums[m][r].total();
                if (lane == r) y[m] = total;
            }
        if (!(adapted >> lane & 1)) continue;
        const __half* const up = side.up(own_slot, rank, tile.expert);
#pragma unroll
        for (int m = 0; m < MATRICES; ++m) {
            if (x_scale)
                y[m] = scaled(y[m], __ldcg(x_scale + own), w_scale[channels[m]]);
            else if (w_scale)
                y[m] = __fmul_rn(w_scale[channels[m]], y[m]);
            if (output < side.width) {
                const __half* const values = up + (static_cast<size_t>(m) * side.width + output) * rank;
                y[m] = add_side(y[m], side_product(side.inputs_of(own, m), values, rank));
            }
            if (bias) y[m] = __fadd_rn(y[m], bias[channels[m]]);
        }
        const Clamp clamp = {limit, alpha};
        float result = y[0];
        if constexpr (IS_GATED) result = expert_activation<true, F>(y[0], y[MATRICES - 1], clamp);
        if constexpr (EPILOGUE == ACTIVATED) result = expert_activation<false, F>(y[0], 0.0f, clamp);
        out[own * out_pitch + output] = __float2half_rn(result);
    }
}
