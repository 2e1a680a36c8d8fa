// Attention of several new tokens per sequence over the key-value cache, with a running softmax
// (https://arxiv.org/abs/2205.14135, https://arxiv.org/abs/2307.08691): no scores in memory.
//
// A block owns BM rows of one key-value head of one sequence. The query heads that share a key-value head are packed
// into the rows: row r is query token r / group under head r % group. So grouped heads fill a tile even where there are
// few tokens, and a tile's rows lie close in position, which leaves little to mask. Keys and values pass through shared
// memory in tiles of BN; the next keys arrive while values are multiplied, and the other way around.
#include "common.cuh"

namespace bminf {

__device__ __forceinline__ unsigned shared_address(const void* p) {
    return static_cast<unsigned>(__cvta_generic_to_shared(p));
}

// 16 bytes from global to shared memory, or zeros.
__device__ __forceinline__ void copy16(__half* target, const __half* source, bool valid) {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                 ::"r"(shared_address(target)), "l"(source), "r"(valid ? 16 : 0) : "memory");
#else
    *reinterpret_cast<uint4*>(target) = valid ? *reinterpret_cast<const uint4*>(source) : make_uint4(0, 0, 0, 0);
#endif
}

// Until this thread's copies have arrived.
__device__ __forceinline__ void wait_for_copies() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_all;" ::: "memory");
#endif
}

// Four 8x8 matrices, whose rows' addresses come from eight threads each.
__device__ __forceinline__ void load_matrices(unsigned (&x)[4], const __half* p) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(shared_address(p)) : "memory");
}

__device__ __forceinline__ void load_transposed(unsigned (&x)[4], const __half* p) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(shared_address(p)) : "memory");
}

// c += a @ b for a [16, 16], b [16, 8].
__device__ __forceinline__ void multiply_add(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
#if __CUDA_ARCH__ >= 800
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#else
    const unsigned b[2] = {b0, b1};
#pragma unroll
    for (int i = 0; i < 2; ++i)
        asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 "
            "{%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a[2 * i]), "r"(a[2 * i + 1]), "r"(b[i]));
#endif
}

__device__ __forceinline__ float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ unsigned pack(float a, float b) {
    const __half2 pair = __floats2half2_rn(a, b);
    return *reinterpret_cast<const unsigned*>(&pair);
}

// A tile of keys or values: COUNT rows of D, contiguous in the cache; zeros from row `valid` on, because what was never
// written there may be NaN. The pitch is an odd number of 16 bytes, so eight rows lie in different banks.
template <int D, int COUNT, int THREADS>
__device__ __forceinline__ void copy_tile(__half* tile, const __half* source, int valid) {
    constexpr int CHUNKS = D / 8;
#pragma unroll
    for (int i = 0; i < (COUNT * CHUNKS + THREADS - 1) / THREADS; ++i) {
        const int chunk = i * THREADS + threadIdx.x, row = chunk / CHUNKS;
        if (COUNT * CHUNKS % THREADS == 0 || row < COUNT) {
            const bool here = row < valid;
            copy16(tile + (chunk + row) * 8, here ? source + chunk * 8 : source, here);
        }
    }
}

// The tile of rows that a block owns. Row r of a sequence is query token r / group under head r % group of the key-value
// head; `before` tokens of the sequence were in the cache already.
struct Tile {
    int first, rows, group, before, window;

    __device__ __forceinline__ int position(int row) const { return before + row / group; }
    __device__ __forceinline__ bool hides(int row, int key) const {
        const int behind = position(row) - key;
        return behind < 0 || (window && behind >= window);
    }
};

// A warp's queries, MT pieces of 16 rows: kept in registers where there is room, else read again for each tile of keys.
template <int MT, int D>
struct Queries {
    static constexpr bool KEPT = MT * D <= 64;
    const __half* rows;  // in shared memory, this thread's row and column of a load
    unsigned kept[KEPT ? D / 16 : 1][MT][4];

    __device__ __forceinline__ void read(unsigned (&a)[MT][4], int k) const {
#pragma unroll
        for (int m = 0; m < MT; ++m) load_matrices(a[m], rows + m * 16 * (D + 8) + k * 16);
    }
    __device__ __forceinline__ void keep() {
        if constexpr (KEPT) {
#pragma unroll
            for (int k = 0; k < D / 16; ++k) read(kept[k], k);
        }
    }
    __device__ __forceinline__ void get(unsigned (&a)[MT][4], int k) const {
        if constexpr (KEPT) {
#pragma unroll
            for (int m = 0; m < MT; ++m)
#pragma unroll
                for (int j = 0; j < 4; ++j) a[m][j] = kept[k][m][j];
        } else {
            read(a, k);
        }
    }
};

