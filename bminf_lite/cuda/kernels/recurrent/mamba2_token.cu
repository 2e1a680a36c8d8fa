// Mamba 2 of sequences with a token each, in one kernel: see token.cuh, and mamba2.cu for longer texts.
#include "recurrent/mamba2.cuh"
#include "recurrent/token.cuh"

using namespace bminf;

// The gate and the norm of a group's outputs: see `state_output`, which has the same order of sums.
struct GatedGroup {
    static constexpr bool IS_OF_GROUP = true;
    static_assert(OUTPUT_THREADS == THREADS, "sums have the order of `state_output`");
    const __half* gate;
    long long gate_pitch;
    const float* norm_weight;
    int norm_first;
    __half* out;
    long long out_pitch;
    float eps;
    float (&parts)[PARTS];
    int size;
    bool is_inside;
    float weight, own_gate, own;  // of the lane's column

    __device__ __forceinline__ void place(const Recurrence& net, int token, int head, int column) {
        const int value = head * net.value_dim + column;
        is_inside = column < net.value_dim;
        size = net.values() / net.key_heads;
        gate += token * gate_pitch + value;
        out += token * out_pitch + value;
        if (norm_weight) norm_weight += value;
    }
    __device__ __forceinline__ void load_weights() { weight = norm_weight && is_inside ? *norm_weight : 0.0f; }
    __device__ __forceinline__ void load_gates() { own_gate = is_inside ? __half2float(*gate) : 0.0f; }
    __device__ __forceinline__ float finish(float y) { return own = norm_first ? y : times_silu(y, own_gate); }
    __device__ __forceinline__ void write(const float* x, bool is_owner) const {
        float y = own;
        if (norm_weight) {
            float sum = 0;
            for (int d = threadIdx.x; d < size; d += THREADS) sum = fmaf(x[d], x[d], sum);
            const float mean = __fdiv_rn(block_sum(sum, parts), static_cast<float>(size));
            y = __fmul_rn(__fmul_rn(y, weight), __fdiv_rn(1.0f, __fsqrt_rn(__fadd_rn(mean, eps))));
        }
        if (is_owner) *out = __float2half_rn(norm_first ? times_silu(y, own_gate) : y);
    }
    __device__ __forceinline__ void clear() const {
        if (is_inside && threadIdx.x % 4 == 0) *out = __float2half_rn(0.0f);
    }
};

// gate: fp16 [T, gate_pitch], norm_weight: fp32 [heads * head_dim] or null, out: fp16 [T, out_pitch]; for the rest, and
// the grid, see `compute_token`. States have up to N rows; each group has a part of the norm.
template <int N>
__global__ void __launch_bounds__(THREADS, 2) state_token(
    const Recurrence net, const StateSpace rule, const Convolution convolution, const __half* gate,
    long long gate_pitch, const float* norm_weight, int norm_first, __half* out, long long out_pitch, float eps,
    int parts, int waits) {
    __shared__ TokenRoom<N> room;
    __shared__ float sums[PARTS];
    launch_dependent_grids();
    GatedGroup outputs = {gate, gate_pitch, norm_weight, norm_first, out, out_pitch, eps, sums};
    compute_token<N>(net, rule, convolution, outputs, parts, waits, room);
}
