// Softmax over rows with scale, bias and mask:
//
//     out = softmax(scale * x + bias, -inf where mask is 0); zeros for a row that is masked entirely
//
// x, out: T [rows, k], fp16, bf16 or fp32; bias: fp32; mask: bytes. A row is held in registers by a few threads, a
// block, or the blocks of a cluster, so that it is read and written once. softmax_two_pass reads longer rows twice.
#include "common/cluster.cuh"
#include "rowwise/unaligned.cuh"

using namespace bminf;

// Rows of a bias or a mask that serve several rows of x: row r of x uses row r / repeat % count.
struct BroadcastRows {
    int repeat, count;

    __device__ __forceinline__ long long operator()(long long row) const {
        return repeat == 1 && count == 0 ? row : static_cast<int>(row) / repeat % count;
    }
};

// The scores of rows of k elements. bias and mask may be null.
template <class T>
struct Scores {
    const T* x;
    long long pitch;
    float scale;
    const float* bias;
    long long bias_pitch;
    const unsigned char* mask;
    long long mask_pitch;
    BroadcastRows bias_rows, mask_rows;
    int k;

    // Reads N vectors of eight scores, with -inf in columns from k on. WHOLE: k is a multiple of 8 and all rows are
    // aligned to 16 bytes.
    template <bool WHOLE, int N, class Columns>
    __device__ __forceinline__ void read(long long row, Columns column_of, float (&s)[N][8]) const {
        const auto clamped = [&](int i) { return column_of(i) < k ? column_of(i) : 0; };
        if constexpr (WHOLE) {
            constexpr int PARTS = sizeof(T) / 2;
            uint4 raw[N][PARTS];
#pragma unroll
            for (int i = 0; i < N; ++i)
#pragma unroll
                for (int part = 0; part < PARTS; ++part)
                    raw[i][part] = ld_global_v4(x + row * pitch + clamped(i) + part * (16 / sizeof(T)));
#pragma unroll
            for (int i = 0; i < N; ++i) load8(reinterpret_cast<const T*>(raw[i]), s[i]);
        } else {
#pragma unroll
            for (int i = 0; i < N; ++i) load_some(x + row * pitch + column_of(i), k - column_of(i), false, s[i]);
        }
#pragma unroll
        for (int i = 0; i < N; ++i)
#pragma unroll
            for (int j = 0; j < 8; ++j) s[i][j] = __fmul_rn(s[i][j], scale);
        if (bias)
#pragma unroll
            for (int i = 0; i < N; ++i) {
                const float* own = bias + bias_rows(row) * bias_pitch;
                float b[8];
                if (WHOLE)
                    load8(own + clamped(i), b);
                else
                    load_some(own + column_of(i), k - column_of(i), false, b);
#pragma unroll
                for (int j = 0; j < 8; ++j) s[i][j] = __fadd_rn(s[i][j], b[j]);
            }
        if (mask)
#pragma unroll
            for (int i = 0; i < N; ++i) {
                const unsigned char* seen = mask + mask_rows(row) * mask_pitch + clamped(i);
                unsigned char byte[8];
                if (WHOLE) *reinterpret_cast<uint2*>(byte) = *reinterpret_cast<const uint2*>(seen);
#pragma unroll
                for (int j = 0; j < 8; ++j)
                    if (!(WHOLE ? byte[j] : column_of(i) + j < k && seen[j])) s[i][j] = -INF_F;
            }
#pragma unroll
        for (int i = 0; i < N; ++i)
#pragma unroll
            for (int j = 0; j < 8; ++j)
                if (column_of(i) + (WHOLE ? 0 : j) >= k) s[i][j] = -INF_F;
    }
};

// The partial softmax of some scores: the largest one, and the sum of exp(score - top). A NaN score makes the sum NaN.
struct SoftmaxPartial {
    float top, sum;

    __device__ __forceinline__ float factor(float larger_top) const {
        return top == -INF_F ? 0.0f : expf(top - larger_top);
    }
};

// s = exp(s - top), and 0 if top is -inf; returns the sum.
__device__ __forceinline__ float exponentials(float (&s)[8], float top) {
    const float base = top == -INF_F ? 0.0f : top;
    float sum = 0;
#pragma unroll
    for (int j = 0; j < 8; ++j) sum += s[j] = expf(s[j] - base);
    return sum;
}

// Combines the partials of LANES neighbouring lanes.
template <int LANES>
__device__ __forceinline__ SoftmaxPartial reduce_lanes(SoftmaxPartial own) {
    float top = own.top;
#pragma unroll
    for (int d = LANES / 2; d; d /= 2) top = fmaxf(top, __shfl_xor_sync(FULL, top, d));
    float sum = own.sum * own.factor(top);
#pragma unroll
    for (int d = LANES / 2; d; d /= 2) sum += __shfl_xor_sync(FULL, sum, d);
    return {top, sum};
}

template <int THREADS>
__device__ __forceinline__ SoftmaxPartial reduce_block(SoftmaxPartial own) {
    own = reduce_lanes<(THREADS < WARP ? THREADS : WARP)>(own);
    if constexpr (THREADS > WARP) {
        constexpr int WARPS = THREADS / WARP;
        __shared__ SoftmaxPartial parts[WARPS];
        if (threadIdx.x % WARP == 0) parts[threadIdx.x / WARP] = own;
        sync_threads<THREADS>();
        own = reduce_lanes<WARPS>(parts[threadIdx.x % WARPS]);
    }
    return own;
}

