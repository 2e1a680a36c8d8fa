// What layers read of a token beside the residual stream: its rows before the first layer, and their use in a layer.
#include "common/common.cuh"

using namespace bminf;

// out[t] = fp16((norm(projected[t]) + table[tokens[t]] * table_scale) * scale), where the RMSNorm is that of each
// `size` columns, of `layers` times as many; weight: fp32 [size]. projected: fp32 [T, pitch]; table: fp16 [rows,
// table_pitch]; out: fp16 [T, out_pitch]. Warp (t, l) computes part l of row t.
__global__ void __launch_bounds__(256) layer_inputs(
    const int* tokens, const __half* table, long long table_pitch, const float* projected, long long pitch,
    const float* weight, float eps, float table_scale, float scale, __half* out, long long out_pitch, int layers,
    int size) {
    launch_dependent_grids();
    wait_on_dependent_grids();
    const int layer = (blockIdx.y * blockDim.x + threadIdx.x) / WARP, lane = threadIdx.x % WARP;
    if (layer >= layers) return;
    const long long token = blockIdx.x, first = static_cast<long long>(layer) * size;
    const float* const x = projected + token * pitch + first;
    const __half* const row = table + tokens[token] * table_pitch + first;
    double sum = 0;
    for (int i = lane; i < size; i += WARP) sum += x[i] * x[i];
#pragma unroll
    for (int d = WARP / 2; d; d /= 2) sum += __shfl_xor_sync(FULL, sum, d);
    const float inverse = __fdiv_rn(1.0f, __fsqrt_rn(static_cast<float>(sum / size) + eps));
    for (int i = lane; i < size; i += WARP) {
        const float normed = __fmul_rn(__fmul_rn(x[i], weight[i]), inverse);
        const float added = __fadd_rn(normed, __fmul_rn(__half2float(row[i]), table_scale));
        out[token * out_pitch + first + i] = __float2half_rn(__fmul_rn(added, scale));
    }
}

// x *= inputs for rows of n columns of fp16, in fp32. A thread computes one element.
__global__ void __launch_bounds__(256)
    multiply_columns(__half* x, long long pitch, const __half* inputs, long long inputs_pitch, int rows, int n) {
    launch_dependent_grids();
    wait_on_dependent_grids();
    const long long index = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
    const int row = static_cast<int>(index / n), column = static_cast<int>(index % n);
    if (row >= rows) return;
    __half& value = x[row * pitch + column];
    value = __float2half_rn(__fmul_rn(__half2float(value), __half2float(inputs[row * inputs_pitch + column])));
}
