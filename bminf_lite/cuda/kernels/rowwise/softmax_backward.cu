// The gradient of a softmax's scores: dx = scale * y * (dy - sum over the row of dy * y).
//
// y, dy, dx: T [rows, k] of any width and alignment. A row is held in registers by THREADS threads, VECTORS vectors of
// eight elements each; softmax_backward_two_pass reads longer rows twice. dx may be dy.
#include "rowwise/row_vectors.cuh"

using namespace bminf;

constexpr int LONG_THREADS = 512;

template <class T, bool WHOLE, int THREADS, int VECTORS>
__global__ void __launch_bounds__(THREADS > 128 ? THREADS : 128) softmax_backward(
    const T* y, long long y_pitch, const T* dy, long long dy_pitch, float scale, T* dx, long long dx_pitch, int rows,
    int k) {
    __shared__ RowScratch<THREADS> scratch;
    const int index = blockIdx.x * (blockDim.x / THREADS) + threadIdx.x / THREADS, thread = threadIdx.x % THREADS;
    const long long row = min(index, rows - 1);
    const auto column_of = [thread](int i) { return (i * THREADS + thread) * 8; };
    float p[VECTORS][8], g[VECTORS][8];
    read_row<WHOLE>(y + row * y_pitch, k, column_of, p);
    read_row<WHOLE>(dy + row * dy_pitch, k, column_of, g);
    double sum = 0;
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
        float part = 0;
#pragma unroll
        for (int j = 0; j < 8; ++j) part = fmaf(p[i][j], g[i][j], part);
        sum += part;
    }
    const float total = static_cast<float>(threads_sum<THREADS>(sum, scratch, 0));
#pragma unroll
    for (int i = 0; i < VECTORS; ++i)
#pragma unroll
        for (int j = 0; j < 8; ++j) g[i][j] = scale * (p[i][j] * (g[i][j] - total));
    write_row<WHOLE>(dx + row * dx_pitch, index < rows ? k : 0, column_of, g);
}

// A block handles one row.
template <class T, bool WHOLE>
__global__ void __launch_bounds__(LONG_THREADS) softmax_backward_two_pass(
    const T* y, long long y_pitch, const T* dy, long long dy_pitch, float scale, T* dx, long long dx_pitch, int k) {
    __shared__ RowScratch<LONG_THREADS> scratch;
    const long long row = blockIdx.x;
    double sum = 0;
    float p[1][8], g[1][8];
    for (int column = threadIdx.x * 8; column < k; column += LONG_THREADS * 8) {
        const auto here = [column](int) { return column; };
        read_row<WHOLE>(y + row * y_pitch, k, here, p);
        read_row<WHOLE>(dy + row * dy_pitch, k, here, g);
        float part = 0;
#pragma unroll
        for (int j = 0; j < 8; ++j) part = fmaf(p[0][j], g[0][j], part);
        sum += part;
    }
    const float total = static_cast<float>(threads_sum<LONG_THREADS>(sum, scratch, 0));
    for (int column = threadIdx.x * 8; column < k; column += LONG_THREADS * 8) {
        const auto here = [column](int) { return column; };
        read_row<WHOLE>(y + row * y_pitch, k, here, p);
        read_row<WHOLE>(dy + row * dy_pitch, k, here, g);
#pragma unroll
        for (int j = 0; j < 8; ++j) g[0][j] = scale * (p[0][j] * (g[0][j] - total));
        store_some(dx + row * dx_pitch + column, k - column, WHOLE, g[0]);
    }
}
