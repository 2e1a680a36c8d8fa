// Merges the records of tiles that several blocks of a prefill kernel have shared, and writes their outputs.
//
// The grid is (kv_heads, at least the number of split tiles times ROWS / WARPS); a warp has one row.
#include "attention/prefill.cuh"

namespace bminf {

// D, ROWS: of the tiles of the prefill kernel.
template <int D, int ROWS, int WARPS>
__global__ void __launch_bounds__(WARPS* WARP) attention_prefill_merge(const __grid_constant__ PrefillParams p) {
    constexpr int SLICES = ROWS / WARPS, PAIRS = (D + 2 * WARP - 1) / (2 * WARP), AHEAD = 8;
    const int lane = threadIdx.x % WARP, row = blockIdx.y % SLICES * WARPS + threadIdx.x / WARP;
    wait_on_dependent_grids();
    launch_dependent_grids();
    WorkTile work;
    const Split split = find_split<CAUSAL, ROWS>(p);
    if (find_work_tile<CAUSAL, ROWS, BLOCK_SIZE, true>(p, split, blockIdx.x, blockIdx.y / SLICES, work) != FOUND)
        return;
    if (work.first + row >= work.rows) return;
    float top = -INF_F, sum = 0, o[PAIRS][2] = {};
    const int records = work.records();
    for (int first = 0; first < records; first += AHEAD) {
        float2 sums[AHEAD], x[AHEAD][PAIRS];
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) {
            const Record<D, ROWS> record(p, work.record + min(first + i, records - 1));
            sums[i] = __ldcs(record.sums(row));
#pragma unroll
            for (int n = 0; n < PAIRS; ++n)
                x[i][n] = __ldcs(reinterpret_cast<const float2*>(record.row(row)) + min(n * WARP + lane, D / 2 - 1));
        }
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) {
            if (first + i >= records) break;
            const MergeFactors factors = merge_factors(top, sums[i].x);
            top = factors.top, sum = merge(factors, sum, sums[i].y);
#pragma unroll
            for (int n = 0; n < PAIRS; ++n)
                o[n][0] = merge(factors, o[n][0], x[i][n].x), o[n][1] = merge(factors, o[n][1], x[i][n].y);
        }
    }
    __half* const target = output_row(work, p, work.first + row);
#pragma unroll
    for (int n = 0; n < PAIRS; ++n)
#pragma unroll
        for (int j = 0; j < 2; ++j)
            if (const int column = (n * WARP + lane) * 2 + j; column < p.head_dim)
                target[column] = attention_output(o[n][j], sum);
}

}  // namespace bminf
