// A causal convolution of each channel over the last few tokens of a sequence, between two gates:
//
//     input = fp16(b * x), out = fp16(c * (taps[0] * input[t] + taps[1] * input[t - 1] + ... + bias))
//
// rows: fp16 [T, pitch] with b, c and x side by side, `channels` each; taps: fp32 [num_taps, channels]; bias: fp32
// [channels] or null. A sequence has a slot of `ring`: the inputs of its last tokens, that of position p in row
// p % ring_rows. Products and sums are rounded one by one, in the order of the taps.
#include "common/common.cuh"
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

// The inputs of a token, given its row.
template <int N>
__device__ __forceinline__ void load_input(const __half* row, int channels, int column, float (&input)[N]) {
    float b[N], x[N];
    load<N>(row + column, b);
    load<N>(row + 2 * static_cast<long long>(channels) + column, x);
#pragma unroll
    for (int j = 0; j < N; ++j) input[j] = rounded(__fmul_rn(b[j], x[j]));
}

// The sequences of a step: cu_seqlens [count + 1], context_lens [count] and their slots, slots_pitch apart.
struct Sequences {
    const int *cu_seqlens, *context_lens, *slots;
    long long slots_pitch;
    int count;

    // The sequence of a token in front of cu_seqlens[count], by bisection.
    __device__ __forceinline__ int of(int token) const {
        int sequence = 0, last = count;
        while (last - sequence > 1) {
            const int middle = (sequence + last) / 2;
            if (cu_seqlens[middle] <= token)
                sequence = middle;
            else
                last = middle;
        }
        return sequence;
    }

    __device__ __forceinline__ int slot(int sequence) const { return slots[sequence * slots_pitch]; }

    // The first of the step's tokens that come before a token of `sequence` in the same text. A draft follows the
    // sequence before it, which has the same slot; slot 0 is that of padding.
    __device__ __forceinline__ int first_token(int sequence, bool has_drafts) const {
        const int own = slot(sequence);
        while (has_drafts && own != 0 && sequence > 0 && slot(sequence - 1) == own) --sequence;
        return cu_seqlens[sequence];
    }
};

// The result of each token, fp16 [T, out_pitch]; tokens behind the last sequence have inputs of 0. With STORES, inputs
// go to the ring too: no sequence and its drafts have more than ring_rows - num_taps + 1 tokens, so that no token reads
// a row that another one writes. The grid is (tokens, blocks of THREADS * N channels).
template <int N, bool STORES>
__global__ void __launch_bounds__(THREADS) short_convolution(
    const __half* rows, long long pitch, const float* taps, int num_taps, const float* bias, __half* ring,
    long long slot_pitch, int ring_rows, const int* cu_seqlens, const int* context_lens, const int* slots,
    long long slots_pitch, int sequences, int has_drafts, __half* out, long long out_pitch, int channels) {
    launch_dependent_grids();
    wait_on_dependent_grids();
    const int token = blockIdx.x, column = (blockIdx.y * THREADS + threadIdx.x) * N;
    if (column >= channels) return;
    const Sequences step = {cu_seqlens, context_lens, slots, slots_pitch, sequences};
    float sum[N] = {};
    if (token < cu_seqlens[sequences]) {
        const int sequence = step.of(token), first = step.first_token(sequence, has_drafts);
        const int position = context_lens[sequence] + token - cu_seqlens[sequence];
        __half* slot = ring + step.slot(sequence) * slot_pitch + column;
        for (int j = 0; j < num_taps; ++j) {
            float input[N] = {}, tap[N];
            if (token - j >= first)
                load_input<N>(rows + (token - j) * pitch, channels, column, input);
            else if (position >= j)
                load<N>(slot + (position - j) % ring_rows * static_cast<long long>(channels), input);
            load<N>(taps + j * static_cast<long long>(channels) + column, tap);
#pragma unroll
            for (int i = 0; i < N; ++i) sum[i] = __fadd_rn(sum[i], __fmul_rn(tap[i], input[i]));
            if (STORES && j == 0) store<N>(slot + position % ring_rows * static_cast<long long>(channels), input);
        }
    }
    float gate[N], added[N] = {};
    load<N>(rows + token * pitch + channels + column, gate);
    if (bias) load<N>(bias + column, added);
#pragma unroll
    for (int i = 0; i < N; ++i) {
        const float mixed = bias ? __fadd_rn(sum[i], added[i]) : sum[i];
        sum[i] = __fmul_rn(gate[i], mixed);
    }
    store<N>(out + token * out_pitch + column, sum);
}

// The inputs of the last ring_rows tokens of each sequence to its ring, behind a `short_convolution` that does not
// store them. The grid is as there.
template <int N>
__global__ void __launch_bounds__(THREADS) store_inputs(
    const __half* rows, long long pitch, __half* ring, long long slot_pitch, int ring_rows, const int* cu_seqlens,
    const int* context_lens, const int* slots, long long slots_pitch, int sequences, int channels) {
    launch_dependent_grids();
    wait_on_dependent_grids();
    const int token = blockIdx.x, column = (blockIdx.y * THREADS + threadIdx.x) * N;
    if (column >= channels || token >= cu_seqlens[sequences]) return;
    const Sequences step = {cu_seqlens, context_lens, slots, slots_pitch, sequences};
    const int sequence = step.of(token);
    if (token < cu_seqlens[sequence + 1] - ring_rows) return;
    const int position = context_lens[sequence] + token - cu_seqlens[sequence];
    float input[N];
    load_input<N>(rows + token * pitch, channels, column, input);
    __half* slot = ring + step.slot(sequence) * slot_pitch + column;
    store<N>(slot + position % ring_rows * static_cast<long long>(channels), input);
}
