// Kernels over rows (tokens): what stands between two products. Reading an int32 result and scaling it, adding it to the
// residual stream, normalising, gating and quantizing for the next product are one pass: a row is read once into
// registers and written once.
#include "common.cuh"
#include "layout.cuh"

using namespace bminf;

// Where a row's values come from: nowhere (the residual stream alone), memory, or an int32 product yet to be scaled.
enum Source { NONE = 0, FROM_HALF = 1, FROM_FLOAT = 2, PRODUCT = 3 };
// What is made of them. A norm first adds them to the residual stream; a gate has two halves side by side.
enum Prepare { PLAIN = 0, RMS_NORM = 1, LAYER_NORM = 2, GATE_SILU = 3, GATE_GELU_TANH = 4, GATE_RELU = 5, GATE_GELU = 6 };
// What is written: int8 codes and a scale per row, or values.
enum Target { CODES = 0, TO_HALF = 1, TO_FLOAT = 2 };

// A matrix of values: fp16, fp32, or int32 sums with the scales and bias that turn them into fp16 values.
struct Values {
    const void* data;
    const float *x_scale, *w_scale, *bias;
    size_t pitch;  // for a product: the layout's leading dimension
};

template <int SOURCE, Order ORDER>
__device__ __forceinline__ void load_values(const Values& v, int row, int column, int k, float (&x)[8]) {
    if constexpr (SOURCE == FROM_HALF) load8(static_cast<const __half*>(v.data) + row * v.pitch + column, x);
    if constexpr (SOURCE == FROM_FLOAT) load8(static_cast<const float*>(v.data) + row * v.pitch + column, x);
    if constexpr (SOURCE == PRODUCT) {
        load8(static_cast<const int*>(v.data) + offset<ORDER>(row, column, v.pitch), x);
        float scale[8], bias[8];
        load8(v.w_scale + column, scale);
        const float x_scale = v.x_scale[row];
#pragma unroll
        for (int j = 0; j < 8; ++j) x[j] = scaled(x[j], x_scale, scale[j]);
        if (v.bias) {
            load8(v.bias + column, bias);
#pragma unroll
            for (int j = 0; j < 8; ++j) x[j] = __fadd_rn(x[j], bias[j]);
        }
#pragma unroll
        for (int j = 0; j < 8; ++j) x[j] = rounded(x[j]);
    }
    if (column + 8 > k)
#pragma unroll
        for (int j = 0; j < 8; ++j) if (column + j >= k) x[j] = 0;
}

// A gate's halves start at columns 0 and k, and k may be odd: then the second is read one by one.
template <int SOURCE, Order ORDER>
__device__ __forceinline__ void load_second_half(const Values& v, int row, int column, int k, float (&x)[8]) {
    if (k % 8 == 0) {
        load_values<SOURCE, ORDER>(v, row, k + column, 2 * k, x);
        return;
    }
#pragma unroll
    for (int j = 0; j < 8; ++j) {
        const int c = k + column + j;
        x[j] = 0;
        if (column + j >= k) continue;
        if constexpr (SOURCE == FROM_HALF) x[j] = __half2float(static_cast<const __half*>(v.data)[row * v.pitch + c]);
        if constexpr (SOURCE == PRODUCT) {
            const int sum = static_cast<const int*>(v.data)[offset<ORDER>(row, c, v.pitch)];
            const float y = scaled(__int2float_rn(sum), v.x_scale[row], v.w_scale[c]);
            x[j] = rounded(v.bias ? __fadd_rn(y, v.bias[c]) : y);
        }
    }
}

