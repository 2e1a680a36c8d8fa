// The queries of few tokens that meet latent rows, and those tokens' rows, in one launch: what head_products and
// latent_rows compute where no factors of positions lie between them. Blocks (0, j, h) up to the last head have columns
// of the absorbed queries; the others have parts of tokens, block (0, j, heads + i) number i * gridDim.y + j of them.
#include "attention/head_products.cuh"
#include "attention/latent_rows.cuh"

using namespace bminf;

static_assert(THREADS == LATENT_ROWS_THREADS, "blocks of either kind");

// matrix: w of head_products, with k = nope_dim and n = rank; tokens: at most 16; parts: of a token. Other parameters:
// see latent_rows and head_products.
template <class CACHE>
__global__ void __launch_bounds__(THREADS) latent_queries(
    const float* kv, long long kv_pitch, const float* norm_weight, int weight_pitch, float eps,
    const float* frequencies, float rope_scale, const __half* q, long long q_pitch, int heads, int nope_dim,
    int rope_dim, int rank, int depth, const int* cu_seqlens, const int* context_lens, const int* block_tables,
    int table_pitch, int sequences, CACHE* cache, __half* scales, __half* queries, int aligned, const __half* matrix,
    int w_pitch, int w_rows, int tokens, int parts) {
    __shared__ HeadProductsScratch<16, 4> products;
    __shared__ LatentRowsScratch<THREADS> scratch;
    launch_dependent_grids();
    const int head = blockIdx.z;
    if (head < heads) {
        multiply_head<16, 4, true>(
            products, 0, blockIdx.y, head, q, q_pitch, nope_dim + rope_dim, aligned, matrix, w_pitch, w_rows, nope_dim,
            rank, nullptr, queries, static_cast<long long>(heads) * depth, depth, tokens);
        return;
    }
    const int index = (head - heads) * gridDim.y + blockIdx.y, token = index / parts;
    if (token >= tokens) return wait_on_dependent_grids();
    const LatentRowsParams<CACHE> p = {
        kv,           kv_pitch,    norm_weight, weight_pitch, eps,    frequencies, rope_scale, q,          q_pitch,
        heads,        nope_dim,    rope_dim,    rank,         depth,  0,           0,          cu_seqlens, context_lens,
        block_tables, table_pitch, sequences,   cache,        scales, queries,     nullptr};
    LatentRowPart<THREADS, CACHE> part(p, token, index % parts, scratch);
    wait_on_dependent_grids();
    part.store();
}
