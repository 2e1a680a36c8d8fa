// The input row of gemv: loaded, normed or rotated, and quantized by one block.
//
// The time from the end of the kernel before to the last code counts in full, and most of it is latency. So what does
// not depend on that kernel is loaded before the kernel waits for it, and loads are in flight together.
#pragma once
#include "common/bfloat16.cuh"
#include "common/common.cuh"
#include "common/rotation.cuh"
#include "constants/gemv.cuh"

namespace bminf {

// What a norm is, without its rotation.
constexpr int unrotated(int input) {
    if (input == ROTATED_RMS_NORM) return RMS_NORM;
    if (input == ROTATED_LAYER_NORM) return LAYER_NORM;
    return input == ROTATED_RMS_NORM_OF_SUM ? static_cast<int>(RMS_NORM_OF_SUM) : input;
}
constexpr bool is_rotated_norm(int input) { return unrotated(input) != input; }
constexpr bool is_sum(int input) { return input == SUM || unrotated(input) == RMS_NORM_OF_SUM; }
constexpr bool is_layer_norm(int input) { return unrotated(input) == LAYER_NORM; }
constexpr bool is_normed(int input) {
    return unrotated(input) == RMS_NORM || is_layer_norm(input) || unrotated(input) == RMS_NORM_OF_SUM;
}

// KIND: what the row is, a GemvInput. The first ROW_THREADS threads of the block hold it, each N vectors of eight
// elements. The other threads wait. Fewer threads take less time, as each takes part in every reduction.
template <int KIND, int ROW_THREADS, int N>
struct InputRow {
    static constexpr int INPUT = KIND, THREADS = ROW_THREADS, VECTORS = N;
    static constexpr bool IS_FLOAT = is_normed(INPUT) || INPUT == FLOAT || INPUT == SUM;
    static constexpr bool IS_PACKED = INPUT == HALF || INPUT == BFLOAT16;
    using Half = typename Conditional<INPUT == BFLOAT16, __nv_bfloat16, __half>::type;
    using Source = typename Conditional<IS_FLOAT, float, Half>::type;
    using Scratch = RowScratch<THREADS, VECTORS>;
    using Layout = typename Conditional<VECTORS <= 2, HalfVectors<THREADS>, WholeVectors<THREADS>>::type;  // of fp32
    using Norm = NormParams<Layout>;
    static constexpr int LOADS = sizeof(Source) / 2, EACH = 8 / LOADS;  // loads of a vector, elements of a load

    // The first column of load j of a thread's vector i: neighbouring threads read neighbouring elements.
    __device__ __forceinline__ static int column(int i, int j = 0) {
        if constexpr (IS_FLOAT) return Layout::column(i, j);
        const int thread = threadIdx.x;
        return INPUT == ROTATED ? loaded_column<VECTORS>(thread, i) : (i * THREADS + thread) * 8;
    }

    // Clears the elements of vector i in columns from k on.
    __device__ __forceinline__ static void clear(float (&x)[8], int i, int k) {
        if constexpr (IS_FLOAT)
            clear_tail<Layout>(x, i, k);
        else
            zero_tail(x, column(i), k);
    }
};

// Where a thread's vectors of a row are. All loads are unconditional: threads beyond the end load the last elements,
// and clear() clears them. Of short rows the addresses are in registers before a kernel waits for its input.
template <class Row>
struct RowAddresses {
    const typename Row::Source* loads[Row::VECTORS][Row::LOADS];

    __device__ __forceinline__ RowAddresses(const void* x, int pitch) {
#pragma unroll
        for (int i = 0; i < Row::VECTORS; ++i)
#pragma unroll
            for (int j = 0; j < Row::LOADS; ++j) {
                loads[i][j] = static_cast<const typename Row::Source*>(x) + min(Row::column(i, j), pitch - Row::EACH);
                if constexpr (Row::VECTORS <= 2) asm volatile("" : "+l"(loads[i][j]));
            }
    }
    __device__ __forceinline__ void load(uint4 (&raw)[Row::VECTORS][Row::LOADS]) const {
#pragma unroll
        for (int i = 0; i < Row::VECTORS; ++i)
#pragma unroll
            for (int j = 0; j < Row::LOADS; ++j) raw[i][j] = ld_global_cg_v4(loads[i][j]);
    }
};

// A row of the input's length in registers, with zeros behind its end.
template <class Row>
__device__ __forceinline__ void load_input(const RowAddresses<Row>& x, int k, float (&v)[Row::VECTORS][8]) {
    uint4 raw[Row::VECTORS][Row::LOADS];
    x.load(raw);
#pragma unroll
    for (int i = 0; i < Row::VECTORS; ++i) {
        load8(reinterpret_cast<const typename Row::Source*>(raw[i]), v[i]);
        Row::clear(v[i], i, k);
    }
}

// The norm of the input row: in registers, where they suffice for two blocks on an SM.
template <class Row>
__device__ __forceinline__ auto input_norm(const typename Row::Norm& params, double inverse_k) {
    constexpr int VECTORS = Row::VECTORS;
    constexpr bool WITH_BIAS = is_layer_norm(Row::INPUT) && VECTORS == 1;
    if constexpr (is_normed(Row::INPUT) && VECTORS <= (is_sum(Row::INPUT) ? 1 : 2))
        return LoadedNorm<VECTORS, WITH_BIAS, typename Row::Norm>(params, inverse_k);
    else
        return params;
}

// A row whose RMSNorm is added to the input row, and where the sum is written: fp32 [pitch].
struct Addend {
    const float *x, *norm_weight;
    float eps;
    float* sum;
};

// v += norm(addend). The first block writes the sum. The other blocks still read the input row, so the sum must lie
// elsewhere.
template <class Row>
__device__ __forceinline__ void add_normed(
    float (&v)[Row::VECTORS][8], const Addend& addend, int k, int pitch, typename Row::Scratch& scratch) {
    float y[Row::VECTORS][8];
    load_input(RowAddresses<Row>(addend.x, pitch), k, y);
    const typename Row::Norm norm = {addend.norm_weight, nullptr, addend.eps, k, pitch};
    normalise_row<Row::THREADS, false, false>(y, norm, scratch);
#pragma unroll
    for (int i = 0; i < Row::VECTORS; ++i) {
#pragma unroll
        for (int j = 0; j < 8; ++j) v[i][j] = __fadd_rn(v[i][j], y[i][j]);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int column = Row::column(i, half);
            const float4 stored = {v[i][4 * half], v[i][4 * half + 1], v[i][4 * half + 2], v[i][4 * half + 3]};
            if (blockIdx.x == 0 && column < pitch) *reinterpret_cast<float4*>(addend.sum + column) = stored;
        }
    }
    sync_threads<Row::THREADS>();  // the next reduction uses the same scratch
}

