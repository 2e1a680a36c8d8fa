// How the blocks that share a context in decode attention put their parts together: those of a cluster through each
// other's shared memory; where there are several clusters (or none, before Hopper), the last one to finish does the rest
// through global memory.
#pragma once
#include "async.cuh"
#include "common.cuh"

namespace bminf {

template <int CLUSTER>
__device__ __forceinline__ void sync_cluster() {
#if __CUDA_ARCH__ >= 900
    if constexpr (CLUSTER > 1) {
        asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
        return;
    }
#endif
    __syncthreads();
}

// A float in the shared memory of block `rank` of this cluster.
template <int CLUSTER>
__device__ __forceinline__ float peer(const float* own, int rank) {
#if __CUDA_ARCH__ >= 900
    if constexpr (CLUSTER > 1) {
        float value;
        asm volatile(
            "{\n.reg .u32 theirs;\nmapa.shared::cluster.u32 theirs, %1, %2;\n"
            "ld.shared::cluster.f32 %0, [theirs];\n}" : "=f"(value) : "r"(shared_address(own)), "r"(rank) : "memory");
        return value;
    }
#endif
    return *own;
}

__device__ __forceinline__ float weight_of(float top, float new_top) {
    return top == -INF_F ? 0.0f : exp2f(top - new_top);
}

// Grid: (splits, groups of heads, sequences) in clusters of CLUSTER splits. parts: fp32 [B, heads, splits / CLUSTER, CLUSTER,
// 2 + D / CLUSTER] and arrived: int32 [B, gridDim.y, CLUSTER], zero before and after; both are used only by several clusters.
// out: fp16 [B, out_pitch]. A block has `count` heads from first_head on.
struct Meeting {
    float* parts;
    int* arrived;
    __half* out;
    long long out_pitch;
    int heads, head_dim, first_head, count;
};

// outs [count][D], tops and sums [count], in shared memory: what this block's share of the context gave each head, the
// largest score (to the base 2), the sum of weights relative to it, and the weighted sum of values.
template <int D, int CLUSTER, int THREADS>
__device__ __forceinline__ void put_together(
    const Meeting& m, const float (*outs)[D], const float* tops, const float* sums)
{
    constexpr int SLICE = D / CLUSTER;  // elements of each head that a block puts together
    __shared__ bool is_last;
    const int split = blockIdx.x, splits = gridDim.x, b = blockIdx.z;
    sync_cluster<CLUSTER>();
    const int rank = split % CLUSTER, cluster = split / CLUSTER, clusters = splits / CLUSTER;
    constexpr int RECORD = 2 + SLICE;
    auto write = [&](int h, int d, float value, float s) {
        if (d < m.head_dim) m.out[b * m.out_pitch + (m.first_head + h) * m.head_dim + d] = __float2half_rn(__fdiv_rn(value, s));
    };
    for (int i = threadIdx.x; i < m.count * SLICE; i += THREADS) {
        const int h = i / SLICE, d = rank * SLICE + i % SLICE;
        float t = -INF_F, s = 0, value = 0, their_top[CLUSTER];
#pragma unroll
        for (int c = 0; c < CLUSTER; ++c) their_top[c] = peer<CLUSTER>(&tops[h], c), t = fmaxf(t, their_top[c]);
#pragma unroll
        for (int c = 0; c < CLUSTER; ++c) {
            const float weight = weight_of(their_top[c], t);
            s += peer<CLUSTER>(&sums[h], c) * weight, value += peer<CLUSTER>(&outs[h][d], c) * weight;
        }
        if (clusters == 1) {
            write(h, d, value, s);
        } else {
            const size_t record = ((static_cast<size_t>(b) * m.heads + m.first_head + h) * clusters + cluster) * CLUSTER + rank;
            float* place = m.parts + record * RECORD;
            place[2 + i % SLICE] = value;
            if (i % SLICE == 0) place[0] = t, place[1] = s;
        }
    }
    if constexpr (CLUSTER > 1) sync_cluster<CLUSTER>();  // nobody leaves while others read its shared memory
    if (clusters == 1) return;

    // The last of the blocks with this slice reads what all of them wrote, in order.
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        int* counter = m.arrived + (b * gridDim.y + blockIdx.y) * CLUSTER + rank;
        is_last = atomicAdd(counter, 1) == clusters - 1;
        if (is_last) *counter = 0;
    }
    __syncthreads();
    if (!is_last) return;
    __threadfence();
    for (int i = threadIdx.x; i < m.count * SLICE; i += THREADS) {
        const int h = i / SLICE, d = rank * SLICE + i % SLICE;
        const size_t record = (static_cast<size_t>(b) * m.heads + m.first_head + h) * clusters * CLUSTER + rank;
        const float* place = m.parts + record * RECORD;
        const size_t step = CLUSTER * RECORD;
        float t = -INF_F, s = 0, value = 0;
#pragma unroll 8
        for (int c = 0; c < clusters; ++c) t = fmaxf(t, __ldcg(place + c * step));
#pragma unroll 8
        for (int c = 0; c < clusters; ++c) {
            const float weight = weight_of(__ldcg(place + c * step), t);
            s += __ldcg(place + c * step + 1) * weight, value += __ldcg(place + c * step + 2 + i % SLICE) * weight;
        }
        write(h, d, value, s);
    }
}

}  // namespace bminf