template <int CLUSTER>
__device__ __forceinline__ SoftmaxPartial reduce_cluster(SoftmaxPartial own) {
    if constexpr (CLUSTER > 1) {
        __shared__ float top, sum;
        if (threadIdx.x == 0) top = own.top, sum = own.sum;
        cluster_sync<CLUSTER>();
        const int rank = threadIdx.x % CLUSTER;
        own = reduce_lanes<CLUSTER>({ld_shared_cluster<CLUSTER>(&top, rank), ld_shared_cluster<CLUSTER>(&sum, rank)});
        cluster_sync<CLUSTER>();  // no block may end while others read its shared memory
    }
    return own;
}

// The minimum of resident blocks per SM. A bf16 row that a cluster shares takes more registers than two blocks have.
template <class T, bool WHOLE>
constexpr int softmax_blocks(int threads, int vectors, int cluster) {
    return WHOLE && !(IS_BFLOAT16<T> && cluster > 1) ? resident_blocks(threads, vectors) : 1;
}

// THREADS threads in each of CLUSTER blocks hold a row in VECTORS vectors of eight each: k <= 8 * VECTORS * THREADS *
// CLUSTER. Rows of few threads share a block. out may be x.
template <class T, bool WHOLE, int THREADS, int VECTORS, int CLUSTER>
__global__ void __launch_bounds__(THREADS > 128 ? THREADS : 128, softmax_blocks<T, WHOLE>(THREADS, VECTORS, CLUSTER))
    softmax(
        const T* x, long long pitch, float scale, const float* bias, long long bias_pitch, const unsigned char* mask,
        long long mask_pitch, T* out, long long out_pitch, int bias_repeat, int bias_count, int mask_repeat,
        int mask_count, int rows, int k) {
    launch_dependent_grids();
    wait_on_dependent_grids();
    const int index = blockIdx.x / CLUSTER * (blockDim.x / THREADS) + threadIdx.x / THREADS;
    const int part = blockIdx.x % CLUSTER * THREADS + threadIdx.x % THREADS;
    const long long row = min(index, rows - 1);
    const int written = index < rows ? k : 0;
    const auto column_of = [part](int i) { return (i * CLUSTER * THREADS + part) * 8; };
    float s[VECTORS][8];
    const Scores<T> scores = {
        x, pitch, scale, bias, bias_pitch, mask, mask_pitch, {bias_repeat, bias_count}, {mask_repeat, mask_count}, k};
    scores.template read<WHOLE>(row, column_of, s);
    float top = -INF_F;
#pragma unroll
    for (int i = 0; i < VECTORS; ++i)
#pragma unroll
        for (int j = 0; j < 8; ++j) top = fmaxf(top, s[i][j]);
    SoftmaxPartial own = {top, 0.0f};
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) own.sum += exponentials(s[i], top);
    const SoftmaxPartial whole = reduce_cluster<CLUSTER>(reduce_block<THREADS>(own));
    const float factor = whole.sum == 0 ? 0.0f : __fdiv_rn(own.factor(whole.top), whole.sum);
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
#pragma unroll
        for (int j = 0; j < 8; ++j) s[i][j] = __fmul_rn(s[i][j], factor);
        if constexpr (WHOLE)
            store_vector(out + row * out_pitch, column_of(i), written, s[i]);
        else
            store_some(out + row * out_pitch + column_of(i), written - column_of(i), false, s[i]);
    }
}

// A row of any width, read twice; a block handles one row. out may be x.
template <class T, bool WHOLE>
__global__ void __launch_bounds__(512) softmax_two_pass(
    const T* x, long long pitch, float scale, const float* bias, long long bias_pitch, const unsigned char* mask,
    long long mask_pitch, T* out, long long out_pitch, int bias_repeat, int bias_count, int mask_repeat, int mask_count,
    int k) {
    launch_dependent_grids();
    wait_on_dependent_grids();
    const long long row = blockIdx.x;
    const Scores<T> scores = {
        x, pitch, scale, bias, bias_pitch, mask, mask_pitch, {bias_repeat, bias_count}, {mask_repeat, mask_count}, k};
    SoftmaxPartial own = {-INF_F, 0.0f};
    float s[1][8];
    for (int column = threadIdx.x * 8; column < k; column += 512 * 8) {
        scores.template read<WHOLE>(row, [column](int) { return column; }, s);
        float top = own.top;
#pragma unroll
        for (int j = 0; j < 8; ++j) top = fmaxf(top, s[0][j]);
        own.sum = own.sum * own.factor(top) + exponentials(s[0], top);
        own.top = top;
    }
    const SoftmaxPartial whole = reduce_block<512>(own);
    const float factor = whole.sum == 0 ? 0.0f : __fdiv_rn(1.0f, whole.sum);
    for (int column = threadIdx.x * 8; column < k; column += 512 * 8) {
        scores.template read<WHOLE>(row, [column](int) { return column; }, s);
        exponentials(s[0], whole.top);
#pragma unroll
        for (int j = 0; j < 8; ++j) s[0][j] = __fmul_rn(s[0][j], factor);
        store_some(out + row * out_pitch + column, k - column, WHOLE, s[0]);
    }
}