// Scores of a warp's queries and a tile's keys. Of each 16 rows a thread holds lane / 4 and that plus 8, and of each 8
// columns two from lane % 4 * 2 on: s[m][n] = {row, column}, {row, column + 1}, {row + 8, column}, {row + 8, column + 1}.
template <int MT, int D, int N>
__device__ __forceinline__ void score(float (&s)[MT][N][4], const Queries<MT, D>& queries, const __half* k_rows) {
#pragma unroll
    for (int k = 0; k < D / 16; ++k) {
        unsigned a[MT][4];
        queries.get(a, k);
#pragma unroll
        for (int n = 0; n < N / 2; ++n) {
            unsigned b[4];
            load_matrices(b, k_rows + n * 16 * (D + 8) + k * 16);
#pragma unroll
            for (int m = 0; m < MT; ++m) {
                multiply_add(s[m][2 * n], a[m], b[0], b[1]);
                multiply_add(s[m][2 * n + 1], a[m], b[2], b[3]);
            }
        }
    }
}

template <int MT, int N>
__device__ __forceinline__ void hide(float (&s)[MT][N][4], const Tile& tile, int row, int key) {
#pragma unroll
    for (int m = 0; m < MT; ++m)
#pragma unroll
        for (int n = 0; n < N; ++n)
#pragma unroll
            for (int j = 0; j < 4; ++j)
                if (tile.hides(row + m * 16 + j / 2 * 8, key + n * 8 + j % 2)) s[m][n][j] = -INF_F;
}

// The running softmax of one query row. Each of the four threads that share a row keeps the part of `total` it summed.
struct Running {
    float top = -INF_F, total = 0.0f;
};

// Scores become weights relative to the largest score so far, and what was summed before shrinks accordingly. Columns
// 2 * h and 2 * h + 1 of every piece belong to the row. scale includes log2(e).
template <int N, int C>
__device__ __forceinline__ void soften(Running& running, float (&s)[N][4], float (&o)[C][4], int h, float scale) {
    float top = running.top;
#pragma unroll
    for (int n = 0; n < N; ++n) top = fmaxf(top, fmaxf(s[n][2 * h], s[n][2 * h + 1]));
    top = fmaxf(top, __shfl_xor_sync(FULL, top, 1));
    top = fmaxf(top, __shfl_xor_sync(FULL, top, 2));
    // A row that has seen no key yet has -inf, from which nothing can be subtracted.
    const float shift = top == -INF_F ? 0.0f : top * scale;
    const float shrink = exp2_fast(running.top * scale - shift);
    float total = 0.0f;
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
        for (int j = 2 * h; j < 2 * h + 2; ++j) {
            s[n][j] = exp2_fast(s[n][j] * scale - shift);
            total += s[n][j];
        }
    running.top = top, running.total = running.total * shrink + total;
#pragma unroll
    for (int c = 0; c < C; ++c) o[c][2 * h] *= shrink, o[c][2 * h + 1] *= shrink;
}

// o += weights @ values; the weights, rounded to fp16, lie in registers as a product wants them.
template <int MT, int D, int N>
__device__ __forceinline__ void add_values(float (&o)[MT][D / 8][4], const float (&s)[MT][N][4], const __half* v_rows) {
#pragma unroll
    for (int k = 0; k < N / 2; ++k) {
        unsigned p[MT][4];
#pragma unroll
        for (int m = 0; m < MT; ++m)
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const float* const pair = s[m][2 * k + j / 2] + j % 2 * 2;
                p[m][j] = pack(pair[0], pair[1]);
            }
#pragma unroll
        for (int n = 0; n < D / 16; ++n) {
            unsigned b[4];
            load_transposed(b, v_rows + k * 16 * (D + 8) + n * 16);
#pragma unroll
            for (int m = 0; m < MT; ++m) {
                multiply_add(o[m][2 * n], p[m], b[0], b[1]);
                multiply_add(o[m][2 * n + 1], p[m], b[2], b[3]);
            }
        }
    }
}

// Eight columns from `column` on of one output row, as far as the row has them.
__device__ __forceinline__ void write8(__half* row, const __half* eight, int column, int head_dim) {
    if (head_dim % 8 == 0) {
        if (column < head_dim) *reinterpret_cast<uint4*>(row + column) = *reinterpret_cast<const uint4*>(eight);
    } else {
#pragma unroll
        for (int j = 0; j < 8; ++j) if (column + j < head_dim) row[column + j] = eight[j];
    }
}

