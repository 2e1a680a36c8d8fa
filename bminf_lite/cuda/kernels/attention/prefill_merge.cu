// Merges the records of tiles that several blocks of a prefill kernel have shared, and writes their outputs.
//
// The grid is (kv_heads, at least the number of split tiles times ROWS * D / (128 * WARPS)); a warp has eight columns
// of 16 rows, as fragment_of has them.
#include "attention/prefill.cuh"

namespace bminf {

// D, ROWS: of the tiles of the prefill kernel. HAS_SINKS: whether its scores are SINKS.
template <int D, int ROWS, int WARPS, bool HAS_SINKS>
__global__ void __launch_bounds__(WARPS* WARP) attention_prefill_merge(const __grid_constant__ PrefillParams p) {
    constexpr int COLUMNS = D / 8, SLICES = ROWS / 16 * COLUMNS / WARPS, AHEAD = 8;
    const int lane = threadIdx.x % WARP, slice = blockIdx.y % SLICES * WARPS + threadIdx.x / WARP;
    const int first_row = slice / COLUMNS * 16, n = slice % COLUMNS, row = first_row + lane / 4;
    wait_on_dependent_grids();
    launch_dependent_grids();
    WorkTile work;
    WorkCursor cursor;
    const Split split = find_split<CAUSAL, ROWS>(p);
    if (find_work_tile<CAUSAL, ROWS, BLOCK_SIZE, true>(p, split, blockIdx.x, blockIdx.y / SLICES, cursor, work) !=
        FOUND)
        return;
    if (work.first + first_row >= work.rows) return;
    float top[2] = {-INF_F, -INF_F}, sum[2] = {}, o[4] = {};
    const int records = work.records();
    for (int first = 0; first < records; first += AHEAD) {
        float2 sums[AHEAD][2];
        float4 x[AHEAD];
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) {
            const Record<D, ROWS> record(p, work.record + min(first + i, records - 1));
            sums[i][0] = __ldcs(record.sums(row)), sums[i][1] = __ldcs(record.sums(row + 8));
            x[i] = __ldcs(record.outputs(first_row) + n * WARP);
        }
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) {
            if (first + i >= records) break;
            const float right[4] = {x[i].x, x[i].y, x[i].z, x[i].w};
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const MergeFactors factors = merge_factors(top[h], sums[i][h].x);
                top[h] = factors.top, sum[h] = merge(factors, sum[h], sums[i][h].y);
#pragma unroll
                for (int j = 2 * h; j < 2 * h + 2; ++j) o[j] = merge(factors, o[j], right[j]);
            }
        }
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        if (work.first + row + 8 * h >= work.rows) continue;
        if constexpr (HAS_SINKS) {
            const MergeFactors factors = sink_factors(top[h], sink_of(p, work, work.first + row + 8 * h));
            sum[h] = merge(factors, sum[h], 1.0f);
#pragma unroll
            for (int j = 2 * h; j < 2 * h + 2; ++j) o[j] = merge(factors, o[j], 0.0f);
        }
        __half* const target = output_row(work, p, work.first + row + 8 * h);
#pragma unroll
        for (int j = 0; j < 2; ++j)
            if (const int column = n * 8 + lane % 4 * 2 + j; column < p.head_dim)
                target[column] = attention_output(o[2 * h + j], sum[h]);
    }
}

}  // namespace bminf
