// Counters in memory through which the blocks of a GPU wait for each other.
#pragma once

namespace bminf {

// Adds to a counter. What this block wrote before is visible to those who acquire the counter.
__device__ __forceinline__ void red_add_release(int* counter, int x) {
    asm volatile("red.release.gpu.global.add.s32 [%0], %1;" ::"l"(counter), "r"(x) : "memory");
}

// Adds 1 to a counter, or makes it 0 if it is `last`.
__device__ __forceinline__ void red_increment(int* counter, int last) {
    asm volatile("red.relaxed.gpu.global.inc.u32 [%0], %1;" ::"l"(counter), "r"(last) : "memory");
}

__device__ __forceinline__ int ld_acquire(const int* p) {
    int x;
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(x) : "l"(p) : "memory");
    return x;
}

}  // namespace bminf
