// Prefill attention for compute capability 9.0, on its asynchronous tensor cores.
//
// Four warps copy keys and values into a ring of tiles; four more for each 64 rows multiply and do the softmax
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
__device__ __forceinline__ void turn_wait(int id) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "n"(THREADS) : "memory");
}

template <int THREADS>
__device__ __forceinline__ void turn_pass(int id) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "n"(THREADS) : "memory");
}

// ---- products ----------------------------------------------------------------------------------------------------

#define FOUR(i) "+f"(c[i][0]), "+f"(c[i][1]), "+f"(c[i][2]), "+f"(c[i][3])
#define FIRST_8 FOUR(0), FOUR(1), FOUR(2), FOUR(3), FOUR(4), FOUR(5), FOUR(6), FOUR(7)
#define FIRST_16 FIRST_8, FOUR(8), FOUR(9), FOUR(10), FOUR(11), FOUR(12), FOUR(13), FOUR(14), FOUR(15)

// c = a @ b.T + (ADD ? c : 0), a [64, 16] and b [8 * N, 16] in shared memory.
template <bool ADD>
__device__ __forceinline__ void multiply(float (&c)[8][4], unsigned long long a, unsigned long long b) {
    asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %34, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {" UP_TO_31 "}, %32, %33, add, 1, 1, 0, 0;\n}"
                 : FIRST_8 : "l"(a), "l"(b), "n"(ADD));
}

template <bool ADD>
__device__ __forceinline__ void multiply(float (&c)[16][4], unsigned long long a, unsigned long long b) {
    asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %66, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {" UP_TO_63 "}, %64, %65, add, 1, 1, 0, 0;\n}"
                 : FIRST_16 : "l"(a), "l"(b), "n"(ADD));
}

// c += a @ b, a [64, 16] in registers and b [16, 8 * N] in shared memory.
__device__ __forceinline__ void multiply(float (&c)[8][4], const unsigned (&a)[4], unsigned long long b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 "
                 "{" UP_TO_31 "}, {%32,%33,%34,%35}, %36, 1, 1, 1, 1;"
                 : FIRST_8 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

__device__ __forceinline__ void multiply(float (&c)[16][4], const unsigned (&a)[4], unsigned long long b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 "
                 "{" UP_TO_63 "}, {%64,%65,%66,%67}, %68, 1, 1, 1, 1;"
                 : FIRST_16 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

// ---- tiles -------------------------------------------------------------------------------------------------------

// Where eight columns of a row lie in a tile of ROWS rows, in elements.
template <int ROWS>
__device__ __forceinline__ int place(int row, int chunk) {
    return (chunk / 8 * ROWS + row) * COLUMNS + ((chunk ^ row) % 8) * 8;
}

// BN rows of D, contiguous in the cache; zeros from row `valid` on, because what was never written there may be NaN.
template <int D, int BN>
__device__ __forceinline__ void copy_tile(__half* tile, const Cached<__half>& from, int valid) {
    constexpr int CHUNKS = D / 8, STEP = GROUP / CHUNKS;
    const int thread = threadIdx.x % GROUP, chunk = thread % CHUNKS, first = thread / CHUNKS;
    const __half* const source = from.data + thread * 8;
#pragma unroll
    for (int i = 0; i < BN / STEP; ++i) {
        const int row = first + i * STEP;
        copy16(tile + place<BN>(row, chunk), row < valid ? source + i * GROUP * 8 : source, row < valid);
    }
}

// The ring: tile t of keys lies in slot t % STAGES, and so does tile t of values. For each, one barrier says when it is
// full and another when it may be overwritten.
template <int D, int BN, int STAGES>
struct Ring {
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
            barrier_init(barriers + i * 8, GROUP / WARP);
            barrier_init(barriers + (STAGES * 2 + i) * 8, consumers);
        }
    }
    __device__ __forceinline__ void wait_full(int t, bool value) const { barrier_wait(full(t, value), t / STAGES % 2); }
    __device__ __forceinline__ void wait_empty(int t, bool value) const {
        if (t >= STAGES) barrier_wait(empty(t, value), (t / STAGES - 1) % 2);
    }
    // A warp is done with a tile: of its copies, or of what it read.
    __device__ __forceinline__ void fill(int t, bool value) const {
        publish();
        __syncwarp();
        if (threadIdx.x % WARP == 0) barrier_arrive(full(t, value));
    }
    __device__ __forceinline__ void release(int t, bool value) const {
        if (threadIdx.x % WARP == 0) barrier_arrive(empty(t, value));
    }
};