// rows of k elements. `residual` fp32 (pitch residual_pitch) is read by norms, and written if there is a source to add.
// `out` is int8 codes laid out by OUT with leading dimension `out_ld`, with fp32 `scales`; or values with that pitch.
template <int SOURCE, int PREPARE, int TARGET, int THREADS, int VECTORS, int IN, int OUT>
__global__ void __launch_bounds__(THREADS > 128 ? THREADS : 128) transform(
    const void* data, const float* x_scale, const float* w_scale, const float* bias, long long pitch,
    float* residual, long long residual_pitch, const float* gain, const float* shift, float eps,
    void* out, float* scales, long long out_ld, int rows, int k)
{
    __shared__ RowScratch<THREADS> scratch;
    let_successor_start();
    wait_for_predecessor();
    const int row = blockIdx.x * (blockDim.x / THREADS) + threadIdx.x / THREADS;
    if (row >= rows) return;  // a whole row's threads: those of one row share a warp or a block
    const int thread = threadIdx.x % THREADS, padded = (k + 15) / 16 * 16;
    const Values values = {data, x_scale, w_scale, bias, static_cast<size_t>(pitch)};
    constexpr bool NORM = PREPARE == RMS_NORM || PREPARE == LAYER_NORM;
    float v[VECTORS][8];
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
        const int column = (i * THREADS + thread) * 8;
#pragma unroll
        for (int j = 0; j < 8; ++j) v[i][j] = 0;
        if (column >= padded) continue;
        if constexpr (SOURCE != NONE) load_values<SOURCE, static_cast<Order>(IN)>(values, row, column, k, v[i]);
        if constexpr (NORM) {
            float r[8];
            float* place = residual + row * residual_pitch + column;
            load_row8(residual + row * residual_pitch, column, k, padded, r);
#pragma unroll
            for (int j = 0; j < 8; ++j) v[i][j] = __fadd_rn(r[j], v[i][j]);
            if constexpr (SOURCE != NONE) store8(place, v[i]);
        }
        if constexpr (PREPARE >= GATE_SILU) {
            float up[8];
            load_second_half<SOURCE, static_cast<Order>(IN)>(values, row, column, k, up);
#pragma unroll
            for (int j = 0; j < 8; ++j) v[i][j] = rounded(activate<PREPARE - GATE_SILU>(v[i][j]) * up[j]);
        }
    }
    float top = 0;
    if constexpr (NORM) {
        top = normalise_row<THREADS, PREPARE == LAYER_NORM>(v, gain, shift, eps, k, padded, scratch);
    } else if constexpr (TARGET == CODES) {
        top = row_max<THREADS>(v, scratch);
    }
    const RowScale s = row_scale(top);
    if (TARGET == CODES && thread == 0) scales[row] = s.scale;
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
        const int column = (i * THREADS + thread) * 8;
        if (column >= padded) continue;
        if constexpr (TARGET == CODES) {
            int8* place = static_cast<int8*>(out) + offset<static_cast<Order>(OUT)>(row, column, out_ld);
            *reinterpret_cast<uint2*>(place) = codes8(v[i], s.ratio);
        }
        if constexpr (TARGET == TO_HALF) store8(static_cast<__half*>(out) + row * out_ld + column, v[i]);
        if constexpr (TARGET == TO_FLOAT) store8(static_cast<float*>(out) + row * out_ld + column, v[i]);
    }
}

// A product's values, scaled and written: fp16, fp32 (unrounded), or added to the residual stream, which is fp32. The sums
// are int32, or fp32 from a float product; a missing scale is 1.
template <class SUM, int IN, bool ADD, class T>
__global__ void __launch_bounds__(256) finish(
    const SUM* data, const float* x_scale, const float* w_scale, const float* bias, long long ld,
    T* out, long long out_pitch, int rows, int n)
{
    let_successor_start();
    wait_for_predecessor();
    const int vectors = (n + 7) / 8;
    const long long index = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
    const int row = static_cast<int>(index / vectors), column = static_cast<int>(index % vectors) * 8;
    if (row >= rows) return;
    float y[8], w[8];
    load8(data + offset<static_cast<Order>(IN)>(row, column, ld), y);
    if (w_scale) {
        load8(w_scale + column, w);
#pragma unroll
        for (int j = 0; j < 8; ++j) y[j] = __fmul_rn(w[j], y[j]);
    }
    if (x_scale) {
        const float s = x_scale[row];
#pragma unroll
        for (int j = 0; j < 8; ++j) y[j] = __fmul_rn(s, y[j]);
    }
    if (bias) {
        load8(bias + column, w);
#pragma unroll
        for (int j = 0; j < 8; ++j) y[j] = __fadd_rn(y[j], w[j]);
    }
    T* place = out + row * out_pitch + column;
    if constexpr (ADD) {
        load8(place, w);
#pragma unroll
        for (int j = 0; j < 8; ++j) y[j] = __fadd_rn(w[j], rounded(y[j]));
    }
    store8(place, y);
}

// Rows of an fp16 table [vocab, pitch] as the residual stream, fp32 [rows, k]. Like `last_rows` it may have few blocks, and so
// lets the next kernel start only when it ends (see attention_decode.cu).
__global__ void __launch_bounds__(256) embed(
    const int* tokens, const __half* table, long long pitch, float* out, long long out_pitch, int k)
{
    wait_for_predecessor();
    const long long row = blockIdx.x;
    const long long token = tokens[row];
    for (int column = threadIdx.x * 8; column < k; column += blockDim.x * 8) {
        float x[8];
        load8(table + token * pitch + column, x);
        store8(out + row * out_pitch + column, x);
    }
}

// The last row of each sequence, fp32.
__global__ void __launch_bounds__(256) last_rows(
    const int* starts, const float* x, long long pitch, float* out, long long out_pitch, int k)
{
    wait_for_predecessor();
    const long long from = starts[blockIdx.x + 1] - 1, to = blockIdx.x;
    for (int column = threadIdx.x * 8; column < k; column += blockDim.x * 8) {
        float v[8];
        load8(x + from * pitch + column, v);
        store8(out + to * out_pitch + column, v);
    }
}

// int8 codes as fp16 numbers, 16 at a time: for products of int8 weights with float activations.
__global__ void __launch_bounds__(256) widen(const int8* codes, __half* out, long long count) {
    let_successor_start();
    wait_for_predecessor();
    const long long i = (static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x) * 16;
    if (i >= count) return;
    const int4 raw = *reinterpret_cast<const int4*>(codes + i);
    const int8* c = reinterpret_cast<const int8*>(&raw);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        float x[8];
#pragma unroll
        for (int j = 0; j < 8; ++j) x[j] = c[8 * h + j];
        store8(out + i + 8 * h, x);
    }
}
