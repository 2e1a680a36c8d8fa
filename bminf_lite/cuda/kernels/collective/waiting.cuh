// How a kernel waits for the kernels of other GPUs: by flags in its own memory, which they write, and not for ever.
#pragma once
#include "constants/all_reduce.cuh"

namespace bminf {

__device__ __forceinline__ unsigned long long nanoseconds() {
    unsigned long long now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    return now;
}

__device__ __forceinline__ void store_release(unsigned* to, unsigned value) {
#if __CUDA_ARCH__ >= 700
    asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(to), "r"(value) : "memory");
#endif
}

__device__ __forceinline__ unsigned load_acquire(const unsigned* from) {
    unsigned value = 0;
#if __CUDA_ARCH__ >= 700
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
#endif
    return value;
}

// How long a thread goes on polling.
struct Patience {
    unsigned* calls;
    int* failure;
    unsigned long long nanoseconds_each;
    unsigned long long since = 0;
    unsigned polls = 0;

    // Whether to poll once more for what `peer` sends; else the failure is noted.
    __device__ bool goes_on(int peer) {
        if (++polls % POLLS != 0) return true;
        const unsigned long long now = nanoseconds();
        if (since == 0) since = now;
        const bool given_up = *static_cast<volatile unsigned*>(calls + 2) != 0;
        if (!given_up && now - since < nanoseconds_each) return true;
        if (!given_up) {
            *static_cast<volatile int*>(failure) = 1 + peer;
            __threadfence_system();  // the host hears of it before anyone gets a sum that lacks the peer's part
            *static_cast<volatile unsigned*>(calls + 2) = 1;
        }
        return false;
    }
};

}  // namespace bminf
