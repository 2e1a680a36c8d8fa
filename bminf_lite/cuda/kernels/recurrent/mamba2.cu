// The state space of Mamba 2 in chunks of tokens at fixed positions: the formulas of backend/mamba2.py, computed as
// chunks.cuh says. B is a key there, C a query, dt a rate, and a group a key head.
//
// `state_output` follows `state_space`: the gate and the norm of the outputs, and what other blocks of `state_space`
// read of the slot, which it therefore leaves alone: B, decays, and the position of the state.
#include "recurrent/mamba2.cuh"

using namespace bminf;

constexpr int AT_ONCE = 4;  // elements that a thread keeps in registers

// The least blocks of `state_space` that share an SM. With one new token most of a block's time is waiting.
template <int N, bool PREPARED, bool ONE>
constexpr int SCAN_BLOCKS = N > 128 ? (PREPARED ? 1 : 2)
                            : ONE   ? 3
                                    : 2;

// See `prepare`, of states of up to N rows.
template <int N>
__global__ void __launch_bounds__(THREADS)
    state_prepare(const Recurrence net, const StateSpace rule, char* rows, char* factors, float* sums) {
    __shared__ PrepareRoom<N, false> room;
    launch_dependent_grids();
    wait_on_dependent_grids();
    prepare<N>(net, rule, rows, factors, sums, room);
}

// See `scan`. Unless it `waits`, what the slots keep is read before the kernel's predecessors have ended.
template <int N, bool PREPARED, bool ONE>
__global__ void __launch_bounds__(SCAN_THREADS<N, PREPARED>, SCAN_BLOCKS<N, PREPARED, ONE>) state_space(
    const Recurrence net, const StateSpace rule, const char* rows, const char* factors, float* sums, float* out,
    long long out_pitch, int waits) {
    extern __shared__ __align__(16) char memory[];
    auto& shared = *reinterpret_cast<Shared<N, PREPARED ? 2 : 1, false>*>(memory);
    launch_dependent_grids();
    if (waits) wait_on_dependent_grids();
    State<N> state;
    Text text;
    const bool has_text = begin<N, PREPARED, StateSpace>(net, text, state, shared);
    wait_on_dependent_grids();
    if (has_text) scan<N, PREPARED, ONE>(net, rule, text, rows, factors, sums, out, out_pitch, state, shared);
}

// out = fp16(norm(x * silu(gate))), or with norm_first fp16(norm(x) * silu(gate)), of norm_groups parts of each row,
// fp16 [T, out_pitch]; without a norm_weight, fp16(x * silu(gate)). x: fp32 [T, x_pitch], the outputs of `state_space`;
// gate: fp16 [T, gate_pitch]; norm_weight: fp32 [heads * head_dim] or null; zeros behind the last sequence. B, decays
// and the position of the state go to the slots. The grid is (tokens, norm_groups).
template <int N>
__global__ void __launch_bounds__(OUTPUT_THREADS) state_output(
    const Recurrence net, const StateSpace rule, const float* x, long long x_pitch, const __half* gate,
    long long gate_pitch, const float* norm_weight, int norm_groups, int norm_first, const float* sums, __half* out,
    long long out_pitch, float eps) {
    __shared__ float parts[PARTS];
    launch_dependent_grids();
    wait_on_dependent_grids();
    const Sequences step = net.sequences();
    const int token = blockIdx.x, size = net.values() / norm_groups;
    const int part = blockIdx.y;
    const float* row = x + token * x_pitch + part * size;
    const __half* z = gate + token * gate_pitch + part * size;
    __half* to = out + token * out_pitch + part * size;
    float own[AT_ONCE], own_gates[AT_ONCE];
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) {
        const int d = i * OUTPUT_THREADS + threadIdx.x;
        own[i] = d < size ? row[d] : 0.0f;
        own_gates[i] = d < size ? __half2float(z[d]) : 0.0f;
    }
    const bool is_padding = token >= step.cu_seqlens[step.count];
    const auto before_norm = [&](float y, float of_gate) { return norm_first ? y : times_silu(y, of_gate); };
    float inverse = 1.0f;
    if (norm_weight) {
        float sum = 0;
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            const float y = before_norm(own[i], own_gates[i]);
            if (i * OUTPUT_THREADS + threadIdx.x < size) sum = fmaf(y, y, sum);
        }
        for (int d = AT_ONCE * OUTPUT_THREADS + threadIdx.x; d < size; d += OUTPUT_THREADS) {
            const float y = before_norm(row[d], __half2float(z[d]));
            sum = fmaf(y, y, sum);
        }
        const float mean = __fdiv_rn(block_sum(sum, parts), static_cast<float>(size));
        inverse = __fdiv_rn(1.0f, __fsqrt_rn(__fadd_rn(mean, eps)));
    }
    const auto write = [&](int d, float x, float of_gate) {
        float y = before_norm(x, of_gate);
        if (norm_weight) y = __fmul_rn(__fmul_rn(y, norm_weight[part * size + d]), inverse);
        if (norm_first) y = times_silu(y, of_gate);
        to[d] = __float2half_rn(is_padding ? 0.0f : y);
    };
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) {
        const int d = i * OUTPUT_THREADS + threadIdx.x;
        if (d < size) write(d, own[i], own_gates[i]);
    }
    for (int d = AT_ONCE * OUTPUT_THREADS + threadIdx.x; d < size; d += OUTPUT_THREADS)
        write(d, row[d], __half2float(z[d]));
    if (!is_padding) keep_rows<N>(net, rule, token, sums);
}
