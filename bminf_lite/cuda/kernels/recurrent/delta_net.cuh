// What gated DeltaNet, and Kimi Delta Attention, have of their own in the chunks of chunks.cuh: the formulas of
// backend/delta_net.py.
#pragma once
#include "constants/delta_net.cuh"
#include "recurrent/chunks.cuh"

namespace bminf {

// What the step reads of each token, fp32. mixed: [T, mixed_pitch] with queries, keys and values behind the
// convolution; token_rates: [T, token_rates_pitch] with a rate for each value head, and token_decays: [T,
// token_decays_pitch] with a decay for each, or for each element of its keys, before their functions; decay_rates:
// [value_heads]; decay_bias: like a row of decays. Rates are below max_rate.
struct DeltaNet {
    const float* mixed;
    long long mixed_pitch;
    const float* token_rates;
    long long token_rates_pitch;
    const float* token_decays;
    long long token_decays_pitch;
    const float* decay_rates;
    const float* decay_bias;
    float max_rate;
    int unused;

    __device__ __forceinline__ float2 rate_and_decay(const Recurrence& net, int token, int head) const {
        const float rate = __fdiv_rn(1.0f, __fadd_rn(1.0f, expf(-token_rates[token * token_rates_pitch + head])));
        const float a = __fadd_rn(token_decays[token * token_decays_pitch + head], decay_bias[head]);
        return make_float2(__fmul_rn(max_rate, rate), __fmul_rn(decay_rates[head], softplus(a)));
    }

    // What becomes decays of channels, and the log-decay of an element of a key.
    __device__ __forceinline__ const float* decay(const Recurrence& net, int token, int head) const {
        return token_decays + token * token_decays_pitch + head * net.key_dim;
    }
    __device__ __forceinline__ float log_decay(float x, const Recurrence& net, int head, int element) const {
        return __fmul_rn(decay_rates[head], softplus(__fadd_rn(x, decay_bias[head * net.key_dim + element])));
    }

    // The first channel of a key, or of a query, and the row of a token's.
    __device__ __forceinline__ int first_channel(const Recurrence& net, bool is_query, int key_head) const {
        return ((is_query ? 0 : net.key_heads) + key_head) * net.key_dim;
    }
    __device__ __forceinline__ const float* vector(
        const Recurrence& net, bool is_query, int token, int key_head) const {
        return mixed + token * mixed_pitch + first_channel(net, is_query, key_head);
    }

    // Makes it what the formulas have. Called by a warp.
    template <int COUNT>
    __device__ __forceinline__ void scale(const Recurrence& net, bool is_query, float (&x)[COUNT]) const {
        const float factor = inverse_length(x);
        const float root = __fdiv_rn(1.0f, __fsqrt_rn(static_cast<float>(net.key_dim)));
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            x[i] = __fmul_rn(x[i], factor);
            if (is_query) x[i] = __fmul_rn(x[i], root);
        }
    }

    // The first channel of the values, and those of the first token.
    __device__ __forceinline__ int first_value(const Recurrence& net) const { return 2 * net.key_heads * net.key_dim; }
    __device__ __forceinline__ const float* values(const Recurrence& net) const { return mixed + first_value(net); }

    // What `output` needs of a head.
    __device__ __forceinline__ float of_head(int) const { return 0; }
    __device__ __forceinline__ float output(float y, float, float) const { return y; }
};

// With CHANNELS, each element of a key has a decay.
template <bool CHANNELS_>
struct Rule : DeltaNet {
    static constexpr bool CORRECTS = true, CHANNELS = CHANNELS_;

    __device__ __forceinline__ explicit Rule(const DeltaNet& inputs) : DeltaNet(inputs) {}
};

}  // namespace bminf
