// What is added to a product beside its matrix: inputs of fp16 times a few rows of fp16.
//
//     split_columns     the inputs of outlier columns (LLM.int8(), https://arxiv.org/abs/2208.07339), and the others
//     add_side_product  out = sums + inputs @ weight + bias
#include "common/common.cuh"

using namespace bminf;

// kept[row, j] = fp16(x[row, index[j]]); rest = x with zeros in these columns. x: [rows, pitch]; kept: fp16 [rows,
// columns]; rest: [rows, rest_pitch]. A block handles one row.
template <class T>
__global__ void __launch_bounds__(256) split_columns(
    const T* x, long long pitch, const int* index, int columns, T* rest, long long rest_pitch, __half* kept, int k) {
    launch_dependent_grids();
    wait_on_dependent_grids();
    const long long row = blockIdx.x;
    x += row * pitch, rest += row * rest_pitch, kept += row * columns;
    for (int column = threadIdx.x * 8; column < k; column += blockDim.x * 8) {
        float v[8];
        load8(x + column, v);
        store8(rest + column, v);
    }
    __syncthreads();
    for (int j = threadIdx.x; j < columns; j += blockDim.x) {
        const int column = index[j];
        kept[j] = static_cast<__half>(x[column]);
        rest[column] = T(0);
    }
}

// out = sums + inputs @ weight + bias in fp32; a product of zero is not added, so that the sum keeps the sign of a
// zero. sums: fp32 [rows, n], the product with the matrix, which may be `out`; inputs: fp16 [rows, inputs_pitch];
// weight: fp16 [columns, pitch]; bias: fp32 [n] or null. The grid is (rows, blocks of 256 outputs). Dynamic shared
// memory: `columns` floats.
template <class T>
__global__ void __launch_bounds__(256) add_side_product(
    const float* sums, long long sums_pitch, const __half* inputs, long long inputs_pitch, int columns,
    const __half* __restrict__ weight, long long pitch, const float* __restrict__ bias, T* out, long long out_pitch,
    int n) {
    extern __shared__ float row_inputs[];
    launch_dependent_grids();
    wait_on_dependent_grids();
    const long long row = blockIdx.x;
    for (int j = threadIdx.x; j < columns; j += blockDim.x)
        row_inputs[j] = __half2float(inputs[row * inputs_pitch + j]);
    __syncthreads();
    const int column = blockIdx.y * blockDim.x + threadIdx.x;
    if (column >= n) return;
    float product = 0;
    for (int j = 0; j < columns; ++j) product = fmaf(row_inputs[j], __half2float(weight[j * pitch + column]), product);
    float y = sums[row * sums_pitch + column];
    if (product != 0) y = __fadd_rn(y, product);
    if (bias) y = __fadd_rn(y, bias[column]);
    out[row * out_pitch + column] = static_cast<T>(y);
}
