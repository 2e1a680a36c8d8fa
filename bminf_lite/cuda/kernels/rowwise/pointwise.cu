// What the GPTs need beside the other kernels: a feed-forward layer's function without a gate, and learned positions.
#include "attention/heads.cuh"

using namespace bminf;

// out[r, c] = f(source[r, c]), both rounded to fp16; `out` may be the source, if that is fp16.
template <bool FROM_INT32, int IN, int F>
__global__ void __launch_bounds__(256) activate_rows(
    const void* data, const float* x_scale, const float* w_scale, const float* bias, long long pitch, __half* out,
    long long out_pitch, int rows, int n) {
    launch_dependent_grids();
    wait_on_dependent_grids();
    const Projection source = {data, x_scale, w_scale, bias, pitch};
    const long long index = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
    const int row = static_cast<int>(index / n), column = static_cast<int>(index % n);
    if (row >= rows) return;
    const float x = source.at<FROM_INT32, static_cast<Order>(IN)>(row, column);
    out[row * out_pitch + column] = __float2half_rn(activate<F>(x));
}

// Adds to each token's row of the residual stream the table's row of its position.
__global__ void __launch_bounds__(256) add_positions(
    const int* cu_seqlens, const int* context_lens, int sequences, const __half* table, long long pitch,
    float* residual, long long residual_pitch, int k) {
    wait_on_dependent_grids();
    const int token = blockIdx.x;
    int first = 0, last = sequences;  // the sequence that owns the token, by bisection
    while (last - first > 1) {
        const int middle = (first + last) / 2;
        if (cu_seqlens[middle] <= token)
            first = middle;
        else
            last = middle;
    }
    const long long position = context_lens[first] + token - cu_seqlens[first];
    for (int column = threadIdx.x * 8; column < k; column += blockDim.x * 8) {
        float x[8], r[8];
        load8(table + position * pitch + column, x);
        load8(residual + token * residual_pitch + column, r);
#pragma unroll
        for (int j = 0; j < 8; ++j) r[j] = __fadd_rn(r[j], x[j]);
        store8(residual + token * residual_pitch + column, r);
    }
}
