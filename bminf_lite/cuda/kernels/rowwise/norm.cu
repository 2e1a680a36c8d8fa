// RMSNorm or LayerNorm of rows of any width, alignment and element type, and their gradients:
//
//     n = (x - mean) * inverse, inverse = 1 / sqrt(mean((x - mean)^2) + eps); RMSNorm has mean = 0
//     out = n * weight + bias
//
//     dx = inverse * (g - mean(g) - n * mean(g * n)) with g = weight * dout; RMSNorm leaves out mean(g)
//     dweight = sum over rows of dout * n; dbias = sum over rows of dout
//
// x, out: T [rows, k]; weight, bias: W [k] or null; mean, inverse: fp32 [rows], for the gradients. A row is held in
// registers by THREADS threads, VECTORS vectors of eight elements each; *_multi_pass reads longer rows several times.
#include "rowwise/row_vectors.cuh"

using namespace bminf;

constexpr int LONG_THREADS = 512;

// ---- sums over a row ---------------------------------------------------------------------------------------------

// The sum of function(vector, element) over a row, fp32 sums of eight elements added in fp64.
template <int THREADS, int VECTORS, class F>
__device__ __forceinline__ double sum_of(RowScratch<THREADS>& scratch, int bank, F function) {
    double sum = 0;
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
        float part = 0;
#pragma unroll
        for (int j = 0; j < 8; ++j) part = function(part, i, j);
        sum += part;
    }
    return threads_sum<THREADS>(sum, scratch, bank);
}

__device__ __forceinline__ float inverse_deviation(float mean_square, float eps) {
    return __fdiv_rn(1.0f, __fsqrt_rn(mean_square + eps));
}

__device__ __forceinline__ float inverse_deviation(double squares, double inverse_k, float eps) {
    return inverse_deviation(static_cast<float>(squares * inverse_k), eps);
}

// Eight weights, ones if there are none; with WHOLE the vector is inside the row.
template <bool WHOLE, class W>
__device__ __forceinline__ void load_weight(const W* weight, int column, int k, float (&w)[8]) {
    if (weight == nullptr) {
#pragma unroll
        for (int j = 0; j < 8; ++j) w[j] = 1.0f;
    } else if (WHOLE) {
        load8(weight + (column < k ? column : 0), w);
    } else {
        load_some(weight + column, k - column, false, w);
    }
}

template <bool WHOLE, class W>
__device__ __forceinline__ void load_bias(const W* bias, int column, int k, float (&b)[8]) {
    if (bias == nullptr) {
#pragma unroll
        for (int j = 0; j < 8; ++j) b[j] = 0.0f;
    } else {
        load_weight<WHOLE>(bias, column, k, b);
    }
}

// v = v * weight * inverse + bias, in the order of the definition.
template <bool WHOLE, class W>
__device__ __forceinline__ void apply(float (&v)[8], const W* weight, const W* bias, float inverse, int column, int k) {
    float w[8];
    load_weight<WHOLE>(weight, column, k, w);
#pragma unroll
    for (int j = 0; j < 8; ++j) v[j] = __fmul_rn(__fmul_rn(v[j], w[j]), inverse);
    if (bias == nullptr) return;
    load_weight<WHOLE>(bias, column, k, w);
#pragma unroll
    for (int j = 0; j < 8; ++j) v[j] = __fadd_rn(v[j], w[j]);
}

// ---- LayerNorm of long rows of 16-bit elements -------------------------------------------------------------------
//
// The instructions of such a norm take nearly as long as its reads and writes of memory. So mean and
// variance come from one reduction, and an element of the result from two operations:
//
//     out = fma(fma(x, inverse, -mean * inverse), weight, bias)
//
// Row, weight and bias stay in 16 bits, which makes room for more blocks on an SM, and for all loads of a thread to be
// in flight at once.

// Where norm_rows is layer_norm_packed.
template <class T, class W, bool CENTER, bool WHOLE>
constexpr bool is_packed(int threads, int vectors) {
    return CENTER && WHOLE && sizeof(T) == 2 && sizeof(W) == 2 && vectors == 4 && threads >= 256;
}

