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

constexpr bool is_sum(int input) { return input == SUM || input == RMS_NORM_OF_SUM; }
constexpr bool is_normed(int input) { return input == RMS_NORM || input == LAYER_NORM || input == RMS_NORM_OF_SUM; }

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
    using Norm = NormParams<THREADS, true>;

    // The first column of a thread's vector i. The vectors of a rotated row are neighbours, so that a transform needs
    // fewer exchanges between threads; otherwise neighbouring threads read neighbouring vectors.
    __device__ __forceinline__ static int column(int i) {
        const int thread = threadIdx.x;
        return (INPUT == ROTATED ? thread * VECTORS + i : i * THREADS + thread) * 8;
    }
};

// Where a thread's vectors of a row are. All loads are unconditional: threads beyond the end load the last elements,
// and zero_tail clears them. Of short rows the addresses are in registers before a kernel waits for its input.
template <class Row, class Source>
struct RowAddresses {
    const Source* vectors[Row::VECTORS];

    __device__ __forceinline__ RowAddresses(const void* x, int pitch) {
#pragma unroll
        for (int i = 0; i < Row::VECTORS; ++i) {
            vectors[i] = static_cast<const Source*>(x) + min(Row::column(i), pitch - 8);
            if constexpr (Row::VECTORS <= 2) asm volatile("" : "+l"(vectors[i]));
        }
    }
    template <int PARTS>
    __device__ __forceinline__ void load(uint4 (&raw)[Row::VECTORS][PARTS]) const {
#pragma unroll
        for (int i = 0; i < Row::VECTORS; ++i)
#pragma unroll
            for (int j = 0; j < PARTS; ++j) raw[i][j] = ld_global_cg_v4(vectors[i] + j * (8 / PARTS));
    }
};

// A row of the input's length in registers, with zeros behind its end.
template <class Row, class Source>
__device__ __forceinline__ void load_input(const RowAddresses<Row, Source>& x, int k, float (&v)[Row::VECTORS][8]) {
    uint4 raw[Row::VECTORS][sizeof(Source) / 2];
    x.load(raw);
#pragma unroll
    for (int i = 0; i < Row::VECTORS; ++i) {
        load8(reinterpret_cast<const Source*>(raw[i]), v[i]);
        zero_tail(v[i], Row::column(i), k);
    }
}

// The norm of the input row: in registers, where they suffice for two blocks on an SM.
template <class Row>
__device__ __forceinline__ auto input_norm(const typename Row::Norm& params, double inverse_k) {
    constexpr int VECTORS = Row::VECTORS;
    constexpr bool WITH_BIAS = Row::INPUT == LAYER_NORM && VECTORS == 1;
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
    load_input<Row>(RowAddresses<Row, float>(addend.x, pitch), k, y);
    normalise_row<Row::THREADS, false, false>(y, addend.norm_weight, nullptr, addend.eps, k, pitch, scratch);
#pragma unroll
    for (int i = 0; i < Row::VECTORS; ++i) {
#pragma unroll
        for (int j = 0; j < 8; ++j) v[i][j] = __fadd_rn(v[i][j], y[i][j]);
        const int column = Row::column(i);
        if (blockIdx.x == 0 && column < pitch) store8(addend.sum + column, v[i]);
    }
    sync_threads<Row::THREADS>();  // the next reduction uses the same scratch
}

// quantize_input of 16-bit values, which need half as many registers as fp32. Two magnitudes are compared at once:
// their bits order like the magnitudes, and NaN is the largest.
template <class Row>
__device__ __forceinline__ float quantize_packed(
    const RowAddresses<Row, typename Row::Source>& x, int k, int width, int8* codes) {
    using Source = typename Row::Source;
    __shared__ RowScratch<Row::THREADS, 1> scratch;
    uint4 raw[Row::VECTORS][1];
    x.load(raw);
    unsigned top = 0;
#pragma unroll
    for (int i = 0; i < Row::VECTORS; ++i) {
        unsigned (&pairs)[4] = reinterpret_cast<unsigned (&)[4]>(raw[i][0]);
        const int column = Row::column(i);
        if (column + 8 > k)
#pragma unroll
            for (int j = 0; j < 4; ++j)
                pairs[j] = column + 2 * j >= k ? 0 : column + 2 * j + 1 >= k ? pairs[j] & 0xffffu : pairs[j];
#pragma unroll
        for (int j = 0; j < 4; ++j) top = __vmaxu2(top, pairs[j] & 0x7fff7fffu);
    }
    const Source* tops = reinterpret_cast<const Source*>(&top);
    const float a = threads_absmax<Row::THREADS>(absmax(to_float(tops[0]), to_float(tops[1])), scratch, 0);
    const float ratio = row_ratio(a);
#pragma unroll
    for (int i = 0; i < Row::VECTORS; ++i) {
        float v[8];
        load8(reinterpret_cast<const Source*>(raw[i]), v);
        const int column = Row::column(i);
        if (column < width) *reinterpret_cast<uint2*>(codes + column) = quantize8(v, ratio);
    }
    return a;
}

// Writes the codes of the normed or rotated input row to shared memory, with zeros up to `width`; returns the absmax.
// Called by the threads of the row.
template <class Row, class Norm>
__device__ __forceinline__ float quantize_input(
    const RowAddresses<Row, typename Row::Source>& x, const Norm& norm, int rotation, float rotation_scale, int k,
    int pitch, int width, int8* codes, const Addend& addend) {
    constexpr int INPUT = Row::INPUT, THREADS = Row::THREADS, VECTORS = Row::VECTORS;
    if constexpr (Row::IS_PACKED) return quantize_packed<Row>(x, k, width, codes);
    __shared__ typename Row::Scratch scratch;
    float v[VECTORS][8];
    load_input(x, k, v);
    if constexpr (INPUT == ROTATED) rotate_row<true>(v, rotation, rotation_scale);
    if constexpr (is_sum(INPUT)) add_normed<Row>(v, addend, k, pitch, scratch);
    float top;
    if constexpr (is_normed(INPUT))
        top = normalise_row<THREADS, INPUT == LAYER_NORM, true>(v, norm, scratch);
    else
        top = row_max<THREADS>(v, scratch);
    const float ratio = row_ratio(top);
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
        const int column = Row::column(i);
        if (column < width) *reinterpret_cast<uint2*>(codes + column) = quantize8(v[i], ratio);
    }
    return top;
}

}  // namespace bminf
