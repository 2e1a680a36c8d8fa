// Copies that run beside a kernel's arithmetic: cp.async from compute capability 8.0 on, the bulk copy engine from 9.0
// on.
#pragma once

namespace bminf {

__device__ __forceinline__ unsigned cast_smem_ptr_to_uint(const void* p) {
    return static_cast<unsigned>(__cvta_generic_to_shared(p));
}

__device__ __forceinline__ uint2 ld_shared_v2(unsigned from) {
    uint2 x;
    asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(x.x), "=r"(x.y) : "r"(from) : "memory");
    return x;
}

__device__ __forceinline__ void st_shared_v4(unsigned target, uint4 x) {
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(target), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w)
                 : "memory");
}

// 16 bytes from global to shared memory; done when its group is waited for, or at once before 8.0.
__device__ __forceinline__ void cp_async_16(unsigned target, const void* source) {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(target), "l"(source) : "memory");
#else
    st_shared_v4(target, *static_cast<const uint4*>(source));
#endif
}

__device__ __forceinline__ void cp_async_16(void* target, const void* source) {
    cp_async_16(cast_smem_ptr_to_uint(target), source);
}

// The same, or zeros where there is no `valid` source.
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

__device__ __forceinline__ void cp_async_commit_group() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Wait until at most N groups of this thread are under way.
template <int N>
__device__ __forceinline__ void cp_async_wait_group() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
#endif
}

#if __CUDA_ARCH__ >= 900
__device__ __forceinline__ void mbarrier_init(unsigned barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

__device__ __forceinline__ void mbarrier_arrive(unsigned barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Barriers are initialised for the copy engine too.
__device__ __forceinline__ void fence_mbarrier_init() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void mbarrier_wait(unsigned barrier, unsigned phase) {
    asm volatile(
        "{\n.reg .pred done;\nagain:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;\n}" ::"r"(barrier),
        "r"(phase)
        : "memory");
}

// Arrive at `barrier`, which from then on waits for these bytes too.
__device__ __forceinline__ void mbarrier_arrive_expect_tx(unsigned barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

__device__ __forceinline__ int ld_shared(unsigned address) {
    int x;
    asm volatile("ld.shared.s32 %0, [%1];" : "=r"(x) : "r"(address) : "memory");
    return x;
}

// A copy that `barrier` expects: a multiple of 16 bytes, as are both addresses.
__device__ __forceinline__ void cp_async_bulk(unsigned target, const void* source, int bytes, unsigned barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(target),
        "l"(source), "r"(bytes), "r"(barrier)
        : "memory");
}

// A matrix as the copy engine sees it: CUtensorMap. What a copy brings or takes lies in rows of 128 bytes, swizzled.
struct alignas(64) TensorMap {
    unsigned char bytes[128];
};

// Fetches the description, which otherwise the first copy waits for.
__device__ __forceinline__ void prefetch_tensormap(const TensorMap& map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// The box at (column, row), with zeros outside the matrix; `barrier` expects its bytes.
__device__ __forceinline__ void tma_load_2d(
    unsigned target, const TensorMap& map, int column, int row, unsigned barrier) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(
            target),
        "l"(&map), "r"(column), "r"(row), "r"(barrier)
        : "memory");
}

// The same of a matrix that is read once: in the L2 cache it gives way first.
__device__ __forceinline__ void tma_load_2d_evict_first(
    unsigned target, const TensorMap& map, int column, int row, unsigned barrier) {
    constexpr unsigned long long EVICT_FIRST = 0x12f0000000000000;  // as createpolicy makes it
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
        "[%0], [%1, {%2, %3}], [%4], %5;" ::"r"(target),
        "l"(&map), "r"(column), "r"(row), "r"(barrier), "l"(EVICT_FIRST)
        : "memory");
}
#endif

}  // namespace bminf
