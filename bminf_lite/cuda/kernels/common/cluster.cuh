// The blocks of a cluster, which wait for each other and reach each other's shared memory. From compute capability 9.0
// on; with one block in each, everywhere.
#pragma once
#include "common/async.cuh"
#include "common/common.cuh"

namespace bminf {

// Until what the blocks of the cluster, or the threads of a block that is alone, have written is there.
template <int CLUSTER>
__device__ __forceinline__ void cluster_sync() {
#if __CUDA_ARCH__ >= 900
    if constexpr (CLUSTER > 1) {
        asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
        return;
    }
#endif
    __syncthreads();
}

// Says that this block has started. Others of its cluster may write to its shared memory once they have waited for
// that.
template <int CLUSTER>
__device__ __forceinline__ void cluster_arrive_relaxed() {
#if __CUDA_ARCH__ >= 900
    if constexpr (CLUSTER > 1) asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif
}

template <int CLUSTER>
__device__ __forceinline__ void cluster_wait() {
#if __CUDA_ARCH__ >= 900
    if constexpr (CLUSTER > 1) asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
#endif
}

#if __CUDA_ARCH__ >= 900
__device__ __forceinline__ unsigned block_rank_in_cluster() {
    unsigned rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

// What a shared address is in block `rank` of the cluster.
__device__ __forceinline__ unsigned map_shared_rank(unsigned address, unsigned rank) {
    unsigned there;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
    return there;
}

// Arrive at the barrier that block `rank` of the cluster has at the same address.
__device__ __forceinline__ void mbarrier_arrive_remote(unsigned barrier, unsigned rank) {
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(map_shared_rank(barrier, rank)) : "memory");
}

// Four integers to another block's shared memory, whose barrier expects their bytes; both addresses are that block's.
__device__ __forceinline__ void st_async(unsigned there, const int (&x)[4], unsigned barrier) {
    asm volatile(
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.s32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(there),
        "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]), "r"(barrier)
        : "memory");
}
#endif

// A float in the shared memory of block `rank` of this cluster.
template <int CLUSTER>
__device__ __forceinline__ float ld_shared_cluster(const float* own, int rank) {
#if __CUDA_ARCH__ >= 900
    if constexpr (CLUSTER > 1) {
        float value;
        asm volatile(
            "{\n.reg .u32 theirs;\nmapa.shared::cluster.u32 theirs, %1, %2;\n"
            "ld.shared::cluster.f32 %0, [theirs];\n}"
            : "=f"(value)
            : "r"(cast_smem_ptr_to_uint(own)), "r"(rank)
            : "memory");
        return value;
    }
#endif
    return *own;
}

// Writes where block `rank` of the cluster has what `own` is here.
template <int CLUSTER, int N>
__device__ __forceinline__ void st_shared_cluster(float* own, int rank, const float (&x)[N]) {
#if __CUDA_ARCH__ >= 900
    if constexpr (CLUSTER > 1) {
        unsigned theirs;
        asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(theirs) : "r"(cast_smem_ptr_to_uint(own)), "r"(rank));
        if constexpr (N == 4)
            asm volatile("st.shared::cluster.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(theirs), "f"(x[0]), "f"(x[1]),
                         "f"(x[2]), "f"(x[3])
                         : "memory");
        else
            asm volatile("st.shared::cluster.v2.f32 [%0], {%1, %2};" ::"r"(theirs), "f"(x[0]), "f"(x[1]) : "memory");
    } else
#endif
    {
#pragma unroll
        for (int i = 0; i < N; ++i) own[i] = x[i];
    }
}

}  // namespace bminf