// q: fp16, token t at q + t * q_pitch, heads of D. keys, values: fp16 [slots, kv_heads, capacity, D]. out: fp16, token t
// at out + t * out_pitch, heads of head_dim <= D. Sequence b owns tokens starts[b] to starts[b + 1], which stand at
// positions from past[b] on and in slot slots[b]. scale: what scores are multiplied by, times log2(e); positive. window:
// how many keys a query sees, 0 for all up to its own. D, BN: multiples of 16; BM: of 16 * WARPS.
// Grid: (tiles of the longest sequence * kv_heads, sequences). Dynamic shared memory: BM + 2 * BN rows of D + 8.
template <int D, int BM, int BN, int WARPS, int BLOCKS>
__global__ void __launch_bounds__(WARPS * WARP, BLOCKS) attend_prefill(
    const __half* __restrict__ q, long long q_pitch, const __half* __restrict__ keys, const __half* __restrict__ values,
    __half* __restrict__ out, long long out_pitch, const int* __restrict__ starts, const int* __restrict__ past,
    const int* __restrict__ slots, float scale, int window, int heads, int kv_heads, int head_dim, int capacity)
{
    constexpr int THREADS = WARPS * WARP, PITCH = D + 8, CHUNKS = D / 8, MT = BM / (16 * WARPS);
    extern __shared__ __align__(16) __half shared[];
    __half* const q_tile = shared;
    __half* const k_tile = q_tile + BM * PITCH;
    __half* const v_tile = k_tile + BN * PITCH;
    const int lane = threadIdx.x % WARP, warp_row = threadIdx.x / WARP * MT * 16;
    const int head = blockIdx.x % kv_heads, group = heads / kv_heads, sequence = blockIdx.y;

    wait_for_predecessor();
    const int start = starts[sequence], rows = (starts[sequence + 1] - start) * group;
    // The last tile sees the most keys, so it starts first.
    const int index = (rows + BM - 1) / BM - 1 - static_cast<int>(blockIdx.x) / kv_heads;
    if (index < 0) return;
    const Tile tile = {index * BM, rows, group, past[sequence], window};
    const int first_position = tile.position(tile.first);
    const int last_position = tile.position(min(tile.first + BM, rows) - 1), end = last_position + 1;
    const int begin = window ? max(0, first_position - window + 1) / BN * BN : 0;
    const size_t cached = (static_cast<size_t>(slots[sequence]) * kv_heads + head) * capacity;
    keys += cached * D, values += cached * D;
    q += start * q_pitch + head * group * D;
    out += start * out_pitch + head * group * head_dim;

#pragma unroll 4
    for (int i = threadIdx.x; i < BM * CHUNKS; i += THREADS) {
        const int local = i / CHUNKS, column = i % CHUNKS * 8, row = tile.first + local, token = row / group;
        const bool valid = row < rows;
        copy16(q_tile + local * PITCH + column, valid ? q + token * q_pitch + (row - token * group) * D + column : q, valid);
    }
    copy_tile<D, BN, THREADS>(k_tile, keys + static_cast<size_t>(begin) * D, end - begin);

    Queries<MT, D> queries = {q_tile + (warp_row + lane % 16) * PITCH + lane / 16 * 8};
    const __half* const k_rows = k_tile + (lane / 16 * 8 + lane % 8) * PITCH + lane / 8 % 2 * 8;
    const __half* const v_rows = v_tile + lane % 16 * PITCH + lane / 16 * 8;
    Running running[MT][2];
    float o[MT][CHUNKS][4] = {};
    for (int key = begin; key < end; key += BN) {
        wait_for_copies();
        __syncthreads();
        copy_tile<D, BN, THREADS>(v_tile, values + static_cast<size_t>(key) * D, end - key);
        if (key == begin) queries.keep();
        float s[MT][BN / 8][4] = {};
        score(s, queries, k_rows);
        wait_for_copies();
        __syncthreads();
        if (key + BN < end) copy_tile<D, BN, THREADS>(k_tile, keys + static_cast<size_t>(key + BN) * D, end - key - BN);
        if (key + BN - 1 > first_position || (window && key <= last_position - window))
            hide(s, tile, tile.first + warp_row + lane / 4, key + lane % 4 * 2);
#pragma unroll
        for (int m = 0; m < MT; ++m)
#pragma unroll
            for (int h = 0; h < 2; ++h) soften(running[m][h], s[m], o[m], h, scale);
        add_values<MT, D>(o, s, v_rows);
    }
    let_successor_start();

    // Through the warp's own rows of the query tile, so that memory is written a row at a time.
#pragma unroll
    for (int m = 0; m < MT; ++m)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            float total = running[m][h].total;
            total += __shfl_xor_sync(FULL, total, 1);
            total += __shfl_xor_sync(FULL, total, 2);
            const float inverse = total == 0.0f ? 0.0f : 1.0f / total;
            __half* const row = q_tile + (warp_row + m * 16 + h * 8 + lane / 4) * PITCH + lane % 4 * 2;
#pragma unroll
            for (int c = 0; c < CHUNKS; ++c)
                *reinterpret_cast<unsigned*>(row + c * 8) = pack(o[m][c][2 * h] * inverse, o[m][c][2 * h + 1] * inverse);
        }
    __syncwarp();
#pragma unroll 4
    for (int i = lane; i < MT * 16 * CHUNKS; i += WARP) {
        const int local = warp_row + i / CHUNKS, column = i % CHUNKS * 8, row = tile.first + local, token = row / group;
        __half* const target = out + token * out_pitch + (row - token * group) * head_dim;
        if (row < rows) write8(target, q_tile + local * PITCH + column, column, head_dim);
    }
}

}  // namespace bminf
