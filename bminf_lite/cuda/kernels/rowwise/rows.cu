// Kernels over rows (tokens): what stands between two products. Reading an int32 result and scaling it, adding it to
// the residual stream, normalising, gating and quantizing for the next product are one pass: a row is read once into
// registers and written once.
#include "common/common.cuh"
#include "common/layout.cuh"
#include "constants/rows.cuh"

using namespace bminf;

// A matrix of values: fp16, fp32, or int32 sums with the scales and bias that turn them into fp16 values.
struct Values {
    const void* data;
    const float *x_scale, *w_scale, *bias;
    size_t pitch;  // for a product: the layout's leading dimension
};

// A thread's part of a source, as it is in memory: what is fetched first and looked at later, so that all of a row is
// on its way at once. Where there is no column, the first one is read, and cleared later.
template <int SOURCE>
struct Raw {
    uint4 part[SOURCE >= FROM_FLOAT ? 2 : 1];

    template <Order ORDER>
    __device__ __forceinline__ void fetch(const Values& v, int row, int column) {
        if constexpr (SOURCE == FROM_HALF)
            part[0] = ld_global_v4(static_cast<const __half*>(v.data) + row * v.pitch + column);
        if constexpr (SOURCE >= FROM_FLOAT) {
            const size_t place = SOURCE == FROM_INT32 ? offset<ORDER>(row, column, v.pitch) : row * v.pitch + column;
            part[0] = ld_global_v4(static_cast<const int*>(v.data) + place);
            part[1] = ld_global_v4(static_cast<const int*>(v.data) + place + 4);
        }
    }

    __device__ __forceinline__ void values(const Values& v, float x_scale, int column, float (&x)[8]) const {
        if constexpr (SOURCE == FROM_HALF) load8(reinterpret_cast<const __half*>(part), x);
        if constexpr (SOURCE == FROM_FLOAT) load8(reinterpret_cast<const float*>(part), x);
        if constexpr (SOURCE == FROM_INT32) {
            float y[8];
            load8(reinterpret_cast<const int*>(part), x);
            load8(v.w_scale + column, y);
#pragma unroll
            for (int j = 0; j < 8; ++j) x[j] = scaled(x[j], x_scale, y[j]);
            if (v.bias) {
                load8(v.bias + column, y);
#pragma unroll
                for (int j = 0; j < 8; ++j) x[j] = __fadd_rn(x[j], y[j]);
            }
#pragma unroll
            for (int j = 0; j < 8; ++j) x[j] = rounded(x[j]);
        }
    }
};

// The second half of a gate where it starts at an odd place, read one by one.
template <int SOURCE, Order ORDER>
__device__ __forceinline__ void load_odd_half(const Values& v, int row, int column, int k, float (&x)[8]) {
#pragma unroll
    for (int j = 0; j < 8; ++j) {
        const int c = k + column + j;
        x[j] = 0;
        if (column + j >= k) continue;
        if constexpr (SOURCE == FROM_HALF) x[j] = __half2float(static_cast<const __half*>(v.data)[row * v.pitch + c]);
        if constexpr (SOURCE == FROM_INT32) {
            const int sum = static_cast<const int*>(v.data)[offset<ORDER>(row, c, v.pitch)];
            const float y = scaled(__int2float_rn(sum), v.x_scale[row], v.w_scale[c]);
            x[j] = rounded(v.bias ? __fadd_rn(y, v.bias[c]) : y);
        }
    }
}

// Up to so many rows, what the kernel waits for is the memory, which the next product's weight keeps busy by then.
constexpr int PREFETCH_MAX_ROWS = 64;

// Blocks of `transform` on a multiprocessor: with a product to scale, or an exact GELU, a thread may have all its
// registers.
constexpr int blocks_of(int source, int prepare, int threads, int vectors) {
    return source == FROM_INT32 || prepare == GATE_GELU ? 1 : resident_blocks(threads, vectors);
}

