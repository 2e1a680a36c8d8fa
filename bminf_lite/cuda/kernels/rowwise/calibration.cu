// The kernels of calibration: they quantize a float weight with trial factors, and measure activations and errors.
// Matrices are as their file has them: dense, fp16, bf16 or fp32. Unless stated otherwise, a block handles one row, and
// its threads handle neighbouring columns.
#include "common/common.cuh"
#include "common/rotation.cuh"
#include "constants/calibration.cuh"

using namespace bminf;

struct bf16 {
    unsigned short bits;
};

__device__ __forceinline__ float to_float(bf16 x) { return __uint_as_float(static_cast<unsigned>(x.bits) << 16); }

// The range of scales that are normal numbers in fp16.
constexpr float SMALLEST = 6.103515625e-05f, LARGEST = 65504.0f;

// The scale of a row with absmax `top` in fp32; 1 for a zero row.
__device__ __forceinline__ float exact_scale(float top) {
    const float scale = __fdiv_rn(top, 127.0f);
    return scale > 0 ? scale : 1.0f;
}

__device__ __forceinline__ float factor_of(const float* factors, int column) {
    return factors ? factors[column] : 1.0f;
}

// top[row] = max over c of |w[row, c] * factors[c]|; *fp32_scales = 1 if the scale of any row is out of range for fp16.
template <class T>
__global__ void __launch_bounds__(THREADS)
    row_absmax(const T* w, const float* __restrict__ factors, float* top, int* fp32_scales, int k) {
    __shared__ RowScratch<THREADS> scratch;
    wait_on_dependent_grids();
    const T* row = w + static_cast<size_t>(blockIdx.x) * k;
    float largest = 0;
    for (int c = threadIdx.x; c < k; c += THREADS)
        largest = absmax(largest, __fmul_rn(to_float(row[c]), factor_of(factors, c)));
    largest = threads_absmax<THREADS>(largest, scratch, 0);
    if (threadIdx.x != 0) return;
    top[blockIdx.x] = largest;
    const float scale = exact_scale(largest);
    if (!(scale >= SMALLEST && scale <= LARGEST)) *fp32_scales = 1;
}

// codes[row, c] = clip(rint(w[row, c] * factors[c] / scale), -127, 127), with scale = top[row] / 127, rounded to fp16
// unless *fp32_scales. codes: int8 [n, pitch]. It does not call launch_dependent_grids, because products read weights
// before they wait for their predecessor.
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
        const float ratio = __fdiv_rn(__fmul_rn(to_float(row[c]), factor_of(factors, c)), scale);
        codes[index * pitch + c] = static_cast<int8>(fminf(fmaxf(rintf(ratio), -127.0f), 127.0f));
    }
    __threadfence();
}

// top[c] = max(top[c], max over rows of |x[row, c]| / divisors[row]); divisors may be null. The grid is (column blocks,
// strips of rows). The bits of non-negative floats order like the floats, hence the integer atomicMax.
template <class T>
__global__ void __launch_bounds__(THREADS)
    column_absmax(const T* x, long long pitch, const float* divisors, float* top, int rows, int k) {
    wait_on_dependent_grids();
    const int column = blockIdx.x * THREADS + threadIdx.x;
    if (column >= k) return;
    const int first = blockIdx.y * STRIP, last = min(rows, first + STRIP);
    float largest = 0;
    for (int row = first; row < last; ++row) {
        float value = to_float(x[row * pitch + column]);
        if (divisors && divisors[row] > 0) value = __fdiv_rn(value, divisors[row]);
        largest = absmax(largest, value);
    }
    atomicMax(reinterpret_cast<unsigned*>(top) + column, __float_as_uint(largest));
}

