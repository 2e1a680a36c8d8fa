// Split-KV reduction of decode attention: blocks that share a context combine their partial softmax results. The blocks
// of a cluster write into each other's shared memory. If a context has several clusters (or there are none, before
// 9.0), each writes a partial result to global memory, and the last one to arrive combines these.
//
// A partial result of a head is (top, sum, out): the largest score to the base 2, the sum of the weights
// w = 2^(score - top), and the weighted sum of the values. Two are combined by scaling sum and out by 2^(top - new
// top).
#pragma once
#include "common/cluster.cuh"
#include "constants/decode.cuh"

namespace bminf {

// 2^(top - new_top), and 0 for the top of an empty set.
__device__ __forceinline__ float rescale_factor(float top, float new_top) {
    return top == -INF_F ? 0.0f : exp2_fast(top - new_top);
}

// The partial results that a block receives from the blocks of its cluster, of the SLICE elements of each head that it
// combines.
template <int D, int CLUSTER>
struct ClusterPartials {
    static constexpr int SLICE = D / CLUSTER;
    alignas(16) float outs[CLUSTER][HEADS][SLICE];
    alignas(16) float tops[CLUSTER][HEADS][2];  // (top, sum)

    // Sends the elements d to d + 3 of head h of block `from` to the block that combines them.
    __device__ __forceinline__ void send_partial(
        int from, int h, int d, const float (&value)[4], float top, float sum) {
        const float top_and_sum[2] = {top, sum};
        st_shared_cluster<CLUSTER>(&outs[from][h][d % SLICE], d / SLICE, value);
        if (d % SLICE == 0) st_shared_cluster<CLUSTER>(tops[from][h], d / SLICE, top_and_sum);
    }
};

// The grid is (splits, groups of heads, sequences) in clusters of CLUSTER splits. out: fp16 [B, out_pitch]. A block has
// `count` heads from first_head on. Used only by several clusters: partials, fp32 [B, heads, splits / CLUSTER, CLUSTER,
// 2 + D / CLUSTER], and arrival_counts, int32 [B, gridDim.y, CLUSTER], which are zero before and after.
struct CombineParams {
    float* partials;
    int* arrival_counts;
    __half* out;
    long long out_pitch;
    int heads, head_dim, first_head, count;
};

// Combines the partial results of all splits, which send_partial has sent, and writes the outputs.
template <int THREADS, int D, int CLUSTER>
__device__ __forceinline__ void combine_splits(
    const CombineParams& m, const ClusterPartials<D, CLUSTER>& partial_results) {
    constexpr int SLICE = D / CLUSTER, RECORD = 2 + SLICE;
    __shared__ bool is_last;
    const int rank = blockIdx.x % CLUSTER, cluster = blockIdx.x / CLUSTER, clusters = gridDim.x / CLUSTER,
              b = blockIdx.z;
    cluster_sync<CLUSTER>();
    const auto write = [&](int h, int d, float value, float s) {
        if (d < m.head_dim)
            m.out[b * m.out_pitch + (m.first_head + h) * m.head_dim + d] = __float2half_rn(__fdiv_rn(value, s));
    };
    const auto record_of = [&](int h, int of) {
        return m.partials +
               (((static_cast<size_t>(b) * m.heads + m.first_head + h) * clusters + of) * CLUSTER + rank) * RECORD;
    };
#pragma unroll 1
    for (int i = threadIdx.x; i < m.count * SLICE; i += THREADS) {
        const int h = i / SLICE, d = i % SLICE;
        float t = -INF_F, s = 0, value = 0;
#pragma unroll
        for (int c = 0; c < CLUSTER; ++c) t = fmaxf(t, partial_results.tops[c][h][0]);
#pragma unroll
        for (int c = 0; c < CLUSTER; ++c) {
            const float weight = rescale_factor(partial_results.tops[c][h][0], t);
            s += partial_results.tops[c][h][1] * weight, value += partial_results.outs[c][h][d] * weight;
        }
        if (clusters == 1) {
            write(h, rank * SLICE + d, value, s);
        } else {
            float* const record = record_of(h, cluster);
            record[2 + d] = value;
            if (d == 0) record[0] = t, record[1] = s;
        }
    }
    if (clusters == 1) return;

    // The last block with this slice to arrive combines what all clusters wrote, always in the same order.
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        int* counter = m.arrival_counts + (b * gridDim.y + blockIdx.y) * CLUSTER + rank;
        is_last = atomicAdd(counter, 1) == clusters - 1;
        if (is_last) *counter = 0;
    }
    __syncthreads();
    if (!is_last) return;
    __threadfence();
#pragma unroll 1
    for (int i = threadIdx.x; i < m.count * SLICE; i += THREADS) {
        const int h = i / SLICE, d = i % SLICE;
        const float* const first = record_of(h, 0);
        float t = -INF_F, s = 0, value = 0;
#pragma unroll 4
        for (int c = 0; c < clusters; ++c) t = fmaxf(t, __ldcg(first + c * CLUSTER * RECORD));
#pragma unroll 4
        for (int c = 0; c < clusters; ++c) {
            const float* const record = first + c * CLUSTER * RECORD;
            const float weight = rescale_factor(__ldcg(record), t);
            s += __ldcg(record + 1) * weight, value += __ldcg(record + 2 + d) * weight;
        }
        write(h, rank * SLICE + d, value, s);
    }
}

}  // namespace bminf
