// Attention in both directions of packed texts (FlashAttention-3, https://arxiv.org/abs/2407.08608) by wgmma, on
// compute capability 9.0:
//
//     out = softmax(scale * q @ keys.T) @ values
//
// for the tokens of a step, each of which sees those of its own text; see PrefillParams for shapes. Scores stay in
// registers, with an online softmax.
//
// Texts are short, so what decides is that nothing waits between pieces of work. A block has two warpgroups with 64
// rows each of a piece, and two blocks share an SM: while one warpgroup computes its softmax, others multiply. The
// first warp finds work two pieces ahead and its first thread starts copies of keys and values, two tiles ahead, also
// those of the next pieces; queries of the next piece are copied while one is computed. A warpgroup without rows only
// takes part in the pipeline.
#include "attention/prefill_wgmma.cuh"

namespace bminf {

constexpr int PIECES = 8;  // in the queue: two ahead of the first warp, and up to three behind it

// Synchronises a warpgroup.
__device__ __forceinline__ void warpgroup_sync() {
    asm volatile("bar.sync %0, %1;" ::"r"(1 + static_cast<int>(threadIdx.x) / WARPGROUP), "n"(WARPGROUP) : "memory");
}

// The pieces of work of a block in order: piece k lies in tiles[k % PIECES], and group = 0 marks the end. The first
// warp puts them there. It does not overwrite what others read: they are at most two tiles of keys behind it, because
// its thread waits for stages.
struct PieceQueue {
    WorkTile* tiles;
    unsigned barriers;

    __device__ __forceinline__ unsigned full(int k) const { return barriers + k % PIECES * 8; }
    __device__ __forceinline__ WorkTile& tile(int k) const { return tiles[k % PIECES]; }
    __device__ __forceinline__ const WorkTile& get(int k) const {
        mbarrier_wait(full(k), k / PIECES % 2);
        return tile(k);
    }
};

// What the first warp keeps to find work: the index of the next piece, in lane 0, and its place among sequences.
template <int ROWS, int BN>
struct PieceFinder {
    int index;
    WorkCursor cursor;
    bool has_ended = false;

    // Puts piece k into the queue, if there is none the end. Called by the whole warp, for each k in order.
    __device__ __forceinline__ void put(const PrefillParams& p, const PieceQueue& queue, int k) {
        if (has_ended) return;
        const int taken = __shfl_sync(FULL, index, 0);
        WorkTile work = {};
        has_ended = find_work_tile<BIDIRECTIONAL, ROWS, BN>(
                        p, {1 << 28, 1 << 28}, taken % p.kv_heads, taken / p.kv_heads, cursor, work) != FOUND;
        if (threadIdx.x == 0) {
            if (has_ended) {
                work.group = 0;
                end_work(p, gridDim.x);
            } else {
                index = gridDim.x + atomicAdd(p.counters, 1);  // used a piece later
            }
            queue.tile(k) = work;
            mbarrier_arrive(queue.full(k));
        }
        __syncwarp();
    }
};

// The pipeline: tile t of keys and of values lie in stage t % STAGES. Keys and values have a barrier `full` each, when
// they are there, and share a barrier `empty`, when all warps have read both.
template <int D, int BN, int STAGES>
struct TilePipeline {
    __half* tiles;
    unsigned barriers;

    static constexpr int TILE = D * BN, BARRIERS = 3 * STAGES;
    __device__ __forceinline__ unsigned tile(unsigned t, bool value) const {
        return cast_smem_ptr_to_uint(data(t, value));
    }
    __device__ __forceinline__ __half* data(unsigned t, bool value) const {
        return tiles + (t % STAGES * 2 + value) * TILE;
    }
    __device__ __forceinline__ unsigned full(unsigned t, bool value) const {
        return barriers + (t % STAGES * 2 + value) * 8;
    }
    __device__ __forceinline__ unsigned empty(unsigned t) const { return barriers + (2 * STAGES + t % STAGES) * 8; }
    __device__ __forceinline__ void init(int warps) const {
        for (int i = 0; i < 2 * STAGES; ++i) mbarrier_init(barriers + i * 8, 1);
        for (int i = 0; i < STAGES; ++i) mbarrier_init(empty(i), warps);
    }
    __device__ __forceinline__ void wait(unsigned t, bool value) const {
        mbarrier_wait(full(t, value), t / STAGES % 2);
    }
    // A warp has completed its reads of a tile of keys and of values.
    __device__ __forceinline__ void release(unsigned t) const {
        if (threadIdx.x % WARP == 0) mbarrier_arrive(empty(t));
    }
};

// The next tile that the first warp copies.
struct NextTile {
    int piece = 0, key = -1;  // -1: the first of the piece
    unsigned t = 0;

