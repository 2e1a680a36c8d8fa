// A causal convolution of each channel over the last few tokens of a sequence. GATED, between two gates:
//
//     input = fp16(b * x), out = fp16(c * (taps[0] * input[t] + taps[1] * input[t - 1] + ... + bias))
//
// else of the rows themselves, activated by SiLU: out = silu(taps[0] * x[t] + ... + bias), in fp32.
//
// rows: fp16 [T, pitch] with b, c and x side by side, `channels` each, or x alone; taps: fp32 [num_taps, channels];
// bias: fp32 [channels] or null. A sequence has a slot of `ring`: the inputs of its last tokens, that of position p in
// row p % ring_rows. Products and sums are rounded one by one, in the order of the taps.
#include "common/common.cuh"
#include "common/sequences.cuh"
#include "constants/short_convolution.cuh"

using namespace bminf;

// N neighbouring elements: 8, which are aligned, or 1.
template <int N, class T>
__device__ __forceinline__ void load(const T* p, float (&x)[N]) {
    if constexpr (N == 8)
        load8(p, x);
    else
        x[0] = to_float(*p);
}

template <int N>
__device__ __forceinline__ void store(__half* p, const float (&x)[N]) {
    if constexpr (N == 8)
        store8(p, x);
    else
        *p = __float2half_rn(x[0]);
}

template <bool GATED>
using Result = typename Conditional<GATED, __half, float>::type;

template <int N>
__device__ __forceinline__ void store(float* p, const float (&x)[N]) {
    if constexpr (N == 8)
        store8(p, x);
    else
        *p = x[0];
}

// The inputs of a token, given its row.
template <int N, bool GATED>
__device__ __forceinline__ void load_input(const __half* row, int channels, int column, float (&input)[N]) {
    if constexpr (!GATED) {
        load<N>(row + column, input);
        return;
    }
    float b[N], x[N];
    load<N>(row + column, b);
    load<N>(row + 2 * static_cast<long long>(channels) + column, x);
#pragma unroll
    for (int j = 0; j < N; ++j) input[j] = rounded(__fmul_rn(b[j], x[j]));
}

// The result of each of `tokens` tokens, fp16 or fp32 [T, out_pitch]; tokens behind the last sequence have inputs of 0.
// With STORES, inputs go to the ring too: no sequence and its drafts have more than ring_rows - num_taps + 1 tokens, so
// that no token reads a row that another one writes. The grid is (tokens / TOKENS, blocks of THREADS * N channels),
// where a thread has TOKENS tokens.
template <int N, bool STORES, bool GATED>
__global__ void __launch_bounds__(THREADS) short_convolution(
    const __half* rows, long long pitch, const float* taps, int num_taps, const float* bias, __half* ring,
    long long slot_pitch, int ring_rows, const int* cu_seqlens, const int* context_lens, const int* slots,
    long long slots_pitch, int sequences, int has_drafts, void* out, long long out_pitch, int channels, int tokens) {
    constexpr int TOKENS = STORES ? 1 : TOKENS_AT_ONCE;
    launch_dependent_grids();
    wait_on_dependent_grids();
    const int first_token = blockIdx.x * TOKENS, column = (blockIdx.y * THREADS + threadIdx.x) * N;
    if (column >= channels) return;
    const Sequences step = {cu_seqlens, context_lens, slots, slots_pitch, sequences};
    const int count = cu_seqlens[sequences];
    float sum[TOKENS][N] = {};
    int first[TOKENS], position[TOKENS];
    __half* slot[TOKENS];
#pragma unroll
    for (int t = 0; t < TOKENS; ++t) {
        const int token = first_token + t, sequence = token < count ? step.of(token) : 0;
        first[t] = cu_seqlens[step.first_of_text(sequence, has_drafts)];
        position[t] = token < count ? step.position(sequence, token) : -1;
        slot[t] = ring + step.slot(sequence) * slot_pitch + column;
    }
    for (int j = 0; j < num_taps; ++j) {
        float tap[N];
        load<N>(taps + j * static_cast<long long>(channels) + column, tap);
#pragma unroll
        for (int t = 0; t < TOKENS; ++t) {
            const int token = first_token + t;
            if (position[t] < 0) continue;
            float input[N] = {};
            if (token - j >= first[t])
                load_input<N, GATED>(rows + (token - j) * pitch, channels, column, input);
            else if (position[t] >= j)
                load<N>(slot[t] + (position[t] - j) % ring_rows * static_cast<long long>(channels), input);
#pragma unroll
            for (int i = 0; i < N; ++i) sum[t][i] = __fadd_rn(sum[t][i], __fmul_rn(tap[i], input[i]));
            if (STORES && j == 0) store<N>(slot[t] + position[t] % ring_rows * static_cast<long long>(channels), input);
        }
    }
    float added[N] = {};
    if (bias) load<N>(bias + column, added);
#pragma unroll
    for (int t = 0; t < TOKENS; ++t) {
        const int token = first_token + t;
        if (token >= tokens) break;
        float gate[N] = {};
        if (GATED) load<N>(rows + token * pitch + channels + column, gate);
#pragma unroll
        for (int i = 0; i < N; ++i) {
            const float mixed = bias ? __fadd_rn(sum[t][i], added[i]) : sum[t][i];
            sum[t][i] = GATED ? __fmul_rn(gate[i], mixed) : __fdiv_rn(mixed, __fadd_rn(1.0f, expf(-mixed)));
        }
        store<N>(static_cast<Result<GATED>*>(out) + token * out_pitch + column, sum[t]);
    }
}

// The inputs of the last ring_rows tokens of each sequence to its ring, behind a `short_convolution` that does not
// store them. The grid is (sequences * ring_rows, blocks of THREADS * N channels).
template <int N, bool GATED>
__global__ void __launch_bounds__(THREADS) store_inputs(
    const __half* rows, long long pitch, __half* ring, long long slot_pitch, int ring_rows, const int* cu_seqlens,
    const int* context_lens, const int* slots, long long slots_pitch, int sequences, int channels) {
    launch_dependent_grids();
    wait_on_dependent_grids();
    const int sequence = blockIdx.x / ring_rows, column = (blockIdx.y * THREADS + threadIdx.x) * N;
    const int token = cu_seqlens[sequence + 1] - 1 - blockIdx.x % ring_rows;
    if (column >= channels || token < cu_seqlens[sequence]) return;
    const Sequences step = {cu_seqlens, context_lens, slots, slots_pitch, sequences};
    const int position = step.position(sequence, token);
    float input[N];
    load_input<N, GATED>(rows + token * pitch, channels, column, input);
    __half* slot = ring + step.slot(sequence) * slot_pitch + column;
    store<N>(slot + position % ring_rows * static_cast<long long>(channels), input);
}
