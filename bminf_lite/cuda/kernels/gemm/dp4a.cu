// Exact int8 batched GEMM without tensor cores, for GPUs before compute capability 7.5, and where cublasLt has no
// kernel:
//
//     out[b] = x[b] @ w[b].T, summed in int32
//
// x: int8 [B, rows, k]; w: int8 [B, columns, k]; out: int32 [B, rows, columns]; all row-major, k a multiple of 16.
//
// The grid is (column tiles, row tiles, B). A block of 256 threads computes a tile of 64 x 64 sums, each thread 4 x 4
// of them, and loads 32 bytes of k at a time through shared memory, where they are transposed to [k / 4][row].
#include "constants/dp4a.cuh"

constexpr int DEPTH = 8;         // ints (4 codes each) of k at a time
constexpr int PITCH = TILE + 4;  // of rows of shared memory: 16-byte aligned, few bank conflicts

__device__ __forceinline__ int dot4(int a, int b, int sum) {
#if __CUDA_ARCH__ >= 610
    return __dp4a(a, b, sum);
#else
    for (int i = 0; i < 32; i += 8) sum += (signed char)(a >> i) * (signed char)(b >> i);
    return sum;
#endif
}

// x [rows, vectors] and w [columns, vectors] in vectors of 16 bytes; `columns` is a multiple of 4. The strides of the
// batch are in the same units (out: in ints); a stride of 0 repeats an operand.
__global__ void __launch_bounds__(256) igemm_dp4a(
    int* out, const int4* w, const int4* x, int rows, int columns, int vectors, long long out_stride,
    long long w_stride, long long x_stride) {
    __shared__ int4 shared_x[DEPTH * PITCH / 4], shared_w[DEPTH * PITCH / 4];
    const int t = threadIdx.x;
    const int row0 = blockIdx.y * TILE, column0 = blockIdx.x * TILE;

    // Half the threads load x, the other half w: one 16-byte vector each, two to a row.
    const bool loads_x = t < 128;
    const int line = t % 128 / 2, half = t % 2;
    const int source_line = (loads_x ? row0 : column0) + line;
    const bool inside = source_line < (loads_x ? rows : columns);
    const int4* source =
        (loads_x ? x + blockIdx.z * x_stride : w + blockIdx.z * w_stride) + (long long)source_line * vectors;
    int* target = reinterpret_cast<int*>(loads_x ? shared_x : shared_w) + half * 4 * PITCH + line;

    const int row = t / 16 * 4, column = t % 16 * 4;
    int sums[4][4] = {};
    for (int v = 0; v < vectors; v += 2) {
        const int4 zero = {0, 0, 0, 0};
        const int4 loaded = inside && v + half < vectors ? source[v + half] : zero;
        __syncthreads();
        target[0 * PITCH] = loaded.x;
        target[1 * PITCH] = loaded.y;
        target[2 * PITCH] = loaded.z;
        target[3 * PITCH] = loaded.w;
        __syncthreads();
#pragma unroll
        for (int k = 0; k < DEPTH; ++k) {
            const int4 xs = shared_x[(k * PITCH + row) / 4], ws = shared_w[(k * PITCH + column) / 4];
            const int xi[4] = {xs.x, xs.y, xs.z, xs.w}, wi[4] = {ws.x, ws.y, ws.z, ws.w};
#pragma unroll
            for (int i = 0; i < 4; ++i)
#pragma unroll
                for (int j = 0; j < 4; ++j) sums[i][j] = dot4(xi[i], wi[j], sums[i][j]);
        }
    }

    if (column0 + column >= columns) return;
    int* result = out + blockIdx.z * out_stride + column0 + column;
#pragma unroll
    for (int i = 0; i < 4; ++i)
        if (row0 + row + i < rows) {
            const int4 four = {sums[i][0], sums[i][1], sums[i][2], sums[i][3]};
            *reinterpret_cast<int4*>(result + (long long)(row0 + row + i) * columns) = four;
        }
}
