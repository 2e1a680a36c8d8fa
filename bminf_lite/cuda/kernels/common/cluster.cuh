// Thread block clusters: barriers over a cluster, and access to the shared memory of its other blocks (distributed
// shared memory). From compute capability 9.0 on. The templates also compile for earlier architectures, where CLUSTER
// is 1 and they mean the block itself.
#pragma once
#include "common/async.cuh"
#include "common/common.cuh"

namespace bminf {

// A barrier over the cluster, or over the block if CLUSTER is 1. Writes before it are visible after it.
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

// The two halves of a barrier that orders no memory accesses: after cluster_wait all blocks of the cluster have
// started, so their shared memory may be written.
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

__device__ __forceinline__ unsigned blocks_in_cluster() {
    unsigned blocks;
    asm volatile("mov.u32 %0, %%cluster_nctaid.x;" : "=r"(blocks));
    return blocks;
}

// The cluster address of what lies at this block's shared `address`, but in block `rank`.
__device__ __forceinline__ unsigned map_shared_rank(unsigned address, unsigned rank) {
    unsigned remote;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address), "r"(rank));
    return remote;
}

// Arrives at the barrier of block `rank` that has the address `barrier` there.
__device__ __forceinline__ void mbarrier_arrive_remote(unsigned barrier, unsigned rank) {
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(map_shared_rank(barrier, rank)) : "memory");
}

// The same; who waits by mbarrier_wait_acquire_cluster sees what this thread wrote before.
__device__ __forceinline__ void mbarrier_arrive_release_cluster(unsigned barrier, unsigned rank) {
    asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(map_shared_rank(barrier, rank))
                 : "memory");
}

// Waits until the phase of this parity has completed, and sees what blocks of the cluster wrote before they arrived.
__device__ __forceinline__ void mbarrier_wait_acquire_cluster(unsigned barrier, unsigned phase) {
    asm volatile(
        "{\n.reg .pred done;\nagain:\n"
        "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;\n}" ::"r"(barrier),
        "r"(phase)
        : "memory");
}

// Loads a box into both blocks of a cluster of two, at the same shared address; the barriers of both expect its bytes.
__device__ __forceinline__ void tma_load_2d_multicast(
    unsigned target, const TensorMap& map, int column, int row, unsigned barrier) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
        "[%0], [%1, {%2, %3}], [%4], %5;" ::"r"(target),
        "l"(&map), "r"(column), "r"(row), "r"(barrier), "h"(static_cast<unsigned short>(3))
        : "memory");
}

// Stores to a cluster address.
__device__ __forceinline__ void st_shared_cluster(unsigned remote, int x) {
    asm volatile("st.shared::cluster.s32 [%0], %1;" ::"r"(remote), "r"(x) : "memory");
}

__device__ __forceinline__ void st_shared_cluster_v2(unsigned remote, float x, float y) {
    asm volatile("st.shared::cluster.v2.f32 [%0], {%1, %2};" ::"r"(remote), "f"(x), "f"(y) : "memory");
}

__device__ __forceinline__ void st_shared_cluster_v4(unsigned remote, const int (&x)[4]) {
    asm volatile("st.shared::cluster.v4.s32 [%0], {%1, %2, %3, %4};" ::"r"(remote), "r"(x[0]), "r"(x[1]), "r"(x[2]),
                 "r"(x[3])
                 : "memory");
}

// Stores asynchronously; `barrier` expects the 16 bytes. Both are cluster addresses in the same block.
__device__ __forceinline__ void st_async(unsigned remote, const int (&x)[4], unsigned barrier) {
    asm volatile(
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.s32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(remote),
        "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]), "r"(barrier)
        : "memory");
}

__device__ __forceinline__ void st_async(unsigned remote, const float (&x)[4], unsigned barrier) {
    const int bits[4] = {__float_as_int(x[0]), __float_as_int(x[1]), __float_as_int(x[2]), __float_as_int(x[3])};
    st_async(remote, bits, barrier);
}

// The same of 8 bytes.
__device__ __forceinline__ void st_async(unsigned remote, float x, float y, unsigned barrier) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];" ::"r"(remote),
                 "f"(x), "f"(y), "r"(barrier)
                 : "memory");
}
#endif

// Reads block `rank`'s counterpart of the shared variable `own`.
template <int CLUSTER>
__device__ __forceinline__ float ld_shared_cluster(const float* own, int rank) {
#if __CUDA_ARCH__ >= 900
    if constexpr (CLUSTER > 1) {
        float value;
        asm volatile(
            "{\n.reg .u32 remote;\nmapa.shared::cluster.u32 remote, %1, %2;\n"
            "ld.shared::cluster.f32 %0, [remote];\n}"
            : "=f"(value)
            : "r"(cast_smem_ptr_to_uint(own)), "r"(rank)
            : "memory");
        return value;
    }
#endif
    return *own;
}

}  // namespace bminf
