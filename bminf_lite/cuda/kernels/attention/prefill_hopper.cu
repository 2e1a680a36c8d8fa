// Prefill attention for compute capability 9.0, on its asynchronous tensor cores.
//
// Four warps copy keys and values into a pipeline of tiles; four more for each 64 rows multiply and do the softmax
// (https://arxiv.org/abs/2407.08608). A tile's scores are computed while the weights of the tile before multiply its
// values, and the groups of 64 rows take turns, so that one group's products run during another's softmax.
//
// Tiles lie in shared memory in columns of 64: [column / 64][row][64], a row being 128 bytes whose 16-byte pieces are
// exchanged by the row's lowest three bits, the layout that the products call "128-byte swizzle".
#include "attention/prefill.cuh"
#include "common/wgmma.cuh"

namespace bminf {

constexpr int COLUMNS = 64;  // fp16 values in 128 bytes

// ---- turns -------------------------------------------------------------------------------------------------------

// A barrier of THREADS threads that some wait at and others only pass.
template <int THREADS>
__device__ __forceinline__ void named_barrier_sync(int id) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "n"(THREADS) : "memory");
}

template <int THREADS>
__device__ __forceinline__ void named_barrier_arrive(int id) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "n"(THREADS) : "memory");
}

// ---- products ----------------------------------------------------------------------------------------------------

#define FOUR(i) "+f"(c[i][0]), "+f"(c[i][1]), "+f"(c[i][2]), "+f"(c[i][3])
#define FIRST_8 FOUR(0), FOUR(1), FOUR(2), FOUR(3), FOUR(4), FOUR(5), FOUR(6), FOUR(7)
#define FIRST_16 FIRST_8, FOUR(8), FOUR(9), FOUR(10), FOUR(11), FOUR(12), FOUR(13), FOUR(14), FOUR(15)

// c = a @ b.T + (ADD ? c : 0), a [64, 16] and b [8 * N, 16] in shared memory.
template <bool ADD>
__device__ __forceinline__ void wgmma(float (&c)[8][4], unsigned long long a, unsigned long long b) {
    asm volatile(
        "{\n.reg .pred add;\nsetp.ne.b32 add, %34, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {" UP_TO_31 "}, %32, %33, add, 1, 1, 0, 0;\n}"
        : FIRST_8
        : "l"(a), "l"(b), "n"(ADD));
}

template <bool ADD>
__device__ __forceinline__ void wgmma(float (&c)[16][4], unsigned long long a, unsigned long long b) {
    asm volatile(
        "{\n.reg .pred add;\nsetp.ne.b32 add, %66, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {" UP_TO_63 "}, %64, %65, add, 1, 1, 0, 0;\n}"
        : FIRST_16
        : "l"(a), "l"(b), "n"(ADD));
}

