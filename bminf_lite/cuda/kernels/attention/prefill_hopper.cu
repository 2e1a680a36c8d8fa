// Prefill attention (FlashAttention-3, https://arxiv.org/abs/2407.08608) by wgmma, on compute capability 9.0:
//
//     out = softmax(scores(scale * q @ keys.T)) @ values, with a causal mask
//
// for ragged sequences over a paged cache; see PrefillParams for shapes. Scores stay in registers, with an online
// softmax.
//
// A block is warp-specialised: a producer warpgroup finds the block's work and starts copies of keys and values into a
// pipeline of tiles of BN tokens, also those of the next piece of work while one ends; BM / 64 consumer warpgroups have
// 64 rows each. A consumer issues the scores of the next tile before the product of the weights and values of the
// present one, so that its softmax overlaps with wgmma. Two consumers take turns (named barriers), so that the products
// of one overlap with the softmax of the other ("ping-pong"). int8 codes are copied into the second half of a tile, and
// a converter warpgroup turns them into the tile.
//
// With CLUSTER == 2 the two blocks of a cluster have neighbouring BM rows each of a tile, and the same keys and values:
// each block copies a half of them into both, which halves the reads from the L2 cache. Under the limit of power that
// a long prompt meets, the energy of these reads costs time.
#include "attention/prefill_wgmma.cuh"
#include "common/cluster.cuh"

namespace bminf {

// ---- named barriers ----------------------------------------------------------------------------------------------

// A named barrier for THREADS threads, of which some wait and the others only arrive.
template <int THREADS>
__device__ __forceinline__ void named_barrier_sync(int id) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "n"(THREADS) : "memory");
}

template <int THREADS>
__device__ __forceinline__ void named_barrier_arrive(int id) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "n"(THREADS) : "memory");
}

// ---- registers ---------------------------------------------------------------------------------------------------

// Registers of a thread of each role. Two warpgroups on an SM have enough without exchange, and 0 stands for that.
template <int D, int GROUPS, class CACHE>
struct Registers {
    static constexpr int WARPGROUPS = GROUPS + IS_INT8<CACHE> + 1, EACH = 65536 / WARPGROUP / WARPGROUPS / 8 * 8;
    static constexpr bool SCARCE = D > 128 && GROUPS > 1;  // outputs take 128 registers of a consumer
    static constexpr int PRODUCER = WARPGROUPS == 2 ? 0 : !IS_INT8<CACHE> ? 56 : SCARCE ? 24 : 40;
    static constexpr int CONVERTER = !IS_INT8<CACHE> ? 0 : SCARCE ? 56 : 72;
    static constexpr int LEFT = (EACH * WARPGROUPS - PRODUCER - CONVERTER) / GROUPS / 8 * 8;
    static constexpr int CONSUMER = WARPGROUPS == 2 ? 0 : LEFT < 240 ? LEFT : 240;
};

// Gives registers of a warpgroup's threads back, or takes more.
template <int COUNT>
__device__ __forceinline__ void set_registers() {
    if constexpr (COUNT >= 160)
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
    else if constexpr (COUNT != 0)
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}

// ---- tiles -------------------------------------------------------------------------------------------------------

// The pipeline: tile t of keys and tile t of values lie in stage t % STAGES. Each has a barrier `full`, when consumers
// may read it, and a barrier `empty`, when all consumers of the cluster have read it. An int8 tile has a barrier
// `copied` too, when its codes and scales are there; each thread of the converter arrives at its barrier `full`.
template <int D, int BN, int STAGES, int CLUSTER, class CACHE>
struct KVPipeline {
    __half* tiles;
    __half* all_scales;
    unsigned barriers;

    static constexpr int TILE = D * BN, BARRIERS = (IS_INT8<CACHE> ? 6 : 4) * STAGES;
    __device__ __forceinline__ static int place(unsigned t, bool value) { return t % STAGES * 2 + value; }
    __device__ __forceinline__ __half* tile(unsigned t, bool value) const { return tiles + place(t, value) * TILE; }
    __device__ __forceinline__ int8* codes(unsigned t, bool value) const {
        return reinterpret_cast<int8*>(tile(t, value) + TILE / 2);
    }
    __device__ __forceinline__ __half* scales(unsigned t, bool value) const {
        return all_scales + place(t, value) * BN;
    }
    __device__ __forceinline__ unsigned full(unsigned t, bool value) const { return barriers + place(t, value) * 8; }
    __device__ __forceinline__ unsigned empty(unsigned t, bool value) const { return full(t, value) + STAGES * 16; }
    __device__ __forceinline__ unsigned copied(unsigned t, bool value) const { return full(t, value) + STAGES * 32; }

