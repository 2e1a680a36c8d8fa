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

// N neighbouring elements: 8 or 4, which are aligned, or 1. With 4, a warp's accesses to fp32 have no gaps.
template <int N>
__device__ __forceinline__ void load(const __half* p, float (&x)[N]) {
    if constexpr (N == 8) {
        load8(p, x);
    } else if constexpr (N == 4) {
        const uint2 pairs = *reinterpret_cast<const uint2*>(p);
        const float2 a = unpack_half2(pairs.x), b = unpack_half2(pairs.y);
        x[0] = a.x, x[1] = a.y, x[2] = b.x, x[3] = b.y;
    } else {
        x[0] = __half2float(*p);
    }
}

template <int N>
__device__ __forceinline__ void load(const float* p, float (&x)[N]) {
    if constexpr (N == 8) {
        load8(p, x);
    } else if constexpr (N == 4) {
        const float4 found = *reinterpret_cast<const float4*>(p);
        x[0] = found.x, x[1] = found.y, x[2] = found.z, x[3] = found.w;
    } else {
        x[0] = *p;
    }
}

template <int N>
__device__ __forceinline__ void store(__half* p, const float (&x)[N]) {
    if constexpr (N == 8)
        store8(p, x);
    else if constexpr (N == 4)
        *reinterpret_cast<uint2*>(p) = make_uint2(pack_half2(x[0], x[1]), pack_half2(x[2], x[3]));
    else
        *p = __float2half_rn(x[0]);
}

template <bool GATED>
using Result = typename Conditional<GATED, __half, float>::type;

template <int N>
__device__ __forceinline__ void store(float* p, const float (&x)[N]) {
    if constexpr (N == 8)
        store8(p, x);
    else if constexpr (N == 4)
        *reinterpret_cast<float4*>(p) = make_float4(x[0], x[1], x[2], x[3]);
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

// What becomes of a sum, in place: with a gate of each channel if GATED.
template <int N, bool GATED>
__device__ __forceinline__ void finish(
    float (&sum)[N], const float* bias, const float (&added)[N], const float (&gate)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
        const float mixed = bias ? __fadd_rn(sum[i], added[i]) : sum[i];
        sum[i] = GATED ? __fmul_rn(gate[i], mixed) : __fdiv_rn(mixed, __fadd_rn(1.0f, expf(-mixed)));
    }
}

// The results of TOKENS tokens of a sequence whose inputs are all rows of the step: each is read once.
template <int N, int TAPS, int TOKENS, bool GATED>
__device__ __forceinline__ void mix_rows(
    const __half* rows, long long pitch, const float* taps, const float* bias, Result<GATED>* out, long long out_pitch,
    int channels, int column) {
    float inputs[TAPS - 1 + TOKENS][N], tap[TAPS][N], added[N] = {};
#pragma unroll
    for (int t = 0; t < TAPS - 1 + TOKENS; ++t)
        load_input<N, GATED>(rows + (t - (TAPS - 1)) * pitch, channels, column, inputs[t]);
#pragma unroll
    for (int j = 0; j < TAPS; ++j) load<N>(taps + j * static_cast<long long>(channels) + column, tap[j]);
    if (bias) load<N>(bias + column, added);
#pragma unroll
    for (int t = 0; t < TOKENS; ++t) {
        float sum[N] = {}, gate[N] = {};
#pragma unroll
        for (int j = 0; j < TAPS; ++j)
#pragma unroll
            for (int i = 0; i < N; ++i) sum[i] = __fadd_rn(sum[i], __fmul_rn(tap[j][i], inputs[TAPS - 1 + t - j][i]));
        if (GATED) load<N>(rows + t * pitch + channels + column, gate);
        finish<N, GATED>(sum, bias, added, gate);
        store<N>(out + t * out_pitch + column, sum);
    }
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
    auto* const results = static_cast<Result<GATED>*>(out);
    if (!STORES && first_token < count) {
        const int sequence = step.of(first_token);
        if (cu_seqlens[sequence] <= first_token - num_taps + 1 && first_token + TOKENS <= cu_seqlens[sequence + 1]) {
            const __half* own = rows + first_token * pitch;
            auto* to = results + first_token * out_pitch;
            if (num_taps == 4) {
                mix_rows<N, 4, TOKENS, GATED>(own, pitch, taps, bias, to, out_pitch, channels, column);
                return;
            }
            if (num_taps == 3) {
                mix_rows<N, 3, TOKENS, GATED>(own, pitch, taps, bias, to, out_pitch, channels, column);
                return;
            }
        }
    }
    float added[N] = {};
    if (bias) load<N>(bias + column, added);
#pragma unroll 1
    for (int token = first_token; token < min(first_token + TOKENS, tokens); ++token) {
        float sum[N] = {}, gate[N] = {};
        if (token < count) {
            const int sequence = step.of(token), position = step.position(sequence, token);
            const int first = cu_seqlens[step.first_of_text(sequence, has_drafts)];
            __half* const slot = ring + step.slot(sequence) * slot_pitch + column;
#pragma unroll 4
            for (int j = 0; j < num_taps; ++j) {
                float tap[N], input[N] = {};
                load<N>(taps + j * static_cast<long long>(channels) + column, tap);
                if (token - j >= first)
                    load_input<N, GATED>(rows + (token - j) * pitch, channels, column, input);
                else if (position >= j)
                    load<N>(slot + (position - j) % ring_rows * static_cast<long long>(channels), input);
#pragma unroll
                for (int i = 0; i < N; ++i) sum[i] = __fadd_rn(sum[i], __fmul_rn(tap[i], input[i]));
                if (STORES && j == 0) store<N>(slot + position % ring_rows * static_cast<long long>(channels), input);
            }
        }
        if (GATED) load<N>(rows + token * pitch + channels + column, gate);
        finish<N, GATED>(sum, bias, added, gate);
        store<N>(results + token * out_pitch + column, sum);
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