// out[j, row] = fp16(w[row, index[j]] * factors[index[j]]): columns of the weight as rows. The grid is (row blocks, j).
template <class T>
__global__ void __launch_bounds__(THREADS)
    take_columns(const T* w, const float* factors, const int* index, __half* out, long long pitch, int n, int k) {
    wait_on_dependent_grids();
    const int row = blockIdx.x * THREADS + threadIdx.x, column = index[blockIdx.y];
    if (row >= n) return;
    const float value = __fmul_rn(to_float(w[static_cast<size_t>(row) * k + column]), factor_of(factors, column));
    out[blockIdx.y * pitch + row] = __float2half_rn(value);
}

// out[row, c] = fp16(w[row, c]); out: [n, pitch].
template <class T>
__global__ void __launch_bounds__(THREADS) to_half(const T* w, __half* out, long long pitch, int k) {
    wait_on_dependent_grids();
    const size_t index = blockIdx.x;
    for (int c = threadIdx.x; c < k; c += THREADS) out[index * pitch + c] = __float2half_rn(to_float(w[index * k + c]));
}

// out[row] = w[row] * factors, rotated as rotate_row says; both dense, [n, k]. All lanes of a warp take part in each
// exchange, those beyond the end of a row with zeros.
template <class T>
__global__ void __launch_bounds__(THREADS)
    rotate_rows(const T* w, const float* __restrict__ factors, float* out, int k, int rotation, float rotation_scale) {
    wait_on_dependent_grids();
    const T* row = w + static_cast<size_t>(blockIdx.x) * k;
    out += static_cast<size_t>(blockIdx.x) * k;
    for (int first = 0; first < k; first += 8 * THREADS) {
        const int column = first + 8 * static_cast<int>(threadIdx.x);
        float v[1][8];
#pragma unroll
        for (int j = 0; j < 8; ++j)
            v[0][j] = column + j < k ? __fmul_rn(to_float(row[column + j]), factor_of(factors, column + j)) : 0.0f;
        rotate_row(v, rotation, rotation_scale);
#pragma unroll
        for (int j = 0; j < 8; ++j)
            if (column + j < k) out[column + j] = v[0][j];
    }
}

// out[i] = x[index[i]] in fp32, whole rows.
template <class T>
__global__ void __launch_bounds__(THREADS)
    take_rows(const T* x, long long pitch, const int* index, float* out, long long out_pitch, int k) {
    wait_on_dependent_grids();
    const T* row = x + index[blockIdx.x] * pitch;
    for (int c = threadIdx.x; c < k; c += THREADS) out[blockIdx.x * out_pitch + c] = to_float(row[c]);
}

// out[row, c] = fp16(x[row, c] / factors[c]); factors may be null.
__global__ void __launch_bounds__(THREADS)
    divide_rows(const float* x, long long pitch, const float* factors, __half* out, long long out_pitch, int k) {
    wait_on_dependent_grids();
    for (int c = threadIdx.x; c < k; c += THREADS) {
        const float value = x[blockIdx.x * pitch + c];
        out[blockIdx.x * out_pitch + c] = __float2half_rn(factors ? __fdiv_rn(value, factors[c]) : value);
    }
}

// squares[row] = sum over c of (got - expected)^2 and squares[rows + row] = sum over c of expected^2, in fp64.
__global__ void __launch_bounds__(THREADS) row_squares(
    const float* got, long long got_pitch, const float* expected, long long pitch, double* squares, int rows, int n) {
    __shared__ RowScratch<THREADS> scratch;
    wait_on_dependent_grids();
    const size_t row = blockIdx.x;
    double error[1] = {}, total[1] = {};
    for (int c = threadIdx.x; c < n; c += THREADS) {
        const double e = expected[row * pitch + c], d = __fsub_rn(got[row * got_pitch + c], expected[row * pitch + c]);
        error[0] += d * d, total[0] += e * e;
    }
    float none = 0;
    row_sum_max<THREADS, false>(error, none, scratch, 0);
    row_sum_max<THREADS, false>(total, none, scratch, 1);
    if (threadIdx.x == 0) squares[row] = error[0], squares[rows + row] = total[0];
}