    // The number of consumer warps of a block that arrive.
    __device__ __forceinline__ void init(int consumers) const {
        for (int i = 0; i < STAGES * 2; ++i) {
            mbarrier_init(barriers + i * 8, IS_INT8<CACHE> ? WARPGROUP : 1);
            mbarrier_init(barriers + (STAGES * 2 + i) * 8, consumers * CLUSTER);
            if (IS_INT8<CACHE>) mbarrier_init(barriers + (STAGES * 4 + i) * 8, 1);
        }
    }
    __device__ __forceinline__ void converter_wait(unsigned t, bool value) const {
        mbarrier_wait(copied(t, value), t / STAGES % 2);
    }
    __device__ __forceinline__ void consumer_wait(unsigned t, bool value) const {
        mbarrier_wait(full(t, value), t / STAGES % 2);
    }
    __device__ __forceinline__ void producer_acquire(unsigned t, bool value) const {
        if (t >= STAGES) mbarrier_wait(empty(t, value), (t / STAGES - 1) % 2);
    }
    // A warp has completed its reads of a tile.
    __device__ __forceinline__ void consumer_release(unsigned t, bool value) const {
        const unsigned lane = threadIdx.x % WARP;
        if constexpr (CLUSTER == 1) {
            if (lane == 0) mbarrier_arrive(empty(t, value));
        } else if (lane < CLUSTER) {
            mbarrier_arrive_remote(empty(t, value), lane);
        }
    }
};

// The pieces of work of a block in order: piece k lies in tiles[k % 2]. group = 0 marks the end. The first block of a
// cluster finds them for all blocks, and its barriers `empty` count the threads that read, of all blocks.
template <int CLUSTER>
struct WorkQueue {
    WorkTile* tiles;
    unsigned barriers;

    __device__ __forceinline__ unsigned full(int k) const { return barriers + k % 2 * 8; }
    __device__ __forceinline__ unsigned empty(int k) const { return full(k) + 16; }
    __device__ __forceinline__ static void wait(unsigned barrier, unsigned phase) {
        if constexpr (CLUSTER > 1)
            mbarrier_wait_acquire_cluster(barrier, phase);
        else
            mbarrier_wait(barrier, phase);
    }
    __device__ __forceinline__ void init(int readers) const {
        for (int k = 0; k < 2; ++k) mbarrier_init(full(k), 1), mbarrier_init(empty(k), readers * CLUSTER);
    }
    // Finds piece k, of ROWS rows, and puts it into the queue; returns whether there is one. Called by one warp.
    template <int ROWS, int BN>
    __device__ __forceinline__ bool put(
        const PrefillParams& p, const Split& split, const PieceOrder& order, int k) const {
        const int lane = threadIdx.x % WARP, takers = gridDim.x / CLUSTER, index = blockIdx.x / CLUSTER;
        WorkTile work = {};
        const bool found =
            find_work<CAUSAL, ROWS, BN>(p, split, order, k == 0 ? index : next_index(p, takers), takers, work);
        if (k >= 2) wait(empty(k), (k / 2 - 1) % 2);
        if (lane == 0) {
            if (!found) work.group = 0;
            tiles[k % 2] = work;
            if (!found) end_work(p, takers);
        }
        __syncwarp();
        if constexpr (CLUSTER > 1) {  // a lane for each block writes the piece there and arrives: see release()
            if (lane < CLUSTER) {
                const unsigned own = cast_smem_ptr_to_uint(tiles + k % 2);
                if (lane > 0) {
#pragma unroll
                    for (unsigned i = 0; i < sizeof(WorkTile); i += sizeof(int))
                        st_shared_cluster(map_shared_rank(own + i, lane), ld_shared(own + i));
                }
                mbarrier_arrive_release_cluster(full(k), lane);
            }
        } else if (lane == 0) {
            mbarrier_arrive(full(k));
        }
        __syncwarp();
        return found;
    }
    // Piece k, once it is there; its group is 0 if there is none.
    __device__ __forceinline__ const WorkTile& get(int k) const {
        wait(full(k), k / 2 % 2);
        return tiles[k % 2];
    }
    // Called by each thread that reads: compute-sanitizer takes an arrival to order the accesses of one thread only.
    __device__ __forceinline__ void release(int k) const {
        if constexpr (CLUSTER > 1)
            mbarrier_arrive_release_cluster(empty(k), 0);
        else
            mbarrier_arrive(empty(k));
    }
};