// Stores the codes of vector i.
template <class Row>
__device__ __forceinline__ void store_codes(int8* codes, int i, int width, const uint2& of_vector) {
    if constexpr (Row::IS_FLOAT) {
        const int first = Row::column(i, 0), second = Row::column(i, 1);
        if (first < width) *reinterpret_cast<unsigned*>(codes + first) = of_vector.x;
        if (second < width) *reinterpret_cast<unsigned*>(codes + second) = of_vector.y;
    } else if (const int column = Row::column(i); column < width) {
        *reinterpret_cast<uint2*>(codes + column) = of_vector;
    }
}

// quantize_input of 16-bit values, which need half as many registers as fp32.
template <class Row>
__device__ __forceinline__ float quantize_packed(const RowAddresses<Row>& x, int k, int width, int8* codes) {
    using Source = typename Row::Source;
    __shared__ RowScratch<Row::THREADS, 1> scratch;
    uint4 raw[Row::VECTORS][1];
    x.load(raw);
    unsigned top = 0;
#pragma unroll
    for (int i = 0; i < Row::VECTORS; ++i) zero_tail(raw[i][0], Row::column(i), k), top = packed_max(top, raw[i][0]);
    const float a = threads_absmax<Row::THREADS>(larger_of<Source>(top), scratch, 0);
    const float ratio = row_ratio(a);
#pragma unroll
    for (int i = 0; i < Row::VECTORS; ++i) {
        float v[8];
        load8(reinterpret_cast<const Source*>(raw[i]), v);
        store_codes<Row>(codes, i, width, quantize8(v, ratio));
    }
    return a;
}

// quantize_input of rotated fp16 values.
template <class Row, class F>
__device__ __forceinline__ float quantize_rotated(
    const RowAddresses<Row>& x, int rotation, float rotation_scale, int k, int width, int8* codes, F loaded) {
    constexpr int THREADS = Row::THREADS, VECTORS = Row::VECTORS;
    __shared__ RowScratch<THREADS, 1> scratch;
    uint4 values[VECTORS][1], raw[VECTORS];
    x.load(values);
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) raw[i] = values[i][0], zero_tail(raw[i], Row::column(i), k);
    loaded();
    float v[VECTORS][8];
    gather_runs(raw);
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) load8(reinterpret_cast<const __half*>(&raw[i]), v[i]);
    rotate_sums<8 * VECTORS, VECTORS>(v, rotation);
    const float factor = scale_or_factor(v, rotation, rotation_scale);
    const float top = __fmul_rn(row_max<THREADS>(v, scratch), factor);
    const float ratio = __fmul_rn(row_ratio(top), factor);
    const int first = run_column<VECTORS>(threadIdx.x);
#pragma unroll
    for (int i = 0; i < VECTORS; ++i)
        if (const int column = first + 8 * i; column < width)
            *reinterpret_cast<uint2*>(codes + column) = quantize8(v[i], ratio);
    return top;
}

// Writes the codes of the normed or rotated input row to shared memory, with zeros up to `width`; returns the absmax.
// Called by the threads of the row. `loaded` is called when a rotated fp16 row has arrived.
template <class Row, class Norm, class F>
__device__ __forceinline__ float quantize_input(
    const RowAddresses<Row>& x, const Norm& norm, int rotation, float rotation_scale, int k, int pitch, int width,
    int8* codes, const Addend& addend, F loaded) {
    constexpr int INPUT = Row::INPUT, THREADS = Row::THREADS, VECTORS = Row::VECTORS;
    if constexpr (Row::IS_PACKED) return quantize_packed<Row>(x, k, width, codes);
    if constexpr (INPUT == ROTATED) return quantize_rotated<Row>(x, rotation, rotation_scale, k, width, codes, loaded);
    __shared__ typename Row::Scratch scratch;
    float v[VECTORS][8];
    load_input(x, k, v);
    if constexpr (is_sum(INPUT)) add_normed<Row>(v, addend, k, pitch, scratch);
    float top;
    if constexpr (is_rotated_norm(INPUT)) {
        normalise_row<THREADS, is_layer_norm(INPUT), false>(v, norm, scratch);
        rotate_in_layout<typename Row::Layout>(v, rotation, rotation_scale);
        top = row_max<THREADS>(v, scratch, 1);
    } else if constexpr (is_normed(INPUT)) {
        top = normalise_row<THREADS, is_layer_norm(INPUT), true>(v, norm, scratch);
    } else {
        top = row_max<THREADS>(v, scratch);
    }
    const float ratio = row_ratio(top);
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) store_codes<Row>(codes, i, width, quantize8(v[i], ratio));
    return top;
}

}  // namespace bminf
