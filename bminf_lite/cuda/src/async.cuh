// Copies that run beside a kernel's arithmetic: cp.async from compute capability 8.0 on, the bulk copy engine from 9.0 on.
#pragma once

namespace bminf {

__device__ __forceinline__ unsigned shared_address(const void* p) {
    return static_cast<unsigned>(__cvta_generic_to_shared(p));
}

// 16 bytes from global to shared memory; done when its group is waited for, or at once before 8.0.
__device__ __forceinline__ void copy16(void* target, const void* source) {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(target)), "l"(source) : "memory");
#else
    *static_cast<int4*>(target) = *static_cast<const int4*>(source);
#endif
}

// The same, or zeros where there is no `valid` source.
__device__ __forceinline__ void copy16(void* target, const void* source, bool valid) {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                 ::"r"(shared_address(target)), "l"(source), "r"(valid ? 16 : 0) : "memory");
#else
    *static_cast<int4*>(target) = valid ? *static_cast<const int4*>(source) : int4{};
#endif
}

__device__ __forceinline__ void end_copy_group() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Wait until at most N groups of this thread are under way.
template <int N>
__device__ __forceinline__ void wait_for_older_copies() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
#endif
}

#if __CUDA_ARCH__ >= 900
__device__ __forceinline__ void barrier_init(unsigned barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

__device__ __forceinline__ void barrier_arrive(unsigned barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Barriers are initialised for the copy engine too.
__device__ __forceinline__ void barriers_ready() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

__device__ __forceinline__ void barrier_wait(unsigned barrier, unsigned parity) {
    asm volatile(
        "{\n.reg .pred done;\nagain:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;\n}" ::"r"(barrier), "r"(parity) : "memory");
}

// Arrive at `barrier`, which from then on waits for these bytes too.
__device__ __forceinline__ void barrier_expect(unsigned barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// A copy that `barrier` expects: a multiple of 16 bytes, as are both addresses.
__device__ __forceinline__ void bulk_copy(unsigned target, const void* source, int bytes, unsigned barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
        ::"r"(target), "l"(source), "r"(bytes), "r"(barrier) : "memory");
}
#endif

}  // namespace bminf
