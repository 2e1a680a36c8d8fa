// Asynchronous copies from global to shared memory: cp.async from compute capability 8.0 on; from 9.0 on bulk copies
// and TMA, whose completion an mbarrier reports. Function names follow PTX and CUTLASS. Shared addresses are the 32-bit
// addresses of cast_smem_ptr_to_uint, and barriers are shared addresses of 8 bytes.
#pragma once
#include <cuda_fp16.h>

namespace bminf {

__device__ __forceinline__ unsigned cast_smem_ptr_to_uint(const void* p) {
    return static_cast<unsigned>(__cvta_generic_to_shared(p));
}

__device__ __forceinline__ int ld_shared(unsigned address) {
    int x;
    asm volatile("ld.shared.s32 %0, [%1];" : "=r"(x) : "r"(address) : "memory");
    return x;
}

__device__ __forceinline__ unsigned short ld_shared_u16(unsigned address) {
    unsigned short x;
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(x) : "r"(address) : "memory");
    return x;
}

// The same in a whole register.
__device__ __forceinline__ unsigned ld_shared_u16_wide(unsigned address) {
    unsigned x;
    asm volatile("ld.shared.u16 %0, [%1];" : "=r"(x) : "r"(address) : "memory");
    return x;
}

__device__ __forceinline__ int4 ld_shared_v4(unsigned address) {
    int4 x;
    asm volatile("ld.shared.v4.s32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                 : "r"(address)
                 : "memory");
    return x;
}

__device__ __forceinline__ void st_shared_half(unsigned address, __half x) {
    asm volatile("st.shared.u16 [%0], %1;" ::"r"(address), "h"(__half_as_ushort(x)) : "memory");
}

__device__ __forceinline__ void st_shared_word(unsigned address, unsigned x) {
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(address), "r"(x) : "memory");
}

__device__ __forceinline__ float ld_shared_float(unsigned address) {
    float x;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(address) : "memory");
    return x;
}

__device__ __forceinline__ float2 ld_shared_float2(unsigned address) {
    float2 x;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(x.x), "=f"(x.y) : "r"(address) : "memory");
    return x;
}

__device__ __forceinline__ void ld_shared_v2(unsigned (&x)[2], unsigned address) {
    asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(x[0]), "=r"(x[1]) : "r"(address) : "memory");
}

__device__ __forceinline__ void st_shared_float(unsigned address, float x) {
    asm volatile("st.shared.f32 [%0], %1;" ::"r"(address), "f"(x) : "memory");
}

__device__ __forceinline__ void st_shared_v2(unsigned address, float x, float y) {
    asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(address), "f"(x), "f"(y) : "memory");
}

__device__ __forceinline__ void st_shared_v4(unsigned address, uint4 x) {
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w)
                 : "memory");
}

// ---- cp.async ----------------------------------------------------------------------------------------------------

// The policy of lines that the L2 cache evicts first, as createpolicy encodes it.
constexpr unsigned long long EVICT_FIRST = 0x12f0000000000000;

// Copies 16 bytes. Complete when its group has been waited for; before 8.0 at once.
__device__ __forceinline__ void cp_async_16(unsigned target, const void* source) {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(target), "l"(source) : "memory");
#else
    st_shared_v4(target, *static_cast<const uint4*>(source));
#endif
}

// The same of bytes that are read once: their lines are the first that the L2 cache evicts.
__device__ __forceinline__ void cp_async_16_evict_first(unsigned target, const void* source) {
#if __CUDA_ARCH__ >= 900
    asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;" ::"r"(target), "l"(source),
                 "l"(EVICT_FIRST)
                 : "memory");
#else
    cp_async_16(target, source);
#endif
}

__device__ __forceinline__ void cp_async_16(void* target, const void* source) {
    cp_async_16(cast_smem_ptr_to_uint(target), source);
}

// Copies 16 bytes, or writes zeros if not `valid`. `source` must be a valid address in both cases.
__device__ __forceinline__ void cp_async_16(unsigned target, const void* source, bool valid) {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(target), "l"(source), "r"(valid ? 16 : 0)
                 : "memory");
#else
    st_shared_v4(target, valid ? *static_cast<const uint4*>(source) : uint4{});
#endif
}

__device__ __forceinline__ void cp_async_16(void* target, const void* source, bool valid) {
    cp_async_16(cast_smem_ptr_to_uint(target), source, valid);
}

// Copies the first `bytes` of 16 bytes, and writes zeros for the rest. `bytes` is a multiple of 2.
__device__ __forceinline__ void cp_async_16_partial(unsigned target, const void* source, int bytes) {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(target), "l"(source), "r"(bytes) : "memory");
#else
    unsigned x[4];