// Starts this block's part of the copy of a tile of blocks that begin at `rows` of the pool. rank: of this block in the
// cluster.
template <int D, int BN, int STAGES, int CLUSTER, int BLOCKS>
__device__ __forceinline__ void copy_tile(
    const KVPipeline<D, BN, STAGES, CLUSTER, __half>& pipeline, unsigned t, bool value, const TensorMap& pool,
    const unsigned (&rows)[BLOCKS], int rank) {
    constexpr int BOXES = D / COLUMNS * BLOCKS, PART = BOXES / CLUSTER;
    static_assert(BOXES % CLUSTER == 0);
    const unsigned full = pipeline.full(t, value), tile = cast_smem_ptr_to_uint(pipeline.tile(t, value));
    mbarrier_arrive_expect_tx(full, BN * D * 2);
#pragma unroll
    for (int box = 0; box < BOXES; ++box) {
        const int i = box / (D / COLUMNS), c = box % (D / COLUMNS), row = static_cast<int>(rows[i]);
        const unsigned target = tile + (c * BN + i * BLOCK_SIZE) * COLUMNS * 2;
        if constexpr (CLUSTER == 1)
            tma_load_2d(target, pool, c * COLUMNS, row, full);
        else if (box / PART == rank)
            tma_load_2d_multicast(target, pool, c * COLUMNS, row, full);
    }
}

// The same of codes and scales, of the first `count` blocks.
template <int D, int BN, int STAGES, int BLOCKS>
__device__ __forceinline__ void copy_codes(
    const KVPipeline<D, BN, STAGES, 1, int8>& pipeline, unsigned t, bool value, const PrefillParams& p,
    const unsigned (&rows)[BLOCKS], int count) {
    constexpr int CODES = BLOCK_SIZE * D, SCALES = BLOCK_SIZE * 2;
    const unsigned copied = pipeline.copied(t, value), codes = cast_smem_ptr_to_uint(pipeline.codes(t, value)),
                   scales = cast_smem_ptr_to_uint(pipeline.scales(t, value));
    const int8* const all_codes = static_cast<const int8*>(value ? p.values : p.keys);
    const __half* const all_scales = value ? p.value_scales : p.key_scales;
    mbarrier_arrive_expect_tx(copied, min(count, BLOCKS) * (CODES + SCALES));
#pragma unroll
    for (int i = 0; i < BLOCKS; ++i) {
        if (i >= count) break;
        cp_async_bulk(codes + i * CODES, all_codes + static_cast<size_t>(rows[i]) * D, CODES, copied);
        cp_async_bulk(scales + i * SCALES, all_scales + rows[i], SCALES, copied);
    }
}

// The producer: one warp finds work, and one thread starts copies of whole blocks of the cache. The last tile of a
// piece of work may end with rows that were never written.
template <int D, int ROWS, int BN, int STAGES, int CLUSTER, class CACHE>
__device__ __forceinline__ void produce(
    const KVPipeline<D, BN, STAGES, CLUSTER, CACHE>& pipeline, const WorkQueue<CLUSTER>& queue, const PrefillParams& p,
    const TensorMap& keys, const TensorMap& values, int rank) {
    constexpr int BLOCKS = BN / BLOCK_SIZE;
    const int thread = threadIdx.x % WARPGROUP;
    if (thread / WARP == 1 && rank == 0) {
        const Split split = find_split<CAUSAL, ROWS>(p);
        PieceOrder order = {1};
        if (CLUSTER > 1)
            order = find_order<ROWS>(p, split, gridDim.x / CLUSTER);  // finding it takes a short launch long
        for (int k = 0; queue.template put<ROWS, BN>(p, split, order, k); ++k) {
        }
    }
    if (thread != 0) return;
    if (!IS_INT8<CACHE>) prefetch_tensormap(keys), prefetch_tensormap(values);
    unsigned t = 0;  // counts tiles of all pieces
    for (int k = 0;; ++k) {
        const WorkTile& work = queue.get(k);
        if (work.group == 0) return;
        const int end = work.end;
        unsigned rows[BLOCKS];
        for (int key = work.begin; key < end; key += BN, ++t) {
#pragma unroll
            for (int i = 0; i < BLOCKS; ++i) rows[i] = pool_row(p, work, key + i * BLOCK_SIZE);
#pragma unroll
            for (int value = 0; value < 2; ++value) {
                pipeline.producer_acquire(t, value);
                if constexpr (IS_INT8<CACHE>)
                    copy_codes(pipeline, t, value, p, rows, ceil_div(end - key, BLOCK_SIZE));
                else
                    copy_tile(pipeline, t, value, value ? values : keys, rows, rank);
            }
        }
        queue.release(k);
    }
}