// c += a @ b, a [64, 16] in registers and b [16, 8 * N] in shared memory.
__device__ __forceinline__ void wgmma(float (&c)[8][4], const unsigned (&a)[4], unsigned long long b) {
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 "
        "{" UP_TO_31 "}, {%32,%33,%34,%35}, %36, 1, 1, 1, 1;"
        : FIRST_8
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

__device__ __forceinline__ void wgmma(float (&c)[16][4], const unsigned (&a)[4], unsigned long long b) {
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 "
        "{" UP_TO_63 "}, {%64,%65,%66,%67}, %68, 1, 1, 1, 1;"
        : FIRST_16
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

// ---- tiles -------------------------------------------------------------------------------------------------------

// Where eight columns of a row lie in a tile of ROWS rows, in elements.
template <int ROWS>
__device__ __forceinline__ int swizzled_offset(int row, int chunk) {
    return (chunk / 8 * ROWS + row) * COLUMNS + ((chunk ^ row) % 8) * 8;
}

// BN rows of D, contiguous in the cache; zeros from row `valid` on, because what was never written there may be NaN.
template <int D, int BN>
__device__ __forceinline__ void copy_tile(__half* tile, const Cached<__half>& from, int valid) {
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

// The pipeline: tile t of keys lies in slot t % STAGES, and so does tile t of values. For each, one barrier says when
// it is full and another when it may be overwritten.
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
    // A warp is done with a tile: of its copies, or of what it read.
    __device__ __forceinline__ void producer_commit(int t, bool value) const {
        fence_proxy_async();
        __syncwarp();
        if (threadIdx.x % WARP == 0) mbarrier_arrive(full(t, value));
    }
    __device__ __forceinline__ void consumer_release(int t, bool value) const {
        if (threadIdx.x % WARP == 0) mbarrier_arrive(empty(t, value));
    }
};

// What the copying warps do. Each group of copies is announced when the next one has been started.
template <int D, int BN, int STAGES>
__device__ __forceinline__ void produce(
    const KVPipeline<D, BN, STAGES>& pipeline, const WorkTile& work, const PrefillParams& p, __half) {
    const int tiles = (work.end - work.begin + BN - 1) / BN;
    auto copy = [&](int t, bool value) {
        const int key = work.begin + t * BN;
        pipeline.producer_acquire(t, value);
        copy_tile<D, BN>(pipeline.tile(t, value), cached_from<D, __half>(p, work, value, key), work.end - key);
        cp_async_commit_group();
    };
    copy(0, false);
    for (int t = 0; t < tiles; ++t) {
        if (t > 0) {
            copy(t, false);
            cp_async_wait_group<1>();
            pipeline.producer_commit(t - 1, true);
        }
        copy(t, true);
        cp_async_wait_group<1>();
        pipeline.producer_commit(t, false);
    }
    cp_async_wait_group<0>();
    pipeline.producer_commit(tiles - 1, true);
}

// The same from codes, which become fp16 on the way. A thread has a part of its share of a tile on its way from the L2
// cache to its registers, and the tile after the next on its way there.
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
            asm volatile(
                "prefetch.global.L2 [%0];" ::"l"(cached_from<D, int8>(p, work, value, key).data + thread * 128));
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

// s = queries @ keys.T; both tiles in columns of 64.
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

// o += weights @ values
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

// What the four warps of a group of 64 rows do; `row` is the group's first in the tile.
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
        for (int k = 0; k < BN / 16; ++k) weights(w[k], s, k);
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

    // Through the warp's own rows of the query tile, so that memory is written a row at a time.
    normalise(o, rows);
    const int mine = row + thread / WARP * 16;
#pragma unroll
    for (int n = 0; n < CHUNKS; ++n)
#pragma unroll
        for (int h = 0; h < 2; ++h)
            *reinterpret_cast<unsigned*>(q_tile + swizzled_offset<BM>(mine + h * 8 + lane / 4, n) + lane % 4 * 2) =
                pack(o[n][2 * h], o[n][2 * h + 1]);
    __syncwarp();
#pragma unroll 4
    for (int i = lane; i < 16 * CHUNKS; i += WARP)
        write8(
            work, p, first + i / CHUNKS, i % CHUNKS * 8, q_tile + swizzled_offset<BM>(mine + i / CHUNKS, i % CHUNKS));
}

// A block has BM rows, a multiple of 64, and passes over BN keys (64 or 128) at a time; D is 64,
// 128 or 256. Dynamic shared memory: BM + 2 * STAGES * BN rows of D, and 1024 bytes to align them. CACHE: __half or
// int8.
template <int D, int BM, int BN, int STAGES, class CACHE>
__global__ void __launch_bounds__(BM / 64 * WARPGROUP + WARPGROUP, 1)
    attention_prefill_hopper(const __grid_constant__ PrefillParams p) {
    constexpr int GROUPS = BM / 64;
    // Registers of a thread that copies and of one that multiplies: of the three times 168 that were given at the
    // launch.
    constexpr int COPYING = !IS_INT8<CACHE> ? 40 : D <= 128 ? 72 : 56, MULTIPLYING = (504 - COPYING) / 16 * 8;
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
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COPYING));
        produce(pipeline, work, p, CACHE{});
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(MULTIPLYING));
        consume<D, BM, BN, STAGES>(pipeline, work, p, q_tile, threadIdx.x / WARPGROUP * 64);
    }
}

}  // namespace bminf
