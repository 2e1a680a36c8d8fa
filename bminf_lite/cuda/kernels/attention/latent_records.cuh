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
    constexpr int AT_ONCE = 4;
    float top = -INF_F, sum = 0, o[4] = {};
#pragma unroll 1
    for (int segment = 0; segment < segments; segment += AT_ONCE) {
        float2 of_row[AT_ONCE];
        float4 x[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {  // of the last segment instead of one that is not there
            const float* const record = records + min(segment + i, segments - 1) * stride;
            of_row[i] = __ldcg(reinterpret_cast<const float2*>(record + LATENT_FEW_ROWS * COLUMNS + 2 * row));
            x[i] = __ldcg(reinterpret_cast<const float4*>(record + row * COLUMNS + column));
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            if (segment + i >= segments) break;
            const MergeFactors merging = merge_factors(top, of_row[i].x);
            top = merging.top, sum = merge(merging, sum, of_row[i].y);
            o[0] = merge(merging, o[0], x[i].x), o[1] = merge(merging, o[1], x[i].y);
            o[2] = merge(merging, o[2], x[i].z), o[3] = merge(merging, o[3], x[i].w);
        }
    }
    uint2 means;
    __half* const each = reinterpret_cast<__half*>(&means);
#pragma unroll
    for (int i = 0; i < 4; ++i) each[i] = attention_output(o[i], sum);
    return means;
}

}  // namespace bminf
