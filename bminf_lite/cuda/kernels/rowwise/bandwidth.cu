// Reads memory as fast as the GPU can, for measuring its bandwidth: each thread loads vectors of 16 bytes, EACH in
// flight at a time, over a grid-stride loop.
#include "common/common.cuh"

constexpr int EACH = 8;  // vectors that a thread has in flight

// data: `count` vectors. out: one int, written only if the sum happens to be 1; without it the compiler would remove
// the loads.
__global__ void __launch_bounds__(512) read_all(const int4* __restrict__ data, long long count, int* out) {
    const long long stride = static_cast<long long>(gridDim.x) * blockDim.x;
    int sum = 0;
    for (long long i = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += EACH * stride) {
        int4 v[EACH];
#pragma unroll
        for (int j = 0; j < EACH; ++j) v[j] = i + j * stride < count ? __ldcs(data + i + j * stride) : int4{};
#pragma unroll
        for (int j = 0; j < EACH; ++j) sum ^= v[j].x ^ v[j].y ^ v[j].z ^ v[j].w;
    }
    if (sum == 1) *out = sum;
}
