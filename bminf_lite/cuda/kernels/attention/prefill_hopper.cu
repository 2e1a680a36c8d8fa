// Prefill attention (FlashAttention-3, https://arxiv.org/abs/2407.08608) by wgmma, on compute capability 9.0:
//
//     out = softmax(scale * q @ keys.T) @ values, with a causal mask
//
// for ragged sequences; see PrefillParams for shapes. Scores stay in registers, with an online softmax.
//
// The grid is (kv_heads, tiles). A block is warp-specialised: a producer warpgroup loads keys and values into a
// pipeline of tiles of BN tokens; BM / 64 consumer warpgroups have 64 rows each. A consumer issues the scores of the
// next tile before the product of the weights and values of the present one, so that its softmax overlaps with wgmma.
// Consumers take turns (named barriers), so that the products of one overlap with the softmax of another ("ping-pong").
//
// Tiles in shared memory are [column / 64][row][64] with the 128-byte swizzle.
#include "attention/prefill.cuh"
#include "common/wgmma.cuh"

namespace bminf {

constexpr int COLUMNS = 64;  // fp16 elements in 128 bytes

// ---- named barriers -------------------------------------------------------------------------------------------------------

// A named barrier for THREADS threads, of which some wait and the others only arrive.
template <int THREADS>
__device__ __forceinline__ void named_barrier_sync(int id) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "n"(THREADS) : "memory");
}

template <int THREADS>
__device__ __forceinline__ void named_barrier_arrive(int id) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "n"(THREADS) : "memory");
}

// ---- tiles -------------------------------------------------------------------------------------------------------

// The offset in elements of eight columns of a row in a tile of ROWS rows.
template <int ROWS>
__device__ __forceinline__ int swizzled_offset(int row, int chunk) {
    return (chunk / 8 * ROWS + row) * COLUMNS + ((chunk ^ row) % 8) * 8;
}

// Starts to load BN rows of D, which are contiguous in the cache. Rows from `valid` on become zero, because memory that
// was never written may hold NaN.
template <int D, int BN>
__device__ __forceinline__ void load_tile(__half* tile, const Cached<__half>& from, int valid) {
    constexpr int CHUNKS = D / 8, STEP = WARPGROUP / CHUNKS;
    const int thread = threadIdx.x % WARPGROUP, chunk = thread % CHUNKS, first = thread / CHUNKS;
    const __half* const source = from.data + thread * 8;
#pragma unroll
    for (int i = 0; i < BN / STEP; ++i) {
        const int row = first + i * STEP;
        cp_async_16(
            tile + swizzled_offset<BN>(row, chunk), row < valid ? source + i * WARPGROUP * 8 : source, row < valid);
    }
}

// The pipeline: tile t of keys and tile t of values lie in stage t % STAGES. Each has a barrier `full`, when it has
// been loaded, and a barrier `empty`, when all consumers have read it.
template <int D, int BN, int STAGES>
struct KVPipeline {
    __half* keys;
    unsigned barriers;

    static constexpr int TILE = D * BN;
    __device__ __forceinline__ __half* tile(int t, bool value) const { return keys + (t % STAGES * 2 + value) * TILE; }
    __device__ __forceinline__ unsigned full(int t, bool value) const {
        return barriers + (t % STAGES * 2 + value) * 8;
    }
    __device__ __forceinline__ unsigned empty(int t, bool value) const { return full(t, value) + STAGES * 16; }

    __device__ __forceinline__ void init(int consumers) const {
        for (int i = 0; i < STAGES * 2; ++i) {
            mbarrier_init(barriers + i * 8, WARPGROUP / WARP);
            mbarrier_init(barriers + (STAGES * 2 + i) * 8, consumers);
        }
    }
    __device__ __forceinline__ void consumer_wait(int t, bool value) const {
        mbarrier_wait(full(t, value), t / STAGES % 2);
    }
    __device__ __forceinline__ void producer_acquire(int t, bool value) const {
        if (t >= STAGES) mbarrier_wait(empty(t, value), (t / STAGES - 1) % 2);
    }
    // A warp has completed its part of a tile: producer_commit its loads, consumer_release its reads.
    __device__ __forceinline__ void producer_commit(int t, bool value) const {
        fence_proxy_async();
        __syncwarp();
        if (threadIdx.x % WARP == 0) mbarrier_arrive(full(t, value));
    }
    __device__ __forceinline__ void consumer_release(int t, bool value) const {
        if (threadIdx.x % WARP == 0) mbarrier_arrive(empty(t, value));
    }
};

