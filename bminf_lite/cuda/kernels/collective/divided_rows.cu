// The residual stream of which each GPU of a host has some rows. A product's kernel stores each rank's parts of the
// rows straight into the memory of the rank that owns them; the owner adds them up in the order of the ranks, and sends
// all ranks the codes of the rows' norm.
//
// Each rank has memory that the others write (`bases`, an address for each rank): flags, parts and codes. The kernels
// here wait for no rank: that is what `meet_ranks` is for, before parts are read and after codes are sent.
#include "common/common.cuh"
#include "common/rotation.cuh"

using namespace bminf;

// The parts of owned rows: those of each of `ranks`, fp32 [rows, pitch], `stride` elements apart, and a bias or null.
struct Parts {
    const float* data;
    long long pitch, stride;
    const float* bias;
    int ranks;

    // fp16(sum over the ranks + bias) of the vectors at columns[i] of a row. All loads of a part are in flight
    // together.
    template <int VECTORS>
    __device__ __forceinline__ void sum(int row, const int (&columns)[VECTORS], float (&x)[VECTORS][8]) const {
        fetch(data + row * pitch, columns, x);
        for (int source = 1; source < ranks; ++source) {
            float y[VECTORS][8];
            fetch(data + source * stride + row * pitch, columns, y);
            add(x, y);
        }
        if (bias) {
            float y[VECTORS][8];
            fetch(bias, columns, y);
            add(x, y);
        }
#pragma unroll
        for (int i = 0; i < VECTORS; ++i)
#pragma unroll
            for (int j = 0; j < 8; ++j) x[i][j] = rounded(x[i][j]);
    }
    template <int VECTORS>
    __device__ __forceinline__ static void fetch(
        const float* row, const int (&columns)[VECTORS], float (&x)[VECTORS][8]) {
        uint4 raw[VECTORS][2];
#pragma unroll
        for (int i = 0; i < VECTORS; ++i)
#pragma unroll
            for (int half = 0; half < 2; ++half) raw[i][half] = ld_global_v4(row + columns[i] + 4 * half);
#pragma unroll
        for (int i = 0; i < VECTORS; ++i) load8(reinterpret_cast<const float*>(raw[i]), x[i]);
    }
    // y + x, in x.
    template <int VECTORS>
    __device__ __forceinline__ static void add(float (&x)[VECTORS][8], const float (&y)[VECTORS][8]) {
#pragma unroll
        for (int i = 0; i < VECTORS; ++i)
#pragma unroll
            for (int j = 0; j < 8; ++j) x[i][j] = __fadd_rn(x[i][j], y[i][j]);
    }
};

// residual += the parts' sum: fp32 [rows, k] of pitch residual_pitch; k is a multiple of 8. A thread adds eight
// elements.
__global__ void __launch_bounds__(256) add_owned_rows(
    const float* parts, long long pitch, long long stride, const float* bias, float* residual, long long residual_pitch,
    int rows, int k, int ranks) {
    launch_dependent_grids();
    wait_on_dependent_grids();
    const int vectors = k / 8;
    const long long index = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
    const int row = static_cast<int>(index / vectors), columns[1] = {static_cast<int>(index % vectors) * 8};
    if (row >= rows) return;
    float x[1][8], r[1][8];
    float* const stream = residual + row * residual_pitch;
    Parts{parts, pitch, stride, bias, ranks}.sum(row, columns, x);
    Parts::fetch(stream, columns, r);
    Parts::add(x, r);
    store8(stream + columns[0], x[0]);
}

// The same with SUMS, and then the codes of the rows' norm, int8 [rows, k] and scales fp32 [rows], at `codes` and
// `scales` bytes from the beginning of every rank's memory. k: a multiple of 32, at most 8 THREADS VECTORS. rotation,
// rotation_scale: those of rotate_row, if ROTATED. A row has THREADS threads, a block max(THREADS, 128).
template <bool SUMS, bool CENTER, int THREADS, int VECTORS, bool ROTATED>
__global__ void __launch_bounds__(THREADS > 128 ? THREADS : 128) send_norm_of_rows(
    const float* parts, long long pitch, long long stride, const float* bias, float* residual, long long residual_pitch,
    const float* norm_weight, const float* norm_bias, float eps, const unsigned long long* bases, long long codes,
    long long scales, int rows, int k, int ranks, int rotation, float rotation_scale) {
    __shared__ RowScratch<THREADS, VECTORS> scratch;
    launch_dependent_grids();
    wait_on_dependent_grids();
    const int index = blockIdx.x * (blockDim.x / THREADS) + threadIdx.x / THREADS, thread = threadIdx.x % THREADS;
    const int row = min(index, rows - 1), written = index < rows ? k : 0;
    int columns[VECTORS];
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) columns[i] = (i * THREADS + thread) * 8;
    float* const stream = residual + row * residual_pitch;
    float v[VECTORS][8];
    int read[VECTORS];
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) read[i] = columns[i] < k ? columns[i] : 0;
    if constexpr (SUMS) {
        float r[VECTORS][8];
        Parts{parts, pitch, stride, bias, ranks}.sum(row, read, v);
        Parts::fetch(stream, read, r);
        Parts::add(v, r);
    } else {
        Parts::fetch(stream, read, v);
    }
    if (k < THREADS * VECTORS * 8)
#pragma unroll
        for (int i = 0; i < VECTORS; ++i) zero_tail(v[i], columns[i], k);
    if constexpr (SUMS)
#pragma unroll
        for (int i = 0; i < VECTORS; ++i) store_vector(stream, columns[i], written, v[i]);
    const NormParams<WholeVectors<THREADS>> norm = {norm_weight, norm_bias, eps, k, k};
    float top = normalise_row<THREADS, CENTER, !ROTATED>(v, norm, scratch);
    if constexpr (ROTATED) {
        rotate_row(v, rotation, rotation_scale);
        top = row_max<THREADS>(v, scratch, 1);
    }
    const RowScale s = row_scale(top);
    uint2 packed[VECTORS];
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) packed[i] = quantize8(v[i], s.ratio);
    for (int rank = 0; rank < ranks; ++rank) {
        char* const memory = reinterpret_cast<char*>(bases[rank]);
        if (thread == 0 && written) reinterpret_cast<float*>(memory + scales)[row] = s.scale;
        char* const own = memory + codes + static_cast<long long>(row) * k;
#pragma unroll
        for (int i = 0; i < VECTORS; ++i)
            if (columns[i] < written) *reinterpret_cast<uint2*>(own + columns[i]) = packed[i];
    }
}
