// Products of each head's part of many rows with the head's own matrix (head_products.cu) by wgmma, on compute
// capability 9.0, with the same bits. A block has 128 tokens and 128 columns of one head; two warpgroups have 64 tokens
// each. One thread copies chunks of 64 of the k elements into STAGES stages. The grid is (blocks of columns, blocks of
// tokens, heads).
//
// Tiles in shared memory are [column / 64][row][64] with the 128-byte swizzle.
#include "common/async.cuh"
#include "common/common.cuh"
#include "common/wgmma.cuh"
#include "constants/head_products.cuh"

using namespace bminf;

constexpr int ROWS = 128, WIDTH = 128, STAGES = 3, THREADS_OF_TWO = 2 * WARPGROUP;
constexpr int BOX = 64 * 128, STAGE = 4 * BOX;  // bytes of 64 rows of 64 elements, and of both operands of a chunk
static_assert(CHUNK == 64, "a chunk is a row of 128 bytes");

// x_map: fp16 [tokens, ..], head h of a row from column h * x_head on; w_map: fp16 [.., ..], head h from row h * w_rows
// on: k rows of n elements if BY_INPUT, else n rows of k elements. Both have boxes of 64 rows. k is a multiple of 64, n
// of 128. Other parameters: see head_products. Dynamic shared memory: STAGES stages, and 1024 bytes to align them.
template <bool BY_INPUT>
__global__ void __launch_bounds__(THREADS_OF_TWO, 2) head_products_hopper(
    int x_head, int w_rows, int k, const float* factors, __half* out, long long out_pitch, int out_head, int tokens,
    const __grid_constant__ TensorMap x_map, const __grid_constant__ TensorMap w_map) {
    extern __shared__ __align__(16) char shared[];
    __shared__ __align__(8) unsigned long long barriers[STAGES];
    const unsigned start = (cast_smem_ptr_to_uint(shared) + 1023) / 1024 * 1024;
    const unsigned full = cast_smem_ptr_to_uint(barriers);
    const int first_column = blockIdx.x * WIDTH, first_token = blockIdx.y * ROWS, head = blockIdx.z, chunks = k / CHUNK;
    const int group = __shfl_sync(FULL, threadIdx.x / WARPGROUP, 0), lane = threadIdx.x % WARP;
    const auto load_weights = [&](int chunk) {
        const unsigned target = start + chunk % STAGES * STAGE + 2 * BOX, barrier = full + chunk % STAGES * 8;
        mbarrier_arrive_expect_tx(barrier, STAGE);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int column = BY_INPUT ? first_column + i * 64 : chunk * CHUNK;
            const int row = head * w_rows + (BY_INPUT ? chunk * CHUNK : first_column + i * 64);
            tma_load_2d(target + i * BOX, w_map, column, row, barrier);
        }
    };
    const auto load_inputs = [&](int chunk) {
        const unsigned target = start + chunk % STAGES * STAGE, barrier = full + chunk % STAGES * 8;
#pragma unroll
        for (int i = 0; i < 2; ++i)
            tma_load_2d(target + i * BOX, x_map, head * x_head + chunk * CHUNK, first_token + i * 64, barrier);
    };
    launch_dependent_grids();
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; ++i) mbarrier_init(full + i * 8, 1);
        fence_mbarrier_init();
        for (int chunk = 0; chunk < min(chunks, STAGES); ++chunk) load_weights(chunk);  // which no kernel writes
    }
    __syncthreads();
    wait_on_dependent_grids();
    if (threadIdx.x == 0)
        for (int chunk = 0; chunk < min(chunks, STAGES); ++chunk) load_inputs(chunk);
    float sums[WIDTH / 8][4];
    for (int chunk = 0; chunk < chunks; ++chunk) {
        mbarrier_wait(full + chunk % STAGES * 8, chunk / STAGES % 2);
        const unsigned inputs = start + chunk % STAGES * STAGE, weights = inputs + 2 * BOX;
        warpgroup_fence_operand(sums);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < CHUNK / 16; ++i) {
            const unsigned long long a = make_smem_desc(inputs + group * BOX + i * 32, 0);
            const bool add = chunk > 0 || i > 0;
            if constexpr (BY_INPUT)
                wgmma_nn(sums, a, make_smem_desc(weights + i * 16 * 128, BOX), add);
            else
                wgmma_nt(sums, a, make_smem_desc(weights + i * 32, 0), add);
        }
        wgmma_commit_group();
        wgmma_wait_group<0>();
        warpgroup_fence_operand(sums);
        __syncthreads();  // the stage has been read
        if (threadIdx.x == 0 && chunk + STAGES < chunks) load_weights(chunk + STAGES), load_inputs(chunk + STAGES);
    }

    // Results go through shared memory, so that stores are whole lines: each warp has its own 16 rows of 256 bytes, in
    // which pieces of 16 bytes are exchanged by the row.
    const int warp = threadIdx.x / WARP, warp_token = first_token + warp * 16;
    const unsigned own = start + warp * 16 * WIDTH * 2;
#pragma unroll
    for (int high = 0; high < 2; ++high) {
        const int row = lane / 4 + high * 8, token = warp_token + row;
        const float factor = factors && token < tokens ? factors[token] : 1.0f;
#pragma unroll
        for (int n = 0; n < WIDTH / 8; ++n)
            st_shared_word(
                own + row * WIDTH * 2 + (n ^ row % 8) * 16 + lane % 4 * 4,
                pack_half2(__fmul_rn(sums[n][2 * high], factor), __fmul_rn(sums[n][2 * high + 1], factor)));
    }
    __syncwarp();
#pragma unroll
    for (int i = lane; i < 16 * WIDTH / 8; i += WARP) {
        const int row = i / (WIDTH / 8), n = i % (WIDTH / 8), token = warp_token + row;
        if (token >= tokens) continue;
        __half* const target = out + token * out_pitch + static_cast<long long>(head) * out_head + first_column + n * 8;
        *reinterpret_cast<int4*>(target) = ld_shared_v4(own + row * WIDTH * 2 + (n ^ row % 8) * 16);
    }
}