// The minimum of resident blocks per SM of norm_rows.
template <class T, class W, bool CENTER, bool WHOLE>
constexpr int norm_blocks(int threads, int vectors) {
    if (is_packed<T, W, CENTER, WHOLE>(threads, vectors)) return 1024 / threads;
    return WHOLE ? resident_blocks(threads, vectors) : 1;
}

// Adds a vector's elements to `sum` and their squares to `squares`. What is summed in fp32 are differences d from its
// first element p:
//
//     sum(x) = 8 p + sum(d),  sum(x^2) = sum(d^2) + p (sum(x) + sum(d))
//
// They do not grow with the mean of the row. So the variance, a difference of two means that may be large beside it,
// loses digits of fp64 only.
__device__ __forceinline__ void add_sums(const float (&x)[8], double& sum, double& squares) {
    float differences = 0, of_squares = 0;
#pragma unroll
    for (int j = 1; j < 8; ++j) {
        const float d = __fsub_rn(x[j], x[0]);
        differences = j == 1 ? d : __fadd_rn(differences, d);
        of_squares = j == 1 ? __fmul_rn(d, d) : fmaf(d, d, of_squares);
    }
    const double first = x[0], part = __fma_rn(8.0, first, static_cast<double>(differences));
    sum += part;
    squares += __fma_rn(first, __dadd_rn(part, differences), of_squares);
}

// Vectors of a row as they are in memory; `missing`, two elements, without a row. Those that are not inside the row are
// others of it.
template <class T, int N, class Columns, class Inside>
__device__ __forceinline__ void load_packed(
    const T* row, Columns column_of, Inside inside, unsigned missing, uint4 (&raw)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) raw[i] = make_uint4(missing, missing, missing, missing);
    if (row == nullptr) return;
#pragma unroll
    for (int i = 0; i < N; ++i) raw[i] = ld_global_v4(row + (inside(i) ? column_of(i) : 0));
}

// Writes the norm of a row of k elements, more than half of what the threads can hold. Returns mean and inverse.
template <int THREADS, int VECTORS, class T>
__device__ __forceinline__ float2 layer_norm_packed(
    const T* x, const T* weight, const T* bias, float eps, T* out, int k, double inverse_k,
    RowScratch<THREADS>& scratch) {
    constexpr unsigned ONES = IS_BFLOAT16<T> ? 0x3f803f80u : 0x3c003c00u;
    constexpr unsigned NEGATIVE_ZEROS = 0x80008000u;  // y + -0 is y, of either zero too
    const auto column_of = [](int i) { return static_cast<int>(i * THREADS + threadIdx.x) * 8; };
    const auto inside = [=](int i) { return i < VECTORS / 2 || column_of(i) < k; };
    uint4 row[VECTORS], weights[VECTORS], biases[VECTORS];
    load_packed(x, column_of, inside, 0, row);
    load_packed(weight, column_of, inside, ONES, weights);
    load_packed(bias, column_of, inside, NEGATIVE_ZEROS, biases);
    double sum = 0, squares = 0;
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
        float v[8];
        load8(reinterpret_cast<const T*>(row + i), v);
        if (inside(i)) add_sums(v, sum, squares);
    }
    const double2 sums = threads_two_sums<THREADS>(sum, squares, scratch);
    const double mean = __dmul_rn(sums.x, inverse_k);
    const float variance = static_cast<float>(__dmul_rn(__fma_rn(-sums.x, mean, sums.y), inverse_k));
    const float center = static_cast<float>(mean);
    const float inverse = inverse_deviation(variance < 0 ? 0 : variance, eps);  // NaN stays NaN
    const float shift = __fmul_rn(-center, inverse);
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
        float v[8], w[8], b[8];
        // converted again: kept since the sums, the values would take as many registers as in fp32
        asm volatile("" : "+r"(row[i].x), "+r"(row[i].y), "+r"(row[i].z), "+r"(row[i].w));
        load8(reinterpret_cast<const T*>(row + i), v);
        load8(reinterpret_cast<const T*>(weights + i), w);
        load8(reinterpret_cast<const T*>(biases + i), b);
#pragma unroll
        for (int j = 0; j < 8; ++j) v[j] = fmaf(fmaf(v[j], inverse, shift), w[j], b[j]);
        if (inside(i)) store8(out + column_of(i), v);
    }
    return {center, inverse};
}

