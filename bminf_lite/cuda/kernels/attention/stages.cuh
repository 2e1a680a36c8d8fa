// A circular buffer of stages in shared memory between one warp that fills it by cp.async and warps that read it. Each
// stage has two barriers: `full` counts the lanes of the loading warp, `empty` RELEASING_LANES of each reading warp.
#pragma once
#include "common/async.cuh"
#include "common/common.cuh"
#include "constants/stages.cuh"

namespace bminf {

// A barrier on which a phase completes after `arrivals` arrivals. From 8.0 on it is an mbarrier; before it is a count
// of all arrivals.
__device__ __forceinline__ void barrier_init(unsigned barrier, int arrivals) {
#if __CUDA_ARCH__ >= 800
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
#else
    asm volatile("st.shared.b64 [%0], %1;" ::"r"(barrier), "l"(0ull) : "memory");
#endif
}

__device__ __forceinline__ void barrier_arrive(unsigned barrier) {
#if __CUDA_ARCH__ >= 800
    asm volatile("{\n.reg .b64 state;\nmbarrier.arrive.shared.b64 state, [%0];\n}" ::"r"(barrier) : "memory");
#else
    __threadfence_block();
    asm volatile("red.shared.add.u32 [%0], 1;" ::"r"(barrier) : "memory");
#endif
}

// Arrives when all copies of this thread have completed.
__device__ __forceinline__ void barrier_arrive_after_copies(unsigned barrier) {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(barrier) : "memory");
#else
    barrier_arrive(barrier);
#endif
}

// Waits until phase number `phase` has completed, which is the present one or the one before.
__device__ __forceinline__ void barrier_wait(unsigned barrier, int phase, int arrivals) {
#if __CUDA_ARCH__ >= 900
    mbarrier_wait(barrier, phase & 1);
#elif __CUDA_ARCH__ >= 800
    asm volatile(
        "{\n.reg .pred done;\nagain:\n"
        "mbarrier.test_wait.parity.shared.b64 done, [%0], %1;\n"
        "@!done bra again;\n}" ::"r"(barrier),
        "r"(phase & 1)
        : "memory");
#else
    unsigned count;
    do asm volatile("ld.volatile.shared.u32 %0, [%1];" : "=r"(count) : "r"(barrier) : "memory");
    while (count < (phase + 1) * arrivals);
    __threadfence_block();
#endif
}

// STAGES stages of BYTES bytes at the shared address `data`, read by READERS warps; barriers: 2 * STAGES of 8 bytes.
// Every thread has a copy, which follows the stages in turn.
template <int STAGES, int BYTES, int READERS>
struct Stages {
    static constexpr int RELEASES = READERS * RELEASING_LANES;
    unsigned data, barriers;
    int index = 0, phase = 0;

    __device__ __forceinline__ Stages(unsigned data, unsigned barriers) : data(data), barriers(barriers) {}
    // Called by one thread before any other use.
    __device__ __forceinline__ void init() const {
#pragma unroll
        for (int i = 0; i < STAGES; ++i)
            barrier_init(barriers + 8 * i, WARP), barrier_init(barriers + 8 * (STAGES + i), RELEASES);
    }
    __device__ __forceinline__ unsigned address() const { return data + index * BYTES; }
    // How many stages were filled, or read, before this one.
    __device__ __forceinline__ int count() const { return phase * STAGES + index; }
    // The loading warp: waits until the stage is free; marks it as full once all copies have completed.
    __device__ __forceinline__ void wait_empty() const {
        if (phase > 0) barrier_wait(barriers + 8 * (STAGES + index), phase - 1, RELEASES);
    }
    __device__ __forceinline__ void fill() {
        barrier_arrive_after_copies(barriers + 8 * index);
        next();
    }
    // The reading warps: wait until the stage is full; give it back.
    __device__ __forceinline__ void wait_full() const { barrier_wait(barriers + 8 * index, phase, WARP); }
    __device__ __forceinline__ void release() {
        __syncwarp();
        if (threadIdx.x % WARP < RELEASING_LANES) barrier_arrive(barriers + 8 * (STAGES + index));
        next();
    }
    // The next stage without giving this one back, where no stage is filled twice.
    __device__ __forceinline__ void next() {
        if (++index == STAGES) index = 0, ++phase;
    }
    // The same for `count` stages, fewer than there are.
    __device__ __forceinline__ void skip(int count) {
        index += count;
        if (index >= STAGES) index -= STAGES, ++phase;
    }
};

}  // namespace bminf
