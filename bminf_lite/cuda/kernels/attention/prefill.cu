// Prefill attention (FlashAttention-2, https://arxiv.org/abs/2307.08691) by mma.sync, from compute capability 7.5 on:
//
//     out = softmax(scale * q @ keys.T + bias) @ values
//
// for ragged sequences over a paged cache; see PrefillParams for shapes. Scores stay in registers, with an online
// softmax.
//
// Blocks take work in turn; a piece of work has BM rows, each warp BM / WARPS of them, and passes over BN keys at a
// time. Large heads have two warps for a row: both compute its scores, and each a half of its outputs. Keys and values
// go through shared memory: the next keys are loaded while the values are multiplied, and the values while the keys
// are.
#include "attention/prefill.cuh"

namespace bminf {

// Loads COUNT rows of D keys or values. Rows that are not present become zero, because memory that was never written
// may hold NaN. The pitch D + 8 is an odd multiple of 16 bytes: no bank conflicts.
template <int D, int COUNT, int THREADS, int MASK>
__device__ __forceinline__ void load_tile(__half* tile, const CachedRows<D, COUNT, __half, MASK>& source) {
    constexpr int CHUNKS = D / 8;
#pragma unroll
    for (int i = 0; i < (COUNT * CHUNKS + THREADS - 1) / THREADS; ++i) {
        const int chunk = i * THREADS + threadIdx.x, row = chunk / CHUNKS;
        if (COUNT * CHUNKS % THREADS == 0 || row < COUNT) {
            const bool present = row < source.valid;
            cp_async_16(
                tile + (chunk + row) * 8, present ? source.data(row) + chunk % CHUNKS * 8 : source.pool.data, present);
        }
    }
}

// The same from int8 codes, which are dequantized on the way.
template <int D, int COUNT, int THREADS, int MASK>
__device__ __forceinline__ void load_tile(__half* tile, const CachedRows<D, COUNT, int8, MASK>& source) {
    constexpr int CHUNKS = D / 16;
#pragma unroll 4
    for (int i = threadIdx.x; i < COUNT * CHUNKS; i += THREADS) {
        const int row = i / CHUNKS;
        uint4* const target = reinterpret_cast<uint4*>(tile + row * (D + 8) + i % CHUNKS * 16);
        CodeVector raw;
        raw.load(source.data(row) + i % CHUNKS * 16, source.scale(row), row < source.valid);
        dequantize16(raw.codes, raw.scale, target[0], target[1]);
    }
}

// The queries of a warp as left operands, MT times 16 rows. They stay in registers if these suffice (KEPT), else they
// are read from shared memory for each tile of keys.
template <int MT, int D>
struct Queries {
    static constexpr bool KEPT = MT * D <= 64;
    unsigned rows;  // the shared address of this thread's row of the first piece
    unsigned kept[KEPT ? D / 16 : 1][MT][4];