// ---- forward -----------------------------------------------------------------------------------------------------

// out may be x. mean is null without CENTER; mean and inverse may be null. inverse_k: 1 / k.
template <class T, class W, bool CENTER, bool WHOLE, int THREADS, int VECTORS>
__global__ void __launch_bounds__(THREADS > 128 ? THREADS : 128, norm_blocks<T, W, CENTER, WHOLE>(THREADS, VECTORS))
    norm_rows(
        const T* x, long long pitch, const W* weight, const W* bias, float eps, T* out, long long out_pitch,
        float* mean_out, float* inverse_out, int rows, int k, double inverse_k) {
    __shared__ RowScratch<THREADS> scratch;
    const int index = blockIdx.x * (blockDim.x / THREADS) + threadIdx.x / THREADS, thread = threadIdx.x % THREADS;
    const long long row = min(index, rows - 1);
    const int written = index < rows ? k : 0;
    const auto column_of = [thread](int i) { return (i * THREADS + thread) * 8; };
    if constexpr (is_packed<T, W, CENTER, WHOLE>(THREADS, VECTORS)) {
        const float2 norm = layer_norm_packed<THREADS, VECTORS>(
            x + row * pitch, weight, bias, eps, out + row * out_pitch, k, inverse_k, scratch);
        if (thread == 0) {
            if (mean_out) mean_out[row] = norm.x;
            if (inverse_out) inverse_out[row] = norm.y;
        }
        return;
    }
    float v[VECTORS][8], mean = 0;
    read_row<WHOLE>(x + row * pitch, k, column_of, v);
    if constexpr (CENTER) {
        const auto add = [&](float sum, int i, int j) { return sum + v[i][j]; };
        mean = static_cast<float>(sum_of<THREADS, VECTORS>(scratch, 1, add) * inverse_k);
#pragma unroll
        for (int i = 0; i < VECTORS; ++i) {
#pragma unroll
            for (int j = 0; j < 8; ++j) v[i][j] -= mean;
            if (k < THREADS * VECTORS * 8) zero_tail(v[i], column_of(i), k);
        }
    }
    const auto square = [&](float sum, int i, int j) { return fmaf(v[i][j], v[i][j], sum); };
    const float inverse = inverse_deviation(sum_of<THREADS, VECTORS>(scratch, 0, square), inverse_k, eps);
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) apply<WHOLE>(v[i], weight, bias, inverse, column_of(i), k);
    write_row<WHOLE>(out + row * out_pitch, written, column_of, v);
    if (thread == 0 && written) {
        if (CENTER && mean_out) mean_out[row] = mean;
        if (inverse_out) inverse_out[row] = inverse;
    }
}

// The sum of function(sum, column, element j of the vectors there) over a row that is read again.
template <class F>
__device__ __forceinline__ double long_sum(int k, RowScratch<LONG_THREADS>& scratch, int bank, F function) {
    double sum = 0;
    for (int column = threadIdx.x * 8; column < k; column += LONG_THREADS * 8) sum += function(column);
    return threads_sum<LONG_THREADS>(sum, scratch, bank);
}

// A block handles one row.
template <class T, class W, bool CENTER, bool WHOLE>
__global__ void __launch_bounds__(LONG_THREADS) norm_rows_multi_pass(
    const T* x, long long pitch, const W* weight, const W* bias, float eps, T* out, long long out_pitch,
    float* mean_out, float* inverse_out, int k, double inverse_k) {
    __shared__ RowScratch<LONG_THREADS> scratch;
    const long long row = blockIdx.x;
    float mean = 0;
    const auto read = [&](int column, float (&v)[1][8]) {
        read_row<WHOLE>(x + row * pitch, k, [column](int) { return column; }, v);
    };
    if constexpr (CENTER) {
        const auto add = [&](int column) {
            float v[1][8], part = 0;
            read(column, v);
#pragma unroll
            for (int j = 0; j < 8; ++j) part += v[0][j];
            return part;
        };
        mean = static_cast<float>(long_sum(k, scratch, 1, add) * inverse_k);
    }
    const auto square = [&](int column) {
        float v[1][8], part = 0;
        read(column, v);
#pragma unroll
        for (int j = 0; j < 8; ++j)
            if (column + j < k) part = fmaf(v[0][j] - mean, v[0][j] - mean, part);
        return part;
    };
    const float inverse = inverse_deviation(long_sum(k, scratch, 0, square), inverse_k, eps);
    for (int column = threadIdx.x * 8; column < k; column += LONG_THREADS * 8) {
        float v[1][8];
        read(column, v);
#pragma unroll
        for (int j = 0; j < 8; ++j) v[0][j] -= mean;
        apply<WHOLE>(v[0], weight, bias, inverse, column, k);
        store_some(out + row * out_pitch + column, k - column, WHOLE, v[0]);
    }
    if (threadIdx.x == 0) {
        if (CENTER && mean_out) mean_out[row] = mean;
        if (inverse_out) inverse_out[row] = inverse;
    }
}

