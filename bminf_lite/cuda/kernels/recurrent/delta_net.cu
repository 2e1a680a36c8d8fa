// Gated DeltaNet, and Kimi Delta Attention, in chunks of tokens at fixed positions: the formulas of
// backend/delta_net.py, computed as chunks.cuh says.
//
// `delta_output` follows `delta_rule`: the norm and the gate of the outputs, and what other blocks of `delta_rule` read
// of the slot, which it therefore leaves alone: keys, decays, and the position of the state.
#include "constants/delta_net.cuh"
#include "recurrent/chunks.cuh"

using namespace bminf;

constexpr int PARTS = OUTPUT_THREADS / WARP;
constexpr int AT_ONCE = 4;  // elements of a head that a lane keeps in registers

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

    // A key, or a query.
    __device__ __forceinline__ const float* vector(
        const Recurrence& net, bool is_query, int token, int key_head) const {
        return mixed + token * mixed_pitch + ((is_query ? 0 : net.key_heads) + key_head) * net.key_dim;
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

    __device__ __forceinline__ float value(const Recurrence& net, int token, int value) const {
        return mixed[token * mixed_pitch + 2 * net.key_heads * net.key_dim + value];
    }

    __device__ __forceinline__ float output(float y, float, int) const { return y; }
};

// With CHANNELS, each element of a key has a decay.
template <bool CHANNELS_>
struct Rule : DeltaNet {
    static constexpr bool CORRECTS = true, CHANNELS = CHANNELS_;

    __device__ __forceinline__ explicit Rule(const DeltaNet& inputs) : DeltaNet(inputs) {}
};

// See `prepare`.
template <bool CHANNELS>
__global__ void __launch_bounds__(THREADS)
    delta_prepare(const Recurrence net, const DeltaNet inputs, char* rows, char* factors, float* sums) {
    extern __shared__ __align__(16) char memory[];
    auto& shared = *reinterpret_cast<Shared<MAX_KEY_DIM, 1, CHANNELS>*>(memory);
    launch_dependent_grids();
    wait_on_dependent_grids();
    prepare<MAX_KEY_DIM>(net, Rule<CHANNELS>(inputs), rows, factors, sums, shared.stages[0], shared.channels);
}

// See `scan`. Unless it `waits`, what the slots keep is read before the kernel's predecessors have ended.
template <bool CHANNELS, bool PREPARED>
__global__ void __launch_bounds__(THREADS, 2) delta_rule(
    const Recurrence net, const DeltaNet inputs, const char* rows, const char* factors, float* sums, float* out,
    long long out_pitch, int waits) {
    extern __shared__ __align__(16) char memory[];
    auto& shared = *reinterpret_cast<Shared<MAX_KEY_DIM, PREPARED ? 2 : 1, CHANNELS>*>(memory);
    launch_dependent_grids();
    if (waits) wait_on_dependent_grids();
    State<MAX_KEY_DIM> state;
    Text text;
    const bool has_text = begin<MAX_KEY_DIM, PREPARED, CHANNELS>(net, text, state, shared);
    wait_on_dependent_grids();
    if (!has_text) return;
    const Rule<CHANNELS> rule(inputs);
    scan<MAX_KEY_DIM, PREPARED>(net, rule, text, rows, factors, sums, out, out_pitch, state, shared);
}

// out = fp16(norm(x) * silu(gate)), or with CHANNELS fp16(norm(x) * sigmoid(gate)), of each head, fp16 [T, out_pitch];
// x: fp32 [T, x_pitch], the outputs of `delta_rule`; gate: fp16 [T, gate_pitch]; norm_weight: fp32 [value_dim]; zeros
// behind the last sequence. Keys, decays and the position of the state go to the slots. The grid is (tokens,
// value_heads / PARTS): a warp has a head.
template <bool CHANNELS>
__global__ void __launch_bounds__(OUTPUT_THREADS) delta_output(
    const Recurrence net, const DeltaNet inputs, const float* x, long long x_pitch, const __half* gate,
    long long gate_pitch, const float* norm_weight, const float* sums, __half* out, long long out_pitch, float eps) {
    launch_dependent_grids();
    wait_on_dependent_grids();
    const Sequences step = net.sequences();
    const int token = blockIdx.x, head = blockIdx.y * PARTS + threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const bool is_padding = token >= step.cu_seqlens[step.count];
    if (head < net.value_heads) {
        const long long column = head * net.value_dim;
        const float* row = x + token * x_pitch + column;
        const __half* gates = gate + token * gate_pitch + column;
        __half* to = out + token * out_pitch + column;
        float sum = 0, own[AT_ONCE], own_gates[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            const int d = i * WARP + lane;
            own[i] = !is_padding && d < net.value_dim ? row[d] : 0.0f;
            own_gates[i] = d < net.value_dim ? __half2float(gates[d]) : 0.0f;
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) sum = fmaf(own[i], own[i], sum);
        if (!is_padding)
            for (int d = AT_ONCE * WARP + lane; d < net.value_dim; d += WARP) sum = fmaf(row[d], row[d], sum);
        const float mean = __fdiv_rn(warp_sum(sum), static_cast<float>(net.value_dim));
        const float inverse = __fdiv_rn(1.0f, __fsqrt_rn(__fadd_rn(mean, eps)));
        const auto write = [&](int d, float y, float z) {
            y = __fmul_rn(__fmul_rn(y, norm_weight[d]), inverse);
            y = __fmul_rn(y, __fdiv_rn(CHANNELS ? 1.0f : z, __fadd_rn(1.0f, expf(-z))));
            to[d] = __float2half_rn(is_padding ? 0.0f : y);
        };
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i)
            if (i * WARP + lane < net.value_dim) write(i * WARP + lane, own[i], own_gates[i]);
        for (int d = AT_ONCE * WARP + lane; d < net.value_dim; d += WARP)
            write(d, is_padding ? 0.0f : row[d], __half2float(gates[d]));
    }
    if (!is_padding) keep_rows<MAX_KEY_DIM>(net, Rule<CHANNELS>(inputs), token, sums);
}
