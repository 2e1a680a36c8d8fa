// Outlier columns: a few inputs of an int8 weight whose product is taken in fp16 beside the int8 product of the others.
#include "common/common.cuh"

using namespace bminf;

// A block takes a row of x: its chosen columns go to `kept` as fp16, and all of it to `rest`, with zeros in their
// place.
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

// out = sums + kept @ weight + bias, summed in fp32. sums: fp32 [rows, n]; kept: fp16 [rows, columns]; weight: fp16
// [columns, pitch], the columns as rows. A block takes 256 outputs of a row. Dynamic shared memory: `columns` floats.
template <class T>
__global__ void __launch_bounds__(256) add_columns(
    const float* sums, long long sums_pitch, const __half* kept, int columns, const __half* __restrict__ weight,
    long long pitch, const float* __restrict__ bias, T* out, long long out_pitch, int n) {
    extern __shared__ float inputs[];
    launch_dependent_grids();
    wait_on_dependent_grids();
    const long long row = blockIdx.x;
    for (int j = threadIdx.x; j < columns; j += blockDim.x) inputs[j] = __half2float(kept[row * columns + j]);
    __syncthreads();
    const int column = blockIdx.y * blockDim.x + threadIdx.x;
    if (column >= n) return;
    float product = 0;
    for (int j = 0; j < columns; ++j) product = fmaf(inputs[j], __half2float(weight[j * pitch + column]), product);
    float y = __fadd_rn(sums[row * sums_pitch + column], product);
    if (bias) y = __fadd_rn(y, bias[column]);
    out[row * out_pitch + column] = static_cast<T>(y);
}
