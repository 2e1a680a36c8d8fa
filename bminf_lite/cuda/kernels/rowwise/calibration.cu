// Trying ways to quantize a weight: what a calibration computes of float matrices and of activations. The matrices are
// as their file has them, dense, fp16, bf16 or fp32; a block takes a row, its threads neighbouring columns.
#include "common/common.cuh"
#include "constants/calibration.cuh"

using namespace bminf;

struct bf16 {
    unsigned short bits;
};

__device__ __forceinline__ float number(__half x) { return __half2float(x); }
__device__ __forceinline__ float number(float x) { return x; }
__device__ __forceinline__ float number(bf16 x) { return __uint_as_float(static_cast<unsigned>(x.bits) << 16); }

// Scales that fp16 holds in full: none is subnormal or infinite.
constexpr float SMALLEST = 6.103515625e-05f, LARGEST = 65504.0f;

__device__ __forceinline__ float exact_scale(float top) {
    const float scale = __fdiv_rn(top, 127.0f);
    return scale > 0 ? scale : 1.0f;
}

__device__ __forceinline__ float factor_of(const float* factors, int column) {
    return factors ? factors[column] : 1.0f;
}

// top[row] = max|w factor|, and *fp32_scales = 1 where the scale of a row does not fit fp16.
template <class T>
__global__ void __launch_bounds__(THREADS)
    row_absmax(const T* w, const float* __restrict__ factors, float* top, int* fp32_scales, int k) {
    __shared__ RowScratch<THREADS> scratch;
    wait_on_dependent_grids();
    const T* row = w + static_cast<size_t>(blockIdx.x) * k;
    float largest = 0;
    for (int c = threadIdx.x; c < k; c += THREADS)
        largest = absmax(largest, __fmul_rn(number(row[c]), factor_of(factors, c)));
    double none = 0;
    row_sum_max<THREADS, false, true>(none, largest, scratch, 0);
    if (threadIdx.x != 0) return;
    top[blockIdx.x] = largest;
    const float scale = exact_scale(largest);
    if (!(scale >= SMALLEST && scale <= LARGEST)) *fp32_scales = 1;
}

// codes = clip(rint(w factor / scale)) with rows of `pitch`; the scales are fp16 numbers unless one of them does not
// fit fp16. They are there when the kernel ends, because products read a weight before their predecessor has ended.
template <class T>
__global__ void __launch_bounds__(THREADS) row_codes(
    const T* w, const float* __restrict__ factors, const float* top, const int* fp32_scales, float* scales, int8* codes,
    long long pitch, int k) {
    wait_on_dependent_grids();
    const size_t index = blockIdx.x;
    const float exact = exact_scale(top[index]), scale = *fp32_scales ? exact : rounded(exact);
    if (threadIdx.x == 0) scales[index] = scale;
    const T* row = w + index * k;
    for (int c = threadIdx.x; c < k; c += THREADS) {
        const float ratio = __fdiv_rn(__fmul_rn(number(row[c]), factor_of(factors, c)), scale);
        codes[index * pitch + c] = static_cast<int8>(fminf(fmaxf(rintf(ratio), -127.0f), 127.0f));
    }
    __threadfence();
}

// top[column] = max(top[column], |x| / divisor), with a divisor per row, or none. Magnitudes order as their bits do.
template <class T>
__global__ void __launch_bounds__(THREADS)
    column_absmax(const T* x, long long pitch, const float* divisors, float* top, int rows, int k) {
    wait_on_dependent_grids();
    const int column = blockIdx.x * THREADS + threadIdx.x;
    if (column >= k) return;
    const int first = blockIdx.y * STRIP, last = min(rows, first + STRIP);
    float largest = 0;
    for (int row = first; row < last; ++row) {
        float value = number(x[row * pitch + column]);
        if (divisors && divisors[row] > 0) value = __fdiv_rn(value, divisors[row]);
        largest = absmax(largest, value);
    }
    atomicMax(reinterpret_cast<unsigned*>(top) + column, __float_as_uint(largest));
}

// Columns of the matrix as fp16 rows: out[j, row] = w[row, index[j]] factor.
template <class T>
__global__ void __launch_bounds__(THREADS)
    take_columns(const T* w, const float* factors, const int* index, __half* out, long long pitch, int n, int k) {
    wait_on_dependent_grids();
    const int row = blockIdx.x * THREADS + threadIdx.x, column = index[blockIdx.y];
    if (row >= n) return;
    const float value = __fmul_rn(number(w[static_cast<size_t>(row) * k + column]), factor_of(factors, column));
    out[blockIdx.y * pitch + row] = __float2half_rn(value);
}

// The matrix in fp16, with rows of `pitch`.
template <class T>
__global__ void __launch_bounds__(THREADS) to_half(const T* w, __half* out, long long pitch, int k) {
    wait_on_dependent_grids();
    const size_t index = blockIdx.x;
    for (int c = threadIdx.x; c < k; c += THREADS) out[index * pitch + c] = __float2half_rn(number(w[index * k + c]));
}

// out[i] = x[index[i]], in fp32.
template <class T>
__global__ void __launch_bounds__(THREADS)
    take_rows(const T* x, long long pitch, const int* index, float* out, long long out_pitch, int k) {
    wait_on_dependent_grids();
    const T* row = x + index[blockIdx.x] * pitch;
    for (int c = threadIdx.x; c < k; c += THREADS) out[blockIdx.x * out_pitch + c] = number(row[c]);
}

// out = x / factors in fp16, or x where there are none.
__global__ void __launch_bounds__(THREADS)
    divide_rows(const float* x, long long pitch, const float* factors, __half* out, long long out_pitch, int k) {
    wait_on_dependent_grids();
    for (int c = threadIdx.x; c < k; c += THREADS) {
        const float value = x[blockIdx.x * pitch + c];
        out[blockIdx.x * out_pitch + c] = __float2half_rn(factors ? __fdiv_rn(value, factors[c]) : value);
    }
}

// Of each row, sum (got - expected)^2 to squares[row] and sum expected^2 to squares[rows + row], in fp64.
__global__ void __launch_bounds__(THREADS) row_squares(
    const float* got, long long got_pitch, const float* expected, long long pitch, double* squares, int rows, int n) {
    __shared__ RowScratch<THREADS> scratch;
    wait_on_dependent_grids();
    const size_t row = blockIdx.x;
    double noise = 0, size = 0;
    for (int c = threadIdx.x; c < n; c += THREADS) {
        const double e = expected[row * pitch + c], d = __fsub_rn(got[row * got_pitch + c], expected[row * pitch + c]);
        noise += d * d, size += e * e;
    }
    float none = 0;
    row_sum_max<THREADS, true, false>(noise, none, scratch, 0);
    row_sum_max<THREADS, true, false>(size, none, scratch, 1);
    if (threadIdx.x == 0) squares[row] = noise, squares[rows + row] = size;
}