// ---- gradients ---------------------------------------------------------------------------------------------------

// v, eight elements of x, becomes n; or v, eight elements of out, becomes (v - bias) / weight, which is n. Where weight
// is 0, out does not tell n, and the result is NaN.
template <bool WHOLE, class W>
__device__ __forceinline__ void normalised(
    float (&v)[8], bool from_out, const W* weight, const W* bias, float mean, float inverse, int column, int k) {
    if (from_out) {
        float w[8], b[8];
        load_weight<WHOLE>(weight, column, k, w);
        load_bias<WHOLE>(bias, column, k, b);
#pragma unroll
        for (int j = 0; j < 8; ++j) v[j] = (v[j] - b[j]) / w[j];
    } else {
#pragma unroll
        for (int j = 0; j < 8; ++j) v[j] = (v[j] - mean) * inverse;
    }
    zero_tail(v, column, k);
}

// x: the input of the norm, or with from_out its output. dx may be dout.
template <class T, class W, bool CENTER, bool WHOLE, int THREADS, int VECTORS>
__global__ void __launch_bounds__(THREADS > 128 ? THREADS : 128) norm_backward(
    const T* dout, long long dout_pitch, const T* x, long long pitch, bool from_out, const W* weight, const W* bias,
    const float* mean, const float* inverse, T* dx, long long dx_pitch, int rows, int k) {
    __shared__ RowScratch<THREADS> scratch;
    const int index = blockIdx.x * (blockDim.x / THREADS) + threadIdx.x / THREADS, thread = threadIdx.x % THREADS;
    const long long row = min(index, rows - 1);
    const int written = index < rows ? k : 0;
    const auto column_of = [thread](int i) { return (i * THREADS + thread) * 8; };
    const double inverse_k = 1.0 / k;
    float g[VECTORS][8], n[VECTORS][8];
    read_row<WHOLE>(dout + row * dout_pitch, k, column_of, g);
    read_row<WHOLE>(x + row * pitch, k, column_of, n);
    const float own_mean = CENTER ? mean[row] : 0.0f, own_inverse = inverse[row];
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
        normalised<WHOLE>(n[i], from_out, weight, bias, own_mean, own_inverse, column_of(i), k);
        float w[8];
        load_weight<WHOLE>(weight, column_of(i), k, w);
#pragma unroll
        for (int j = 0; j < 8; ++j) g[i][j] *= w[j];
    }
    float mean_g = 0;
    if constexpr (CENTER) {
        const auto add = [&](float sum, int i, int j) { return sum + g[i][j]; };
        mean_g = static_cast<float>(sum_of<THREADS, VECTORS>(scratch, 1, add) * inverse_k);
    }
    const auto product = [&](float sum, int i, int j) { return fmaf(g[i][j], n[i][j], sum); };
    const float mean_gn = static_cast<float>(sum_of<THREADS, VECTORS>(scratch, 0, product) * inverse_k);
#pragma unroll
    for (int i = 0; i < VECTORS; ++i)
#pragma unroll
        for (int j = 0; j < 8; ++j) g[i][j] = own_inverse * (g[i][j] - mean_g - n[i][j] * mean_gn);
    write_row<WHOLE>(dx + row * dx_pitch, written, column_of, g);
}