// The producer for fp16. It commits each tile when the loads of the next one have been started.
template <int D, int BN, int STAGES>
__device__ __forceinline__ void produce(
    const KVPipeline<D, BN, STAGES>& pipeline, const WorkTile& work, const PrefillParams& p, __half) {
    const int tiles = (work.end - work.begin + BN - 1) / BN;
    auto load = [&](int t, bool value) {
        const int key = work.begin + t * BN;
        pipeline.producer_acquire(t, value);
        load_tile<D, BN>(pipeline.tile(t, value), cached_from<D, __half>(p, work, value, key), work.end - key);
        cp_async_commit_group();
    };
    load(0, false);
    for (int t = 0; t < tiles; ++t) {
        if (t > 0) {
            load(t, false);
            cp_async_wait_group<1>();
            pipeline.producer_commit(t - 1, true);
        }
        load(t, true);
        cp_async_wait_group<1>();
        pipeline.producer_commit(t, false);
    }
    cp_async_wait_group<0>();
    pipeline.producer_commit(tiles - 1, true);
}

// The producer for int8 codes, which it dequantizes. AHEAD vectors of each thread are in flight to registers, and the
// tile after the next is prefetched to L2.
template <int D, int BN, int STAGES>
__device__ __forceinline__ void produce(
    const KVPipeline<D, BN, STAGES>& pipeline, const WorkTile& work, const PrefillParams& p, int8) {
    constexpr int CHUNKS = D / 16, STEP = WARPGROUP / CHUNKS, ROWS = BN / STEP, AHEAD = D <= 128 ? ROWS / 2 : 2;
    const int thread = threadIdx.x % WARPGROUP, chunk = thread % CHUNKS * 2, first = thread / CHUNKS;
    const int tiles = (work.end - work.begin + BN - 1) / BN;
    CodeVector raw[AHEAD];
    auto load = [&](int i, int t, bool value) {
        const int key = work.begin + t * BN, row = first + i * STEP;
        raw[i % AHEAD].load(
            cached_from<D, int8>(p, work, value, key), i * WARPGROUP + thread, row, row < work.end - key);
    };
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) load(i, 0, false);
    for (int n = 0; n < 2 * tiles; ++n) {
        const int t = n / 2;
        const bool value = n % 2;
        if (const int key = work.begin + (t + 2) * BN; thread * 128 < (work.end - key) * D)
            prefetch_l2(cached_from<D, int8>(p, work, value, key).data + thread * 128);
        pipeline.producer_acquire(t, value);
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
            uint4 low, high;
            dequantize16(raw[i % AHEAD].codes, raw[i % AHEAD].scale, low, high);
            if (i + AHEAD < ROWS)
                load(i + AHEAD, t, value);
            else
                load(i + AHEAD - ROWS, t + value, !value);
            __half* const tile = pipeline.tile(t, value);
            *reinterpret_cast<uint4*>(tile + swizzled_offset<BN>(first + i * STEP, chunk)) = low;
            *reinterpret_cast<uint4*>(tile + swizzled_offset<BN>(first + i * STEP, chunk + 1)) = high;
        }
        pipeline.producer_commit(t, value);
    }
}

// Starts s = queries @ keys.T; q and k are the shared addresses of the tiles.
template <int D, int BM, int BN>
__device__ __forceinline__ void gemm_qk(float (&s)[BN / 8][4], unsigned q, unsigned k) {
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < D / 16; ++i) {
        const unsigned column = i / 4 * COLUMNS * 2, inside = i % 4 * 32;
        const unsigned long long a = make_smem_desc(q + column * BM + inside, 0),
                                 b = make_smem_desc(k + column * BN + inside, 0);
        if (i == 0)
            wgmma<false>(s, a, b);
        else
            wgmma<true>(s, a, b);
    }
    wgmma_commit_group();
}

// Starts o += weights @ values; v is the shared address of the tile.
template <int D, int BN>
__device__ __forceinline__ void gemm_pv(float (&o)[D / 8][4], const unsigned (&w)[BN / 16][4], unsigned v) {
    constexpr int WIDTH = D < 128 ? D : 128, COLUMN = BN * COLUMNS * 2;
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < BN / 16; ++i)
#pragma unroll
        for (int n = 0; n < D; n += WIDTH) {
            auto& part = reinterpret_cast<float (&)[WIDTH / 8][4]>(o[n / 8]);
            wgmma(part, w[i], make_smem_desc(v + n / COLUMNS * COLUMN + i * 16 * COLUMNS * 2, COLUMN));
        }
    wgmma_commit_group();
}

