// Int8 codes of rows of any width, alignment and element type, and the steps of an int8 product that no fused kernel
// has for these types:
//
//     quantize_rows     codes, scale = quantize(x), see row_scale
//     dequantize_codes  weight = scale * codes, or the codes themselves as numbers
//     scale_sums        out = x_scale * (w_scale * sums) + bias
#include "rowwise/row_vectors.cuh"

using namespace bminf;

constexpr int LONG_THREADS = 512;

// Eight codes, of which `count` belong to the row; the others are written as zeros up to `room`.
__device__ __forceinline__ void store_codes(int8* codes, uint2 word, int count, int room, bool aligned) {
    if (aligned && room >= 8) {  // codes of columns beyond the row are zero, because their values are
        *reinterpret_cast<uint2*>(codes) = word;
        return;
    }
    const int8* code = reinterpret_cast<const int8*>(&word);
#pragma unroll
    for (int j = 0; j < 8; ++j)
        if (j < room) codes[j] = j < count ? code[j] : 0;
}

// x: T [rows, k]; codes: int8 [rows, code_pitch], with zeros from column k on; scales: fp32 [rows].
template <class T, bool WHOLE, int THREADS, int VECTORS>
__global__ void __launch_bounds__(THREADS > 128 ? THREADS : 128, WHOLE ? resident_blocks(THREADS, VECTORS) : 1)
    quantize_rows(const T* x, long long pitch, int8* codes, int code_pitch, float* scales, int rows, int k) {
    __shared__ RowScratch<THREADS> scratch;
    const int index = blockIdx.x * (blockDim.x / THREADS) + threadIdx.x / THREADS, thread = threadIdx.x % THREADS;
    const long long row = min(index, rows - 1);
    const auto column_of = [thread](int i) { return (i * THREADS + thread) * 8; };
    float v[VECTORS][8];
    read_row<WHOLE>(x + row * pitch, k, column_of, v);
    const RowScale s = row_scale(row_max<THREADS>(v, scratch));
    if (index >= rows) return;
    if (thread == 0) scales[row] = s.scale;
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
        const int column = column_of(i);
        store_codes(
            codes + row * code_pitch + column, quantize8(v[i], s.ratio), k - column, code_pitch - column,
            code_pitch % 8 == 0);
    }
}

// A block handles one row.
template <class T, bool WHOLE>
__global__ void __launch_bounds__(LONG_THREADS)
    quantize_rows_two_pass(const T* x, long long pitch, int8* codes, int code_pitch, float* scales, int k) {
    __shared__ RowScratch<LONG_THREADS> scratch;
    const long long row = blockIdx.x;
    float v[1][8], top = 0;
    for (int column = threadIdx.x * 8; column < k; column += LONG_THREADS * 8) {
        read_row<WHOLE>(x + row * pitch, k, [column](int) { return column; }, v);
#pragma unroll
        for (int j = 0; j < 8; ++j) top = absmax(top, v[0][j]);
    }
    const RowScale s = row_scale(threads_absmax<LONG_THREADS>(top, scratch, 0));
    if (threadIdx.x == 0) scales[row] = s.scale;
    for (int column = threadIdx.x * 8; column < code_pitch; column += LONG_THREADS * 8) {
        read_row<WHOLE>(x + row * pitch, k, [column](int) { return column; }, v);
        store_codes(
            codes + row * code_pitch + column, quantize8(v[0], s.ratio), k - column, code_pitch - column,
            code_pitch % 8 == 0);
    }
}

// out[r, c] = scale[r] * codes[r, c], or codes[r, c] with scale null. codes: int8 [rows, k], out: T [rows, k], both
// contiguous and aligned to 16 bytes. A thread converts VECTORS vectors of eight codes, as far apart as the block is
// wide, so that a warp writes whole cache lines. WHOLE: k is a multiple of 8, and count / 8 fits 32 bits.
constexpr int VECTORS = 4, CONVERT_THREADS = 256;

template <class T, bool WHOLE>
__global__ void __launch_bounds__(CONVERT_THREADS)
    dequantize_codes(const int8* codes, const float* scale, T* out, long long count, int k) {
    const long long base = static_cast<long long>(blockIdx.x) * CONVERT_THREADS * VECTORS + threadIdx.x;
    uint2 raw[VECTORS] = {};
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
        const long long first = (base + i * CONVERT_THREADS) * 8;
        if (first + 8 <= count) raw[i] = *reinterpret_cast<const uint2*>(codes + first);
    }
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
        const long long first = (base + i * CONVERT_THREADS) * 8;
        if (first >= count) return;
        float y[8];
        if constexpr (WHOLE) {
            const float factor = scale ? scale[static_cast<unsigned>(first / 8) / (k / 8u)] : 1.0f;
#pragma unroll
            for (int j = 0; j < 8; ++j) y[j] = factor * reinterpret_cast<const int8*>(&raw[i])[j];
            store8(out + first, y);
        } else if (first + 8 <= count) {
#pragma unroll
            for (int j = 0; j < 8; ++j)
                y[j] = (scale ? scale[(first + j) / k] : 1.0f) * reinterpret_cast<const int8*>(&raw[i])[j];
            store8(out + first, y);
        } else {
            for (long long at = first; at < count; ++at)
                store_element(out + at, (scale ? scale[at / k] : 1.0f) * codes[at]);
        }
    }
}

// sums: SUM [rows, n] with rows of `pitch` elements, int32 or fp32; x_scale: fp32 [rows] or null; w_scale: fp32 [n];
// bias: fp32 [n] or null; out: T [rows, n], contiguous. A thread computes eight elements.
template <class SUM, class T>
__global__ void __launch_bounds__(256) scale_sums(
    const SUM* sums, long long pitch, const float* x_scale, const float* w_scale, const float* bias, T* out, int rows,
    int n) {
    const int vectors = (n + 7) / 8;
    const long long index = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
    const long long row = index / vectors;
    const int column = static_cast<int>(index % vectors) * 8, count = n - column;
    if (row >= rows) return;
    const SUM* source = sums + row * pitch + column;
    float y[8], w[8];
    const bool aligned = n % 8 == 0 && pitch % 4 == 0;
    if (aligned) {
        load8(source, y);
    } else {
#pragma unroll
        for (int j = 0; j < 8; ++j) y[j] = j < count ? static_cast<float>(source[j]) : 0.0f;
    }
    load_some(w_scale + column, count, aligned, w);
#pragma unroll
    for (int j = 0; j < 8; ++j) y[j] = __fmul_rn(w[j], y[j]);
    if (x_scale) {
        const float s = x_scale[row];
#pragma unroll
        for (int j = 0; j < 8; ++j) y[j] = __fmul_rn(s, y[j]);
    }
    if (bias) {
        load_some(bias + column, count, aligned, w);
#pragma unroll
        for (int j = 0; j < 8; ++j) y[j] = __fadd_rn(y[j], w[j]);
    }
    store_some(out + row * n + column, count, aligned, y);
}