#pragma unroll
    for (int i = 0; i < 4; ++i)
        x[i] = 4 * i + 2 <= bytes ? static_cast<const unsigned*>(source)[i] & (4 * i + 4 <= bytes ? ~0u : 0xffffu) : 0;
    st_shared_v4(target, make_uint4(x[0], x[1], x[2], x[3]));
#endif
}

__device__ __forceinline__ void cp_async_commit_group() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Waits until at most N groups of this thread are pending.
template <int N>
__device__ __forceinline__ void cp_async_wait_group() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
#endif
}

// Waits until no copy of this thread is pending.
__device__ __forceinline__ void cp_async_wait_all() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_all;" ::: "memory");
#endif
}

// ---- mbarrier ----------------------------------------------------------------------------------------------------

#if __CUDA_ARCH__ >= 900
__device__ __forceinline__ void mbarrier_init(unsigned barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Makes initialised barriers visible to the asynchronous copies and to the cluster.
__device__ __forceinline__ void fence_mbarrier_init() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void mbarrier_arrive(unsigned barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Arrives, and makes the current phase wait for `bytes` of copies too.
__device__ __forceinline__ void mbarrier_arrive_expect_tx(unsigned barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// Waits until the phase of this parity has completed.
__device__ __forceinline__ void mbarrier_wait(unsigned barrier, unsigned phase) {
    asm volatile(
        "{\n.reg .pred done;\nagain:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;\n}" ::"r"(barrier),
        "r"(phase)
        : "memory");
}

// ---- bulk copies and TMA -----------------------------------------------------------------------------------------

// Orders this thread's reads and writes of shared memory before what wgmma, TMA and bulk copies (the async proxy) do
// there after a barrier.
__device__ __forceinline__ void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Copies `bytes`, which `barrier` expects. The size and both addresses are multiples of 16 bytes.
__device__ __forceinline__ void cp_async_bulk(unsigned target, const void* source, int bytes, unsigned barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(target),
        "l"(source), "r"(bytes), "r"(barrier)
        : "memory");
}

// The same of bytes that are read once: their lines are the first that the L2 cache evicts.
__device__ __forceinline__ void cp_async_bulk_evict_first(
    unsigned target, const void* source, int bytes, unsigned barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::
            "r"(target),
        "l"(source), "r"(bytes), "r"(barrier), "l"(EVICT_FIRST)
        : "memory");
}

// Loads `bytes` into the L2 cache. The size and the address are multiples of 16 bytes.
__device__ __forceinline__ void prefetch_bulk_l2(const void* source, int bytes) {
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(source), "r"(bytes) : "memory");
}

// Copies what the warp has written to shared memory. The size and both addresses, those of lane 0, are multiples of 16
// bytes. Called by the whole warp.
__device__ __forceinline__ void warp_copy_to_global(void* target, const void* source, int bytes) {
    fence_proxy_async();
    __syncwarp();
    if (threadIdx.x % 32 == 0)
        asm volatile(
            "cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;\n"
            "cp.async.bulk.commit_group;" ::"l"(target),
            "r"(cast_smem_ptr_to_uint(source)), "r"(bytes)
            : "memory");
}

// Waits until these copies of the warp have read their shared memory.
__device__ __forceinline__ void warp_copy_wait_read() {
    asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
    __syncwarp();
}

// Waits until these copies of the warp are complete.
__device__ __forceinline__ void warp_copy_wait() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

// CUtensorMap. All tensor maps here have boxes with rows of 128 bytes and the 128-byte swizzle.
struct alignas(64) TensorMap {
    unsigned char bytes[128];
};

// Fetches a tensor map before the first copy needs it.
__device__ __forceinline__ void prefetch_tensormap(const TensorMap& map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// Loads the box at (column, row), with zeros outside the matrix. `barrier` expects the bytes of a whole box.
__device__ __forceinline__ void tma_load_2d(
    unsigned target, const TensorMap& map, int column, int row, unsigned barrier) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(
            target),
        "l"(&map), "r"(column), "r"(row), "r"(barrier)
        : "memory");
}

// The same for a matrix that is read once: its lines are the first that the L2 cache evicts.
__device__ __forceinline__ void tma_load_2d_evict_first(
    unsigned target, const TensorMap& map, int column, int row, unsigned barrier) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
        "[%0], [%1, {%2, %3}], [%4], %5;" ::"r"(target),
        "l"(&map), "r"(column), "r"(row), "r"(barrier), "l"(EVICT_FIRST)
        : "memory");
}
#endif

// A position in a circular buffer of `count` stages: the stage, and the parity of the phase of its barriers.
struct PipelineState {
    int count, index = 0;
    unsigned phase = 0;

    __device__ __forceinline__ explicit PipelineState(int count) : count(count) {}
    __device__ __forceinline__ void next() {
        if (++index == count) index = 0, phase ^= 1;
    }
};

}  // namespace bminf