// A consumer warpgroup, with 64 rows of the tile from `row` on.
template <int D, int BM, int BN, int STAGES>
__device__ __forceinline__ void consume(
    const KVPipeline<D, BN, STAGES>& pipeline, const WorkTile& work, const PrefillParams& p, __half* q_tile, int row) {
    constexpr int GROUPS = BM / 64, CHUNKS = D / 8;
    const int thread = threadIdx.x % WARPGROUP, lane = threadIdx.x % WARP, index = row / 64;
    const int turn = 1 + index, next = 1 + (index + 1) % GROUPS;
    const int first = work.first + row + thread / WARP * 16;  // of the warp's 16 rows
#pragma unroll 4
    for (int i = thread; i < 64 * CHUNKS; i += WARPGROUP) {
        const int r = row + i / CHUNKS;
        copy_query<D>(q_tile + swizzled_offset<BM>(r, i % CHUNKS), work, p, work.first + r, i % CHUNKS * 8);
    }
    cp_async_wait_all();
    fence_proxy_async();
    named_barrier_sync<WARPGROUP>(1 + GROUPS + index);

    const int tiles = (work.end - work.begin + BN - 1) / BN;
    const unsigned q = cast_smem_ptr_to_uint(q_tile) + row * COLUMNS * 2;
    SoftmaxRows rows = init_softmax_rows(work, first);
    float o[D / 8][4] = {}, s[BN / 8][4], rescale[2];
    unsigned w[BN / 16][4];
    auto softmax = [&](int t) {
        const int key = work.begin + t * BN;
        if (needs_mask(work, key, BN)) apply_causal_mask(s, rows, key, work.window);
        online_softmax(rows, s, rescale, p.scale);
    };
    auto round_weights = [&]() {
#pragma unroll
        for (int k = 0; k < BN / 16; ++k) weights_fragment(w[k], s, k);
    };

    pipeline.consumer_wait(0, false);
    gemm_qk<D, BM, BN>(s, q, cast_smem_ptr_to_uint(pipeline.tile(0, false)));
    wgmma_wait_group<0>();
    warpgroup_fence_operand(s);
    pipeline.consumer_release(0, false);
    softmax(0);
    round_weights();
    if (index == GROUPS - 1) named_barrier_arrive<2 * WARPGROUP>(1);
    for (int t = 1; t < tiles; ++t) {
        pipeline.consumer_wait(t, false);
        named_barrier_sync<2 * WARPGROUP>(turn);
        gemm_qk<D, BM, BN>(s, q, cast_smem_ptr_to_uint(pipeline.tile(t, false)));
        pipeline.consumer_wait(t - 1, true);
        gemm_pv<D, BN>(o, w, cast_smem_ptr_to_uint(pipeline.tile(t - 1, true)));
        named_barrier_arrive<2 * WARPGROUP>(next);
        wgmma_wait_group<1>();
        warpgroup_fence_operand(s);
        pipeline.consumer_release(t, false);
        softmax(t);
        wgmma_wait_group<0>();
        warpgroup_fence_operand(o);
        pipeline.consumer_release(t - 1, true);
        multiply_rows(o, rescale);
        round_weights();
    }
    pipeline.consumer_wait(tiles - 1, true);
    gemm_pv<D, BN>(o, w, cast_smem_ptr_to_uint(pipeline.tile(tiles - 1, true)));
    wgmma_wait_group<0>();
    warpgroup_fence_operand(o);
    launch_dependent_grids();

    // The outputs go through the warp's own rows of the query tile, so that stores to global memory are coalesced.
    normalise(o, rows);
    const int warp_row = row + thread / WARP * 16;
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
            work, p, first + i / CHUNKS, i % CHUNKS * 8,
            q_tile + swizzled_offset<BM>(warp_row + i / CHUNKS, i % CHUNKS));
}

// D: 64, 128 or 256. BM: a multiple of 64. BN: 64 or 128. CACHE: __half or int8. Dynamic shared memory: BM + 2 * STAGES
// * BN rows of D fp16, and 1024 bytes to align them.
template <int D, int BM, int BN, int STAGES, class CACHE>
__global__ void __launch_bounds__(BM / 64 * WARPGROUP + WARPGROUP, 1)
    attention_prefill_hopper(const __grid_constant__ PrefillParams p) {
    constexpr int GROUPS = BM / 64;
    // Registers of a producer thread and of a consumer thread (setmaxnreg), which share those given at the launch.
    constexpr int PRODUCER_REGISTERS = !IS_INT8<CACHE> ? 40
                                       : D <= 128      ? 72
                                                       : 56,
                  CONSUMER_REGISTERS = (504 - PRODUCER_REGISTERS) / 16 * 8;
    extern __shared__ __align__(16) char shared[];
    __shared__ __align__(8) unsigned long long barriers[4 * STAGES];
    __half* const q_tile = reinterpret_cast<__half*>(shared + (1024 - cast_smem_ptr_to_uint(shared) % 1024) % 1024);
    const KVPipeline<D, BN, STAGES> pipeline = {q_tile + BM * D, cast_smem_ptr_to_uint(barriers)};
    if (threadIdx.x == 0) pipeline.init(GROUPS * WARPGROUP / WARP);
    wait_on_dependent_grids();
    WorkTile work;
    if (!find_work_tile<D, BM, BN>(p, work)) return;
    __syncthreads();
    if (threadIdx.x / WARPGROUP == GROUPS) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(PRODUCER_REGISTERS));
        produce(pipeline, work, p, CACHE{});
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(CONSUMER_REGISTERS));
        consume<D, BM, BN, STAGES>(pipeline, work, p, q_tile, threadIdx.x / WARPGROUP * 64);
    }
}

}  // namespace bminf
