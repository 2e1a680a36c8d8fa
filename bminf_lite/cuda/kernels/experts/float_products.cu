// Products of pairs with the weights of their experts in floating point: fp16 weights, or int8 weights whose inputs are
// not quantized. One launch for all experts, whatever the number of rows of each.
//
//     y = w_scale[expert, channel] * (x[row] @ weight[expert].T) + bias[expert, channel]
//     out = fp16(y), or fp16(f(fp16(y))), or fp16(f(fp16(gate)) * fp16(up))
//
// x: fp16 [.., x_pitch]; offsets: [experts + 1]; weight: fp16 or int8 [experts, n, pitch], with zeros behind column k,
// or in slots (slots.cuh); w_scale: fp32 [experts, n], or null for ones; bias: the same, or null; out: fp16 [pairs,
// out_pitch]. The rows of gate and up alternate in groups of eight.
//
// Sorted row p reads row order[p] / top_k of x, or row p if `order` is null. A warp computes one output of up to ROWS
// rows of an expert, so it reads the weight once for all of them. A sum has one order, whatever the other rows: a lane
// adds the elements of its vectors by fma, vector v of 16 bytes of the weight belongs to lane v % 32, and the lanes are
// added in a tree, those 16 apart first. Blocks are persistent, and find their tiles on the device (schedule.cuh).
#include "common/common.cuh"
#include "constants/epilogue.cuh"
#include "experts/activation.cuh"
#include "experts/elements.cuh"
#include "experts/pair_side.cuh"
#include "experts/schedule.cuh"
#include "experts/slots.cuh"

using namespace bminf;

constexpr int WARPS = FLOAT_THREADS / WARP;

// The operands of the products but what adapters add.
template <class W>
struct Products {
    const __half* x;
    long long x_pitch;
    const int* order;
    int top_k;
    const int* offsets;
    const W* weight;
    const int* slots;
    const float *w_scale, *bias;
    __half* out;
    long long out_pitch;
    int experts, n, k, pitch;
    Clamp clamp;
};

// Side: PairSide or NoSide.
template <class W, int ROWS, int EPILOGUE, int F, class Side>
__device__ __forceinline__ void multiply(const Products<W>& of, const Side& side) {
    const int experts = of.experts, n = of.n, k = of.k;
    constexpr bool IS_GATED = EPILOGUE == GATED;
    constexpr int MATRICES = IS_GATED ? 2 : 1, COUNT = WeightVector<W>::COUNT;
    __shared__ ExpertTiles tiles;
    launch_dependent_grids();
    wait_on_dependent_grids();
    tiles.load<ROWS>(of.offsets, experts);
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const int outputs = n / MATRICES, weight_tiles = (outputs + WARPS - 1) / WARPS;
    for (int index = blockIdx.x; index < tiles.starts[experts] * weight_tiles; index += gridDim.x) {
        const ExpertTile tile = tiles.find<ROWS>(index, experts, weight_tiles);
        const int output = tile.weight_tile * WARPS + warp;
        if (output >= outputs) continue;
        const size_t slot = slot_of(of.slots, tile.expert);
        size_t channels[MATRICES];
        const W* rows_of_weight[MATRICES];
#pragma unroll
        for (int m = 0; m < MATRICES; ++m) {
            const int channel = IS_GATED ? output / 8 * 16 + output % 8 + 8 * m : output;
            channels[m] = static_cast<size_t>(tile.expert) * n + channel;
            rows_of_weight[m] = of.weight + (slot * n + channel) * of.pitch;
        }
        const __half* rows[ROWS];
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            const int row = tile.row + min(r, tile.rows - 1);
            rows[r] = of.x + (of.order ? __ldcg(of.order + row) / of.top_k : row) * of.x_pitch;
        }
        float sums[MATRICES][ROWS] = {};
#pragma unroll 1
        for (int column = lane * COUNT; column < k; column += WARP * COUNT) {
            WeightVector<W> w[MATRICES];
#pragma unroll
            for (int m = 0; m < MATRICES; ++m) w[m].load(rows_of_weight[m] + column);
#pragma unroll
            for (int r = 0; r < ROWS; ++r) {
                if (r >= tile.rows) break;
                float values[COUNT];
                load_elements(rows[r], column, k, values);
#pragma unroll
                for (int m = 0; m < MATRICES; ++m) sums[m][r] = dot(w[m], values, sums[m][r]);
            }
        }
        float y[MATRICES] = {};  // of the lane's row
#pragma unroll
        for (int m = 0; m < MATRICES; ++m)
#pragma unroll
            for (int r = 0; r < ROWS; ++r) {
                float sum = sums[m][r];
#pragma unroll
                for (int d = WARP / 2; d; d /= 2) sum = __fadd_rn(sum, __shfl_xor_sync(FULL, sum, d));
                if (lane == r) y[m] = sum;
            }
        if (lane >= tile.rows) continue;
        int own_slot = 0, rank = 0;
        if constexpr (Side::EXISTS) own_slot = side.slot(tile.row + lane), rank = side.rank(own_slot);
#pragma unroll
        for (int m = 0; m < MATRICES; ++m) {
            if (of.w_scale) y[m] = __fmul_rn(of.w_scale[channels[m]], y[m]);
            if constexpr (Side::EXISTS)
                y[m] = side.added(y[m], tile.row + lane, own_slot, rank, tile.expert, m, output);
            if (of.bias) y[m] = __fadd_rn(y[m], of.bias[channels[m]]);
        }
        float result = y[0];
        if constexpr (IS_GATED) result = expert_activation<true, F>(y[0], y[MATRICES - 1], of.clamp);
        if constexpr (EPILOGUE == ACTIVATED) result = expert_activation<false, F>(y[0], 0.0f, of.clamp);
        of.out[(tile.row + lane) * of.out_pitch + output] = __float2half_rn(result);
    }
}

// ROWS: rows of a tile at most, 1 or 8. F: see expert_activation. n: rows of an expert's weight.
template <class W, int ROWS, int EPILOGUE, int F>
__global__ void __launch_bounds__(FLOAT_THREADS) float_products(
    const __half* x, long long x_pitch, const int* order, int top_k, const int* offsets, const W* __restrict__ weight,
    const int* slots, const float* __restrict__ w_scale, const float* __restrict__ bias, __half* out,
    long long out_pitch, int experts, int n, int k, int pitch, float limit, float alpha) {
    multiply<W, ROWS, EPILOGUE, F>(
        {x,
         x_pitch,
         order,
         top_k,
         offsets,
         weight,
         slots,
         w_scale,
         bias,
         out,
         out_pitch,
         experts,
         n,
         k,
         pitch,
         {limit, alpha}},
        NoSide());
}

// The same with what adapters add.
template <class W, int ROWS, int EPILOGUE, int F>
__global__ void __launch_bounds__(FLOAT_THREADS) float_products_adapted(
    const PairSide side, const __half* x, long long x_pitch, const int* order, int top_k, const int* offsets,
    const W* __restrict__ weight, const int* slots, const float* __restrict__ w_scale, const float* __restrict__ bias,
    __half* out, long long out_pitch, int experts, int n, int k, int pitch, float limit, float alpha) {
    multiply<W, ROWS, EPILOGUE, F>(
        {x,
         x_pitch,
         order,
         top_k,
         offsets,
         weight,
         slots,
         w_scale,
         bias,
         out,
         out_pitch,
         experts,
         n,
         k,
         pitch,
         {limit, alpha}},
        side);
}