// The converter: turns codes and scales into tiles, in place, with zeros for rows beyond the end of the keys.
template <int D, int BN, int STAGES, int CLUSTER, class CACHE>
__device__ __forceinline__ void convert(
    const KVPipeline<D, BN, STAGES, CLUSTER, CACHE>& pipeline, const WorkQueue<CLUSTER>& queue, int barrier) {
    constexpr int CHUNKS = D / 16, STEP = WARPGROUP / CHUNKS, ROWS = BN / STEP;
    const int thread = threadIdx.x % WARPGROUP, chunk = thread % CHUNKS;
    // Threads of a second half of 128 bytes take rows of the other parity, so that their stores meet other banks.
    const int first = thread / CHUNKS ^ chunk / 4 % 2;
    unsigned t = 0;  // counts tiles of all pieces
    for (int k = 0;; ++k) {
        const WorkTile& work = queue.get(k);
        if (work.group == 0) return;
        const int end = work.end;
        for (int key = work.begin; key < end; key += BN, ++t) {
#pragma unroll 1
            for (int value = 0; value < 2; ++value) {
                const int8* const codes = pipeline.codes(t, value) + chunk * 16;
                const __half* const scales = pipeline.scales(t, value);
                __half* const tile = pipeline.tile(t, value);
                CodeVector raw[ROWS];
                pipeline.converter_wait(t, value);
#pragma unroll
                for (int i = 0; i < ROWS; ++i) {
                    const int row = first + i * STEP;
                    raw[i].codes = *reinterpret_cast<const uint4*>(codes + row * D);
                    raw[i].scale = key + row < end ? scales[row] : __float2half_rn(0.0f);
                }
                named_barrier_sync<WARPGROUP>(barrier);  // all codes have been read
#pragma unroll
                for (int i = 0; i < ROWS; ++i) {
                    uint4 low, high;
                    dequantize16(raw[i].codes, raw[i].scale, low, high);
                    *reinterpret_cast<uint4*>(tile + swizzled_offset<BN>(first + i * STEP, chunk * 2)) = low;
                    *reinterpret_cast<uint4*>(tile + swizzled_offset<BN>(first + i * STEP, chunk * 2 + 1)) = high;
                }
                fence_proxy_async();
                mbarrier_arrive(pipeline.full(t, value));
            }
        }
        queue.release(k);
    }
}