// What the copying warps do. Each group of copies is announced when the next one has been started.
template <int D, int BN, int STAGES>
__device__ __forceinline__ void produce(const Ring<D, BN, STAGES>& ring, const Work& work, const Prefill& p, __half) {
    const int tiles = (work.end - work.begin + BN - 1) / BN;
    auto copy = [&](int t, bool value) {
        const int key = work.begin + t * BN;
        ring.wait_empty(t, value);
        copy_tile<D, BN>(ring.tile(t, value), cached_from<D, __half>(p, work, value, key), work.end - key);
        end_copy_group();
    };
    copy(0, false);
    for (int t = 0; t < tiles; ++t) {
        if (t > 0) {
            copy(t, false);
            wait_for_older_copies<1>();
            ring.fill(t - 1, true);
        }
        copy(t, true);
        wait_for_older_copies<1>();
        ring.fill(t, false);
    }
    wait_for_older_copies<0>();
    ring.fill(tiles - 1, true);
}

// The same from codes, which become fp16 on the way. A thread has a part of its share of a tile on its way from the L2 cache to
// its registers, and the tile after the next on its way there.
template <int D, int BN, int STAGES>
__device__ __forceinline__ void produce(const Ring<D, BN, STAGES>& ring, const Work& work, const Prefill& p, int8) {
    constexpr int CHUNKS = D / 16, STEP = GROUP / CHUNKS, ROWS = BN / STEP, AHEAD = D <= 128 ? ROWS / 2 : 2;
    const int thread = threadIdx.x % GROUP, chunk = thread % CHUNKS * 2, first = thread / CHUNKS;
    const int tiles = (work.end - work.begin + BN - 1) / BN;
    Codes raw[AHEAD];
    auto load = [&](int i, int t, bool value) {
        const int key = work.begin + t * BN, row = first + i * STEP;
        raw[i % AHEAD].load(cached_from<D, int8>(p, work, value, key), i * GROUP + thread, row, row < work.end - key);
    };
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) load(i, 0, false);
    for (int n = 0; n < 2 * tiles; ++n) {
        const int t = n / 2;
        const bool value = n % 2;
        if (const int key = work.begin + (t + 2) * BN; thread * 128 < (work.end - key) * D)
            asm volatile("prefetch.global.L2 [%0];" ::"l"(cached_from<D, int8>(p, work, value, key).data + thread * 128));
        ring.wait_empty(t, value);
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
            uint4 low, high;
            dequantize16(raw[i % AHEAD].codes, raw[i % AHEAD].scale, low, high);
            if (i + AHEAD < ROWS) load(i + AHEAD, t, value);
            else load(i + AHEAD - ROWS, t + value, !value);
            __half* const tile = ring.tile(t, value);
            *reinterpret_cast<uint4*>(tile + place<BN>(first + i * STEP, chunk)) = low;
            *reinterpret_cast<uint4*>(tile + place<BN>(first + i * STEP, chunk + 1)) = high;
        }
        ring.fill(t, value);
    }
}

// s = queries @ keys.T; both tiles in columns of 64.
template <int D, int BM, int BN>
__device__ __forceinline__ void score(float (&s)[BN / 8][4], unsigned q, unsigned k) {
    products_begin();
#pragma unroll
    for (int i = 0; i < D / 16; ++i) {
        const unsigned column = i / 4 * COLUMNS * 2, inside = i % 4 * 32;
        const unsigned long long a = operand(q + column * BM + inside, 0), b = operand(k + column * BN + inside, 0);
        if (i == 0) multiply<false>(s, a, b);
        else multiply<true>(s, a, b);
    }
    products_end();
}

// o += weights @ values
template <int D, int BN>
__device__ __forceinline__ void add_values(float (&o)[D / 8][4], const unsigned (&w)[BN / 16][4], unsigned v) {
    constexpr int WIDTH = D < 128 ? D : 128, COLUMN = BN * COLUMNS * 2;
    products_begin();
#pragma unroll
    for (int i = 0; i < BN / 16; ++i)
#pragma unroll
        for (int n = 0; n < D; n += WIDTH) {
            auto& part = reinterpret_cast<float (&)[WIDTH / 8][4]>(o[n / 8]);
            multiply(part, w[i], operand(v + n / COLUMNS * COLUMN + i * 16 * COLUMNS * 2, COLUMN));
        }
    products_end();
}