// rows of k elements. `residual` fp32 (pitch residual_pitch) is read by norms, and written if there is a source to add.
// `out` is int8 codes laid out by OUT with leading dimension `out_ld`, with fp32 `scales`; or values with that pitch,
// which may be the residual stream or, without a gate, the source itself.
template <int SOURCE, int PREPARE, int TARGET, int THREADS, int VECTORS, int IN, int OUT>
__global__ void __launch_bounds__(THREADS > 128 ? THREADS : 128, blocks_of(SOURCE, PREPARE, THREADS, VECTORS))
    transform(
        const void* data, const float* x_scale, const float* w_scale, const float* bias, long long pitch,
        float* residual, long long residual_pitch, const float* norm_weight, const float* norm_bias, float eps,
        void* out, float* scales, long long out_ld, int rows, int k) {
    constexpr bool NORM = PREPARE == RMS_NORM || PREPARE == LAYER_NORM, GATE = PREPARE >= GATE_SILU;
    constexpr Order ORDER = static_cast<Order>(IN);
    __shared__ RowScratch<THREADS> scratch;
    launch_dependent_grids();
    const int index = blockIdx.x * (blockDim.x / THREADS) + threadIdx.x / THREADS, thread = threadIdx.x % THREADS;
    if (NORM && rows <= PREFETCH_MAX_ROWS)
#pragma unroll
        for (int i = 0; i < VECTORS; ++i)
            if ((i * THREADS + thread) * 8 < k) prefetch_l2(norm_weight + (i * THREADS + thread) * 8);
    wait_on_dependent_grids();
    const int row = min(index, rows - 1);
    const int padded = (k + 15) / 16 * 16, written = index < rows ? padded : 0;
    const bool even = k % 8 == 0;
    const Values values = {data, x_scale, w_scale, bias, static_cast<size_t>(pitch)};
    const auto column_of = [thread](int vector) { return (vector * THREADS + thread) * 8; };
    float v[VECTORS][8];
    constexpr int AT_ONCE = VECTORS <= 4 ? VECTORS : 1;
    const Values stream = {residual, nullptr, nullptr, nullptr, static_cast<size_t>(residual_pitch)};
    const float row_factor = SOURCE == FROM_INT32 ? x_scale[row] : 0.0f;
#pragma unroll
    for (int first = 0; first < VECTORS; first += AT_ONCE) {
        Raw<SOURCE> raw[AT_ONCE];
        Raw<GATE ? SOURCE : NONE> second[AT_ONCE];
        Raw<NORM ? FROM_FLOAT : NONE> before[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            const int place = column_of(first + i) < padded ? column_of(first + i) : 0;
            raw[i].template fetch<ORDER>(values, row, place);
            // behind the second half there may be no memory
            if (GATE && even) second[i].template fetch<ORDER>(values, row, k + min(place, k - 8));
            if constexpr (NORM) before[i].template fetch<Order::ROW>(stream, row, place);
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            const int place = column_of(first + i) < padded ? column_of(first + i) : 0;
            float (&x)[8] = v[first + i];
            if constexpr (SOURCE != NONE) raw[i].values(values, row_factor, place, x);
            if constexpr (GATE) {
                float up[8];
                if (even)
                    second[i].values(values, row_factor, k + place, up);
                else
                    load_odd_half<SOURCE, ORDER>(values, row, column_of(first + i), k, up);
#pragma unroll
                for (int j = 0; j < 8; ++j) x[j] = rounded(activate<PREPARE - GATE_SILU>(x[j]) * up[j]);
            }
            if constexpr (NORM) {
                float r[8];
                before[i].values(stream, 0, place, r);
#pragma unroll
                for (int j = 0; j < 8; ++j) x[j] = SOURCE == NONE ? r[j] : __fadd_rn(r[j], x[j]);
            }
        }
    }
    if (k < THREADS * VECTORS * 8)
#pragma unroll
        for (int i = 0; i < VECTORS; ++i) zero_tail(v[i], column_of(i), k);
    if constexpr (NORM && SOURCE != NONE)
#pragma unroll
        for (int i = 0; i < VECTORS; ++i) store_vector(residual + row * residual_pitch, column_of(i), written, v[i]);
    float top = 0;
    if constexpr (NORM) {
        top = normalise_row<THREADS, PREPARE == LAYER_NORM, TARGET == CODES>(
            v, norm_weight, norm_bias, eps, k, padded, scratch);
    } else if constexpr (TARGET == CODES) {
        top = row_max<THREADS>(v, scratch);
    }
    const RowScale s = row_scale(top);
    if (TARGET == CODES && thread == 0 && written) scales[row] = s.scale;
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
        const int column = column_of(i);
        if constexpr (TARGET == CODES) {
            if (column >= written) continue;
            int8* place = static_cast<int8*>(out) + offset<static_cast<Order>(OUT)>(row, column, out_ld);
            *reinterpret_cast<uint2*>(place) = quantize8(v[i], s.ratio);
        }
        if constexpr (TARGET == TO_HALF) store_vector(static_cast<__half*>(out) + row * out_ld, column, written, v[i]);
        if constexpr (TARGET == TO_FLOAT) store_vector(static_cast<float*>(out) + row * out_ld, column, written, v[i]);
    }
}

// A product's values, scaled and written: fp16, fp32 (unrounded), or added to the residual stream, which is fp32. The
// sums are int32, or fp32 from a float product; a missing scale is 1.
template <class SUM, int IN, bool ADD, class T>
__global__ void __launch_bounds__(256) dequantize(
    const SUM* data, const float* x_scale, const float* w_scale, const float* bias, long long ld, T* out,
    long long out_pitch, int rows, int n) {
    launch_dependent_grids();
    wait_on_dependent_grids();
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

// Rows of an fp16 table [vocab, pitch] as the residual stream, fp32 [rows, k]. Like `last_rows` it may have few blocks,
// and so lets the next kernel start only when it ends (see attention_decode.cu).
__global__ void __launch_bounds__(256)
    embed(const int* tokens, const __half* table, long long pitch, float* out, long long out_pitch, int k) {
    wait_on_dependent_grids();
    const long long row = blockIdx.x;
    const long long token = tokens[row];
    for (int column = threadIdx.x * 8; column < k; column += blockDim.x * 8) {
        float x[8];
        load8(table + token * pitch + column, x);
        store8(out + row * out_pitch + column, x);
    }
}

// The last row of each sequence, fp32.
__global__ void __launch_bounds__(256)
    last_rows(const int* cu_seqlens, const float* x, long long pitch, float* out, long long out_pitch, int k) {
    wait_on_dependent_grids();
    const long long from = cu_seqlens[blockIdx.x + 1] - 1, to = blockIdx.x;
    for (int column = threadIdx.x * 8; column < k; column += blockDim.x * 8) {
        float v[8];
        load8(x + from * pitch + column, v);
        store8(out + to * out_pitch + column, v);
    }
}

// int8 codes as fp16 numbers, 16 at a time: for products of int8 weights with float activations.
__global__ void __launch_bounds__(256) int8_to_half(const int8* codes, __half* out, long long count) {
    launch_dependent_grids();
    wait_on_dependent_grids();
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