// A consumer warpgroup computes 64 rows of a piece of work, from `row` of the block's rows on, which start at `block`
// in the tile. `count` tiles were consumed before.
template <int D, int BM, int BN, int STAGES, int CLUSTER, bool EXTERNAL, int SCORES, class CACHE>
__device__ __forceinline__ void consume(
    const KVPipeline<D, BN, STAGES, CLUSTER, CACHE>& pipeline, const WorkTile& work, const PrefillParams& p,
    __half* q_tile, int row, int block, unsigned count, float* running_tile) {
    constexpr int GROUPS = BM / 64, CHUNKS = D / 8, ROWS = BM * CLUSTER;
    const int thread = threadIdx.x % WARPGROUP, lane = threadIdx.x % WARP, index = row / 64;
    const int turn = 1 + index, next = 1 + (index + 1) % GROUPS, own = 1 + GROUPS + index;
    const int warp_row = row + thread / WARP * 16;  // the first of the warp's 16 rows
    const int first = work.first + block;           // the first row of the block in the sequence
    named_barrier_sync<WARPGROUP>(own);             // the outputs of the work before have been read from the tile
#pragma unroll 4
    for (int i = thread; i < 64 * CHUNKS; i += WARPGROUP) {
        const int r = row + i / CHUNKS;
        copy_query<D>(q_tile + swizzled_offset<BM>(r, i % CHUNKS), work, p, first + r, i % CHUNKS * 8);
    }
    cp_async_wait_all();
    fence_proxy_async();
    named_barrier_sync<WARPGROUP>(own);

    const unsigned tiles = ceil_div(work.end - work.begin, BN);
    const MaskedKeys masked(work, first);  // in registers: the loop below must not wait for shared memory
    const unsigned q = cast_smem_ptr_to_uint(q_tile) + row * COLUMNS * 2;
    const int position[2] = {
        work.position(first + warp_row + lane / 4), work.position(first + warp_row + lane / 4 + 8)};
    RunningResult<D / 8, !EXTERNAL> running = {fragment_of<D>(running_tile, warp_row)};
    SoftmaxState state;
    float o[D / 8][4], s[BN / 8][4], rescale[2];
    bool add = false;  // whether o holds outputs of the segment
    unsigned w[BN / 16][4];
    auto softmax = [&](int key) {
        if constexpr (CHANGES_SCORES<SCORES>) change_scores<SCORES>(s, work, p, position, first + warp_row, key);
        if (masked.among(key, BN)) apply_causal_mask(s, position, key, work.window);
        online_softmax(state, s, rescale, CHANGES_SCORES<SCORES> ? 1.0f : p.scale);
    };
    auto round_weights = [&]() {
#pragma unroll
        for (int k = 0; k < BN / 16; ++k) weights_fragment(w[k], s, k);
    };

    pipeline.consumer_wait(count, false);
    gemm_qk<D, BM, BN>(s, q, cast_smem_ptr_to_uint(pipeline.tile(count, false)));
    wgmma_wait_group<0>();
    warpgroup_fence_operand(s);
    pipeline.consumer_release(count, false);
    softmax(work.begin);
    round_weights();
    int key = work.begin;
    for (unsigned t = count + 1; t != count + tiles; ++t) {
        key += BN;
        pipeline.consumer_wait(t, false);
        if (GROUPS > 1) named_barrier_sync<2 * WARPGROUP>(turn);
        const unsigned keys = cast_smem_ptr_to_uint(pipeline.tile(t, false)),
                       values = cast_smem_ptr_to_uint(pipeline.tile(t - 1, true));
        if (key % SEGMENT == 0) {  // the segment ends while the scores are computed
            pipeline.consumer_wait(t - 1, true);
            gemm_pv<D, BN>(o, w, values, add);
            gemm_qk<D, BM, BN>(s, q, keys);
            if (GROUPS > 1) named_barrier_arrive<2 * WARPGROUP>(next);
            wgmma_wait_group<1>();
            warpgroup_fence_operand(o);
            pipeline.consumer_release(t - 1, true);
            end_segment<D, ROWS>(p, work, key / SEGMENT - 1, block + warp_row, state, o, running);
            state = {};
            wgmma_wait_group<0>();
            warpgroup_fence_operand(s);
            pipeline.consumer_release(t, false);
            softmax(key);
            add = false;
        } else {
            gemm_qk<D, BM, BN>(s, q, keys);
            pipeline.consumer_wait(t - 1, true);
            gemm_pv<D, BN>(o, w, values, add);
            if (GROUPS > 1) named_barrier_arrive<2 * WARPGROUP>(next);
            wgmma_wait_group<1>();
            warpgroup_fence_operand(s);
            pipeline.consumer_release(t, false);
            softmax(key);
            wgmma_wait_group<0>();
            warpgroup_fence_operand(o);
            pipeline.consumer_release(t - 1, true);
            multiply_rows(o, rescale);
            add = true;
        }
        round_weights();
    }
    const unsigned last = count + tiles - 1;
    pipeline.consumer_wait(last, true);
    __half* const last_values = pipeline.tile(last, true);
    if (const int valid = work.end - work.begin - (tiles - 1) * BN; !IS_INT8<CACHE> && valid < BN) {
        clear_rows_from<D, BN>(last_values, valid);
        named_barrier_sync<WARPGROUP>(own);
    }
    gemm_pv<D, BN>(o, w, cast_smem_ptr_to_uint(last_values), add);
    wgmma_wait_group<0>();
    warpgroup_fence_operand(o);
    pipeline.consumer_release(last, true);

    // The outputs go through the warp's own rows of the query tile, so that stores to global memory are coalesced.
    if (!end_last_segment<D, ROWS, SCORES>(p, work, block + warp_row, state, o, running)) return;
#pragma unroll
    for (int n = 0; n < CHUNKS; ++n)
#pragma unroll
        for (int h = 0; h < 2; ++h)
            *reinterpret_cast<unsigned*>(q_tile + swizzled_offset<BM>(warp_row + h * 8 + lane / 4, n) + lane % 4 * 2) =
                pack_half2(o[n][2 * h], o[n][2 * h + 1]);
    __syncwarp();
#pragma unroll 4
    for (int i = lane; i < 16 * CHUNKS; i += WARP)
        store_output(
            work, p, first + warp_row + i / CHUNKS, i % CHUNKS * 8,
            q_tile + swizzled_offset<BM>(warp_row + i / CHUNKS, i % CHUNKS));
}