// What the four warps of a group of 64 rows do; `row` is the group's first in the tile.
template <int D, int BM, int BN, int STAGES>
__device__ __forceinline__ void consume(
    const Ring<D, BN, STAGES>& ring, const Work& work, const Prefill& p, __half* q_tile, int row)
{
    constexpr int GROUPS = BM / 64, CHUNKS = D / 8;
    const int thread = threadIdx.x % GROUP, lane = threadIdx.x % WARP, index = row / 64;
    const int turn = 1 + index, next = 1 + (index + 1) % GROUPS;
    const int first = work.first + row + thread / WARP * 16;  // of the warp's 16 rows
#pragma unroll 4
    for (int i = thread; i < 64 * CHUNKS; i += GROUP) {
        const int r = row + i / CHUNKS;
        copy_query<D>(q_tile + place<BM>(r, i % CHUNKS), work, p, work.first + r, i % CHUNKS * 8);
    }
    wait_for_copies();
    publish();
    turn_wait<GROUP>(1 + GROUPS + index);

    const int tiles = (work.end - work.begin + BN - 1) / BN;
    const unsigned q = shared_address(q_tile) + row * COLUMNS * 2;
    Rows rows = start_rows(work, first);
    float o[D / 8][4] = {}, s[BN / 8][4], shrink[2];
    unsigned w[BN / 16][4];
    auto softmax = [&](int t) {
        const int key = work.begin + t * BN;
        if (any_hidden(work, key, BN)) hide(s, rows, key, work.window);
        soften(rows, s, shrink, p.scale);
    };
    auto round_weights = [&]() {
#pragma unroll
        for (int k = 0; k < BN / 16; ++k) weights(w[k], s, k);
    };

    ring.wait_full(0, false);
    score<D, BM, BN>(s, q, shared_address(ring.tile(0, false)));
    products_wait<0>();
    pin(s);
    ring.release(0, false);
    softmax(0);
    round_weights();
    if (index == GROUPS - 1) turn_pass<2 * GROUP>(1);
    for (int t = 1; t < tiles; ++t) {
        ring.wait_full(t, false);
        turn_wait<2 * GROUP>(turn);
        score<D, BM, BN>(s, q, shared_address(ring.tile(t, false)));
        ring.wait_full(t - 1, true);
        add_values<D, BN>(o, w, shared_address(ring.tile(t - 1, true)));
        turn_pass<2 * GROUP>(next);
        products_wait<1>();
        pin(s);
        ring.release(t, false);
        softmax(t);
        products_wait<0>();
        pin(o);
        ring.release(t - 1, true);
        multiply_rows(o, shrink);
        round_weights();
    }
    ring.wait_full(tiles - 1, true);
    add_values<D, BN>(o, w, shared_address(ring.tile(tiles - 1, true)));
    products_wait<0>();
    pin(o);
    let_successor_start();

    // Through the warp's own rows of the query tile, so that memory is written a row at a time.
    normalise(o, rows);
    const int mine = row + thread / WARP * 16;
#pragma unroll
    for (int n = 0; n < CHUNKS; ++n)
#pragma unroll
        for (int h = 0; h < 2; ++h)
            *reinterpret_cast<unsigned*>(q_tile + place<BM>(mine + h * 8 + lane / 4, n) + lane % 4 * 2) =
                pack(o[n][2 * h], o[n][2 * h + 1]);
    __syncwarp();
#pragma unroll 4
    for (int i = lane; i < 16 * CHUNKS; i += WARP)
        write8(work, p, first + i / CHUNKS, i % CHUNKS * 8, q_tile + place<BM>(mine + i / CHUNKS, i % CHUNKS));
}

// A block has BM rows, a multiple of 64, and passes over BN keys (64 or 128) at a time; D is 64,
// 128 or 256. Dynamic shared memory: BM + 2 * STAGES * BN rows of D, and 1024 bytes to align them. CACHE: __half or int8.
template <int D, int BM, int BN, int STAGES, class CACHE>
__global__ void __launch_bounds__(BM / 64 * GROUP + GROUP, 1) attend_prefill_hopper(const __grid_constant__ Prefill p) {
    constexpr int GROUPS = BM / 64;
    // Registers of a thread that copies and of one that multiplies: of the three times 168 that were given at the launch.
    constexpr int COPYING = !IS_INT8<CACHE> ? 40 : D <= 128 ? 72 : 56, MULTIPLYING = (504 - COPYING) / 16 * 8;
    extern __shared__ __align__(16) char shared[];
    __shared__ __align__(8) unsigned long long barriers[4 * STAGES];
    __half* const q_tile = reinterpret_cast<__half*>(shared + (1024 - shared_address(shared) % 1024) % 1024);
    const Ring<D, BN, STAGES> ring = {q_tile + BM * D, shared_address(barriers)};
    if (threadIdx.x == 0) ring.init(GROUPS * GROUP / WARP);
    wait_for_predecessor();
    Work work;
    if (!find_work<D, BM, BN>(p, work)) return;
    __syncthreads();
    if (threadIdx.x / GROUP == GROUPS) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COPYING));
        produce(ring, work, p, CACHE{});
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(MULTIPLYING));
        consume<D, BM, BN, STAGES>(ring, work, p, q_tile, threadIdx.x / GROUP * 64);
    }
}

}  // namespace bminf
