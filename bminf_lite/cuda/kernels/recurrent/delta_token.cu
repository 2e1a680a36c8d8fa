// Gated DeltaNet of sequences with a token each, in one kernel: see token.cuh, and delta_net.cu for longer texts.
#include "recurrent/delta_net.cuh"
#include "recurrent/token.cuh"

using namespace bminf;

// out = fp16(norm(x) * silu(gate)) of a head: see `delta_output`, which has the same order of sums. The OUTPUT_WARP
// writes the block's columns; a lane has four of them, from `first` on.
struct GatedHead {
    static constexpr bool IS_OF_GROUP = false;
    static constexpr int COUNT = 4, LANES = TOKEN_COLUMNS / COUNT;
    const __half* gate;
    long long gate_pitch;
    const float* norm_weight;
    __half* out;
    long long out_pitch;
    float eps;
    int size, first;
    float weights[COUNT], gates[COUNT];

    __device__ __forceinline__ bool is_inside(int i) const {
        return threadIdx.x / WARP == OUTPUT_WARP && threadIdx.x % WARP < LANES && first + i < size;
    }
    __device__ __forceinline__ void place(const Recurrence& net, int token, int head, int column) {
        size = net.value_dim, first = column / TOKEN_COLUMNS * TOKEN_COLUMNS + threadIdx.x % WARP * COUNT;
        gate += token * gate_pitch + head * size + first;
        out += token * out_pitch + head * size + first;
    }
    __device__ __forceinline__ void load_weights() {
#pragma unroll
        for (int i = 0; i < COUNT; ++i) weights[i] = is_inside(i) ? norm_weight[first + i] : 0.0f;
    }
    __device__ __forceinline__ void load_gates() {
#pragma unroll
        for (int i = 0; i < COUNT; ++i) gates[i] = is_inside(i) ? __half2float(gate[i]) : 0.0f;
    }
    __device__ __forceinline__ float finish(float y) const { return y; }
    __device__ __forceinline__ void write(const float* x, bool) const {
        if (threadIdx.x / WARP != OUTPUT_WARP) return;
        float sum = 0;
        for (int d = threadIdx.x % WARP * COUNT; d < size; d += WARP * COUNT)
#pragma unroll
            for (int i = 0; i < COUNT; ++i)
                if (d + i < size) sum = fmaf(x[d + i], x[d + i], sum);
        const float mean = __fdiv_rn(warp_sum(sum), static_cast<float>(size));
        const float inverse = __fdiv_rn(1.0f, __fsqrt_rn(__fadd_rn(mean, eps)));
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            if (!is_inside(i)) continue;
            const float y = __fmul_rn(__fmul_rn(x[first + i], weights[i]), inverse), z = gates[i];
            out[i] = __float2half_rn(__fmul_rn(y, __fdiv_rn(z, __fadd_rn(1.0f, expf(-z)))));
        }
    }
    __device__ __forceinline__ void clear() const {
#pragma unroll
        for (int i = 0; i < COUNT; ++i)
            if (is_inside(i)) out[i] = __float2half_rn(0.0f);
    }
};

// gate: fp16 [T, gate_pitch], norm_weight: fp32 [value_dim], out: fp16 [T, out_pitch]; for the rest, and the grid, see
// `compute_token`. CHANNELS is false: a head has one decay.
template <bool CHANNELS>
__global__ void __launch_bounds__(THREADS, 2) delta_token(
    const Recurrence net, const DeltaNet inputs, const Convolution convolution, const __half* gate,
    long long gate_pitch, const float* norm_weight, __half* out, long long out_pitch, float eps, int parts, int waits) {
    __shared__ TokenRoom<MAX_KEY_DIM> room;
    launch_dependent_grids();
    GatedHead outputs = {gate, gate_pitch, norm_weight, out, out_pitch, eps};
    compute_token<MAX_KEY_DIM>(net, Rule<CHANNELS>(inputs), convolution, outputs, parts, waits, room);
}