// A block handles one row.
template <class T, class W, bool CENTER, bool WHOLE>
__global__ void __launch_bounds__(LONG_THREADS) norm_backward_multi_pass(
    const T* dout, long long dout_pitch, const T* x, long long pitch, bool from_out, const W* weight, const W* bias,
    const float* mean, const float* inverse, T* dx, long long dx_pitch, int k) {
    __shared__ RowScratch<LONG_THREADS> scratch;
    const long long row = blockIdx.x;
    const double inverse_k = 1.0 / k;
    const float own_mean = CENTER ? mean[row] : 0.0f, own_inverse = inverse[row];
    const auto read = [&](int column, float (&g)[1][8], float (&n)[1][8]) {
        const auto here = [column](int) { return column; };
        float w[8];
        read_row<WHOLE>(dout + row * dout_pitch, k, here, g);
        read_row<WHOLE>(x + row * pitch, k, here, n);
        normalised<WHOLE>(n[0], from_out, weight, bias, own_mean, own_inverse, column, k);
        load_weight<WHOLE>(weight, column, k, w);
#pragma unroll
        for (int j = 0; j < 8; ++j) g[0][j] *= w[j];
    };
    float mean_g = 0;
    if constexpr (CENTER) {
        const auto add = [&](int column) {
            float g[1][8], n[1][8], part = 0;
            read(column, g, n);
#pragma unroll
            for (int j = 0; j < 8; ++j) part += g[0][j];
            return part;
        };
        mean_g = static_cast<float>(long_sum(k, scratch, 1, add) * inverse_k);
    }
    const auto product = [&](int column) {
        float g[1][8], n[1][8], part = 0;
        read(column, g, n);
#pragma unroll
        for (int j = 0; j < 8; ++j) part = fmaf(g[0][j], n[0][j], part);
        return part;
    };
    const float mean_gn = static_cast<float>(long_sum(k, scratch, 0, product) * inverse_k);
    for (int column = threadIdx.x * 8; column < k; column += LONG_THREADS * 8) {
        float g[1][8], n[1][8];
        read(column, g, n);
#pragma unroll
        for (int j = 0; j < 8; ++j) g[0][j] = own_inverse * (g[0][j] - mean_g - n[0][j] * mean_gn);
        store_some(dx + row * dx_pitch + column, k - column, WHOLE, g[0]);
    }
}

// The sums over rows, in parts: part blockIdx.y adds up every gridDim.y-th group of 8 rows. dweight, dbias: fp32
// [gridDim.y, k]; dbias may be null. A block has 256 threads: 32 vectors of columns times 8 rows.
template <class T, class W, bool CENTER, bool WHOLE>
__global__ void __launch_bounds__(256) norm_parameter_gradients(
    const T* dout, long long dout_pitch, const T* x, long long pitch, bool from_out, const W* weight, const W* bias,
    const float* mean, const float* inverse, float* dweight, float* dbias, int rows, int k) {
    __shared__ float parts[2][8][WARP * 8 + 8];
    const int lane = threadIdx.x % WARP, group = threadIdx.x / WARP, column = (blockIdx.x * WARP + lane) * 8;
    const auto here = [column](int) { return column; };
    float sum_w[8] = {}, sum_b[8] = {};
    for (long long row = blockIdx.y * 8 + group; row < rows; row += gridDim.y * 8) {
        float g[1][8], n[1][8];
        read_row<WHOLE>(dout + row * dout_pitch, k, here, g);
        read_row<WHOLE>(x + row * pitch, k, here, n);
        normalised<WHOLE>(n[0], from_out, weight, bias, CENTER ? mean[row] : 0.0f, inverse[row], column, k);
#pragma unroll
        for (int j = 0; j < 8; ++j) sum_w[j] = fmaf(g[0][j], n[0][j], sum_w[j]), sum_b[j] += g[0][j];
    }
#pragma unroll
    for (int j = 0; j < 8; ++j) parts[0][group][lane * 8 + j] = sum_w[j], parts[1][group][lane * 8 + j] = sum_b[j];
    __syncthreads();
    const int own = blockIdx.x * WARP * 8 + threadIdx.x;
    if (own >= k) return;
    float total_w = 0, total_b = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) total_w += parts[0][i][threadIdx.x], total_b += parts[1][i][threadIdx.x];
    dweight[static_cast<long long>(blockIdx.y) * k + own] = total_w;
    if (dbias) dbias[static_cast<long long>(blockIdx.y) * k + own] = total_b;
}
