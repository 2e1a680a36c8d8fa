// What Mamba 2 has of its own in the chunks of chunks.cuh: the formulas of backend/mamba2.py. B is a key there, C a
// query, dt a rate, and a group a key head.
#pragma once
#include "constants/mamba2.cuh"
#include "recurrent/chunks.cuh"

namespace bminf {

constexpr int PARTS = OUTPUT_THREADS / WARP;

// What the step reads of each token. mixed: fp32 [T, mixed_pitch] with x, B and C behind the convolution; steps: fp16
// [T, steps_pitch] with a step for each head, before its function; decay_rates, step_bias and skip: fp32 [heads]. Time
// steps are within min_step and max_step.
struct StateSpace {
    const float* mixed;
    long long mixed_pitch;
    const __half* steps;
    long long steps_pitch;
    const float* decay_rates;
    const float* step_bias;
    const float* skip;
    float min_step;
    float max_step;

    __device__ __forceinline__ float2 rate_and_decay(const Recurrence&, int token, int head) const {
        const float given = __half2float(steps[token * steps_pitch + head]);
        const float step = softplus(__fadd_rn(given, step_bias[head]));
        const float bounded = step < min_step ? min_step : step > max_step ? max_step : step;
        return make_float2(bounded, __fmul_rn(decay_rates[head], bounded));
    }

    // The first channel of B, or of C, and the row of a token's.
    __device__ __forceinline__ int first_channel(const Recurrence& net, bool is_query, int key_head) const {
        return net.values() + ((is_query ? net.key_heads : 0) + key_head) * net.key_dim;
    }
    __device__ __forceinline__ const float* vector(
        const Recurrence& net, bool is_query, int token, int key_head) const {
        return mixed + token * mixed_pitch + first_channel(net, is_query, key_head);
    }

    template <int COUNT>
    __device__ __forceinline__ void scale(const Recurrence&, bool, float (&)[COUNT]) const {}

    // The first channel of the values, and those of the first token.
    __device__ __forceinline__ int first_value(const Recurrence&) const { return 0; }
    __device__ __forceinline__ const float* values(const Recurrence&) const { return mixed; }

    // What `output` needs of a head.
    __device__ __forceinline__ float of_head(int head) const { return skip[head]; }
    __device__ __forceinline__ float output(float y, float x, float of_head) const {
        return __fadd_rn(y, __fmul_rn(of_head, x));
    }

    static constexpr bool CORRECTS = false, CHANNELS = false;
};

// The sum over a block, in all threads. Called by all of them.
__device__ __forceinline__ float block_sum(float x, float (&parts)[PARTS]) {
    x = warp_sum(x);
    if (threadIdx.x % WARP == 0) parts[threadIdx.x / WARP] = x;
    __syncthreads();
    float sum = parts[0];
#pragma unroll
    for (int part = 1; part < PARTS; ++part) sum = __fadd_rn(sum, parts[part]);
    return sum;
}

__device__ __forceinline__ float times_silu(float y, float z) {
    return __fmul_rn(y, __fdiv_rn(z, __fadd_rn(1.0f, expf(-z))));
}

}  // namespace bminf
