// Inputs of the adapters of experts that the tokens of a step choose:
//
//     inputs = fp16(scale * (x[row] @ down[slot, expert].T))
//
// The kernels of the products add the rest: see pair_side.cuh.
#include "common/common.cuh"
#include "common/tensor_cores.cuh"
#include "constants/experts.cuh"
#include "experts/pair_side.cuh"
#include "experts/schedule.cuh"

using namespace bminf;

constexpr int WARPS = FLOAT_THREADS / WARP, CHUNK = 32;

// Eight elements, each multiplied and rounded.
__device__ __forceinline__ uint4 times(const uint4& x, float factor) {
    uint4 y;
    const unsigned (&from)[4] = reinterpret_cast<const unsigned (&)[4]>(x);
    unsigned (&to)[4] = reinterpret_cast<unsigned (&)[4]>(y);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const float2 pair = unpack_half2(from[i]);
        to[i] = pack_half2(__fmul_rn(pair.x, factor), __fmul_rn(pair.y, factor));
    }
    return y;
}

// x: fp16 [.., x_pitch], of which a pair has the row of its token, or with BY_PAIR its own; factors: fp32 [pairs], by
// the pairs' own numbers, or null; each element of x is multiplied by that of its pair, and rounded.
//
// SORTED: `offsets` and `order` are those of sorted pairs. Otherwise the pairs have their own order, `order` are their
// experts, and a tile is one of them; then slots of tokens, unless null, are written to those of the pairs first. Of
// such pairs, those with the rows of tokens stand before few_tokens_hidden, which reads what earlier kernels have
// written without a wait: it starts when this kernel has waited.
//
// The grid is (groups of RANKS * GROUPS columns of the inputs, tiles of 8 * TILES sorted rows of one expert at most,
// slots of a tile at once). A block finds the rows of its tile that have a slot, and computes its columns of these.
//
// The order of a sum: the chunks of CHUNK elements of k are cut into WARPS pieces of neighbouring ones. A warp adds up
// the chunks of a piece in order. Of each chunk a lane reads 8 neighbouring elements, which two mma take in turn. The
// pieces are added one after another. AHEAD chunks are loaded together.
template <bool SORTED, bool BY_PAIR, int TILES, int GROUPS>
__global__ void __launch_bounds__(FLOAT_THREADS, SORTED ? 2 : 1) shrink_pairs(
    const PairSide side, const int* offsets, int experts, const int* order, int top_k, const __half* x,
    long long x_pitch, const float* factors, int k, const int* token_slots) {
    constexpr int ROWS = TILES * 8, COLUMNS = GROUPS * RANKS, PITCH = COLUMNS + 4;
    constexpr int AHEAD = !SORTED ? 8 : TILES == 1 ? 4 : 1;
    static_assert(ROWS <= WARP);
    __shared__ ExpertTiles tiles;
    __shared__ float sums[WARPS][ROWS][PITCH];  // the pitch gives the lanes of a store different banks
    __shared__ int list[ROWS];
    constexpr bool STARTS_LATE = !SORTED && !BY_PAIR;
    if constexpr (!STARTS_LATE) launch_dependent_grids();
    wait_on_dependent_grids();
    if constexpr (STARTS_LATE) launch_dependent_grids();
    ExpertTile tile = {0, static_cast<int>(blockIdx.y), 1, 0};
    if constexpr (SORTED) {
        tiles.load<ROWS>(offsets, experts);
        if (blockIdx.y >= tiles.starts[experts]) return;
        tile = tiles.find(blockIdx.y, experts, 1);
    } else {
        tile.expert = __ldcg(order + tile.row);
    }
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, group = lane / 4, quarter = lane % 4 * 8;
    const int column = blockIdx.x * COLUMNS, chunks = (k + CHUNK - 1) / CHUNK;
    const int first = chunks * warp / WARPS, end = chunks * (warp + 1) / WARPS;
    int own = 0;
    if (lane < tile.rows)
        own = token_slots ? __ldcg(token_slots + (tile.row + lane) / top_k) : side.slot(tile.row + lane);
    if (token_slots && blockIdx.x == 0 && threadIdx.x < tile.rows) side.pair_slots[tile.row + threadIdx.x] = own;
    unsigned left = __ballot_sync(FULL, own > 0);
#pragma unroll 1
    for (int turn = 0; left; ++turn) {
        const int slot = __shfl_sync(FULL, own, __ffs(left) - 1);
        const unsigned mask = __ballot_sync(FULL, own == slot);
        left &= ~mask;
        if (turn % gridDim.z != blockIdx.z) continue;
        const int rank = side.rank(slot), count = __popc(mask);
        // Columns of the inputs are rows of `down`, but for ranks that the slot does not have.
        const __half* weights[GROUPS];
        bool any = false;
#pragma unroll
        for (int g = 0; g < GROUPS; ++g) {
            const int section = (column + g * RANKS) / side.rank_pitch, at = (column + g * RANKS) % side.rank_pitch;
            const bool inside = section < side.sections && at < rank;
            any |= inside;
            weights[g] = inside ? side.down(slot, rank, tile.expert) +
                                      static_cast<size_t>(section * rank + at + group) * side.down_pitch + quarter
                                : nullptr;
        }
        if (!any) continue;
        if (warp == 0 && mask >> lane & 1) list[__popc(mask & ((1u << lane) - 1))] = lane;
        __syncthreads();
        const __half* rows[TILES];
        float factor[TILES];
#pragma unroll
        for (int t = 0; t < TILES; ++t) {
            const int row = tile.row + list[min(t * 8 + group, count - 1)],
                      pair = BY_PAIR || !SORTED ? row : __ldcg(order + row);
            rows[t] = x + (BY_PAIR ? row : pair / top_k) * x_pitch + quarter;
            factor[t] = factors ? __ldcg(factors + pair) : 1.0f;
        }
        float c[GROUPS][TILES][4] = {};
#pragma unroll 1
        for (int from = first; from < end; from += AHEAD) {
            uint4 low[AHEAD][GROUPS], high[AHEAD][GROUPS], values[AHEAD][TILES];
#pragma unroll
            for (int i = 0; i < AHEAD; ++i) {
                const int at = (from + i) * CHUNK;
                const bool exists = from + i < end;
#pragma unroll
                for (int g = 0; g < GROUPS; ++g) {
                    low[i][g] = high[i][g] = uint4{};
                    if (!exists || !weights[g]) continue;
                    low[i][g] = ld_global_v4(weights[g] + at);
                    high[i][g] = ld_global_v4(weights[g] + 8 * static_cast<size_t>(side.down_pitch) + at);
                }
#pragma unroll
                for (int t = 0; t < TILES; ++t) {
                    values[i][t] = uint4{};
                    if (exists && t * 8 < count && at + quarter < k) values[i][t] = ld_global_cg_v4(rows[t] + at);
                }
            }
#pragma unroll
            for (int i = 0; i < AHEAD; ++i) {
                if (from + i >= end) break;
                const int at = (from + i) * CHUNK + quarter;
#pragma unroll
                for (int t = 0; t < TILES; ++t) {
                    if (t * 8 >= count) break;
                    zero_tail(values[i][t], at, k);
                    if (factors) values[i][t] = times(values[i][t], factor[t]);
#pragma unroll
                    for (int g = 0; g < GROUPS; ++g) {
                        const uint4 &a = low[i][g], &b = high[i][g], &v = values[i][t];
                        const unsigned even[4] = {a.x, b.x, a.y, b.y}, odd[4] = {a.z, b.z, a.w, b.w};
                        mma_m16n8k16(c[g][t], even, v.x, v.y);
                        mma_m16n8k16(c[g][t], odd, v.z, v.w);
                    }
                }
            }
        }
#pragma unroll
        for (int g = 0; g < GROUPS; ++g)
#pragma unroll
            for (int t = 0; t < TILES; ++t)
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    sums[warp][t * 8 + lane % 4 * 2 + i % 2][g * RANKS + group + i / 2 * 8] = c[g][t][i];
        __syncthreads();
        for (int i = threadIdx.x; i < count * COLUMNS; i += FLOAT_THREADS) {
            const int row = i / COLUMNS, place = i % COLUMNS;
            const int section = (column + place) / side.rank_pitch, at = (column + place) % side.rank_pitch;
            if (section >= side.sections || at >= rank) continue;
            float sum = sums[0][row][place];
#pragma unroll
            for (int w = 1; w < WARPS; ++w) sum = __fadd_rn(sum, sums[w][row][place]);
            const float scale = side.scales(slot, rank, tile.expert)[section * rank + at];
            side.inputs_of(tile.row + list[row], section)[at] = __float2half_rn(__fmul_rn(scale, sum));
        }
        __syncthreads();  // the sums have been read, and the list
    }
}
