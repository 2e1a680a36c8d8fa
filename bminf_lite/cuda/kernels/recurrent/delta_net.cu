// Gated DeltaNet, and Kimi Delta Attention, in chunks of tokens at fixed positions: the formulas of
// backend/delta_net.py, computed as chunks.cuh says.
//
// `delta_output` follows `delta_rule`: the norm and the gate of the outputs, and what other blocks of `delta_rule` read
// of the slot, which it therefore leaves alone: keys, decays, and the position of the state.
#include "constants/delta_net.cuh"
#include "recurrent/delta_net.cuh"

using namespace bminf;

constexpr int PARTS = OUTPUT_THREADS / WARP;

// Four neighbouring elements of a row with `size` of them, zeros behind it; one access where all rows are aligned.
struct Fours {
    int size;
    bool is_aligned;

    __device__ __forceinline__
    Fours(int size, const float* x, const __half* gate, const float* weight, const __half* out, long long pitches)
        : size(size) {
        const auto bits = [](const void* p) { return reinterpret_cast<unsigned long long>(p); };
        is_aligned = (bits(x) | bits(weight) | (bits(gate) | bits(out)) * 2) % 16 == 0 && (pitches | size) % 4 == 0;
    }
    __device__ __forceinline__ void load(float (&to)[4], const float* row, int first) const {
        if (is_aligned && first < size) {
            const float4 x = *reinterpret_cast<const float4*>(row + first);
            to[0] = x.x, to[1] = x.y, to[2] = x.z, to[3] = x.w;
            return;
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) to[i] = first + i < size ? row[first + i] : 0.0f;
    }
    __device__ __forceinline__ void load(float (&to)[4], const __half* row, int first) const {
        if (is_aligned && first < size) {
            const uint2 x = *reinterpret_cast<const uint2*>(row + first);
            const float2 a = unpack_half2(x.x), b = unpack_half2(x.y);
            to[0] = a.x, to[1] = a.y, to[2] = b.x, to[3] = b.y;
            return;
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) to[i] = first + i < size ? __half2float(row[first + i]) : 0.0f;
    }
    __device__ __forceinline__ void store(__half* row, const float (&x)[4], int first) const {
        if (is_aligned && first < size) {
            *reinterpret_cast<uint2*>(row + first) = make_uint2(pack_half2(x[0], x[1]), pack_half2(x[2], x[3]));
            return;
        }
#pragma unroll
        for (int i = 0; i < 4; ++i)
            if (first + i < size) row[first + i] = __float2half_rn(x[i]);
    }
};

// See `prepare`.
template <bool CHANNELS>
__global__ void __launch_bounds__(THREADS)
    delta_prepare(const Recurrence net, const DeltaNet inputs, char* rows, char* factors, float* sums) {
    extern __shared__ __align__(16) char memory[];
    auto& shared = *reinterpret_cast<PrepareRoom<MAX_KEY_DIM, CHANNELS>*>(memory);
    launch_dependent_grids();
    wait_on_dependent_grids();
    prepare<MAX_KEY_DIM>(net, Rule<CHANNELS>(inputs), rows, factors, sums, shared);
}

// See `scan`. Unless it `waits`, what the slots keep is read before the kernel's predecessors have ended.
template <bool CHANNELS, bool PREPARED>
__global__ void __launch_bounds__(SCAN_THREADS<MAX_KEY_DIM, PREPARED>, 2) delta_rule(
    const Recurrence net, const DeltaNet inputs, const char* rows, const char* factors, float* sums, float* out,
    long long out_pitch, int waits) {
    extern __shared__ __align__(16) char memory[];
    auto& shared = *reinterpret_cast<Shared<MAX_KEY_DIM, PREPARED ? 2 : 1, CHANNELS>*>(memory);
    launch_dependent_grids();
    if (waits) wait_on_dependent_grids();
    State<MAX_KEY_DIM> state;
    Text text;
    const bool has_text = begin<MAX_KEY_DIM, PREPARED, Rule<CHANNELS>>(net, text, state, shared);
    wait_on_dependent_grids();
    if (!has_text) return;
    const Rule<CHANNELS> rule(inputs);
    scan<MAX_KEY_DIM, PREPARED, false>(net, rule, text, rows, factors, sums, out, out_pitch, state, shared);
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
    const long long column = min(head, net.value_heads - 1) * net.value_dim;
    const float* row = x + token * x_pitch + column;
    const __half* gates = gate + token * gate_pitch + column;
    __half* to = out + token * out_pitch + column;
    const Fours fours(net.value_dim, x, gate, norm_weight, out, x_pitch | gate_pitch | out_pitch);
    float own[4], own_gates[4], weights[4], sum = 0;
    fours.load(own, row, lane * 4);
    fours.load(own_gates, gates, lane * 4);
    fours.load(weights, norm_weight, lane * 4);
    const bool is_padding = token >= step.cu_seqlens[step.count];
    const auto add = [&](const float (&y)[4]) {
#pragma unroll
        for (int i = 0; i < 4; ++i) sum = fmaf(y[i], y[i], sum);
    };
    add(own);
    for (int d = (WARP + lane) * 4; d < net.value_dim; d += WARP * 4) {
        float y[4];
        fours.load(y, row, d);
        add(y);
    }
    if (head < net.value_heads) {
        const float mean = __fdiv_rn(warp_sum(sum), static_cast<float>(net.value_dim));
        const float inverse = __fdiv_rn(1.0f, __fsqrt_rn(__fadd_rn(mean, eps)));
        const auto write = [&](int d, const float (&x)[4], const float (&gate)[4], const float (&weight)[4]) {
            float found[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float y = __fmul_rn(__fmul_rn(x[i], weight[i]), inverse), z = gate[i];
                const float gated = __fmul_rn(y, __fdiv_rn(CHANNELS ? 1.0f : z, __fadd_rn(1.0f, expf(-z))));
                found[i] = is_padding ? 0.0f : gated;
            }
            fours.store(to, found, d);
        };
        write(lane * 4, own, own_gates, weights);
        for (int d = (WARP + lane) * 4; d < net.value_dim; d += WARP * 4) {
            fours.load(own, row, d);
            fours.load(own_gates, gates, d);
            fours.load(weights, norm_weight, d);
            write(d, own, own_gates, weights);
        }
    }
    if (!is_padding) keep_rows<MAX_KEY_DIM>(net, Rule<CHANNELS>(inputs), token, sums);
}
