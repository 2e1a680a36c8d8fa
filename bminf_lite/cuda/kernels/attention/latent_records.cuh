// The records of latent_few.cu, and the means that are made of them.
#pragma once
#include "attention/softmax.cuh"
#include "constants/latent_segments.cuh"

namespace bminf {

// A record of one block: the sums of its columns [LATENT_FEW_ROWS, COLUMNS], and behind them of each row the largest
// score and the sum of weights. A segment of a tile has LATENT_CLUSTER of them, which have other columns.
template <int COLUMNS>
constexpr int RECORD = LATENT_FEW_ROWS * (COLUMNS + 2);

// Four means of a row, those from `column` of a block's columns on: of the records of `segments` segments, which are
// `stride` apart.
template <int COLUMNS>
__device__ __forceinline__ uint2
merged_means(const float* records, long long stride, int segments, int row, int column) {
    float top = -INF_F, sum = 0, o[4] = {};
#pragma unroll 4
    for (int segment = 0; segment < segments; ++segment, records += stride) {
        const float2 of_row = __ldcg(reinterpret_cast<const float2*>(records + LATENT_FEW_ROWS * COLUMNS + 2 * row));
        const float4 x = __ldcg(reinterpret_cast<const float4*>(records + row * COLUMNS + column));
        const MergeFactors merging = merge_factors(top, of_row.x);
        top = merging.top, sum = merge(merging, sum, of_row.y);
        o[0] = merge(merging, o[0], x.x), o[1] = merge(merging, o[1], x.y);
        o[2] = merge(merging, o[2], x.z), o[3] = merge(merging, o[3], x.w);
    }
    uint2 means;
    __half* const each = reinterpret_cast<__half*>(&means);
#pragma unroll
    for (int i = 0; i < 4; ++i) each[i] = attention_output(o[i], sum);
    return means;
}

}  // namespace bminf