    // Starts the copy, once the stage is free. Called by the whole warp.
    template <int D, int BN, int STAGES>
    __device__ __forceinline__ void copy(
        const TilePipeline<D, BN, STAGES>& pipeline, const PieceQueue& queue, const TensorMap& keys,
        const TensorMap& values) {
        const WorkTile& work = queue.tile(piece);
        if (work.group == 0) return;
        if (key < 0) key = work.begin;
        if (t >= STAGES) mbarrier_wait(pipeline.empty(t), (t / STAGES - 1) % 2);
        if (threadIdx.x == 0) {
#pragma unroll
            for (int value = 0; value < 2; ++value) {
                const unsigned full = pipeline.full(t, value);
                mbarrier_arrive_expect_tx(full, BN * D * 2);
#pragma unroll
                for (int c = 0; c < D; c += COLUMNS)
                    tma_load_2d(
                        pipeline.tile(t, value) + c * BN * 2, value ? values : keys, work.head * D + c,
                        work.start + key, full);
            }
        }
        __syncwarp();
        ++t, key += BN;
        if (key >= work.end) ++piece, key = -1;
    }
};

// D: 64. STAGES: at least 4. BLOCKS: per SM. CACHE: __half. key_map, value_map: tensor maps of the step's keys and
// values, [T, kv_heads * D] in boxes of 64 rows. Dynamic shared memory: 256 + 2 * STAGES * 64 rows of D fp16, and 1024
// bytes to align them. The running result is in p.running.
template <int D, int STAGES, int BLOCKS, class CACHE>
__global__ void __launch_bounds__(2 * WARPGROUP, BLOCKS) attention_packed_hopper(
    const __grid_constant__ PrefillParams p, const __grid_constant__ TensorMap key_map,
    const __grid_constant__ TensorMap value_map) {
    constexpr int BM = 128, BN = 64, CHUNKS = D / 8, AHEAD = 2;
    static_assert(!IS_INT8<CACHE> && STAGES >= AHEAD + 2);
    using Pipeline = TilePipeline<D, BN, STAGES>;
    extern __shared__ __align__(16) char shared[];
    __shared__ __align__(8) unsigned long long barriers[Pipeline::BARRIERS + PIECES];
    __shared__ WorkTile pieces[PIECES];
    __half* const q_tiles = reinterpret_cast<__half*>(shared + (1024 - cast_smem_ptr_to_uint(shared) % 1024) % 1024);
    const Pipeline pipeline = {q_tiles + 2 * BM * D, cast_smem_ptr_to_uint(barriers)};
    const PieceQueue queue = {pieces, cast_smem_ptr_to_uint(barriers + Pipeline::BARRIERS)};
    if (threadIdx.x == 0) {
        pipeline.init(2 * WARPGROUP / WARP);
        for (int k = 0; k < PIECES; ++k) mbarrier_init(queue.full(k), 1);
        fence_mbarrier_init();
        prefetch_tensormap(key_map), prefetch_tensormap(value_map);
    }
    __syncthreads();
    wait_on_dependent_grids();

    const int thread = threadIdx.x % WARPGROUP, lane = threadIdx.x % WARP;
    const int group = __shfl_sync(FULL, threadIdx.x / WARPGROUP, 0);  // a shuffle tells the compiler that warps agree
    const int warp = __shfl_sync(FULL, threadIdx.x / WARP, 0), row = group * 64, warp_row = warp * 16;
    PieceFinder<BM, BN> finder = {static_cast<int>(blockIdx.x)};
    NextTile next;
    if (warp == 0) {
#pragma unroll 1
        for (int k = 0; k < AHEAD; ++k) finder.put(p, queue, k);
#pragma unroll 1
        for (int i = 0; i < AHEAD; ++i) next.copy(pipeline, queue, key_map, value_map);
    }
    const auto copy_ahead = [&] {
        if (warp == 0) next.copy(pipeline, queue, key_map, value_map);
    };
    const auto copy_queries = [&](int k) {
        const WorkTile& work = queue.get(k);
        __half* const q_tile = q_tiles + k % 2 * BM * D;
        if (work.first + row < work.rows) {
#pragma unroll
            for (int i = thread; i < 64 * CHUNKS; i += WARPGROUP) {
                const int r = row + i / CHUNKS;
                copy_query<D>(q_tile + swizzled_offset<BM>(r, i % CHUNKS), work, p, work.first + r, i % CHUNKS * 8);
            }
        }
    };
    unsigned count = 0;  // tiles of the pieces before
    if (queue.get(0).group) copy_queries(0);
#pragma unroll 1
    for (int k = 0;; ++k) {
        const WorkTile& work = queue.get(k);
        if (work.group == 0) break;
        if (warp == 0) finder.put(p, queue, k + AHEAD);
        cp_async_wait_all();
        fence_proxy_async();
        warpgroup_sync();  // also: the outputs of piece k - 1 have been read from its tile of queries
        if (queue.get(k + 1).group) copy_queries(k + 1);
        const int begin = work.begin, end = work.end, tiles = ceil_div(end - begin, BN);
        const unsigned last = count + tiles - 1;
        if (work.first + row >= work.rows) {
#pragma unroll 1
            for (unsigned t = count; t != last + 1; ++t) {
                pipeline.wait(t, false), pipeline.wait(t, true);
                pipeline.release(t);
            }
            count = last + 1;
            continue;
        }
        __half* const q_tile = q_tiles + k % 2 * BM * D;
        const unsigned q = cast_smem_ptr_to_uint(q_tile) + row * COLUMNS * 2;
        const int window = work.window;
        RunningResult<CHUNKS, false> running = {fragment_of<D>(p.running + blockIdx.x * (BM * D), warp_row)};
        SoftmaxState state;
        float o[CHUNKS][4], s[BN / 8][4], rescale[2];
        unsigned w[BN / 16][4];
        bool add = false;  // whether o holds outputs of the segment
        const auto softmax = [&](int key) {
            if (key + BN > end) mask_keys_from(s, end - key);
            if (window) {
                const int first = work.first + warp_row + lane / 4;
                const int position[2] = {work.position(first), work.position(first + 8)};
                apply_window_mask(s, position, key, window);
            }
            online_softmax(state, s, rescale, p.scale);
        };
        const auto round_weights = [&] {
#pragma unroll
            for (int i = 0; i < BN / 16; ++i) weights_fragment(w[i], s, i);
        };

        pipeline.wait(count, false);
        gemm_qk<D, BM, BN>(s, q, pipeline.tile(count, false));
        copy_ahead();
        wgmma_wait_group<0>();
        warpgroup_fence_operand(s);
        softmax(begin);
        round_weights();
        int key = begin;
#pragma unroll 1
        for (unsigned t = count + 1; t != last + 1; ++t) {
            key += BN;
            if (key % SEGMENT == 0) {
                pipeline.wait(t - 1, true);
                gemm_pv<D, BN>(o, w, pipeline.tile(t - 1, true), add);
                wgmma_wait_group<0>();
                warpgroup_fence_operand(o);
                end_segment<D, BM>(p, work, key / SEGMENT - 1, warp_row, state, o, running);
                state = {};
                pipeline.wait(t, false);
                gemm_qk<D, BM, BN>(s, q, pipeline.tile(t, false));
                pipeline.release(t - 1);
                copy_ahead();
                wgmma_wait_group<0>();
                warpgroup_fence_operand(s);
                softmax(key);
                add = false;
            } else {
                pipeline.wait(t, false);
                gemm_qk<D, BM, BN>(s, q, pipeline.tile(t, false));
                pipeline.wait(t - 1, true);
                gemm_pv<D, BN>(o, w, pipeline.tile(t - 1, true), add);
                copy_ahead();
                wgmma_wait_group<1>();
                warpgroup_fence_operand(s);
                softmax(key);
                wgmma_wait_group<0>();
                warpgroup_fence_operand(o);
                pipeline.release(t - 1);
                multiply_rows(o, rescale);
                add = true;
            }
            round_weights();
        }
        pipeline.wait(last, true);
        if (const int valid = end - key; valid < BN) {  // behind them are values of another text
            clear_rows_from<D, BN>(pipeline.data(last, true), valid);
            warpgroup_sync();
        }
        gemm_pv<D, BN>(o, w, pipeline.tile(last, true), add);
        wgmma_wait_group<0>();
        warpgroup_fence_operand(o);
        pipeline.release(last);
        count = last + 1;

        // The outputs go through the warp's own rows of the query tile, so that stores to global memory are coalesced.
        end_last_segment<D, BM, PLAIN>(p, work, warp_row, state, o, running);
#pragma unroll
        for (int n = 0; n < CHUNKS; ++n)
#pragma unroll
            for (int h = 0; h < 2; ++h)
                *reinterpret_cast<unsigned*>(
                    q_tile + swizzled_offset<BM>(warp_row + h * 8 + lane / 4, n) + lane % 4 * 2) =
                    pack_half2(o[n][2 * h], o[n][2 * h + 1]);
        __syncwarp();
#pragma unroll 4
        for (int i = lane; i < 16 * CHUNKS; i += WARP)
            store_output(
                work, p, work.first + warp_row + i / CHUNKS, i % CHUNKS * 8,
                q_tile + swizzled_offset<BM>(warp_row + i / CHUNKS, i % CHUNKS));
    }
    launch_dependent_grids();
}

}  // namespace bminf
