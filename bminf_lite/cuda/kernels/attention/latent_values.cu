// The values of few tokens behind latent_few.cu: products of each head's means with its values' matrix, where this
// kernel makes the means of the records of several segments itself. So no block of attention waits for the others. The
// bits are those of head_products.cu behind the merges of latent_few.cu: merges and chains of tensor-core steps are the
// same.
//
// The grid is (blocks of columns, heads). A block loads all of its part of the matrix before it waits for attention.
#include "attention/head_products.cuh"
#include "attention/latent_records.cuh"

using namespace bminf;

constexpr int ROWS = LATENT_FEW_ROWS, CLUSTER = LATENT_CLUSTER, TOKENS = 16;
static_assert(LATENT_MERGED_TOKENS <= TOKENS, "rows of a product");

// Where the records of a pair of a token and a head are: row `row` of a tile, which has `segments` segments. Those of
// padding have none.
struct RecordPlace {
    int tile, row, segments;
};

__device__ __forceinline__ RecordPlace
find_record(const int* cu_seqlens, const int* context_lens, int sequences, int heads, int token, int head) {
    int tiles = 0;  // of the sequences before
    for (int i = 0; i < sequences; ++i) {
        const int start = cu_seqlens[i], pairs = (cu_seqlens[i + 1] - start) * heads;
        const int pair = (token - start) * heads + head, first = pair / ROWS * ROWS;
        if (pair < pairs) {
            const int end = context_lens[i] + (min(first + ROWS, pairs) - 1) / heads + 1;
            return {tiles + pair / ROWS, pair - first, (end + LATENT_SEGMENT - 1) / LATENT_SEGMENT};
        }
        tiles += (pairs + ROWS - 1) / ROWS;
    }
    return {0, 0, 0};
}

// LATENTS: the columns of a latent of a block of latent_few, so a latent has LATENTS * CLUSTER. records: see there,
// with max_segments for each tile; means: fp16 [tokens, heads, mean_pitch], those of tiles with one segment. tokens: at
// most LATENT_MERGED_TOKENS. matrix, w_pitch, w_rows, n: see head_products; out: fp16 [tokens, heads * n], rows
// out_pitch apart. Dynamic shared memory: a HeadProductsScratch of all chunks.
template <int LATENTS>
__global__ void __launch_bounds__(THREADS) latent_values(
    const float* records, int max_segments, const __half* means, int mean_pitch, const int* cu_seqlens,
    const int* context_lens, int sequences, int heads, const __half* matrix, int w_pitch, int w_rows, int n,
    __half* out, long long out_pitch, int tokens) {
    constexpr int RANK = LATENTS * CLUSTER, CHUNKS = RANK / CHUNK, VECTORS = RANK / 4;
    static_assert(RANK % CHUNK == 0, "whole chunks");
    extern __shared__ __align__(128) char shared[];
    __shared__ RecordPlace places[LATENT_MERGED_TOKENS];
    HeadProductsScratch<TOKENS, CHUNKS>& scratch = *reinterpret_cast<HeadProductsScratch<TOKENS, CHUNKS>*>(shared);
    launch_dependent_grids();
    const int first_column = blockIdx.x * COLUMNS, head = blockIdx.y;
    const HeadMatrix<false> weights = {matrix + static_cast<long long>(head) * w_rows * w_pitch, w_pitch, RANK, n};
#pragma unroll 1
    for (int chunk = 0; chunk < CHUNKS; ++chunk)  // no earlier kernel of a step writes weights
        weights.load(scratch.weights[chunk], chunk * CHUNK, first_column);
    if (threadIdx.x < tokens)
        places[threadIdx.x] = find_record(cu_seqlens, context_lens, sequences, heads, threadIdx.x, head);
    const auto input = [&](int token, int column) {
        return reinterpret_cast<uint2*>(scratch.inputs[column / CHUNK] + token * PITCH + column % CHUNK * 2);
    };
#pragma unroll 1
    for (int i = tokens * VECTORS + threadIdx.x; i < TOKENS * VECTORS; i += THREADS)
        *input(i / VECTORS, i % VECTORS * 4) = make_uint2(0, 0);
    __syncthreads();
    wait_on_dependent_grids();
#pragma unroll 1
    for (int i = threadIdx.x; i < tokens * VECTORS; i += THREADS) {
        const int token = i / VECTORS, column = i % VECTORS * 4;
        const RecordPlace place = places[token];
        const __half* const mean = means + (static_cast<long long>(token) * heads + head) * mean_pitch + column;
        const float* const first =
            records +
            (static_cast<long long>(place.tile) * max_segments * CLUSTER + column / LATENTS) * RECORD<LATENTS>;
        const uint2 four = place.segments > 1 ? merged_means<LATENTS>(
                                                    first, static_cast<long long>(CLUSTER) * RECORD<LATENTS>,
                                                    place.segments, place.row, column % LATENTS)
                                              : __ldcg(reinterpret_cast<const uint2*>(mean));
        *input(token, column) = four;
    }
    cp_async_wait_all();
    __syncthreads();
    HeadSums<TOKENS / 16, false> sums;
#pragma unroll
    for (int chunk = 0; chunk < CHUNKS; ++chunk) sums.add(scratch.inputs[chunk], scratch.weights[chunk]);
    sums.store(0, tokens, first_column, n, nullptr, out + static_cast<long long>(head) * n, out_pitch);
}