    __device__ __forceinline__ void read(unsigned (&a)[MT][4], int k) const {
#pragma unroll
        for (int m = 0; m < MT; ++m) ldmatrix_x4(a[m], rows + (m * 16 * (D + 8) + k * 16) * 2);
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

// s += queries @ keys.T; k_rows: the shared address of this lane's row for ldmatrix
template <int MT, int D, int N>
__device__ __forceinline__ void gemm_qk(float (&s)[MT][N][4], const Queries<MT, D>& queries, unsigned k_rows) {
#pragma unroll
    for (int k = 0; k < D / 16; ++k) {
        unsigned a[MT][4];
        queries.get(a, k);
#pragma unroll
        for (int n = 0; n < N / 2; ++n) {
            unsigned b[4];
            ldmatrix_x4(b, k_rows + (n * 16 * (D + 8) + k * 16) * 2);
#pragma unroll
            for (int m = 0; m < MT; ++m) {
                mma_m16n8k16(s[m][2 * n], a[m], b[0], b[1]);
                mma_m16n8k16(s[m][2 * n + 1], a[m], b[2], b[3]);
            }
        }
    }
}

// o += weights @ values, W times eight columns of rows of D; v_rows: the shared address of this lane's row for ldmatrix
template <int MT, int D, int W, int N>
__device__ __forceinline__ void gemm_pv(float (&o)[MT][W][4], const float (&s)[MT][N][4], unsigned v_rows) {
#pragma unroll
    for (int k = 0; k < N / 2; ++k) {
        unsigned a[MT][4];
#pragma unroll
        for (int m = 0; m < MT; ++m) weights_fragment(a[m], s[m], k);
#pragma unroll
        for (int n = 0; n < W / 2; ++n) {
            unsigned b[4];
            ldmatrix_x4_trans(b, v_rows + (k * 16 * (D + 8) + n * 16) * 2);
#pragma unroll
            for (int m = 0; m < MT; ++m) {
                mma_m16n8k16(o[m][2 * n], a[m], b[0], b[1]);
                mma_m16n8k16(o[m][2 * n + 1], a[m], b[2], b[3]);
            }
        }
    }
}

// Finds piece `index` of the work, or the next one that is not empty, and puts the index of the one after it into
// `next`. Returns false if there is none. Called by all threads.
template <int MASK, int ROWS, int KEYS>
__device__ __forceinline__ bool find_next(
    const PrefillParams& p, const Split& split, int index, int& next, WorkCursor& cursor, WorkTile& work) {
    for (;;) {
        const int head = index % p.kv_heads, piece = index / p.kv_heads;
        const Found found = find_work_tile<MASK, ROWS, KEYS>(p, split, head, piece, cursor, work);
        if (found == NO_MORE) return false;
        __syncthreads();  // all threads have read the index before
        if (threadIdx.x == 0) next = gridDim.x + atomicAdd(p.counters, 1);
        if (found == FOUND) return true;
        __syncthreads();
        index = next;
    }
}

// The warps that share a row: the outputs of more columns would not fit in the registers of one.
template <int D>
constexpr int ROW_WARPS = D > 256 ? 2 : 1;

// BM: a multiple of 16 * WARPS / ROW_WARPS<D>; BN: a power of two, at least 16 and at most 128. BLOCKS: blocks per SM
// that must be able to run. MASK: what a query sees. SCORES: a ScoreKind. CACHE: __half or int8. Dynamic shared memory:
// BM + 2 * BN rows of D + 8 fp16. The running result is in p.running.
template <int D, int BM, int BN, int WARPS, int BLOCKS, int MASK, int SCORES, class CACHE>
__global__ void __launch_bounds__(WARPS* WARP, BLOCKS) attention_prefill(const __grid_constant__ PrefillParams p) {
    constexpr int THREADS = WARPS * WARP, PITCH = D + 8, CHUNKS = D / 8, SHARING = ROW_WARPS<D>;
    constexpr int MT = BM * SHARING / (16 * WARPS), OWN = CHUNKS / SHARING;  // a warp's pieces of rows and of columns
    extern __shared__ __align__(16) __half shared[];
    __shared__ int next;
    __half* const q_tile = shared;
    __half* const k_tile = q_tile + BM * PITCH;
    __half* const v_tile = k_tile + BN * PITCH;
    using Rows = CachedRows<D, BN, CACHE, MASK>;
    const int lane = threadIdx.x % WARP, warp_row = threadIdx.x / (WARP * SHARING) * MT * 16;
    const int first = threadIdx.x / WARP % SHARING * OWN;
    Queries<MT, D> queries = {cast_smem_ptr_to_uint(q_tile + (warp_row + lane % 16) * PITCH + lane / 16 * 8)};
    const unsigned k_rows = cast_smem_ptr_to_uint(k_tile + (lane / 16 * 8 + lane % 8) * PITCH + lane / 8 % 2 * 8);
    const unsigned v_rows = cast_smem_ptr_to_uint(v_tile + lane % 16 * PITCH + (lane / 16 + first) * 8);

    wait_on_dependent_grids();
    const Split split = find_split<MASK, BM>(p);
    WorkTile work;
    WorkCursor cursor;
    for (int index = blockIdx.x; find_next<MASK, BM, BN>(p, split, index, next, cursor, work);) {
#pragma unroll 4
        for (int i = threadIdx.x; i < BM * CHUNKS; i += THREADS) {
            const int row = i / CHUNKS, column = i % CHUNKS * 8;
            copy_query<D>(q_tile + row * PITCH + column, work, p, work.first + row, column);
        }
        auto load_keys = [&](int key) { load_tile<D, BN, THREADS>(k_tile, Rows::find(p, work, false, key)); };
        load_keys(work.begin);
        SoftmaxState state[MT];
        RunningResult<OWN, false> running[MT];
        int position[MT][2];
#pragma unroll
        for (int m = 0; m < MT; ++m) {
            running[m].vectors = fragment_of<D>(p.running + blockIdx.x * (BM * D), warp_row + m * 16) + first * WARP;
#pragma unroll
            for (int h = 0; h < 2; ++h)
                position[m][h] = work.position(work.first + warp_row + m * 16 + lane / 4 + h * 8);
        }
        const MaskedKeys masked(work, work.first);
        const bool has_rows = work.first + warp_row < work.rows;  // else this warp only loads
        float o[MT][OWN][4] = {};
        for (int key = work.begin; key < work.end; key += BN) {
            cp_async_wait_all();
            __syncthreads();
            load_tile<D, BN, THREADS>(v_tile, Rows::find(p, work, true, key));
            if (key == work.begin) {
                queries.keep();
            } else if (key % SEGMENT == 0) {
#pragma unroll
                for (int m = 0; m < MT; ++m) {
                    end_segment<D, BM>(
                        p, work, key / SEGMENT - 1, warp_row + m * 16, state[m], o[m], running[m], first);
                    set_zero(o[m]);
                    state[m] = {};
                }
            }
            float s[MT][BN / 8][4] = {};
            if (has_rows) gemm_qk(s, queries, k_rows);
            cp_async_wait_all();
            __syncthreads();
            if (key + BN < work.end) load_keys(key + BN);
            if (!has_rows) continue;
            if constexpr (CHANGES_SCORES<SCORES>) {
#pragma unroll
                for (int m = 0; m < MT; ++m)
                    change_scores<SCORES>(s[m], work, p, position[m], work.first + warp_row + m * 16, key);
            }
            const bool has_window = MASK == BIDIRECTIONAL && work.window;
            if (MASK == CAUSAL ? masked.among(key, BN) : key + BN > work.end || has_window) {
#pragma unroll
                for (int m = 0; m < MT; ++m) {
                    if constexpr (MASK == CAUSAL)
                        apply_causal_mask(s[m], position[m], key, work.window);
                    else
                        mask_keys_from(s[m], work.end - key);
                    if (has_window) apply_window_mask(s[m], position[m], key, work.window);
                }
            }
#pragma unroll
            for (int m = 0; m < MT; ++m) {
                float rescale[2];
                online_softmax(state[m], s[m], rescale, CHANGES_SCORES<SCORES> ? 1.0f : p.scale);
                multiply_rows(o[m], rescale);
            }
            gemm_pv<MT, D>(o, s, v_rows);
        }
        if (work.end <= work.begin) {  // a source without tokens: the queries may still be on their way
            cp_async_wait_all();
            __syncthreads();
        }

        // The outputs go through the warp's own rows of the query tile, so that stores to global memory are coalesced.
#pragma unroll
        for (int m = 0; m < MT; ++m) {
            if (!end_last_segment<D, BM, SCORES>(p, work, warp_row + m * 16, state[m], o[m], running[m], first))
                continue;
            __half* const row = q_tile + (warp_row + m * 16 + lane / 4) * PITCH + first * 8 + lane % 4 * 2;
#pragma unroll
            for (int n = 0; n < OWN; ++n)
#pragma unroll
                for (int h = 0; h < 2; ++h)
                    *reinterpret_cast<unsigned*>(row + h * 8 * PITCH + n * 8) =
                        pack_half2(o[m][n][2 * h], o[m][n][2 * h + 1]);
        }
        __syncwarp();
        if (work.record < 0) {
#pragma unroll 4
            for (int i = lane; i < MT * 16 * OWN; i += WARP) {
                const int row = warp_row + i / OWN, column = (first + i % OWN) * 8;
                store_output(work, p, work.first + row, column, q_tile + row * PITCH + column);
            }
        }
        __syncthreads();
        index = next;
    }
    launch_dependent_grids();
    if (threadIdx.x == 0) end_work(p, gridDim.x);
}

}  // namespace bminf