// D: 64, 128 or 256. BM: 64 or 128. BN: 64 or 128. CLUSTER: 1 or, for fp16, 2 blocks that have a tile of 2 * BM rows.
// SCORES: a ScoreKind but BIASED. CACHE: __half or int8. key_map, value_map: tensor maps of the pools for fp16, [blocks
// * kv_heads * BLOCK_SIZE, D] in boxes of a block. Dynamic shared memory: BM + 2 * STAGES * BN rows of D fp16, 1024
// bytes to align them, and BM rows of D fp32 unless EXTERNAL, with which p.running has them.
template <int D, int BM, int BN, int STAGES, int CLUSTER, bool EXTERNAL, int SCORES, class CACHE>
__global__ void __launch_bounds__((BM / 64 + IS_INT8<CACHE> + 1) * WARPGROUP, 1) attention_prefill_hopper(
    const __grid_constant__ PrefillParams p, const __grid_constant__ TensorMap key_map,
    const __grid_constant__ TensorMap value_map) {
    constexpr int GROUPS = BM / 64, CONSUMERS = GROUPS * WARPGROUP, CONSUMER_WARPS = CONSUMERS / WARP;
    using Pipeline = KVPipeline<D, BN, STAGES, CLUSTER, CACHE>;
    extern __shared__ __align__(16) char shared[];
    __shared__ __align__(8) unsigned long long barriers[Pipeline::BARRIERS + 4];
    __shared__ __align__(16) __half scales[IS_INT8<CACHE> ? STAGES * 2 * BN : 8];
    __shared__ WorkTile tiles[2];
    __half* const q_tile = reinterpret_cast<__half*>(shared + (1024 - cast_smem_ptr_to_uint(shared) % 1024) % 1024);
    const Pipeline pipeline = {q_tile + BM * D, scales, cast_smem_ptr_to_uint(barriers)};
    const WorkQueue<CLUSTER> queue = {tiles, cast_smem_ptr_to_uint(barriers + Pipeline::BARRIERS)};
    if (threadIdx.x == 0) {
        pipeline.init(CONSUMER_WARPS);
        queue.init(CONSUMERS + (IS_INT8<CACHE> ? WARPGROUP : 0) + 1);
        fence_mbarrier_init();
    }
    __syncwarp();
    cluster_sync<CLUSTER>();
    wait_on_dependent_grids();
    const int rank = CLUSTER > 1 ? block_rank_in_cluster() : 0;
    const int role = __shfl_sync(FULL, threadIdx.x / WARPGROUP, 0);  // a shuffle tells the compiler that warps agree
    if (role == GROUPS) {
        set_registers<Registers<D, GROUPS, CACHE>::PRODUCER>();
        produce<D, BM * CLUSTER>(pipeline, queue, p, key_map, value_map, rank);
    } else if (IS_INT8<CACHE> && role > GROUPS) {
        set_registers<Registers<D, GROUPS, CACHE>::CONVERTER>();
        if constexpr (IS_INT8<CACHE>) convert(pipeline, queue, 1 + 2 * GROUPS);
    } else {
        set_registers<Registers<D, GROUPS, CACHE>::CONSUMER>();
        const int row = role * 64;
        float* const running = EXTERNAL ? p.running + blockIdx.x * (BM * D)
                                        : reinterpret_cast<float*>(pipeline.tiles + 2 * STAGES * BN * D);
        if (GROUPS > 1 && row == BM - 64) named_barrier_arrive<2 * WARPGROUP>(1);  // the first turn
        unsigned count = 0;
        for (int k = 0;; ++k) {
            const WorkTile& work = queue.get(k);
            if (work.group == 0) break;
            consume<D, BM, BN, STAGES, CLUSTER, EXTERNAL, SCORES, CACHE>(
                pipeline, work, p, q_tile, row, rank * BM, count, running);
            count += ceil_div(work.end - work.begin, BN);
            queue.release(k);
        }
        warp_copy_wait();
        launch_dependent_grids();
    }
    if constexpr (CLUSTER > 1) {  // another block may still write to this block's shared memory
        __syncwarp();
        cluster_sync<CLUSTER>();
    }
}

}  // namespace bminf
